"""Schedule: records the order in which units are used, and predicts the next uses.

pass    one root forward with all that follows until the next one: its backward too
trace   the units of a pass in order of use; repeated uses of a unit in a row count once

Prediction is a pure function of the last pass of the same kind and the position in it. A pass that
diverges costs on-demand fetches and resynchronises if it can. It is the next pass's trace.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator

RESYNC_DISTANCE = 64  # trace positions searched ahead of the expected one


class Schedule:
    """Records uses and predicts the next ones. Units are given by index."""

    def __init__(self) -> None:
        self._traces: dict[str, list[int]] = {}
        self._kind = ""
        self.uses: list[int] = []  # of this pass so far
        # Of each unit of this forward, for each time that it is held: the uses before, and those
        # until it is let go.
        self._spans: dict[int, list[tuple[int, int]]] = {}
        self._open: set[int] = set()  # units of which a use has not ended
        self._saved: set[int] = set()  # units of which autograd has recorded a use
        self._is_forward = True  # no unit was used in a backward yet
        self._position = 0  # in the expected trace: the next use
        self._uses: dict[int, list[int]] = {}  # unit -> its positions in the expected trace

    def begin(self, kind: str) -> None:
        """Begins a pass of ``kind`` ("train", "infer", or "unflushed"). The pass before it becomes
        the trace of its own kind."""
        if self.uses:
            self._traces[self._kind] = self.uses
        self._kind = kind
        self.forget()
        self._uses = {}
        for position, unit in enumerate(self.expected()):
            self._uses.setdefault(unit, []).append(position)

    def forget(self) -> None:
        """Discards the uses recorded in this pass, so that they do not become a trace."""
        self.uses, self._position = [], 0
        self._spans, self._open, self._saved, self._is_forward = {}, set(), set(), True

    def use(self, unit: int, *, backward: bool = False, saves: bool = True) -> None:
        """Records that ``unit`` is used now. ``backward``: in a backward. ``saves``: autograd
        records the use. A backward does not reach other ones, as of a norm for a log, unless they
        are the first: those of a reentrant checkpoint."""
        self._is_forward &= not backward
        self._saved |= {unit} if saves else set()
        if self._is_forward and (saves or unit not in self._saved):
            start, spans = len(self.uses), self._spans.setdefault(unit, [])
            if unit not in self._open and (not spans or spans[-1][1] < start):
                spans.append((start, start + 1))
            self._open.add(unit)
        if self.uses and self.uses[-1] == unit:
            return
        self.uses.append(unit)
        expected = self._traces.get(self._kind, [])
        try:
            position = expected.index(unit, self._position, self._position + RESYNC_DISTANCE)
        except ValueError:
            return  # diverged from the trace: keep the position, later uses may match it again
        self._position = position + 1

    def upcoming(self, *, backward: bool) -> Iterator[int]:
        """Yields the units expected next, in order, each once."""
        seen = {self.uses[-1]} if self.uses else set()
        for unit in self._expected(backward):
            if unit not in seen:
                seen.add(unit)
                yield unit

    def expected(self) -> list[int]:
        """Returns the trace that this pass is expected to follow."""
        return self._traces.get(self._kind, [])

    def expected_after_step(self) -> list[int]:
        """Returns the trace that the first training pass after a step is expected to follow."""
        kind = self._kind if self._kind == "unflushed" else "train"
        return self.uses if self._kind == kind and self.uses else self._traces.get(kind, [])

    def next_use(self, unit: int) -> float:
        """Returns the distance, in uses, to the next expected use of ``unit`` in this pass;
        infinity if there is none."""
        uses = self._uses.get(unit, [])
        at = bisect.bisect_left(uses, self._position)
        return uses[at] - self._position if at < len(uses) else math.inf

    def first(self) -> Iterator[int]:
        """Returns the units of the next training pass in order, each once: the end of a step can
        already fetch the first ones."""
        if not self._kind:
            return iter(dict.fromkeys(self.uses or self.expected()))
        return iter(dict.fromkeys(self.expected_after_step()))

    def end_step(self) -> None:
        """Ends the pass if no training forward of a root has begun it."""
        if self._kind in ("", "infer"):
            self.begin("")

    def leave(self, unit: int) -> None:
        """Records that a use of ``unit`` ends now."""
        if self._is_forward and unit in self._open:
            self._open.remove(unit)
            self._spans[unit][-1] = self._spans[unit][-1][0], len(self.uses)

    def spans(self) -> dict[int, list[tuple[int, int]]]:
        """Returns for each unit of this pass's forward, in order of first use, and for each time
        that it was held: the uses before, and the uses until it was let go."""
        return {unit: list(spans) for unit, spans in self._spans.items()}

    def _expected(self, backward: bool) -> Iterator[int]:
        expected = self._traces.get(self._kind)
        if expected is not None:
            yield from (expected[position] for position in range(self._position, len(expected)))
        elif backward:  # the first backward: the forward, reversed
            yield from reversed(self.uses)
