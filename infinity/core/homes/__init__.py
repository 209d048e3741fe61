"""Flat arrays at their homes: host memory, device memory, or swap files on NVMe."""
