"""StepContext: what an optimizer steps, what it steps with, and what it asks the runtime to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
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


class Admit(Protocol):
    """Steps ``params``, frozen until now, and calls ``then``; or raises, with nothing changed."""

    def __call__(self, params: Iterable[torch.Tensor], *, moment_count: int, then: Callable[[], None]) -> None: ...


@dataclass(frozen=True, eq=False)
class StepContext:
    """The parts of one job that its optimizer uses. It keeps the job alive, as an optimizer does."""

    config: Config
    units: list[ParamUnit]
    trained: list[ParamHandle]  # the parameters that have optimizer state
    collectives: Collectives
    device: Device
    store: ShardStore
    uses: Uses
    journal: Journal
    schedule: Schedule
    steps: StepCounter
    shadow_policy: ShadowPolicy | None  # None: no updates are made ahead
    gradients: GradientBank
    updates: Updates
    lent: LentState
    in_common: InCommon  # what ranks with other parts of the tensors must have in common

    is_cut_short: Callable[[], bool]  # whether a forward or backward was left by an exception
    keeps_older: Callable[[], bool]  # whether an update makes new weights beside those it begins with
    listen_to_landed: Callable[[Callable[[ParamUnit], None]], Callable[[], None]]  # with each unit whose gradients landed
    release: Callable[[Iterable[ParamUnit]], None]  # sends units home, whose bytes there are about to change
    end_step: Callable[[], None]  # all updates of a step are submitted
    admit: Admit
    settle_state_dicts: Callable[[], None]  # with several ranks: sends home what users wrote to them
    hand_out: Callable[[ParamHandle, str, torch.Tensor], None]  # watches a tensor of a state dict
