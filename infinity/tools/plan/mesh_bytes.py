"""Mesh bytes: counts what each rank of a mesh sends over each of its links."""

from __future__ import annotations


def all_reduce_nbytes(nbytes: float, ranks: int) -> float:
    """Counts the bytes that a rank sends in a ring's all-reduce of ``nbytes``."""
    return 2 * (ranks - 1) / ranks * nbytes


def all_gather_nbytes(nbytes: float, ranks: int) -> float:
    """Counts the bytes that a rank sends in a ring's all-gather, or reduce-scatter, of ``nbytes``
    together."""
    return (ranks - 1) / ranks * nbytes


def boundary_nbytes(tokens: int, width: int, itemsize: int, parts: int = 1) -> float:
    """Counts the bytes that a rank sends to the next stage for a micro-batch of ``tokens``; of
    several ``parts`` each sends one (Narayanan et al., PTD-P, 2021, section 4.1)."""
    return tokens * width * itemsize / parts


def expert_nbytes(tokens: int, width: int, itemsize: int, ranks: int, chosen: int) -> float:
    """Counts the bytes that a rank sends in the forward of a layer of experts over ``ranks``:
    ``tokens`` to ``chosen`` experts each, and back, if all experts are chosen as often. A backward
    sends as many."""
    return 2 * chosen * tokens * width * itemsize * (ranks - 1) / ranks
