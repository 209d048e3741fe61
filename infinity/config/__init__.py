"""Checks what a user can choose, once, at wrap_model."""
