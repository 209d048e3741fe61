"""Moves a model that rests to the host or to disk, and back."""
