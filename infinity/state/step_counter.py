"""StepCounter: counts optimizer steps and backwards, and knows of a step that has begun but not ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class StepCounter:
    """How far training is."""

    index: int = 0  # of the last step that was made or begun
    backwards: int = 0  # that ended since the last step
    begun: bool = False  # so that the next step is the rest of one
    streaming: bool = False  # units are stepped as their gradients land, while the backward goes on
    untold: int = -1  # the last step, where it was cut short, carried to its end, and nobody was told that it was made
    # Tells the other ranks, at their next meeting, how far this one is.
    note_progress: Callable[..., None] = field(default=lambda *, steps, backwards: None, repr=False, kw_only=True)

    def stream(self) -> None:
        """Begins a step that is made unit by unit, in the backward."""
        self.index += 1
        self.begun = self.streaming = True

    def end_stream(self) -> None:
        """Ends the backward in which units are stepped: the next step makes the rest."""
        self.streaming = False

    def give_up(self) -> None:
        """Forgets the step that has begun: it was lost."""
        self.begun = self.streaming = False

    def finish(self, index: int) -> None:
        """Ends step ``index``, of which no backward is left. Done twice it is done once."""
        self.index, self.begun, self.untold, self.backwards = index, False, index, 0
        self.note_progress(steps=index, backwards=0)

    def tell(self) -> None:
        """Notes that the caller knows of the last step."""
        self.untold = -1

    def count_backwards(self, count: int) -> None:
        """Sets how many backwards have ended since the last step."""
        self.untold, self.backwards = -1, count
        self.note_progress(steps=self.index, backwards=count)

    def forget_backwards(self) -> None:
        """Forgets the backwards since the last step, whose gradients are gone: none of them counts."""
        if self.backwards:
            self.count_backwards(0)

    def resume(self, index: int) -> None:
        """Goes on from a checkpoint after ``index`` steps."""
        self.index, self.begun = index, False
