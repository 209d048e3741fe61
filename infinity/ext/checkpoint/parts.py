"""Parts: opens the files of a checkpoint's data folder, and reads which elements of its tensors
each holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ...errors import CorruptionError, StorageError
from ...files.weight_files import keep_header
from ...untrusted import parse_json

# In a file's header: tensor -> {"saved_offsets": its first element in every dimension}.
PARTS_KEY = "DCP_SHARDING_INFO"


@contextmanager
def opened_file(path: Path) -> Iterator[Any]:
    """Opens a safetensors file. Raises CorruptionError if it is not one, StorageError if it cannot
    be read."""
    try:
        keep_header(path)
    except OSError as error:
        raise StorageError(
            error.errno or 0, f"cannot read {path}: {error.strerror}", str(path)
        ) from error
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


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Reads every tensor of a file, whole."""
    with opened_file(path) as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}
