"""The training job of ``infinity train``: model, loop, progress, report."""
