"""Sizes: formats and rounds byte counts."""

from __future__ import annotations


def format_nbytes(nbytes: float) -> str:
    """Formats bytes: ``1536`` -> ``"1.5 KiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def round_up(value: int, multiple: int) -> int:
    """Returns the smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def round_down(value: int, multiple: int) -> int:
    """Returns the largest multiple of ``multiple`` that is at most ``value``."""
    return value // multiple * multiple
