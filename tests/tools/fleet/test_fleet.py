"""A fleet's allocations: published ones, ones by hand, and random ones.

Words used here:

**gavel's jobs**: the throughputs with which the paper and its tests show the policies (Narayanan et
al., OSDI 2020). **progress**: a job's rate beside its equal share, what max-min raises.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import sys
from pathlib import Path

import numpy as np
import pytest

from infinity.errors import ConfigError
from infinity.tools.fleet.fleet import Fleet, FleetJob, Rounds, Workers, allocate, finish_times

pytest.importorskip("scipy")
DATA = Path(__file__).parents[2] / "support" / "data"
PAPER = [[4, 1], [3, 1], [2, 1]], (1, 1)
TESTS_WIDE = [[2, 1, 0.5], [3, 2, 1]], (1, 2, 3)
TESTS_NARROW = [[2, 1, 0.5], [3, 2, 1]], (1, 1, 1)
SEED = 20261127


def fleet_of(rates, counts, *, prices=None, **jobs) -> Fleet:
    """Kinds k0, k1 ...; jobs j0, j1 ... of 1,000 steps, with a list in ``jobs`` for each field."""
    kinds = [f"k{number}" for number in range(len(counts))]
    workers = {
        kind: Workers(count, prices and prices[number])
        for number, (kind, count) in enumerate(zip(kinds, counts))
    }
    fields = [{"steps": 1000} for _ in rates]
    for name, values in jobs.items():
        for of_job, value in zip(fields, values):
            of_job[name] = value
    return Fleet(
        workers,
        {
            f"j{number}": FleetJob(rates=dict(zip(kinds, map(float, of_job))), **fields[number])
            for number, of_job in enumerate(rates)
        },
    )


@pytest.mark.parametrize(
    ("jobs", "objective", "shares"),
    [
        (PAPER, 1.0909, [[0.4545, 0], [0.4545, 0.0909], [0.0909, 0.9091]]),
        (TESTS_WIDE, 1.5484, [[0.4194, 0.5806, 0], [0.5806, 0.4194, 0]]),
        (TESTS_NARROW, 1.2632, [[0.4737, 0.5263, 0], [0.5263, 0.4737, 0]]),
    ],
)
def test_gavel_equal_progress_as_published(jobs, objective, shares):
    """Objective and shares of gavel's jobs; 1,000 rounds give each job its shares within 0.002.
    Twin: ten rounds do not."""
    fleet = fleet_of(*jobs)
    found = allocate(fleet, "max-min")
    assert found.objective == pytest.approx(objective, abs=5e-5)
    assert found.shares == pytest.approx(np.array(shares), abs=1e-3)
    rounds = Rounds(fleet, found.shares)
    for number in range(1000):
        ran = rounds.next()
        names = list(itertools.chain(*ran.values()))
        assert len(names) == len(set(names)), "a job at two places"
        assert all(len(ran[kind]) <= fleet.workers[kind].count for kind in ran)
        if number == 9:
            assert np.abs(rounds.received - found.shares).max() > 0.002
    assert np.abs(rounds.received - found.shares).max() <= 0.002


def test_the_earliest_end_by_hand():
    """Jobs need 100 s each on a fast worker; the slow one does two of them at half the speed, the
    other at a third. So the slow one takes either of the two: 300 s over 1.5 workers are 200."""
    fleet = fleet_of([[40, 20], [12, 4], [100, 50]], (1, 1), steps=[4000, 1200, 10000])
    assert allocate(fleet, "makespan").objective == pytest.approx(200.0, rel=1e-7)
    ends = [each.seconds for each in finish_times(fleet, "makespan").values()]
    assert max(ends) == pytest.approx(200.0, rel=1e-6)
    assert max(each.seconds for each in finish_times(fleet, "max-min").values()) > 201


def test_the_most_steps_for_a_dollar():
    """Method: the fast worker costs four times as much and is twice as fast: it stays idle but for
    what the deadline asks. Twin: without the deadline it is not used where the slow one is free."""
    jobs = fleet_of([[2, 1], [2, 1]], (1, 2), prices=[4.0, 1.0])
    assert allocate(jobs, "cheapest").shares == pytest.approx(np.array([[0, 1], [0, 1]]))
    hurried = fleet_of([[2, 1], [2, 1]], (1, 2), prices=[4.0, 1.0], deadline=[800.0, None])
    shares = allocate(hurried, "cheapest").shares
    assert shares == pytest.approx(np.array([[0.25, 0.75], [0, 1]]), abs=1e-5)
    ends = finish_times(hurried, "cheapest")
    assert ends["j0"].seconds == pytest.approx(800, rel=1e-5)
    assert ends["j0"].dollars == pytest.approx(800 * (0.25 * 4 + 0.75) / 3600, rel=1e-5)


def test_no_worker_idles_that_a_job_could_use():
    """Method: one job runs on the slow worker only, and bounds the least progress. What it leaves
    goes to the other, all of it."""
    shares = allocate(fleet_of([[0, 1], [5, 1]], (1, 1)), "max-min").shares
    assert shares == pytest.approx(np.array([[0, 1], [1, 0]]))


def test_weights_and_gpus():
    """Equal jobs get equal shares, a weight of 2 twice the rate, and two GPUs half the time."""
    assert allocate(fleet_of([[1], [1]], (1,)), "max-min").shares.ravel() == pytest.approx(
        [0.5] * 2
    )
    weighted = allocate(fleet_of([[1], [1]], (1,), weight=[2, 1]), "max-min").shares.ravel()
    assert weighted == pytest.approx([2 / 3, 1 / 3])
    wide = allocate(fleet_of([[1], [1]], (2,), gpus=[2, 1]), "max-min").shares.ravel()
    assert wide == pytest.approx([0.5, 1.0], abs=1e-6)


def test_jobs_of_very_different_lengths():
    """Method: rates and steps that differ by eight and seven orders of magnitude: the objective is
    that of the formula, and the last end is that of the makespan."""
    random_ = random.Random(SEED)
    for _ in range(20):
        scales = [10 ** random_.uniform(-4, 4) for _ in range(5)]
        rates = [[scale, scale * random_.uniform(0.1, 1)] for scale in scales]
        fleet = fleet_of(rates, (2, 2), steps=[10 ** random_.uniform(1, 8) for _ in rates])
        for policy in ("max-min", "makespan"):
            found = allocate(fleet, policy)
            told = 1 / found.objective if policy == "makespan" else found.objective
            assert objective_of(fleet, policy, found.shares) == pytest.approx(told, rel=1e-6)
        ends = [each.seconds for each in finish_times(fleet, "makespan").values()]
        assert max(ends) == pytest.approx(found.objective, rel=1e-5)


def random_fleet(random_: random.Random) -> Fleet:
    jobs, kinds = random_.randint(1, 6), random_.randint(1, 4)
    counts = [random_.randint(1, 5) for _ in range(kinds)]
    rates = [
        [random_.choice([0, 1, 1]) * random_.uniform(0.1, 9) for _ in counts] for _ in range(jobs)
    ]
    for of_job in rates:
        of_job[counts.index(max(counts))] = random_.uniform(0.1, 9)
    return fleet_of(
        rates,
        counts,
        prices=[random_.uniform(0.2, 4) for _ in counts],
        gpus=[random_.randint(1, max(counts)) for _ in rates],
        weight=[random_.uniform(0.5, 3) for _ in rates],
        steps=[random_.uniform(100, 9000) for _ in rates],
    )


def objective_of(fleet: Fleet, policy: str, shares: np.ndarray) -> float:
    """The policy's objective, as its formula says; larger is better."""
    rates = (fleet.rates * shares).sum(axis=1)
    if policy == "max-min":
        weights = np.array([job.weight for job in fleet.jobs.values()])
        return float((rates * fleet.gpus / (weights * fleet.equal_shares)).min())
    if policy == "makespan":
        return float((rates / [job.steps for job in fleet.jobs.values()]).min())
    prices = np.array([workers.dollars_per_hour for workers in fleet.workers.values()])
    return float((fleet.rates * shares / (fleet.gpus[:, None] * prices)).sum())


