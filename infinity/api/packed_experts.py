"""Packed experts: packs frozen experts that are one parameter. Each has the bits that the library
of the format gives a linear layer.

later   experts on meta, which a wrap packs when it reads them
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import nn

from ..checkpoint.source import Source
from ..checkpoint.unpacked import CodedSource
from ..state.coded import Coded
from ..state.experts import has_experts
from ..state.partition import is_managed
from ..state.schemes import Nf4, Scaled, Scheme
from .packers import PACKERS

LATER = "_infinity_packed_later"  # attribute of a module with experts on meta: a format


def experts_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Yields the weights of experts in ``model`` that can be packed, each with its name and
    module."""
    for path, module in model.named_modules():
        for key, param in module._parameters.items() if has_experts(module) else ():
            if _is_packable(param):
                yield f"{path}.{key}" if path else key, module, param


def _is_packable(param: torch.Tensor | None) -> TypeGuard[nn.Parameter]:
    return (
        type(param) is nn.Parameter
        and not param.requires_grad
        and param.is_floating_point()
        and param.dim() == 3
        and param.shape[-1] % 2 == 0  # two codes of NF4 are a byte
        and is_managed(param)
    )


def pack_experts(model: nn.Module, format: str) -> None:
    """Packs experts in place. Notes the ``format`` of those on meta."""
    for _, module, param in list(experts_of(model)):
        if param.is_meta:
            module.__dict__[LATER] = format
            continue
        made = Coded(*_pack(format, param.data), _scheme_of(format, param), param.dtype)
        torch.utils.swap_tensors(param, nn.Parameter(made, requires_grad=False))


@dataclass(frozen=True)
class ExpertsSource(CodedSource):
    """The codes that are made of dense experts when they are read.

    format
        Of the codes.
    given
        The dense experts.
    """

    format: str
    given: Source

    @classmethod
    def of(cls, format: str, given: Source) -> ExpertsSource:
        """Returns the source of the codes of ``given``, without reading it."""
        one = torch.empty((1, *given.shape[1:]), dtype=given.dtype, device="meta")
        codes, scales = (_like(each, given.shape[0]) for each in _pack(format, one))
        return cls(codes, scales, _scheme_of(format, one), format, given)

    def read(self) -> list[torch.Tensor]:
        """Reads the dense experts, and packs them."""
        return list(_pack(self.format, self.given.read()))


def _like(part: torch.Tensor, count: int) -> Source:
    """Describes the same part of ``count`` experts, which is read with the others."""
    return Source(torch.Size([count, *part.shape[1:]]), part.dtype, lambda: part)


def _scheme_of(format: str, dense: torch.Tensor) -> Scheme:
    return Nf4(dense.dtype) if format == "nf4" else Scaled((1, dense.shape[-1]))


def _pack(format: str, dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the codes and scales of ``dense`` experts."""
    pack = partial(PACKERS[format], dense.dtype)
    codes, scales = zip(*(_parts_of(pack(each.contiguous()).weight, each) for each in dense))
    return torch.stack(codes), torch.stack(scales)


def _parts_of(weight: Any, dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes and scales of a layer's packed ``weight``, which was ``dense``."""
    if (state := getattr(weight, "quant_state", None)) is None:
        return weight.qdata, weight.scale
    return weight.data.reshape(len(dense), -1), Nf4.scales_of(state)
