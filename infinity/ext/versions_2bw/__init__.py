"""Pipelines without flush: micro-batches compute with weights of before an update."""
