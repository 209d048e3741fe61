"""Tiers, and the ledger that keeps their budgets.

tier    where bytes lie: ``device`` (the compute device), ``host`` (memory), ``nvme`` (disk)
charge  bytes of a tier that someone holds, for as long as it is held
plan    the most a tier is expected to be charged, known before the first step
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum

from . import native
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
class Ledger:
    """Charges every byte the engine holds to its tier and refuses what exceeds the budget.

    ``accounts``: of each tier, the bytes charged now, the most that ever were, those planned, and the limit (None: none was
    given). A charge is a :class:`native.Charge`, which gives the bytes back when it is released or nobody holds it.
    """

    accounts: dict[Tier, native.Account] = field(default_factory=lambda: {tier: native.Account() for tier in Tier})

    def reserve(self, tier: Tier, nbytes: int, what: str, *, passing: bool = False) -> native.Charge:
        """Charges ``nbytes`` for ``what``. ``passing``: for no longer than the forward or backward that is running. Raises
        CapacityError, with nothing charged, when over the budget."""
        account = self.accounts[tier]
        charge = account.charge(nbytes, passing)
        if charge is None:
            charged, budget = account.charged_nbytes, account.budget_nbytes
            raise CapacityError(
                f"{what} needs {format_nbytes(nbytes)} of {tier} memory, but {format_nbytes(charged)} "
                f"of {format_nbytes(budget)} is in use. Raise Config({BUDGETS[tier]}=...) by at least "
                f"{format_nbytes(charged + nbytes - budget)}."
            )
        return charge

    def forget_passing(self) -> None:
        """Gives back what was charged for a forward or backward that was given up, whoever still refers to it."""
        for account in self.accounts.values():
            account.forget_passing()
