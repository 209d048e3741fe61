"""Tiers, and the ledger that keeps their budgets.

tier         where bytes lie: ``device`` (the compute device), ``host`` (memory), ``nvme`` (disk)
reservation  bytes charged to a tier for as long as someone holds it
plan         the most a tier is expected to be charged, known before the first step
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum

from .errors import CapacityError, ConfigError

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[_letter + "ib"] = _UNITS[_letter] = 1024**_power
    _UNITS[_letter + "b"] = 1000**_power


class Tier(StrEnum):
    """Where bytes lie, fastest first."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


BUDGETS = {Tier.DEVICE: "device_memory", Tier.HOST: "host_memory", Tier.NVME: "nvme_capacity"}  # Config's names


def parse_nbytes(value: int | str | None, name: str) -> int | None:
    """Bytes from ``48_000_000``, ``"48GiB"`` or ``"1.5 GB"``; None stays None. Raises ConfigError naming ``name``."""
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)):
        number, unit = match.groups()
        if unit.lower() in _UNITS:
            return int(float(number) * _UNITS[unit.lower()])
    raise ConfigError(f"{name}={value!r} is not a size: give bytes as a whole number, or text such as '48GiB' or '500MB'")


def format_nbytes(nbytes: float) -> str:
    """``1536`` -> ``"1.5 KiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


@dataclass
class Account:
    """One tier's bytes: what is charged now, the most that ever was, what was planned, and the limit."""

    charged_nbytes: int = 0
    peak_nbytes: int = 0
    planned_nbytes: int = 0
    budget_nbytes: int | None = None  # None: no limit was given


class Reservation:
    """Bytes charged to a tier until :meth:`release`. Held by whoever holds the memory."""

    def __init__(self, ledger: Ledger, tier: Tier, nbytes: int, what: str):
        self._ledger, self.tier, self.nbytes, self.what = ledger, tier, nbytes, what

    def release(self) -> None:
        """Gives the bytes back; a second call does nothing."""
        if self._ledger is not None:
            self._ledger.accounts[self.tier].charged_nbytes -= self.nbytes
            self._ledger = None


@dataclass
class Ledger:
    """Charges every byte the engine holds to its tier and refuses what exceeds the budget."""

    accounts: dict[Tier, Account] = field(default_factory=lambda: {tier: Account() for tier in Tier})

    def reserve(self, tier: Tier, nbytes: int, what: str) -> Reservation:
        """Charges ``nbytes`` for ``what``. Raises CapacityError, with nothing charged, when over the budget."""
        account = self.accounts[tier]
        wanted = account.charged_nbytes + nbytes
        if account.budget_nbytes is not None and wanted > account.budget_nbytes:
            raise CapacityError(
                f"{what} needs {format_nbytes(nbytes)} of {tier} memory, but {format_nbytes(account.charged_nbytes)} "
                f"of {format_nbytes(account.budget_nbytes)} is in use. Raise Config({BUDGETS[tier]}=...) by at least "
                f"{format_nbytes(wanted - account.budget_nbytes)}."
            )
        account.charged_nbytes = wanted
        account.peak_nbytes = max(account.peak_nbytes, wanted)
        return Reservation(self, tier, nbytes, what)
