"""Averages of trained weights, at home."""
