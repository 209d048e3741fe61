"""Engine: the parts of one wrapped model, put together, and what the parts ask of each other.

The engine knows parameters and units, not modules: hooks on the modules hold the engine, so that it lives as long as
the model or its optimizer does, and everything it owns goes when both are gone.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

import torch

from .. import native
from ..config.config import Config
from ..distributed.collectives import Collectives
from ..errors import InfinityError, UsageError
from ..forwards.recompute import ActivationPlanner
from ..gradients.bank import GradientBank
from ..gradients.record import GradRecord, GradState
from ..gradients.reducer import Reducer
from ..machine import processors
from ..machine.device import Device
from ..machine.ledger import Ledger
from ..machine.rates import memory_rate
from ..machine.tiers import Tier
from ..machine.timeline import Timeline
from ..machine.traffic import Traffic
from ..optim.device_step import DeviceStepper
from ..planning.shadow_policy import ShadowPolicy
from ..planning.memory_plan import MemoryPlan
from ..planning.schedule import Schedule
from ..planning.unit_sizes import UnitSize
from ..state import mistakes
from ..state.handle import ParamHandle, set_raw_grad
from ..state.journal import Journal
from ..state.shard import ParamShard
from ..state.unit import ParamUnit
from ..storage.store import ShardStore
from .activation_store import ActivationStore
from .passes import Passes
from .prefetch import Prefetcher


@dataclass
class StepClock:
    """When steps ended, and how long the last one took."""

    steps: int = 0
    step_seconds: float = 0.0
    _last: float = field(default_factory=time.perf_counter)

    def tick(self) -> float:
        """A step ends now. Returns when it began."""
        began, now = self._last, time.perf_counter()
        self.step_seconds, self._last = now - began, now
        self.steps += 1
        return began


class Engine:
    """One wrapped model's store, units, schedule, gradients and updater."""

    def __init__(
        self,
        config: Config,
        plan: MemoryPlan,
        units: list[ParamUnit],
        *,
        stepping: bool,
        device: Device,
        collectives: Collectives | None = None,
    ):
        self.config, self.plan, self.units, self.device = config, plan, units, device
        autograd = torch._C._autograd
        self.scopes = native.Scopes(autograd._push_saved_tensors_default_hooks, autograd._pop_saved_tensors_default_hooks)
        self.journal = Journal()
        self.halted: Callable[[], InfinityError] | None = None  # why nothing goes on but loading a checkpoint
        self.streams_step = False  # units are stepped as their gradients land, while the backward goes on
        self.step_begun = False  # so that the next step is the rest of one
        self.finished_step = -1  # the last one, where it was cut short and nobody was told that it was made
        self.collectives = collectives or Collectives()
        self.ranks = self.collectives.ranks
        self.ledger = Ledger()
        self.traffic = self.collectives.traffic
        self.traffic.timeline = Timeline(_of_rank(config.trace, self.collectives)) if config.trace is not None else None
        self.schedule = Schedule()
        self.clock = StepClock()
        self._landed_listeners: list[Callable[[ParamUnit], None]] = []
        self.sizes: list[UnitSize] = []  # of the units, as they were planned with
        self.step_index = 0
        self.backwards = 0  # that ended since the last step
        self.speculation = ShadowPolicy() if plan.shadowed else None
        self._slots: native.Region | None = None
        self.group_of: dict[ParamHandle, int] = {}  # index of the optimizer's param group
        self.tied_copies: dict[ParamHandle, weakref.ref] = {}  # the newest state-dict tensor of a tied parameter
        self.without_grad: dict[ParamUnit, set[ParamHandle]] = {}  # seen to get none in a backward
        self.storages: dict[int, tuple[ParamUnit, torch.Tensor]] = {}  # device buffers, by storage
        self._charges: list[native.Charge] = []
        for tier, budget in zip(Tier, (config.device_memory, config.host_memory, config.nvme_capacity)):
            account = self.ledger.accounts[tier]
            account.budget_nbytes, account.planned_nbytes = budget, plan.planned_nbytes(tier)
        self.store = ShardStore(
            config.nvme_paths if Tier.NVME in plan.tiers.values() or config.activations == "nvme" else (),
            self.ledger,
            self.traffic,
            service_nbytes=plan.service_nbytes,
            checksums=config.checksums,
            faults=_faults_from_environment(),
            device=device,
        )
        self._last_updates: list[native.Updater] = []  # whose events are to be drawn when the engine goes
        self.store.on_failure = self.collectives.tell
        shards = [shard for unit in units for shard in unit.shards]
        shut_down = partial(_shut_down, self.store, shards, self._last_updates, [unit.name for unit in units], self.collectives, device)
        # To its end, though Ctrl-C comes between: nobody would call it again.
        self._finalizer = weakref.finalize(self, native.insist, shut_down)
        self.updater: native.Updater | None = None
        self.stepper: DeviceStepper | None = None  # where the processor cannot step all there is
        try:
            self._allocate(stepping)
        except BaseException:
            self.shut_down()
            raise
        self.passes = Passes(self)
        self.gradients = GradientBank(self.store, self._grad_staging, self.collectives, in_flight_nbytes=plan.borrowed_nbytes)
        self.reducer: Reducer | None = None
        if stepping and not self.ranks.alone:
            trained = [unit for unit in units if any(shard.spec.stepped for shard in unit.shards)]
            self.reducer = self.gradients.reducer = Reducer(
                self.collectives, trained, self.gradients, self.ledger, self.schedule, self.passes.landed_at_home
            )
        self.activations = self._make_activations()
        planned = self.activations is not None and self.activations.spare_nbytes is not None and config.micro_batch is None
        if planned and self.ranks.alone:  # ranks have to do the same, and do not measure the same
            # Sending reads and writes every byte twice, there and back.
            self.activations.planner = ActivationPlanner(self, send_rate=memory_rate() / 4, recomputes=config.recompute)
        self.prefetcher = Prefetcher(
            units,
            self.store,
            self.ledger,
            self.schedule,
            window_nbytes=plan.device_window_nbytes,
            units_ahead=plan.units_ahead,
            give_way=self.passes.give_way,
            collectives=self.collectives,
            device=device,
            journal=self.journal,
        )

    def _allocate(self, stepping: bool) -> None:
        """Takes every byte the plan names, and the disk space, before anything is moved."""
        plan = self.plan
        for unit in self.units:
            for shard in unit.shards:
                tiers, kept = plan.tiers_of(unit.index), plan.kept_of(unit.index)
                shadowed = unit.index in plan.shadowed
                shard.allocate(self.store, tiers, f"unit {unit.name}", kept=kept, shadowed=shadowed)
        regions = []

        def staging(nbytes: int, what: str) -> native.Region | None:
            if not nbytes:
                return None
            self._charges.append(self.ledger.reserve(Tier.HOST, nbytes, what))
            regions.append(self.store.make_region(nbytes, copied=what != "optimizer slots"))
            return regions[-1]

        weights = staging(plan.staging_nbytes, "staged weights")
        grads = staging(plan.grad_staging_nbytes, "staged gradients")
        activations = staging(plan.activation_staging_nbytes, "staged activations")
        slots = staging(plan.slot_count * plan.slot_nbytes, "optimizer slots")
        self.store.staging = native.PinnedPool(weights) if weights else None
        self._grad_staging = native.PinnedPool(grads) if grads else None
        self._activation_staging = native.PinnedPool(activations) if activations else None
        self._slots = slots  # the updater has its address only
        checksums = plan.terms[Tier.HOST].get("checksums", 0)
        self._charges.append(self.ledger.reserve(Tier.HOST, checksums, "checksums"))
        for what in ("second slices", "gradients on their way", "optimizer slots"):
            self._charges.append(self.ledger.reserve(Tier.DEVICE, plan.terms[Tier.DEVICE].get(what, 0), what))
        self.store.open(regions)
        if stepping:
            self.updater = native.Updater(
                self.store.engine,
                slots.address if slots else 0,
                slots.nbytes if slots else 0,
                plan.slot_count if slots else 0,
                self.config.update_threads or min(torch.get_num_threads(), processors.available()),
                owner=slots,
                checksums=self.config.checksums,
            )
            if self.device.kernels is not None:
                self.stepper = DeviceStepper(self.device, self.traffic, plan.device_slot_nbytes)
            if self.traffic.timeline is not None:
                self.updater.record_events()
                self._last_updates.append(self.updater)

    def _make_activations(self) -> ActivationStore | None:
        """What takes activations home; None where they stay with torch."""
        home, device_memory = self.config.activations, self.config.device_memory
        if home in ("host", "nvme"):
            return ActivationStore(self.store, Tier(home), self._activation_staging, spare_nbytes=None)
        if home == "auto" and device_memory is not None and self.device.is_host:
            spare = max(0, device_memory - self.plan.planned_nbytes(Tier.DEVICE))
            return ActivationStore(self.store, Tier.HOST, None, spare_nbytes=spare)
        return None

    def attach(self, names: dict[torch.Tensor, list[str]], group_of: dict[torch.Tensor, int]) -> None:
        """Makes the parameters managed ones. Their values are at home already: nothing here needs space or the disk."""
        for unit in self.units:
            for shard in unit.shards:
                shard.names = [names[param][0] for param in shard.params]
                for index, param in enumerate(shard.params):
                    handle = ParamHandle(names[param], unit, shard, index, self)
                    if shard.spec.stepped:
                        handle.grad = GradRecord()
                        self.group_of[handle] = group_of[param]
                    param._infinity = handle
                    unit.handles.append(handle)
            unit.attach()
            for flat in unit.flats:
                self.storages[flat.untyped_storage()._cdata] = (unit, flat)

    def units_of(self, block: torch.nn.Module) -> list[ParamUnit]:
        """The units that have parameters of ``block`` and are gathered whole."""
        params = set(block.parameters())
        whole = [unit for unit in self.units if not self.sizes[unit.index].tile_nbytes]
        return [unit for unit in whole if any(p in params for shard in unit.shards for p in shard.params)]

    # --- every use of the engine ---

    def using(self, *, repairing: bool = False) -> native.Scope:
        """What every use of the engine by its user runs in. When it is not part of another use, what an exception left of the
        last one is put right first. ``repairing``: it sets all state anew.

        Raises UsageError when that state is lost, for every use but a repairing one.
        """
        self.store.check_process()
        if not self.scopes.running and torch._C._current_graph_task_id() == -1:
            if repairing:
                self.journal.forget()
            self.recover()
            if self.halted is not None and not repairing:
                error = self.halted()
                self.store.on_failure(error)  # other ranks are not to wait for this one
                raise error
        return self.scopes.scope()

    @property
    def is_open(self) -> bool:
        """Whether the homes are there: until unwrap_model, or the end."""
        return self._finalizer.alive

    def recover(self) -> None:
        """After an exception, whatever it struck: what only a running pass needs is given up and taken anew from what is at home,
        and what had to be whole is done to its end. Asked while no other use is running; without an exception it does nothing."""
        if not (self.scopes.interrupted or self.passes.is_cut_short or not self.journal.is_clear) or not self._finalizer.alive:
            return
        self.store.check_process()
        self.device.drain()
        self.passes.rebuild()
        if self.reducer is not None:
            self.reducer.abandon()
        self.prefetcher.rebuild()
        self.ledger.forget_passing()
        for handle in self.group_of:
            set_raw_grad(handle.param, None)
        if self.store.failure is None:  # else nothing more goes to or comes from the disk
            with self.store.guarding():
                self.gradients.rebuild()
                if self.activations is not None:
                    self.activations.rebuild()
                self.store.rebuild()
                self.journal.finish()  # a step may make shadows the state
                for unit in self.units:
                    for shard in unit.shards:
                        shard.drop_shadow()
        if self.streams_step and any(handle.grad.state is GradState.CONSUMED for handle in self.group_of):
            self.halt("an exception inside step_in_backward left part of a step done")
        if self.streams_step:
            self.step_begun = self.streams_step = False
        self.scopes.interrupted = False  # the last thing: cut short, all of this is done again

    def halt(self, why: str) -> None:
        """From here on nothing goes on but loading a checkpoint."""
        self.halted = partial(UsageError, f"{why}: the state in memory is neither the old one nor the new one. Load a checkpoint.")

    # --- what parameters ask ---

    @property
    def computing(self) -> bool:
        """Whether a forward or backward of the model is running."""
        return self.passes.computing

    def touch(self, handle: ParamHandle, operation: str) -> None:
        """A parameter at home is used: inside a forward or backward it is gathered, elsewhere that is refused."""
        self.store.check_process()
        if not self.computing:
            raise self.refusal(handle, operation)
        self.passes.hold_for_frame(handle.unit)

    @staticmethod
    def refusal(handle: ParamHandle, operation: str) -> UsageError:
        """The error for touching a parameter at home."""
        instead = mistakes.advice() or (
            f"Read or change it inside `with infinity.full_params(model, [{handle.name!r}]) as params:`."
        )
        return UsageError(f"{operation} on parameter {handle.name}, which is at home on {handle.shard.weight.tier}. {instead}")

    def saving_tensors(self) -> AbstractContextManager:
        """Weights that autograd saves inside are saved as references."""
        return self.passes.saving()

    def write_value(self, handle: ParamHandle, value: torch.Tensor) -> None:
        """``p.copy_(value)`` outside a forward: the value goes home, master and all."""
        with self.using():
            value = value.detach().expand(tuple(handle.shard.layout.placements[handle.index].shape))
            self.collectives.same(f"setting {handle.name}", value)
            flat = handle.shard.flattened(value, handle.index)
            self.prefetcher.release_all([handle.unit])
            if handle.has_loaded_master and self.collectives.least([handle.shard.holds(self.store, handle.index, value)], f"setting {handle.name}")[0]:
                return  # the optimizer's state was loaded first, and has the master of this very value

            def change() -> None:
                handle.changed()
                handle.shard.write_flattened(self.store, handle.index, flat, version=self.step_index)

            self.journal.carry_out(change)

    def write_edits(self, edited: list[tuple[ParamHandle, torch.Tensor]]) -> None:
        """Elements of the values that differ from their parameters' go home; the others keep their master's bits. All of it or,
        where that is refused, nothing."""
        self.prefetcher.release_all([handle.unit for handle, _ in edited])
        found = [(handle, handle.shard.changes(self.store, handle.index, value)) for handle, value in edited]

        def change() -> None:
            for handle, parts in found:
                handle.changed()
                handle.shard.write_changes(self.store, handle.index, parts, version=self.step_index)

        self.journal.carry_out(change)

    # --- what passes ask ---

    def begin_pass(self, *, training: bool) -> None:
        """A root forward starts."""
        for handle in self.group_of if training else ():
            set_raw_grad(handle.param, None)  # of a backward that was cut short before the engine heard of it
        self.schedule.begin("train" if training else "infer")
        self.prefetcher.begin_pass()

    def end_backward(self) -> None:
        """The outermost backward ended: every gradient is on its way home."""
        if self.reducer is not None:
            with self.store.guarding():
                self.reducer.end_backward()
        self.count_backwards(self.backwards + 1)
        self.gradients.end_backward()
        self.gradients.close_all([shard for unit in self.units for shard in unit.shards])
        if not self.passes.frames:
            self.prefetcher.release_idle()

    def count_backwards(self, count: int) -> None:
        """So many backwards have ended since the last step."""
        self.finished_step = -1
        self.backwards = count
        self.collectives.note_progress(steps=self.step_index, backwards=count)

    def listen_to_landed(self, listener: Callable[[ParamUnit], None]) -> None:
        """Calls ``listener`` with every unit whose gradients have all landed, in mid-backward."""
        self._landed_listeners.append(listener)

    def tell_landed(self, unit: ParamUnit) -> None:
        """All gradients of ``unit`` have landed."""
        for listener in self._landed_listeners:
            listener(unit)

    # --- what the optimizer asks ---

    def check_alive(self) -> None:
        """Raises UsageError after :func:`infinity.unwrap_model`, and in a forked child."""
        self.store.check_process()
        if not self._finalizer.alive:
            raise UsageError("this optimizer's model was unwrapped: use the optimizer that unwrap_model returned")

    def check_open(self) -> None:
        """Raises UsageError when the homes are gone."""
        if not self._finalizer.alive:
            raise UsageError("this backward needs weights that went with the engine: run it before unwrap_model")

    def begin_step(self) -> None:
        """An optimizer step starts."""
        if self.stepper is not None and self.updater.step_seconds:
            self.stepper.choose_share(self.updater.elements / self.updater.step_seconds, self._passing_nbytes())

    def _passing_nbytes(self) -> float:
        """Bytes of state per element that would come in if the device stepped it."""
        specs = [shard.spec for unit in self.units for shard in unit.shards if shard.spec.stepped]
        return max((sum(spec.nbytes_per_element().values()) for spec in specs), default=0.0)

    def end_step(self) -> None:
        """The updates are submitted: the next forward's first units follow them from the disk."""
        self.prefetcher.fetch_ahead(self.schedule.first())
        began = self.clock.tick()
        if self.traffic.timeline is not None:
            self.traffic.mark("step", f"step {self.clock.steps}", began)
            self._draw_updates()
            self.traffic.timeline.flush()

    def _draw_updates(self) -> None:
        _draw_updates(self.updater, self.traffic, [unit.name for unit in self.units])

    # --- everything ---

    def wait_idle(self) -> None:
        """Waits until every byte is at home. Raises what went wrong."""
        for unit in self.units:
            for shard in unit.shards:
                shard.wait()
        if self.traffic.timeline is not None and self.updater is not None:
            self._draw_updates()

    def shut_down(self) -> None:
        """Gives everything back: memory, descriptors, files."""
        self._finalizer()
        self.updater = self._slots = self.stepper = None


