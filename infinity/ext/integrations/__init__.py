"""Other libraries' training loops, one file per library."""
