"""Unpacked: makes dense weights of packed ones by their library, for files that need no library.

parts   the tensors of one packed weight, by the names that follow the weight's own
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import UsageError
from ..state.packed import filled, has_inner, is_packed, plain_name
from .source import Source

STATE = ".quant_state.bitsandbytes__"  # in the names of bitsandbytes' saved tensors
OF_4BIT = "bitsandbytes.nn.modules.Params4bit"


def packed_by_bitsandbytes(stored: Mapping[str, Source]) -> dict[str, tuple[str, dict]]:
    """Returns, for each weight in ``stored`` that bitsandbytes has packed in 4 bits, the format and
    the sources of its other parts."""
    kinds = {
        name.partition(STATE)[0]: kind for name in stored if (kind := name.partition(STATE)[2])
    }
    parts: dict[str, dict[str, Source]] = {name: {} for name in kinds}
    for name, source in stored.items():
        for weight in _prefixes(name):
            if weight in parts and weight != name:
                parts[weight][name.removeprefix(f"{weight}.")] = source
    return {name: (kind, parts[name]) for name, kind in kinds.items()}


def _prefixes(name: str) -> Iterator[str]:
    words = name.split(".")
    return (".".join(words[:count]) for count in range(1, len(words)))


def layer_of_parts(codes: torch.Tensor, parts: Mapping[str, Source]) -> nn.Module:
    """Makes a layer of bitsandbytes, of codes and of the other parts that were saved with them."""
    library = importlib.import_module("bitsandbytes.nn")
    layer = library.Linear4bit(1, 1, bias=False, device="meta")
    told = {name: part.read() for name, part in parts.items()}
    layer.weight = library.Params4bit.from_prequantized(
        codes, told, device=codes.device, module=layer
    )
    return layer


def without_packing(stored: Mapping[str, Source]) -> dict[str, Source]:
    """Returns the tensors of a folder with dense ones instead of those that bitsandbytes packed."""
    found = dict(stored)
    for name, (_, parts) in packed_by_bitsandbytes(stored).items():
        for part in parts:
            del found[f"{name}.{part}"]
        state = next(part for key, part in parts.items() if f".{key}".startswith(STATE))
        told = json.loads(bytes(state.read().tolist()))
        shape, dtype = torch.Size(told["shape"]), getattr(torch, told["dtype"])

        def read(codes: Source = stored[name], parts: dict = parts) -> torch.Tensor:
            return _dense_of_4bit(layer_of_parts(codes.read(), parts).weight)

        found[name] = Source(shape, dtype, read)
    return found


def dense_source(module: nn.Module, name: str) -> Source:
    """Returns the source of the dense weight of a wrapped module's packed parameter ``name``.
    Raises UsageError if its library cannot unpack it."""
    param = module._parameters[name]
    if has_inner(param) and hasattr(param, "dequantize"):
        return Source(param.shape, param.dtype, lambda: filled(param).dequantize())
    if param is not None and plain_name(param) == OF_4BIT:
        state = param.quant_state

        def read() -> torch.Tensor:
            own = {key: Source.of(value) for key, value in module.state_dict().items()}
            parts = {
                key.removeprefix(f"{name}."): each
                for key, each in own.items()
                if key.startswith(f"{name}.")
            }
            return _dense_of_4bit(layer_of_parts(own[name].read(), parts).weight)

        return Source(torch.Size(state.shape), state.dtype, read)
    raise UsageError(
        f"{type(module).__name__} is packed in a form that cannot be unpacked into a file:"
        " infinity.unwrap_model(model), and its own library writes it"
    )


def has_packed(module: nn.Module, name: str) -> bool:
    """Returns whether the parameter ``name`` of a wrapped module is a packed weight."""
    param = module._parameters.get(name)
    return param is not None and (is_packed(param) or has_inner(param))


def _dense_of_4bit(weight: Any) -> torch.Tensor:
    functional = importlib.import_module("bitsandbytes.functional")
    return functional.dequantize_4bit(weight.data, weight.quant_state)
