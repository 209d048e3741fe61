"""Does a share of the work twice, and compares the bits."""
