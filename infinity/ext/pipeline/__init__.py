"""Pipelines of stages, run by torch's schedules."""
