"""WithoutFlush: runs batches through a pipeline back to back, so that it never empties between
them.

1F1B continues over the end of a batch: forwards of the next one fill the slots in which ranks would
be idle. A stage updates as soon as the batch's last backward on it is done, while micro-batches of
the next batch are in flight. Each of these computes, forward and backward, with the version of the
weights that a rule gives it (:mod:`.version_rules`). PipeDream-2BW's (arXiv 2006.09503, section
3.1) is, with W(0) the weights at the start,

    W(t + 1) = W(t) - lr * f(W(max(t - 1, 0)))

so all stages compute batch t with one version, and two exist at any time.

place   torch's receive buffer of a micro-batch: one for each that can be in flight, reused in turn
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import _batch_p2p, _wait_batch_p2p

from ...core.grads.record import GradState
from ...core.run.engine import Engine
from ...core.run.job import Job
from ...core.run.registry import engine_of
from ...core.step.optimizer import InfinityOptimizer
from ...core.wrap.agreement import compare
from ...errors import ConfigError, UsageError
from ..pipeline.operations import PipelineOperation
from ..pipeline.schedules import SHAPES, attach, in_flight_of, naming_causes, one_pass
from .batch_shapes import Shapes, parts_of, shapes_of
from .stale_weights import StaleWeights
from .version_rules import Action, VersionRule, order_of

ADAMS = ("ADAM", "ADAMW", "Adam with amsgrad", "AdamW with amsgrad")
OF_ADAMS = (
    "gradients are of weights that are older than the last update, which is reported to degrade the"
    " rules of Adam far more than others"
)


def without_flush(
    schedule: Any,
    optimizer: torch.optim.Optimizer,
    *,
    weights: str = "two",
    error_feedback: bool = False,
    quiet: bool = False,
) -> WithoutFlush:
    """Prepares ``schedule`` to run batches without a flush between them, by
    :meth:`WithoutFlush.run`.

    schedule
        torch's Schedule1F1B with a wrapped stage; it is attached (:func:`attach`) if needed. For
        fewer micro-batches than stages torch makes none: give its ScheduleGPipe.
    optimizer
        The one that wrap_model returned: it makes an update for every batch.
    weights
        The versions that micro-batches compute with; of n stages, s is a stage's number from 0:
        ``"two"``: all of a batch with those before the last update (PipeDream-2BW, Narayanan et
        al., 2021). For at least n micro-batches.
        ``"stash"``: each with the stage's newest when its forward begins (PipeDream, Narayanan et
        al., 2019). ``"vertical"``: on all stages with the one of the first (its vertical sync).
        Of m micro-batches in a batch, these keep ceil((n - s - 1) / m) versions beside the newest
        on stage s, and ceil((n - 1) / m).
    error_feedback
        Computes with W + d (W - V), V the version before W, d the updates that it lacks: the
        update corrected by its last change. It keeps one more if d > 0.
    quiet
        Suppresses the warning that the rules of Adam suffer from gradients of stale weights.

    Allocates the versions beside the newest, at their home, until the model is unwrapped. Raises,
    before any change, CapacityError if there is no room, and ConfigError for another schedule or
    rule, a schedule without a loss, too few micro-batches, max_grad_norm.
    """
    rule = _check_schedule(schedule, weights, error_feedback)
    engine = engine_of(schedule._stage.submod)
    job = engine.job
    _check_engine(job, schedule, optimizer)
    attach(schedule)
    with job.uses.begin():
        stale = job.find(StaleWeights) or StaleWeights(job)
        stale.keep(rule.slots)
        if stale not in job.extensions:
            job.add(stale)
    if optimizer.rule_name in ADAMS and not quiet:
        warnings.warn(
            f"without_flush with {optimizer.rule_name}: {OF_ADAMS} (arXiv 2606.30634). Compare a"
            " short run with schedule.step, use SGD or Lion, or pass quiet=True.",
            stacklevel=2,
        )
    return WithoutFlush(engine, schedule, optimizer, rule)


def _check_schedule(schedule: Any, weights: str, corrects: bool) -> VersionRule:
    """Returns the rule ``weights`` for the stage of ``schedule``."""
    kind = type(schedule)
    stage, each = getattr(schedule, "_stage", None), getattr(schedule, "_n_microbatches", 0)
    is_small = kind is ScheduleGPipe and each < stage.num_stages
    if kind is not Schedule1F1B and not is_small:
        raise ConfigError(
            f"without_flush takes torch's Schedule1F1B, not a {kind.__name__}: others have no order"
            " that goes on over the end of a batch. Build a Schedule1F1B of the same stage, or run"
            " this one with a flush between batches (schedule.step)."
        )
    if schedule._loss_fn is None:
        raise ConfigError(
            "without_flush: this schedule has no loss_fn, so it trains nothing: give"
            f" {kind.__name__} one"
        )
    return VersionRule.of(
        weights, stage.stage_index, stage.num_stages, each, corrects=bool(corrects)
    )


def _check_engine(job: Job, schedule: Any, optimizer: Any) -> None:
    if not isinstance(optimizer, InfinityOptimizer) or optimizer.context.uses is not job.uses:
        raise UsageError(
            "without_flush takes the optimizer that wrap_model returned with the schedule's stage"
        )
    if job.config.max_grad_norm is not None:
        raise ConfigError(
            f"without_flush with max_grad_norm={job.config.max_grad_norm}: the norm of all"
            " gradients is known when the last stage is done with a batch, for which all others"
            " would have to wait. Leave max_grad_norm out, or run the schedule with a flush"
            " between batches (schedule.step)."
        )


class WithoutFlush:
    """A schedule that runs batches without a flush between them. Every rank calls :meth:`run`."""

    def __init__(
        self, engine: Engine, schedule: Any, optimizer: InfinityOptimizer, rule: VersionRule
    ):
        self._engine, self._schedule, self._optimizer = engine, schedule, optimizer
        self._rule = rule
        # Called with the batch whose forwards begin on this stage.
        self.on_batch: Callable[[int], None] = lambda number: None

    def run(
        self, batches: Sequence[Any], *, after_update: Callable[[], Any] | None = None
    ) -> list[torch.Tensor] | None:
        """Runs ``batches`` and makes an update for each. When it returns all updates are made, and
        there is one version of the weights: save, evaluate and read then.

        batches
            Pairs (inputs, target), or triples with a dict of keyword arguments for all stages;
            inputs are a tensor or a tuple. The same number on every rank, all of the same shapes.
            Each run may have new shapes: it then runs one more micro-batch, in which stages
            exchange the shapes of their tensors. The first stage reads inputs, the last targets;
            elsewhere both may be None.
        after_update
            Called on each rank after each of its updates, for example a learning rate scheduler's
            ``step``. It must not use the model, or wait for other stages, which are elsewhere.

        Returns the losses of the micro-batches of each batch on the rank of the last stage, None on
        others. Raises UsageError, before any change, for batches that do not fit, for gradients of
        an earlier backward, and inside ``step_in_backward``.
        """
        stage = self._schedule._stage
        batches = list(batches)
        shapes = self._check(batches)
        if not batches:
            return [] if stage.is_last else None
        stale = self._engine.job.find(StaleWeights)
        with naming_causes([stage]), stale.running(self._rule.stale, self._rule.ahead):
            return _Run(
                self._engine,
                self._schedule,
                self._optimizer,
                self._rule,
                batches,
                shapes,
                self.on_batch,
                after_update,
            ).go()

    def _check(self, batches: list[Any]) -> Shapes:
        """Returns the shapes of ``batches``. Drops torch's buffers if any rank's shapes are new. A
        collective."""
        job = self._engine.job
        job.uses.check(PipelineOperation.RUN)
        if not torch.is_grad_enabled():
            raise UsageError(
                "run() trains: call it outside of torch.no_grad(); to evaluate, use schedule.eval"
            )
        with job.uses.begin(), job.collectives.together(PipelineOperation.RUN.call.name):
            if held := [
                handle.name for handle in job.trained if handle.grad.state is not GradState.ABSENT
            ]:
                raise UsageError(
                    f"run() with gradients of an earlier backward ({held[0]}, ...), to which the"
                    " first batch would be added: call optimizer.zero_grad() first"
                )
            shapes = shapes_of(batches, self._schedule)
        inputs = {
            "the number of batches": str(len(batches)),
            "the number of micro-batches": str(self._schedule._n_microbatches),
            "the versions of the weights": self._rule.name,
            "the optimizer's settings": repr(self._optimizer.settings),
        }
        with job.uses.begin():
            compare(job.collectives, inputs, "run()")
            is_new = batches != [] and vars(self._schedule).get(SHAPES) != shapes
            if any(job.collectives.collect(is_new, "the shapes of run()")):
                _forget_shapes(self._schedule)
        return shapes


def _forget_shapes(schedule: Any) -> None:
    """Makes torch infer the stage's shapes, and create its buffers, again at the next batch."""
    vars(schedule).pop(SHAPES, None)
    schedule._stage_forward_initialized = schedule._stage_backward_initialized = False


