"""Lands the gradients of an embedding use by use, without whole ones in between."""
