"""Runs the training job of ``infinity train``: model, loop, progress, report."""
