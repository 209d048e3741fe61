"""StepTarget: what an optimizer needs of the engine whose state it steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from ..config.config import Config
from ..distributed.collectives import Collectives
from ..distributed.comparing import InCommon
from ..gradients.bank import GradientBank
from ..machine.device import Device
from ..planning.schedule import Schedule
from ..planning.shadow_policy import ShadowPolicy
from ..state.handle import ParamHandle
from ..state.journal import Journal
from ..state.step_counter import StepCounter
from ..state.unit import ParamUnit
from ..state.uses import Uses
from ..storage.store import ShardStore
from .lent_state import LentState
from .updates import Updates


class StateDictTensors(Protocol):
    """The tensors of state dicts that users hold."""

    def settle_on_ranks(self) -> None:
        """Sends home what was written to them, with several ranks."""

    def give(self, handle: ParamHandle, array: str, tensor: torch.Tensor) -> None:
        """Watches ``tensor``, which has the value of ``array`` at home and is about to be a user's."""


class StepTarget(Protocol):
    """The engine, as an optimizer sees it."""

    config: Config
    units: list[ParamUnit]
    trained: list[ParamHandle]  # the parameters that have optimizer state
    lent: LentState
    steps: StepCounter
    schedule: Schedule
    shadow_policy: ShadowPolicy | None  # None: no updates are made ahead
    gradients: GradientBank
    journal: Journal
    store: ShardStore
    device: Device
    collectives: Collectives
    updates: Updates
    uses: Uses

    @property
    def handed(self) -> StateDictTensors:
        """The tensors of state dicts that users hold."""

    @property
    def in_common(self) -> InCommon:
        """What ranks with other parts of the tensors must have in common."""

    @property
    def is_cut_short(self) -> bool:
        """Whether a forward or backward was left by an exception."""

    @property
    def keeps_older(self) -> bool:
        """Whether an update leaves the weights that it begins with, and makes the new ones beside them."""

    def listen_to_landed(self, listener: Callable[[ParamUnit], None]) -> Callable[[], None]:
        """Calls ``listener`` with every unit whose gradients have all landed, in mid-backward. Returns what ends that."""

    def release(self, units: Iterable[ParamUnit]) -> None:
        """Sends ``units`` home: their bytes there are about to change."""

    def admit(self, params: Iterable[torch.Tensor], *, moment_count: int, then: Callable[[], None]) -> None:
        """Steps, from now on, ``params`` too, and calls ``then``, or raises and changes nothing."""

    def begin_step(self) -> None:
        """Starts a step."""

    def end_step(self) -> None:
        """Ends a step, whose updates are submitted."""
