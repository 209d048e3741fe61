"""Recognises optimizers and steps their state at home."""
