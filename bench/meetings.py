"""meetings: what it costs that the ranks of a row make sure that all of them do the same, over
gloo, on this machine.

Three ways take turns step by step in the same processes: as it is, without any meeting (`none`:
each rank takes its own word for everybody's), and with a meeting before each collective (`each`).
Few rows of small matrices: the step is bound by messages, as one of hundreds of ranks is, and not
by arithmetic. Processes outnumber the cores, so that the processor seconds of all of them tell more
than the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from infinity.tools.bench.results import Measured, row
from infinity.tools.bench.rounds import Times, alternate, paired
from infinity.tools.bench.settings import Settings

from .launch import launch_delayed, launch_each, run_as_rank

RANKS = (8, 16, 32)
LATENCY_SECONDS, LATENCY_RANKS = 5e-3, 8
WIDTH, BATCH, STEPS = 128, 4, 1
PAIRS = 6  # of turns in a round: a turn is short, and a busy moment hits one of them
# The second for 32 processes, or a small scale: then meetings weigh more.
BLOCKS, FEW_BLOCKS = 12, 6


def measure(settings: Settings) -> Measured:
    """Measures rows ``meetings.<processes>`` (tokens/s) with their ratios to both other ways,
    ``.cpu`` (processor ms per step) and ``.count`` (meetings per step); ``meetings.latency5ms``: 8
    processes on a network where a message takes 5 ms.
    """
    found = Measured([])
    for ranks, told in launch_each(found, "meetings", __name__, RANKS, settings):
        _add_rows(found, f"meetings.{ranks}", told)
    _add_rows(
        found,
        "meetings.latency5ms",
        launch_delayed("meetings", __name__, LATENCY_RANKS, LATENCY_SECONDS, settings),
    )
    return found


def _add_rows(found: Measured, name: str, told: dict[str, Any] | str) -> None:
    if isinstance(told, str):
        found.notes.append(f"{name}: {told}")
        return
    seconds, cpu = told["seconds"], told["cpu"]
    ratios = {way: paired(seconds["ours"], seconds[way]) for way in ("none", "each")}
    found.rows.append(
        row(name, "tokens/s", [told["tokens"] / each for each in seconds["ours"]], ratios=ratios)
    )
    ratios = {way: paired(cpu["ours"], cpu[way]) for way in ("none", "each")}
    found.rows.append(row(f"{name}.cpu", "ms", [1e3 * each for each in cpu["ours"]], ratios=ratios))
    found.rows.append(row(f"{name}.count", "meetings", [told["meetings"]]))


# --- one rank ---


class _Nobody:
    """The result of a meeting that did not take place: what this rank said itself."""

    def __init__(self, message: torch.Tensor):
        self._message = message

    is_begun = True

    def begin(self) -> None:
        pass

    def poll(self) -> bool:
        return True

    def wait(self) -> torch.Tensor:
        return self._message


@contextmanager
def _way(name: str) -> Iterator[None]:
    from infinity.ranks.collective_trace import CollectiveTrace
    from infinity.ranks.tree import Tree

    with ExitStack() as changed:
        if name == "none":
            changed.enter_context(
                mock.patch.object(Tree, "merge", lambda self, message, combine: _Nobody(message))
            )
        elif name == "each":
            changed.enter_context(
                mock.patch.object(CollectiveTrace, "digest_of", lambda self, key: 0)
            )
        yield


def _run_rank(folder: str, rounds: int, scale: float) -> dict[str, Any]:
    import infinity
    from infinity.core.run.registry import wrapped
    from infinity.ranks.channel import SyncPoint

    torch.set_num_threads(1)
    torch.manual_seed(0)
    blocks = BLOCKS if scale >= 1 and dist.get_world_size() < 32 else FEW_BLOCKS
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(blocks)]
    model: Any = nn.Sequential(*layers)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    # Weights are sent, as between machines.
    config = {"params": "host", "optimizer": "host", "units": ["Linear"], "share_homes": False}
    model, optimizer = infinity.wrap_model(model, optimizer, config)
    batch, met = torch.randn(BATCH, WIDTH), 0
    begin = SyncPoint.begin

    def counting(self: SyncPoint) -> None:
        nonlocal met
        met += 1
        begin(self)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def stepping(name: str) -> Callable[[], Times]:
        def run() -> Times:
            with _way(name):
                step()  # at its end is agreed how the next one goes: its way is the last turn's
                wrapped(model).engine.wait_idle()
                dist.barrier()
                cpu, start = time.process_time(), time.perf_counter()
                for _ in range(STEPS):
                    step()
                wrapped(model).engine.wait_idle()
                return Times([time.perf_counter() - start], [time.process_time() - cpu])

        return run

    for _ in range(4):
        step()
    with mock.patch.object(SyncPoint, "begin", counting):
        step()
    ways = {name: stepping(name) for name in ("ours", "none", "each")}
    times = alternate(ways, PAIRS * rounds, warm_up=1)
    return _told(times, STEPS * BATCH * dist.get_world_size(), met)


def _told(times: dict[str, Times], tokens: int, meetings: int) -> dict[str, Any]:
    """Adds up the processor seconds of all ranks; the clock is the first one's."""
    cpu = torch.tensor([each.cpu for each in times.values()], dtype=torch.float64)
    dist.all_reduce(cpu)
    return {
        "tokens": tokens,
        "seconds": {name: each.wall for name, each in times.items()},
        "cpu": dict(zip(times, cpu.tolist())),
        "meetings": meetings,
    }


if __name__ == "__main__":
    run_as_rank(_run_rank)
