"""Pass: all that runs just now, in one object that recovery drops.

frame      one running forward of a module that owns units, or of a root
task       one run of autograd; a reentrant checkpoint nests them
joined     several forwards and backwards make one pass: micro-batches, stages of a pipeline
stale      a pipeline runs without flush: what runs began with the weights before the last update

[Note: three kinds of state] What stays after the wrap is in :mod:`.job`. What survives a process
is at the homes and in the journal. What is left is here, whichever part of the engine writes it. So
an exception, at any line of any part, leaves nothing that has to be put right piece by piece: the
next use drops this object's content, discards the gradients that were being changed, and finishes
the journal (:mod:`.recovery`). A part that keeps state of a pass in itself breaks that.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from dataclasses import dataclass, field

import torch

from ..state.handle import ParamHandle
from ..state.operations import State
from ..state.step_counter import StepCounter
from ..state.unit import ParamUnit
from ..state.uses import Uses


@dataclass(eq=False)
class Frame:
    """One running forward of an owner, or of the root."""

    module: torch.nn.Module
    units: list[ParamUnit]  # held until it ends
    looked_at: list[ParamUnit] = field(default_factory=list)  # held until their own module's forward ends
    is_recomputed: bool = False  # inside a checkpoint
    hooks: int = 0  # pairs of our saved-tensor hooks that this thread had before
    start: float = field(default_factory=time.perf_counter)


@dataclass(eq=False)
class Pass:
    """What runs. Written by the thread that runs the model."""

    # Forwards, the innermost last.
    frames: list[Frame] = field(default_factory=list)

    # Units on the device, the least recently used first, and how many hold each of them.
    resident: dict[ParamUnit, None] = field(default_factory=dict)
    holds: Counter[ParamUnit] = field(default_factory=Counter)
    computing: tuple[int, float] | None = None  # the unit that was asked for last, and since when it is there

    # The backward. A token of each task is held by autograd alone: one that is gone, without the end
    # of its task having been told, is of a task that was cut short.
    tokens: dict[int, weakref.ref] = field(default_factory=dict)
    awaited: dict[ParamUnit, set[ParamHandle]] = field(default_factory=dict)  # held, least recently used first
    expected: dict[ParamUnit, set[ParamHandle]] = field(default_factory=dict)  # what each still has to get, held or not
    since: dict[ParamUnit, float] = field(default_factory=dict)  # when the backward came to each that is held
    reached: set[ParamUnit] = field(default_factory=set)  # units that got a gradient in this backward

    is_joined: bool = False
    has_begun: bool = False  # a joined pass begins with its first root forward
    backward_count: int = 0  # that ended in a joined pass

    is_stale: bool = False
    is_updating: bool = False  # by the pipeline itself, between two of its batches

    @property
    def is_cut_short(self) -> bool:
        """Whether a forward or backward was left by an exception. Asked where none is running."""
        return bool(self.tokens or self.frames)

    def begin_root(self) -> bool:
        """Tells whether a root forward that starts now begins a pass."""
        begins = not (self.is_joined and self.has_begun)
        self.has_begun = True
        return begins

    def drop(self) -> None:
        """Forgets all that ran. Only while nothing is running."""
        vars(self).update(vars(Pass()))


def define_states(uses: Uses, running: Pass, steps: StepCounter) -> None:
    """Tells ``uses`` the states that follow from what runs. What was interrupted is in none of them: the
    next use ends it."""
    scopes = uses.scopes

    def is_whole() -> bool:
        return not scopes.interrupted and not running.is_cut_short

    def is_in_backward() -> bool:
        return torch._C._current_graph_task_id() != -1

    uses.define(State.FORWARD, lambda: bool(running.frames) and scopes.running_here > 0 and not is_in_backward())
    uses.define(State.BACKWARD, lambda: bool(running.tokens) and is_in_backward())
    uses.define(State.ACCUMULATING, lambda: running.is_joined and is_whole())
    uses.define(State.STEPPING, lambda: steps.streaming and is_whole())
    uses.define(State.STEPPED, lambda: steps.begun and not steps.streaming and is_whole())
