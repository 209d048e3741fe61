"""Tensor parallelism by torch's DTensor."""
