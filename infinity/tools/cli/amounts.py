"""Amounts: writes seconds and counts for people."""

from __future__ import annotations


def format_seconds(seconds: float) -> str:
    """Formats seconds to three digits: ``4e-05`` -> ``"40 us"``."""
    shown = float(f"{seconds:.3g}")
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(shown) >= scale:
            return (
                f"{shown / scale:,.0f} {unit}"
                if abs(shown) >= 1000
                else f"{shown / scale:.3g} {unit}"
            )
    return f"{shown / 1e-9:.3g} ns" if shown else "0 s"


def format_count(count: int, what: str) -> str:
    """Formats a count: ``(1, "step")`` -> ``"1 step"``, ``(2000, "step")`` -> ``"2,000 steps"``."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
