"""Shares: of a time, by what the training thread waited for in it."""

from __future__ import annotations

from collections.abc import Mapping

COMPUTE = "compute"  # and Python: what is no wait


def shares_of(seconds: float, waits: Mapping[str, float]) -> dict[str, float]:
    """Returns the share of ``seconds`` that each of ``waits`` took, and the compute. They sum to
    1."""
    waited = sum(waits.values())
    total = max(seconds, waited)
    if not total:
        return {COMPUTE: 1.0} | dict.fromkeys(waits, 0.0)
    return {COMPUTE: (total - waited) / total} | {
        name: wait / total for name, wait in waits.items()
    }


def shares_text(shares: Mapping[str, float]) -> str:
    """Writes shares as "compute 62 %, disk 11 %", without those below half a percent."""
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)
