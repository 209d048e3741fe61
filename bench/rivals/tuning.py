"""Tuning: the best of a rival's settings, by several trials of each."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from infinity.tools.bench.rounds import tell

TRIALS = 3  # a bad moment in one must not choose a setting for all rounds


@dataclass
class Tuned:
    """The settings of one rival, and what was tried. ``best``: direction -> setting."""

    name: str
    settings: Sequence[Any]
    best: dict[str, Any] = field(default_factory=dict)
    trials: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def of(self, direction: str, seconds: Callable[[Any], float]) -> Any:
        """Returns the setting with the least median of ``seconds``; it is looked for once in each
        direction, in turns."""
        if direction not in self.best:
            found: dict[Any, list[float]] = {setting: [] for setting in self.settings}
            for trial in range(TRIALS):
                tell(f"{self.name}: {direction}, trial {trial + 1} of {len(found)} settings")
                for setting, times in found.items():
                    times.append(seconds(setting))
            self.best[direction] = min(found, key=lambda each: statistics.median(found[each]))
            self.trials[direction] = {str(each): times for each, times in found.items()}
        return self.best[direction]

    def told(self) -> dict[str, Any]:
        """Returns the settings that were chosen, and the seconds of all trials."""
        chosen = {direction: str(setting) for direction, setting in self.best.items()}
        return {"chosen": chosen, "trials": self.trials}
