"""WithoutFlush: runs batches through a pipeline back to back, so that it never empties between
them.

1F1B continues over the end of a batch: forwards of the next one fill the slots in which ranks would
be idle. A stage updates as soon as the batch's last backward on it is done, while micro-batches of
the next batch are in flight. PipeDream-2BW's rule (arXiv 2006.09503, section 3.1) keeps that exact:
with W(0) the weights at the start,

    W(t + 1) = W(t) - lr * f(W(max(t - 1, 0)))

so all stages compute batch t, forwards and backwards, with one version of the weights, and two
versions exist at any time.

place   torch's receive buffer of a micro-batch: one for each of a batch, reused in turn
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.pipelining.schedules import _batch_p2p, _wait_batch_p2p

from ..errors import ConfigError, UsageError
from ..gradients.record import GradState
from ..optim.optimizer import InfinityOptimizer
from ..runtime.engine import Engine
from ..runtime.job import Job
from ..runtime.registry import engine_of
from ..runtime.stale_weights import StaleWeights
from ..state.operations import Operation
from .schedules import SHAPES, attach, in_flight_of, naming_causes, one_pass

ADAMS = ("ADAM", "ADAMW", "Adam with amsgrad", "AdamW with amsgrad")

# Names, shapes and dtypes of a batch's tensors.
Shapes = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]


class Action(NamedTuple):
    """One forward or backward of a stage."""

    is_forward: bool
    number: int  # micro-batch, counted over all batches


def order_of(stage: int, stages: int, count: int) -> Iterator[Action]:
    """Yields the actions of a ``stage`` of ``stages`` for ``count`` micro-batches: 1F1B, from the
    first to the last."""
    ahead = min(count, stages - stage)
    for number in range(ahead):
        yield Action(True, number)
    for number in range(count):
        yield Action(False, number)
        if number + ahead < count:
            yield Action(True, number + ahead)


def without_flush(
    schedule: Any, optimizer: torch.optim.Optimizer, *, quiet: bool = False
) -> WithoutFlush:
    """Prepares ``schedule`` to run batches without a flush between them, by
    :meth:`WithoutFlush.run`.

    schedule
        torch's Schedule1F1B with a wrapped stage; it is attached (:func:`attach`) if needed.
    optimizer
        The one that wrap_model returned: it makes an update for every batch.
    quiet
        Suppresses the warning that the rules of Adam suffer from gradients of stale weights.

    Allocates a second version of the weights, at their home, until the model is unwrapped. Raises,
    before any change, CapacityError if there is no room, and ConfigError for another schedule, one
    without a loss, fewer micro-batches than stages, max_grad_norm, speculate.
    """
    _check_schedule(schedule)
    engine = engine_of(schedule._stage.submod)
    job = engine.job
    _check_engine(job, schedule, optimizer)
    attach(schedule)
    with job.uses.begin():
        if engine.stale is None:
            engine.stale = StaleWeights(job)
    if optimizer.rule_name in ADAMS and not quiet:
        warnings.warn(
            f"without_flush with {optimizer.rule_name}: gradients are of weights one update old,"
            " which is reported to degrade the rules of Adam far more than others (arXiv"
            " 2606.30634). Compare a short run with schedule.step, use SGD or Lion, or pass"
            " quiet=True.",
            stacklevel=2,
        )
    return WithoutFlush(engine, schedule, optimizer)


def _check_schedule(schedule: Any) -> None:
    if type(schedule) is not Schedule1F1B:
        raise ConfigError(
            f"without_flush takes torch's Schedule1F1B, not a {type(schedule).__name__}: others"
            " have no order that goes on over the end of a batch. Build a Schedule1F1B of the same"
            " stage, or run this one with a flush between batches (schedule.step)."
        )
    if schedule._loss_fn is None:
        raise ConfigError(
            "without_flush: this schedule has no loss_fn, so it trains nothing: give"
            " Schedule1F1B one"
        )
    if schedule._n_microbatches < schedule._stage.num_stages:
        raise ConfigError(
            f"without_flush: {schedule._n_microbatches} micro-batches for"
            f" {schedule._stage.num_stages} stages: a batch would begin before the weights that it"
            f" is to have are made. Use at least {schedule._stage.num_stages} micro-batches."
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
    if job.config.speculate:
        raise ConfigError(
            "without_flush with speculate=True: the room beside the state is for one of them. Leave"
            " speculate out."
        )


class WithoutFlush:
    """A schedule that runs batches without a flush between them. Every rank calls :meth:`run`."""

    def __init__(self, engine: Engine, schedule: Any, optimizer: InfinityOptimizer):
        self._engine, self._schedule, self._optimizer = engine, schedule, optimizer
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
        stale = self._engine.stale
        with naming_causes([stage]), stale.running():
            return _Run(
                self._engine,
                self._schedule,
                self._optimizer,
                batches,
                shapes,
                self.on_batch,
                after_update,
            ).go()

    def _check(self, batches: list[Any]) -> Shapes:
        """Returns the shapes of ``batches``. Drops torch's buffers if any rank's shapes are new. A
        collective."""
        job = self._engine.job
        job.uses.check(Operation.PIPELINE_RUN)
        if not torch.is_grad_enabled():
            raise UsageError(
                "run() trains: call it outside of torch.no_grad(); to evaluate, use schedule.eval"
            )
        with job.uses.begin(), job.collectives.together(Operation.PIPELINE_RUN.value):
            if held := [
                handle.name for handle in job.trained if handle.grad.state is not GradState.ABSENT
            ]:
                raise UsageError(
                    f"run() with gradients of an earlier backward ({held[0]}, ...), to which the"
                    " first batch would be added: call optimizer.zero_grad() first"
                )
            shapes = _shapes_of(batches, self._schedule)
        told = {
            "the number of batches": str(len(batches)),
            "the number of micro-batches": str(self._schedule._n_microbatches),
            "the optimizer's settings": repr(self._optimizer.settings),
        }
        with job.uses.begin():
            job.collectives.compare(told, "run()", over_stages=True)
            is_new = batches != [] and vars(self._schedule).get(SHAPES) != shapes
            if any(job.collectives.collect(is_new, "the shapes of run()")):
                _forget_shapes(self._schedule)
        return shapes


def _forget_shapes(schedule: Any) -> None:
    """Makes torch infer the stage's shapes, and create its buffers, again at the next batch."""
    vars(schedule).pop(SHAPES, None)
    schedule._stage_forward_initialized = schedule._stage_backward_initialized = False


