"""CodedWeights: keeps frozen weights of a model in the codes of their folder, or packs them.

coded   a weight of the model that is :class:`~.coded.Coded`: FP8, MXFP4 or GGUF of a file, or
        experts that are packed
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ...core.run.registry import is_wrapped
from ...core.seams import Change
from ...core.units.added import always_rests
from ...core.units.inner import has_inner, inner_tensors
from ...core.wrap.described_model import is_managed
from ...core.wrap.parts import parts_of
from ...errors import UsageError
from ...files.module_names import Incoming, base_name, base_of
from ...files.source import Source
from ...files.weight_files import WeightFiles
from ..packed.packed import SMALL_NBYTES, is_code, send_parts
from ..packed.unpacked import FP8, CodedSource, scaled_weights, without_scales
from .coded import Coded
from .gguf_file import GgufFile, gguf_path
from .packed_experts import LATER, experts_to_pack
from .schemes import Scaled

logger = logging.getLogger(__name__)

CODED = "_infinity_coded"  # attribute of a module: names of its weights -> sources of codes


class CodedWeights(Change):
    """The weights of one model that a wrap keeps coded."""

    def __init__(self) -> None:
        # The parameter, and what has its place before and after
        self._swapped: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._modules: list[nn.Module] = []
        self._noted: list[nn.Module] = []  # whose experts were to be packed

    def make(self, model: nn.Module, optimizers: Sequence[Any], config: Any) -> None:
        """Makes frozen weights on meta coded, if the files ``config.weights`` have codes of them,
        and experts that ``config.quantize`` names a format for. They stay the same objects. Raises
        CorruptionError for scales that do not fit, and ConfigError for experts without values."""
        weights, format = config.weights, config.quantize
        self._noted = [each for each in model.modules() if LATER in each.__dict__]
        # Layers with scales of their own take the folder's tensors as they are.
        if weights is not None and not any(each.dtype in FP8 for each in model.parameters()):
            self._swap(model, _scaled_in(model, weights))
        self._swap(model, experts_to_pack(model, weights, format))

    def _swap(self, model: nn.Module, sources: Mapping[str, CodedSource]) -> None:
        for name, scaled in sources.items():
            path, _, key = name.rpartition(".")
            module, param = model.get_submodule(path), model.get_parameter(name)
            made = nn.Parameter(_on_meta(scaled, param.dtype), False)
            made.__dict__ = param.__dict__ | made.__dict__
            try:
                torch.utils.swap_tensors(param, made)
            except RuntimeError:
                logger.warning("%s stays dense: something beside its module refers to it", name)
                continue
            self._swapped.append((param, made))
            self._modules.append(module)
            module.__dict__.setdefault(CODED, {})[key] = scaled

    def settle(self) -> None:
        """Lets go of the files, once the values are at home."""
        for module in self._modules:
            module.__dict__.pop(CODED, None)
        for module in self._noted:
            module.__dict__.pop(LATER, None)
        for each in (self._modules, self._noted, self._swapped):
            each.clear()

    def undo(self) -> None:
        """Puts the weights of before back: dense ones in memory, or on meta."""
        for module in self._modules:
            module.__dict__.pop(CODED, None)
        for param, made in reversed(self._swapped):
            torch.utils.swap_tensors(param, made)
        for each in (self._modules, self._noted, self._swapped):
            each.clear()


def dequantize(model: nn.Module) -> nn.Module:
    """Makes the weights of ``model`` dense that are in the codes of a file, or experts in those of
    :func:`quantize`, in place, and returns it. They stay frozen, in the dtype of the model.

    For a model that is not wrapped: to merge adapters into it, to train it, or to save it. Warns of
    weights that a library has packed. Raises UsageError for a wrapped model.
    """
    if is_wrapped(model):
        raise UsageError(
            "dequantize: the model is wrapped, and its weights are at home. infinity.unwrap_model"
            " gives it back; infinity.save_pretrained writes dense weights as it is"
        )
    for param in list(model.parameters()):
        if isinstance(param, Coded):
            made = nn.Parameter(param.dequantize(), requires_grad=False)
            made.__dict__ = param.__dict__ | made.__dict__
            torch.utils.swap_tensors(param, made)
    left = [name for name, param in model.named_parameters() if has_inner(param) or is_code(param)]
    if left:
        logger.warning(
            "dequantize leaves %d weights as they are (%s, ...): the library that packed them makes"
            " them dense",
            len(left),
            left[0],
        )
    return model


def coded_parts(model: nn.Module) -> set[torch.Tensor]:
    """Returns the codes and scales of a model's coded weights that move."""
    return {
        part
        for module in model.modules()
        for key in module.__dict__.get(CODED, ())
        for part in inner_tensors(module._parameters[key])
        if always_rests(part)
    }


def send_coded(model: nn.Module, send: Callable[..., None]) -> None:
    """Reads the codes and scales of one module after the other, and sends them home. ``send``: as
    `send_parts` has it, and told by ``drawn`` whether ranks may have other values."""
    for module in model.modules():
        if (scaled := module.__dict__.get(CODED)) is None:
            continue
        made = nn.Module()
        for key, param in module._parameters.items():
            made._parameters[key] = param
            if param is not None and key in scaled:
                made._parameters[key] = _coded(scaled[key], param.dtype)
        drawn = any(each.may_differ for each in scaled.values())
        send_parts(module, made, partial(send, drawn=drawn))


