"""Foreign: finds out which library wrote a checkpoint, and writes its weights as a folder of safetensors, from which a model starts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from .dcp_files import dcp_sources, is_dcp
from .pickled import is_pickled, pickled_sources
from .pretrained import Source, write_sources
from .zero_files import zero_folder, zero_sources


def is_foreign(path: Path) -> bool:
    """Tells whether ``path`` is a checkpoint that another library wrote."""
    return zero_folder(path) is not None or is_dcp(path) or is_pickled(path)


@contextlib.contextmanager
def foreign_sources(path: Path) -> Iterator[dict[str, Source]]:
    """Yields name -> source of the weights in a checkpoint of DeepSpeed, torch.distributed.checkpoint, or ``torch.save``."""
    if (folder := zero_folder(path)) is not None:
        opened = zero_sources(folder)
    else:
        opened = dcp_sources(path) if is_dcp(path) else pickled_sources(path)
    with opened as sources:
        yield sources


def export_foreign(path: Path, folder: Path, *, dtype: torch.dtype | None = None) -> dict[str, int]:
    """Writes the weights of ``path`` to ``folder`` as safetensors, a few at a time. ``dtype``: of the floating-point ones; None: what is
    there, which is fp32 in a ZeRO checkpoint. Returns the numbers of parameters and of bytes."""
    with foreign_sources(path) as sources:
        count = nbytes = 0

        def read_as(read, size: int) -> Source:
            nonlocal count, nbytes

            def converted() -> torch.Tensor:
                nonlocal count, nbytes
                value = read()
                value = value.to(dtype) if dtype is not None and value.is_floating_point() else value
                count, nbytes = count + value.numel(), nbytes + value.nbytes
                return value

            return size, converted

        write_sources(folder, {name: read_as(read, size) for name, (size, read) in sources.items()})
    return {"parameters": count, "nbytes": nbytes}
