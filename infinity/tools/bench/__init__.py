"""Benchmarks of a user's machine: its disk (io), its Adam (adam) and its copies (copy).

theme     one loop of the engine; each has a module here with ``measure(settings) -> Measured``
ceiling   the hardware's limit, measured in the same run: bytes only moved, a disk only read

Benchmarks of the whole engine, and comparisons with other systems, are in `bench/` of a checkout.
"""