class _Run:
    """One run: its state and progress."""

    def __init__(
        self,
        engine: Engine,
        schedule: Any,
        optimizer: InfinityOptimizer,
        rule: VersionRule,
        batches: list[Any],
        shapes: Shapes,
        on_batch: Callable[[int], None],
        after_update: Callable[[], Any] | None,
    ):
        self._engine, self._schedule, self._optimizer = engine, schedule, optimizer
        self._batches, self._shapes = batches, shapes
        self._stale = engine.job.find(StaleWeights)
        self._stage, self._rule, self._each = schedule._stage, rule, rule.each
        self._places = max(self._each, self._stage.num_stages)
        self._on_batch, self._after_update = on_batch, after_update
        # The batch whose forwards run, as micro-batches.
        self._split: tuple[int, list, list, Any] = (-1, [], [], None)
        self._losses: dict[int, torch.Tensor] = {}  # of micro-batches before their backward
        self._found: list[list[torch.Tensor]] = [[] for _ in batches]
        self._pass = ExitStack()

    def go(self) -> list[torch.Tensor] | None:
        stage, count = self._stage, len(self._batches) * self._each
        order = list(order_of(stage.stage_index, stage.num_stages, count))
        stage.has_backward = self._schedule._has_backward
        stage.clear_runtime_states()
        with self._pass:
            self._pass.enter_context(one_pass(self._engine, [stage]))
            self._prepare()
            # Posted with the next receives: both neighbours post one of each together.
            sends: list[Any] = []
            work: list[Any] = []  # works of sends that were posted alone
            for at, action in enumerate(order):
                _wait_batch_p2p(_batch_p2p([*sends, *self._receives(action)]))
                if at and self._ends_batch(order[at - 1]):
                    self._update()
                    self._pass.enter_context(one_pass(self._engine, [stage]))
                self._compute(action)
                _wait_batch_p2p(work)
                sends, work = self._sends(action), []
                if at + 1 == len(order) or order[at + 1].is_forward is action.is_forward:
                    sends, work = [], _batch_p2p(sends)
            _wait_batch_p2p(work)
            self._update()
        stage.clear_runtime_states()
        return [torch.stack(losses) for losses in self._found] if stage.is_last else None

    def _prepare(self) -> None:
        """Makes torch create buffers, if it has none for these shapes, by a trial with the first
        micro-batch."""
        args, kwargs, targets = self._micro_batches(0)
        schedule = self._schedule
        schedule._n_microbatches = self._places  # torch makes a buffer for each
        try:
            schedule._initialize_stage(
                args[0], kwargs[0], targets[0] if targets is not None else None, None
            )
        finally:
            schedule._n_microbatches = self._each
        setattr(schedule, SHAPES, self._shapes)

    def _ends_batch(self, action: Action) -> bool:
        return not action.is_forward and (action.number + 1) % self._each == 0

    # --- one action ---

    def _receives(self, action: Action) -> list[Any]:
        stage, place = self._stage, action.number % self._places
        return stage.get_fwd_recv_ops(place) if action.is_forward else stage.get_bwd_recv_ops(place)

    def _compute(self, action: Action) -> None:
        place = action.number % self._places
        self._stale.compute_with(self._rule.version(action.number))
        if action.is_forward:
            self._forward(action.number, place)
            return
        loss = self._losses.pop(place, None)
        self._stage.backward_one_chunk(place, loss=loss, last_backward=self._ends_batch(action))
        if loss is not None:
            self._found[action.number // self._each].append(loss.detach())

    def _forward(self, number: int, place: int) -> None:
        batch, part = divmod(number, self._each)
        args, kwargs, targets = self._micro_batches(batch)
        output = self._stage.forward_one_chunk(
            place, args[part], kwargs[part], save_forward_output=False
        )
        if self._stage.is_last:
            self._losses[place] = self._schedule._compute_loss(output, targets[part])

    def _sends(self, action: Action) -> list[Any]:
        stage, place = self._stage, action.number % self._places
        if action.is_forward:
            return stage.get_fwd_send_ops(place)
        sends = stage.get_bwd_send_ops(place)
        for info in stage.args_recv_info[place]:
            if not info.is_root_arg and info.buffer is not None:
                info.buffer.grad = None  # autograd would add the next batch's gradient to it
        return sends

    def _micro_batches(self, batch: int) -> tuple[list, list, Any]:
        if self._split[0] != batch:
            args, kwargs, target = parts_of(self._batches[batch])
            split = self._schedule._split_inputs(args if self._stage.is_first else (), kwargs)
            targets = torch.tensor_split(target, self._each) if self._stage.is_last else None
            self._split = batch, *split, targets
            self._on_batch(batch)
        return self._split[1:]

    # --- the end of a batch ---

    def _update(self) -> None:
        """Finishes the batch's gradients and makes its update. Other stages' micro-batches continue
        meanwhile."""
        schedule, engine = self._schedule, self._engine
        self._stage.perform_reduce_grad(self._each if schedule.scale_grads else 1)
        self._pass.close()
        self._stale.update(self._optimizer.step)
        self._optimizer.zero_grad()
        with engine.uses.begin():
            in_flight_of(engine).charge()
        if self._after_update is not None:
            self._after_update()
