"""Units, flat params and their arrays, and the memory of gathered weights."""
