"""Ledger: the bytes charged to every tier, against its budget.

charge  bytes of a tier that are in use, for as long as it is held
plan    the most that a tier is expected to be charged, known before the first step
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, field
from fractions import Fraction

from ... import native
from ...errors import CapacityError
from .sizes import format_nbytes
from .tiers import BUDGETS, Tier


@dataclass(eq=False)
class Ledger:
    """Charges every byte that the engine holds to its tier, and refuses charges over the budget.

    ``accounts``: for each tier the bytes charged now, their peak, those planned, and the limit
    (None: none). A :class:`native.Charge` frees its bytes when it is released or collected.
    ``fraction``: this rank's part of the machine's host and NVMe budgets, as users give them.
    """

    fraction: Fraction = Fraction(1)
    accounts: dict[Tier, native.Account] = field(
        default_factory=lambda: {tier: native.Account() for tier in Tier}
    )

    def __post_init__(self) -> None:
        _ledgers.add(self)

    def limit(self, tier: Tier, *, budget_nbytes: int | None, planned_nbytes: int) -> None:
        """Sets the budget of ``tier`` (None: none) and its planned bytes."""
        account = self.accounts[tier]
        account.budget_nbytes, account.planned_nbytes = budget_nbytes, planned_nbytes

    def admit(self, tier: Tier, nbytes: int, purpose: str) -> native.Charge:
        """Charges bytes that were not planned, and adds them to those planned. Raises as
        :meth:`reserve`."""
        charge = self.reserve(tier, nbytes, purpose)
        self.accounts[tier].planned_nbytes += nbytes
        return charge

    def reserve(
        self, tier: Tier, nbytes: int, purpose: str, *, passing: bool = False
    ) -> native.Charge:
        """Charges ``nbytes`` for ``purpose``. ``passing``: at most for the running forward or
        backward. Raises CapacityError, with nothing charged, if over the budget."""
        charge = self.accounts[tier].charge(nbytes, passing)
        if charge is None:
            raise self.refusal(tier, nbytes, purpose)
        return charge

    # Apart: a frame with its own error in a name would keep the graph of a forward that failed.
    def refusal(self, tier: Tier, nbytes: int, purpose: str, how: str = "in use") -> CapacityError:
        """Makes the error of ``purpose``, for which there is no room beside all that is in use, or
        ``how`` else bytes are taken: "planned"."""
        account = self.accounts[tier]
        taken = account.charged_nbytes if how == "in use" else account.planned_nbytes
        budget, fraction = account.budget_nbytes or 0, 1 if tier is Tier.DEVICE else self.fraction
        least = math.ceil((taken + nbytes) / fraction)
        name = BUDGETS[tier]
        error = CapacityError(
            f"{purpose} needs {format_nbytes(nbytes)} of {tier} memory, but"
            f" {format_nbytes(taken)} of {format_nbytes(budget)} is {how}. Raise {name} by at"
            f" least {format_nbytes(least - math.ceil(budget / fraction))}: Config({name}={least})"
        )
        error.needed = {name: taken + nbytes}
        return error

    def room(self, tier: Tier, *, planned: bool = False) -> int | None:
        """Returns the bytes of ``tier`` that may still be charged, or planned; None without a
        limit."""
        account = self.accounts[tier]
        taken = account.planned_nbytes if planned else account.charged_nbytes
        return None if account.budget_nbytes is None else max(0, account.budget_nbytes - taken)

    def forget_passing(self) -> None:
        """Releases the charges of an abandoned forward or backward, even if still referenced."""
        for account in self.accounts.values():
            account.forget_passing()


_ledgers: weakref.WeakSet[Ledger] = weakref.WeakSet()


def ledgers() -> list[Ledger]:
    """Lists the ledgers of this process's engines."""
    return list(_ledgers)
