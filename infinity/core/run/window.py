"""Window: the device bytes for gathered weights."""

from __future__ import annotations

from ...errors import CapacityError
from ..machine.sizes import format_nbytes


class Window:
    """The planned bytes for gathered weights, and those available now."""

    def __init__(self, planned_nbytes: int):
        self.planned_nbytes = self.nbytes = planned_nbytes

    def widen(self, nbytes: int) -> None:
        """Adds ``nbytes`` to the plan."""
        self.planned_nbytes += nbytes
        self.nbytes += nbytes

    def narrow(self, nbytes: int, *, largest_nbytes: int) -> None:
        """Takes ``nbytes`` of the planned bytes away for another use. Raises CapacityError, with
        nothing changed, if the largest unit would not fit the rest."""
        planned = self.planned_nbytes
        if planned and planned - nbytes < min(largest_nbytes, planned):
            raise CapacityError(
                f"the device window of {format_nbytes(planned)} has to leave"
                f" {format_nbytes(nbytes)} to what passes between stages, but the largest unit"
                f" takes {format_nbytes(largest_nbytes)} with its gradients. Use smaller"
                " micro-batches, or give the most that a rank says."
            )
        self.nbytes = max(0, planned - nbytes)
