"""Layers that are computed tile by tile, and losses without whole logits."""
