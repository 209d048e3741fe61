"""Experts divided over ranks."""
