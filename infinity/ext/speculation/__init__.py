"""Updates in the backward, before clipping may change the gradients."""
