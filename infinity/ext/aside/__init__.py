"""Lets a model run as plain torch where nothing of it moves."""
