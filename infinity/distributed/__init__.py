"""Knows the ranks of a job, and moves bytes between them."""
