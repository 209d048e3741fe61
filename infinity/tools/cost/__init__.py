"""`infinity cost`."""
