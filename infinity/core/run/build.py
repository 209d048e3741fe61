"""Build: makes the job of one wrapped model, and the engine that runs it.

Some of the job's parts call parts that are built after them: the prefetcher and the reducer call
the backward, and every use calls the engine. They find them through a weak reference to the
engine, because the job must not keep it alive.
"""

from __future__ import annotations

import weakref
from fractions import Fraction
from functools import partial

from ... import native
from ...config import Config
from ...ranks.collectives import Collectives
from ...torch_private import pop_hooks, push_hooks
from ..grads.bank import GradientBank
from ..grads.reducer import Reducer
from ..machine.device import Device
from ..machine.ledger import Ledger
from ..machine.tiers import Tier
from ..params.borrowed_state import BorrowedState
from ..params.lent import Lents
from ..params.value_edits import ValueEdits
from ..plan.memory_plan import MemoryPlan
from ..plan.unit_sizes import UnitSize
from ..seams import Events, begin_extensions
from ..step.updates import Updates
from ..units.kept import KeptArrays
from ..units.unit import ParamUnit, flat_params_of
from ..units.weight_storages import WeightStorages
from .engine import Engine
from .job import Job, Planned
from .journal import Journal
from .one_thread import wait_for_others
from .pass_state import Pass
from .prefetch import Explain, Prefetcher
from .resources import Resources
from .schedule import Schedule
from .shut_down import shut_down
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


def build_engine(
    config: Config,
    plan: MemoryPlan,
    units: list[ParamUnit],
    sizes: list[UnitSize],
    *,
    stepping: bool,
    device: Device,
    collectives: Collectives,
    fraction: Fraction = Fraction(1),
    prefix: str = "",
    explain: Explain,
) -> Engine:
    """Allocates the homes and all other lasting memory, and makes the engine.

    ``stepping``: an optimizer steps the parameters. ``fraction``: this rank's, of its machine.
    ``prefix``: see :class:`Job`. ``explain``: see :class:`Prefetcher`. Raises CapacityError or
    StorageError with everything freed.
    """
    traffic, ranks, steps = collectives.traffic, collectives.ranks, collectives.steps
    events, ledger = Events(moved=traffic.moved), Ledger(fraction)
    extensions = begin_extensions(config, device, collectives, events)
    budgets = (config.device_memory, config.host_memory, config.nvme_capacity)
    for tier, budget in zip(Tier, budgets):
        ledger.limit(tier, budget_nbytes=budget, planned_nbytes=plan.planned_nbytes(tier))
    resources = Resources(config, plan, ledger, device, collectives)
    store = resources.store
    scopes, updates = native.Scopes(push_hooks, pop_hooks), Updates(units, traffic)
    schedule, journal, running, later = Schedule(), Journal(), Pass(), Later()
    homes, names = [flat.homes for flat in flat_params_of(units)], updates.names
    free = partial(
        shut_down,
        *(scopes, store, homes, updates.recorded, names, collectives, device, events.closed),
    )
    try:
        resources.allocate(units)
        if stepping:
            updates.use(resources.make_updater(), device, plan.device_slot_nbytes)
        prefetcher = Prefetcher(
            units,
            store,
            ledger,
            schedule,
            window_nbytes=plan.device_window_nbytes,
            autograd_nbytes=plan.autograd_nbytes,
            explain=explain,
            units_ahead=plan.units_ahead,
            give_way=lambda: later.engine.backward.give_way(),
            collectives=collectives,
            device=device,
            journal=journal,
            running=running,
        )
        gradients = GradientBank(
            store, resources.grad_staging, collectives, in_flight_nbytes=plan.landing_nbytes
        )
        reducer = None
        if stepping and ranks.data_size > 1:
            reducer = Reducer(
                collectives,
                [unit for unit in units if any(flat.spec.stepped for flat in unit.flat_params)],
                gradients,
                ledger,
                schedule,
                lambda unit: later.engine.backward.notify_if_final(unit),
                lambda: steps.streaming,
                events.averaged,
                in_buckets=plan.in_buckets,
            )
            gradients.reduce_with(reducer.add, reducer.average, reducer.whole)
        uses = Uses(
            scopes,
            check_process=store.check_process,
            wait=partial(wait_for_others, scopes),
            prepare=lambda operation: later.engine.prepare(operation),
            settle=lambda: later.engine.job.lents.settle(),
        )
        planned, lents = Planned(plan, sizes), Lents(steps, ranks, uses)
        job = Job(
            config=config,
            planned=planned,
            units=units,
            trained=[],
            device=device,
            collectives=collectives,
            ranks=ranks,
            prefix=prefix,
            traffic=traffic,
            ledger=ledger,
            store=store,
            uses=uses,
            scopes=scopes,
            journal=journal,
            schedule=schedule,
            steps=steps,
            storages=WeightStorages(),
            kept=KeptArrays(store, units, lambda: steps.index, planned),
            gradients=gradients,
            reducer=reducer,
            updates=updates,
            borrowed=BorrowedState(store, steps, journal, lents),
            edits=ValueEdits(store, prefetcher, journal, collectives, steps),
            lents=lents,
            prefetcher=prefetcher,
            activations=resources.make_activations(
                placed=any(ext.places_saved for ext in extensions), local_size=ranks.local_size
            ),
            events=events,
            extensions=extensions,
            running=running,
        )
        engine = Engine(job, resources, free)
        later.set(engine)
        return engine
    except BaseException:
        native.insist(free)
        raise
