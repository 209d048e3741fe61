"""Transfer: an exchange between ranks in phases, kept as data, so that an exception at any line
loses none of it.

phase       operations of a transport that start together; their input may come from earlier phases
operation   a call without arguments that starts one and returns its work: a bound method of a
            process group, never a Python function
"""

from __future__ import annotations

import io
import pickle
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from operator import call
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

HEARING_INTERVAL = timedelta(milliseconds=500)  # of a wait, to see Ctrl-C and missing ranks
LONGEST_NAP = 1e-3  # seconds between two polls of a device
GRACE_SECONDS = 5.0  # beyond the group's timeout, so that the transport's own error comes first

Operation = Callable[[], dist.Work]
Phase = Callable[[], Sequence[Operation]]


class Transfer:
    """A running exchange. ``phases`` may be called again if not started. ``result`` makes the
    result from their buffers."""

    def __init__(self, *phases: Phase, result: Callable[[], Any] = lambda: None):
        self._phases: list[tuple[Phase, list[dist.Work]]] = [(phase, []) for phase in phases]
        self._result = result

    @property
    def is_begun(self) -> bool:
        """Whether other ranks may have observed it."""
        return bool(self._phases[0][1])

    def begin(self) -> None:
        """Starts the first phase. Idempotent."""
        _begin(*self._phases[0])

    def poll(self) -> bool:
        """Advances as far as possible without blocking. Returns whether it is complete. Raises
        RuntimeError as :meth:`wait` does."""
        for phase, works in self._phases:
            _begin(phase, works)
            for work in works:
                if not work.is_completed():
                    return False
                work.wait()
        return True

    def wait(self) -> Any:
        """Blocks until completion, and returns the result; can be repeated. Raises RuntimeError if
        a rank does not come."""
        for phase, works in self._phases:
            _begin(phase, works)
            for work in works:
                wait_for(work)
        return self._result()


def _begin(phase: Phase, works: list[dist.Work]) -> None:
    if not works:
        # One call of the interpreter: no exception can come between the transport's start and the
        # list entry.
        works.extend(map(call, phase()))


def wait_for(
    work: dist.Work,
    meanwhile: Callable[[], None] = lambda: None,
    *,
    is_on_host: bool = True,
) -> None:
    """Blocks until ``work`` is complete. Calls ``meanwhile`` about twice a second.

    Raises RuntimeError if it failed, or exceeds the group's timeout plus ``GRACE_SECONDS``: a
    transport may have no limit of its own. After :func:`give_up` all waits end together, within
    ``GRACE_SECONDS``: a rank that is gone is not waited for anew.
    """
    if not is_on_host:
        _poll(work, meanwhile)
        return
    began = asked = time.monotonic()
    while True:
        try:
            work.wait(HEARING_INTERVAL)
            return
        except RuntimeError:
            if work.is_completed():  # perhaps just now: take its own outcome
                work.wait()
                return
            if time.monotonic() - asked < HEARING_INTERVAL.total_seconds() / 2:
                raise  # not the end of an interval
        _refuse_longer(began)
        meanwhile()
        asked = time.monotonic()


def _poll(work: dist.Work, meanwhile: Callable[[], None]) -> None:
    """Waits for a device's transport on the host. Its own wait only orders queues, or with a limit
    aborts all of the group's collectives when that ends (NCCL)."""
    nap, began = 1e-5, time.monotonic()
    asked = began
    while not work.is_completed():
        time.sleep(nap)
        nap = min(2 * nap, LONGEST_NAP)
        if time.monotonic() - asked > HEARING_INTERVAL.total_seconds():
            _refuse_longer(began)
            meanwhile()
            asked = time.monotonic()
    work.wait()


_gave_up: float | None = None  # when ranks were lost, of time.monotonic()


def give_up() -> None:
    """Notes that a rank is gone, or did not come."""
    global _gave_up
    _gave_up = _gave_up or time.monotonic()


def expect_ranks() -> None:
    """Gives waits their whole limit again: all ranks have just met."""
    global _gave_up
    _gave_up = None


