"""Job: the parts of one wrapped model that stay after the wrap. It has no behaviour.

A part of the engine is given the job, or the few of its fields that it needs. The job holds no
reference to a part that is given it, nor to the engine. So the homes are freed as soon as the model
and its optimizer are gone, even if something else still holds a part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from ... import native
from ...config import Config
from ...ranks.collectives import Collectives
from ...ranks.parallel_dims import ParallelDims
from ..grads.bank import GradientBank
from ..grads.reducer import Reducer
from ..homes.store import ArrayStore
from ..machine.device import Device
from ..machine.ledger import Ledger
from ..machine.tiers import Tier
from ..machine.traffic import Traffic
from ..params.borrowed_state import BorrowedState
from ..params.lent import Lents
from ..params.value_edits import ValueEdits
from ..plan.memory_plan import MemoryPlan
from ..plan.unit_sizes import UnitSize
from ..seams import Events, Extension
from ..step.updates import Updates
from ..units.handle import ParamHandle
from ..units.kept import KeptArrays
from ..units.unit import ParamUnit, flat_params_of
from ..units.weight_storages import WeightStorages
from .activation_store import ActivationStore
from .journal import Journal
from .pass_state import Pass
from .prefetch import Prefetcher
from .schedule import Schedule
from .step_counter import StepCounter
from .uses import Uses

E = TypeVar("E", bound=Extension)


@dataclass(eq=False)
class Planned:
    """The plan of the job and the sizes behind it. Replaced when parameters are admitted later."""

    plan: MemoryPlan
    sizes: list[UnitSize]  # one per unit

    def add(self, tier: Tier, term: str, nbytes: int) -> None:
        """Adds bytes of ``tier`` to the plan."""
        self.plan = self.plan.with_term(tier, term, nbytes)


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
    prefix: str  # of its parameters' names in checkpoints, if stages have the same names
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
    kept: KeptArrays  # of features, beside the units' own
    gradients: GradientBank
    reducer: Reducer | None  # None: gradients are not averaged over ranks
    updates: Updates
    borrowed: BorrowedState
    edits: ValueEdits
    lents: Lents

    # Transfers of units and activations.
    prefetcher: Prefetcher
    activations: ActivationStore | None  # None: torch keeps the saved tensors

    # Features that are not the engine's, and what they listen to.
    events: Events
    extensions: list[Extension]

    running: Pass

    def find(self, kind: type[E]) -> E | None:
        """Returns the extension of class ``kind``; None if this job has none."""
        return next((ext for ext in self.extensions if isinstance(ext, kind)), None)

    def add(self, extension: E) -> E:
        """Installs an extension that a call after the wrap has made. An error leaves none."""
        try:
            self.extensions.append(extension)
            self.uses.define(extension.rights(self))
            extension.install(self, None)
        except BaseException:
            self.remove(extension)
            raise
        return extension

    def remove(self, extension: Extension) -> None:
        """Removes an extension, its listeners and the arrays that it keeps. Does nothing if it has
        not joined."""
        if extension in self.extensions:
            self.kept.free_of(extension)
            self.events.forget(extension)
            self.uses.forget(extension.rights(self))
            self.extensions.remove(extension)


def wait_idle(job: Job) -> None:
    """Waits until every byte is at home, including users' changes to state dicts and to optimizer
    state. Every rank calls this: it compares those changes. Blocks on disk. Raises the error of a
    failed transfer or update."""
    job.lents.settle_all()
    for flat_param in flat_params_of(job.units):
        flat_param.homes.wait()
    job.updates.draw()
