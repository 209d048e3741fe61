"""Divides batches over ranks by how fast they compute."""
