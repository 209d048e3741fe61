"""`infinity verify`, and the receipts that it reads."""
