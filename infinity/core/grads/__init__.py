"""Lands gradients at home, reduces them over the ranks, and lends them as ``p.grad``."""
