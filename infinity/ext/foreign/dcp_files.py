"""DCP files: the weights in a checkpoint of ``torch.distributed.checkpoint``, as FSDP and
torchtitan write it.

Its ``.metadata`` is a pickle. It is read with an unpickler that allows the metadata's classes and
no other. Torch reads its tensors, with ``weights_only=True``. Other content (optimizer state,
pickled objects) is not read.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from enum import Enum
from pathlib import Path, PosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata

from ...errors import ConfigError, CorruptionError, InfinityError
from ...files.source import Source
from ...untrusted import is_regular, printable
from .pickled import INSIDE, without_wrappers

METADATA = ".metadata"
MOST_NBYTES = 1 << 32
CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch": ("Size",),
}
BUILT_IN = {
    ("collections", "OrderedDict"): dict,
    ("pathlib", "PosixPath"): PosixPath,
    ("pathlib._local", "PosixPath"): PosixPath,
}


class _Unpickler(pickle.Unpickler):
    """Allows only the classes of a checkpoint's metadata, whose constructors have no effects."""

    def find_class(self, module: str, name: str) -> Any:
        """Returns the class of this name, or raises UnpicklingError."""
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if module == "torch.serialization" and name == "_get_layout":
            return _layout
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) in BUILT_IN:
            return BUILT_IN[module, name]
        if name in CLASSES.get(module, ()):
            return (
                torch.Size
                if name == "Size"
                else getattr(metadata, name, None) or getattr(filesystem, name)
            )
        raise pickle.UnpicklingError(f"{module}.{name} is not of a checkpoint")


def _member(kind: Any, name: str) -> Enum:
    """Returns a member of an Enum, as Python 3.11.0 to 3.11.3 pickled it: by ``getattr``."""
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise pickle.UnpicklingError(f"builtins.getattr of {kind!r} is not of a checkpoint")
    return kind[name]


def _layout(name: str) -> torch.layout:
    return torch.sparse_coo if name == "torch.sparse_coo" else torch.strided


class _Reader(dcp.FileSystemReader):
    """Reads a checkpoint whose metadata is already read."""

    def __init__(self, folder: Path, found: metadata.Metadata):
        super().__init__(folder)
        self._found = found

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """Returns the metadata without unpickling it again."""
        return self._found


def is_dcp(path: Path) -> bool:
    """Returns whether ``path`` is a folder that ``torch.distributed.checkpoint`` wrote."""
    return path.is_dir() and (path / METADATA).exists()


@contextlib.contextmanager
def dcp_sources(folder: Path) -> Iterator[dict[str, Source]]:
    """Yields name -> source of the model's tensors."""
    try:
        described = _read_metadata(folder)
        names = _names(described)
        yield {name: _source(folder, described, key) for name, key in names.items()}
    except InfinityError:
        raise
    except Exception as error:
        raise CorruptionError(
            f"{folder} is not a readable checkpoint of torch.distributed.checkpoint:"
            f" {printable(repr(error))[:300]}"
        ) from error


def _read_metadata(folder: Path) -> metadata.Metadata:
    path = folder / METADATA
    if not is_regular(path) or path.stat().st_size > MOST_NBYTES:
        raise ConfigError(f"{path} is not the metadata of a checkpoint")
    try:
        with open(path, "rb") as file:
            described = _Unpickler(file).load()
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"{path} holds more than a checkpoint's metadata, and is not read:"
            f" {printable(str(error))[:200]}"
        ) from None
    if not isinstance(described, metadata.Metadata):
        raise TypeError(f"its metadata is a {type(described).__name__}")
    for place in described.storage_data.values():
        if Path(place.relative_path).name != str(place.relative_path) or not is_regular(
            folder / place.relative_path
        ):
            raise CorruptionError(
                f"{path} names {str(place.relative_path)[:80]!r}, which is not a file of the folder"
            )
    if described.storage_meta is None:
        described.storage_meta = metadata.StorageMeta()
    return described


def _names(found: metadata.Metadata) -> dict[str, str]:
    """Maps the model's tensor names to their keys. Of several state dicts in one checkpoint, takes
    the model's."""
    groups: dict[tuple, dict[str, str]] = {}
    for key, entry in found.state_dict_metadata.items():
        if isinstance(entry, metadata.TensorStorageMetadata):
            path = tuple(map(str, (found.planner_data or {}).get(key) or (key,)))
            if not any(part.startswith("optim") for part in path):
                groups.setdefault(path[:-1], {})[path[-1]] = key
    inside = {path: names for path, names in groups.items() if path and path[-1] in INSIDE}
    chosen = list(inside.values()) if inside else list(groups.values())
    if len(chosen) != 1:
        paths = ", ".join(".".join(path) or "(none)" for path in groups) or "none"
        raise ConfigError(
            f"the checkpoint has not one state dict of a model under {', '.join(INSIDE)}, but"
            f" these: {paths}"
        )
    own = without_wrappers(chosen[0])
    return {own[name]: key for name, key in chosen[0].items()}


def _source(folder: Path, found: metadata.Metadata, key: str) -> Source:
    entry = found.state_dict_metadata[key]
    dtype = entry.properties.dtype

    def read() -> torch.Tensor:
        target = {key: torch.empty(entry.size, dtype=dtype)}
        try:
            dcp.load(target, storage_reader=_Reader(folder, found), no_dist=True)
        except dcp.CheckpointException as error:  # not a subclass of Exception
            raise CorruptionError(
                f"{folder}: {key} cannot be read: {printable(str(error)).strip()[-300:]}"
            ) from None
        return target[key]

    return Source(entry.size, dtype, read)
