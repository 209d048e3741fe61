"""Unpacked: makes dense weights of packed ones: by their library, for files that need no library,
and by their scales, for a model whose layers are dense.

parts    the tensors of one packed weight, by the names that follow the weight's own
scaled   FP8 with a scale for each block (DeepSeek, transformers), or MXFP4 (gpt-oss): blocks of 32
         numbers in 4 bits, with an exponent each
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...core.units.added import always_rests
from ...core.units.inner import filled, has_inner
from ...errors import ConfigError, CorruptionError, UsageError
from ...files.source import Source
from ...library_versions import refuse_older
from ...untrusted import parse_json, read_text
from ..coded.schemes import Mxfp4, Scaled, Scheme
from .packed import plain_name

STATE = ".quant_state.bitsandbytes__"  # in the names of bitsandbytes' saved tensors
ABSMAX = ".absmax"  # ends the name of another one
OF_4BIT = "bitsandbytes.nn.modules.Params4bit"
BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
DTYPES = ("float32", "bfloat16", "float16")
# Of the codes: bnb_4bit_quant_storage, which FSDP needs to be that of the other weights
STORED_AS = (torch.bfloat16, torch.float16, torch.float32)
MOST_STATE_NBYTES = 4096
SCALE, BLOCKS, EXPONENTS = "_scale_inv", "_blocks", "_scales"  # end the names of scaled parts
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
CODES = {"nf4": 16, "fp4": 16, "nested": 256}  # entries of a table


@dataclass(frozen=True)
class Saved4Bit:
    """One weight as bitsandbytes saves it in 4 bits: formats and sources, which fit each other."""

    name: str
    kind: str  # "nf4" or "fp4"
    shape: torch.Size
    dtype: torch.dtype  # of the dense weight
    blocksize: int
    codes: Source
    parts: Mapping[str, Source]

    @property
    def is_nested(self) -> bool:
        """Whether the scales are packed, too."""
        return "nested_absmax" in self.parts

    def layer(self, codes: torch.Tensor | None = None) -> nn.Module:
        """Makes a layer of bitsandbytes with these parts; ``codes``: those that were read."""
        codes = self.codes.read() if codes is None else codes
        library = library_of("bitsandbytes.nn")
        layer = library.Linear4bit(1, 1, bias=False, device="meta")
        values = {name: part.read() for name, part in self.parts.items()}
        layer.weight = library.Params4bit.from_prequantized(
            codes, values, device=codes.device, module=layer
        )
        return layer

    def read(self) -> torch.Tensor:
        """Reads the weight, and unpacks it."""
        return _dense_of_4bit(self.layer().weight)


def library_of(name: str) -> Any:
    """Imports a module of a library of packed formats. Raises ConfigError without it, and for one
    that is too old."""
    library = name.partition(".")[0]
    refuse_older(library)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"packed weights need {library}: pip install 'infinity-engine[packed]'"
        ) from error


def packed_by_bitsandbytes(stored: Mapping[str, Source]) -> dict[str, Saved4Bit]:
    """Finds the weights in ``stored`` that bitsandbytes has packed in 4 bits. Raises
    CorruptionError, with the name of the weight, for parts that do not fit each other."""
    kinds = {
        name.partition(STATE)[0]: kind for name in stored if (kind := name.partition(STATE)[2])
    }
    parts: dict[str, dict[str, Source]] = {name: {} for name in kinds}
    for name, source in stored.items():
        weight = name.removesuffix(ABSMAX)
        if weight != name and weight in stored and weight not in kinds:
            raise CorruptionError(f"{weight} is packed in 4 bits, and its quant_state is missing")
        for weight in _prefixes(name):
            if weight in parts:
                parts[weight][name.removeprefix(f"{weight}.")] = source
    return {name: _checked(name, kinds[name], stored, parts[name]) for name in kinds}


def _prefixes(name: str) -> Iterator[str]:
    words = name.split(".")
    return (".".join(words[:count]) for count in range(1, len(words)))


def _checked(
    name: str, kind: str, stored: Mapping[str, Source], parts: dict[str, Source]
) -> Saved4Bit:
    try:
        codes, state = stored[name], _told(parts[f"{STATE[1:]}{kind}"])
        shape, size = torch.Size(state["shape"]), state["blocksize"]
        dtype = getattr(torch, state["dtype"]) if state["dtype"] in DTYPES else None
        numel = shape.numel()
        known = kind in CODES and state["quant_type"] == kind and size in BLOCKSIZES
        if not known or dtype is None or len(shape) != 2 or min(shape) < 1:
            raise ValueError("an unknown format")
        nested, scales = "nested_offset" in state, -(-numel // size)
        stored_as = codes.dtype if codes.dtype in STORED_AS else torch.uint8
        codes_count = -(-((numel + 1) // 2) // stored_as.itemsize)
        expected = {"": (stored_as, codes_count), "quant_map": (torch.float32, CODES[kind])}
        expected["absmax"] = torch.uint8 if nested else torch.float32, scales
        if nested:
            if state["nested_blocksize"] not in BLOCKSIZES or state["nested_dtype"] != "float32":
                raise ValueError("an unknown format of its scales")
            float(state["nested_offset"])
            expected["nested_absmax"] = torch.float32, -(-scales // state["nested_blocksize"])
            expected["nested_quant_map"] = torch.float32, CODES["nested"]
        stored_parts = {"": codes} | {key: each for key, each in parts.items() if "." not in key}
        for key in expected.keys() | stored_parts.keys():
            wanted, source = expected.get(key), stored_parts.get(key)
            if wanted is None or source is None:
                raise ValueError(f"{key or 'codes'} is {'missing' if source is None else 'extra'}")
            if (source.dtype, source.shape.numel()) != wanted:
                raise ValueError(f"{key or 'codes'} has {source.shape.numel()} of {source.dtype}")
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CorruptionError(
            f"{name} is packed by bitsandbytes, and its parts do not fit each other: {error!r}"
        ) from error
    return Saved4Bit(name, kind, shape, dtype, size, codes, parts)


def _told(state: Source) -> dict[str, Any]:
    if state.dtype != torch.uint8 or state.shape.numel() > MOST_STATE_NBYTES:
        raise ValueError("quant_state is not text")
    state_dict = parse_json(bytes(state.read().tolist()).decode())
    if not isinstance(state_dict, dict):
        raise ValueError("quant_state is not a table")
    return state_dict


def is_scaled(told: Mapping[str, Any]) -> bool:
    """Tells whether a folder's quantization_config is of scaled weights."""
    return told.get("quant_method") in ("fp8", "mxfp4")


