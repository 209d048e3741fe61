"""Optimizer rules, and the steps of optimizer state at home."""
