"""`infinity generate`."""
