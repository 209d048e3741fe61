"""StepContext: the parts of a job that its optimizer uses, and the calls it makes to the
runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ...config import Config
from ...ranks.collectives import Collectives
from ..grads.bank import GradientBank
from ..homes.store import ArrayStore
from ..machine.device import Device
from ..params.borrowed_state import BorrowedState
from ..params.lent import Lents
from ..run.journal import Journal
from ..run.schedule import Schedule
from ..run.step_counter import StepCounter
from ..run.uses import Uses
from ..seams import Events
from ..units.flat_param import FlatParam
from ..units.handle import ParamHandle
from ..units.unit import ParamUnit, flat_params_of
from .updates import Updates


@dataclass(frozen=True, eq=False)
class StepContext:
    """The parts of one job that one of its optimizers uses. An optimizer keeps its job alive by it.

    ``optimizer_index``: of the optimizer among those of the job."""

    optimizer_index: int
    config: Config
    units: list[ParamUnit]
    collectives: Collectives
    device: Device
    store: ArrayStore
    uses: Uses
    journal: Journal
    schedule: Schedule
    steps: StepCounter
    gradients: GradientBank
    updates: Updates
    borrowed: BorrowedState
    lents: Lents
    events: Events

    is_only: Callable[[], bool]  # no other optimizer steps parameters of the job
    is_cut_short: Callable[[], bool]  # a forward or backward was interrupted
    in_use: Callable[[], Iterable[ParamUnit]]  # those whose weights a running forward has
    stages_differ: Callable[[], bool]  # other stages may be at other batches
    # Sends units home, before their bytes there change
    release: Callable[[Iterable[ParamUnit]], None]
    end_step: Callable[[int], None]  # of the optimizer of that index: its updates are submitted
    # Starts to step parameters that were frozen, or raises with nothing changed: Engine.admit.
    admit: Callable[..., None]

    def steps_flat_param(self, flat_param: FlatParam) -> bool:
        """Tells whether ``flat_param`` is this optimizer's to step."""
        spec = flat_param.homes.spec
        return spec.stepped and spec.optimizer == self.optimizer_index

    @property
    def trained(self) -> list[ParamHandle]:
        """The parameters that this optimizer has state of."""
        flats = filter(self.steps_flat_param, flat_params_of(self.units))
        return [h for flat in flats for h in flat.handles if h.grad is not None]