def random_shares(fleet: Fleet, draw: np.random.Generator) -> np.ndarray:
    """Shares that fit, filled up to a limit."""
    shares = draw.exponential(size=fleet.rates.shape) * (fleet.rates > 0)
    used = max(shares.sum(axis=1).max(), (fleet.gpus @ shares / fleet.counts).max())
    return shares / used


@pytest.mark.parametrize("policy", ["max-min", "makespan", "cheapest"])
def test_no_random_allocation_is_better(policy):
    """Method: 1,000 allocations that fit, over 20 random fleets. The found one fits, and its
    objective is that of the formula. Twin: with a tenth more, it would not fit."""
    random_, draw = random.Random(SEED), np.random.default_rng(SEED)
    for _ in range(20):
        fleet = random_fleet(random_)
        found = allocate(fleet, policy)
        best = objective_of(fleet, policy, found.shares)
        told = 1 / found.objective if policy == "makespan" else found.objective
        assert best == pytest.approx(told, rel=1e-6)
        full = [found.shares.sum(axis=1).max(), (fleet.gpus @ found.shares / fleet.counts).max()]
        assert max(full) <= 1 + 1e-6 and 1.1 * max(full) > 1
        for _ in range(50):
            assert objective_of(fleet, policy, random_shares(fleet, draw)) <= best * (1 + 1e-6)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rates": [[0], [1]]}, "jobs.j0 runs nowhere"),
        ({"gpus": [3, 1]}, "jobs.j0 runs nowhere"),
        ({"counts": (0,)}, "workers.k0: count = 0"),
        ({"rates": [[1], [math.inf]]}, "jobs.j1: rates.k0 = inf"),
        ({"rates": [[1], [math.nan]]}, "jobs.j1: rates.k0 = nan"),
        ({"rates": [[-1], [1]]}, "jobs.j0: rates.k0 = -1"),
        ({"steps": [0, 1]}, "jobs.j0: steps = 0"),
        ({"weight": [1, 0]}, "jobs.j1: weight = 0"),
        ({"gpus": [1.5, 1]}, "jobs.j0: gpus = 1.5"),
        ({"gpus": [True, 1]}, "jobs.j0: gpus = True"),
        ({"deadline": [-5.0, None]}, "jobs.j0: deadline = -5.0"),
    ],
)
def test_a_fleet_that_is_none_is_refused_by_name(change, named):
    rates, counts = change.pop("rates", [[1], [1]]), change.pop("counts", (2,))
    with pytest.raises(ConfigError) as raised:
        fleet_of(rates, counts, **change)
    assert named in str(raised.value)


