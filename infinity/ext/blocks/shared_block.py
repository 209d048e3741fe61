"""SharedBlock: a block of several ranks, which all of them run again in the backward, or none.

agreed   whether the backward runs the block again: decided for all ranks as a pass begins, by
         :mod:`.agreement`, and the same to its end. None: not yet
compared of a pass: the ranks tell each other at the end of its forward which blocks they will run
         again. Else a block that is not agreed on is not run again

[Note: why a pass does not change its mind] A forward that runs again may communicate: it brings
tiles of its weights, or another unit's, or has collectives of the user's. If one rank did that
alone, it would wait for the others. So what a rank finds out during a pass, as a larger input, a
full host or a hook, counts from the next pass on. Until then it keeps its promise, or raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...errors import UsageError
from ...torch_private import current_task
from .activation_choice import ActivationChoice
from .products import Counted
from .recompute import PlannedBlock

INSTEAD = (
    "Several ranks agree on that as a pass begins: change it between two steps, or use"
    " Config(recompute=False) and the model's own gradient checkpointing."
)


class SharedBlock(PlannedBlock):
    """Runs a block's forward as all ranks chose."""

    def __init__(self, *given: Any, number: int):
        """``given``: as for :class:`.recompute.PlannedBlock`. ``number``: among the blocks."""
        super().__init__(*given)
        self._number = number
        self.agreed: bool | None = None
        self._promised: list[bool] = []  # of this pass's calls that nothing is agreed on
        self._began_in_training = True

    @property
    def name(self) -> str:
        """The block, as errors call it."""
        return f"block {self._number} ({type(self._block()).__name__})"

    @property
    def has_ever_run(self) -> bool:
        """Whether anything of it is known."""
        return self._numel >= 0

    @property
    def is_in_training(self) -> bool:
        """Whether it is in training mode; not if it is gone."""
        return (block := self._block()) is not None and block.training

    def begin_pass(self) -> None:
        """Takes what may have changed between two passes: hooks and flags. Before an agreement."""
        self._began_in_training = self.is_in_training
        if self._began_in_training and self._has_other_modes():
            self._passes, self._mode = 0, ()
            self._planner.forget_choices()
        elif self._began_in_training and self._is_repeatable and self._is_heard():
            self._refuse()

    @property
    def promises(self) -> tuple[bool, ...]:
        """For each call of this pass whether the backward runs it again."""
        if self.agreed is None:
            return tuple(self._promised)
        return (self.agreed,) * self._calls

    @property
    def is_repeatable(self) -> bool:
        """Whether nothing that is known forbids to run it again."""
        return self._is_repeatable

    def refuse(self) -> None:
        """Notes that another rank must not run it again."""
        if self._is_repeatable:
            self._refuse()

    def agree(self, choice: ActivationChoice | None) -> None:
        """Takes the choice of all ranks. None: some rank has not measured it."""
        self.agreed = None if choice is None else choice.repeats
        self.choice = self._planner.first_choice if choice is None else choice

    def end_pass(self, *, counts: bool) -> None:
        """Resets the counts of one pass, as :meth:`.recompute.PlannedBlock.end_pass`."""
        super().end_pass(counts=counts)
        self._promised.clear()

    def _trains(self) -> bool:
        if self.agreed and self.is_in_training != self._began_in_training:
            raise UsageError(f"{self.name} was switched by train() or eval() in a pass. {INSTEAD}")
        return self.is_in_training and self._planner.has_begun

    @property
    def _is_unknown(self) -> bool:
        return self.agreed is None or not self.is_measured

    def _look(self) -> None:
        if self._calls > 1 and self._is_repeatable:
            self._refuse()
        if self.agreed and self._has_other_modes():
            raise UsageError(f"a module inside of {self.name} was switched in a pass. {INSTEAD}")
        if self.agreed and self._is_repeatable and self._is_heard():
            raise UsageError(
                f"{self.name} got a hook in a pass, which would hear it twice. {INSTEAD}"
            )

    def _refuse(self) -> None:
        """Notes that no rank is to run it again from the next agreement on."""
        if self.agreed is None:
            super()._refuse()
            return
        self._is_repeatable = False
        if self.agreed:
            self._planner.forget_choices()

    def _note_full_home(self) -> None:
        self._planner.note_full_home(self)

    def _fall_back(self) -> None:
        """Takes least of the device, within what is agreed."""
        planner = self._planner
        if self.agreed:
            self.choice = ActivationChoice.RECOMPUTE
        elif self.agreed is None and (planner.is_compared or not planner.measures_room):
            super()._fall_back()
        elif planner.measures_room:
            self.choice = ActivationChoice.SEND

    @property
    def _is_held(self) -> bool:
        return self._is_repeatable if self.agreed is None else self.agreed

    def _drops(self) -> bool:
        if self.agreed is not None:
            return self.agreed
        self._promised.append(
            self._planner.is_compared and self._is_repeatable and self.choice.repeats
        )
        return self._promised[-1]

    def _measure(
        self, forward: Callable, args: tuple, kwargs: dict, inputs: list[torch.Tensor]
    ) -> Any:
        if self.agreed:
            forward = self._watched(forward)
        return super()._measure(forward, args, kwargs, inputs)

    def _watched(self, forward: Callable) -> Callable:
        """Wraps the forward of a larger input, which may change the block's state once, as a cache
        that grows. Its recomputation may not."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            if current_task() == -1:
                return forward(*args, **kwargs)
            before = self._state(args, kwargs)
            try:
                return forward(*args, **kwargs)
            finally:
                if before is None or before != self._state(args, kwargs):
                    raise UsageError(
                        f"{self.name} changes its state or its arguments each time that it runs,"
                        " which it did not with smaller inputs: to run it again for the backward"
                        " would give other gradients. Run the largest input in the first step, or"
                        " use Config(recompute=False) and the model's own gradient checkpointing."
                    )

        return watched

    def _note(self, kind: tuple, inputs: list[torch.Tensor], counted: Counted) -> None:
        if self.agreed is False:  # its products were not looked at
            counted = self._counted.scaled(self._saved / max(1, self._nbytes))
        super()._note(kind, inputs, counted)
