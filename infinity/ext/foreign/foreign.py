"""Foreign: detects which library wrote a checkpoint, and reads its weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ...files.source import Source
from .dcp_files import dcp_sources, is_dcp
from .pickled import is_pickled, pickled_sources
from .zero_files import zero_folder, zero_sources


def is_foreign(path: Path) -> bool:
    """Returns whether ``path`` is a checkpoint of another library."""
    return zero_folder(path) is not None or is_dcp(path) or is_pickled(path)


@contextlib.contextmanager
def foreign_sources(path: Path) -> Iterator[dict[str, Source]]:
    """Yields name -> source of the weights in a checkpoint of DeepSpeed,
    torch.distributed.checkpoint, or ``torch.save``."""
    if (folder := zero_folder(path)) is not None:
        opened = zero_sources(folder)
    else:
        opened = dcp_sources(path) if is_dcp(path) else pickled_sources(path)
    with opened as sources:
        yield sources
