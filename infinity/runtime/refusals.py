"""Refusals: what an engine is not to be asked for while something else goes on."""

from __future__ import annotations

from .. import native
from ..distributed import farewell
from ..distributed.data_ranks import DataRanks
from ..distributed.pending import ranks_lost
from ..errors import InfinityError, UsageError
from .joined_pass import JoinedPass
from .older_weights import OlderWeights
from .passes import Passes
from .weight_average import WeightAverage


class Refusals:
    """The engine, as far as it refuses. Asked before a use of the engine: nothing is changed, so that what goes on does."""

    scopes: native.Scopes
    passes: Passes
    joined: JoinedPass
    average: WeightAverage | None
    older: OlderWeights | None
    ranks: DataRanks

    def meaning_of(self, error: RuntimeError) -> Exception:
        """Returns what is raised for ``error`` of a forward: a collective of torch's own in there,
        as tensor parallelism has them, only says that it
        has lost its connections, or waited in vain."""
        if self.ranks.alone or isinstance(error, InfinityError) or not farewell.BROKEN.search(str(error)):
            return error
        return ranks_lost("a forward", error)

    def refuse_between(self, what: str) -> None:
        """Raises UsageError between the backwards of a joined pass, where gradients are not whole."""
        if self.joined.is_open and not self.scopes.interrupted and not self.passes.is_cut_short:
            raise UsageError(
                f"{what} is not to be had here: gradients of several micro-batches land together, when the `with infinity.accumulate(...)` block or the "
                "pipeline schedule's step is over. Read, clip, step and zero gradients after it."
            )

    @property
    def keeps_older(self) -> bool:
        """Whether an update leaves the weights that it begins with: micro-batches that began with them are under way."""
        return self.older is not None and self.older.is_running

    def refuse_unflushed(self, what: str) -> None:
        """Raises UsageError while a pipeline runs without flush: its stages are not after the same update."""
        if self.keeps_older and not self.scopes.interrupted:
            raise UsageError(
                f"{what} is not to be had while a pipeline runs without flush: its stages are not all after the same update. Do it when run() has "
                "returned, which flushes: between two calls there is one version of the weights."
            )

    def refuse_another_step(self) -> None:
        """Raises UsageError for a step that is not the one of a pipeline that runs without flush."""
        if self.older is not None and self.older.is_between_updates:
            self.refuse_unflushed("optimizer.step()")

    def refuse_averaged(self, what: str) -> None:
        """Raises UsageError while the model has its averages for weights."""
        if self.average is not None and self.average.is_exchanged:
            raise UsageError(f"{what} is not to be had inside `with average.applied()`: the model has its average for weights")
