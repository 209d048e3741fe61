"""late_device: steps on a simulated device, beside the bound of its slowest part.

The device is the tests' (`tests/support/late_device`): its jobs last as long as their bytes and
operations take at the rates of a shape. Updates and disks are this machine's own.

bound     the slower of compute and link in the forward, plus that in the backward; the updates if
          they take longer

share     of the updates that began before the last gradient landed
waits     of the training thread for the device, each step
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import infinity
from bench.launch import ROOT
from infinity.core.run.registry import wrapped
from infinity.tools.bench.results import Measured, row
from infinity.tools.bench.settings import Settings

WHERE = "late:0"
WIDTH, BLOCKS, TOKENS = 768, 12, 4
WARM, STEPS = 4, 4
MEMORY = 200e9  # bytes a second of the device's own memory: never what a step waits for
LINK = 1e9  # bytes a second, for parking: slower than this machine's memory
MEMORY_FOR = {1: "256MiB", 2: "64MiB"}  # by copies of the weights; they have 113 MB


@dataclass(frozen=True)
class Shape:
    """The seconds that a step's compute and its copies in one direction take by themselves.
    ``copies``: of the weights to the device in a step; one if the device has room for all."""

    compute: float
    link: float
    copies: int = 2

    def bound(self, updates: float) -> float:
        forward = max(self.compute / 3, self.link / self.copies)
        # A copy of the weights, or only the gradients' way back, which is as long
        backward = max(2 * self.compute / 3, self.link / self.copies)
        return max(forward + backward, updates)


# As multiples of a step without rates, which is what this machine needs to simulate one
SHAPES = {
    "compute": Shape(4.0, 2.0),
    "compute and link": Shape(4.0, 4.0),
    "link": Shape(2.0, 4.0),
    "room for all weights": Shape(4.0, 1.0, copies=1),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def measure(settings: Settings) -> Measured:
    """Measures rows ``late.<home>.<shape>`` (steps/s, with the share of early updates and the
    waits) and ``late.park``, ``late.resume`` (GB/s)."""
    support = ROOT / "tests" / "support"
    sys.path += [str(support / "late_device"), str(support / "devices")]
    import late_device

    late = late_device.install()
    found = Measured([])
    for home in ("host", "nvme"):
        with tempfile.TemporaryDirectory(dir=settings.folder) as folder:
            config = config_at(home, folder)
            updates, step = _alone(config)
            for name, shape in SHAPES.items():
                times = Shape(shape.compute * step, shape.link * step, shape.copies)
                measured = at_rates(late_device, late, config, times, folder)
                bound = times.bound(updates)
                found.rows.append(
                    row(
                        f"late.{home}.{name}",
                        "steps/s",
                        [1 / seconds for seconds in measured.seconds],
                        ceiling=("the slowest parts alone", [1 / bound] * len(measured.seconds)),
                        ratios={"share": measured.share, "waits": measured.waits},
                    )
                )
                found.notes.append(
                    f"{home}, {name}: compute {1e3 * times.compute:.0f} ms, link"
                    f" {1e3 * times.link:.0f} ms, updates {1e3 * updates:.0f} ms; a step"
                    f" {1e3 * statistics.median(measured.seconds):.0f} ms"
                )
    found.rows += _parking(late_device, late, settings.rounds)
    return found


def _parking(tool: Any, late: Any, rounds: int) -> list[Any]:
    """Parks a model that is at home on the device, with its state, to host memory, and back."""
    seconds: dict[str, list[float]] = {"park": [], "resume": []}
    with tool.kernels(late), tool.at_rates(late, flops=1e15, memory=MEMORY, link=LINK):
        model, optimizer = _made({"device": WHERE, "params": "device", "optimizer": "device"})
        for _ in range(rounds):
            _step(model, optimizer, torch.randn(TOKENS, WIDTH).to(WHERE))
            wrapped(model).engine.wait_idle()
            torch.accelerator.synchronize(WHERE)  # the step's kernels are slow here
            start = time.perf_counter()
            infinity.park(model, to="host")
            middle = time.perf_counter()
            infinity.resume(model)
            seconds["park"].append(middle - start)
            seconds["resume"].append(time.perf_counter() - middle)
        infinity.unwrap_model(model, optimizer)
    nbytes = 4 * 3 * BLOCKS * 4 * WIDTH * WIDTH  # weights and two moments; the gradients are blank
    return [
        row(
            f"late.{name}",
            "GB/s",
            [nbytes / each / 1e9 for each in times],
            ceiling=("the link", [LINK / 1e9] * rounds),
        )
        for name, times in seconds.items()
    ]


@dataclass
class Steps:
    """``share``: of updates that began before the last landing; ``waits``: of the training thread,
    each step."""

    seconds: list[float]
    share: float
    waits: float


def config_at(home: str, folder: str) -> dict[str, Any]:
    """Returns the configuration of a job on the late device with all homes at ``home``."""
    config = {"device": WHERE, "params": home, "optimizer": home}
    return config | ({"nvme_paths": [folder]} if home == "nvme" else {})


def _made(config: dict[str, Any]) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    return infinity.wrap_model(model, torch.optim.AdamW(model.parameters()), config)


def _step(model: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _alone(config: dict[str, Any]) -> tuple[float, float]:
    """Returns the seconds of a step's updates with nothing beside them, disk included, and those
    of a whole step, both without rates."""
    model, optimizer = _made(config)
    x, updates, steps = torch.randn(TOKENS, WIDTH).to(WHERE), [], []
    for _ in range(WARM):
        start = time.perf_counter()
        model(x).square().mean().backward()
        torch.accelerator.synchronize(WHERE)
        middle = time.perf_counter()
        optimizer.step()
        for unit in wrapped(model).engine.job.units:
            unit.wait_for_update()
        optimizer.zero_grad()
        end = time.perf_counter()
        updates.append(end - middle)
        steps.append(end - start)
    infinity.unwrap_model(model, optimizer)
    return min(updates), min(steps)


def at_rates(tool: Any, late: Any, config: dict[str, Any], times: Shape, folder: str) -> Steps:
    """Runs steps at the rates that give their compute and link these times. Leaves the trace in
    ``folder``."""
    count = BLOCKS * 4 * WIDTH * WIDTH
    rates = {
        "flops": 6 * TOKENS * count / times.compute,
        "link": times.copies * 4 * count / times.link,
        "memory": MEMORY,
    }
    trace = Path(folder) / "trace.json"
    with tool.at_rates(late, **rates):
        model, optimizer = _made(
            config | {"trace": str(trace), "device_memory": MEMORY_FOR[times.copies]}
        )
        x, seconds = torch.randn(TOKENS, WIDTH).to(WHERE), []
        for index in range(WARM + STEPS):
            if index == WARM:
                torch.accelerator.synchronize(WHERE)
                waits, start = late.counts()["host_waits"], time.perf_counter()
            _step(model, optimizer, x)
        waits = (late.counts()["host_waits"] - waits) / STEPS
        torch.accelerator.synchronize(WHERE)
        seconds.append((time.perf_counter() - start) / STEPS)
        infinity.unwrap_model(model, optimizer)
    return Steps(seconds, _early(json.loads(trace.read_text())), waits)


def _early(events: list[dict[str, Any]]) -> float:
    """Returns the share of updates that began before the last gradient of their step landed, which
    is one of the first unit."""
    landed = [
        event["ts"] + event["dur"]
        for event in events
        if event.get("cat") == "device->host" and event["name"].startswith("0.")
    ]
    updates: dict[str, list[float]] = {}
    for event in sorted(events, key=lambda event: event.get("ts", 0)):
        if event.get("cat") == "optimizer":
            updates.setdefault(event["name"], []).append(event["ts"])
    early = total = 0
    for starts in updates.values():  # of one unit, in as many pieces each step
        for step in range(WARM, WARM + STEPS - 1):  # the last landing is not counted yet
            of_step = slice(*(len(starts) * at // (WARM + STEPS) for at in (step, step + 1)))
            first = updates["0"][len(updates["0"]) * step // (WARM + STEPS)]
            end = max(at for at in landed if at <= first)
            early += sum(start < end for start in starts[of_step])
            total += len(starts[of_step])
    return early / total
