"""The running model: passes, hooks on modules, prefetching, activations, the backward, recovery."""
