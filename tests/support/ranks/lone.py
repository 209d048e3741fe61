"""A process group in which only this process is there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.tensor import debug
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def lone_group(rank: int = 0, size: int = 1) -> Iterator[None]:
    """Make this process `rank` of `size` ranks; the others of torch's group "fake" only seem there.

    torch keeps what its operators make of a DTensor, mesh included, for the next equal mesh.
    The groups of a mesh do not count in that comparison: a later test would meet destroyed ones.
    """
    if size == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        debug._clear_python_sharding_prop_cache()
        debug._clear_fast_path_sharding_prop_cache()