def test_deadlines_that_cannot_be_met_are_named():
    """Method: two jobs share one worker; each deadline alone can be met, both cannot. Twin: the
    later deadline is met by all policies."""
    for policy in ("max-min", "makespan", "cheapest"):
        fleet = fleet_of([[1], [1]], (1,), prices=[1.0], deadline=[1500.0, 1500.0])
        with pytest.raises(ConfigError, match=r"jobs.j0 needs 0.6667 steps/s, jobs.j1 needs"):
            allocate(fleet, policy)
        met = fleet_of([[1], [1]], (1,), prices=[1.0], deadline=[1500.0, 3100.0])
        assert finish_times(met, policy)["j0"].seconds <= 1500 * (1 + 1e-5)


def test_deadlines_that_can_just_be_met_are_met():
    """Method: deadlines at the ends of an allocation that is there, for 40 random fleets: no policy
    refuses them, or is late by more than a hundred thousandth. Twin: a tenth earlier, most are
    refused."""
    random_, refused = random.Random(SEED), 0
    for _ in range(40):
        fleet = random_fleet(random_)
        policy = random_.choice(["max-min", "makespan", "cheapest"])
        rates = (fleet.rates * allocate(fleet, "max-min").shares).sum(axis=1)
        for part in (1.0, 0.9):
            jobs = {
                name: dataclasses.replace(job, deadline=float(part * job.steps / rate))
                for (name, job), rate in zip(fleet.jobs.items(), rates)
            }
            try:
                ends = finish_times(Fleet(fleet.workers, jobs), policy)
            except ConfigError:
                assert part < 1
                refused += 1
            else:
                assert all(ends[name].seconds <= jobs[name].deadline * (1 + 1e-5) for name in jobs)
    assert refused > 20


