"""Fleet: divides workers of several kinds over jobs, by linear programmes.

    rate(i) = sum over kinds j of T(i, j) X(i, j)

X(i, j)      share of the time in which job i runs on workers of kind j; at most 1 over all kinds
T(i, j)      its steps per second there, on all the workers that it takes at a time
equal share  of a job: its rate if every kind were divided equally over the jobs

Policies (Narayanan et al., "Heterogeneity-Aware Cluster Scheduling Policies for Deep Learning
Workloads", OSDI 2020): ``max-min`` raises the least rate beside its equal share, ``makespan`` ends
the last job as early as possible, ``cheapest`` makes the most steps for a dollar. All meet the
deadlines. What the first two leave over goes to the jobs that gain most by it. ``equal`` is the
baseline that knows no kinds: every job gets an equal part of each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...errors import ConfigError, InternalError
from ...untrusted import check_number

POLICIES, EQUAL = ("max-min", "makespan", "cheapest"), "equal"
NEEDED = "pip install 'infinity-engine[plan]'"
SLACK = 1e-7  # of two ends that are one, and of a share that is none
DEADLINE_SLACK = 1e-6
TOLERANCE = 1e-9  # of a limit
SECOND_SLACK = 1e-9  # of the first objective, while the second is sought


@dataclass(frozen=True)
class Workers:
    """Equal workers. ``dollars_per_hour``: of one."""

    count: int
    dollars_per_hour: float | None = None


@dataclass(frozen=True)
class FleetJob:
    """A job of ``steps`` steps. ``rates``: steps per second, by kind of worker, on ``gpus`` workers
    at a time. ``weight``: of its rate in max-min. ``deadline``: seconds from now."""

    steps: float
    rates: Mapping[str, float]
    gpus: int = 1
    weight: float = 1.0
    deadline: float | None = None


@dataclass(frozen=True)
class Fleet:
    """Workers by kind, and jobs by name.

    Raises ConfigError, naming the GPU kind or the job, for an invalid number or a job that no kind
    can run.
    """

    workers: Mapping[str, Workers]
    jobs: Mapping[str, FleetJob]

    def __post_init__(self) -> None:
        if not self.workers or not self.jobs:
            raise ConfigError("a fleet needs workers and jobs: at least one of each")
        for kind, workers in self.workers.items():
            check_number(workers.count, f"workers.{kind}: count", whole=True)
            if workers.dollars_per_hour is not None:
                check_number(workers.dollars_per_hour, f"workers.{kind}: dollars_per_hour")
        for name, job in self.jobs.items():
            check_number(job.steps, f"jobs.{name}: steps")
            check_number(job.gpus, f"jobs.{name}: gpus", whole=True)
            check_number(job.weight, f"jobs.{name}: weight")
            if job.deadline is not None:
                check_number(job.deadline, f"jobs.{name}: deadline")
            for kind, rate in job.rates.items():
                check_number(rate, f"jobs.{name}: rates.{kind}", least=0.0)
            if unknown := [kind for kind in job.rates if kind not in self.workers]:
                raise ConfigError(
                    f"jobs.{name}: rates.{unknown[0]}: no such workers. There are"
                    f" {', '.join(self.workers)}."
                )
        for name, rates in zip(self.jobs, self.rates):
            if not rates.any():
                raise ConfigError(
                    f"jobs.{name} runs nowhere: no kind of workers has a rate above 0 and at least"
                    f" {self.jobs[name].gpus} of them. Give it rates, or fewer gpus."
                )

    @property
    def rates(self) -> np.ndarray:
        """Steps per second [jobs, kinds]; 0 where a job cannot run."""
        return np.array(
            [
                [
                    job.rates.get(kind, 0.0) * (workers.count >= job.gpus)
                    for kind, workers in self.workers.items()
                ]
                for job in self.jobs.values()
            ]
        )

    @property
    def gpus(self) -> np.ndarray:
        """Workers that each job takes at a time [jobs]."""
        return np.array([float(job.gpus) for job in self.jobs.values()])

    @property
    def counts(self) -> np.ndarray:
        """Workers of each kind [kinds]."""
        return np.array([float(workers.count) for workers in self.workers.values()])

    @property
    def equal_shares(self) -> np.ndarray:
        """Rates of the jobs if every kind were divided equally over them [jobs]."""
        shares = self.counts / len(self.jobs)
        return self.rates @ (shares * min(1.0, 1.0 / shares.sum()))


@dataclass(frozen=True)
class Allocation:
    """Shares of the time, X [jobs, kinds], and the policy's objective: the least rate beside its
    equal share (max-min), seconds until the last job ends (makespan), or steps per dollar, summed
    over the workers in use (cheapest)."""

    objective: float
    shares: np.ndarray


def allocate(fleet: Fleet, policy: str) -> Allocation:
    """Allocates the workers by a policy of :data:`POLICIES`, or by :data:`EQUAL`, which knows no
    deadlines.

    Raises ConfigError for deadlines that cannot be met, with the jobs and their rates; for
    ``cheapest`` without a price; and if scipy is missing.
    """
    if policy == EQUAL:
        shares = fleet.counts / (len(fleet.jobs) * fleet.gpus[:, None])
        return Allocation(1.0, shares / np.maximum(1.0, shares.sum(axis=1, keepdims=True)))
    if policy == "cheapest":
        gain = fleet.rates / (fleet.gpus[:, None] * _prices(fleet))
        shares, _ = _most(fleet, gain, 0.0)
        return Allocation(float((gain * shares).sum()), shares)
    if policy == "max-min":
        weights = np.array([job.weight for job in fleet.jobs.values()])
        unit = fleet.equal_shares * weights / fleet.gpus
    elif policy == "makespan":
        unit = np.array([float(job.steps) for job in fleet.jobs.values()])
    else:
        raise ConfigError(f"policy={policy!r} is not one of {', '.join(POLICIES)}")
    gain = fleet.rates / unit[:, None]
    _, least = _most(fleet, gain, None)
    shares, _ = _most(fleet, gain, least * (1 - SECOND_SLACK))
    return Allocation(1.0 / least if policy == "makespan" else least, shares)


def _prices(fleet: Fleet) -> np.ndarray:
    """Dollars per hour [kinds]. Raises ConfigError for one that is missing."""
    for kind, workers in fleet.workers.items():
        if workers.dollars_per_hour is None:
            raise ConfigError(f"workers.{kind} has no dollars_per_hour: policy cheapest needs it")
    return np.array([workers.dollars_per_hour for workers in fleet.workers.values()])


def _most(fleet: Fleet, gain: np.ndarray, floor: float | None) -> tuple[np.ndarray, float]:
    """Returns the shares with the greatest sum of ``gain`` times share, of which every job has at
    least ``floor``, and that least; None: the greatest least that there is."""
    try:
        from scipy.optimize import linprog
    except ImportError as error:
        raise ConfigError(f"an allocation needs scipy ({error}): {NEEDED}") from None
    (jobs, kinds), most = gain.shape, gain.max(axis=1)  # so that rows and objective are about 1
    scale = most.min() if floor is None else most.max()
    due = np.array([job.steps / (job.deadline or np.inf) for job in fleet.jobs.values()])
    own = np.kron(np.eye(jobs), np.ones(kinds))  # which shares are a job's
    needed = due[due > 0]
    rows = [  # limits of the shares
        (own, np.ones(jobs)),  # at one place at a time
        (np.kron(fleet.gpus, np.eye(kinds)), fleet.counts),
        (
            -own[due > 0] * fleet.rates.ravel() / needed[:, None],
            DEADLINE_SLACK - np.ones_like(needed),
        ),
        (-own * gain.ravel() / most[:, None], -(floor or 0.0) / most),
    ]
    above, limits = (np.concatenate(each) for each in zip(*rows))
    least = np.zeros(len(above))
    if floor is None:
        least[-jobs:] = scale / most
    solution = linprog(
        np.append(0 * gain, -1.0) if floor is None else np.append(-gain / scale, 0.0),
        A_ub=np.column_stack([above, least]),
        b_ub=limits,
        bounds=[*((0.0, float(rate > 0)) for rate in fleet.rates.ravel()), (0.0, None)],
        method="highs",
        options={"primal_feasibility_tolerance": TOLERANCE},
    )
    if solution.status == 2 and len(needed):
        named = [
            f"jobs.{name} needs {each:.4g} steps/s" for name, each in zip(fleet.jobs, due) if each
        ]
        raise ConfigError(
            f"the deadlines cannot be met together: {', '.join(named)}. Give later deadlines, or"
            " more workers."
        )
    if solution.status != 0:
        raise InternalError(f"the linear programme of a fleet was not solved: {solution.message}")
    shares = solution.x[:-1].reshape(jobs, kinds).clip(0.0, 1.0) + 0.0  # no -0.0
    return shares, float(solution.x[-1] * scale)


class Rounds:
    """Turns shares into rounds: in each, the jobs run that are furthest behind their shares.

    A job's priority on a kind is X over the share of the rounds that it ran there; ties go to the
    one that lacks more rounds, then to the larger X.
    """

    def __init__(self, fleet: Fleet, shares: np.ndarray):
        self._fleet, self._shares = fleet, shares
        self._received, self._count = np.zeros_like(shares), 0

    @property
    def received(self) -> np.ndarray:
        """The share of the rounds so far in which each job ran on each kind [jobs, kinds]."""
        return self._received / max(1, self._count)

    def next(self) -> dict[str, list[str]]:
        """Returns the next round: the names of the jobs that run, by kind."""
        behind = self._shares * self._count - self._received
        with np.errstate(divide="ignore", invalid="ignore"):
            priority = np.where(self._received > 0, self._shares / self._received, np.inf)
        free = self._fleet.counts.copy()
        names, kinds, gpus = list(self._fleet.jobs), list(self._fleet.workers), self._fleet.gpus
        runs: dict[str, list[str]] = {kind: [] for kind in kinds}
        placed: set[int] = set()
        order = np.lexsort((-self._shares.ravel(), -behind.ravel(), -priority.ravel()))
        for job, kind in (divmod(int(at), len(kinds)) for at in order):
            if self._shares[job, kind] > SLACK and job not in placed and gpus[job] <= free[kind]:
                free[kind] -= gpus[job]
                placed.add(job)
                runs[kinds[kind]].append(names[job])
                self._received[job, kind] += 1
        self._count += 1
        return runs


@dataclass(frozen=True)
class Finish:
    """When a job ends, in seconds from now, and what it has cost; None without all prices."""

    seconds: float
    dollars: float | None


def finish_times(fleet: Fleet, policy: str) -> dict[str, Finish]:
    """Predicts the end of every job, if the workers are allocated anew whenever one ends. Raises
    what :func:`allocate` raises."""
    priced = all(workers.dollars_per_hour is not None for workers in fleet.workers.values())
    now, left = 0.0, dict(fleet.jobs)
    finishes: dict[str, Finish] = {}
    dollars = dict.fromkeys(left, 0.0)
    while left:
        part = Fleet(fleet.workers, left)
        shares = allocate(part, policy).shares
        rates = (part.rates * shares).sum(axis=1)
        seconds = [job.steps / rate if rate else np.inf for job, rate in zip(left.values(), rates)]
        passed = min(seconds)
        if priced:
            spent = part.gpus * (shares @ _prices(part)) * passed / 3600
            dollars = dollars | {
                name: dollars[name] + float(more) for name, more in zip(left, spent)
            }
        ending = [name for name, each in zip(left, seconds) if each <= passed * (1 + SLACK)]
        now += float(passed)
        finishes |= {name: Finish(now, dollars[name] if priced else None) for name in ending}
        left = {
            name: _later(job, passed, rate)
            for (name, job), rate in zip(left.items(), rates)
            if name not in ending
        }
    return {name: finishes[name] for name in fleet.jobs}


def _later(job: FleetJob, passed: float, rate: float) -> FleetJob:
    """Returns what is left of a job after seconds at a rate. Its deadline is not before the end at
    this rate, which met it, rounding aside."""
    steps = float(job.steps - rate * passed)
    deadline = job.deadline and max(job.deadline - passed, steps / rate)
    return dataclasses.replace(job, steps=steps, deadline=deadline)
