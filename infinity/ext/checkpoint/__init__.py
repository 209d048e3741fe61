"""Reads and writes the files that users keep, and fills models without values from them."""
