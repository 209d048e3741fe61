"""Replacement forwards: tiled layers, micro-batched blocks, recomputation, and lazy logits."""
