"""`infinity train`: data, model, loop, progress, report."""
