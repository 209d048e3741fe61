"""Changes: what a wrap changes in a model before it reads it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ...config import Config
from .. import seams
from .described_model import DescribedModel, read_model


class Changes:
    """The changes that extensions make for one model."""

    def __init__(self) -> None:
        self._made: list[seams.Change] = [kind() for kind in seams.classes_of(seams.CHANGES)]

    def prepare(self, model: nn.Module) -> None:
        """Prepares the model for being read."""
        for each in self._made:
            each.prepare(model)

    def make(
        self, described: DescribedModel, optimizers: Sequence[torch.optim.Optimizer], config: Config
    ) -> DescribedModel:
        """Changes the model as ``config`` says. Returns it as it is then. Raises ConfigError."""
        for each in self._made:
            each.make(described.module, optimizers, config)
        is_changed = any(kept for each in self._made for kept in vars(each).values())
        return read_model(described.module) if is_changed else described

    def settle(self) -> None:
        """Lets go of what was before, once the values are at home."""
        for each in reversed(self._made):
            each.settle()

    def undo(self) -> None:
        """Restores the model."""
        for each in reversed(self._made):
            each.undo()

    def release(self) -> None:
        """Ends what was needed only while the model was wrapped."""
        for each in reversed(self._made):
            each.release()