def _shapes_of(batches: list[Any], schedule: Any) -> Shapes:
    """Returns the shapes of each of ``batches``, as far as this stage has them. Raises UsageError
    if torch's buffers, which are shared by all, would not fit every micro-batch."""
    stage, count = schedule._stage, schedule._n_microbatches
    shapes: set[Shapes] = set()
    for number, batch in enumerate(batches):
        if not isinstance(batch, (tuple, list)) or len(batch) not in (2, 3):
            raise UsageError(
                f"run() takes batches (inputs, target) or (inputs, target, kwargs): batch {number}"
                f" is a {type(batch).__name__}"
            )
        args, kwargs, target = _parts(batch)
        given = [("inputs", each) for each in (args if stage.is_first else ())] + [
            ("target", target)
        ] * stage.is_last
        for name, value in given:
            if not isinstance(value, torch.Tensor):
                raise UsageError(
                    f"run(): the {name} of batch {number} are a {type(value).__name__}, not a"
                    " tensor, on a stage that needs them"
                )
            if len(value) % count:
                raise UsageError(
                    f"run(): batch {number} of {len(value)} does not divide into {count}"
                    " micro-batches: give a multiple"
                )
        given += [
            (name, value) for name, value in kwargs.items() if isinstance(value, torch.Tensor)
        ]
        shapes.add(tuple((name, tuple(value.shape), value.dtype) for name, value in given))
    if len(shapes) > 1:
        raise UsageError(
            f"run() takes batches of one shape, these have {len(shapes)}: run those of each shape"
            " by themselves"
        )
    found = next(iter(shapes), ())
    _check_declared(
        stage, [(shape[0] // count, *shape[1:]) for name, shape, _ in found if name == "inputs"]
    )
    return found


def _check_declared(stage: Any, shapes: list[tuple[int, ...]]) -> None:
    """Raises UsageError if a first ``stage`` was built for inputs of other ``shapes``: torch does
    not ask the stages then."""
    declared = getattr(stage, "_user_meta", None)
    if not shapes or declared is None or not declared.inputs or not declared.outputs:
        return
    fixed = [tuple(each.shape) for each in declared.inputs]
    if fixed != shapes:
        raise UsageError(
            f"run(): micro-batches of shapes {shapes} for a stage that was built for {fixed}: build"
            " PipelineStage without input_args and output_args, and batches may have any shape"
        )


def _parts(batch: Sequence[Any]) -> tuple[tuple, dict[str, Any], Any]:
    inputs, target, *rest = batch
    return inputs if isinstance(inputs, tuple) else (inputs,), dict(rest[0]) if rest else {}, target


class _Run:
    """One run: its state and progress."""

    def __init__(
        self,
        engine: Engine,
        schedule: Any,
        optimizer: InfinityOptimizer,
        batches: list[Any],
        shapes: Shapes,
        on_batch: Callable[[int], None],
        after_update: Callable[[], Any] | None,
    ):
        self._engine, self._schedule, self._optimizer = engine, schedule, optimizer
        self._batches, self._shapes = batches, shapes
        self._stage, self._each = schedule._stage, schedule._n_microbatches
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
        self._schedule._initialize_stage(
            args[0], kwargs[0], targets[0] if targets is not None else None, None
        )
        setattr(self._schedule, SHAPES, self._shapes)

    def _ends_batch(self, action: Action) -> bool:
        return not action.is_forward and (action.number + 1) % self._each == 0

    # --- one action ---

    def _receives(self, action: Action) -> list[Any]:
        stage, place = self._stage, action.number % self._each
        return stage.get_fwd_recv_ops(place) if action.is_forward else stage.get_bwd_recv_ops(place)

    def _compute(self, action: Action) -> None:
        batch, place = divmod(action.number, self._each)
        self._engine.stale.compute_for(batch)
        if action.is_forward:
            self._forward(batch, place)
            return
        loss = self._losses.pop(place, None)
        self._stage.backward_one_chunk(place, loss=loss, last_backward=place + 1 == self._each)
        if loss is not None:
            self._found[batch].append(loss.detach())

    def _forward(self, batch: int, place: int) -> None:
        args, kwargs, targets = self._micro_batches(batch)
        output = self._stage.forward_one_chunk(
            place, args[place], kwargs[place], save_forward_output=False
        )
        if self._stage.is_last:
            self._losses[place] = self._schedule._compute_loss(output, targets[place])

    def _sends(self, action: Action) -> list[Any]:
        stage, place = self._stage, action.number % self._each
        if action.is_forward:
            return stage.get_fwd_send_ops(place)
        sends = stage.get_bwd_send_ops(place)
        for info in stage.args_recv_info[place]:
            if not info.is_root_arg and info.buffer is not None:
                info.buffer.grad = None  # autograd would add the next batch's gradient to it
        return sends

    def _micro_batches(self, batch: int) -> tuple[list, list, Any]:
        if self._split[0] != batch:
            args, kwargs, target = _parts(self._batches[batch])
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
        engine.stale.update(self._optimizer.step)
        self._optimizer.zero_grad()
        with engine.uses.begin():
            in_flight_of(engine).charge()
        if self._after_update is not None:
            self._after_update()
