"""Benchmarks of a user's own machine: its disk (io), its Adam (adam) and its copies (copy).

theme     one loop of the engine; each has a module here with ``measure(settings) -> Measured``
ceiling   what the hardware allowed in the same run: memory that is only moved, a disk that is only read

The benchmarks of the engine itself, and those beside other systems, are in `bench/` of a checkout.
"""
