"""Endurance: how long a drive lasts under the bytes that training writes to it.

rating   bytes that a drive may be written in all, as its maker promises ("TBW")
life     the years for which makers rate drives; a rating over a life is what may be written a day
"""

from __future__ import annotations

from dataclasses import dataclass

LIFE_YEARS, DAYS, DAY_SECONDS = 5, 365, 86400
TB = 1e12


@dataclass(frozen=True)
class Endurance:
    """What is written to each of ``drives`` in a day of training, in bytes. ``rating``: of one
    drive; None: unknown."""

    drives: int
    daily_nbytes: float
    rating: float | None

    @classmethod
    def of_step(
        cls, written: float, seconds: float, drives: int, rating: float | None
    ) -> Endurance | None:
        """Computes it from the bytes that a step of ``seconds`` writes to all drives of a node;
        None if it writes none."""
        if not written or not seconds:
            return None
        return cls(drives, written / seconds * DAY_SECONDS / drives, rating)

    @property
    def years(self) -> float | None:
        """Years until a drive has been written as much as it is rated for."""
        return None if self.rating is None else self.rating / self.daily_nbytes / DAYS

    @property
    def is_above(self) -> bool:
        """Whether more is written a day than the rating allows over a drive's life."""
        return self.years is not None and self.years < LIFE_YEARS

    @property
    def line(self) -> str:
        """The line of a plan."""
        drives = "the drive" if self.drives == 1 else f"each of {self.drives} drives"
        said = f"endurance: {self.daily_nbytes / TB:,.3g} TB written a day to {drives}"
        if self.years is None or self.rating is None:
            return f"{said}; for its life in years: --drive-rating 1200TB"
        days = self.years * DAYS
        lasts = f"{days:,.0f} days" if days < 2 * DAYS else f"{self.years:,.3g} years"
        said += f"; its rating of {self.rating / TB:,.0f} TB, to which its maker warrants it, is"
        said += f" reached in {lasts} of training"
        if not self.is_above:
            return said
        return (
            f"{said}. WARNING: {LIFE_YEARS / self.years:,.3g} times what the rating allows over"
            f" {LIFE_YEARS} years"
        )
