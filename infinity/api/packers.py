"""Packers: packs one dense weight in the format of a library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from ..checkpoint.unpacked import library_of


def packed_by_bitsandbytes_as(
    kind: str, nested: bool, dtype: torch.dtype, dense: torch.Tensor, *, blocksize: int = 64
) -> nn.Module:
    library, (rows, columns) = library_of("bitsandbytes.nn"), dense.shape
    options: dict[str, Any] = {"compress_statistics": nested, "quant_type": kind}
    layer = library.Linear4bit(
        columns, rows, bias=False, compute_dtype=dtype, device="meta", **options
    )
    # bitsandbytes keeps the first table of codes that it makes: it must not be on meta.
    library_of("bitsandbytes.functional").quantize_blockwise(torch.zeros(1, device="cpu"))
    weight = library.Params4bit(
        dense, requires_grad=False, blocksize=blocksize, module=layer, **options
    )
    layer.weight = weight._quantize(dense.device)
    return layer


def _torchao(config: str, dtype: torch.dtype, dense: torch.Tensor) -> nn.Module:
    library = library_of("torchao.quantization")
    rows, columns = dense.shape
    layer = nn.Linear(columns, rows, bias=False, device="meta")
    layer.weight = nn.Parameter(dense.to(dtype), requires_grad=False)
    library.quantize_(layer, getattr(library, config)())
    return layer


# Format -> function of the dtype to compute in, and of a dense weight
PACKERS: Mapping[str, Callable[[torch.dtype, torch.Tensor], nn.Module]] = {
    "nf4": partial(packed_by_bitsandbytes_as, "nf4", True),
    "int8": partial(_torchao, "Int8WeightOnlyConfig"),
    "fp8": partial(_torchao, "Float8WeightOnlyConfig"),
}
