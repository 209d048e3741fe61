"""Keeps flat arrays at their homes: host memory, or swap files on NVMe."""
