"""Collectives: moves bytes between the data ranks, and finds out where they do not do the same.

offered    reductions that a rank could start by now; said at a gather's rendezvous, whose least is known to all
trace      the units that a rank expects to use in this pass; its digest is said at every gather's rendezvous

Every collective of a row comes behind a rendezvous on one channel (a reduction's is :meth:`Collectives.agree`), whatever group its bytes take, so that no two ranks can wait
for each other in different places. Bytes travel in the dtype they have, or as 8-bit codes where weights are compressed; sums are
taken in fp32, in the order of the ranks, and rounded once. The transport never adds, so that the result does not depend on its
algorithm.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..errors import ConfigError, InfinityError
from ..machine.traffic import Traffic
from .channel import HEARING_SECONDS, Channel, Pending, all_gather, ranks_lost
from .data_ranks import DataRanks
from .progress import Progress
from .quantize import decode_blocks, encode_blocks

MOST_OFFERED = 254  # what fits a byte beside BACKWARD_OVER; the rest is offered at the next rendezvous
BACKWARD_OVER = 255
DIGEST_NBYTES = 4  # of a trace, among the flags of a gather's rendezvous


class Collectives:
    """Runs what the ranks of one job do together. In a job of one rank every collective is nothing to do.

    Used from the thread that runs the model.
    """

    def __init__(self, ranks: DataRanks | None = None, traffic: Traffic | None = None):
        self.ranks = ranks if ranks is not None else DataRanks()
        self.traffic = traffic if traffic is not None else Traffic()
        self.progress = Progress()
        self._trace = bytes(DIGEST_NBYTES)
        self._traces_agree = False
        self._is_closed = False

    def note_trace(self, trace: Iterable[int]) -> None:
        """Sets which units this rank expects to use, in their order, in the pass that begins."""
        digest = hashlib.blake2b(np.fromiter(trace, np.int64).tobytes(), digest_size=DIGEST_NBYTES)
        self._trace, self._traces_agree = digest.digest(), False

    @property
    def traces_agree(self) -> bool:
        """Whether a gather of this pass found that all ranks of the row expect to use the same units.

        The same on all these ranks, whatever each of them went through before.
        """
        return self._traces_agree

    def allow_flags(self, count: int) -> None:
        """Makes room for ``count`` flags wherever ranks with the same units meet, each with the same number."""
        for channel in self.ranks.unit_channels:
            channel.flags_nbytes = max(channel.flags_nbytes, count)

    # --- weights ---

    def gather(self, flat: torch.Tensor, what: str, *, offered: int = 0) -> Pending | None:
        """Fills ``flat``, of which this rank's slice is filled already, with every rank's. None: nothing to wait for.

        ``offered``: reductions that this rank could start; the least of all ranks is the result's ``least_offered``.
        """
        if self.ranks.size == 1:
            return None
        what = f"gathering {what}"
        if self.ranks.compresses and flat.is_floating_point():
            mine = encode_blocks(flat.view(self.ranks.size, -1)[self.ranks.rank])
            everyones = mine.new_empty(self.ranks.size * mine.numel())
            return self._gather(
                self.ranks.row, everyones, mine, what, offered, lambda: decode_blocks(everyones, flat, self.ranks.size)
            )
        raw = _bytes_of(flat)
        return self._gather(self.ranks.row, raw, raw.view(self.ranks.size, -1)[self.ranks.rank], what, offered)

    def gather_in_node(self, flat: torch.Tensor, what: str, *, offered: int = 0) -> Pending:
        """Does the same among this machine's ranks, whose slices of ``flat`` are larger."""
        raw = _bytes_of(flat)
        mine = raw.view(self.ranks.node.size, -1)[self.ranks.node.rank]
        return self._gather(self.ranks.node, raw, mine, f"gathering {what} in the node", offered)

    def _gather(
        self,
        channel: Channel,
        whole: torch.Tensor,
        mine: torch.Tensor,
        what: str,
        offered: int,
        then: Callable[[], None] | None = None,
    ) -> Pending:
        flags = self.ranks.row.rendezvous(f"{what} {self.progress}", [min(offered, MOST_OFFERED), *self._trace])
        self._traces_agree = bool((flags[:, 1:] == flags[0, 1:]).all())
        start = time.perf_counter()
        work = self._do(lambda: all_gather(whole, mine, group=channel.bulk, async_op=True), what)

        def finish() -> None:
            edge = "all-gather" if channel is self.ranks.row else "all-gather in node"
            self._count(edge, whole.numel() - mine.numel(), what, start)
            if then is not None:
                then()
                for tensor in (whole, mine):  # coded, of another stream than the one that decodes
                    if tensor.device.type != "cpu":
                        tensor.record_stream(torch.accelerator.current_stream(tensor.device))

        return Pending([work], what, finish, least_offered=int(flags[:, 0].min()))

    # --- gradients ---

    def offer(self, count: int | None) -> int | None:
        """Meets the ranks of the row in mid-backward. Returns the least number of reductions that any rank could start.

        ``count``: of this rank; None when its backward is over. The result is None when that of every rank is.
        """
        flag = BACKWARD_OVER if count is None else min(count, MOST_OFFERED)
        least = int(self.ranks.row.rendezvous(f"in a backward {self.progress}", [flag]).min())
        return None if least == BACKWARD_OVER else least

    def agree(self, flags: Sequence[int], what: str) -> list[bool]:
        """Tells which of ``flags`` any rank with the same units has set."""
        if self.ranks.alone:
            return [bool(flag) for flag in flags]
        flags = [int(flag) for flag in flags]
        for channel in self.ranks.unit_channels:
            flags = channel.rendezvous(f"{what} {self.progress}", flags).amax(0).tolist()
        return [bool(flag) for flag in flags]

    def reduce(self, flat: torch.Tensor, what: str, done: Callable[[torch.Tensor], None]) -> Pending:
        """Averages this rank's slice of every rank's ``flat``: when waited for, ``done`` is given it, in fp32.

        Everyone has to have met before (:meth:`agree`).
        """
        start = time.perf_counter()
        raw = _bytes_of(flat)
        received = torch.empty_like(raw)
        works = []
        if self.ranks.size > 1:
            works.append(
                self._do(lambda: dist.all_to_all_single(received, raw, group=self.ranks.row.reductions, async_op=True), what)
            )

        def finish() -> None:
            moved = raw.numel() - raw.numel() // self.ranks.size
            parts = (received if self.ranks.size > 1 else raw).view(flat.dtype).view(self.ranks.size, -1)
            total = _ordered_sum(parts)
            if self.ranks.replicas is not None:
                everyones = total.new_empty(self.ranks.replicas.size, total.numel())
                try:
                    all_gather(everyones.view(-1), total, group=self.ranks.replicas.bulk)
                except RuntimeError as error:
                    raise ranks_lost(what, error) from error
                total = _ordered_sum(everyones)
                moved += everyones.nbytes - total.nbytes
            self._count("reduce-scatter", moved, what, start)
            done(total.div_(self.ranks.data_size))

        return Pending(works, what, finish)

    # --- everything else ---

    def exchange(self, values: torch.Tensor, what: str, *, over_tensors: bool = False, over_stages: bool = False) -> torch.Tensor:
        """Collects ``values`` (of one shape) of every rank that has a slice: [size, ...], on every rank in the same order. ``over_tensors``:
        of those that have other parts of the tensors, too; ``over_stages``: and of those that have other stages."""
        found = values.unsqueeze(0)
        wanted = (True, self.ranks.row), (over_tensors, self.ranks.tensor), (over_stages, self.ranks.stages)
        for is_wanted, channel in wanted:
            if is_wanted and channel is not None:
                channel.rendezvous(f"{what} {self.progress.said_to(channel, self.ranks)}")
                raw = _bytes_of(found.contiguous().reshape(-1)).cpu()
                everyones = raw.new_empty(channel.size * raw.numel())
                self._do(lambda c=channel, e=everyones, r=raw: all_gather(e, r, group=c.group), what)
                found = everyones.view(values.dtype).view(-1, *values.shape).to(values.device)
        return found

    def exchange_over_stages(self, value: torch.Tensor, what: str) -> torch.Tensor:
        """Collects one ``value`` of every stage, which all ranks of a stage have: [stages, ...]."""
        channel = self.ranks.stages
        if channel is None:
            return value.unsqueeze(0)
        channel.rendezvous(f"{what} {self.progress.said_to(channel, self.ranks)}")
        everyones = value.new_empty(channel.size, *value.shape, device="cpu")
        self._do(lambda: all_gather(everyones.view(-1), value.cpu().reshape(-1), group=channel.group), what)
        return everyones.to(value.device)

    def least(self, values: Sequence[int], what: str, *, over_stages: bool = False) -> list[int]:
        """Finds the smallest of each of ``values`` over all ranks with the same units; ``over_stages``: over all ranks."""
        found = torch.tensor(values, dtype=torch.int64, device="cpu")
        for channel in self.ranks.channels if over_stages else self.ranks.unit_channels:
            channel.rendezvous(what)
            everyones = found.new_empty(channel.size, found.numel())
            self._do(lambda c=channel, e=everyones, f=found: all_gather(e.view(-1), f, group=c.group), what)
            found = everyones.amin(0)
        return found.tolist()

    def assemble(self, out: torch.Tensor, pieces: Sequence[tuple[int, int]], what: str) -> None:
        """Completes flat ``out``: of each rank (in order) the elements it has, which it has filled in, go to all others."""
        if self.ranks.size == 1:
            return
        self.ranks.row.rendezvous(f"{what} {self.progress}")
        for peer, (begin, end) in enumerate(pieces):
            if begin < end:
                raw = _bytes_of(out[begin:end])
                source = self.ranks.row.ranks[peer]
                self._do(lambda raw=raw, source=source: dist.broadcast(raw, source, group=self.ranks.row.group), what)

    def broadcast(self, tensor: torch.Tensor, what: str, *, over_tensors: bool = False) -> torch.Tensor:
        """Makes ``tensor`` the first data rank's, in place; contiguous. ``over_tensors``: the first of all ranks'."""
        if self.ranks.data_size > 1 or (over_tensors and self.ranks.tensor is not None):
            raw = _bytes_of(tensor.view(-1))
            sent = raw.cpu()
            # To the first rank of each part, then of each row, then along the rows.
            for channel in (self.ranks.tensor if over_tensors else None, self.ranks.replicas, self.ranks.row):
                if channel is not None:
                    channel.rendezvous(what)
                    self._do(lambda channel=channel: dist.broadcast(sent, channel.ranks[0], group=channel.group), what)
            if sent is not raw:
                raw.copy_(sent)
        return tensor

    def collect(self, mine: Any, what: str, among: Sequence[Channel] | None = None) -> list[Any]:
        """Collects every rank's ``mine``, anything that can be pickled, in the order of slices; then the next replica's; then that of
        the next part of the tensors; then that of the next stage. ``among``: of the ranks on these channels only."""
        found = [mine]
        for channel in self.ranks.channels if among is None else among:
            channel.rendezvous(what)
            everyones: list = [None] * channel.size
            self._do(lambda c=channel, e=everyones, f=found: dist.all_gather_object(e, f, group=c.group), what)
            found = [item for of_one in everyones for item in of_one]
        return found

    def compare(self, mine: dict[str, str], what: str, *, over_stages: bool = False) -> None:
        """Raises ConfigError where a rank's description differs from the first one's of those with the same units, with the first
        difference; ``over_stages``: of all."""
        if self.ranks.alone:
            return
        everyones = self.collect(
            (self.ranks.world_rank, mine), what, self.ranks.channels if over_stages else self.ranks.unit_channels
        )
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
        """Brings all ranks through the block, or makes all of them raise; they can go on then."""
        try:
            yield
        except BaseException as error:
            for channel in self.ranks.channels:
                channel.fail(error)
            raise
        for number, channel in enumerate(self.ranks.channels):
            try:
                channel.rendezvous(what)
            except InfinityError as error:
                for other in self.ranks.channels[number + 1 :]:
                    other.fail(error)
                raise

    def rendezvous(self, what: str, *, over_stages: str | None = None) -> None:
        """Waits until every rank is at ``what``. ``over_stages``: what is said of it to other stages, where that is less."""
        for channel in self.ranks.channels:
            said = what if channel is not self.ranks.stages or over_stages is None else over_stages
            channel.rendezvous(f"{said} {self.progress.said_to(channel, self.ranks)}")

    def same(self, what: str, *tensors: torch.Tensor, over_tensors: bool = False) -> None:
        """Raises UsageError where the data ranks do not have the same ``tensors``. ``over_tensors``: nor those with other parts of
        tensors, which have these in common."""
        channels = self.ranks.unit_channels if over_tensors else self.ranks.data_channels
        if channels:
            digest = hashlib.blake2b(digest_size=8)
            for tensor in tensors:
                # Of a copy: NumPy would make the storage one that cannot be resized any more.
                copied = tensor.detach().clone(memory_format=torch.contiguous_format)
                digest.update(_bytes_of(copied.view(-1)).cpu().numpy())
            for channel in channels:
                channel.rendezvous(f"{what}, to values of digest {digest.hexdigest()}, {self.progress}")

    def tell(self, error: BaseException) -> None:
        """Lets the others know that this rank cannot go on. Gives them a moment to hear it: this process may end next."""
        if all(channel.has_ended for channel in self.ranks.channels):
            return
        for channel in self.ranks.channels:
            channel.tell(error)
        deadline = time.monotonic() + HEARING_SECONDS
        while self.ranks.channels and not any(channel.was_heard for channel in self.ranks.channels) and time.monotonic() < deadline:
            time.sleep(0.01)

    def close(self) -> None:
        """Ends the groups that were made for this job, and lets this thread run on every processor again."""
        if self.ranks.allowed_processors is not None and not self._is_closed:
            os.sched_setaffinity(0, self.ranks.allowed_processors)
        self._is_closed = True
        for group in self.ranks.own_groups:
            try:
                dist.destroy_process_group(group)
            except (RuntimeError, ValueError, AssertionError, AttributeError):
                pass  # the job's process group went first
        self.ranks.own_groups.clear()

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
