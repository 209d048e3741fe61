"""Pass: the state of everything that runs now, in one object that recovery drops.

frame      one running forward of a module that owns units, or of a root
task       one run of autograd; a reentrant checkpoint nests them
accumulation pass
           several forwards and backwards make one pass: micro-batches, stages of a pipeline

[Note: three kinds of state] State that stays after the wrap is in :mod:`.job`. State that survives
a process is at the homes and in the journal. The rest is here, whichever part of the engine writes
it. So after an exception the next use drops this object's content, and finishes the journal
(:mod:`.recovery`). Beside it, parts that own memory or transfers let go of what runs: units, their
gradients, reductions, the store, saved tensors, and extensions by their ``drop``. A part that keeps
other state of a pass in itself breaks that.
"""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass, field

import torch

from ... import native
from ...torch_private import current_task
from ..units.handle import ParamHandle
from ..units.unit import ParamUnit
from .operations import State
from .step_counter import StepCounter
from .uses import Uses


@dataclass(eq=False)
class Frame:
    """One running forward of an owner, or of the root."""

    module: torch.nn.Module
    units: list[ParamUnit]  # held until it ends
    # Held until the forward of their own module ends.
    looked_at: list[ParamUnit] = field(default_factory=list)
    # Held until it ends, with parameters at rest: they are used outside of their owners.
    used_outside: list[ParamUnit] = field(default_factory=list)
    is_recomputed: bool = False  # inside a checkpoint
    takes_inner: bool = False  # holds the units of the forwards inside it, which get no frame
    hooks: int = 0  # pairs of our saved-tensor hooks that this thread had before
    start: float = field(default_factory=time.perf_counter)


@dataclass(eq=False)
class Pass:
    """State of the running pass. Written by the thread that runs the model."""

    # Forwards, the innermost last.
    frames: list[Frame] = field(default_factory=list)

    # Units on the device, the least recently used first, and the number of holds of each.
    resident: dict[ParamUnit, None] = field(default_factory=dict)
    holds: dict[ParamUnit, int] = field(default_factory=dict)
    # The holds in which the parameters are ordinary ones.
    shows: dict[ParamUnit, int] = field(default_factory=dict)
    # The unit that was used last, and the time since when it is resident.
    computing: tuple[int, float] | None = None

    # The backward. Only autograd holds the token of a task. A token that is gone although its task
    # has not ended here means that the task was interrupted.
    tokens: dict[int, weakref.ref] = field(default_factory=dict)
    # Held, least recently used first.
    awaited: dict[ParamUnit, set[ParamHandle]] = field(default_factory=dict)
    # Gradients still to come, of each unit, held or not.
    expected: dict[ParamUnit, set[ParamHandle]] = field(default_factory=dict)
    # When the backward reached each held unit.
    since: dict[ParamUnit, float] = field(default_factory=dict)
    # Units that got a gradient in this backward.
    reached: set[ParamUnit] = field(default_factory=set)

    # The charge for gradients that autograd makes of the unit that was held last.
    gradients: native.Charge | None = None

    # The model runs as plain torch: a root alone has hooks, and gradients stay in ``p.grad``.
    stands_aside: bool = False

    is_accumulating: bool = False
    has_begun: bool = False  # an accumulation pass begins with its first root forward
    backward_count: int = 0  # backwards that ended in an accumulation pass

    kind: str = "train"  # of training passes, as the schedule knows them
    keeps_idle: bool = False  # the weights of idle units stay on the device after it
    stages_differ: bool = False  # ranks of other stages do not step with these

    @property
    def is_cut_short(self) -> bool:
        """Whether an exception left a forward or backward. Valid only while none is running."""
        return bool(self.tokens or self.frames)

    def begin_root(self) -> bool:
        """Tells whether a root forward that starts now begins a pass."""
        begins = not (self.is_accumulating and self.has_begun)
        self.has_begun = True
        return begins

    def drop(self) -> None:
        """Resets all state of the pass. Only while nothing is running."""
        vars(self).update(vars(Pass()))


def define_states(uses: Uses, running: Pass, steps: StepCounter) -> None:
    """Defines in ``uses`` the states that follow from the running pass. An interrupted pass is in
    none of them: the next use recovers from it."""
    scopes = uses.scopes

    def is_whole() -> bool:
        return not scopes.interrupted and not running.is_cut_short

    def is_in_backward() -> bool:
        return current_task() != -1

    uses.define(
        {
            State.FORWARD: lambda: (
                bool(running.frames) and scopes.running_here > 0 and not is_in_backward()
            ),
            State.BACKWARD: lambda: bool(running.tokens) and is_in_backward(),
            State.ACCUMULATING: lambda: running.is_accumulating and is_whole(),
            State.STEPPING: lambda: steps.streaming and is_whole(),
            State.STEPPED: lambda: steps.begun and not steps.streaming and is_whole(),
        }
    )
