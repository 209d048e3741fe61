"""Holds a model's state as units of shards, and says what a parameter at home is."""
