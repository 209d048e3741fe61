"""attach: makes each step of a pipeline schedule one pass of the engine, for stages of any origin.

A schedule of torch runs many forwards and backwards of the same stages. If attached, its step is
one pass (see `accumulation_pass`). The recorded trace is the schedule's own, so that it determines
fetches and evictions. No gradient is reduced or sent home between micro-batches; gradients land
once. torch's runtime is unchanged except for methods of the stages:

    perform_reduce_grad, scale_grads      record the factor: gradients are scaled after the step
    backward_maybe_with_nosync            lands the gradients of a backward of weights alone, where
                                          torch accumulates none
    forward_maybe_with_nosync             adds the stage to an error, as the backward does
    _post_metadata_inference_cleanup      drops the trace of torch's trial of the stages
"""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from ...core.run.engine import Engine
from ...core.run.job import Job
from ...core.run.registry import engine_of
from ...core.units.handle import handle_of
from ...errors import ConfigError, InfinityError, UsageError
from ...ranks import failure_report
from ...ranks.mesh import gloo_group
from ...ranks.pending import ranks_lost
from ..dtensor.in_common import InCommon
from .between import clear, close
from .in_flight import InFlight
from .operations import PipelineOperation

ATTACHED = "_infinity_attached"
COMPARED = "_infinity_compared"  # on a schedule: its owner compares the ranks' inputs
CUT_SHORT = "_infinity_cut_short"  # on a schedule: an exception ended a step of it
SHAPES = "_infinity_shapes"  # on a schedule: batch shapes of torch's buffers; absent if unknown
NUMBERS: WeakKeyDictionary[Job, int] = WeakKeyDictionary()  # of groups for attached stages
IN_FLIGHT: WeakKeyDictionary[Engine, InFlight] = WeakKeyDictionary()


def attach(schedule: Any) -> Any:
    """Attaches ``schedule``, of torch.distributed.pipelining, to wrapped stages: each ``step`` or
    ``eval`` becomes one pass.

    schedule
        GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble, DualPipeV or
        another of torch's. :func:`infinity.wrap_model` must have wrapped its stages' modules
        together, as a list if a rank has several. The same object is returned; there is no undo.

    Raises ConfigError for another kind of schedule, or stages that are traced, wrapped apart, or
    managed by another library; UsageError if a stage is not wrapped.
    """
    stages = _stages_of(schedule)
    engines = {engine_of(stage.submod) for stage in stages}
    if len(engines) > 1:
        raise ConfigError(
            f"the {len(stages)} stages of this rank were wrapped apart: give wrap_model the list of"
            " their modules in one call, so that they share a window"
        )
    engine = engines.pop()
    in_flight = in_flight_of(engine)
    in_flight.add(stages)
    for stage in stages:
        if not hasattr(stage, ATTACHED):  # else another schedule has attached it
            _attach_stage(stage, engine)
    if not hasattr(schedule, ATTACHED):
        schedule.step = _accumulating_step(
            schedule, engine, stages, in_flight
        )  # eval calls it, too
        setattr(schedule, ATTACHED, True)
    return schedule


def empty(schedule: Any) -> None:
    """Frees the buffers of a ``schedule`` that is no longer run: it and its stages form a reference
    cycle, which only the garbage collector frees."""
    for stage in _stages_of(schedule):
        stage.args_recv_info.clear()
        stage.grad_recv_info.clear()
        stage.group = None  # a reference keeps its connections


def _stages_of(schedule: Any) -> list[Any]:
    stages = getattr(schedule, "_stages", None) or [
        stage for stage in [getattr(schedule, "_stage", None)] if stage is not None
    ]
    if not stages or not callable(getattr(schedule, "step", None)):
        raise ConfigError(
            "attach takes a schedule of torch.distributed.pipelining, not a"
            f" {type(schedule).__name__}"
        )
    for stage in stages:
        if type(stage).__name__ == "_PipelineStage":
            raise ConfigError(
                "attach: this stage was traced by torch.distributed.pipelining.pipeline, which"
                " replaces modules. Build PipelineStages of the model's own modules, or use"
                " infinity.parallel.pipeline."
            )
        if stage.dw_builder is not None:
            raise ConfigError(
                "attach: a stage with a dw_builder of its own computes gradients that the engine"
                " does not see: leave it out"
            )
    return stages


def in_flight_of(engine: Engine) -> InFlight:
    """Returns the object that charges the buffers between the stages of ``engine``."""
    return IN_FLIGHT.setdefault(engine, InFlight(engine))


