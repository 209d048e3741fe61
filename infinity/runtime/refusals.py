"""Refusals: what an engine is not to be asked for while something else goes on."""

from __future__ import annotations

from enum import Flag, auto

from .. import native
from ..distributed import farewell
from ..distributed.data_ranks import DataRanks
from ..distributed.pending import ranks_lost
from ..errors import InfinityError, UsageError
from ..state.step_counter import StepCounter
from ..storage.store import ShardStore
from .handed_out import HandedOut
from .joined_pass import JoinedPass
from .older_weights import OlderWeights
from .passes import Passes
from .weight_average import WeightAverage


class While(Flag):
    """What else can be going on."""

    JOINED = auto()  # gradients of several micro-batches wait for the end of their pass
    UNFLUSHED = auto()  # a pipeline runs without flush
    AVERAGED = auto()  # the model has its average for weights
    BEGUN = auto()  # part of the units are stepped: between step_in_backward and its step()


# The uses of a model that are more than a pass, and what they are refused in. Values alone may be read while gradients wait; what sets
# values, or takes gradients along, may not.
REFUSED = {
    "state_dict()": While.UNFLUSHED,
    "optimizer.state_dict()": While.UNFLUSHED,
    "optimizer.state": While.UNFLUSHED,
    "full_params": While.UNFLUSHED,
    "save_pretrained": While.UNFLUSHED,
    "save_merged": While.UNFLUSHED,
    "infinity.accumulate": While.UNFLUSHED,
    "load_state_dict()": While.JOINED | While.UNFLUSHED,
    "optimizer.load_state_dict()": While.JOINED | While.UNFLUSHED,
    "full_params(writeback=True)": While.JOINED | While.UNFLUSHED,
    "park": While.JOINED | While.UNFLUSHED,
    "exchanging weights and averages": While.JOINED | While.UNFLUSHED,
    "save_checkpoint": While.JOINED | While.UNFLUSHED | While.AVERAGED | While.BEGUN,
    "load_checkpoint": While.JOINED | While.UNFLUSHED | While.AVERAGED,
    "unwrap_model": While.JOINED | While.UNFLUSHED | While.AVERAGED | While.BEGUN,
}


class Refusals:
    """The engine, as far as it refuses. Asked before a use of the engine: nothing is changed, so that what goes on does."""

    scopes: native.Scopes
    store: ShardStore
    steps: StepCounter
    passes: Passes
    joined: JoinedPass
    average: WeightAverage | None
    older: OlderWeights | None
    ranks: DataRanks
    handed: HandedOut

    def meaning_of(self, error: RuntimeError) -> Exception:
        """Returns what is raised for ``error`` of a forward: a collective of torch's own in there,
        as tensor parallelism has them, only says that it
        has lost its connections, or waited in vain."""
        if self.ranks.alone or isinstance(error, InfinityError) or not farewell.BROKEN.search(str(error)):
            return error
        return ranks_lost("a forward", error)

    @property
    def is_open(self) -> bool:
        """Whether the homes are there."""
        raise NotImplementedError

    def using(self, *, repairing: bool = False) -> native.Scope:
        """Opens the scope that every use of the engine runs in."""
        raise NotImplementedError

    def check_alive(self) -> None:
        """Raises UsageError after :func:`infinity.unwrap_model`, and in a forked child."""
        self.store.check_process()
        if not self.is_open:
            raise UsageError("this optimizer's model was unwrapped: use the optimizer that unwrap_model returned")

    def check_open(self, what: str) -> None:
        """Raises UsageError when the homes are gone, that ``what`` needs."""
        if not self.is_open:
            raise UsageError(
                f"{what} needs weights that went with the engine: run it before unwrap_model, or before the process ends"
            )

    def refuse(self, what: str) -> None:
        """Raises UsageError where ``what`` is refused in something that goes on, by the table. What an exception left is put right first."""
        with self.using(repairing=what == "load_checkpoint"):
            if what != "load_checkpoint":
                self.handed.settle()  # only an exception of that may end what goes on
        refused = REFUSED[what]
        if While.JOINED in refused:
            self.refuse_between(what)
        if While.UNFLUSHED in refused:
            self.refuse_unflushed(what)
        if While.AVERAGED in refused:
            self.refuse_averaged(what)
        if While.BEGUN in refused and self.steps.begun:
            raise UsageError(
                f"{what} between step_in_backward and its step(): part of the units are stepped. Call optimizer.step() first"
            )

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

    def refuse_alike(self, what: str) -> None:
        """Raises UsageError where stages of a pipeline call parameters the same, which one folder could not tell apart."""
        if self.ranks.stage_prefix:
            raise UsageError(
                f"{what}: stages of this pipeline call parameters the same, which one folder cannot tell apart. Give them the names of the whole model "
                "(infinity.parallel.pipeline does), or use save_checkpoint, which puts the stage before the name."
            )
