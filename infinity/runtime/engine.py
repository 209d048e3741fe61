"""Engine: builds the parts of one wrapped model, and connects them.

The engine knows parameters and units, not modules. Hooks on the modules hold the engine, so it
lives as long as the model or its optimizer. Everything it owns is freed when both are gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import fields
from functools import partial

import torch

from .. import native
from ..config.config import Config
from ..distributed.collectives import Collectives
from ..errors import UsageError
from ..forwards.recompute import ActivationPlanner
from ..gradients.bank import GradientBank
from ..gradients.reducer import Reducer
from ..machine.device import Device
from ..machine.ledger import Ledger
from ..machine.rates import memory_rate
from ..machine.tiers import Tier
from ..machine.timeline import Timeline
from ..optim.borrowed_state import BorrowedState
from ..optim.context import StepContext
from ..optim.updates import Updates
from ..planning.memory_plan import MemoryPlan
from ..planning.schedule import Schedule
from ..planning.unit_sizes import UnitSize
from ..state import mistakes
from ..state.handle import ParamHandle
from ..state.journal import Journal
from ..state.operations import Operation, State
from ..state.step_counter import StepCounter
from ..state.unit import ParamUnit
from ..state.uses import Uses
from ..state.weight_storages import WeightStorages
from .accumulation_pass import AccumulationPass
from .admission import INSTEAD, admit
from .backward import Backward
from .handed_out import HandedOut
from .in_common import InCommon
from .job import Job, Planned, wait_idle
from .one_thread import refuse_at_the_end, wait_for_others
from .parking import Parking
from .pass_state import Pass, define_states
from .passes import Passes
from .prefetch import Prefetcher
from .recovery import is_interrupted, recover
from .resources import Resources, make_store, trace_path
from .sequences import Sequences
from .shut_down import shut_down
from .stale_weights import StaleWeights
from .value_edits import ValueEdits
from .weight_average import WeightAverage


class Engine:
    """One wrapped model's store, units, schedule, gradients and updater."""

    def __init__(
        self,
        config: Config,
        plan: MemoryPlan,
        units: list[ParamUnit],
        sizes: list[UnitSize],
        *,
        stepping: bool,
        device: Device,
        collectives: Collectives | None = None,
    ):
        self.config, self.units, self.device = config, units, device
        self.planned = Planned(plan, sizes)
        autograd = torch._C._autograd
        self.scopes = native.Scopes(
            autograd._push_saved_tensors_default_hooks, autograd._pop_saved_tensors_default_hooks
        )
        self.journal, self.schedule, self.running = Journal(), Schedule(), Pass()
        self.collectives = collectives or Collectives()
        self.ranks, self.traffic = self.collectives.ranks, self.collectives.traffic
        self.steps = StepCounter(note_progress=self.collectives.note_progress)
        self.traffic.timeline = (
            Timeline(trace_path(config.trace, self.ranks)) if config.trace is not None else None
        )
        self.trained: list[ParamHandle] = []  # the parameters that have optimizer state
        # The newest state-dict tensor of a tied parameter.
        self.tied_copies: dict[ParamHandle, weakref.ref] = {}
        self.average: WeightAverage | None = None  # of the trained parameters
        self.stale: StaleWeights | None = None  # set when a pipeline runs without flush
        self.storages = WeightStorages()  # of the units' device buffers
        self.ledger = Ledger()
        for tier, budget in zip(
            Tier, (config.device_memory, config.host_memory, config.nvme_capacity)
        ):
            self.ledger.limit(tier, budget_nbytes=budget, planned_nbytes=plan.planned_nbytes(tier))
        self.store = make_store(config, plan, self.ledger, self.traffic, device, self.collectives)
        self.updates = Updates(units, self.traffic, plan)
        self.borrowed = BorrowedState(self.store, self.steps, self.journal)
        self.parking, self.uses = Parking(self.store), self._make_uses()
        # None of which refers back to this object.
        homes = [flat.homes for unit in units for flat in unit.flat_params]
        given_back = (
            self.scopes,
            self.store,
            homes,
            self.updates.recorded,
            self.updates.names,
            self.collectives,
            device,
        )
        # insist: a finalizer runs once, so Ctrl-C must not end it early.
        self._finalizer = weakref.finalize(self, native.insist, partial(shut_down, *given_back))
        try:
            self._resources = Resources(config, plan, units, self.store)
            if stepping:
                self.updates.use(self._resources.make_updater(), device, plan.device_slot_nbytes)
        except BaseException:
            self.shut_down()
            raise
        self._put_together(stepping)

    def _put_together(self, stepping: bool) -> None:
        """Builds the parts that run while the model runs. Callbacks refer to this object weakly:
        the job must not keep it alive."""
        plan, me = self.planned.plan, weakref.ref(self)
        self.gradients = GradientBank(
            self.store,
            self._resources.grad_staging,
            self.collectives,
            in_flight_nbytes=plan.landing_nbytes,
        )
        self.reducer = self._make_reducer() if stepping and self.ranks.data_size > 1 else None
        self.activations = self._resources.make_activations()
        self.prefetcher = Prefetcher(
            self.units,
            self.store,
            self.ledger,
            self.schedule,
            window_nbytes=plan.device_window_nbytes,
            units_ahead=plan.units_ahead,
            give_way=lambda: me().backward.give_way(),
            collectives=self.collectives,
            device=self.device,
            journal=self.journal,
            running=self.running,
        )
        self.edits = ValueEdits(
            self.store, self.prefetcher, self.journal, self.collectives, self.steps
        )
        self.handed = HandedOut(
            self.store, self.steps, self.ranks, self.borrowed, self.uses, self.edits
        )
        self.in_common = InCommon(
            self.collectives, self.device, self.steps, self.gradients, self.trained
        )
        self.sequences = Sequences(self.collectives, self.device)
        self.job = Job(**{each.name: getattr(self, each.name) for each in fields(Job)})
        self.backward = Backward(self.job, recover=lambda: me().recover())
        self.passes, self.accumulation = (
            Passes(self.job, self.backward),
            AccumulationPass(self.job, self.backward),
        )
        finalizer = self._finalizer
        self.uses.define(State.UNWRAPPED, lambda: not finalizer.alive)
        define_states(self.uses, self.running, self.steps)
        planned = (
            self.activations is not None
            and self.activations.spare_nbytes is not None
            and self.config.micro_batch is None
        )
        if planned and self.ranks.alone:  # ranks must decide the same, but measure different times
            # Sending reads and writes every byte twice, in both directions.
            self.activations.plan_with(
                ActivationPlanner(
                    self, send_rate=memory_rate() / 4, recomputes=self.config.recompute
                )
            )

    def make_step_context(self) -> StepContext:
        """Makes the context of the optimizer. Its callbacks may keep this object alive; this object
        does not keep the context."""
        known = {
            each.name: getattr(self, each.name)
            for each in fields(StepContext)
            if hasattr(self, each.name)
        }
        running, handed = self.running, self.handed
        return StepContext(
            **known
            | {
                "is_cut_short": lambda: running.is_cut_short,
                "keeps_stale": lambda: running.is_stale,
                "listen_to_landed": self.backward.listen,
                "release": self.prefetcher.release_all,
                "settle_state_dicts": handed.settle_on_ranks,
                "hand_out": handed.give,
            }
        )

    def _make_reducer(self) -> Reducer:
        """Makes the reducer, which averages gradients over the ranks."""
        me, steps, makes_ahead = weakref.ref(self), self.steps, self.updates.are_made_ahead
        reducer = Reducer(
            self.collectives,
            [unit for unit in self.units if any(flat.spec.stepped for flat in unit.flat_params)],
            self.gradients,
            self.ledger,
            self.schedule,
            lambda unit: me().backward.landed_at_home(unit),
            lambda: steps.streaming or makes_ahead,
        )
        self.gradients.reduce_with(reducer)
        return reducer

    def attach(self, names: dict[torch.Tensor, list[str]]) -> None:
        """Makes the parameters managed ones. Their values are at home: this needs no space and no
        disk."""
        for unit in self.units:
            for flat_param in unit.flat_params:
                flat_param.name([names[param][0] for param in flat_param.params])
                for index, param in enumerate(flat_param.params):
                    handle = ParamHandle(names[param], unit, flat_param, index, self)
                    if flat_param.spec.stepped:
                        self.gradients.values.track(handle)
                        self.trained.append(handle)
                    param._infinity = handle
                    flat_param.handles.append(handle)
            unit.attach()
            unit.buffers.list_in(self.storages, unit)

    def units_of(self, block: torch.nn.Module) -> list[ParamUnit]:
        """Lists the units that have parameters of ``block`` and are gathered whole."""
        params = set(block.parameters())
        whole = [unit for unit in self.units if not self.sizes[unit.index].tile_nbytes]
        return [
            unit
            for unit in whole
            if any(p in params for flat in unit.flat_params for p in flat.params)
        ]

    # --- uses of the engine ---

    def _make_uses(self) -> Uses:
        """Makes the entry for all uses of the engine. It refers to the engine weakly."""
        prepare, me = weakref.WeakMethod(self._prepare), weakref.ref(self)
        return Uses(
            self.scopes,
            check_process=self.store.check_process,
            wait=partial(wait_for_others, self.scopes),
            prepare=lambda repairing: prepare()(repairing),
            settle=lambda: me().handed.settle(),
        )

    @torch.compiler.disable  # a compiled function may use the engine
    def _prepare(self, repairing: bool) -> None:
        """Restores parked arrays and recovers from an exception, at the start of an outermost use.
        Raises if the job is halted."""
        refuse_at_the_end()
        self.parking.resume()
        self.recover(finishing=not repairing)
        if (error := self.uses.halted_error()) is not None and not repairing:
            self.collectives.warn(error)  # so that other ranks do not wait for this one
            raise error
        if self.average is not None and not repairing:
            self.average.bring_back()  # an exception came as they were to be swapped back
        self.handed.begin_use(repairing=repairing)

    @property
    def is_open(self) -> bool:
        """Whether the homes exist: until unwrap_model, or the end of the process."""
        return self._finalizer.alive

    def recover(self, *, finishing: bool = True) -> None:
        """Recovers if an exception has left something to repair. Only while no other use is
        running.

        ``finishing``: also finish the journal; else the next use does, unless all state is loaded
        first.
        """
        if self.is_open and is_interrupted(self.job):
            recover(self.job, self.stale, finishing=finishing)

    @property
    def step_index(self) -> int:
        """Optimizer steps that were made."""
        return self.steps.index

    @property
    def plan(self) -> MemoryPlan:
        """The memory plan: the tier of every array, and the bytes."""
        return self.planned.plan

    @property
    def sizes(self) -> list[UnitSize]:
        """The units' sizes, as planned."""
        return self.planned.sizes

    # --- called by parameters ---

    @property
    def computing(self) -> bool:
        """Whether a forward or backward of the model is running."""
        return self.passes.computing

    def touch(self, handle: ParamHandle, operation: str) -> None:
        """Gathers a parameter at home that is used inside a forward or backward. Raises UsageError
        outside."""
        self.store.check_process()
        if not self.computing:
            raise self.refusal(handle, operation)
        self.passes.hold_for_frame(handle.unit)

    def refusal(self, handle: ParamHandle, operation: str) -> UsageError:
        """Makes the error for using a parameter at home."""
        own_name = handle.name.removeprefix(self.ranks.stage_prefix)
        instead = mistakes.advice(handle.param) or mistakes.LENT.format(own_name)
        return UsageError(
            f"{operation} on parameter {handle.name}, which is at home on"
            f" {handle.flat_param.weight.tier}. {instead}"
        )

    def saving_tensors(self) -> AbstractContextManager:
        """Returns a block in which autograd saves weights as references."""
        return self.passes.saving()

    def write_value(self, handle: ParamHandle, value: torch.Tensor) -> None:
        """Writes the value of ``p.copy_(value)`` home, master included, outside a forward."""
        with self.uses.operation(Operation.WRITE_VALUE), self.handed.loading(handle, value):
            self.edits.write_value(handle, value)

    def read_value(self, handle: ParamHandle) -> torch.Tensor:
        """Reads the value at home, outside a forward."""
        with self.uses.begin(), self.handed.settled():
            return handle.flat_param.read_value(self.store, handle.index)

    # --- what blocks ask that run another way ---

    @property
    def is_recomputed(self) -> bool:
        """Whether the running forward is recomputed in the backward, or is itself that
        recomputation."""
        return self.passes.is_recomputed

    def hold_for_backward(self, unit: ParamUnit) -> None:
        """Has the running backward hold ``unit``."""
        self.backward.hold(unit)

    def join_backward(self) -> None:
        """Joins the running autograd task, so that its end releases what the backward holds."""
        self.backward.join()

    def admit(
        self, params: Iterable[torch.Tensor], *, moment_count: int, then: Callable[[], None]
    ) -> None:
        """Steps ``params``, frozen until now. Raises UsageError or CapacityError with nothing
        changed."""
        if self.average is not None:
            raise UsageError(
                "add_param_group: the average of this model does not have these parameters. Make"
                " infinity.ema or swa afterwards."
            )
        if self.stale is not None:
            raise UsageError(
                "add_param_group after without_flush, which keeps no stale weights of these"
                f" parameters. {INSTEAD}"
            )
        admit(
            self.job,
            self._resources,
            params,
            moment_count=moment_count,
            hook=self.passes.hook,
            then=then,
        )

    def listen_to_landed(self, listener: Callable[[ParamUnit], None]) -> Callable[[], None]:
        """Calls ``listener`` with every unit whose gradients have all landed, in mid-backward.
        Returns a function that removes it."""
        return self.backward.listen(listener)

    # --- what the optimizer asks ---

    def end_step(self) -> None:
        """Ends a step whose updates are submitted. Starts reading the next forward's first units
        from disk."""
        self.prefetcher.fetch_ahead(self.schedule.first())
        self.updates.end_step()

    def wait_idle(self) -> None:
        """Waits until every byte is at home, including users' changes to state dicts and to
        optimizer state. Blocks on disk. Raises the error of a failed transfer or update."""
        wait_idle(self.job)

    def shut_down(self) -> None:
        """Frees all memory, descriptors and files."""
        self._finalizer()
        self._resources = None
        self.updates.close()
