"""Between: has what stages of a pipeline pass to each other over a process group that no other pass
has left anything in.

cut short   of a pass: an exception ended it on this rank. What other ranks have sent for it may lie in the group still, and would be taken for
            what the next pass sends
"""

from __future__ import annotations

import contextlib
import gc
import os
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist

from ..distributed import farewell
from ..distributed.mesh import gloo_group
from ..distributed.pending import ranks_lost
from ..errors import InfinityError, UsageError
from ..runtime.job import Job

TORCH = os.path.dirname(dist.__file__)


class Between:
    """The group of the ranks that have the stages of one pipeline. ``forget``: drops whatever
    refers to the group."""

    def __init__(self, job: Job, axis: dist.device_mesh.DeviceMesh, forget: Callable[[], None]):
        self._ranks, self._forget = job.ranks, weakref.WeakMethod(forget)
        self._members = dist.get_process_group_ranks(axis.get_group())
        self._number, self._is_cut_short = 0, False
        # A device's transport is the mesh's, and is not made anew.
        self._of_device = None if job.device.is_host else axis.get_group()
        self._own: dist.ProcessGroup | None = self._make()

    @property
    def group(self) -> dist.ProcessGroup:
        """The group for what the device has. Nobody keeps it: what refers to it keeps its
        connections."""
        return self._of_device or self._own

    @property
    def host_group(self) -> dist.ProcessGroup:
        """The same for what the host has."""
        return self._own

    def rank_of(self, coordinate: int) -> int:
        """Returns the rank, of all, that has the stages of a coordinate of the pipeline."""
        return self._members[coordinate]

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """Surrounds what passes over the group. An exception closes it: other ranks need not wait
        until the timeout then."""
        self._is_cut_short = True
        try:
            yield
        except BaseException as error:
            if self._of_device is None:
                _clear(error)
                self._close()
            if isinstance(error, RuntimeError) and not isinstance(error, InfinityError) and farewell.BROKEN.search(str(error)):
                raise ranks_lost("a step of the pipeline", error) from error
            raise
        self._is_cut_short = False

    @property
    def said(self) -> tuple[bool, int]:
        """What this rank tells the others before a pass, for :meth:`settle`."""
        return self._is_cut_short, self._number

    def settle(self, everyones: Sequence[tuple[bool, int]]) -> None:
        """Makes the group anew where a pass was cut short on any rank: of ``everyones`` what they
        have said. Raises UsageError where it cannot be."""
        numbers = [number for _, number in everyones]
        if not any(is_cut for is_cut, _ in everyones) and min(numbers) == max(numbers):
            return
        if self._of_device is not None:
            raise UsageError(
                "an exception ended a pass of this pipeline on some rank, and what its stages have sent each other on the device may be taken for what "
                "the next pass sends: unwrap the chunks and make the pipeline anew, on all ranks"
            )
        self._close()
        self._number = max(numbers) + 1
        try:
            self._own = self._make()
        except RuntimeError as error:
            raise ranks_lost("making a pipeline's group anew", error) from error
        self._is_cut_short = False

    def _make(self) -> dist.ProcessGroup:
        group = gloo_group(self._members, f"between stages of wrap {self._ranks.wrap}, number {self._number}")
        self._ranks.own_groups.append(group)
        return group

    def _close(self) -> None:
        if (forget := self._forget()) is not None:
            forget()
        group, self._own = self._own, None
        if group is None:
            return
        if group in self._ranks.own_groups:
            self._ranks.own_groups.remove(group)
        with contextlib.suppress(RuntimeError, ValueError, AssertionError, AttributeError):
            dist.destroy_process_group(group)
        del group
        gc.collect()  # works that nobody waits for any more keep the connections, too


def _clear(error: BaseException) -> None:
    """Clears what torch's frames keep that ``error``, or one behind it, has left: operations of the
    group."""
    errors: list[BaseException | None] = [error]
    seen: set[int] = set()  # what was raised from what may close a circle
    while errors:
        each = errors.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        errors += [each.__cause__, each.__context__]
        for frame, _ in traceback.walk_tb(each.__traceback__):
            if frame.f_code.co_filename.startswith(TORCH):
                with contextlib.suppress(RuntimeError):  # one that still runs
                    frame.clear()
