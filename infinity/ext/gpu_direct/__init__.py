"""Reads from disk into device memory, without host memory in between."""
