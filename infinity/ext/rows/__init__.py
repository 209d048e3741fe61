"""Gathers only the rows that a pass needs: experts and embeddings."""
