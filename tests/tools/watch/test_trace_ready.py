"""Idle while ready: a lane that stands still although there is something to start is found.

The claim of HELIX-RC and of dataflow machines: work starts when its inputs and its buffer are
there, and nothing else holds it up.
"""

from __future__ import annotations

import heapq
import random
import time

import pytest
import torch
from models import loss_of, tokens, transformer, with_least

import infinity
from infinity.core.grads.bank import GradientBank
from infinity.core.homes.staging import Staging
from infinity.tools.watch.trace import read, summary
from infinity.tools.watch.trace_ready import idle_while_ready, with_ready

LANES = ("read", "copy", "forward", "backward")


def event(lane: str, start: float, end: float, ready: float | None = None, name: str = "a") -> dict:
    made = {"lane": lane, "name": name, "start": start, "end": end}
    return made if ready is None else made | {"ready": ready}


def test_only_what_was_ready_in_a_free_lane_counts():
    events = [
        event("read", 0, 2, 0),
        event("read", 3, 4, 1, "late"),  # ready while the lane was busy: idle from 2 to 3
        event("read", 3.5, 6, 0),  # beside another
        event("write", 4, 5, 4),  # at once
        event("write", 9, 10),  # which does not say when it was ready
    ]
    found = idle_while_ready(events)
    assert found["share"] == pytest.approx(0.1) and found["lanes"] == {"read": 0.1, "write": 0.0}
    assert found["worst"] == {"lane": "read", "name": "late", "seconds": 1}
    alone = {"share": 0.0, "lanes": {"forward": 0.0}, "worst": None}
    assert idle_while_ready([event("forward", 0, 1)]) == alone


def test_lanes_of_the_loops_thread_are_ready_after_what_they_can_have_waited_for():
    """By hand: a unit is read, copied and computed, the next one too, with a pause of 1 before its
    copy and of 0.5 before its forward. The backward follows the loop's own code. Twins: no pause; a
    copy under a compute, which may wait for its room; a wait, which is not idle."""

    def found(late: float, stands: float, waits: bool = False) -> dict:
        events = [
            event("read", 0, 1, 0, "0"),
            event("copy", 1, 2, name="0"),
            event("forward", 2, 4, name="0"),
            event("copy", 3, 3.5, name="activations"),
            event("read", 4, 5, 4, "1"),
            event("stalled", 4, 5 + late * waits, name="read 1"),
            event("copy", 5 + late, 6 + late, name="1"),
            event("forward", 6 + late + stands, 8 + late + stands, name="1"),
            event("backward", 15, 20, name="1"),
            event("step", 0, 20),
        ]
        assert all("ready" in each for each in with_ready(events) if each["lane"] in LANES)
        return idle_while_ready(events)

    assert found(1, 0.5)["lanes"] == {
        "read": 0.0,
        "copy": pytest.approx(1 / 20),
        "forward": pytest.approx(0.5 / 20),
        "backward": 0.0,
    }
    assert found(1, 0.5)["worst"] == {"lane": "copy", "name": "1", "seconds": pytest.approx(1)}
    assert found(0, 0)["share"] == found(1, 0, waits=True)["share"] == 0.0


# --- a model of the executor: units are fetched, computed and updated, in order ---


def run_chain(costs: list[tuple[float, ...]], buffers: int, pause: float = 0.0) -> list[dict]:
    """Runs units through three lanes; each is fetched into a buffer that its update gives back.
    ``pause``: before each fetch."""
    free = [0.0] * buffers
    ends, events = [0.0, 0.0, 0.0], [event("step", 0.0, 0.0)]
    for number, unit in enumerate(costs):
        buffer = heapq.heappop(free)
        ready = buffer
        for lane, seconds in enumerate(unit):
            start = max(ready, ends[lane]) + (pause if lane == 0 else 0.0)
            events.append(
                event(
                    "fetch compute update".split()[lane], start, start + seconds, ready, str(number)
                )
            )
            ready = ends[lane] = start + seconds
        heapq.heappush(free, ready)
    return events


