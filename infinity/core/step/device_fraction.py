"""DeviceFraction: which part of the state at home on the host the device steps.

fraction   of the elements, those needed last in a forward: few units pass the device, and none that
           is needed soon. The processor steps the others
waits      seconds that the compute stood still for updates in one step, one number for each wait
trial      a few steps with a larger fraction. It is kept if the compute then waits less

State that passes the device takes memory bandwidth and the link from the processor's updates and
from the weights. Whether a fraction helps depends on all of them, so it is found by trying.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..units.flat_layout import SHARD_ALIGNMENT
from ..units.flat_param import FlatParam

STEPS = 3  # of one trial; the first is not typical
PAUSE = 100  # steps after a trial that did not help
HELPS = 0.9  # of the seconds before: a trial that waits less is kept
WORTH = 0.02  # of the update's time on the processor: shorter waits are not worth a trial


@dataclass(frozen=True)
class Rates:
    """What is known of an update: elements per second on the processor, and on the device if
    nothing else uses the link; ``numel``: elements of state on the host."""

    processor: float
    device: float
    numel: int

    @property
    def seconds(self) -> float:
        """Seconds of the update on the processor alone."""
        return self.numel / self.processor


class DeviceFraction:
    """The fraction, and the first element of each flat param that the device steps."""

    def __init__(self) -> None:
        self.value = 0.0
        self._before: tuple[float, float] | None = None  # fraction and seconds waited, of a trial
        self._seen: list[float] = []
        self._pause = 0
        self._first: dict[FlatParam, int] = {}

    def note(self, waits: Sequence[float], rates: Rates | None) -> None:
        """Notes the ``waits`` of the last step, and starts or ends a trial. The longest wait is not
        counted: what is needed first lands last, whoever steps it."""
        self._seen.append(sum(waits) - max(waits, default=0.0))
        if len(self._seen) < STEPS:
            return
        waited, self._seen = min(self._seen[1:]), []
        if self._before is not None and waited > HELPS * self._before[1]:
            self.value, self._pause = self._before[0], PAUSE // STEPS
        self._before = None
        if self._pause:
            self._pause -= 1
        elif rates is not None and waited > WORTH * rates.seconds:
            most = rates.device / (rates.device + rates.processor)
            wanted = min(self.value + waited / rates.seconds / 2, most)
            if wanted > self.value:
                self._before, self.value = (self.value, waited), wanted

    def divide(self, flat_params: Iterable[FlatParam]) -> None:
        """Divides ``flat_params``, in the order of their next use: the device steps the last of
        their elements."""
        flat_params = list(flat_params)
        whole = sum(flat_param.layout.shard_numel for flat_param in flat_params)
        of_processor, self._first = round(whole * (1 - self.value)), {}
        for flat_param in flat_params:
            first = min(of_processor, flat_param.layout.shard_numel)
            of_processor -= first
            if first < flat_param.layout.shard_numel:
                self._first[flat_param] = first // SHARD_ALIGNMENT * SHARD_ALIGNMENT

    def first_own(self, flat_param: FlatParam) -> int:
        """Returns the first element of ``flat_param`` that the device steps. The processor steps
        those before it."""
        return self._first.get(flat_param, flat_param.layout.shard_numel)
