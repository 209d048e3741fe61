"""Microbenchmarks: every loop of the engine beside its physical ceiling and beside the rivals that are installed.

theme     one loop: io, adam, update, pool, copy, step; each module here has ``measure(settings) -> list[Row]``
rival      another system doing the same job in the same run, alternating with ours; absent ones are named, never guessed
ceiling   what the hardware allowed in the same run: memory that is only moved, a disk that is only read
"""
