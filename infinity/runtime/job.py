"""Job: the parts of one wrapped model that stay after the wrap. It has no behaviour.

A part of the engine is given the job, or the few of its fields that it needs. The job holds no
reference to a part that is given it, nor to the engine. So the homes are freed as soon as the model
and its optimizer are gone, even if something else still holds a part.
"""

from __future__ import annotations

from dataclasses import dataclass

from .. import native
from ..config.config import Config
from ..distributed.collectives import Collectives
from ..distributed.parallel_dims import ParallelDims
from ..gradients.bank import GradientBank
from ..gradients.reducer import Reducer
from ..machine.device import Device
from ..machine.ledger import Ledger
from ..machine.traffic import Traffic
from ..optim.borrowed_state import BorrowedState
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
from ..storage.store import ArrayStore
from .activation_store import ActivationStore
from .handed_out import HandedOut
from .in_common import InCommon
from .pass_state import Pass
from .prefetch import Prefetcher
from .sequences import Sequences
from .value_edits import ValueEdits


@dataclass(eq=False)
class Planned:
    """The plan of the job and the sizes behind it. Replaced when parameters are admitted later."""

    plan: MemoryPlan
    sizes: list[UnitSize]  # one per unit


@dataclass(frozen=True, eq=False)
class Job:
    """The lasting parts of one wrapped model."""

    config: Config
    planned: Planned
    units: list[ParamUnit]
    trained: list[ParamHandle]  # the parameters that have optimizer state

    # The machine and its ranks.
    device: Device
    collectives: Collectives
    ranks: ParallelDims
    traffic: Traffic
    ledger: Ledger
    store: ArrayStore

    # Progress of training, and the journal of changes that must not stay half done.
    uses: Uses
    scopes: native.Scopes
    journal: Journal
    schedule: Schedule
    steps: StepCounter

    # State at home, and the tensors of it that users hold.
    storages: WeightStorages  # of the units' device buffers
    gradients: GradientBank
    reducer: Reducer | None  # None: gradients are not averaged over ranks
    updates: Updates
    borrowed: BorrowedState
    edits: ValueEdits
    handed: HandedOut

    # Transfers of units and activations, and comparisons between ranks.
    prefetcher: Prefetcher
    activations: ActivationStore | None  # None: torch keeps the saved tensors
    in_common: InCommon
    sequences: Sequences

    running: Pass


def wait_idle(job: Job) -> None:
    """Waits until every byte is at home, including users' changes to state dicts and to optimizer
    state. Every rank calls this: it compares those changes. Blocks on disk. Raises the error of a
    failed transfer or update."""
    job.handed.settle_with_borrowed()
    for unit in job.units:
        for flat_param in unit.flat_params:
            flat_param.homes.wait()
    job.updates.draw()
