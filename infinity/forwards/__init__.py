"""Replacement forwards: tiled layers, micro-batched blocks, recomputation, lazy logits, and
attention over windows."""
