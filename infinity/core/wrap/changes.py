"""Changes: what a wrap changes in a model before it reads it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ...config import Config
from ...ext.coded.coded_weights import CodedWeights
from ...ext.dtensor.retie import Ties
from ...ext.packed.packed import Packed
from ...ext.packed.quantize import Quantized
from .lasting import Lasting


class Changes:
    """Pairs that are tied, layers that will be packed, weights that stay coded, and the parts of
    packed weights."""

    def __init__(self) -> None:
        self._ties, self._quantized, self.packed = Ties(), Quantized(), Packed()
        self.lasting = Lasting()
        self._coded = CodedWeights()

    def make(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], config: Config
    ) -> None:
        """Changes the model as ``config`` says. Raises ConfigError."""
        self._ties.tie(model, optimizers, config.tied)
        self._quantized.install(model, config.quantize, config.weights)
        self._coded.install(model, config.weights, config.quantize)
        self.packed.install(model, read=config.weights is not None)

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
