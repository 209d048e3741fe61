"""Running: what the parts that run while the model runs ask of the engine that has them, and of each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from .. import native
from ..distributed.data_ranks import DataRanks
from ..gradients.bank import GradientBank
from ..gradients.reducer import Reducer
from ..machine.device import Device
from ..machine.ledger import Ledger
from ..machine.traffic import Traffic
from ..optim.lent_state import LentState
from ..planning.schedule import Schedule
from ..state.handle import ParamHandle
from ..state.journal import Journal
from ..state.step_counter import StepCounter
from ..state.unit import ParamUnit
from ..state.weight_storages import WeightStorages
from ..storage.store import ShardStore
from .activation_store import ActivationStore
from .in_common import InCommon
from .prefetch import Prefetcher
from .scoped_call import ScopeOpener
from .sequences import Sequences
from .value_edits import ValueEdits


class LateHook(Protocol):
    """A hook on a parameter that has to run after all others."""

    def come_last(self) -> None:
        """Moves behind the hooks that were registered since."""


class Forwards(Protocol):
    """The forwards that are running."""

    landing_hooks: list[LateHook]

    def hook_later(self, hook: Callable[[torch.Tensor], None]) -> None:
        """Has ``hook`` called with each parameter that is stepped from some later time on."""

    def hook(self, param: torch.Tensor) -> None:
        """Hooks a parameter that is stepped from now on."""

    def enter(
        self, module: torch.nn.Module, units: list[ParamUnit], *, is_root: bool, args: tuple = (), kwargs: dict | None = None
    ) -> None:
        """Begins a forward of ``module``, which needs ``units`` and is given ``args`` and ``kwargs``."""

    def leave(self, module: torch.nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        """Ends the forward of ``module``. Returns its output."""

    def rebuild(self) -> None:
        """Forgets whatever an exception left. Only while nothing is running."""


class Backwards(Protocol):
    """The backwards that are running."""

    def landed(self, param: torch.Tensor) -> None:
        """Sends home a gradient that autograd accumulated in ``param``."""

    def landed_at_home(self, unit: ParamUnit) -> None:
        """Tells that ``unit``'s gradients have landed for good."""

    def end_joined(self) -> None:
        """Ends the backwards of a joined pass, whose gradients have landed."""

    def rebuild(self) -> None:
        """Forgets whatever an exception left. Only while nothing is running."""


class JoinedBackwards(Protocol):
    """Whether several forwards and backwards make one pass just now."""

    is_open: bool

    def begins(self) -> bool:
        """Tells whether a root forward that starts now begins a pass."""

    def note_backward(self) -> None:
        """Counts a backward that ended."""

    def rebuild(self) -> None:
        """Forgets the pass, which an exception cut short. Only while nothing is running."""


class Versions(Protocol):
    """The weights of an engine before the last update."""

    def rebuild(self) -> None:
        """Goes back to the newest weights alone, whatever an exception left. Only while nothing is running."""


class StateDictTensors(Protocol):
    """The tensors of state dicts that users hold."""

    def settle(self) -> None:
        """Sends home what was written to them."""

    def refuse_in_backward(self, unit: ParamUnit) -> None:
        """Raises UsageError where a value that a backward needs was written to."""


class Running(ScopeOpener, Protocol):
    """The engine, as its parts see it. Each has it by a weak reference: the engine holds them."""

    units: list[ParamUnit]
    ranks: DataRanks
    device: Device
    store: ShardStore
    ledger: Ledger
    traffic: Traffic
    journal: Journal
    schedule: Schedule
    steps: StepCounter
    scopes: native.Scopes
    gradients: GradientBank
    reducer: Reducer | None  # None: gradients are averaged with nobody
    prefetcher: Prefetcher
    trained: list[ParamHandle]  # the parameters that have optimizer state
    sequences: Sequences  # with ranks that have other parts of the sequences
    in_common: InCommon  # with ranks that have other parts of the tensors

    storages: WeightStorages  # of the units' device buffers
    lent: LentState
    edits: ValueEdits

    @property
    def handed(self) -> StateDictTensors:
        """The tensors of state dicts that users hold."""

    @property
    def older(self) -> Versions | None:
        """The weights before the last update, where those are kept, too."""

    @property
    def activations(self) -> ActivationStore | None:
        """Takes what a forward saves home. None: it stays with torch."""

    @property
    def passes(self) -> Forwards:
        """The forwards that are running."""

    @property
    def backward(self) -> Backwards:
        """The backwards that are running."""

    @property
    def joined(self) -> JoinedBackwards:
        """The pass that several of them make together."""

    @property
    def computing(self) -> bool:
        """Whether a forward or backward of the model is running."""

    @property
    def keeps_older(self) -> bool:
        """Whether a pipeline runs without flush."""

    def recover(self, *, finishing: bool = True) -> None:
        """Puts right what an exception left, if there was one."""

    def count_backwards(self, count: int) -> None:
        """Sets how many backwards have ended since the last step."""

    def release_idle(self) -> None:
        """Sends idle units home where the pass is over."""

    def release(self, units: Iterable[ParamUnit]) -> None:
        """Sends ``units`` home: their bytes there are about to change."""
