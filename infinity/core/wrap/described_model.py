"""DescribedModel: a model's parameters and buffers, read once.

Checks and comparisons over the ranks work on it, so each sees the same names in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from ...ext.packed.packed import is_packed, named_tensors
from ...ext.rows.experts import divided_parameters
from ..units.forms import is_plain, local_of
from .partition import is_managed, parameter_names


@dataclass(frozen=True, eq=False)
class DescribedModel:
    """The parameters and buffers of one model. Valid until a module or a tie of it is replaced."""

    module: nn.Module
    params: dict[str, nn.Parameter]  # each once, by its first name
    names: list[tuple[str, nn.Parameter]]  # all names, of tied parameters too
    buffers: dict[str, torch.Tensor]
    divided: frozenset[nn.Parameter]  # of experts that are divided over ranks

    @property
    def managed(self) -> dict[str, nn.Parameter]:
        """The parameters that the engine moves."""
        return {name: param for name, param in self.params.items() if is_managed(param)}

    @property
    def distributed(self) -> dict[str, nn.Parameter]:
        """The parameters of which ranks have parts, managed or not."""
        return {name: param for name, param in self.params.items() if not is_plain(param)}

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's parts of the managed parameters."""
        return sum(local_of(param).nbytes for param in self.managed.values())


def read_model(module: nn.Module) -> DescribedModel:
    """Reads the parameters and buffers of ``module``, whose bytes it does not touch."""
    return DescribedModel(
        module,
        {names[0]: cast(nn.Parameter, p) for p, names in parameter_names(module).items()},
        list(named_tensors(module)),
        {name: each for name, each in module.named_buffers() if not is_packed(each)},
        frozenset(param for each in module.modules() for param in divided_parameters(each)),
    )
