"""StepCounter: counts optimizer steps and backwards, and tracks a step that has begun but not
ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class StepCounter:
    """Progress of training."""

    index: int = 0  # of the last step that was made or begun
    backwards: int = 0  # backwards that ended since the last step
    begun: bool = False  # the next step is the rest of one
    streaming: bool = False  # units are stepped in the backward, as their gradients land
    untold: int = -1  # last step that recovery finished after an interrupt; -1 once reported
    done: int = 0  # index of the last step that ended: other ranks compare it with theirs
    forwards: int = 0  # of training that were compared with other ranks since, or since a backward

    def stream(self) -> None:
        """Begins a step that is made unit by unit, in the backward."""
        self.index += 1
        self.begun = self.streaming = True

    def end_stream(self) -> None:
        """Ends the backward in which units are stepped: the next step makes the rest."""
        self.streaming = False

    def give_up(self) -> None:
        """Drops the step that has begun: it was lost."""
        self.begun = self.streaming = False

    def finish(self, index: int) -> None:
        """Ends step ``index``, and resets the count of backwards. Idempotent."""
        self.index, self.begun, self.untold = index, False, index
        self.done, self.backwards, self.forwards = index, 0, 0

    def reported(self, value: Any) -> Any:
        """Notes that the last step was reported to the caller, by the return of ``value``."""
        # One statement: an exception behind it would have the caller step the same gradients twice.
        return (setattr(self, "untold", -1), value)[1]  # type: ignore[func-returns-value]

    def count_backwards(self, count: int) -> None:
        """Sets the number of backwards that ended since the last step."""
        self.untold, self.done, self.backwards, self.forwards = -1, self.index, count, 0

    def count_forward(self) -> int:
        """Counts a forward of training. Returns its number since the last step or backward."""
        self.forwards += 1
        return self.forwards

    def forget_backwards(self) -> None:
        """Resets the count of backwards since the last step, because their gradients are gone."""
        if self.backwards:
            self.count_backwards(0)

    def resume(self, index: int) -> None:
        """Continues from a checkpoint after ``index`` steps."""
        self.index, self.begun = index, False
