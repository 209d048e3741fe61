"""Between: the process group for tensors between pipeline stages. No earlier pass has left
transfers in it.

cut short   of a pass: an exception ended it on this rank. Tensors that other ranks have sent for it
            may still be in the group, and the next pass would receive them
"""

from __future__ import annotations

import contextlib
import gc
import os
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist

from ...core.run.job import Job
from ...errors import InfinityError, UsageError
from ...ranks import failure_report
from ...ranks.mesh import gloo_group
from ...ranks.parallel_dims import ParallelDims
from ...ranks.pending import ranks_lost

TORCH = os.path.dirname(dist.__file__)


class Between:
    """The group of the ranks with the stages of one pipeline. ``forget``: drops all references to
    the group."""

    def __init__(self, job: Job, axis: dist.device_mesh.DeviceMesh, forget: Callable[[], None]):
        self._ranks, self._forget = job.ranks, weakref.WeakMethod(forget)
        self._members = dist.get_process_group_ranks(axis.get_group())
        self._number, self._is_cut_short = 0, False
        # A device's transport is the mesh's, and is not replaced.
        self._of_device = None if job.device.is_host else axis.get_group()
        self._own: dist.ProcessGroup | None = self._make()

    @property
    def group(self) -> dist.ProcessGroup:
        """The group for device tensors. Do not keep it: a reference keeps its connections."""
        return self._of_device or self._own

    @property
    def host_group(self) -> dist.ProcessGroup:
        """The group for host tensors."""
        return self._own

    def rank_of(self, coordinate: int) -> int:
        """Returns the global rank of a coordinate of the pipeline."""
        return self._members[coordinate]

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """Surrounds transfers over the group. An exception closes it, so that other ranks need not
        wait until the timeout."""
        self._is_cut_short = True
        try:
            yield
        except BaseException as error:
            if self._of_device is None:
                clear(error)
                self._close()
            if (
                isinstance(error, RuntimeError)
                and not isinstance(error, InfinityError)
                and failure_report.BROKEN.search(str(error))
            ):
                raise ranks_lost("a step of the pipeline", error) from error
            raise
        self._is_cut_short = False

    @property
    def said(self) -> tuple[bool, int]:
        """This rank's input to :meth:`settle`, which all ranks exchange before a pass."""
        return self._is_cut_short, self._number

    def settle(self, everyones: Sequence[tuple[bool, int]]) -> None:
        """Creates the group again if a pass was interrupted on any rank. ``everyones``:
        :attr:`said` of all ranks. Every rank calls this. Raises UsageError if the group cannot be
        replaced."""
        numbers = [number for _, number in everyones]
        if not any(is_cut for is_cut, _ in everyones) and min(numbers) == max(numbers):
            return
        if self._of_device is not None:
            raise UsageError(
                "an exception ended a pass of this pipeline on some rank, and what its stages have"
                " sent each other on the device may be taken for what the next pass sends: unwrap"
                " the chunks and make the pipeline anew, on all ranks"
            )
        self._close()
        self._number = max(numbers) + 1
        try:
            self._own = self._make()
        except RuntimeError as error:
            raise ranks_lost("making a pipeline's group anew", error) from error
        self._is_cut_short = False

    def _make(self) -> dist.ProcessGroup:
        group = gloo_group(
            self._members, f"between stages of wrap {self._ranks.wrap}, number {self._number}"
        )
        self._ranks.process_groups.append(group)
        return group

    def _close(self) -> None:
        if (forget := self._forget()) is not None:
            forget()
        groups, self._own = [self._own], None
        close(groups, self._ranks)


def close(groups: list[dist.ProcessGroup | None], ranks: ParallelDims) -> None:
    """Closes the connections of ``groups`` of this wrap, and takes them off the list: it has the
    last references to them."""
    while groups:
        group = groups.pop()
        if group in ranks.process_groups:
            ranks.process_groups.remove(group)
        if group is not None:
            with contextlib.suppress(RuntimeError, ValueError, AssertionError, AttributeError):
                dist.destroy_process_group(group)
        del group
    gc.collect()  # abandoned works also keep the connections


def clear(error: BaseException) -> None:
    """Drops torch's frames in the traceback of ``error`` and of its causes: they keep operations
    of the group."""
    errors: list[BaseException | None] = [error]
    seen: set[int] = set()  # causes and contexts may form a cycle
    while errors:
        each = errors.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        errors += [each.__cause__, each.__context__]
        for frame, _ in traceback.walk_tb(each.__traceback__):
            if frame.f_code.co_filename.startswith(TORCH):
                with contextlib.suppress(RuntimeError):  # a frame that still runs
                    frame.clear()