def _refuse_longer(began: float) -> None:
    """Raises RuntimeError if a wait since ``began`` (of ``time.monotonic()``) exceeds the limit."""
    now = time.monotonic()
    end = began + patience_seconds() + GRACE_SECONDS
    if now > (end if _gave_up is None else min(end, _gave_up + GRACE_SECONDS)):
        give_up()
        raise RuntimeError(f"timed out after {now - began:.0f} s")


def patience_seconds() -> float:
    """Returns how long a rank waits for another one: the default process group's timeout."""
    return (group_timeout() or c10d.default_pg_timeout).total_seconds()


def group_timeout() -> timedelta | None:
    """Returns the default process group's timeout, None if unknown. Groups made later would have
    torch's default instead."""
    group = c10d._get_default_group()
    device = (
        torch.device("cpu")
        if "cpu" in group.name() or dist.get_backend() == "gloo"
        else group._device_types[0]
    )
    try:
        return group._get_backend(device).options._timeout
    except (RuntimeError, AttributeError):
        return None


def end_groups(groups: list[dist.ProcessGroup]) -> None:
    """Destroys process groups that were made for a job."""
    for group in groups:
        try:
            dist.destroy_process_group(group)
        except (RuntimeError, ValueError, AssertionError, AttributeError):
            pass  # the job's process group went first
    groups.clear()


# --- operations ---


def gather(
    group: dist.ProcessGroup,
    tensor: torch.Tensor,
    everyones: Sequence[torch.Tensor],
    *,
    root: int = 0,
) -> Operation:
    """Makes the operation that sends ``tensor`` to rank ``root`` of the group, which alone has
    ``everyones``."""
    options = c10d.GatherOptions()
    options.rootRank = root
    return partial(group.gather, [list(everyones)] if everyones else [], [tensor], options)


def scatter(
    group: dist.ProcessGroup, tensor: torch.Tensor, everyones: Sequence[torch.Tensor]
) -> Operation:
    """Makes the operation that fills ``tensor`` from the first rank, which alone has
    ``everyones``."""
    options = c10d.ScatterOptions()
    options.rootRank = 0
    return partial(group.scatter, [tensor], [list(everyones)] if everyones else [], options)


def all_gather(
    group: dist.ProcessGroup, everyones: torch.Tensor, tensor: torch.Tensor
) -> Operation:
    """Makes the operation that fills flat ``everyones`` with ``tensor`` of every rank."""
    return partial(group._allgather_base, everyones, tensor, c10d.AllgatherOptions())


def broadcast(group: dist.ProcessGroup, tensor: torch.Tensor, root: int) -> Operation:
    """Makes the operation that fills ``tensor`` from rank ``root`` of the group."""
    options = c10d.BroadcastOptions()
    options.rootRank = root
    return partial(group.broadcast, [tensor], options)


def swap(
    group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], counts: Sequence[int]
) -> Transfer:
    """Makes the transfer that sends each rank its flat tensor of ``tensors``, all of one dtype.
    Result: what each rank sends here, ``counts`` elements."""
    sent = torch.cat([*tensors])
    received = sent.new_empty(sum(counts))
    sizes = [*counts], [tensor.numel() for tensor in tensors]
    operation = partial(group.alltoall_base, received, sent, *sizes, c10d.AllToAllOptions())
    return Transfer(lambda: [operation], result=lambda: list(received.split([*counts])))


def exchange_objects(group: dist.ProcessGroup, size: int, value: Any) -> Transfer:
    """Makes the transfer that gathers every rank's ``value``, anything picklable: a list in rank
    order."""
    pickled = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = torch.empty(size, dtype=torch.int64, device="cpu")
    everyones: list[torch.Tensor] = []  # one: [size, most]

    def pass_on() -> list[Operation]:
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8, device="cpu")
        padded[: pickled.numel()] = pickled
        everyones[:] = [torch.empty(size, padded.numel(), dtype=torch.uint8, device="cpu")]
        return [all_gather(group, everyones[0].view(-1), padded)]

    def result() -> list[Any]:
        rows = zip(everyones[0], sizes.tolist())
        return [pickle.load(io.BytesIO(row[:nbytes].numpy().tobytes())) for row, nbytes in rows]

    nbytes_here = torch.tensor([pickled.numel()], dtype=torch.int64, device="cpu")
    return Transfer(lambda: [all_gather(group, sizes, nbytes_here)], pass_on, result=result)
