"""The clock of pipelines: the real orders of the schedules, with idle shares, messages and
activations in flight that papers derive for equal chunks.

p ranks, m micro-batches, v chunks a rank; a backward takes twice a forward.
"""

from __future__ import annotations

import random

import pytest
from paper_formulas import idle_shares

from infinity.errors import InternalError
from infinity.ext.pipeline.choice import IN_A_V, NAMES, Choice
from infinity.tools.plan.orders import orders_of, step_of
from infinity.tools.plan.pipeline_clock import (
    FORWARD,
    INPUTS,
    WEIGHTS,
    ChunkSeconds,
    Op,
    in_flight,
    run_long,
    run_orders,
)

SEED = 20261127


def choice_of(name: str, p: int, m: int, v: int) -> Choice:
    return Choice(name, (1,) * (p * v), p, m, "")


def run(name: str, p: int, m: int, v: int):
    """With chunks of 1/v, so that a rank works for 3 m."""
    return run_orders(orders_of(choice_of(name, p, m, v)), [ChunkSeconds(1 / v, 2 / v)] * (p * v))


@pytest.mark.parametrize(
    ("name", "p", "m", "v"),
    [
        (name, p, rounds * p, v)
        for name, v in (("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2), ("Interleaved1F1B", 3))
        for p in (2, 3, 4, 8)
        for rounds in (1, 2, 4)
    ],
)
def test_idle_time_and_messages_are_those_of_the_papers(name, p, m, v):
    """(p - 1) / (v m) of the work, on every rank; 2 m (p v - 1) messages (Narayanan et al., 2021,
    section 2.2). Failing twin: another number of micro-batches."""
    found = run(name, p, m, v)
    assert idle_shares(found) == pytest.approx([(p - 1) / (v * m)] * p)
    assert found.messages == 2 * m * (p * v - 1)
    assert idle_shares(run(name, p, 2 * m, v)) != pytest.approx(idle_shares(found))


@pytest.mark.parametrize("p", [2, 4, 8])
def test_activations_in_flight_are_those_of_the_papers(p):
    for m in (p, 2 * p, 4 * p):
        assert run("GPipe", p, m, 1).in_flight == (m,) * p
        assert run("1F1B", p, m, 1).in_flight == tuple(min(m, p - r) for r in range(p))
        assert run("LoopedBFS", p, m, 2).in_flight == (2 * m,) * p
        for v in (2, 3):
            assert run("Interleaved1F1B", p, m, v).in_flight == tuple(
                min(m * v, (v - 1) * p + 2 * (p - r) - 1) for r in range(p)
            )


def test_weights_apart_shorten_the_wait_and_breadth_first_lengthens_it():
    """p = 4, v = 2, m = 8: what a run of the schedules was measured to have."""
    shares = {
        name: idle_shares(run(name, 4, 8, 2))[0]
        for name in ("InterleavedZeroBubble", "LoopedBFS", "Interleaved1F1B")
    }
    assert shares == pytest.approx(
        {"InterleavedZeroBubble": 0.0625, "LoopedBFS": 0.1875, "Interleaved1F1B": 0.1875}
    )


def test_halves_of_a_backward_take_their_own_shares():
    """A chunk whose inputs have no gradient computes nothing for them. Twin: equal halves."""
    orders = [[Op(FORWARD, 0, 0), Op(INPUTS, 0, 0), Op(WEIGHTS, 0, 0)]]
    first, equal = ChunkSeconds(1.0, 2.0, inputs=0.0, weights=1.0), ChunkSeconds(1.0, 2.0)
    assert run_orders(orders[:1], [first]).seconds == run_orders(orders, [equal]).seconds == 3.0
    assert [first.of(kind) for kind in (INPUTS, WEIGHTS)] == [0.0, 2.0]
    other = ChunkSeconds(1.0, 2.0, inputs=0.58, weights=0.46)
    assert run_orders(orders, [other]).seconds == pytest.approx(1 + 2 * 1.04)


@pytest.mark.parametrize("name", NAMES)
def test_long_runs_are_continued_as_they_would_run(name):
    """Method: chunks of random seconds, uneven hops, and numbers of micro-batches far above what is
    run. Failing twin: the time between two rounds is that of another chunk."""
    draw, v = random.Random(SEED), 1 if name in ("GPipe", "1F1B") else 2
    for p in (2, 4, 5):
        seconds = [
            ChunkSeconds(each := draw.uniform(1, 2), each * draw.uniform(1.5, 3))
            for _ in range(p * v)
        ]
        hops = [draw.choice([0.0, 0.1, 0.5]) for _ in range(p * v - 1)]
        for m in (8 * p, 11 * p):
            choice = choice_of(name, p, m, v)
            whole = run_orders(orders_of(choice), seconds, hops)
            long = run_long(lambda n, c=choice: orders_of(c, n), m, step_of(choice), seconds, hops)
            assert long.seconds == pytest.approx(whole.seconds, rel=1e-9)
            assert long.busy == pytest.approx(whole.busy) and long.messages == whole.messages
            assert long.in_flight == whole.in_flight
    slower = [ChunkSeconds(9.0, 18.0), *seconds[1:]]
    assert run_orders(orders_of(choice), slower, hops).seconds > 2 * whole.seconds


@pytest.mark.parametrize("name", NAMES)
def test_slower_parts_never_make_a_run_faster(name):
    """Orders are fixed: every op begins when what it waits for has ended."""
    draw, p, v = random.Random(SEED + 1), 4, 1 if name in ("GPipe", "1F1B") else 2
    orders = orders_of(choice_of(name, p, 3 * p, v))
    for _ in range(20):
        seconds = [ChunkSeconds(draw.random(), draw.random()) for _ in range(p * v)]
        hops = [draw.random() for _ in range(p * v - 1)]
        before = run_orders(orders, seconds, hops).seconds
        assert run_orders(orders, seconds, [2 * hop for hop in hops]).seconds >= before
        at = draw.randrange(p * v)
        seconds[at] = ChunkSeconds(2 * seconds[at].forward, seconds[at].backward)
        assert run_orders(orders, seconds, hops).seconds >= before


def test_a_schedule_in_a_v_sends_nothing_between_its_middle_chunks():
    """Its last rank has both."""
    for name in IN_A_V:
        assert run(name, 4, 8, 2).messages == 2 * 8 * (2 * 4 - 1 - 1)


def test_every_op_comes_once_in_every_order():
    for name in NAMES:
        v = 1 if name in ("GPipe", "1F1B") else 2
        ops = [op for order in orders_of(choice_of(name, 4, 8, v)) for op in order]
        assert len(set(ops)) == len(ops)
        assert sum(op.kind == FORWARD for op in ops) == 8 * 4 * v


def test_ranks_that_wait_for_each_other_are_told():
    """Twin: the same ops in the other order run."""
    first, second = Op(FORWARD, 0, 0), Op(FORWARD, 1, 0)
    seconds = [ChunkSeconds(1.0, 2.0)] * 2
    with pytest.raises(InternalError, match="wait for each other"):
        run_orders([[second, first]], seconds)
    assert run_orders([[first, second]], seconds).seconds == 2.0
    assert in_flight([first, second], [3.0, 4.0]) == 7.0
