"""Packers: packs one dense weight in the format of a library, and checks what is to be packed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ...choices import QUANTIZED
from ...errors import ConfigError
from ...files.source import Source
from .unpacked import library_of


def places_of(model: nn.Module) -> Counter[torch.Tensor | None]:
    """Counts the modules that have each parameter: a tied one has several."""
    return Counter(param for each in model.modules() for param in each._parameters.values())


def to_pack(
    name: str, source: Source | None, shape: torch.Size, files: Any, *, is_dense: bool = True
) -> Source:
    """Returns the ``source`` of a weight that is to be packed. Raises ConfigError if it is lacking,
    has another shape, or is packed already."""
    if source is None:
        raise ConfigError(
            f"{name} is to be packed and has no value: Config(weights=...) names"
            + (" no file" if files is None else f" {str(files)!r}, which lacks it")
        )
    if source.shape != shape:
        raise ConfigError(
            f"{name} in {str(files)!r} has shape {tuple(source.shape)}, the model's {tuple(shape)}"
        )
    if is_dense and not (source.dtype.is_floating_point and source.dtype.itemsize > 1):
        raise ConfigError(
            f"{name} in {str(files)!r} is of {source.dtype}: it is packed already, and packing its"
            " codes would lose its scales. Give the folder that it was made of"
        )
    return source


def packed_by_bitsandbytes_as(
    kind: str,
    nested: bool,
    dtype: torch.dtype,
    dense: torch.Tensor,
    *,
    blocksize: int = 64,
    stored_as: torch.dtype = torch.uint8,
) -> nn.Module:
    """Makes a 4-bit layer of bitsandbytes of the weight ``dense``. ``nested``: packs the scales,
    too. ``stored_as``: the dtype under which the codes lie."""
    library, (rows, columns) = library_of("bitsandbytes.nn"), dense.shape
    options: dict[str, Any] = {
        "compress_statistics": nested,
        "quant_type": kind,
        "quant_storage": stored_as,
    }
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


Packer = Callable[[torch.dtype, torch.Tensor], nn.Module]

# Format -> function of the dtype to compute in, and of a dense weight
PACKERS: dict[str, Packer] = {
    "nf4": partial(packed_by_bitsandbytes_as, "nf4", True),
    "int8": partial(_torchao, "Int8WeightOnlyConfig"),
    "fp8": partial(_torchao, "Float8WeightOnlyConfig"),
}


def add_format(name: str, pack: Packer) -> None:
    """Adds a format for `infinity.quantize` and `Config(quantize=...)`. ``pack``: makes a layer
    without a bias of the dtype to compute in and a dense weight [rows, columns]."""
    PACKERS[name] = pack
    if name not in QUANTIZED:
        QUANTIZED.append(name)