def random_chain(seed: int) -> list[tuple[float, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.uniform(0.1, 3.0) for _ in range(3)) for _ in range(rng.randint(1, 24))]


@pytest.mark.parametrize("seed", range(0, 1000, 50))
def test_chains_in_order_are_never_idle_while_ready_and_more_buffers_never_slow_them(seed):
    """The twin: a pause before each fetch is found, to the last one."""
    for each in range(seed, seed + 50):
        costs, before = random_chain(each), None
        for buffers in (1, 2, 3, 5):
            events = run_chain(costs, buffers)
            assert idle_while_ready(events)["share"] == pytest.approx(0.0, abs=1e-9)
            end = max(one["end"] for one in events)
            assert before is None or end <= before + 1e-9
            before = end
        slow = run_chain(costs, 2, pause=0.005)
        worst = idle_while_ready(slow)["worst"]
        assert worst["lane"] == "fetch" and worst["seconds"] == pytest.approx(0.005)


def run_graph(rng: random.Random, buffers: int, nodes: int = 12) -> float:
    """List scheduling of a random graph, whose nodes each hold a buffer while they run. Returns
    when the last one ends."""
    costs = [rng.uniform(0.1, 3.0) for _ in range(nodes)]
    needs = [[j for j in range(i) if rng.random() < 0.2] for i in range(nodes)]
    now, waiting, running, done = 0.0, set(range(nodes)), [], set()
    while waiting or running:
        for node in sorted(waiting):
            if len(running) < buffers and all(need in done for need in needs[node]):
                waiting.discard(node)
                heapq.heappush(running, (now + costs[node], node))
        now, node = heapq.heappop(running)
        done.add(node)
    return now


def test_arbitrary_graphs_can_be_slower_with_more_buffers():
    """Why the law above is of chains in order only (Graham 1966)."""
    slower = sum(
        run_graph(random.Random(seed), 3) > run_graph(random.Random(seed), 2) + 1e-9
        for seed in range(2000)
    )
    assert 0 < slower < 200


# --- the engine itself ---


def trace_of(swap, *, trains: bool) -> dict:
    torch.manual_seed(0)
    model = transformer(0, blocks=4)
    optimizer = torch.optim.AdamW(model.parameters())
    homes = {"params": "nvme", "optimizer": "nvme", "nvme_paths": [str(swap)]}
    config = with_least(model, optimizer, homes)
    path = swap.parent / "trace.json"
    model, optimizer = infinity.wrap_model(model, optimizer, config | {"trace": str(path)})
    for step in range(3):
        loss = loss_of(model, tokens(step))
        if trains:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    infinity.unwrap_model(model, optimizer)
    return summary(read(path))["idle_while_ready"]


def test_a_pause_before_each_read_is_found(swap, monkeypatch):
    """Method: 5 ms are lost between the time when a unit is wanted and its read."""
    fetch = Staging.fetch

    def slow(*args, **kwargs):
        time.sleep(0.005)
        return fetch(*args, **kwargs)

    monkeypatch.setattr(Staging, "fetch", slow)
    found = trace_of(swap, trains=False)  # else updates read at the same time
    assert found["worst"]["lane"] == "nvme->host" and found["worst"]["seconds"] >= 0.005


def test_dataflow_of_helix_rc_a_barrier_before_the_step_is_found(swap, monkeypatch):
    """Method: a step waits 50 ms before it submits any update, though gradients have landed."""
    average = GradientBank.average

    def barrier(self, *given):
        time.sleep(0.05)
        return average(self, *given)

    monkeypatch.setattr(GradientBank, "average", barrier)
    found = trace_of(swap, trains=True)
    assert found["worst"]["seconds"] >= 0.05
    assert found["worst"]["lane"] in ("nvme->host", "optimizer")
    resources = {"nvme->host", "host->nvme", "host->device", "device->host", "optimizer"}
    assert {*resources, "forward", "backward"} <= found["lanes"].keys()