def _draw_updates(updater: native.Updater, traffic: Traffic, names: list[str]) -> None:
    """Puts on the timeline what the updater has done since the last time."""
    lanes = {"load": "nvme->host", "step": "optimizer", "save": "host->nvme"}
    for kind, unit, _, start, end in updater.take_events():
        traffic.mark(lanes[kind], names[unit] if kind == "step" else f"{names[unit]} state", start, end)


def _of_rank(path: str | os.PathLike, collectives: Collectives) -> str:
    """Every rank has a timeline of its own: ``trace.json`` becomes ``trace-rank1.json``."""
    stem, suffix = os.path.splitext(os.fspath(path))
    return os.fspath(path) if collectives.ranks.alone else f"{stem}-rank{collectives.ranks.world_rank}{suffix}"


def _shut_down(
    store: ShardStore, shards: list[ParamShard], updaters: list[native.Updater], names: list[str], collectives: Collectives, device: Device
) -> None:
    """Gives everything back. Cut short, it is called again, and does what is left."""
    if store.pid != os.getpid():
        return  # a forked child ends (a data loader's worker): everything is the parent's
    if device.is_own_thread:  # where the garbage collector came by: what follows waits for this very thread
        threading.Thread(target=_shut_down, args=(store, shards, updaters, names, collectives, device)).start()
        return
    for shard in shards:
        for wait in (shard.drop_shadow, shard.wait):
            try:
                wait()
            except Exception:  # noqa: BLE001 - whoever needed these bytes was told; here they are thrown away
                pass
        shard.forget_update()
    device.close()
    for updater in updaters:
        _draw_updates(updater, store.traffic, names)
    updaters.clear()
    store.close()
    collectives.close()
    if store.traffic.timeline is not None:
        store.traffic.timeline.close()
    for shard in shards:
        shard.forget()


def _faults_from_environment() -> native.FaultPlan | None:
    """``INFINITY_FAULTS="seed=1,short_transfer=0.5"``: seeded faults under the I/O engine, for tests."""
    text = os.environ.get("INFINITY_FAULTS")
    if not text:
        return None
    plan = native.FaultPlan()
    for part in text.split(","):
        name, _, value = part.partition("=")
        if not hasattr(plan, name):
            raise UsageError(f"INFINITY_FAULTS: no fault {name!r}")
        kind = type(getattr(plan, name))
        try:
            setattr(plan, name, kind(value))
        except (TypeError, ValueError) as error:
            raise UsageError(f"INFINITY_FAULTS: {part!r} is not {name}=<{kind.__name__}>") from error
    return plan
