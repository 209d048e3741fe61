"""Build: makes the job of one wrapped model, and the engine that runs it.

Some of the job's parts call parts that are built after them: the prefetcher and the reducer call
the backward, and every use calls the engine. They find them through a weak reference to the
engine, because the job must not keep it alive.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

from ... import native
from ...config import Config
from ...ranks.collectives import Collectives
from ...torch_private import pop_hooks, push_hooks
from ..grads.bank import GradientBank
from ..grads.reducer import Reducer
from ..homes.store import ArrayStore
from ..machine.device import Device
from ..machine.ledger import Ledger
from ..machine.tiers import Tier
from ..params.borrowed_state import BorrowedState
from ..params.lent import Lents
from ..params.value_edits import ValueEdits
from ..plan.memory_plan import MemoryPlan
from ..plan.unit_sizes import UnitSize
from ..seams import Events, Extension, begin_extensions
from ..step.updates import Updates
from ..units.handle import ParamHandle
from ..units.kept import KeptArrays
from ..units.unit import ParamUnit, flat_params_of
from ..units.weight_storages import WeightStorages
from .engine import Engine
from .job import Job, Planned
from .journal import Journal
from .one_thread import wait_for_others
from .pass_state import Pass
from .prefetch import Explain, Prefetcher
from .resources import Resources, make_store
from .schedule import Schedule
from .shut_down import shut_down
from .step_counter import StepCounter
from .uses import Uses


class Later:
    """The engine, which is built last."""

    def __init__(self) -> None:
        self._engine: weakref.ref[Engine] | None = None

    @property
    def engine(self) -> Engine:
        """The engine. Called only while it exists."""
        return self._engine()

    def set(self, engine: Engine) -> None:
        """Sets the engine."""
        self._engine = weakref.ref(engine)


@dataclass(frozen=True, eq=False)
class _Base:
    """The parts of a job that need no other part to run."""

    config: Config
    plan: MemoryPlan
    units: list[ParamUnit]
    device: Device
    collectives: Collectives
    ledger: Ledger
    store: ArrayStore
    scopes: native.Scopes
    updates: Updates
    schedule: Schedule
    journal: Journal
    running: Pass
    steps: StepCounter
    events: Events
    extensions: list[Extension]


def build_engine(
    config: Config,
    plan: MemoryPlan,
    units: list[ParamUnit],
    sizes: list[UnitSize],
    *,
    stepping: bool,
    device: Device,
    collectives: Collectives,
    share: Fraction = Fraction(1),
    prefix: str = "",
    explain: Explain,
) -> Engine:
    """Allocates the homes and all other lasting memory, and makes the engine.

    ``stepping``: an optimizer steps the parameters. ``share``: this rank's fraction of its machine.
    ``prefix``: see :class:`Job`. ``explain``: see :class:`Prefetcher`. Raises CapacityError or
    StorageError with everything freed.
    """
    base, later = _make_base(config, plan, units, device, collectives, share), Later()
    store, updates = base.store, base.updates
    homes = [flat.homes for flat in flat_params_of(units)]
    recorded, names, closed = updates.recorded, updates.names, base.events.closed
    free = partial(
        shut_down, base.scopes, store, homes, recorded, names, collectives, device, closed
    )
    try:
        resources = Resources(config, plan, units, store)
        if stepping:
            updates.use(resources.make_updater(), device, plan.device_slot_nbytes)
        prefetcher = _make_prefetcher(base, later, explain)
        job = _make_job(
            base, Planned(plan, sizes), resources, later, prefetcher, prefix, stepping=stepping
        )
        engine = Engine(job, resources, free)
        later.set(engine)
        return engine
    except BaseException:
        native.insist(free)
        raise


def _make_base(
    config: Config,
    plan: MemoryPlan,
    units: list[ParamUnit],
    device: Device,
    collectives: Collectives,
    share: Fraction,
) -> _Base:
    """Makes the parts that the others are built on. Allocates no home yet."""
    traffic = collectives.traffic
    ledger = Ledger(share)
    events = Events(moved=traffic.moved)
    extensions = begin_extensions(config, device, collectives, events)
    budgets = (config.device_memory, config.host_memory, config.nvme_capacity)
    for tier, budget in zip(Tier, budgets):
        ledger.limit(tier, budget_nbytes=budget, planned_nbytes=plan.planned_nbytes(tier))
    return _Base(
        config=config,
        plan=plan,
        units=units,
        device=device,
        collectives=collectives,
        ledger=ledger,
        store=make_store(config, plan, ledger, traffic, device, collectives),
        scopes=native.Scopes(push_hooks, pop_hooks),
        updates=Updates(units, traffic),
        schedule=Schedule(),
        journal=Journal(),
        running=Pass(),
        steps=collectives.steps,
        events=events,
        extensions=extensions,
    )


def _make_job(
    base: _Base,
    planned: Planned,
    resources: Resources,
    later: Later,
    prefetcher: Prefetcher,
    prefix: str,
    *,
    stepping: bool,
) -> Job:
    """Makes the parts that run while the model runs, and the job of all."""
    store, steps, journal, collectives = base.store, base.steps, base.journal, base.collectives
    trained: list[ParamHandle] = []
    uses = Uses(
        base.scopes,
        check_process=base.store.check_process,
        wait=partial(wait_for_others, base.scopes),
        prepare=lambda repairing: later.engine.prepare(repairing),
        settle=lambda: later.engine.job.lents.settle(),
    )
    lents = Lents(steps, collectives.ranks, uses)
    gradients = GradientBank(
        store, resources.grad_staging, collectives, in_flight_nbytes=base.plan.landing_nbytes
    )
    averages = stepping and collectives.ranks.data_size > 1
    return Job(
        config=base.config,
        planned=planned,
        units=base.units,
        trained=trained,
        device=base.device,
        collectives=collectives,
        ranks=collectives.ranks,
        prefix=prefix,
        traffic=collectives.traffic,
        ledger=base.ledger,
        store=store,
        uses=uses,
        scopes=base.scopes,
        journal=journal,
        schedule=base.schedule,
        steps=steps,
        storages=WeightStorages(),
        kept=KeptArrays(store, base.units, lambda: steps.index, planned),
        gradients=gradients,
        reducer=_make_reducer(base, gradients, later) if averages else None,
        updates=base.updates,
        borrowed=BorrowedState(store, steps, journal, lents),
        edits=ValueEdits(store, prefetcher, journal, collectives, steps),
        lents=lents,
        prefetcher=prefetcher,
        activations=resources.make_activations(
            placed=any(each.places_saved for each in base.extensions),
            local_size=base.collectives.ranks.local_size,
        ),
        events=base.events,
        extensions=base.extensions,
        running=base.running,
    )


def _make_prefetcher(base: _Base, later: Later, explain: Explain) -> Prefetcher:
    """Makes the prefetcher, which may ask the backward to give way."""
    return Prefetcher(
        base.units,
        base.store,
        base.ledger,
        base.schedule,
        window_nbytes=base.plan.device_window_nbytes,
        autograd_nbytes=base.plan.autograd_nbytes,
        explain=explain,
        units_ahead=base.plan.units_ahead,
        give_way=lambda: later.engine.backward.give_way(),
        collectives=base.collectives,
        device=base.device,
        journal=base.journal,
        running=base.running,
    )


def _make_reducer(base: _Base, gradients: GradientBank, later: Later) -> Reducer:
    """Makes the reducer, which averages gradients over the ranks."""
    steps = base.steps
    reducer = Reducer(
        base.collectives,
        [unit for unit in base.units if any(flat.spec.stepped for flat in unit.flat_params)],
        gradients,
        base.ledger,
        base.schedule,
        lambda unit: later.engine.backward.notify_if_final(unit),
        lambda: steps.streaming,
        base.events.averaged,
        in_buckets=base.plan.in_buckets,
    )
    gradients.reduce_with(reducer.add, reducer.average, reducer.whole)
    return reducer
