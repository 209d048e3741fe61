"""DataRanks: the ranks that share a model's arrays and its batch, and the collectives between them.

slice      a rank's equal part of every flat array
replica    a rank elsewhere that holds the same slice (hybrid sharding)
channel    a process group on which ranks come together: those of one row of slices, or those of one column of replicas
progress   how many steps and backwards a rank has done: part of what is said at every rendezvous

All collectives of a row begin with a rendezvous on one channel, whatever group their bytes take, so that no two ranks can wait
for each other in different places. Bytes travel in the dtype they have, or as 8-bit codes where weights are compressed; sums are
taken in fp32, in the order of the ranks, and rounded once. The transport never adds, so that the result does not depend on its
algorithm.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ConfigError, InfinityError
from ..machine.traffic import Traffic
from .channel import all_gather, Channel, HEARING_SECONDS, Pending, ranks_lost
from .quantize import decode_blocks, encode_blocks


@dataclass(eq=False)
class DataRanks:
    """The ranks of one job. Alone (the default) every collective is nothing to do.

    rank, size
        Of those that share the arrays: this rank's slice is number ``rank`` of ``size``.
    """

    rank: int = 0
    size: int = 1
    local_size: int = 1  # ranks on this machine: they share its memory and its disks
    shard: str = "parameters"  # what is sliced besides: "optimizer" < "gradients" < "parameters"
    row: Channel | None = None  # the ranks that have the other slices
    reduces: dist.ProcessGroup | None = None  # of the same ranks: gradients, while weights are gathered
    replicas: Channel | None = None
    node: Channel | None = None  # this machine's ranks, where gathered weights are shared out among them too
    compresses: bool = False  # whether gathered weights pass as 8-bit codes
    traffic: Traffic = field(default_factory=Traffic)
    allowed_processors: set[int] | None = None  # before this rank was bound to a NUMA node
    moment: str = ""  # how far this rank is: part of what is said at every meeting
    ready_count: Callable[[], int] = lambda: 0  # how many more reductions this rank could start
    on_gather: Callable[[int], None] = lambda count: None  # told how many all ranks of the row can start
    nodes: list[list[int]] = field(default_factory=list)  # ranks of each machine of each row, where weights are shared out
    own_groups: list[dist.ProcessGroup] = field(default_factory=list)  # made for this job, and ended with it

    @property
    def alone(self) -> bool:
        """Whether there is no other rank at all."""
        return self.data_size == 1

    @property
    def world_rank(self) -> int:
        """This rank among all of the job."""
        return 0 if self.alone else dist.get_rank()

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all: it writes what there is one of."""
        return self.rank == 0 and (self.replicas is None or self.replicas.rank == 0)

    @property
    def writes(self) -> bool:
        """Whether this rank writes its slice: of replicas the first does."""
        return self.replicas is None or self.replicas.rank == 0

    @property
    def data_rank(self) -> int:
        """This rank among all data ranks, in the order of :meth:`collect`."""
        return self.rank + (self.size * self.replicas.rank if self.replicas is not None else 0)

    @property
    def data_size(self) -> int:
        """Ranks that each have a part of the batch."""
        return self.size * (self.replicas.size if self.replicas is not None else 1)

    @property
    def keeps_weights(self) -> bool:
        """Whether a weight, once gathered, stays until the step (ZeRO-1 and 2)."""
        return self.size > 1 and self.shard != "parameters"

    @property
    def keeps_gradients(self) -> bool:
        """Whether every rank has its whole gradient at home until the step (ZeRO-1)."""
        return self.size > 1 and self.shard == "optimizer"

    @property
    def meetings(self) -> int:
        """How often the ranks of the row have met."""
        return self.row.count if self.row is not None else 0

    @property
    def channels(self) -> list[Channel]:
        return [channel for channel in (self.row, self.replicas) if channel is not None]

    def allow_flags(self, count: int) -> None:
        """Makes room in meetings for ``count`` flags, which must be the same number on every rank."""
        for channel in self.channels:
            channel.flags_nbytes = max(1, count)

    # --- weights ---

    def gather(self, flat: torch.Tensor, what: str) -> Pending | None:
        """Fills ``flat``, of which this rank's slice is filled already, with every rank's. None: nothing to wait for."""
        if self.size == 1:
            return None
        what = f"gathering {what}"
        if self.compresses and flat.is_floating_point():
            mine = encode_blocks(flat.view(self.size, -1)[self.rank])
            everyones = mine.new_empty(self.size * mine.numel())
            return self._gather(self.row, everyones, mine, what, lambda: decode_blocks(everyones, flat, self.size))
        raw = _bytes_of(flat)
        return self._gather(self.row, raw, raw.view(self.size, -1)[self.rank], what)

    def gather_in_node(self, flat: torch.Tensor, what: str) -> Pending:
        """The same among this machine's ranks, whose slices of ``flat`` are larger."""
        raw = _bytes_of(flat)
        mine = raw.view(self.node.size, -1)[self.node.rank]
        return self._gather(self.node, raw, mine, f"gathering {what} in the node")

    def _gather(
        self,
        channel: Channel,
        whole: torch.Tensor,
        mine: torch.Tensor,
        what: str,
        then: Callable[[], None] | None = None,
    ) -> Pending:
        ready = self.row.meet(f"{what} {self.moment}", [min(self.ready_count(), 254)])
        start = time.perf_counter()
        work = self._do(lambda: all_gather(whole, mine, group=channel.bulk, async_op=True), what)

        def finish() -> None:
            edge = "all-gather" if channel is self.row else "all-gather in node"
            self._count(edge, whole.numel() - mine.numel(), what, start)
            if then is not None:
                then()
                for tensor in (whole, mine):  # coded, of another stream than the one that decodes
                    if tensor.device.type != "cpu":
                        tensor.record_stream(torch.accelerator.current_stream(tensor.device))

        return Pending([work], what, finish, ready=int(ready.min()))

    # --- gradients ---

    def agree(self, flags: Sequence[int], what: str) -> list[bool]:
        """Which of ``flags`` any rank has set."""
        if self.alone:
            return [bool(flag) for flag in flags]
        flags = [int(flag) for flag in flags]
        for channel in self.channels:
            flags = channel.meet(f"{what} {self.moment}", flags).amax(0).tolist()
        return [bool(flag) for flag in flags]

    def reduce(self, flat: torch.Tensor, what: str, done: Callable[[torch.Tensor], None]) -> Pending:
        """Averages this rank's slice of every rank's ``flat``: when waited for, ``done`` is given it, in fp32.

        Everyone has to have met before (:meth:`agree`).
        """
        start = time.perf_counter()
        raw = _bytes_of(flat)
        received = torch.empty_like(raw)
        works = []
        if self.size > 1:
            works.append(self._do(lambda: dist.all_to_all_single(received, raw, group=self.reduces, async_op=True), what))

        def finish() -> None:
            moved = raw.numel() - raw.numel() // self.size
            parts = (received if self.size > 1 else raw).view(flat.dtype).view(self.size, -1)
            total = _ordered_sum(parts)
            if self.replicas is not None:
                everyones = total.new_empty(self.replicas.size, total.numel())
                try:
                    all_gather(everyones.view(-1), total, group=self.replicas.bulk)
                except RuntimeError as error:
                    raise ranks_lost(what, error) from error
                total = _ordered_sum(everyones)
                moved += everyones.nbytes - total.nbytes
            self._count("reduce-scatter", moved, what, start)
            done(total.div_(self.data_size))

        return Pending(works, what, finish)

    # --- everything else ---

    def exchange(self, values: torch.Tensor, what: str) -> torch.Tensor:
        """``values`` (of one shape) of every rank that has a slice: [size, ...]."""
        if self.size == 1:
            return values.unsqueeze(0)
        self.row.meet(f"{what} {self.moment}")
        raw = _bytes_of(values.contiguous().reshape(-1)).cpu()
        heard = raw.new_empty(self.size * raw.numel())
        self._do(lambda: all_gather(heard, raw, group=self.row.group), what)
        return heard.view(values.dtype).view(self.size, *values.shape).to(values.device)

    def least(self, values: Sequence[int], what: str) -> list[int]:
        """The smallest of each of ``values`` over all ranks."""
        found = torch.tensor(values, dtype=torch.int64, device="cpu")
        for channel in (self.row, self.replicas):
            if channel is not None:
                channel.meet(what)
                everyones = found.new_empty(channel.size, found.numel())
                self._do(lambda c=channel, e=everyones, f=found: all_gather(e.view(-1), f, group=c.group), what)
                found = everyones.amin(0)
        return found.tolist()

    def assemble(self, out: torch.Tensor, pieces: Sequence[tuple[int, int]], what: str) -> None:
        """Completes flat ``out``: of each rank (in order) the elements it has, which it has filled in, go to all others."""
        if self.size == 1:
            return
        self.row.meet(f"{what} {self.moment}")
        for peer, (begin, end) in enumerate(pieces):
            if begin < end:
                raw = _bytes_of(out[begin:end])
                source = self.row.ranks[peer]
                self._do(lambda raw=raw, source=source: dist.broadcast(raw, source, group=self.row.group), what)

    def broadcast(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """The first rank's ``tensor``, in place; contiguous."""
        if not self.alone:
            raw = _bytes_of(tensor.view(-1))
            sent = raw.cpu()
            for channel in (self.replicas, self.row):  # to the first rank of each row, then along the rows
                if channel is not None:
                    channel.meet(what)
                    self._do(lambda channel=channel: dist.broadcast(sent, channel.ranks[0], group=channel.group), what)
            if sent is not raw:
                raw.copy_(sent)
        return tensor

    def collect(self, mine: Any, what: str) -> list[Any]:
        """Every rank's ``mine``, anything that can be pickled, in the order of slices; then the next replica's."""
        found = [mine]
        for channel in (self.row, self.replicas):
            if channel is not None:
                channel.meet(what)
                everyones: list = [None] * channel.size
                self._do(lambda c=channel, e=everyones, f=found: dist.all_gather_object(e, f, group=c.group), what)
                found = [item for of_one in everyones for item in of_one]
        return found

    def compare(self, mine: dict[str, str], what: str) -> None:
        """Raises ConfigError where a rank's description differs from the first one's, with the first difference."""
        if self.alone:
            return
        everyones = self.collect((self.world_rank, mine), what)
        first_rank, firsts = everyones[0]
        for peer, theirs in everyones:
            for key in dict.fromkeys([*firsts, *theirs]):
                first, other = firsts.get(key, "absent"), theirs.get(key, "absent")
                if first != other:
                    raise ConfigError(
                        f"{what}: {key} is {first} on rank {first_rank} and {other} on rank {peer}. All ranks must be given the "
                        "same."
                    )

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """All ranks get through the block, or all of them raise, and can go on."""
        try:
            yield
        except BaseException as error:
            for channel in (self.row, self.replicas):
                if channel is not None:
                    channel.fail(error)
            raise
        for channel, other in ((self.row, self.replicas), (self.replicas, None)):
            try:
                if channel is not None:
                    channel.meet(what)
            except InfinityError as error:
                if other is not None:
                    other.fail(error)
                raise

    def meet(self, what: str) -> None:
        """Waits until every rank is at ``what``."""
        for channel in self.channels:
            channel.meet(f"{what} {self.moment}")

    def same(self, what: str, *tensors: torch.Tensor) -> None:
        """Raises UsageError where the ranks do not have the same ``tensors``."""
        if not self.alone:
            digest = hashlib.blake2b(digest_size=8)
            for tensor in tensors:
                # Of a copy: NumPy would make the storage one that cannot be resized any more.
                copied = tensor.detach().clone(memory_format=torch.contiguous_format)
                digest.update(_bytes_of(copied.view(-1)).cpu().numpy())
            self.meet(f"{what}, to values of digest {digest.hexdigest()},")

    def tell(self, error: BaseException) -> None:
        """Lets the others know that this rank cannot go on. Gives them a moment to hear it: this process may end next."""
        if all(channel.has_ended for channel in self.channels):
            return
        for channel in self.channels:
            channel.tell(error)
        deadline = time.monotonic() + HEARING_SECONDS
        while self.channels and not any(channel.was_heard for channel in self.channels) and time.monotonic() < deadline:
            time.sleep(0.01)

    def close(self) -> None:
        """Ends the groups that were made for this job, and lets this thread run on every processor again."""
        if self.allowed_processors is not None:
            os.sched_setaffinity(0, self.allowed_processors)
            self.allowed_processors = None
        for group in self.own_groups:
            try:
                dist.destroy_process_group(group)
            except (RuntimeError, ValueError, AssertionError, AttributeError):
                pass  # the job's process group went first
        self.own_groups.clear()

    def _do(self, work: Callable[[], Any], what: str) -> Any:
        try:
            return work()
        except RuntimeError as error:
            raise ranks_lost(what, error) from error

    def _count(self, edge: str, nbytes: int, what: str, start: float) -> None:
        now = time.perf_counter()
        counted = self.traffic.collectives[edge]
        counted.nbytes += nbytes
        counted.busy_seconds += now - start
        self.traffic.mark(edge, what, start, now)


def _bytes_of(flat: torch.Tensor) -> torch.Tensor:
    return flat.detach().view(torch.uint8)


def _ordered_sum(parts: torch.Tensor) -> torch.Tensor:
    """The fp32 sum of the rows, first to last."""
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total.add_(part)
    return total
