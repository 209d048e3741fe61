"""Reads and writes the files that users keep."""
