"""What runs beside what on a late device at rates: `late_overlap.py OUT.json CASE...`, one answer
for each case."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import late_device
import measure_late_device as bench
import torch

from infinity.core.step.optimizer import InfinityOptimizer
from infinity.core.units.unit_buffers import UnitBuffers

TIMES = bench.Shape(compute=0.5, link=0.25)  # seconds of a step: a busy processor keeps up


def _step_once_all_landed(self: InfinityOptimizer, real: Callable = InfinityOptimizer.step) -> None:
    torch.accelerator.synchronize(bench.WHERE)
    return real(self)


FAULTS = {
    "none": nullcontext,
    "weights are freed behind all compute": lambda: mock.patch.object(
        UnitBuffers, "note_use", lambda self, event: None
    ),
    "updates begin once all gradients have landed": lambda: mock.patch.object(
        InfinityOptimizer, "step", _step_once_all_landed
    ),
}


def _weights_ahead(events: list[dict]) -> float:
    """Returns the share of units whose weights began to come, in a backward, before the unit
    before them had been computed."""
    copies: dict[int, list[float]] = {}
    for event in events:
        if event.get("cat") == "host->device":
            copies.setdefault(int(event["name"]), []).append(event["ts"])
    landings = sorted(
        (event["ts"], int(event["name"].partition(".")[0]))
        for event in events
        if event.get("cat") == "device->host"
    )
    computed = [  # each unit's last landing of a backward
        one
        for one, following in zip(landings, [*landings[1:], (0.0, -1)])
        if one[1] != following[1]
    ]
    ahead = []
    for (before, _), (end, unit), (later, following) in zip(computed, computed[1:], computed[2:]):
        if following == unit - 1:  # of one backward
            began = max((at for at in copies[following] if at < later), default=0.0)
            # Copied while an earlier one computed, or it stayed on the device: both are ahead
            ahead.append(began < (before + end) / 2)
    return sum(ahead) / len(ahead)


def run(late, home: str, fault: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder, FAULTS[fault]():
        config = bench.config_at(home, folder)
        steps = bench.at_rates(late_device, late, config, TIMES, folder)
        events = json.loads((Path(folder) / "trace.json").read_text())
    return {
        "early updates": steps.share,
        "weights ahead": _weights_ahead(events),
        "waits": steps.waits,
    }


if __name__ == "__main__":
    module = late_device.install()
    answers = {case: run(module, *case.split(":")) for case in sys.argv[2:]}
    Path(sys.argv[1]).write_text(json.dumps(answers))
