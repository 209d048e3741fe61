"""SlowAxis: exchanges values between groups that train apart, over a link that is slow.

group     ranks that train one copy of the model together
line      one rank of each group: those with the same shard. Only these exchange
exchange  a running all-gather over a line, beside the compute until its mean is wanted

The mean is taken in fp32, in the order of the groups, from the same bytes on every rank: so it is
the same to the last bit everywhere. With codes, a rank decodes its own, too.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from ...core.machine.traffic import CollectiveTraffic, Traffic
from ...errors import ConfigError, UsageError
from ...ranks import failure_report
from ...ranks.attempt import Attempt
from ...ranks.mesh import gloo_group
from ...ranks.pending import ranks_lost
from ...ranks.transfer import Transfer, all_gather, broadcast, end_groups, exchange_objects
from ..shared_homes.quantize import CODED_BLOCK, decode_blocks, encode_blocks

SLOW_AXIS = "slow axis"  # its name beside the collectives of a group
TAG_NUMEL = 2  # int64: with what an exchange begins, so that ranks notice if they are apart
TAG_NBYTES = TAG_NUMEL * torch.int64.itemsize


class SlowAxis:
    """This rank's line over the axis ``mesh``, of one dimension. Every rank of the line makes one,
    and makes the same calls. Used from the thread that runs the model.

    Raises ConfigError for another mesh, PeerError if a rank of the line does not come.
    """

    def __init__(self, mesh: Any, traffic: Traffic, *, compresses: bool = False):
        is_axis = isinstance(mesh, dist.device_mesh.DeviceMesh) and mesh.ndim == 1
        if not is_axis or dist.get_rank() not in mesh.mesh.tolist():
            raise ConfigError(
                "LocalSteps takes the axis of the mesh that joins the groups, a DeviceMesh of one"
                f" dimension with this rank, as mesh['slow']; not {mesh!r}"
            )
        self.ranks = sorted(mesh.mesh.tolist())
        self.size, self.group_index = len(self.ranks), self.ranks.index(dist.get_rank())
        self.compresses, self._traffic = compresses, traffic
        traffic.collectives.setdefault(SLOW_AXIS, CollectiveTraffic())
        self._groups: list[dist.ProcessGroup] = []
        if self.size > 1:
            store = dist.distributed_c10d._get_default_store()
            failure_report.join(store, dist.get_rank(), dist.get_world_size())
            with Attempt(self.ranks, "slow axes") as attempt:
                attempt.barrier("published")
            self._groups = [gloo_group(self.ranks, f"slow axis {attempt.name}")]
            # As the model goes without a word; at the end of the process torch ends all.
            weakref.finalize(self, end_groups, self._groups).atexit = False

    def close(self) -> None:
        """Ends the line's process group. Idempotent."""
        end_groups(self._groups)

    def compare(self, mine: dict[str, Any], what: str) -> None:
        """Raises ConfigError with the first difference if a group describes itself otherwise."""
        for peer, theirs in zip(self.ranks, self.collect(mine, what)):
            for key in mine:
                if mine[key] != theirs.get(key):
                    raise ConfigError(
                        f"{what}: {key} is {mine[key]} on rank {dist.get_rank()} and"
                        f" {theirs.get(key)} on rank {peer}. All groups must be given the same."
                    )

    def collect(self, mine: Any, what: str) -> list[Any]:
        """Gathers ``mine``, anything picklable, from every rank of the line, in their order.
        Blocks."""
        if self.size == 1:
            return [mine]
        return self._complete(exchange_objects(self._groups[0], self.size, mine), what)

    def broadcast(self, values: torch.Tensor, what: str) -> None:
        """Fills flat ``values`` from the first group, in place. Blocks."""
        if self.size > 1:
            self._complete(Transfer(lambda: [broadcast(self._groups[0], values, 0)]), what)

    def _complete(self, transfer: Transfer, what: str) -> Any:
        try:
            return transfer.wait()
        except RuntimeError as error:
            raise ranks_lost(what, error) from error

    # --- exchanges ---

    def nbytes_of(self, numel: int) -> int:
        """Returns the bytes that each group sends to another one for ``numel`` values."""
        if self.compresses:
            blocks = numel // CODED_BLOCK
            return TAG_NBYTES + numel + blocks * torch.float32.itemsize
        return TAG_NBYTES + numel * torch.float32.itemsize

    def start(self, values: torch.Tensor, tag: Sequence[int], what: str) -> Exchange:
        """Starts to exchange flat fp32 ``values`` (whole blocks of 256). ``tag``: two numbers, the
        same on all ranks. Does not block."""
        everyones = torch.empty(
            self.size, self.nbytes_of(values.numel()), dtype=torch.uint8, device="cpu"
        )
        mine = everyones[self.group_index]
        mine[:TAG_NBYTES] = torch.tensor([*tag], dtype=torch.int64, device="cpu").view(torch.uint8)
        mine[TAG_NBYTES:] = encode_blocks(values) if self.compresses else values.view(torch.uint8)
        return Exchange(self, everyones, what)

    def transfer_of(self, everyones: torch.Tensor) -> Transfer:
        """Makes the transfer that fills the rows of the other groups: uint8, [groups, bytes]."""
        mine, groups = everyones[self.group_index], self._groups
        return Transfer(lambda: [all_gather(group, everyones.view(-1), mine) for group in groups])

    def count(self, nbytes: int, what: str, start: float) -> None:
        """Counts received bytes of an exchange that ends now."""
        self._traffic.received(SLOW_AXIS, nbytes, what, start)

    def stalled(self, what: str) -> Any:
        """Returns a block whose seconds count as a wait for the slow axis."""
        return self._traffic.stalled(SLOW_AXIS, what)


