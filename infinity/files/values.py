"""Values: encodes a user's nested values as JSON and tensors, and decodes them. Uses no pickle."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from ..errors import UsageError

PLAIN_DTYPES = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
}


def encode_value(
    value: Any, tensors: dict[str, torch.Tensor], path: str, above: tuple[int, ...] = ()
) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_meta or value.dtype not in PLAIN_DTYPES:
            raise UsageError(
                f"{path} is a {value.dtype} tensor ({value.layout}, {value.device}), which cannot"
                " be saved"
            )
        name = f"{path.partition('.')[0]}/{len(tensors)}"
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"$tensor": name}
    if id(value) in above:
        raise UsageError(f"{path} contains itself, which a checkpoint cannot hold")
    above += (id(value),)
    if isinstance(value, (list, tuple)):
        items = [encode_value(item, tensors, f"{path}.{i}", above) for i, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {
            "$dict": [
                [
                    encode_value(key, tensors, path, above),
                    encode_value(item, tensors, f"{path}.{key}", above),
                ]
                for key, item in value.items()
            ]
        }
    raise UsageError(
        f"{path} is a {type(value).__name__}, which a checkpoint cannot hold: use dicts, lists,"
        " numbers, strings, tensors"
    )


def decode_value(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [decode_value(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "$float" in value:
        return float(value["$float"])
    if "$tensor" in value:
        return tensors[value["$tensor"]]
    if "$tuple" in value:
        return tuple(decode_value(item, tensors) for item in value["$tuple"])
    return {decode_value(key, tensors): decode_value(item, tensors) for key, item in value["$dict"]}
