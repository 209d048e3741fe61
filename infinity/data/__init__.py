"""Data: reads text files as batches of token ids."""
