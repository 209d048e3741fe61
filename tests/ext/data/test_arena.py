"""Arena: what is kept stays, for every process, and goes with the last of them."""

from __future__ import annotations

import fcntl
import gc
import multiprocessing
import os
import pickle
import signal

import pytest
import torch

import infinity
from infinity.errors import CapacityError
from infinity.ext.data.arena import KEPT_DATA, Arena, kept_data_nbytes


def test_items_are_kept_while_there_is_room():
    """Claim: the one that does not fit is refused, a smaller one after it fits, none is moved."""
    arena = Arena(5, 10)
    assert arena.get(0) is None
    assert arena.offer(0, b"12345") and not arena.offer(1, b"123456") and arena.offer(2, b"abcde")
    assert arena.offer(3, b"") and not arena.offer(4, b"x")
    assert arena.offer(0, b"other") and bytes(arena.get(0)) == b"12345"
    assert bytes(arena.get(2)) == b"abcde" and bytes(arena.get(3)) == b"" and arena.get(4) is None
    assert (arena.kept, arena.refused, arena.used_nbytes) == (3, 2, 10)
    with pytest.raises(TypeError):
        arena.get(0)[0] = 1


def offered(arena: Arena, first: int) -> None:
    for item in range(first, 64, 2):
        arena.offer(item, bytes([item]) * 100)


@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_processes_share_it(way):
    arena = Arena(64, 6400)
    context = multiprocessing.get_context(way)
    children = [context.Process(target=offered, args=(arena, first)) for first in (0, 1)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert arena.kept == 64
    assert all(bytes(arena.get(item)) == bytes([item]) * 100 for item in range(64))


def test_a_process_that_is_killed_with_the_lock_gives_it_back():
    arena = Arena(4, 100)
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        fcntl.lockf(arena._file, fcntl.LOCK_EX)
        os.write(tell, b"1")
        signal.pause()
    os.read(ready, 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert arena.offer(0, b"after") and bytes(arena.get(0)) == b"after"


def test_it_leaves_nothing_behind():
    before = set(os.listdir("/dev/shm"))
    descriptors = len(os.listdir("/proc/self/fd"))
    arena = Arena(4, 1 << 20)
    arena.offer(0, b"x")
    del arena
    gc.collect()
    assert set(os.listdir("/dev/shm")) == before
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert kept_data_nbytes() == 0


def test_it_cannot_be_opened_when_its_process_is_gone():
    state = pickle.dumps(arena := Arena(4, 100))
    arena.offer(0, b"x")
    again = pickle.loads(state)
    assert bytes(again.get(0)) == b"x"
    del arena, again
    gc.collect()
    with pytest.raises(OSError):
        pickle.loads(state)


def wrapped(**config):
    net = torch.nn.Linear(64, 64)
    return infinity.wrap_model(
        net, torch.optim.SGD(net.parameters()), {"params": "host", "optimizer": "host", **config}
    )


@pytest.mark.parametrize("first", ["arena", "model"])
def test_it_is_charged_to_host_memory(first):
    """Claim: made before the model, it is a part of its plan; made after it, it has to fit."""
    made = Arena(1, 8 << 20) if first == "arena" else None
    if first == "arena":
        with pytest.raises(CapacityError):
            wrapped(host_memory="6MiB")
    net, optimizer = wrapped(host_memory="16MiB")
    if made is None:
        with pytest.raises(CapacityError, match=KEPT_DATA):
            Arena(1, 20 << 20)
        made = Arena(1, 8 << 20)
    host = infinity.stats(net).tiers["host"]
    assert 8 << 20 < host.peak_nbytes <= host.planned_nbytes <= 16 << 20
