"""Export: a checkpoint's weights as a folder that ``transformers`` loads, without a model, a GPU or other ranks.

part   consecutive elements of one tensor, as one rank wrote them
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from .. import native
from ..distributed.collectives import Collectives
from ..errors import ConfigError, CorruptionError, InfinityError
from .folder import OF_READERS
from .load import checkpoint_of
from .manifest import MANIFEST, check_file
from .parts import list_parts, read_parts
from .pretrained import Source, write_sources
from .weight_files import FILE_DTYPES

KINDS = {str(kind).removeprefix("torch."): kind for kind in FILE_DTYPES.values()}
BESIDE = ("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "*.model")


def export(checkpoint: Path, folder: Path, *, dtype: torch.dtype | None = None, model: Path | None = None) -> dict[str, int]:
    """Writes the weights of ``checkpoint`` (any number of ranks wrote it) to ``folder`` as safetensors.

    dtype
        None: what the model computed in. ``torch.float32`` takes the masters, where there are any.
    model
        A folder whose configuration and tokenizer are copied beside them.

    One file's tensors are in memory at a time. Returns the numbers of parameters and of bytes. Raises UsageError where
    there is no checkpoint, CorruptionError where it is damaged, StorageError where it cannot be written.
    """
    if model is not None and not (model / "config.json").is_file():
        raise ConfigError(f"{model} has no config.json: give the folder that the model came from")
    with checkpoint_of(checkpoint, Collectives()) as (manifest, data):
        try:
            return _export(manifest, data, folder, dtype=dtype, model=model)
        except InfinityError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, RecursionError) as error:
            raise CorruptionError(f"{checkpoint / MANIFEST} does not describe a checkpoint: {error!r}") from error


def _export(manifest: dict[str, Any], data: Path, folder: Path, *, dtype: torch.dtype | None, model: Path | None) -> dict[str, int]:
    for name, entry in manifest["files"].items():
        check_file(data / name, entry)
    parts = _Parts(data, manifest)
    sources: dict[str, Source] = {}
    for name, entry in manifest["parameters"].items():
        kind = dtype or KINDS[entry["dtype"]]
        _check_place(name, entry)
        sources[name] = _numel(entry) * kind.itemsize, _reader(parts, name, entry, kind)
    other = {key: tensor for key, _, tensor in read_parts(data / OF_READERS)}
    kept = [f"buffer/{name}" for name in manifest["persistent_buffers"]]
    kept += [key for key in other if key.startswith("unmanaged/")]
    for key in kept:
        sources[key.partition("/")[2]] = other[key].nbytes, lambda key=key: other[key]
    write_sources(folder, sources)
    for pattern in BESIDE if model is not None else ():
        for path in model.glob(pattern):
            shutil.copy(path, folder / path.name)
    count = sum(_numel(entry) for entry in manifest["parameters"].values())
    return {"parameters": count, "nbytes": sum(nbytes for nbytes, _ in sources.values())}


def _check_place(name: str, entry: dict[str, Any]) -> None:
    """Raises ValueError for a shape and strides that are not of as many elements as there are."""
    shape, stride = entry["shape"], entry["stride"]
    if len(shape) != len(stride) or not all(type(n) is int and 0 <= n < 1 << 48 for n in (*shape, *stride)):
        raise ValueError(f"{name} has shape {shape} and strides {stride}")
    if _numel(entry) and 1 + sum((n - 1) * step for n, step in zip(shape, stride)) > _numel(entry):
        raise ValueError(f"{name} of shape {shape} has strides {stride}")


def _numel(entry: dict[str, Any]) -> int:
    return torch.Size(entry["shape"]).numel()


def _reader(parts: _Parts, name: str, entry: dict[str, Any], dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        flat = parts.read(f"weight/{name}", _numel(entry))
        if dtype == torch.float32 and entry["master"] == "SPLIT":
            flat = native.join_master(flat, parts.read(f"master/{name}", _numel(entry)))
        elif dtype == torch.float32 and entry["master"] == "FLOAT32":
            flat = parts.read(f"master/{name}", _numel(entry))
        return flat.to(dtype).as_strided(entry["shape"], entry["stride"])

    return read


class _Parts:
    """Finds the parts of every tensor."""

    def __init__(self, data: Path, manifest: dict[str, Any]):
        self._data = data
        self._parts: dict[str, list[tuple[int, str]]] = {}
        for file in manifest["files"]:
            if file.startswith("unit-"):
                for key, begin, *_ in list_parts(data / file):
                    self._parts.setdefault(key, []).append((begin, file))

    def read(self, key: str, numel: int) -> torch.Tensor:
        """Reads the whole tensor, flat."""
        found = []
        reached = 0
        for begin, file in sorted(self._parts.get(key, [])):
            with safe_open(self._data / file, framework="pt") as opened:
                part = opened.get_tensor(key)
            if part.numel() and begin != reached:
                break
            found.append(part)
            reached += part.numel()
        if reached != numel:
            raise CorruptionError(f"{self._data} holds {reached} of the {numel} elements of {key}")
        return torch.cat(found) if len(found) != 1 else found[0]
