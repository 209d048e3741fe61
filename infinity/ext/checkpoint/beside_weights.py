"""BesideWeights: loads what a checkpoint holds beside weights, masters and moments: running
averages, and the anchors and momenta of an outer optimizer."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...core.units.handle import ParamHandle
from ..averages.weight_average import WeightAverage
from ..local_steps.outer_step import OuterStep
from .content import OUTER
from .home_loader import read_run
from .manifest import MOST_STEPS
from .saved_tensors import SavedTensors

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BesideWeights:
    """What a checkpoint holds beside the weights, and what takes it, if there is any.
    ``trained``: the parameters with optimizer state."""

    manifest: dict[str, Any]
    data: Path
    trained: list[ParamHandle]
    average: WeightAverage | None
    outer: OuterStep | None

    def check(self) -> None:
        """Raises CorruptionError unless all of it is there, UsageError if it is of another outer
        optimizer. Changes nothing."""
        average, count = self.average, self.manifest.get("average", 0)
        if type(count) is not int or not 0 <= count < MOST_STEPS:
            raise TypeError(f"average is {count!r}")
        if average is not None and count:
            saved = SavedTensors(self.data, self.manifest, files="average-")
            for handle in filter(average.has, self.trained):
                saved.check("average", handle.name, average.dtype_of(handle))
        outer, told = self.outer, self.manifest.get("outer")
        if outer is not None and told is not None:
            saved = SavedTensors(self.data, self.manifest, files="outer-")
            for kind, handle in self._of_outer(outer, told):
                saved.check(OUTER + kind, handle.name, torch.float32)

    def load(self) -> None:
        """Reads it to its places. What the checkpoint does not have begins anew."""
        self._load_average()
        outer, told = self.outer, self.manifest.get("outer")
        if outer is None and told is not None:
            logger.warning(
                "the checkpoint is of a group that trains apart, and this model is of none: make it"
                " one with infinity.LocalSteps first"
            )
        elif outer is not None and told is None:
            outer.restart(replace(outer.position, steps=0, at=0, probed=0))
        elif outer is not None and told is not None:
            outer.begin_load(told)
            with SavedTensors(self.data, self.manifest, files="outer-") as saved:
                for kind, handle in self._of_outer(outer, told):
                    run = handle.flat_param.layout.part_of_param("weight", handle.index)
                    values, _ = read_run(saved, handle, OUTER + kind, *run, torch.float32)
                    outer.write_own(kind, handle, values)

    def _of_outer(
        self, outer: OuterStep, told: dict[str, Any]
    ) -> Iterable[tuple[str, ParamHandle]]:
        for kind, unit in outer.expect(told):
            for handle in unit.handles:
                if handle.flat_param.spec.stepped:
                    yield kind, handle

    def _load_average(self) -> None:
        average, count = self.average, self.manifest.get("average", 0)
        if average is None:
            if count:
                logger.warning(
                    "the checkpoint has an average of the weights, and this model none: make it"
                    " with infinity.ema first"
                )
            return
        average.is_exchanged = False  # weights and averages are read to their own places
        if count:
            with SavedTensors(self.data, self.manifest, files="average-") as saved:
                for handle in filter(average.has, self.trained):
                    run = handle.flat_param.layout.part_of_param("weight", handle.index)
                    dtype = average.dtype_of(handle)
                    average.write_own(handle, read_run(saved, handle, "average", *run, dtype)[0])
        average.resume(count)
