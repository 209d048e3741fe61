"""Runs blocks another way: in tiles, in parts of a batch, again in the backward, without whole logits."""
