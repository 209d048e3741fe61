"""Launches: counts the seconds in which a GPU waits for the training thread to launch its work.

mark    a place in the training thread: where a block's forward begins or ends, a unit's gradients
        have landed, and a step begins
idle    at a mark: all that was launched on the current stream is over

Between two marks at which the GPU is idle, the launches set the pace: kernels run, but each waits
for its launch. What the training thread itself waits for meanwhile is counted elsewhere, and is
taken off.
"""

from __future__ import annotations

import time
from typing import Any

from ...config import Config
from ...core.machine.accelerator import Accelerator, Streams
from ...core.machine.traffic import Traffic
from ...core.seams import Events, Extension

LAUNCHES = "launches"


class Launches(Extension):
    """The seconds of one job."""

    may_stand_aside = True

    def __init__(self, streams: Streams, traffic: Traffic, events: Events):
        self.seconds = 0.0
        self._streams, self._traffic = streams, traffic
        self._idle: tuple[float, float] | None = None  # the last mark, and the waits until then
        events.pass_begun.append(self._begin)
        for marks in (
            events.forward_begun,
            events.forward_ended,
            events.unit_landed,
            events.step_begun,
        ):
            marks.append(self._mark)

    @classmethod
    def begin(cls, config: Config, device: Any, collectives: Any, events: Events) -> Any:
        """Returns the counter of an accelerator. A processor computes where it is called."""
        if not isinstance(device, Accelerator):
            return None
        return cls(device.streams, collectives.traffic, events)

    def _begin(self, *_: Any) -> None:
        """Forgets the last mark: what was between two passes is the user's own."""
        self._idle = None

    def _mark(self, *_: Any) -> None:
        before, self._idle = self._idle, None
        if self._streams.current().query():
            self._idle = time.perf_counter(), sum(self._traffic.waits().values())
            if before is not None:
                passed, waited = (now - then for now, then in zip(self._idle, before))
                self.seconds += max(0.0, passed - waited)


def launch_seconds(job: Any) -> dict[str, float]:
    """Returns the seconds so far by their name; empty if the device is no accelerator."""
    seconds = [each.seconds for each in job.extensions if isinstance(each, Launches)]
    return {LAUNCHES: sum(seconds)} if seconds else {}
