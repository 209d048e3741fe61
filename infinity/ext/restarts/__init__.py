"""Brings ranks together that torchrun has started again."""
