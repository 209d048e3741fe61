"""Attention over windows of neighbors."""
