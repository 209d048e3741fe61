"""Decides what lies where and when it moves. Pure: no I/O, nothing is allocated."""