def packing_of(folder: str | os.PathLike) -> dict[str, Any]:
    """Returns how a folder is packed, by its config.json; empty if that does not say."""
    try:
        settings = parse_json(read_text(Path(folder) / "config.json"))["quantization_config"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return settings if isinstance(settings, dict) else {}


def compute_dtype_of(folder: str | os.PathLike) -> torch.dtype | None:
    """Returns the dtype in which the layers of a folder that transformers packed by bitsandbytes
    compute; None if it does not say."""
    name = packing_of(folder).get("bnb_4bit_compute_dtype")
    return getattr(torch, name) if name in DTYPES else None


@dataclass(frozen=True)
class CodedSource:
    """The codes and scales of one weight, of a file or made of dense experts: sources that fit each
    other."""

    codes: Source
    scales: Source | None  # None: among the codes
    scheme: Scheme

    def read(self) -> list[torch.Tensor]:
        """Reads codes and scales."""
        return [each.read() for each in (self.codes, self.scales) if each is not None]

    @property
    def may_differ(self) -> bool:
        """Whether ranks may have other values: no, in a file."""
        return False

    def dense(self) -> Source:
        """Returns the source of the dense weight: MXFP4 in bf16, others in fp32."""
        dtype = torch.bfloat16 if isinstance(self.scheme, Mxfp4) else torch.float32
        return Source(
            self.scheme.shape(self.codes.shape),
            dtype,
            lambda: self.scheme.unpack(*self.read()),
        )


def scaled_weights(
    stored: Mapping[str, Source], folder: str | os.PathLike
) -> dict[str, CodedSource]:
    """Finds the weights in ``stored``, the tensors of ``folder``, that have scales. Raises
    CorruptionError, with the name of the weight, for scales of another shape."""
    sources: dict[str, CodedSource] = {}
    packing = packing_of(folder)
    block = packing.get("weight_block_size")
    for name, scales in stored.items():
        if name.endswith(SCALE) and (codes := stored.get(name.removesuffix(SCALE))) is not None:
            if codes.dtype in FP8:
                sources[name.removesuffix(SCALE)] = _of_fp8(name, codes, scales, block)
        elif name.endswith(EXPONENTS) and is_scaled(packing):
            weight = name.removesuffix(EXPONENTS)
            if (codes := stored.get(weight + BLOCKS)) is not None:
                sources[weight] = _of_mxfp4(weight, codes, scales)
    return sources


def without_scales(stored: Mapping[str, Source], folder: str | os.PathLike) -> dict[str, Source]:
    """Returns the tensors of ``folder`` with dense weights instead of scaled ones, as
    ``from_pretrained(dtype=...)`` makes them. Others keep their source."""
    scaled = scaled_weights(stored, folder)
    parts = {f"{name}{ending}" for name in scaled for ending in ("", SCALE, BLOCKS, EXPONENTS)}
    plain = {name: source for name, source in stored.items() if name not in parts}
    return plain | {name: each.dense() for name, each in scaled.items()}


def _of_fp8(name: str, codes: Source, scales: Source, block: Any) -> CodedSource:
    """Returns the FP8 weight ``codes``. ``block``: rows and columns of a block; None: the scales
    divide the weight evenly."""
    sizes, counts = codes.shape[-2:], scales.shape[-2:] or (1, 1)
    per_weight = scales.shape.numel() == 1
    if per_weight or not isinstance(block, (list, tuple)) or len(block) != 2:
        block = [-(-size // max(1, count)) for size, count in zip(sizes, counts)]
    block = sizes if per_weight else block
    fits = all(
        isinstance(each, int) and each > 0 and -(-size // each) == count
        for size, each, count in zip(sizes, block, counts)
    )
    if len(sizes) != 2 or not (per_weight or (fits and codes.shape[:-2] == scales.shape[:-2])):
        raise CorruptionError(
            f"{name} has shape {tuple(scales.shape)}, which is not a scale for each block of"
            f" {tuple(block)} of a weight of {tuple(codes.shape)}"
        )
    return CodedSource(codes, scales, Scaled((block[0], block[1])))


def _of_mxfp4(name: str, codes: Source, exponents: Source) -> CodedSource:
    """Returns the experts ``codes`` in MXFP4."""
    if (
        {codes.dtype, exponents.dtype} != {torch.uint8}
        or len(codes.shape) != 4
        or codes.shape[:-1] != exponents.shape
    ):
        raise CorruptionError(
            f"{name}{EXPONENTS} has shape {tuple(exponents.shape)}, which does not match one"
            f" exponent per block of {tuple(codes.shape)}"
        )
    return CodedSource(codes, exponents, Mxfp4())


def without_packing(stored: Mapping[str, Source], folder: str | os.PathLike) -> dict[str, Source]:
    """Returns the tensors of ``folder`` with dense ones instead of scaled ones and of those that
    bitsandbytes packed."""
    packed = packed_by_bitsandbytes(stored)
    if packed:
        library_of("bitsandbytes")
    sources = without_scales(stored, folder)
    for name, source in sources.items():
        if name in stored and stored[name].dtype in FP8:
            sources[name] = source.to(torch.bfloat16)
    for name, saved in packed.items():
        for part in saved.parts:
            del sources[f"{name}.{part}"]
        sources[name] = Source(saved.shape, saved.dtype, saved.read)
    return sources


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
            saved = packed_by_bitsandbytes(own)[name]
            return saved.read()

        return Source(torch.Size(state.shape), state.dtype, read)
    raise UsageError(
        f"{type(module).__name__} is packed in a form that cannot be unpacked into a file:"
        " infinity.unwrap_model(model), and its own library writes it"
    )


def has_packed(module: nn.Module, name: str) -> bool:
    """Returns whether the parameter ``name`` of a wrapped module is a packed weight."""
    param = module._parameters.get(name)
    return param is not None and (always_rests(param) or has_inner(param))


def _dense_of_4bit(weight: Any) -> torch.Tensor:
    functional = library_of("bitsandbytes.functional")
    return functional.dequantize_4bit(weight.data, weight.quant_state)
