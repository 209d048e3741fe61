"""Changes: what a wrap changes in a model before it reads it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...config import Config
from ...ext.coded.coded_weights import CodedWeights
from ...ext.dtensor.retie import Ties
from ...ext.packed.packed import Packed
from ...ext.packed.quantize import Quantized
from .described_model import DescribedModel, read_model
from .lasting import Lasting


class Changes:
    """Pairs that are tied, layers that will be packed, weights that stay coded, and the parts of
    packed weights."""

    def __init__(self) -> None:
        self._ties, self._quantized, self.packed = Ties(), Quantized(), Packed()
        self.lasting = Lasting()
        self._coded = CodedWeights()

    def make(
        self, described: DescribedModel, optimizers: Sequence[torch.optim.Optimizer], config: Config
    ) -> DescribedModel:
        """Changes the model as ``config`` says. Returns it as it is then. Raises ConfigError."""
        model = described.module
        self._ties.tie(model, optimizers, config.tied)
        self._quantized.install(model, config.quantize, config.weights)
        self._coded.install(model, config.weights, config.quantize)
        self.packed.install(model, read=config.weights is not None)
        made = (self._ties, self._quantized, self._coded, self.packed)
        is_changed = any(kept for each in made for kept in vars(each).values())
        return read_model(model) if is_changed else described

    def settle(self) -> None:
        """Lets go of what was before, once the values are at home."""
        self.packed.settle()
        self._coded.settle()
        self._quantized.settle()

    def undo(self) -> None:
        """Restores the model."""
        self.lasting.remove()
        self.packed.remove()
        self._coded.remove()
        self._quantized.remove()
        self._ties.undo()
