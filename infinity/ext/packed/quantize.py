"""Quantize: packs the frozen linear layers and experts of a model in fewer bits, with the bits of
the library whose format it is.

format      how a library packs a linear layer: "nf4" (bitsandbytes), "int8" and "fp8" (torchao)
dense       a weight before it is packed
described   a packed layer on meta, whose parts have shapes and no values. Its weight is packed on
            the way home, so that one dense weight is in memory at a time
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ...core.seams import Change
from ...core.units.added import always_rests, own_tensors
from ...core.units.inner import has_inner
from ...core.wrap.described_model import is_managed
from ...core.wrap.parts import parts_of
from ...errors import ConfigError
from ...files.module_names import Incoming, base_of
from ...files.source import Source
from ...files.weight_files import WeightFiles
from ..coded.gguf_file import gguf_path
from ..coded.packed_experts import experts_of, pack_experts
from .packed import is_code, send_parts
from .packers import PACKERS, packed_by_bitsandbytes_as, places_of, to_pack
from .unpacked import compute_dtype_of, packed_by_bitsandbytes

LEAST_NUMEL = 4096  # smaller weights stay dense, as in bitsandbytes
DESCRIBED = "_infinity_described"  # attribute of a described layer


def quantize(model: nn.Module, format: str) -> nn.Module:
    """Packs the weights of the frozen linear layers and experts of ``model`` in place, and returns
    it.

    format
        ``"nf4"``: bitsandbytes' 4-bit normal floats with double quantisation (Dettmers et al.
        2023). ``"int8"``, ``"fp8"``: torchao's codes with a scale per output.

    :func:`wrap_model` packs weights on ``meta`` when it reads them. Embeddings, output layers, tied
    and trained weights stay dense. Experts that are one parameter get codes, and are dense where
    they are used; :func:`infinity.dequantize` makes them dense for good. Raises ConfigError if
    there is nothing to pack, or the library is not installed.
    """
    for parent, name, layer in _packed(model, format, now=True):
        setattr(parent, name, layer)
    pack_experts(model, format)
    return model


class Quantized(Change):
    """The layers of a model that a wrap packs."""

    def __init__(self) -> None:
        self._replaced: list[tuple[nn.Module, str, nn.Module]] = []
        self._layers: list[nn.Module] = []

    def make(self, model: nn.Module, optimizers: Sequence[Any], config: Any) -> None:
        """Puts described layers in the places of linear ones: those that ``config.weights``, a
        folder, has packed, and the frozen ones that ``config.quantize`` names a format for."""
        format, weights = config.quantize, config.weights
        if weights is not None and gguf_path(weights) is None:
            stored, compute = WeightFiles(weights).sources(), compute_dtype_of(weights)
            for parent, name, layer in list(_saved(model, stored, compute)):
                self._replace(parent, name, layer)
        if format is not None:
            for parent, name, layer in _packed(model, format, now=False):
                self._replace(parent, name, layer)
        self._layers = list(described_layers(model).values())

    def _replace(self, parent: nn.Module, name: str, layer: nn.Module) -> None:
        self._replaced.append((parent, name, getattr(parent, name)))
        setattr(parent, name, layer)

    def settle(self) -> None:
        """Lets go of the dense weights, once the values are at home."""
        for layer in self._layers:
            del layer.__dict__[DESCRIBED]
        self._replaced.clear()

    def undo(self) -> None:
        """Puts the linear layers back."""
        for parent, name, linear in reversed(self._replaced):
            setattr(parent, name, linear)
        self._replaced.clear()


@dataclass(frozen=True)
class Described:
    """How the parts of a layer are made.

    pack
        Function of the weight -> a layer with the parts.
    shape, dtype
        Of the weight, dense, in the model.
    weight
        The weight; None: in the files that ``Config(weights=...)`` names.
    is_dense
        The weight is dense; else it is of codes, to which ``pack`` adds the other parts.
    """

    pack: Callable[[torch.Tensor], nn.Module]
    shape: torch.Size
    dtype: torch.dtype
    weight: Source | None
    is_dense: bool = True


def described_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the described layers of ``model`` by their names."""
    return {name: each for name, each in model.named_modules() if DESCRIBED in each.__dict__}


class DenseWeights:
    """The dense weights of a model's described layers, in memory or in files."""

    def __init__(self, model: nn.Module):
        self._layers = described_layers(model)
        self._sources: dict[str, Source] = {}
        self.names = {f"{name}.weight": layer.weight for name, layer in self._layers.items()}
        # Tensors that are made of the dense weights
        self.parts = {
            each
            for layer in self._layers.values()
            for each in own_tensors(layer)
            if always_rests(each)
        }

    def take(self, sources: dict[str, Source], files: Any) -> None:
        """Takes the sources of the dense weights out of ``sources``. Raises ConfigError if a weight
        is lacking, has another shape, or is packed already."""
        for name, layer in self._layers.items():
            how, source = layer.__dict__[DESCRIBED], sources.pop(f"{name}.weight", None)
            source = source if how.weight is None else how.weight
            self._sources[name] = to_pack(
                f"{name}.weight", source, how.shape, files, is_dense=how.is_dense
            )

    def send(self, send: Callable[..., None]) -> None:
        """Packs one weight after the other, and sends their parts home. ``send``: as `send_parts`
        has it, and told by ``drawn`` whether ranks may have other values."""
        for name, source in self._sources.items():
            layer = self._layers[name]
            how = layer.__dict__[DESCRIBED]
            source = source.to(how.dtype) if how.is_dense else source
            send_parts(layer, how.pack(source.read()), partial(send, drawn=source.may_differ))


