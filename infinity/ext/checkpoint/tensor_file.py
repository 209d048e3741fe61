"""write_file: writes a safetensors file of any size, with one tensor in memory at a time."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from ...errors import ConfigError, CorruptionError
from ...files.source import Source
from ...files.weight_files import FILE_DTYPES

ALIGNMENT = 8  # bytes; of the first tensor in a file
NAMES = {dtype: name for name, dtype in FILE_DTYPES.items() if dtype is not None} | {
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
}


def check_dtypes(sources: Mapping[str, Source]) -> None:
    """Raises ConfigError for a tensor whose dtype a safetensors file cannot hold."""
    for name, source in sources.items():
        if source.dtype not in NAMES:
            raise ConfigError(
                f"{name} is of {source.dtype}, which a safetensors file cannot hold: convert it, or"
                " leave it out"
            )


def write_file(
    path: Path, sources: Mapping[str, Source], *, advance: Callable[[int], object]
) -> None:
    """Writes ``sources`` to ``path`` and syncs it. The bytes equal those that the safetensors
    library writes.

    Tensors are read in the order of ``sources``, and are stored in the library's order. Raises
    OSError if the disk refuses, CorruptionError if a source returns another shape or dtype than it
    declares.
    """
    places, header = _lay_out(sources)
    with open(path, "wb", buffering=0) as file:
        _reserve(file.fileno(), len(header) + sum(source.nbytes for source in sources.values()))
        _write_at(file.fileno(), memoryview(header), 0)
        for name, source in sources.items():
            value = source.read()
            if value.shape != source.shape or value.dtype != source.dtype:
                raise CorruptionError(
                    f"{name} is {value.dtype} of {tuple(value.shape)} and was said to be"
                    f" {source.dtype} of {tuple(source.shape)}"
                )
            raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
            _write_at(file.fileno(), memoryview(raw.numpy()), len(header) + places[name])
            advance(source.nbytes)
        os.fsync(file.fileno())


def _lay_out(sources: Mapping[str, Source]) -> tuple[dict[str, int], bytes]:
    """Returns the offset of each tensor after the header, and the header. The widest elements come
    first, so that each tensor is aligned to its elements."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    places, at = {}, 0
    for name in sorted(sources, key=lambda name: (-sources[name].dtype.itemsize, name)):
        source, places[name] = sources[name], at
        at += source.nbytes
        header[name] = {
            "dtype": NAMES[source.dtype],
            "shape": list(source.shape),
            "data_offsets": [places[name], at],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return places, len(text).to_bytes(8, "little") + text


def _reserve(descriptor: int, nbytes: int) -> None:
    """Reserves the file's space before any tensor is read, if the file system supports it."""
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise


def _write_at(descriptor: int, raw: memoryview, offset: int) -> None:
    while raw.nbytes:
        count = os.pwrite(descriptor, raw, offset)
        raw, offset = raw[count:], offset + count
