"""`infinity top`, `report` and `trace`, and what they read: stats and run files."""
