"""Shares: divides each batch over data ranks by how fast they compute."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

from torch import nn

from ...core.run.job import Job
from ...core.run.operations import IDLE, Call, OperationKind, Right
from ...core.run.registry import Wrapped, wrapped, wrapped_here
from ...core.wrap.agreement import compare, least
from ...errors import ConfigError, UsageError
from ...ranks.parallel_dims import ParallelDims
from ..blocks.micro_batch import refuse_batch_norm
from .pace import Pace
from .paces import Split

logger = logging.getLogger(__name__)

PER_SECOND = 10**12  # paces are exchanged as whole picoseconds


class ShareOperation(OperationKind):
    """The call that divides batches."""

    DIVIDE = Call("dividing a batch by infinity.Shares", IDLE - {Right.OWN_WEIGHTS})


class Shares:
    """Divides batches over data ranks of unlike speed: each computes whole samples, as many as its
    speed allows.

        shares = infinity.Shares(batch=96)
        for step in range(steps):
            x = batch_of(step)[shares.slice]
            model(x).mean_loss().backward()
            optimizer.step(); optimizer.zero_grad(); shares.after_step()

    batch
        Samples of one step, over all ranks. Each step has all of them.
    tokens
        Tokens of one step instead, if a batch is one row of tokens and the loss a mean over them.
    model
        The wrapped model. None: the one that this process trains.

    The loss of a rank is the mean over its own part. The engine weighs its gradients by its share,
    so data and gradients are those of an even split. Shares follow the seconds of the forwards:
    they are compared every 20 steps, and change if steps become 3 % faster by it (after Gavel,
    Narayanan et al. 2020, which gives jobs to GPUs by measured rates). The weights hold until this
    object is gone. Ranks of one tp group have one share.

    Every rank makes one, and makes the same calls. Raises ConfigError for fewer samples than ranks,
    for batch norm, and for a ``cp``, ``pp`` or divided ``ep`` axis; UsageError for a model that is
    not wrapped, or if several are trained here and none is given.
    """

    def __init__(
        self,
        *,
        batch: int | None = None,
        tokens: int | None = None,
        model: nn.Module | None = None,
    ):
        record = wrapped(model) if model is not None else _trained_here()
        self._job = record.engine.job
        self._collectives = collectives = self._job.collectives
        self._job.uses.check(ShareOperation.DIVIDE)
        with collectives.together("checking what Shares was given"):
            total = _checked_batch(batch, tokens, collectives.ranks)
            refuse_batch_norm("Shares", "", record.model)
            self._refuse_half_done()
        with self._job.uses.operation(ShareOperation.DIVIDE):
            unit = "samples" if tokens is None else "tokens"
            compare(collectives, {"the batch": f"{total} {unit}"}, "Shares")
            self._split = Split(total, collectives.ranks.data_size)
            self._pace = self._job.add(Pace(self._job.device))
            collectives.weigh_by(self._split)
        self._finalizer = weakref.finalize(self, _end, self._job, self._split, self._pace)

    @property
    def slice(self) -> slice:
        """This rank's part of the batch of the present step."""
        rank, shares = self._collectives.ranks.data_rank, self._split.shares
        begin = sum(shares[:rank])
        return slice(begin, begin + shares[rank])

    def after_step(self) -> bool:
        """Counts a step, and divides the batch anew if that is due and pays. Every rank calls this
        after ``zero_grad()``. Returns whether shares have changed.

        Raises UsageError if gradients wait for their step, or another Shares has the model.
        """
        split, ranks = self._split, self._collectives.ranks
        with self._operation():
            if not split.note(self._pace.take() / split.shares[ranks.data_rank]):
                return False
            before, gain = split.said, split.choose(self._everyones_paces())
        if gain is not None and ranks.is_first:
            logger.info(
                "steps%s: by their forwards %.2f times as fast as%s", split.said, gain, before
            )
        return gain is not None

    def _everyones_paces(self) -> list[float]:
        """Exchanges paces. A data rank of several processes has the slowest one's."""
        ranks = self._collectives.ranks
        mine = [0] * ranks.data_size
        mine[ranks.data_rank] = -max(1, int(self._split.pace * PER_SECOND))
        if not ranks.alone:
            mine = least(self._collectives, mine, "Shares.after_step")
        return [-pace / PER_SECOND for pace in mine]

    def _operation(self) -> Any:
        """Opens the scope of a change. Raises UsageError where weights may not change."""
        scope = self._job.uses.operation(ShareOperation.DIVIDE)
        if self._collectives.weighing is not self._split:
            raise UsageError(
                "this Shares ended when another one was made for the same model: use the newer one"
            )
        self._refuse_half_done()
        return scope

    def _refuse_half_done(self) -> None:
        if waiting := self._job.steps.backwards:
            raise UsageError(
                f"Shares: the gradients of {waiting} backwards, weighed by the present shares, wait"
                " for their step. Call it after optimizer.step() and zero_grad()."
            )

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        """Returns the shares, equal on all ranks, for ``Checkpoints(extra=shares.state_dict)``."""
        return {"shares": list(self._split.shares)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the shares of :meth:`state_dict`; of another batch, in proportion. If they are of
        another number of ranks, these begin with even ones. Every rank calls this, between two
        steps. Raises ConfigError for anything else than shares, or if ranks give different ones."""
        shares = state.get("shares") if isinstance(state, dict) else None
        if not isinstance(shares, list) or not all(_is_count(share) for share in shares):
            raise ConfigError(
                f"Shares.load_state_dict: {state!r:.80} is not a state of Shares: give what"
                " state_dict() returned"
            )
        with self._operation():
            described = {"the shares": str(shares)}
            compare(self._collectives, described, "Shares.load_state_dict")
            if len(shares) != self._split.ranks:
                shares = [1] * self._split.ranks
            self._split.take([1 / share for share in shares])


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _checked_batch(batch: Any, tokens: Any, ranks: ParallelDims) -> int:
    """Returns the size of a batch. Raises ConfigError for one that these ranks cannot share."""
    if (batch is None) == (tokens is None):
        raise ConfigError("Shares: give batch, the samples of a step, or tokens instead")
    name, total = ("batch", batch) if tokens is None else ("tokens", tokens)
    if not _is_count(total):
        raise ConfigError(f"Shares: {name}={total!r} must be a whole number from 1")
    if total < ranks.data_size:
        raise ConfigError(
            f"Shares: {name}={total} for {ranks.data_size} data ranks, each of which computes at"
            f" least one. Set it to {ranks.data_size} or more, or start fewer ranks."
        )
    axes = {
        "cp": (ranks.cp_group, "its ranks have parts of the same samples"),
        "pp": (ranks.pp_group, "its micro-batches must be equal"),
        "ep": (ranks.expert_group, "its experts add up gradients of other ranks' samples"),
    }
    for axis, (group, why) in axes.items():
        if group is not None:
            raise ConfigError(
                f"Shares: not with a mesh that has a {axis} axis: {why}. Leave Shares out, and give"
                " each data rank an equal part."
            )
    return total


def _trained_here() -> Wrapped:
    """Finds the model that this process trains. Raises UsageError if there is none, or several."""
    find = lambda: [each for each in wrapped_here() if each.engine.job.trained]
    models = find()
    if len(models) > 1:
        gc.collect()  # dropped models, which reference cycles keep
        models = find()
    if len(models) != 1:
        raise UsageError(
            f"Shares: {len(models)} wrapped models are trained in this process. "
            + (
                "Name one: Shares(..., model=model)."
                if models
                else "Call infinity.wrap_model first."
            )
        )
    return models[0]


def _end(job: Job, split: Split, pace: Pace) -> None:
    """Ends the weights of ``split``, unless another one has taken its place."""
    job.remove(pace)
    if job.collectives.weighing is split:
        job.collectives.weigh_by(None)
