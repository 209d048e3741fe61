"""BesideWeights: loads what a checkpoint holds of arrays that features keep beside the weights."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.units.flat_param import FlatParam
from ...core.units.kept import Kept, KeptArrays
from .home_loader import read_run
from .saved_tensors import SavedTensors

logger = logging.getLogger(__name__)

# What a manifest has beside what keepers of arrays tell
OF_EVERY_SAVE = frozenset(
    "format data parameters optimizers plain random data_ranks parts step_index extra"
    " persistent_buffers config files".split()
)
MAKERS = {"average": "infinity.ema", "outer": "infinity.LocalSteps"}  # told in a warning


@dataclass(frozen=True)
class BesideWeights:
    """What a checkpoint holds beside the weights, and the arrays that take it, if there are any."""

    manifest: dict[str, Any]
    data: Path
    kept: KeptArrays

    def check(self) -> None:
        """Raises CorruptionError unless all of it is there, UsageError if it is of other arrays
        than these. Changes nothing."""
        for name, kept in self.kept.saved().items():
            if saved_values := self.manifest.get(name):
                expected = _expected(kept, saved_values)
                with self._saved(name, kept) as saved:
                    for each, flat_param in expected:
                        for handle in flat_param.handles:
                            saved.check(each.name, handle.name, each.dtype_of(flat_param))

    def load(self) -> None:
        """Reads it to its places. What the checkpoint does not have begins anew."""
        ours = self.kept.saved()
        for name in self.manifest.keys() - OF_EVERY_SAVE - ours.keys():
            if self.manifest[name]:
                logger.warning(
                    "the checkpoint has %r beside the weights, which this model does not keep: make"
                    " it one with %s first",
                    name,
                    MAKERS.get(name, "what has made it"),
                )
        for name, kept in ours.items():
            saved_values = self.manifest.get(name) or None
            if saved_values is None:
                for each in kept:
                    self.kept.clear(each)
            if kept[0].keeper is not None:
                kept[0].keeper.resume(saved_values)
            if saved_values is not None:
                self._read(name, kept, saved_values)

    def _read(self, name: str, kept: list[Kept], told: Any) -> None:
        with self._saved(name, kept) as saved:
            for each, flat_param in _expected(kept, told):
                for handle in flat_param.handles:
                    run = flat_param.layout.part_of_param("weight", handle.index)
                    dtype = each.dtype_of(flat_param)
                    each.write_own(handle, read_run(saved, handle, each.name, *run, dtype)[0])

    def _saved(self, name: str, kept: list[Kept]) -> SavedTensors:
        names = [each.name for each in kept]
        return SavedTensors(self.data, self.manifest, files=f"{name}-", arrays=names)


def describe(kept: list[Kept]) -> Any:
    """Returns what the keeper of ``kept`` tells; False, 0 or None: nothing is saved of it yet."""
    return True if kept[0].keeper is None else kept[0].keeper.describe()


def _expected(kept: list[Kept], told: Any) -> list[tuple[Kept, FlatParam]]:
    """Lists the arrays that a checkpoint has, after the keeper's check of what was ``told``."""
    keeper = kept[0].keeper
    expected = None if keeper is None else keeper.expect(told)
    return [
        (each, flat_param)
        for each in kept
        for flat_param in (each.flat_params if expected is None else expected[each.name])
    ]