def _accumulating_step(
    schedule: Any, engine: Engine, stages: list[Any], in_flight: InFlight
) -> Callable:
    job = engine.job
    run, own = schedule.step, _OwnGroup(schedule, job, stages)

    @wraps(run)
    def joined(*args: Any, **kwargs: Any) -> Any:
        job.uses.check(PipelineOperation.SCHEDULE_STEP)
        _refuse_cut_short(schedule, job)
        vars(schedule).pop(SHAPES, None)
        sends = nullcontext()
        if not hasattr(schedule, COMPARED):
            with job.uses.begin():
                _compare(schedule, job, stages, args, kwargs)
            sends = own.sending()
        with naming_causes(stages):
            with one_pass(engine, stages), _noting_cuts(schedule, stages), sends:
                result = run(*args, **kwargs)
            with job.uses.begin():
                in_flight.charge()
            return result

    return joined


class _OwnGroup:
    """The group for transfers of hand-made stages in host memory. An exception closes it: other
    ranks would wait for this one until the limit of a group that is the user's."""

    def __init__(self, schedule: Any, job: Job, stages: list[Any]):
        self._schedule, self._job, self._stages = weakref.ref(schedule), job, stages
        self._own: list[dist.ProcessGroup] = []  # one, or none

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Puts the group in place of the stages' own inside the block. Every rank calls this."""
        ranks, group = self._job.ranks, self._stages[0].group
        if not self._job.device.is_host or dist.get_world_size(group) == 1:
            yield
            return
        if not self._own:
            number = NUMBERS[self._job] = NUMBERS.get(self._job, 0) + 1
            members = dist.get_process_group_ranks(group)
            what = f"attached stages of wrap {ranks.wrap}, number {number}"
            self._own.append(gloo_group(members, what))
            ranks.process_groups.append(self._own[0])
        for stage in self._stages:
            stage.group = self._own[0]
        try:
            yield
        except BaseException as error:
            self._give_back(group)
            for name in ("fwd_recv_ops", "bwd_recv_ops"):  # works keep the connections
                getattr(self._schedule(), name, {}).clear()
            clear(error)
            close(self._own, ranks)
            raise
        self._give_back(group)

    def _give_back(self, group: dist.ProcessGroup) -> None:
        for stage in self._stages:
            stage.group = group


def _compare(
    schedule: Any, job: Job, stages: list[Any], args: tuple, kwargs: dict[str, Any]
) -> None:
    """Raises UsageError if other stages are at another step, or tp ranks have another batch. A
    collective."""
    kind = "training" if getattr(schedule, "_has_backward", True) else "evaluation"
    count, parts = stages[0].num_stages, getattr(schedule, "_n_microbatches", "?")
    said = (
        f"a step of {type(schedule).__name__}, {kind}, of {count} stages with {parts} micro-batches"
    )
    if (of_stages := job.ranks.pp_group) is not None:
        job.collectives.barrier(said, among=[of_stages])
    if (common := job.find(InCommon)) is not None:
        common.compare_batch(said, args, kwargs)


def _refuse_cut_short(schedule: Any, job: Job) -> None:
    if getattr(schedule, CUT_SHORT, False):
        error = UsageError(
            "an exception ended a step of this schedule on this rank, and what its stages have sent"
            " each other may be under way still: the next step would take it for its own. Make the"
            " stages over a new process group (torch.distributed.new_group) and a schedule of them,"
            " on all ranks, and attach that; infinity.parallel.pipeline does so itself."
        )
        job.collectives.fail(error, for_now=True)  # others may wait in the comparison of batches
        raise error


@contextmanager
def _noting_cuts(schedule: Any, stages: list[Any]) -> Iterator[None]:
    """Records on ``schedule`` an exception that came during transfers between ranks, not before."""
    try:
        yield
    except BaseException as error:
        is_under_way = any(
            frame.name == "_step_microbatches"
            for frame in traceback.extract_tb(error.__traceback__)
        )
        setattr(schedule, CUT_SHORT, is_under_way and dist.get_world_size(stages[0].group) > 1)
        raise


@contextmanager
def one_pass(engine: Engine, stages: list[Any]) -> Iterator[None]:
    """Runs attached ``stages`` inside the block as one pass, and scales the gradients when they
    have landed."""
    for stage in stages:
        getattr(stage, ATTACHED).clear()
    common = engine.job.find(InCommon)
    with (
        common.without_comparisons() if common is not None else nullcontext(),
        engine.accumulation.opened(finish=partial(_scale_all, stages)),
    ):
        yield


