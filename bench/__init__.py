"""Microbenchmarks: every loop of the engine beside its physical ceiling and beside the rivals that are installed.

theme     one loop, or one job from end to end; `themes.py` lists them, and each has ``measure(settings) -> Measured``
rival     another system that does the same job in the same run, in turns with ours; a note names each that is absent
ceiling   what the hardware allowed in the same run: memory that is only moved, a disk that is only read

The package is in a checkout only, and runs from its root: `python -m bench <theme>`. Results lie in `bench/results`.
"""
