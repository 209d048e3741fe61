"""`infinity attention`."""
