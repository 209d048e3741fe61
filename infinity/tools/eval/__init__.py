"""`infinity eval`."""
