"""LocalSteps: lets groups of ranks train apart over a slow link, and averages them now and then."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from ...core.run.job import Job
from ...core.run.operations import IDLE, Call, OperationKind
from ...core.run.registry import Wrapped, wrapped
from ...core.units.handle import handle_of
from ...core.units.unit import ParamUnit
from ...core.wrap.module_settings import describe_order
from ...errors import ConfigError, PeerError, UsageError
from .averaging_schedule import SKEW, AveragingSchedule
from .climber import Climber
from .outer_step import OuterSettings, OuterStep, Position
from .over_groups import OverGroups
from .slow_axis import SlowAxis


class LocalOperation(OperationKind):
    """The calls of LocalSteps."""

    LOCAL_STEPS = Call("LocalSteps", IDLE)


class LocalSteps:
    """Averages the groups of a job, each of which trains by itself, every so many steps.

        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("slow", "dp"))
        model, optimizer = infinity.wrap_model(model, optimizer, config, mesh=mesh["dp"])
        local = infinity.LocalSteps(model, mesh["slow"], every=100)
        for batch in loader:
            ...
            optimizer.step()
            optimizer.zero_grad()
            local.after_step()

    every
        Steps from one average of a unit to the next. ``"quadratic"``: the square of ``coefficient``
        over the learning rate, at least ``least`` (Gu et al. 2024, QSR). ``"skew"``: a period
        from 1 to 512, by how much the groups' data differ (Hsieh et al. 2020, SkewScout).
    lr, momentum
        Of the outer optimizer, SGD with Nesterov momentum (Douillard et al. 2023, DiLoCo). ``lr=1,
        momentum=0`` is the plain mean of the groups. Then ``every=1`` averages the gradients
        before each step: the bits of data parallelism, for every optimizer, if the micro-batches
        of a step are in :func:`infinity.accumulate`.
    stream
        Whether units are averaged one after the other, spread evenly over the period (Douillard et
        al. 2025, Streaming DiLoCo); else all after its last step.
    delay, alpha
        An average is applied ``delay`` steps after it was sent, so that nothing waits for the link.
        ``alpha`` is the share of the group's own value that stays in it.
    codes
        Whether values travel as 8-bit codes, one scale per block of 256.
    probe
        For ``"skew"``: a function that is given the number of a group and returns the accuracy,
        from 0 to 1, of the present model on that group's data. Called for this group and the next
        one, every ``probe_every`` steps, at the end of a period.

    The anchor and the momentum, 8 bytes a parameter, have their homes where the masters have
    theirs; a plain mean without codes needs none. The inner optimizer's state stays each group's
    own. The first group's weights are used. :func:`infinity.save_checkpoint` saves all of it, in
    the middle of a period too: each group saves to a folder of its own (``local.group``).

    Every rank makes one after the wrap, and each calls ``after_step()`` as often. Raises
    ConfigError for arguments that do not fit or differ between the groups, UsageError for a model
    without an optimizer at home, CapacityError if there is no room.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Any,
        every: int | str = 100,
        *,
        lr: float = 0.7,
        momentum: float = 0.9,
        stream: bool = True,
        delay: int = 0,
        alpha: float = 0.0,
        codes: bool = False,
        least: int = 4,
        coefficient: float | None = None,
        probe: Callable[[int], float] | None = None,
        probe_every: int = 200,
    ):
        self._schedule = AveragingSchedule(every, stream, delay, least, coefficient, probe_every)
        self._probe = probe
        settings = OuterSettings(lr, momentum, alpha)
        _check(self._schedule, settings, probe, codes)
        record = wrapped(model)
        _refuse(record)
        # Users hold this, which must not keep the homes alive.
        self._record = weakref.ref(record)
        self._hooks: list[Any] = []
        job = record.engine.job
        with job.uses.operation(LocalOperation.LOCAL_STEPS), job.store.guard:
            axis = SlowAxis(mesh, job.traffic, compresses=codes)
            try:
                axis.compare(_describe(job, self._schedule, settings, codes), "LocalSteps")
                job.add(self._make_outer(job, axis, settings))
            except BaseException:
                axis.close()
                raise
            if self._averages_gradients:
                self._hooks = [
                    optimizer.register_step_pre_hook(OverGroups(optimizer.context, axis))
                    for optimizer in record.optimizers
                ]

    def _make_outer(self, job: Job, axis: SlowAxis, settings: OuterSettings) -> OuterStep:
        position = Position(steps=0, at=0, period=self._period(Climber()))
        outer = OuterStep(
            job.kept,
            job.units,
            axis,
            settings,
            most=self._schedule.most_at_once(len(job.units)),
            release=job.prefetcher.release_all,
            position=position,
        )
        try:
            outer.take_first()
        except BaseException:
            outer.free()
            raise
        return outer

    @property
    def _alive(self) -> Wrapped:
        record = self._record()
        if record is None or not record.engine.is_open or _outer_of(record) is None:
            raise UsageError("LocalSteps went with its model, which was unwrapped or is gone")
        return record

    @property
    def _outer(self) -> OuterStep:
        return cast("OuterStep", _outer_of(self._alive))

    @property
    def _averages_gradients(self) -> bool:
        settings = self._outer.settings
        return self._schedule.every == 1 and settings.is_plain and not settings.alpha

    @property
    def group(self) -> int:
        """The number of this rank's group."""
        return self._outer.axis.group_index

    @property
    def period(self) -> int:
        """The steps of the running period."""
        return self._outer.position.period

    @property
    def steps(self) -> int:
        """The steps that were counted, over all runs."""
        return self._outer.position.steps

    def remove(self) -> None:
        """Frees the anchors and momenta, and lets the groups train apart. Every rank calls this."""
        record, outer = self._alive, self._outer
        with record.engine.uses.operation(LocalOperation.LOCAL_STEPS):
            outer.free()
            record.engine.job.remove(outer)
            for hook in self._hooks:
                hook.remove()

    # --- steps ---

    @torch.no_grad()
    def after_step(self) -> bool:
        """Counts a step, and averages the units that are due. Every rank of every group calls
        this after ``optimizer.step()``. Returns whether the groups have the same weights now:
        after the last step of a period that is not streamed.

        If an exception interrupts it, the next use of the model completes it. Waits for the updates
        of these units, and for other groups if ``delay`` steps were not enough. Raises PeerError if
        a group is gone, UsageError if one has made another number of steps. An exception of
        ``probe`` is raised after the average; it leaves the period as it is.
        """
        outer, job, error = self._outer, self._alive.engine.job, None
        job.uses.check(LocalOperation.LOCAL_STEPS)  # this also completes an interrupted one
        outer.refuse_others(job.units)
        position = outer.position
        climber, probed = Climber(*position.climber), position.probed
        is_last = position.at + 1 == position.period
        due = probed + self._schedule.probe_every
        if self._probe is not None and is_last and position.steps + 1 >= due:
            error, probed = self._observe(self._probe, climber), position.steps + 1
        with job.uses.operation(LocalOperation.LOCAL_STEPS), job.store.guard:
            after = Position(
                steps=position.steps + 1,
                at=0 if is_last else position.at + 1,
                period=self._period(climber) if is_last else position.period,
                probed=probed,
                climber=[climber.period, [list(each) for each in climber.memory]],
            )
            calls = [] if self._averages_gradients else self._calls(outer)
            job.journal.carry_out(partial(_carry_out, outer, calls, [0], after))
        if error is not None:
            raise error
        is_at_once = not self._schedule.stream or self._averages_gradients or len(outer.units) == 1
        return is_last and is_at_once and outer.is_whole

    def _calls(self, outer: OuterStep) -> list[Callable[[], None]]:
        """Lists what this step does. Each may be repeated until the next one has begun."""
        step, period = outer.position.steps + 1, outer.position.period
        steps = self._schedule.averaging_steps(len(outer.units), period)
        units = [unit for unit, at in zip(outer.units, steps) if at == outer.position.at + 1]
        due = [unit for unit in outer.due(step) if unit not in units]
        calls: list[Callable[[], None]] = [partial(outer.finish, unit) for unit in due]
        ahead: list[ParamUnit] = []
        for unit in units:
            calls.append(partial(outer.finish, unit))  # of the period before, if it was longer
            calls.append(partial(outer.start, unit, step + self._schedule.delay, (step, period)))
            ahead += [] if self._schedule.delay else [unit]
            if len(ahead) > 1:
                calls.append(partial(outer.finish, ahead.pop(0)))
        return calls + [partial(outer.finish, unit) for unit in ahead]

    # --- the period ---

    def _period(self, climber: Climber) -> int:
        record = self._record()
        groups = record.optimizers[0].param_groups if record is not None else [{"lr": 0.0}]
        return self._schedule.period(climber, float(groups[0]["lr"]))

    def _observe(self, probe: Callable[[int], float], climber: Climber) -> BaseException | None:
        """Probes the model on the data of this group and of the next one, and moves the period.
        Returns the error of a probe, here or in another group; then it does not move."""
        outer, error, scores = self._outer, None, [0.0, 0.0]
        groups, collectives = outer.axis.size, self._alive.engine.job.collectives
        try:
            with torch.enable_grad():
                own, other = self.group, (self.group + 1) % groups
                scores = [_score(probe(group)) for group in (own, other)]
        except BaseException as raised:  # noqa: BLE001  the other groups wait for this one
            error = raised
        failure = None if error is None else f"{type(error).__name__}: {error}"
        of_group = collectives.collect((scores, failure), "probes of a group")
        everyones = [
            each for line in outer.axis.collect(of_group, "probes of all groups") for each in line
        ]
        if failed := [failure for _, failure in everyones if failure is not None]:
            return error or PeerError(f"the probe of another rank failed: {failed[0]}")
        gaps = [own - other for (own, other), _ in everyones]
        climber.observe(sum(gaps) / len(gaps))
        return None


