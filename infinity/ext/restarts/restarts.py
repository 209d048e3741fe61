"""Restarts: the process group of ranks that torchrun may have started before.

start  one run of all ranks of a job, by torchrun, which begins another one after a failure
"""

from __future__ import annotations

import datetime
import os
import time
import uuid
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import Store

POLL_SECONDS = 0.02


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: datetime.timedelta | None = None,
    **options: Any,
) -> None:
    """Makes torch's default process group, also after torchrun's ``--max-restarts``.

    The arguments are those of `torch.distributed.init_process_group`, in its order. That one finds
    the address of a rank that died in torchrun's store: "Connection refused". Here each start has a
    part of the store to itself. Without torchrun's store, or with another ``init_method`` than
    "env://", it is torch's function. Every rank calls this. Raises what torch's raises.
    """
    import torch.distributed as dist

    if _has_agents_store() and init_method in (None, "env://") and "store" not in options:
        rank = options.setdefault("rank", int(os.environ["RANK"]))
        count = options.setdefault("world_size", int(os.environ["WORLD_SIZE"]))
        init_method, options["store"] = None, store_of_start(rank, count, timeout)
    dist.init_process_group(backend, init_method, timeout, **options)


def _has_agents_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def store_of_start(rank: int, count: int, timeout: datetime.timedelta | None) -> Store:
    """Returns the store in which this start of the ranks finds each other. Every rank calls this.

    torchrun's own store outlives its ranks: there they would read the address of one that died.
    Each asks with a word of its own, which only a rank 0 that lives answers, and all of this start
    are there once each has confirmed the answer. TORCHELASTIC_RESTART_COUNT does not name a start:
    it differs between machines.
    """
    import torch.distributed as dist

    options = {} if timeout is None else {"timeout": timeout}
    store, *_ = next(dist.rendezvous("env://", rank, count, **options))
    if not _has_agents_store():
        return store  # rank 0 has made it
    word = uuid.uuid4().hex
    others = range(1, count)
    if rank:
        store.set(f"infinity/asked/{rank}", word)
        start = store.get(f"infinity/answered/{word}").decode()
        store.set(f"infinity/{start}/{rank}", "")
        return dist.PrefixStore(start, store)
    end = time.monotonic() + store.timeout.total_seconds()
    while missing := [each for each in others if not store.check([f"infinity/{word}/{each}"])]:
        if time.monotonic() > end:
            raise RuntimeError(f"ranks {missing} have not come within {store.timeout}")
        for each in missing:
            if store.check([asked := f"infinity/asked/{each}"]):
                store.set(f"infinity/answered/{store.get(asked).decode()}", word)
        time.sleep(POLL_SECONDS)
    return dist.PrefixStore(word, store)
