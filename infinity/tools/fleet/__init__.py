"""`infinity fleet`."""
