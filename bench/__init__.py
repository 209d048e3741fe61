"""Microbenchmarks: every loop of the engine beside its physical ceiling and its rivals.

theme     one loop, or one job from end to end; `themes.py` lists them
rival     another system that does the same job in turns with ours; a note names each that is absent
ceiling   what the hardware allowed in the same run: memory that is only moved, a disk that is only
          read

Each theme has ``measure(settings) -> Measured``.

The package is in a checkout only, and runs from its root: `python -m bench <theme>`. Results are
in `bench/results`.
"""
