"""`infinity export`."""