def test_without_scipy_its_extra_is_named(monkeypatch):
    """Twin: with it, the same fleet is allocated (above)."""
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ConfigError, match=r"pip install 'infinity-engine\[plan\]'"):
        allocate(fleet_of([[1]], (1,)), "max-min")


def test_ends_of_many_jobs():
    """Method: 40 random jobs, 3 kinds: all end, none before the steps of its fastest rate."""
    random_ = random.Random(SEED)
    rates = [[random_.uniform(0.1, 9) for _ in range(3)] for _ in range(40)]
    fleet = fleet_of(rates, (2, 3, 4), prices=[3.0, 2.0, 1.0])
    ends = finish_times(fleet, "max-min")
    assert list(ends) == list(fleet.jobs)
    assert all(end.seconds >= 1000 / max(of) * 0.999 for end, of in zip(ends.values(), rates))


# --- a published simulation ---

MODELS = json.loads((DATA / "steps_per_second.json").read_text())["jobs of a fleet on a V100"]


def arrivals(seed: int, mean_gap: float):
    """Jobs as the published generator draws them: (number, arrival, steps, model)."""
    job, gap, time = random.Random(seed + 2), random.Random(seed + 3), 0.0
    for number in itertools.count():
        job.uniform(0, 1)  # a number of GPUs, which is not used
        minutes = 10 ** (job.uniform(3, 4) if job.random() >= 0.8 else job.uniform(1.5, 3))
        model = job.choice(list(MODELS))
        yield number, time, 60 * minutes * MODELS[model], model
        time += -math.log(1.0 - gap.random()) * mean_gap


def mean_completion(seed: int, mean_gap: float, allocated) -> float:
    """The mean seconds from arrival to end of the jobs 4,000 to 4,999, each on a V100, in rounds of
    360 s. Workers are allocated after 1,920 s if a job has come or gone; a new one waits for that.
    Then ``allocated`` is called with the jobs' models."""
    coming = arrivals(seed, mean_gap)
    number, arrival, steps, model = next(coming)
    now, last, changed, done = 0.0, 0.0, False, {}
    waiting: dict[int, list] = {}
    running: dict[int, list] = {}  # number: [arrival, steps left, model]
    while len(done) < 1000:
        while arrival <= now:
            waiting[number], changed = [arrival, steps, model], True
            number, arrival, steps, model = next(coming)
        if changed and (now - last >= 1920 or last == 0):
            last, changed, running, waiting = now, False, running | waiting, {}
            allocated([model for _, _, model in running.values()])
        ends = now
        for job, (began, left, of) in list(running.items()):
            made = min(int(MODELS[of] * 360), left)
            end = now + made / MODELS[of]
            ends, running[job][1] = max(ends, end), left - made
            if left <= made:
                del running[job]
                changed = True
                if 4000 <= job < 5000:
                    done[job] = end - began
        now = ends if ends > now else arrival
    return sum(done[job] for job in sorted(done)) / 1000


@pytest.mark.parametrize(
    ("seed", "mean_gap", "seconds"),
    [
        (42, 9000, 59492.106756),
        (1234, 9000, 64494.582453),
        (15, 9000, 54834.129989),
        (42, 4500, 59770.441018),
        (1234, 4500, 64695.450528),
        (15, 4500, 55072.401336),
    ],
)
def test_mean_completion_times_as_published(seed, mean_gap, seconds):
    """At the published loads every job has one of 36 V100 at once. Method: now and then the workers
    are allocated for the jobs that are there: each gets a V100 for all of the time, and runs in the
    next round. Twin: of two V100 they get two."""
    resets = 0

    def allocated(models):
        nonlocal resets
        resets += 1
        if resets % 300 or not models:
            return
        jobs = {str(at): FleetJob(1e6, {"v100": MODELS[model]}) for at, model in enumerate(models)}
        for count, shared in ((36, len(jobs)), (2, min(2, len(jobs)))):
            fleet = Fleet({"v100": Workers(count)}, jobs)
            shares = allocate(fleet, "max-min").shares
            assert shares.sum() == pytest.approx(shared)
            assert len(Rounds(fleet, shares).next()["v100"]) == shared

    assert mean_completion(seed, mean_gap, allocated) == pytest.approx(seconds, abs=1e-6)
    assert resets > 3000
