"""Wraps a model: reads it, checks it, lays it out, sends it home; and takes it back."""
