"""Parts: reads the files of a checkpoint's data folder: tensors, and which elements of them a part has."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..errors import CorruptionError
from ..untrusted import parse_json
from .weight_files import FILE_DTYPES

PARTS_KEY = "DCP_SHARDING_INFO"  # in a file's header: tensor -> {"saved_offsets": [its first element]}


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as opened:
            yield opened
    except SafetensorError as error:
        raise CorruptionError(f"{path} is not a readable safetensors file: {error}") from error


def read_header(opened: Any) -> dict[str, Any]:
    """Reads which part of its tensor each entry of a file is."""
    header = parse_json((opened.metadata() or {}).get(PARTS_KEY, "{}"))
    if not isinstance(header, dict):
        raise ValueError("a header without the places of its parts")
    return header


def read_parts(path: Path) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Yields (name, first element, values) of every tensor of which ``path`` has a part, one at a time."""
    with _opened(path) as opened:
        header = read_header(opened)
        for name in opened.keys():
            begin = header.get(name, {}).get("saved_offsets") or [0]
            yield name, begin[0], opened.get_tensor(name)


def list_parts(path: Path) -> list[tuple[str, int, int, torch.dtype | None]]:
    """Lists (name, first element, the one behind the last, dtype) of what :func:`read_parts` yields, without reading values."""
    with _opened(path) as opened:
        header, found = read_header(opened), []
        for name in opened.keys():
            begin, entry = (header.get(name, {}).get("saved_offsets") or [0])[0], opened.get_slice(name)
            if type(begin) is not int or begin < 0:
                raise ValueError(f"{name} begins at {begin!r}")
            found.append((name, begin, begin + math.prod(entry.get_shape()), FILE_DTYPES.get(entry.get_dtype())))
        return found
