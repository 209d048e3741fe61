"""Tells what a GPU waits for, and what settings of its allocator do to a plan."""
