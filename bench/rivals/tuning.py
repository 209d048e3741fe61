"""Tuning: the best of a rival's settings, by several trials of each.

The best may be kept in ``rivals.json``, in the cache beside the profiles of the disks: a long sweep
runs once for a disk and a version of the rival. The file may be deleted at any time.
"""

from __future__ import annotations

import datetime
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infinity.core.machine.disk_profile import Disk, cache_folder
from infinity.tools.bench.results import write_whole
from infinity.tools.bench.rounds import tell

KEPT = "rivals.json"
TRIALS = 3  # a bad moment in one must not choose a setting for all rounds


@dataclass
class Tuned:
    """The settings of one rival, and what was tried. ``best``: direction -> setting.

    key
        Of what is kept, the disk and the rival's version (:func:`key_of`); "" keeps nothing.
    retune
        Look for the best again, in spite of what is kept.
    """

    name: str
    settings: Sequence[Any]
    key: str = ""
    retune: bool = False
    best: dict[str, Any] = field(default_factory=dict)
    trials: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)  # direction -> date of its trials

    def of(self, direction: str, seconds: Callable[[Any], float]) -> Any:
        """Returns the setting with the least median of ``seconds``, which is kept or looked for
        once in each direction, in turns."""
        if direction not in self.best and not self._take(direction):
            found: dict[Any, list[float]] = {setting: [] for setting in self.settings}
            for trial in range(TRIALS):
                tell(f"{self.name}: {direction}, trial {trial + 1} of {len(found)} settings")
                for setting, times in found.items():
                    times.append(seconds(setting))
            self.best[direction] = min(found, key=lambda each: statistics.median(found[each]))
            self.trials[direction] = {str(each): times for each, times in found.items()}
            self._keep(direction)
        return self.best[direction]

    def told(self) -> dict[str, Any]:
        """Returns the settings that were chosen, the seconds of all trials, and the dates of those
        that an earlier run has made."""
        chosen = {direction: str(setting) for direction, setting in self.best.items()}
        return {"chosen": chosen, "trials": self.trials, "from_cache": self.kept}

    def _take(self, direction: str) -> bool:
        """Takes the best that is kept, if there is one that is still a setting."""
        found = {} if self.retune or not self.key else _read().get(self.key, {})
        date, best = (found.get(direction, {}).get(each) for each in ("date", "best"))
        known = {str(setting): setting for setting in self.settings}
        if best not in known or not isinstance(date, str):
            return False
        self.best[direction], self.kept[direction] = known[best], date
        return True

    def _keep(self, direction: str) -> None:
        if not self.key:
            return
        today = datetime.date.today().isoformat()
        all_kept = _read()
        mine = all_kept.setdefault(self.key, {})
        mine[direction] = {"best": str(self.best[direction]), "date": today}
        cache_folder().mkdir(parents=True, exist_ok=True)
        write_whole(cache_folder() / KEPT, json.dumps(all_kept, indent=1) + "\n")


def key_of(path: str, *more: str) -> str:
    """Returns the key of what is kept for the disk of a file. ``more``: what else it depends on."""
    return " ".join((Disk(str(Path(path).parent)).device, *more))


def _read() -> dict[str, Any]:
    """Reads what is kept; empty if that is nothing, or no file of ours."""
    try:
        found = json.loads((cache_folder() / KEPT).read_text())
        whole = all(isinstance(each, dict) for one in found.values() for each in one.values())
        return found if whole else {}
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}
