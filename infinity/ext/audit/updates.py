"""Updates: computes pieces of the optimizer's updates again, by another thread, from copies of the
bytes that they started from.

check   of one flat param's update: its pieces, with the copies. Readers of the new bytes wait for
        its ticket, so nothing wrong is computed with or saved
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from ... import native
from ...core.homes.arrays import StateArray
from ...core.run.job import Job
from ...core.step.stepper import FlatParamStep
from ...core.units.flat_param_spec import block_numel
from ...core.units.home_arrays import OF_UPDATE, Reader
from ...core.units.unit import flat_params_of
from .findings import UPDATES, Findings, differs, place_of
from .homes import KEY, HomeChecks
from .rotation import ChosenPieces, Piece

logger = logging.getLogger(__name__)

SERVICE_NBYTES = 1024 * 1024  # for reads of disks beside the training thread


class Check:
    """The check of one submitted update."""

    def __init__(self, updates: Updates, step: FlatParamStep, rule: native.Rule):
        self._updates, self._step, self._rule = updates, step, rule
        self.copies: list[tuple[Piece, list[native.Run], dict[str, torch.Tensor]]] = []
        self.ticket = native.Ticket(1)
        self.reader = Reader(self.ticket)
        self._joined: native.Ticket | None = None
        self._future: Future | None = None
        self._calls = itertools.count()  # an interrupt may submit it twice

    def submit(self, after: native.Ticket | None) -> native.Ticket:
        """Runs it after the update, by ticket. Returns the end of both. Idempotent."""
        if self._joined is None:
            self._joined = native.joined([*filter(None, (after,)), self.ticket])
        if self._future is None:
            work = partial(self._run, after, self._step.device_update)
            self._future = self._updates.run(work)
        # Behind it: the reader of work that never runs would stand for ever
        self._step.flat_param.homes.readers[KEY] = self.reader
        return self._joined

    def _run(self, ticket: native.Ticket | None, on_device: Any) -> None:
        if next(self._calls):
            return
        try:
            if _is_done(ticket, on_device):
                for piece, runs, copies in self.copies:
                    self._compare(piece, runs, copies)
        finally:
            self.copies.clear()
            self.ticket.part_done()

    def _compare(
        self, piece: Piece, runs: list[native.Run], copies: dict[str, torch.Tensor]
    ) -> None:
        flat_param, updates = piece.flat_param, self._updates
        updates.compute(flat_param, self._rule, self._step.version, piece, runs, copies)
        arrays, nbytes = targets_of(self._step), 0
        for name, expected in copies.items():
            if name == "grad":
                continue
            begin, end = span_of(flat_param, name, piece)
            values = updates.read(arrays[name], begin, end)
            nbytes += values.nbytes
            if wrong := differs(expected, values):
                count, first = wrong
                element = (begin + first) * block_numel(name) + flat_param.layout.own_shard[0]
                updates.findings.fail(
                    f"the update of {name} of {place_of(flat_param, element)} in step"
                    f" {self._step.version} gave other bits than when it was computed again:"
                    f" {count} of {values.numel()} elements"
                )
        updates.findings.count(UPDATES, nbytes)
        updates.homes.note(flat_param, self.reader, piece, arrays)


def _is_done(ticket: native.Ticket | None, on_device: Any) -> bool:
    """Waits for an update. Tells whether it was made: its error is raised elsewhere."""
    try:
        if ticket is not None:
            ticket.wait()
        if on_device is not None:
            on_device.event.wait()
    except Exception:  # noqa: BLE001 - whatever it is, who needs the new bytes gets it
        return False
    return True


class Updates:
    """The checks of the updates of one job's kernels."""

    def __init__(self, job: Job, share: float, findings: Findings, homes: HomeChecks):
        # Not the job: it has the list of this object's listeners
        self._store, self._gradients, self._units = job.store, job.gradients.homes, job.units
        self.findings, self.homes = findings, homes
        self._chosen = ChosenPieces(share, seed=1)
        self._checks = weakref.WeakKeyDictionary[FlatParamStep, Check]()
        self._pool: ThreadPoolExecutor | None = ThreadPoolExecutor(1, "infinity audit")
        self._last: Future | None = None
        self._updater: native.Updater | None = None
        self._service: native.PinnedPool | None = None

    def run(self, work: Callable[[], None]) -> Future:
        """Runs ``work`` in the auditing thread, after all before."""
        self._last = self._pool.submit(self._run, work)
        return self._last

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - told, not hidden: training goes on
            logger.warning("an audit was not made: %s: %s", type(error).__name__, error)
            self.findings.leave_out(f"pieces whose audit failed by a {type(error).__name__}")

    def finish(self) -> None:
        """Waits for the auditing thread."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """Ends the auditing thread after its work. Idempotent."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)
        self._pool = self._updater = self._service = None

    # --- in the training thread ---

    def _flat_params(self) -> list[Any]:
        flats = flat_params_of(self._units)
        return [flat for flat in flats if flat.spec.stepped and flat.spec.needs is None]

    def planned(self, step: FlatParamStep, rule: native.Rule) -> None:
        """Copies what the update of the chosen pieces starts from."""
        self.findings.raise_found()
        flat_param = step.flat_param
        self.homes.check(flat_param, changes=True)
        pieces = self._chosen.choose(step.version, self._flat_params).get(flat_param)
        if not pieces:
            return
        if flat_param.homes.rows is not None:
            self.findings.leave_out("updates of rows that are stepped when they are needed")
            return
        for ticket in self._gradients.close_flat_param(flat_param):
            ticket.wait()
        for event in self._gradients.queue.of(flat_param):
            event.wait()
        check = Check(self, step, rule)
        for piece in pieces:
            runs = [
                native.Run(max(begin, piece.begin), min(end, piece.end), hyper)
                for begin, end, hyper in step.spans
                if begin < piece.end and end > piece.begin
            ]
            if runs:
                check.copies.append((piece, runs, self._copied(flat_param, piece)))
        if check.copies:
            self._checks[step] = check

    def _copied(self, flat_param: Any, piece: Piece) -> dict[str, torch.Tensor]:
        return {
            name: self._store.read(array, *span_of(flat_param, name, piece))
            for name, array in flat_param.arrays.items()
        }

    def submitted(self, step: FlatParamStep, ticket: native.Ticket | None) -> native.Ticket | None:
        """Starts the check of a submitted update, if it has one."""
        check = self._checks.get(step)
        return ticket if check is None else check.submit(ticket)

    # --- in the auditing thread ---

    def compute(
        self,
        flat_param: Any,
        rule: native.Rule,
        version: int,
        piece: Piece,
        runs: list[native.Run],
        copies: Mapping[str, torch.Tensor],
    ) -> None:
        """Makes the update of ``runs`` in ``copies``, which start where ``piece`` does."""
        if self._updater is None:
            self._updater = native.Updater(self._store.io, 0, 0, 0, 1, checksums=False)
        numel, extents = flat_param.layout.shard_numel, {}
        for name, copy in copies.items():
            each = block_numel(name)
            # As if they had the whole shard: kernels round by an element's place in it.
            address = copy.data_ptr() - piece.begin // each * copy.dtype.itemsize
            extents[name] = native.Extent.in_memory(address, numel // each * copy.dtype.itemsize)
        self._updater.submit(
            native.UnitUpdate(
                layout=flat_param.homes.native_layout(rule),
                count=numel,
                weight=extents["weight"],
                **{name: extents.get(name) for name in OF_UPDATE},
                grad=extents["grad"],
                runs=runs,
                version=version,
            )
        ).wait()

    def read(self, array: StateArray, begin: int, end: int) -> torch.Tensor:
        """Reads elements at home."""
        if array.flat is not None:
            return array.flat[begin:end].cpu()
        if self._service is None:
            self._service = native.PinnedPool(native.Region(SERVICE_NBYTES))
        return self._store.read(array, begin, end, service=self._service)


def span_of(flat_param: Any, name: str, piece: Piece) -> tuple[int, int]:
    """Returns the elements of array ``name`` at home that ``piece`` of the shard has."""
    each, layout = block_numel(name), flat_param.layout
    first = layout.own_shard[0] - layout.home_range(name)[0] if name == "grad" else 0
    return first + piece.begin // each, first - (-piece.end // each)


def targets_of(step: FlatParamStep) -> dict[str, StateArray]:
    """Returns the arrays that an update writes to."""
    fresh = step.draft.fresh
    return step.flat_param.arrays | ({} if fresh is None else {"weight": fresh})