def _coded(scaled: CodedSource, dtype: torch.dtype) -> nn.Parameter:
    codes, *scales = scaled.read()
    weight = Coded(codes, scales[0] if scales else None, scaled.scheme, dtype)
    return nn.Parameter(weight, requires_grad=False)


def _on_meta(scaled: CodedSource, dtype: torch.dtype) -> Coded:
    codes, *scales = (
        torch.empty(each.shape, dtype=each.dtype, device="meta")
        for each in (scaled.codes, scaled.scales)
        if each is not None
    )
    return Coded(codes, scales[0] if scales else None, scaled.scheme, dtype)


def _scaled_in(model: nn.Module, weights: str | os.PathLike) -> dict[str, CodedSource]:
    """Returns the frozen weights on meta of which the files have codes, each by its first name in
    ``model``."""
    tables = _tables(model)
    named = model.named_parameters(remove_duplicate=False)
    names = {name: param for name, param in named if _may_be_coded(param) and param not in tables}
    if not names:
        return {}
    part = parts_of(model)[0]
    if (file := gguf_path(weights)) is not None:
        of_base = GgufFile(file, base_of(part)).coded()
        sources = {name: of_base.get(base_name(name)) for name in names}
    else:
        sources = _scaled_in_folder(part, weights, names)
    ways: dict[nn.Parameter, list[tuple[str, CodedSource]]] = {}
    for name, each in sources.items():
        if each is not None and _pays(each, names[name]):
            ways.setdefault(names[name], []).append((name, each))
    # The files may have a tied weight under several names: whether these are one is seen when dense
    return dict(of_one[0] for of_one in ways.values() if len(of_one) == 1)


def _tables(model: nn.Module) -> set[torch.Tensor]:
    """Returns the weights of embeddings alone, of which a forward brings only the rows it reads."""
    others = {
        param
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for param in module.parameters(recurse=False)
    }
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    return tables - others


def _pays(scaled: CodedSource, param: nn.Parameter) -> bool:
    """Tells whether codes are of the parameter's shape, and smaller than it."""
    nbytes = sum(each.nbytes for each in (scaled.codes, scaled.scales) if each is not None)
    return (
        scaled.scheme.shape(scaled.codes.shape) == param.shape
        and nbytes < param.numel() * param.itemsize
        and scaled.codes.nbytes >= SMALL_NBYTES  # smaller codes would stay with the module
    )


def _scaled_in_folder(
    part: nn.Module, weights: str | os.PathLike, names: Mapping[str, nn.Parameter]
) -> dict[str, CodedSource | None]:
    stored = WeightFiles(weights).sources()
    scaled = scaled_weights(stored, weights)
    if not scaled:
        return {}
    dense = without_scales(stored, weights)
    incoming = Incoming(part, dense, names)
    origins = {id(source): name for name, source in dense.items()}
    sources: dict[str, CodedSource | None] = {}
    for name, source in incoming.sources.items():
        origin = origins.get(id(source))
        sources[name] = (
            _joined(part, name, names[name], incoming.joined, scaled)
            if origin is None
            else scaled.get(origin)
        )
    return sources


def _may_be_coded(param: nn.Parameter) -> bool:
    return (
        param.is_meta
        and not param.requires_grad
        and type(param) is nn.Parameter
        and param.is_floating_point()
        and is_managed(param)
    )


def _joined(
    part: nn.Module,
    name: str,
    param: nn.Parameter,
    joined: Mapping[str, list[str]],
    scaled: Mapping[str, CodedSource],
) -> CodedSource | None:
    """Returns the weight that transformers makes of whole weights of the folder, as of one matrix
    for each expert; None if their blocks do not stay whole."""
    origins = joined.get(name, [])
    inputs = {origin: scaled[origin] for origin in origins if origin in scaled}
    schemes = {each.scheme for each in inputs.values()}
    if len(inputs) != len(origins) or len(schemes) != 1:
        return None
    (scheme,) = schemes
    if not isinstance(scheme, Scaled) or any(
        size % block
        for each in inputs.values()
        for size, block in zip(each.codes.shape[-2:], scheme.block)
    ):
        return None

    def join(parts: dict[str, Source]) -> Source | None:
        return Incoming(part, parts, {name: param}).sources.get(name)

    codes = join({origin: each.codes for origin, each in inputs.items()})
    scales = join({origin: _matrix(each.scales) for origin, each in inputs.items() if each.scales})
    if codes is None or scales is None:
        return None
    counts = [size // block for size, block in zip(codes.shape[-2:], scheme.block)]
    fits = scales.shape == (*codes.shape[:-2], *counts)
    return CodedSource(codes, scales, scheme) if fits else None


def _matrix(scales: Source) -> Source:
    """Returns scales as a matrix: one scale of a whole weight is of one row and column."""
    if len(scales.shape) == 2:
        return scales
    shape = torch.Size([1, 1])
    return Source(shape, scales.dtype, lambda: scales.read().reshape(shape))
