"""The engine: one machine's state machine over units, their homes and their steps.

homes     where flat arrays lie, and how they get there
units     what moves together: layouts, flat params, gathered weights
params    parameters at rest, and the tensors of them that users hold
grads     gradients from autograd to their homes
step      optimizer rules, and their steps at home
run       passes, prefetching, activations, recovery
plan      which home each array has
wrap      wrap_model and its counterpart
"""
