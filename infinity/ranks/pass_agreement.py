"""PassAgreement: compares at the start of a pass what the data ranks expect to do in it.

trace      the units that a rank expects to use in this pass; its digest is compared at the start
verified   of a pass: all ranks of the shard group run its collectives in the order of the last
           one like it, without a barrier (see `collective_trace`)

Every collective of a shard group is either the next one of a verified pass, or follows a barrier.
All barriers use one channel, whatever group the bytes take, so no two ranks can wait for each
other at different points.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from ..core.machine.traffic import Traffic
from ..core.run.step_counter import StepCounter
from .channel import Spans
from .collective_trace import number_of
from .parallel_dims import ParallelDims


class Weighing:
    """How averages weigh the data ranks' gradients: equal on all ranks."""

    weights: Sequence[float] | None = None  # a factor for each data rank; None: all are 1
    said = ""  # what a sync point announces of them, behind the counts


@dataclass
class Progress:
    """The steps and backwards that a rank has done, how it weighs gradients, and since which load:
    announced at every sync point. A rank interrupted after the agreement to load, or on other
    weights, but before its change, is found by it before its values mix with the others'."""

    steps: StepCounter = field(default_factory=StepCounter)
    origin: str = ""  # the load that its values are from, as announced
    weighing: Weighing | None = None  # None: averages weigh all data ranks alike

    def __str__(self) -> str:
        said = "" if self.weighing is None else self.weighing.said
        done = f"{self.steps.done} steps and {self.steps.backwards} backwards"
        return f"(after {done}{said}{self.origin})"

    @property
    def of_steps(self) -> str:
        """The progress without backwards: a stage that trains nothing runs none."""
        return f"(after {self.steps.done} steps{self.origin})"


class PassAgreement:
    """The passes of one rank, as the data ranks agree on them. No-ops in a job of one rank. Used
    from the thread that runs the model."""

    def __init__(self, ranks: ParallelDims, traffic: Traffic, progress: Progress):
        self.ranks, self.traffic, self._progress = ranks, traffic, progress
        self._dp_group = ranks.dp_group
        self._gathers = ranks.size > 1  # else each rank has all weights, and may measure alone
        self._traces_agree = self._is_alone = False
        self._gathered_after_step: list[int] = []  # units, at the first forward after a step

    def begin_pass(
        self, trace: Iterable[int], resident: Iterable[int], *, training: bool
    ) -> Callable[[], bool]:
        """Starts a pass that expects to use the units of ``trace`` in order, and finds ``resident``
        gathered. Every data rank calls this, unless it trains nothing and has all weights. A later
        collective waits for the comparison.

        Returns a function that tells whether all data ranks expect to use the same units, equal on
        all of them. It blocks until all have started the pass.
        """
        self._is_alone = not (training or self._gathers)
        if self._dp_group is None or self._is_alone:
            return self._wait_traces_agree
        steps, gathered = self._progress.steps, sorted(resident) if self._gathers else []
        number = steps.count_forward() if training else 0
        key = _key_of(trace, gathered, number)
        if number == 1 and not steps.backwards:
            self._gathered_after_step = gathered
        self._enter()
        trace = self._dp_group.collective_trace
        if not trace.enter(key):
            self._dp_group.start_sync(
                f"a forward {self._progress}",
                values=[key[0], trace.digest_of(key)],
                then=partial(self._begin, key),
            )
        return self._wait_traces_agree

    def _begin(self, key: tuple, spans: Spans, *, predicted: bool = False) -> None:
        """Starts a pass from all ranks' digests of its trace and of how the last such pass went. It
        is verified if they are equal. A predicted pass (``predicted``) starts only if verified."""
        traces_agree, (least, most) = spans[0][0] == spans[0][1], spans[1]
        verified = traces_agree and 0 < least == most
        if verified or not predicted:
            self._traces_agree = traces_agree
            self._dp_group.collective_trace.begin(key, verified=verified, predicted=predicted)

    def _predict(self, what: str, units: Iterable[int], then: Callable[[], None]) -> None:
        """Meets the data ranks before the step ``what``. A forward of the trace ``units`` may
        follow: if all ranks predict the same, it needs no barrier. ``then``: as of
        :meth:`Collectives.meet`."""
        key, trace = _key_of(units, self._gathered_after_step, 1), self._dp_group.collective_trace
        # After a divergence gathered units may differ over ranks: this rank does not vote.
        values = [key[0], trace.digest_of(key)] if trace.was_followed else [-1, -1]

        def go_on(spans: Spans) -> None:
            self._begin(key, spans, predicted=True)
            then()

        self._dp_group.spans(f"{what} {self._progress}", values, then=go_on)

    def _enter(self) -> None:
        """Completes the sync point of a pass that has just started."""
        if self._dp_group is not None:
            self._dp_group.finish_sync()

    def end_pass(self) -> None:
        """Ends the pass: later collectives do not belong to it."""
        if self._dp_group is not None and not self._is_alone:
            self._enter()
            self._dp_group.collective_trace.end()
        self._is_alone = False

    def is_next(self, what: str) -> bool:
        """Returns whether the collective ``what`` is next in a verified pass."""
        self._enter()
        following = self._dp_group.collective_trace.next
        return following is not None and following.what == what

    def _wait_traces_agree(self) -> bool:
        self._enter()
        return self._traces_agree or not self._gathers

    def _meet_for(self, what: str) -> None:
        """Meets the data ranks. Each rank's next operation is to start a collective."""
        self._dp_group.start_sync(
            f"{what} {self._progress}", then=lambda spans: self._dp_group.collective_trace.expect()
        ).wait()


def _key_of(trace: Iterable[int], resident: list[int], number: int) -> tuple:
    """Makes the key of passes that go the same way; it starts with the trace's digest. ``number``:
    among the training passes since the last backward or step; 0 for another pass."""
    return number_of(list(trace)), tuple(resident), number
