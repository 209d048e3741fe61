"""Turns text files into batches of token ids."""
