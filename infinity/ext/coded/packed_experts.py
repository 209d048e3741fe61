"""Packed experts: packs frozen experts that are one parameter. Each has the bits that the library
of the format gives a linear layer.

later   experts on meta, which a wrap packs when it reads them
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from ...core.wrap.described_model import is_managed
from ...core.wrap.parts import parts_of
from ...errors import ConfigError, InternalError
from ...files.module_names import Incoming, base_of
from ...files.source import Source
from ...files.weight_files import WeightFiles
from ..packed.packed import is_code
from ..packed.packers import PACKERS, places_of, to_pack
from ..packed.unpacked import CodedSource, without_scales
from ..rows.experts import exchanges_of, has_experts
from .coded import Coded
from .gguf_file import GgufFile, gguf_path
from .schemes import Nf4, Scaled, Scheme, Transposed

logger = logging.getLogger(__name__)

FORMATS = "nf4", "int8", "fp8"  # whose codes and scales are read here
LATER = "_infinity_packed_later"  # attribute of a module with experts on meta: a format
DENSE = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Experts:
    """A weight of experts that can be packed."""

    name: str
    module: nn.Module
    key: str  # the module's attribute
    is_transposed: bool  # [experts, inputs, outputs]

    @property
    def param(self) -> nn.Parameter:
        """The weight."""
        return cast(nn.Parameter, self.module._parameters[self.key])


def experts_of(model: nn.Module, format: str) -> Iterator[Experts]:
    """Yields the weights of experts in ``model`` that can be packed in ``format``: frozen, dense
    and not tied. None for a format that a script has added: its codes are not known."""
    if format not in FORMATS:
        return
    places = places_of(model)
    for path, module in model.named_modules():
        # Experts of transformers' FP8 layers are codes already.
        if has_experts(module) and not any(map(is_code, module.parameters(recurse=False))):
            for key, param in module._parameters.items():
                name = f"{path}.{key}" if path else key
                experts = Experts(name, module, key, getattr(module, "is_transposed", False))
                if places[param] == 1 and _is_packable(param, format, experts.is_transposed):
                    yield experts


def _is_packable(param: torch.Tensor | None, format: str, is_transposed: bool) -> bool:
    return (
        type(param) is nn.Parameter
        and not param.requires_grad
        and param.dtype in DENSE
        and param.dim() == 3
        # Two codes of NF4 are a byte.
        and (format != "nf4" or param.shape[1 if is_transposed else 2] % 2 == 0)
        and is_managed(param)
    )


def pack_experts(model: nn.Module, format: str) -> None:
    """Packs experts in place. Notes the ``format`` of those on meta."""
    for experts in list(experts_of(model, format)):
        param = experts.param
        if param.is_meta:
            experts.module.__dict__[LATER] = format
            continue
        codes, scales = _pack(format, param.data, experts.is_transposed)
        made = Coded(codes, scales, _scheme_of(format, param, experts.is_transposed), param.dtype)
        packed = nn.Parameter(made, requires_grad=False)
        packed.__dict__ = param.__dict__ | packed.__dict__
        experts.module._parameters[experts.key] = packed


@dataclass(frozen=True)
class ExpertsSource(CodedSource):
    """The codes that are made of dense experts when they are read.

    format, is_transposed
        Of the codes; of the dense experts.
    given
        The dense experts.
    """

    format: str
    is_transposed: bool
    given: Source

    @classmethod
    def of(cls, format: str, is_transposed: bool, given: Source) -> ExpertsSource:
        """Returns the source of the codes of ``given``, without reading it."""
        one = torch.empty((1, *given.shape[1:]), dtype=given.dtype, device="meta")
        made = _pack(format, one, is_transposed)
        codes, scales = (_described(each, given.shape[0]) for each in made)
        scheme = _scheme_of(format, one, is_transposed)
        return cls(codes, scales, scheme, format, is_transposed, given)

    def read(self) -> list[torch.Tensor]:
        """Reads the dense experts, and packs them."""
        return list(_pack(self.format, self.given.read(), self.is_transposed))

    @property
    def may_differ(self) -> bool:
        """Whether ranks may have other values."""
        return self.given.may_differ


def experts_to_pack(
    model: nn.Module, weights: str | os.PathLike | None, format: str | None
) -> dict[str, ExpertsSource]:
    """Returns experts that are to be packed, by their names in ``model``. Raises ConfigError for
    experts without values, or that were to be packed in another format."""
    noted = {each.__dict__[LATER] for each in model.modules() if LATER in each.__dict__}
    formats: list[str] = sorted(noted if format is None else noted | {format})
    if not formats:
        return {}
    if len(formats) > 1:
        raise ConfigError(
            f"experts are to be packed as {' and '.join(formats)}: give infinity.quantize and"
            " Config(quantize=...) the same format"
        )
    (chosen,) = formats
    if any(map(exchanges_of, model.modules())):
        logger.warning("quantize=%r: experts that are divided over ranks stay dense", chosen)
    experts = [
        each
        for each in experts_of(model, chosen)
        if format is not None or LATER in each.module.__dict__
    ]
    on_meta = {each.name: each.param for each in experts if each.param.is_meta}
    dense = _dense_in(model, weights, on_meta) if on_meta and weights is not None else {}
    sources = {
        name: to_pack(name, dense.get(name), param.shape, weights).to(param.dtype)
        for name, param in on_meta.items()
    }
    sources |= {each.name: Source.lent(each.param) for each in experts if each.name not in on_meta}
    return {
        each.name: ExpertsSource.of(chosen, each.is_transposed, sources[each.name])
        for each in experts
    }


def _dense_in(
    model: nn.Module, weights: str | os.PathLike, names: Mapping[str, nn.Parameter]
) -> dict[str, Source]:
    """Returns the weights ``names`` in files, dense."""
    part = parts_of(model)[0]
    if (file := gguf_path(weights)) is not None:
        stored = GgufFile(file, base_of(part)).sources()
    else:
        stored = without_scales(WeightFiles(weights).sources(), weights)
    return Incoming(part, stored, names).sources


def _described(part: torch.Tensor, count: int) -> Source:
    """Returns the source of the same part of ``count`` experts: codes and scales are read
    together, not by this one."""

    def read() -> torch.Tensor:
        raise InternalError("codes and scales of experts are read together")

    return Source(torch.Size([count, *part.shape[1:]]), part.dtype, read)


def _scheme_of(format: str, dense: torch.Tensor, is_transposed: bool) -> Scheme:
    inputs = dense.shape[1 if is_transposed else 2]
    scheme = Nf4(dense.dtype) if format == "nf4" else Scaled((1, inputs))
    return Transposed(scheme) if is_transposed else scheme


def _pack(
    format: str, dense: torch.Tensor, is_transposed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the codes and scales of ``dense`` experts, each as a matrix of outputs x inputs."""
    pack = partial(PACKERS[format], dense.dtype)
    matrices = [(each.T if is_transposed else each).contiguous() for each in dense]
    codes, scales = zip(*(_parts_of(pack(each).weight, each) for each in matrices))
    return torch.stack(codes), torch.stack(scales)


def _parts_of(weight: Any, dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes and scales of a layer's packed ``weight``, which was ``dense``."""
    if (state := getattr(weight, "quant_state", None)) is None:
        return weight.qdata, weight.scale
    return weight.data.reshape(len(dense), -1), Nf4.scales_of(state)
