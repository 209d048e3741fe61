"""Job: what stays of one wrapped model after the wrap, and does nothing by itself.

A part of the engine is given the job, or the few of its fields that it needs. The job refers to no
part that is given it, and not to the engine: so whatever holds a part, the homes go as soon as the
model and its optimizer are gone.
"""

from __future__ import annotations

from dataclasses import dataclass

from .. import native
from ..config.config import Config
from ..distributed.collectives import Collectives
from ..distributed.data_ranks import DataRanks
from ..gradients.bank import GradientBank
from ..gradients.reducer import Reducer
from ..machine.device import Device
from ..machine.ledger import Ledger
from ..machine.traffic import Traffic
from ..optim.lent_state import LentState
from ..optim.updates import Updates
from ..planning.memory_plan import MemoryPlan
from ..planning.schedule import Schedule
from ..planning.unit_sizes import UnitSize
from ..state.handle import ParamHandle
from ..state.journal import Journal
from ..state.step_counter import StepCounter
from ..state.unit import ParamUnit
from ..state.uses import Uses
from ..state.weight_storages import WeightStorages
from ..storage.store import ShardStore
from .activation_store import ActivationStore
from .handed_out import HandedOut
from .in_common import InCommon
from .pass_state import Pass
from .prefetch import Prefetcher
from .sequences import Sequences


@dataclass(eq=False)
class Planned:
    """What the job was planned with. Admission of parameters makes it another."""

    plan: MemoryPlan
    sizes: list[UnitSize]  # of the units


@dataclass(frozen=True, eq=False)
class Job:
    """One wrapped model's lasting parts."""

    config: Config
    planned: Planned
    units: list[ParamUnit]
    trained: list[ParamHandle]  # the parameters that have optimizer state

    # The machine and its ranks.
    device: Device
    collectives: Collectives
    ranks: DataRanks
    traffic: Traffic
    ledger: Ledger
    store: ShardStore

    # How far training is, and what of it has to be whole.
    uses: Uses
    scopes: native.Scopes
    journal: Journal
    schedule: Schedule
    steps: StepCounter

    # State at home, and what users hold of it.
    storages: WeightStorages  # of the units' device buffers
    gradients: GradientBank
    reducer: Reducer | None  # None: gradients are averaged with nobody
    updates: Updates
    lent: LentState
    handed: HandedOut

    # What moves units and activations, and what compares ranks.
    prefetcher: Prefetcher
    activations: ActivationStore | None  # None: what a forward saves stays with torch
    in_common: InCommon
    sequences: Sequences

    running: Pass


def wait_idle(job: Job) -> None:
    """Waits until every byte is at home, what users changed in state dicts and the optimizer's state
    too. Raises what went wrong."""
    job.handed.settle_with_lent()
    for unit in job.units:
        for shard in unit.shards:
            shard.wait()
    job.updates.draw()
