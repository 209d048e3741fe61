"""HomeChecks: checksums of pieces at home in memory, taken after they were written and compared
before they are read.

[Note: how a change by others is seen] Whoever changes arrays at home waits for their readers
(:meth:`HomeArrays.wait_readers`), which ends every read. A checksum counts as long as its reader
stands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ... import native
from ...core.homes.arrays import StateArray
from ...core.machine.device import PAST
from ...core.run.job import Job
from ...core.units.flat_param_spec import block_numel
from ...core.units.home_arrays import Reader
from ...core.units.unit import flat_params_of
from .findings import HOMES, Findings, place_of
from .rotation import ChosenPieces, Piece, coming

KEY = "audit"  # of the readers


@dataclass(eq=False)
class Known:
    """The checksums of one flat param. No array has changed while no update has waited for
    ``reader``."""

    reader: Reader | None
    sums: dict[tuple[str, int, int], tuple[StateArray, int]] = field(default_factory=dict)


class HomeChecks:
    """The checksums of one job's homes. Used from both threads, which never have one flat param at
    the same time: the training thread waits for the reader's ticket."""

    def __init__(self, job: Job, share: float, findings: Findings):
        self._units, self._steps, self._findings = job.units, job.steps, findings
        self._known: dict[Any, Known] = {}
        self._chosen = ChosenPieces(share, seed=2)

    def note(
        self, flat_param: Any, reader: Reader | None, piece: Piece, arrays: Mapping[str, StateArray]
    ) -> None:
        """Takes the checksums of a piece. In the auditing thread."""
        if (known := self._known.get(flat_param)) is None or known.reader is not reader:
            known = self._known[flat_param] = Known(reader)
        for name, array in arrays.items():
            if name != "grad" and is_checked(flat_param, array):
                each = block_numel(name)
                begin, end = piece.begin // each, -(-piece.end // each)
                known.sums[name, begin, end] = array, sum_of(array, begin, end)

    def check(
        self, flat_param: Any, *, names: Sequence[str] | None = None, changes: bool = False
    ) -> None:
        """Compares what is known of arrays ``names`` (None: all), which are about to be read.
        ``changes``: they change then. Raises CorruptionError."""
        known = self._known.get(flat_param)
        if known is None:
            return
        if changes or not stands(flat_param, known.reader):
            del self._known[flat_param]
        if stands(flat_param, known.reader):
            # A list: the auditing thread adds to those of frozen weights
            for (name, begin, end), (array, expected) in list(known.sums.items()):
                if flat_param.arrays.get(name) is array and (names is None or name in names):
                    self._compare(flat_param, name, array, begin, end, expected)
        self._findings.raise_found()

    def _compare(
        self, flat_param: Any, name: str, array: StateArray, begin: int, end: int, expected: int
    ) -> None:
        self._findings.count(HOMES, (end - begin) * array.dtype.itemsize)
        if sum_of(array, begin, end) != expected:
            element = begin * block_numel(name) + flat_param.layout.own_shard[0]
            self._findings.fail(
                f"{name} of {place_of(flat_param, element)} and {end - begin - 1} more, at home in"
                f" {array.tier} memory, changed by itself before step {coming(self._steps)}: they"
                " are not what was written"
            )

    def check_all(self) -> None:
        """Compares all that is known, as a save will read it."""
        for flat_param in list(self._known):
            self.check(flat_param)

    # --- weights that nothing updates ---

    def _frozen(self) -> list[Any]:
        flats = [flat for flat in flat_params_of(self._units) if not flat.spec.stepped]
        return [flat for flat in flats if is_checked(flat, flat.weight)]

    def visit(self, step: int, run: Callable[[Callable[[], None]], Any]) -> None:
        """Compares pieces of frozen weights with what was known of them, or takes their checksums.
        ``run``: runs it in the auditing thread."""
        for flat_param, pieces in self._chosen.choose(step, self._frozen).items():
            known, ticket = self._known.get(flat_param), native.Ticket(1)
            if known is None or not stands(flat_param, known.reader):
                known = Known(None)
            run(partial(self._look, flat_param, known, pieces, ticket))
            # Behind it: the reader of work that never runs would stand for ever
            flat_param.homes.readers[KEY] = known.reader = Reader(ticket)
            self._known[flat_param] = known

    def _look(
        self, flat_param: Any, known: Known, pieces: Sequence[Piece], ticket: native.Ticket
    ) -> None:
        try:
            array = flat_param.weight
            for piece in pieces:
                place = ("weight", piece.begin, piece.end)
                if (last := known.sums.get(place)) is not None and last[0] is array:
                    self._compare(flat_param, "weight", array, piece.begin, piece.end, last[1])
                else:
                    known.sums[place] = array, sum_of(array, piece.begin, piece.end)
        finally:
            ticket.part_done()


def stands(flat_param: Any, reader: Reader | None) -> bool:
    """Tells whether no change of the arrays has waited for this reader."""
    return (
        reader is not None
        and flat_param.homes.readers.get(KEY) is reader
        and reader.until is not PAST
    )


def is_checked(flat_param: Any, array: StateArray) -> bool:
    """Tells whether an array is in the host's memory, and no forward computes with it in place."""
    in_place = any(handle.unit.computes_at_home for handle in flat_param.handles[:1])
    return array.flat is not None and array.flat.is_cpu and not in_place


def sum_of(array: StateArray, begin: int, end: int) -> int:
    """Computes the checksum of elements in memory."""
    return native.crc32c(array.flat[begin:end])  # type: ignore[index]
