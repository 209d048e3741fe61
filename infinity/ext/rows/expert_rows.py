"""ExpertRows: which experts of one flat param are behind the optimizer's steps, and their replay.

row      one expert: a part of each parameter of the flat param
behind   a row that got no token in the last steps. torch updates it in each of them, with a
         gradient of zeros: moments decay, and the weight still moves
replay   those updates, one after the other in the memory of one pass over the row, before it is
         used, read, saved or stepped with a gradient
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ... import native
from ...core.units.rows import Hyper, Replay
from ...errors import InternalError

MOST_BEHIND = 256  # steps; then a row is brought up to date without being used


@dataclass(frozen=True, eq=False)
class _Steps:
    """The steps of one parameter that not all of its rows have. A change makes another one, and
    takes its place in one statement: an interrupt leaves nothing half."""

    offset: int  # of its first row, in elements of the flat param
    each: int  # elements of a row
    log: tuple[tuple[int, Hyper], ...]  # number and hyperparameters
    done: tuple[int, ...]  # entries of the log that each row has

    def after(self, log: Sequence[tuple[int, Hyper]], done: Sequence[int]) -> _Steps:
        """Returns the steps with this ``log``, from which what all rows have is left out."""
        oldest = min(done)
        return replace(self, log=tuple(log[oldest:]), done=tuple(each - oldest for each in done))

    def caught_up(self, rows: Container[int]) -> _Steps:
        """Returns the steps after ``rows`` were brought up to date."""
        last = len(self.log)
        return self.after(
            self.log, [last if row in rows else done for row, done in enumerate(self.done)]
        )


class ExpertRows:
    """The rows of one flat param at home."""

    def __init__(self, count: int, places: Sequence[tuple[int, int]]):
        """``count``: of the rows. ``places``: of each parameter, its first element and the elements
        of a row."""
        self.count = count
        self._steps = tuple(_Steps(offset, each, (), (0,) * count) for offset, each in places)
        self._replay: Replay | None = None
        self._ticket: native.Ticket | None = None  # of the last update
        # An update that brings rows up to date, and the steps when it was submitted
        self._catching: tuple[native.UnitUpdate, tuple[_Steps, ...]] | None = None

    # --- steps ---

    def runs(
        self, index: int, rows: Iterable[int], hyper: Hyper, number: int
    ) -> Iterator[native.Run]:
        """Yields the runs of step ``number`` of parameter ``index``, for ``rows`` with a gradient:
        neighbours that have missed the same steps are one run. Rows that are far behind are brought
        up to date, too."""
        self._finish()
        steps, chosen = self._steps[index], set(rows)
        zeros = [entry for entry in steps.log if entry[0] < number]
        far = {row for row, done in enumerate(steps.done) if len(zeros) - done >= MOST_BEHIND}
        yield from self._joined(
            steps, [(row, row in chosen) for row in sorted(chosen | far)], zeros, hyper
        )

    @staticmethod
    def _joined(
        steps: _Steps,
        rows: list[tuple[int, bool]],
        log: Sequence[tuple[int, Hyper]],
        hyper: Hyper,
    ) -> Iterator[native.Run]:
        at = 0
        while at < len(rows):
            end = at + 1
            first, has_gradient = rows[at]
            done = steps.done[first]
            while end < len(rows) and rows[end] == (first + end - at, has_gradient):
                if steps.done[rows[end][0]] != done:
                    break
                end += 1
            missed = [each for _, each in log[done:]]
            if missed or has_gradient:
                yield native.Run(
                    steps.offset + first * steps.each,
                    steps.offset + (first + end - at) * steps.each,
                    hyper,
                    missed,
                    has_gradient,
                )
            at = end

    def note_step(self, index: int, rows: Iterable[int], zeros: Hyper, number: int) -> None:
        """Records step ``number`` of parameter ``index``, whose ``rows`` had a gradient. ``zeros``:
        the hyperparameters for the others. Idempotent."""
        self._finish()
        steps, chosen = self._steps[index], set(rows)
        if steps.log and steps.log[-1][0] == number:
            return
        before = len(steps.log)
        done = [
            before + 1 if row in chosen else before if before - done >= MOST_BEHIND else done
            for row, done in enumerate(steps.done)
        ]
        noted = steps.after([*steps.log, (number, zeros)], done)
        self._steps = (*self._steps[:index], noted, *self._steps[index + 1 :])

    # --- what is behind ---

    def replay_after(self, ticket: native.Ticket | None, replay: Replay) -> Behind:
        """Returns the update that is over when every row is up to date. ``ticket``: of the update
        that runs."""
        self._ticket, self._replay = ticket or self._ticket, replay
        return Behind(self)

    def are_current(self, rows: Iterable[int] | None) -> bool:
        """Tells whether ``rows`` (None: all) are up to date, and no update runs."""
        if self._catching is not None or (self._ticket is not None and not self._ticket.done):
            return False
        if rows is None:
            return not any(steps.log for steps in self._steps)
        return all(steps.done[row] == len(steps.log) for steps in self._steps for row in rows)

    def wait_running(self) -> None:
        """Waits for the update that runs. Raises its error."""
        self._finish()
        if self._ticket is not None:
            self._ticket.wait()
            self._ticket = None

    def catch_up(self, rows: Iterable[int] | None) -> None:
        """Brings ``rows`` up to date (None: all), and waits for that. Raises the error of an
        update."""
        self._finish()
        wanted = sorted(range(self.count) if rows is None else rows)
        runs = [
            run
            for steps in self._steps
            if (behind := [row for row in wanted if steps.done[row] < len(steps.log)])
            for run in self._joined(
                steps, [(row, False) for row in behind], steps.log, steps.log[-1][1]
            )
        ]
        if runs:
            if self._replay is None:
                raise InternalError("experts are behind, and nothing steps them")
            after = tuple(steps.caught_up(set(wanted)) for steps in self._steps)
            self._catching = self._replay.make(runs), after
        self.wait_running()

    def _finish(self) -> None:
        """Submits the update that brings rows up to date, and records it. Called again after an
        interrupt, it does the rest."""
        if self._catching is not None:
            update, after = self._catching
            ticket = self._replay.submit(update)
            self._ticket, self._steps, self._catching = ticket, after, None

    def forget(self) -> None:
        """Forgets what is behind: the engine is being shut down."""
        nothing = tuple(replace(s, log=(), done=(0,) * self.count) for s in self._steps)
        self._steps, self._catching, self._replay = nothing, None, None


class Behind:
    """The update of a flat param some of whose rows may be behind. It is not done before they are
    up to date, which waiting for it makes them."""

    def __init__(self, rows: ExpertRows):
        self._rows = rows

    @property
    def done(self) -> bool:
        """Whether all rows are up to date."""
        return self._rows.are_current(None)

    def wait(self) -> None:
        """Brings all rows up to date. Raises the error of an update."""
        self._rows.catch_up(None)
