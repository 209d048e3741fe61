"""Scripts that know nothing of Infinity, run with their models at home."""
