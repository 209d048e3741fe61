"""Ranks of a job, process groups, and the bytes that pass between ranks."""
