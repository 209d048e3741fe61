"""Collectives: passes values, agreements and failures between the ranks of a job.

Outside of a pass. Inside one, :class:`PassAgreement` compares what the ranks expect to do, and
:class:`Bulk` moves the bytes of weights and gradients. Ranks announce their progress at every sync
point.
"""

from __future__ import annotations

import hashlib
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch

from ..core.machine.traffic import Traffic
from ..errors import InfinityError
from .bulk import Bulk
from .channel import HEARING_SECONDS, Channel, Spans
from .comparing import Comparison
from .kinds import bytes_of, dummy_of
from .parallel_dims import ParallelDims
from .pass_agreement import Progress
from .transfer import Transfer, all_gather, broadcast, end_groups, exchange_objects


class Collectives(Bulk):
    """Passes values between the ranks of one job. In a job of one rank each exchange is a no-op.
    Used from the thread that runs the model. ``most_flags``: that a sync point of ranks with the
    same units has room for."""

    def __init__(
        self,
        ranks: ParallelDims | None = None,
        traffic: Traffic | None = None,
        progress: Progress | None = None,
        *,
        most_flags: int = 0,
    ):
        super().__init__(ranks or ParallelDims(), traffic or Traffic(), progress or Progress())
        self.steps = self._progress.steps
        self._is_closed = False
        for channel in self.ranks.unit_sync_channels:
            channel.flags_nbytes = max(channel.flags_nbytes, most_flags)
        if self.ranks.dp_group is not None and self.ranks.ep_size == 1:
            self.ranks.dp_group.collective_trace.dummy_of = partial(
                dummy_of, lambda of_experts: (self.of_experts if of_experts else self).ranks
            )

    @cached_property
    def of_experts(self) -> Collectives:
        """For divided experts: bytes pass between ranks with the same ones; all data ranks meet."""
        if self.ranks.expert_group is None:
            return self
        view = Collectives(self.ranks.as_experts_see, self.traffic, self._progress)
        view._whole, view._ordered = weakref.proxy(self), self._ordered
        return view

    def note_origin(self, load: str) -> None:
        """Sets the origin that this rank announces at every sync point: ``load``, a name unique to
        one load."""
        self._progress.origin = f", from {load}"

    def _progress_on(self, channel: Channel) -> str:
        """Returns the progress to announce on ``channel``."""
        return self._progress.of_steps if channel is self.ranks.pp_group else str(self._progress)

    def assemble(
        self,
        out: torch.Tensor,
        what: str,
        pieces: Sequence[tuple[int, int]] | None = None,
        *,
        over_tensors: bool = False,
    ) -> torch.Tensor:
        """Completes contiguous ``out`` from the ranks that have it, in place. ``pieces``: the range
        of each rank of the shard group, in elements. None: the first data rank has all, or with
        ``over_tensors`` the first of all ranks with these units."""
        ranks, tensors = self.ranks, self.ranks.tp_group if over_tensors else None
        if pieces is not None:
            if ranks.size > 1:
                self._send(ranks.shard_group, out, pieces, f"{what} {self._progress}")
        elif ranks.data_size > 1 or tensors is not None:
            flat = out.detach().view(-1)
            sent = flat.cpu()
            # To the first rank of each tensor part, of each replica, then along the shard group.
            for channel in filter(None, (tensors, ranks.replicate_group, ranks.shard_group)):
                self._send(channel, sent, [(0, sent.numel())], what)
            if sent is not flat:
                flat.copy_(sent)
        return out

    def _send(
        self, channel: Channel, out: torch.Tensor, pieces: Sequence[tuple[int, int]], what: str
    ) -> None:
        """Broadcasts each rank's range of flat ``out`` to the ranks of ``channel``."""
        parts = [
            (peer, bytes_of(out[begin:end]))
            for peer, (begin, end) in enumerate(pieces)
            if begin < end
        ]
        transfer = Transfer(lambda: [broadcast(channel.group, raw, peer) for peer, raw in parts])
        self.ranks.sync_channel_of(channel).pass_on(what, transfer)

    def collect(self, value: Any, what: str, among: Sequence[Channel] | None = None) -> Any:
        """Gathers every rank's ``value``: a list of anything picklable, or of tensors of one shape
        a tensor [ranks, ...], for which ranks are at the same step. Order: shards, then replicas,
        then tensor parts, then stages. ``among``: only over these channels."""
        values = value.unsqueeze(0) if (is_tensor := isinstance(value, torch.Tensor)) else [value]
        for channel in self.ranks.channels if among is None else among:
            group, sync_channel = channel.group, self.ranks.sync_channel_of(channel)
            if not is_tensor:
                transfer = exchange_objects(group, channel.size, values)
                values = [item for items in sync_channel.pass_on(what, transfer) for item in items]
                continue
            # A copy: later changes of the values are not sent
            sent = bytes_of(values.contiguous().view(-1)).to("cpu", copy=True)
            received = sent.new_empty(channel.size * sent.numel())
            transfer = Transfer(lambda: [all_gather(group, received, sent)])
            sync_channel.pass_on(f"{what} {self._progress_on(channel)}", transfer)
            values = (
                received.view(value.dtype)
                .view(channel.size * len(values), *value.shape)
                .to(value.device)
            )
        return values

    def meet(
        self,
        what: str,
        *same: torch.Tensor,
        flags: Sequence[bool] = (),
        over_tensors: bool = True,
        then: Callable[[], None] = lambda: None,
    ) -> list[bool]:
        """Blocks until all ranks with the same units come to ``what``. Returns which of ``flags``
        any of them has set. Raises UsageError if they do not have the ``same`` tensors.
        ``over_tensors``: over the tensor-parallel group, too. ``then``: called as soon as all are
        known to be there, even if this rank is interrupted."""
        channels = self.ranks.unit_sync_channels if over_tensors else self.ranks.sharing
        if same and channels:
            digest = hashlib.blake2b(digest_size=8)
            for tensor in same:
                # Of a copy: NumPy would make the storage one that cannot be resized any more.
                copied = tensor.detach().clone(memory_format=torch.contiguous_format)
                digest.update(bytes_of(copied.view(-1)).cpu().numpy())
            what = f"{what}, to values of digest {digest.hexdigest()},"
        maxima = [int(flag) for flag in flags]
        for channel in channels:
            done = then if channel is channels[-1] else _nothing
            maxima = channel.barrier(
                f"{what} {self._progress}", maxima, then=lambda _, done=done: done()
            ).tolist()
        if not channels:
            then()
        return [bool(flag) for flag in maxima]

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Brings all ranks through the block, or raises on all of them; they can go on then."""
        try:
            yield
        except BaseException as error:
            for channel in self.ranks.sync_channels:
                channel.fail(error)
            raise
        for number, channel in enumerate(self.ranks.sync_channels):
            try:
                channel.barrier(what)
            except InfinityError as error:
                for other in self.ranks.sync_channels[number + 1 :]:
                    other.fail(error)
                raise

    def barrier(
        self, what: str, *, wherever: bool = False, among: Sequence[Channel] | None = None
    ) -> None:
        """Blocks until every rank is at ``what``. ``wherever``: ranks may be at different steps,
        because all state is about to be loaded. ``among``: only the ranks of these channels, whose
        errors the others raise later."""
        for channel in self.ranks.sync_channels if among is None else among:
            with nullcontext() if among is None else self.heard_elsewhere(channel):
                channel.barrier(what if wherever else f"{what} {self._progress_on(channel)}")

    def meet_for_step(
        self,
        common: str,
        own: str,
        *,
        over_stages: tuple[str, Comparison] | None,
        trace: Iterable[int],
        also: Iterable[Callable[..., None]],
        then: Callable[[], None],
    ) -> None:
        """Blocks until all ranks are at the same step. ``trace``: predicted for the next forward.
        ``common``: the inputs that ranks with other local parts of the units must share, too.
        ``own``: of ranks with the same units. ``over_stages``: compared over stages, if they meet.
        ``also``: other meetings for it, called with ``common`` (``step_compared`` of the events).
        ``then``: called as soon as all ranks are known to be there, even if this one is
        interrupted.
        """
        syncs: list[Callable] = []
        if over_stages is not None and (stages := self.ranks.pp_group) is not None:
            syncs.append(partial(self.compare_over, stages, *over_stages))
        syncs += [partial(sync, common) for sync in also]
        if self.ranks.dp_group is not None:
            syncs.append(partial(self._predict, f"{common}{own}", trace))
        in_turn(syncs, then)  # data ranks last: others' errors are raised before they meet

    def compare_over(
        self,
        channel: Channel,
        what: str,
        comparison: Comparison,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Makes ``comparison`` over the ranks of ``channel``. Raises UsageError, and does not call
        ``then``, if the values differ."""

        def go_on(spans: Spans) -> None:
            if comparison.agrees(spans):
                then()

        with self.heard_elsewhere(channel):
            comparison.check(self.spans(channel, what, comparison.values(), then=go_on))

    def spans(self, channel: Channel, what: str, values: Sequence[int], **then: Callable) -> Spans:
        """Meets the ranks of ``channel`` at ``what``. Returns the minimum and maximum of each of
        their ``values``."""
        return channel.spans(f"{what} {self._progress_on(channel)}", values, **then)

    @contextmanager
    def heard_elsewhere(self, channel: Channel) -> Iterator[None]:
        """Reports an error of the block, which all ranks of ``channel`` raise, to the other ranks
        with the same units, at their next sync point."""
        try:
            yield
        except InfinityError as error:
            for other in (self.ranks.cp_group, *reversed(self.ranks.unit_sync_channels)):
                if other not in (None, channel):
                    other.fail(error)
            raise

    def fail(self, error: BaseException, *, for_now: bool = False) -> None:
        """Reports that this rank cannot go on. Waits up to ``HEARING_SECONDS`` for a rank to
        receive it: this process may end next. ``for_now``: it can later, and this does not wait."""
        channels = self.ranks.sync_channels
        if for_now:
            for channel in channels:
                channel.report(error)
            return
        if all(channel.has_ended for channel in channels):
            return  # also if there are none
        for channel in channels:
            channel.report(error, ends=True)
        deadline = time.monotonic() + HEARING_SECONDS
        while time.monotonic() < deadline:
            if any(channel.is_heard() for channel in channels):
                return
            time.sleep(0.01)

    def close(self) -> None:
        """Destroys the groups made for this job, and restores this thread's processor affinity."""
        if self.ranks.allowed_processors is not None and not self._is_closed:
            os.sched_setaffinity(0, self.ranks.allowed_processors)
        self._is_closed = True
        end_groups(self.ranks.process_groups)
        for channel in self.ranks.all_channels:
            channel.close()

    def complete_started(self) -> None:
        """Notes that an exception interrupted this rank, and completes the sync points that it had
        started. Waits for all transfers."""
        for channel in self.ranks.sync_channels:
            channel.strike()
        self._drop_lost()


def _nothing() -> None:
    """Does nothing where other channels are still to agree."""


def in_turn(syncs: Sequence[Callable], then: Callable[[], None]) -> None:
    """Runs ``syncs``, each a call that takes ``then``. ``then``: called as soon as all ranks are
    known to agree at the last one."""
    for sync in syncs[:-1]:
        sync()
    if syncs:
        syncs[-1](then=then)
    else:
        then()
