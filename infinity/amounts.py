"""Amounts: reads numbers with units, as users write them."""

from __future__ import annotations

import math
import re

from .errors import ConfigError

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[_letter + "ib"] = _UNITS[_letter] = 1024**_power
    _UNITS[_letter + "b"] = 1000**_power

MOST_NBYTES = 1 << 60  # of a budget


def parse_nbytes(value: int | str | None, name: str) -> int | None:
    """Parses bytes from ``48_000_000``, ``"48GiB"`` or ``"1.5 GB"``; None stays None. Raises
    ConfigError that names ``name``."""
    if value is None:
        return None
    if (
        not isinstance(value, (bool, float))
        and 0 <= (number := number_of(value, _UNITS)) <= MOST_NBYTES
    ):
        return int(number)
    shown = repr(value) if len(str(value)[:100]) < 100 else f"{str(value)[:60]!r}..."
    raise ConfigError(
        f"{name}={shown} is not a size: give bytes as a whole number, or text such as '48GiB' or"
        " '500MB'"
    )


def number_of(value: object, units: dict[str, int]) -> float:
    """Reads text of a number and one of ``units``; NaN for what is neither this nor a number."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
        return float(match[1]) * units.get(match[2].lower(), math.nan) if match else math.nan
    return value if isinstance(value, (int, float)) else math.nan