def _carry_out(
    outer: OuterStep, calls: Sequence[Callable[[], None]], done: list[int], after: Position
) -> None:
    while done[0] < len(calls):
        calls[done[0]]()
        done[0] += 1
    outer.position = after


def _score(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"probe returned {value!r}, not an accuracy from 0 to 1") from error


def _check(schedule: AveragingSchedule, settings: OuterSettings, probe: Any, codes: bool) -> None:
    """Raises ConfigError for arguments that do not fit together."""
    if (schedule.every == SKEW) != (probe is not None) or not callable(probe or float):
        raise ConfigError(
            f"every={schedule.every!r} with probe={probe!r}: a probe goes with {SKEW!r}, which"
            " needs it"
        )
    most = {"lr": math.inf, "momentum": 1, "alpha": 1}
    for name, value in asdict(settings).items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 <= value < most[name] or (name == "lr" and not value):
            raise ConfigError(f"{name}={value!r}: give a number from 0 to below {most[name]}")
    if codes and settings.is_plain and schedule.every == 1:
        raise ConfigError("codes with every=1, lr=1 and momentum=0: gradients travel as they are")


def _outer_of(record: Wrapped) -> OuterStep | None:
    return record.engine.job.find(OuterStep)


def _refuse(record: Wrapped) -> None:
    """Raises UsageError for a model that has no groups to average."""
    trained = record.engine.job.trained
    if not trained:
        raise UsageError("this model was wrapped without an optimizer: its weights do not change")
    if _outer_of(record) is not None:
        raise UsageError("this model has LocalSteps already: call its remove() first")
    outside = [
        param
        for optimizer in record.optimizers
        for group in optimizer.param_groups
        for param in group["params"]
        if handle_of(param) is None
    ]
    wide = [h.name for h in trained if h.flat_param.spec.dtype == torch.float64]
    if outside or wide:
        raise UsageError(
            f"LocalSteps averages parameters at home, in fp32: {len(outside)} are trained"
            f" elsewhere, {len(wide)} are in fp64 {wide[:1]}"
        )


def _describe(
    job: Job, schedule: AveragingSchedule, settings: OuterSettings, codes: bool
) -> dict[str, Any]:
    """Describes what all groups must have in common."""
    ranks = job.ranks
    flats = [flat for unit in job.units for flat in unit.flat_params]
    return {
        "the period": schedule,
        "the outer optimizer": (settings, codes),
        "place in its group": (ranks.data_rank, ranks.tp_rank, ranks.pp_rank),
        "size of the group": (ranks.data_size, ranks.size, ranks.tp_size),
        "parameters": [(flat.layout.numel, flat.spec.dtype, flat.spec.stepped) for flat in flats],
        "names": [name for flat in flats for name in flat.names],
        "the memory order of the parameters": [
            describe_order(place.shape, place.stride)
            for flat in flats
            for place in flat.layout.placements
        ],
    }
