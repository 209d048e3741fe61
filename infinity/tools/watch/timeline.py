"""Timeline: writes a Chrome trace of the engine's work.

lane    one kind of work: an edge, the forward, the optimizer; overlapping work gets further rows.
        A listener's name for work that is not in :data:`LANES` is a lane below these
"""

from __future__ import annotations

import json
import logging
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...core.machine.traffic import COLLECTIVES, EDGES, PAST_HOST
from ...core.seams import Events, Extension
from ...errors import ConfigError
from ...files.outputs import Output, check_free
from ...untrusted import Format

logger = logging.getLogger(__name__)

LANES = ("step", "forward", "backward", "stalled", *EDGES, PAST_HOST, *COLLECTIVES, "optimizer")
BUFFERED_EVENTS = 512
FIRST = {"ph": "M", "name": "process_name", "args": {"name": "infinity"}}
FORMAT = Format("timeline", number=1, unnumbered=1)
BEGIN = f"[\n{json.dumps({'pid': 1} | FIRST)}".encode()  # of every timeline, and of no other file


class Timeline(Extension):
    """Work in Chrome's trace format, for Perfetto and chrome://tracing. They are appended as they
    come, so a killed job leaves a readable file, too. Times are of :func:`time.perf_counter`."""

    def __init__(self, path: str | os.PathLike):
        """Raises ConfigError if ``path`` cannot be written, or is a file that is not a timeline."""
        check_free(Output("trace", Path(path), made=BEGIN), way=None)
        try:
            self._descriptor: int | None = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644
            )
        except OSError as error:
            raise ConfigError(
                f"trace={os.fspath(path)!r} cannot be written: {error.strerror}"
            ) from error
        self._pid, self._path = os.getpid(), os.fspath(path)
        self._origin = time.perf_counter()
        # Per row, when it is free again
        self._rows: dict[str, list[float]] = {lane: [] for lane in LANES}
        self._places = {lane: place for place, lane in enumerate(LANES)}
        self._job: Callable[[], Any] = lambda: None
        self._step: tuple[str, float, float] | None = None  # the last one, until it is added
        self._lines = ["["]
        self._write(FIRST)
        self._write({"ph": "M", "name": "format", "args": FORMAT.numbered({})})

    @classmethod
    def begin(cls, config: Any, device: Any, collectives: Any, events: Events) -> Timeline | None:
        """Returns the timeline that ``config.trace`` names, which listens to ``events``. Raises
        ConfigError if it cannot be written."""
        if config.trace is None:
            return None
        timeline = cls(trace_path(config.trace, collectives.ranks))
        events.moved.append(timeline.add)
        events.step_ended.append(timeline.note_step)
        events.closed.append(timeline.close)
        return timeline

    def install(self, job: Any, model: Any) -> None:
        """Reads the steps on the job's clock."""
        self._job = weakref.ref(job)  # whose end closes this

    def note_step(self, steps: int) -> None:
        """Adds the step that an optimizer has ended, once no other one can step in it, and writes
        what there is to the file."""
        job = self._job()
        clock = job.updates.clock
        step = f"step {clock.steps}", clock.began, clock.ended
        if self._step is not None and self._step[0] != step[0]:
            self._add_step()
        self._step = step
        if clock.stepped >= {handle.flat_param.spec.optimizer for handle in job.trained}:
            self._add_step()
        self.flush()

    def _add_step(self) -> None:
        if self._step is not None:
            self.add("step", *self._step)
            self._step = None

    def add(
        self,
        lane: str,
        name: str,
        start: float,
        end: float,
        *,
        ready: float | None = None,
        **details,
    ) -> None:
        """Adds one piece of work in ``lane``. ``ready``: when it could have started, but for the
        lane."""
        if self._descriptor is None or os.getpid() != self._pid:
            return
        event = {"ph": "X", "name": name, "cat": lane, "tid": self._row(lane, start, end)}
        event |= {
            "ts": round(1e6 * (start - self._origin), 3),
            "dur": round(1e6 * max(0.0, end - start), 3),
        }
        if ready is not None:
            details["ready"] = round(1e6 * (ready - self._origin), 3)
        self._write(event | ({"args": details} if details else {}))

    def _row(self, lane: str, start: float, end: float) -> int:
        """Returns a thread number for the event: of the lane's first row that is free then."""
        rows = self._rows.setdefault(lane, [])
        row = next((i for i, free_at in enumerate(rows) if free_at <= start), len(rows))
        number = 100 * self._places.setdefault(lane, len(self._places)) + row
        if row == len(rows):
            rows.append(end)
            self._write({"ph": "M", "name": "thread_name", "tid": number, "args": {"name": lane}})
            self._write(
                {
                    "ph": "M",
                    "name": "thread_sort_index",
                    "tid": number,
                    "args": {"sort_index": number},
                }
            )
        rows[row] = end
        return number

    def _write(self, event: dict) -> None:
        self._lines.append(json.dumps({"pid": 1} | event) + ",")
        if len(self._lines) >= BUFFERED_EVENTS:
            self.flush()

    def flush(self) -> None:
        """Writes all buffered events to the file. A full disk ends the timeline, not the
        training."""
        if self._descriptor is None or not self._lines or os.getpid() != self._pid:
            return
        data = "".join(line + "\n" for line in self._lines).encode()
        self._lines.clear()
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            os.close(self._descriptor)
            self._descriptor = None
            logger.warning(
                "the trace %s ends here: %s. The training goes on.",
                self._path,
                os.strerror(error.errno or 0),
            )

    def close(self) -> None:
        """Ends the file, which is then a complete JSON array."""
        # In a forked child the file is its parent's
        if self._descriptor is None or os.getpid() != self._pid:
            return
        self._add_step()
        self._lines.append(
            json.dumps({"pid": 1, "ph": "M", "name": "process_labels", "args": {"labels": "ended"}})
        )
        self._lines.append("]")
        self.flush()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self):
        if hasattr(self, "_pid"):
            self.close()


def trace_path(path: str | os.PathLike, ranks: Any) -> str:
    """Returns the name of each rank's own timeline: ``trace.json`` becomes ``trace-rank1.json``."""
    stem, suffix = os.path.splitext(os.fspath(path))
    return os.fspath(path) if ranks.alone else f"{stem}-rank{ranks.world_rank}{suffix}"