class Exchange:
    """A running exchange of one rank. ``begin`` starts it."""

    def __init__(self, axis: SlowAxis, everyones: torch.Tensor, what: str):
        self._axis, self._everyones, self._what = axis, everyones, what
        self._transfer, self._start = axis.transfer_of(everyones), time.perf_counter()
        self._mean: torch.Tensor | None = None

    def begin(self) -> None:
        """Sends this group's values. Idempotent."""
        try:
            self._transfer.begin()
        except RuntimeError as error:
            raise ranks_lost(self._what, error) from error

    def mean(self) -> torch.Tensor:
        """Returns the mean over the groups, flat, fp32. Blocks until their values have arrived;
        again it returns at once. Raises PeerError if a group is gone, UsageError if another one
        is at another exchange."""
        if self._mean is None:
            with self._axis.stalled(self._what):
                self._axis._complete(self._transfer, self._what)
            everyones, mine = self._everyones, self._everyones[self._axis.group_index]
            self._refuse_other_exchange(everyones[:, :TAG_NBYTES], mine[:TAG_NBYTES])
            self._axis.count(everyones.nbytes - mine.nbytes, self._what, self._start)
            total = self._values(0).clone()
            for group in range(1, self._axis.size):
                total.add_(self._values(group))
            self._mean = total.div_(self._axis.size)
        return self._mean

    def drop(self) -> None:
        """Waits until nothing is under way, and discards it."""
        with suppress(RuntimeError):
            self._transfer.wait()

    def _values(self, group: int) -> torch.Tensor:
        raw = self._everyones[group, TAG_NBYTES:]
        if not self._axis.compresses:
            return raw.view(torch.float32)
        per_block = CODED_BLOCK + torch.float32.itemsize
        values = torch.empty(raw.numel() // per_block * CODED_BLOCK, device="cpu")
        decode_blocks(raw, values.view(1, -1))
        return values

    def _refuse_other_exchange(self, tags: torch.Tensor, mine: torch.Tensor) -> None:
        for rank, tag in zip(self._axis.ranks, tags):
            if not torch.equal(tag, mine):
                both = [each.clone().view(torch.int64).tolist() for each in (mine, tag)]
                raise UsageError(
                    f"{self._what}: rank {dist.get_rank()} is at step {both[0][0]} of a period of"
                    f" {both[0][1]}, rank {rank} at step {both[1][0]} of {both[1][1]}. All groups"
                    " must make the same number of steps, and load checkpoints of the same step."
                )