def _packed(
    model: nn.Module, format: str, *, now: bool
) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yields parent, name and packed layer for the linear layers of ``model``. ``now``: packs those
    with values; else, and of those on meta, the layers are described."""
    made: dict[nn.Linear, nn.Module] = {}
    for parent, name, linear in _packable(model, format):
        if linear not in made:
            pack = partial(PACKERS[format], linear.weight.dtype)
            made[linear] = (
                _like(linear, pack(linear.weight.data))
                if now and not linear.weight.is_meta
                else _described(linear, pack)
            )
        yield parent, name, made[linear]


def _described(linear: nn.Linear, pack: Callable) -> nn.Module:
    weight = linear.weight
    layer = _like(linear, pack(torch.empty(weight.shape, dtype=weight.dtype, device="meta")))
    source = None if weight.is_meta else Source.lent(weight)
    layer.__dict__[DESCRIBED] = Described(pack, weight.shape, weight.dtype, source)
    return layer


def _saved(
    model: nn.Module, stored: dict[str, Source], compute: torch.dtype | None
) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yields parent, name and described layer for the linear layers on meta that bitsandbytes has
    packed in a folder. ``stored``: the folder's tensors; ``compute``: the dtype to compute in."""
    packed = packed_by_bitsandbytes(stored)
    if not packed:
        return
    origins = {id(source): name for name, source in stored.items()}
    part = parts_of(model)[0]
    names = {name: param for name, param in part.named_parameters() if name.endswith(".weight")}
    for name, source in Incoming(part, stored, names).sources.items():
        path, _, own = name.removesuffix(".weight").rpartition(".")
        parent = part.get_submodule(path)
        linear, origin = getattr(parent, own), origins.get(id(source), "")
        if origin in packed and type(linear) is nn.Linear and linear.weight.is_meta:
            saved = packed[origin]
            if saved.shape != linear.weight.shape:
                raise ConfigError(
                    f"{name} has shape {tuple(saved.shape)} in its folder, the model's"
                    f" {tuple(linear.weight.shape)}"
                )
            pack = partial(packed_by_bitsandbytes_as, saved.kind, saved.is_nested)
            pack = partial(
                pack,
                compute or linear.weight.dtype,
                blocksize=saved.blocksize,
                stored_as=saved.codes.dtype,
            )
            layer = _described(linear, pack)
            layer.__dict__[DESCRIBED] = Described(
                saved.layer, source.shape, saved.dtype, source, False
            )
            yield parent, own, layer


def _like(linear: nn.Linear, layer: nn.Module) -> nn.Module:
    """Gives a packed ``layer`` the rest of the layer that it replaces."""
    layer.bias = linear.bias
    for name, value in vars(linear).items():
        if "hook" in name:
            setattr(layer, name, value)
    return layer.train(linear.training)


def _packable(model: nn.Module, format: str) -> list[tuple[nn.Module, str, nn.Linear]]:
    """Lists parent, name and layer of the linear layers to pack."""
    if format not in PACKERS:
        raise ConfigError(f"quantize={format!r} is not one of {', '.join(map(repr, PACKERS))}")
    base = base_of(model)
    find_output = getattr(base, "get_output_embeddings", None)
    output = find_output() if callable(find_output) else None
    outputs = set(output.modules()) if isinstance(output, nn.Module) else set()
    places = places_of(model)
    frozen = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in parent.named_children()
        if type(child) is nn.Linear
        and child not in outputs
        and not child.weight.requires_grad
        and is_managed(child.weight)
        and places[child.weight] == 1
    ]
    large = [each for each in frozen if each[2].weight.numel() >= LEAST_NUMEL]
    if not large and not any(experts_of(model, format)):
        raise _nothing_to_pack(model, format, frozen)
    return large


def _nothing_to_pack(
    model: nn.Module, format: str, frozen: list[tuple[nn.Module, str, nn.Linear]]
) -> ConfigError:
    """Makes the error for a model of whose ``frozen`` linear layers none can be packed."""
    name = f"quantize={format!r}: {type(model).__name__}"
    if any(map(_is_packed, model.modules())):
        return ConfigError(f"{name} is packed already: leave quantize out")
    if frozen:
        largest = max(linear.weight.numel() for _, _, linear in frozen)
        return ConfigError(
            f"{name} has {len(frozen)} frozen linear layers, the largest of {largest:,} elements."
            f" Those of less than {LEAST_NUMEL:,} stay dense: leave quantize out"
        )
    return ConfigError(
        f"{name} has no frozen linear layer, and no frozen experts of 64 KiB and more, to pack."
        " Freeze its base (requires_grad_(False)), or add adapters by peft.get_peft_model"
    )


def _is_packed(module: nn.Module) -> bool:
    params = (param for param in module._parameters.values() if param is not None)
    return any(has_inner(param) or (is_code(param) and not param.requires_grad) for param in params)
