"""SharedHomes: lets the ranks of one machine read each other's weights at home, instead of sending
every byte to every rank.

A gather through shared memory is still one of the collectives of its shard group, in order, after a
sync point or in a verified pass. Only its bytes take another way: each rank publishes the address
of its shard, and copies the others'. The shard does not change until all have copied it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ... import native
from ...core.machine import processors
from ...core.machine.kernel import running_kernel
from ...errors import StorageError

Collect = Callable[[Any, str], list[Any]]  # gathers each rank's value, in rank order; given a name


class Gathering(dist.Work):
    """A running gather, with the interface of torch's collectives. After its ``ticket`` no other
    rank reads this one's home."""

    def __init__(self, ticket: native.Ticket, whole: torch.Tensor | None = None):
        super().__init__()
        self.ticket, self._whole = ticket, whole  # which a thread of the core writes to

    def is_completed(self) -> bool:
        """Returns whether all ranks have every shard, or the gather failed."""
        return self.ticket.done

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until completion, ``timeout`` at most. Raises RuntimeError after it, or if a rank
        is gone."""
        if timeout is not None and not self.ticket.wait_for(timeout.total_seconds()):
            raise RuntimeError(f"timed out after {timeout.total_seconds():g} s")
        self.ticket.wait()
        return True


class SharedHomes:
    """The weights that the ranks of a shard group can read at each other's homes. Used from the
    thread that runs the model.

    Raises StorageError if the system does not allow shared memory.
    """

    def __init__(self, patience_seconds: float):
        self._row = native.SharedRow(processors.for_pages())
        self._patience_seconds = patience_seconds
        self._common: set[int] = set()  # addresses of what all ranks share
        # Buffers that a thread of the core fills with unused data
        self._unused: list[torch.Tensor] = []

    def make_region(self, nbytes: int, *, huge_pages: bool, touch_threads: int) -> native.Region:
        """Allocates memory that can be shared. If the system has none, allocates private memory."""
        try:
            return self._row.allocate(nbytes, huge_pages, touch_threads)
        except StorageError:
            return native.Region(nbytes, huge_pages, touch_threads)

    def connect(
        self, collect: Collect, place: int, regions: Sequence[Sequence[native.Region | None]]
    ) -> str:
        """Connects the shard group's weights, once they are allocated. Every rank of the group
        calls this.

        ``place``: this rank's number there. ``regions``: of each of its flat params; those that all
        ranks have in memory are shared. Returns why none is, equal on all ranks, or "".
        """
        ours = [
            all(region is not None and self._row.owns(region) for region in of_flat_param)
            for of_flat_param in regions
        ]
        everyones = collect((ours, self._row.self()), "where weights lie")
        common = [all(of_flat_param) for of_flat_param in zip(*(theirs for theirs, _ in everyones))]
        refusal = "" if any(common) else "no weights are in memory that all ranks share"
        if not refusal:
            try:
                self._row.connect([named for _, named in everyones], place)
            except StorageError as error:
                refusal = str(error)
        refusal = first_of(collect(refusal, "whether weights are shared"))
        if refusal:
            self.close()
        else:
            self._row.close_file()
            shared = (
                of_flat_param for of_flat_param, is_common in zip(regions, common) if is_common
            )
            self._common = {
                region.address
                for of_flat_param in shared
                for region in of_flat_param
                if region is not None
            }
        return refusal

    def have(self, regions: Sequence[native.Region | None]) -> bool:
        """Returns whether this rank's ``regions`` are shared with all ranks of the group, and
        theirs with it."""
        return all(
            region is not None and region.address in self._common and self._row.shares(region)
            for region in regions
        )

    def read(self, home: native.Region, whole: torch.Tensor, nbytes: int, what: str) -> Gathering:
        """Starts a gather of ``nbytes`` bytes per rank into ``whole``, which has this rank's bytes
        already, as the start of ``home`` has. ``what``: equal on all ranks, which start the same
        gathers in order."""
        said = int.from_bytes(hashlib.blake2b(what.encode(), digest_size=8).digest(), "little")
        return Gathering(
            self._row.gather(said, home.address, nbytes, whole.data_ptr(), self._patience_seconds),
            whole,
        )

    def complete(self, whole: torch.Tensor, nbytes: int) -> Gathering:
        """Starts a gather that only other ranks have reached. Its data is not used on any rank."""
        if not self.under_way():
            self._unused.clear()
        self._unused.append(whole)  # before the start: safe if interrupted in between
        return Gathering(
            self._row.gather(
                native.SharedRow.NOBODYS, 0, nbytes, whole.data_ptr(), self._patience_seconds
            ),
            whole,
        )

    @property
    def begun(self) -> int:
        """How many gathers this rank has started."""
        return self._row.begun

    def under_way(self) -> list[Gathering]:
        """Returns the running gathers, including those whose start was interrupted."""
        return [Gathering(ticket) for ticket in self._row.under_way()]

    def close(self) -> None:
        """Ends running gathers with an error, and releases the memory. Idempotent."""
        self._row.close()
        self._common.clear()
        self._unused.clear()


def agree_to_share(collect: Collect, refusal: str) -> str:
    """Decides whether the ranks of a shard group can share memory. Every rank calls this with its
    own ``refusal``, or "". Returns the first refusal, equal on all ranks, or ""."""
    everyones = collect((running_kernel(), refusal), "whether weights can be shared")
    refusal = first_of([theirs for _, theirs in everyones])
    if not refusal and (len({kernel for kernel, _ in everyones}) > 1 or not everyones[0][0]):
        refusal = "the ranks are on several machines, or do not see each other's processes"
    return refusal


def first_of(refusals: Sequence[str]) -> str:
    """Returns the first that is not empty, or ""."""
    return next((each for each in refusals if each), "")


def why_not(*, computes_on_host: bool, compresses: bool) -> str:
    """Returns why this rank cannot share its weights, or ""."""
    if not computes_on_host:
        return (
            "the model computes on a GPU: each would read all weights over its own link, of which a"
            " gather sends most between GPUs"
        )
    if compresses:
        return "compress_gathers=True: what passes is not what lies at home"
    return ""
