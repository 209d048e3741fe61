"""Frozen weights that keep the codes of their files: FP8, MXFP4, GGUF."""