@contextmanager
def naming_causes(stages: list[Any]) -> Iterator[None]:
    """Re-raises our error that caused torch's, or the one another rank reported."""
    try:
        yield
    except RuntimeError as error:
        if (cause := _typed_cause(error)) is not None:
            # Not from torch's error, which would form a cycle; notes name the stage.
            raise cause from cause.__cause__
        if failure_report.LOST.search(str(error)):
            raise ranks_lost(
                f"a step of the pipeline, stages {', '.join(str(s.stage_index) for s in stages)}"
                " here",
                error,
            ) from error
        raise


def _scale_all(stages: list[Any]) -> None:
    """Divides the gradients of ``stages`` by their recorded factors, as scale_grads does; the
    gradient of a shared parameter once."""
    factors: dict[nn.Parameter, int] = {}
    for stage in stages:
        for factor in getattr(stage, ATTACHED)[-1:]:
            factors = dict.fromkeys(stage.submod.parameters(), factor) | factors
    for param, factor in factors.items():
        if factor != 1 and param.grad is not None:
            param.grad.div_(factor)


def _typed_cause(error: BaseException) -> InfinityError | None:
    """Returns our error among the causes of torch's."""
    cause = error.__cause__
    while cause is not None and not isinstance(cause, InfinityError):
        cause = cause.__cause__
    return cause


def _attach_stage(stage: Any, engine: Engine) -> None:
    forward, backward, noted = stage.forward_maybe_with_nosync, stage.backward_maybe_with_nosync, []
    setattr(stage, ATTACHED, noted)  # divisors of a step's gradients: one, or none

    def note_factor(grad_scale_factor: int) -> None:
        noted.append(grad_scale_factor)

    def forward_here(*args: Any, **kwargs: Any) -> Any:
        with _telling(f"in a forward of stage {stage.stage_index}"):
            return forward(*args, **kwargs)

    def backward_here(backward_type: str, bwd_kwargs: dict, last_backward: bool = False) -> tuple:
        with _telling(f"in a backward of stage {stage.stage_index}"):
            return backward_in_phases(backward_type, bwd_kwargs, last_backward)

    def backward_in_phases(backward_type: str, bwd_kwargs: dict, last_backward: bool) -> tuple:
        if backward_type == "full":
            return backward(backward_type, bwd_kwargs, last_backward=last_backward)
        with engine.uses.begin():
            weights = [_Weight(param) for param in stage.submod.parameters() if param.requires_grad]
            if backward_type == "input":
                outputs, grads, inputs = (
                    bwd_kwargs[key] for key in ("stage_output", "output_grads", "input_values")
                )
                if not any(
                    isinstance(each, torch.Tensor) and each.requires_grad for each in inputs
                ):
                    # All earlier stages are frozen: torch finds weights on paths to inputs, and
                    # would find none.
                    return backward("full", bwd_kwargs, last_backward=last_backward)[0], []
                return stage_backward_input(outputs, grads, inputs, iter(weights))
            if backward_type != "weight":
                raise UsageError(
                    f"this version of torch asks a stage for a backward of kind {backward_type!r},"
                    " which is not known here"
                )
            stage_backward_weight(iter(weights), bwd_kwargs["param_groups"])
            _land(engine, weights)
            return (), None

    stage.perform_reduce_grad = stage.scale_grads = note_factor
    stage.forward_maybe_with_nosync, stage.backward_maybe_with_nosync = forward_here, backward_here
    if (clean_up := getattr(stage, "_post_metadata_inference_cleanup", None)) is not None:

        def begin_anew() -> None:
            clean_up()
            engine.accumulation.begin_anew()

        stage._post_metadata_inference_cleanup = begin_anew


@contextmanager
def _telling(where: str) -> Iterator[None]:
    """Adds the location to an error inside the block: other ranks receive only the error that ends
    this rank."""
    try:
        yield
    except Exception as error:
        error.add_note(where)
        raise


class _Weight:
    """A proxy for a parameter in torch's two-phase backward, which would access a parameter at
    home: its graph node, and its computed gradient."""

    requires_grad = True

    def __init__(self, param: nn.Parameter):
        self.param, self.grad = param, None
        self.grad_fn = torch.autograd.graph.get_gradient_edge(param).node


def _land(engine: Engine, weights: list[_Weight]) -> None:
    for weight in _with_gradient(weights):
        if handle_of(weight.param) is None:
            weight.param.grad = (
                weight.grad if weight.param.grad is None else weight.param.grad + weight.grad
            )
        else:
            engine.backward.land_by_hand(weight.param, weight.grad)
        weight.grad = None


def _with_gradient(weights: list[_Weight]) -> Iterator[_Weight]:
    return (weight for weight in weights if weight.grad is not None)
