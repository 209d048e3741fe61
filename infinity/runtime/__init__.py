"""The running model: prefetching of units, activations, hooks on modules, the backward, and the
engine."""
