"""Fleet: divides workers of several kinds over jobs, by linear programmes.

    rate(i) = sum over kinds j of T(i, j) X(i, j)

X(i, j)      share of the time in which job i runs on workers of kind j; at most 1 over all kinds
T(i, j)      its steps per second there, on all the workers that it takes at a time
equal share  of a job: its rate if every kind were divided equally over the jobs

Policies (Narayanan et al., "Heterogeneity-Aware Cluster Scheduling Policies for Deep Learning
Workloads", OSDI 2020): ``max-min`` raises the least rate beside its equal share, ``makespan`` ends
the last job as early as possible, ``cheapest`` makes the most steps for a dollar. All meet the
deadlines. What the first two leave over goes to the jobs that gain most by it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import ConfigError, InternalError

POLICIES = ("max-min", "makespan", "cheapest")
NEEDED = "pip install 'infinity-engine[plan]'"
MOST = 1e15  # of a number in a fleet: more is a typo
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
            _check(workers.count, f"workers.{kind}: count", whole=True)
            if workers.dollars_per_hour is not None:
                _check(workers.dollars_per_hour, f"workers.{kind}: dollars_per_hour")
        for name, job in self.jobs.items():
            _check(job.steps, f"jobs.{name}: steps")
            _check(job.gpus, f"jobs.{name}: gpus", whole=True)
            _check(job.weight, f"jobs.{name}: weight")
            if job.deadline is not None:
                _check(job.deadline, f"jobs.{name}: deadline")
            for kind, rate in job.rates.items():
                _check(rate, f"jobs.{name}: rates.{kind}", least=0.0)
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


def _check(value: Any, name: str, *, whole: bool = False, least: float | None = None) -> None:
    """Raises ConfigError if ``value`` is not a number above 0 (or from ``least`` on)."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and value <= MOST and (not whole or value == int(value)):
        if value > 0 if least is None else value >= least:
            return
    kind = "a whole number" if whole else "a finite number"
    above = "above 0" if least is None else f"from {least:g} on"
    raise ConfigError(f"{name} = {str(value)[:40]} must be {kind} {above}, at most {MOST:g}")


@dataclass(frozen=True)
class Allocation:
    """Shares of the time, X [jobs, kinds], and the policy's objective: the least rate beside its
    equal share (max-min), seconds until the last job ends (makespan), or steps per dollar, summed
    over the workers in use (cheapest)."""

    objective: float
    shares: np.ndarray


def allocate(fleet: Fleet, policy: str) -> Allocation:
    """Allocates the workers by a policy of :data:`POLICIES`.

    Raises ConfigError for deadlines that cannot be met, with the jobs and their rates; for
    ``cheapest`` without a price; and if scipy is missing.
    """
    if policy == "cheapest":
        gain = fleet.rates / (fleet.gpus[:, None] * _prices(fleet))
        shares, objective = _most(fleet, gain)
        return Allocation(objective, shares)
    if policy == "max-min":
        weights = np.array([job.weight for job in fleet.jobs.values()])
        unit = fleet.equal_shares * weights / fleet.gpus
    elif policy == "makespan":
        unit = np.array([float(job.steps) for job in fleet.jobs.values()])
    else:
        raise ConfigError(f"policy={policy!r} is not one of {', '.join(POLICIES)}")
    gain = fleet.rates / unit[:, None]
    _, least = _most(fleet, gain, least_of_all=True)
    shares, _ = _most(fleet, gain, floor=least * (1 - SECOND_SLACK))
    return Allocation(1.0 / least if policy == "makespan" else least, shares)


def _prices(fleet: Fleet) -> np.ndarray:
    """Dollars per hour [kinds]. Raises ConfigError for one that is missing."""
    for kind, workers in fleet.workers.items():
        if workers.dollars_per_hour is None:
            raise ConfigError(f"workers.{kind} has no dollars_per_hour: policy cheapest needs it")
    return np.array([workers.dollars_per_hour for workers in fleet.workers.values()])


def _most(
    fleet: Fleet, gain: np.ndarray, *, least_of_all: bool = False, floor: float | None = None
) -> tuple[np.ndarray, float]:
    """Returns the shares with the greatest sum of ``gain`` times share, and that sum; with
    ``least_of_all`` the greatest least one of a job. ``floor``: of every job's."""
    programme = _Programme(fleet, 1)
    programme.keep_deadlines()
    most = gain.max(axis=1)  # of each job: rows and objective are about 1
    scale = most.min() if least_of_all else most.max()
    cost = np.append(-gain.ravel() / scale, 0.0)
    if least_of_all:
        cost = np.append(np.zeros(gain.size), -1.0)
        place = np.zeros(len(gain), dtype=int)
        programme.keep(-gain / most[:, None], 0.0, also=place, weight=scale / most)
    if floor is not None:
        programme.keep(-gain / most[:, None], -floor / most)
    solved = programme.solve(cost, np.array([np.inf if least_of_all else 0.0]))
    if solved is None:
        raise _missed(fleet)
    shares = solved[:-1].reshape(gain.shape).clip(0.0, 1.0) + 0.0  # no -0.0
    return shares, -float(cost @ solved * scale)


def _missed(fleet: Fleet) -> ConfigError:
    """Makes the error for deadlines that cannot be met: of the allocation that misses least."""
    names = [name for name, job in fleet.jobs.items() if job.deadline is not None]
    programme = _Programme(fleet, len(names))
    programme.keep_deadlines(missing=np.arange(len(names)))
    cost = np.append(np.zeros(fleet.rates.size), np.ones(len(names)))
    solved = programme.solve(cost, np.ones(len(names)))
    if solved is None or not names:
        raise InternalError("a fleet's workers could not be allocated even without deadlines")
    told = []
    for name, part in zip(names, solved[fleet.rates.size :]):
        if part > 0:
            needed = fleet.jobs[name].steps / (fleet.jobs[name].deadline or np.inf)
            told.append(
                f"jobs.{name} needs {needed:.4g} steps/s and gets {needed * (1 - part):.4g}"
            )
    return ConfigError(
        f"the deadlines cannot be met together: {'; '.join(told)}. Give later deadlines, or more"
        " workers."
    )


class _Programme:
    """Rows of a linear programme over the shares of a fleet, and ``extra`` values after them. Every
    allocation keeps: a job is at one place at a time, and the workers of each kind suffice."""

    def __init__(self, fleet: Fleet, extra: int):
        self._fleet, (jobs, kinds) = fleet, fleet.rates.shape
        self._width = jobs * kinds + extra
        self._rows: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # columns, rows, values
        self._limits: list[float] = []
        self.keep(np.ones((jobs, kinds)), 1.0)
        of_kinds = np.tile(np.arange(kinds), jobs) + len(self._limits)
        self._rows.append((np.arange(jobs * kinds), of_kinds, np.repeat(fleet.gpus, kinds)))
        self._limits += fleet.counts.tolist()

    def keep(
        self,
        values: np.ndarray,
        limit: float | np.ndarray,
        *,
        jobs: np.ndarray | None = None,
        also: np.ndarray | None = None,
        weight: float | np.ndarray = 1.0,
    ) -> None:
        """Adds, for each of the jobs (None: all): its shares times ``values`` [jobs, kinds], plus
        ``weight`` times the extra value at ``also``, are at most ``limit``."""
        jobs = np.arange(len(values)) if jobs is None else jobs
        kinds = values.shape[1]
        columns = jobs[:, None] * kinds + np.arange(kinds)
        if also is not None:
            columns = np.hstack([columns, self._fleet.rates.size + also[:, None]])
            values = np.column_stack([values, np.broadcast_to(weight, len(jobs))])
        rows = np.repeat(np.arange(len(jobs)) + len(self._limits), values.shape[1])
        self._rows.append((columns.ravel(), rows, values.ravel()))
        self._limits += np.broadcast_to(limit, len(jobs)).tolist()

    def keep_deadlines(self, missing: np.ndarray | None = None) -> None:
        """Adds the deadlines. ``missing``: the extra value of each, a part of its rate that may be
        missing."""
        due = [(at, job) for at, job in enumerate(self._fleet.jobs.values()) if job.deadline]
        if not due:
            return
        jobs = np.array([at for at, _ in due])
        needed = np.array([job.steps / (job.deadline or np.inf) for _, job in due])
        parts = self._fleet.rates[jobs] / needed[:, None]
        self.keep(-parts, DEADLINE_SLACK - 1, jobs=jobs, also=missing, weight=-1.0)

    def solve(self, cost: np.ndarray, highest: np.ndarray) -> np.ndarray | None:
        """Returns the values of the least ``cost``; None if none keep all limits. ``highest``: of
        the extra values. Raises ConfigError without scipy."""
        try:
            from scipy.optimize import linprog
            from scipy.sparse import csr_array
        except ImportError as error:
            raise ConfigError(f"an allocation needs scipy ({error}): {NEEDED}") from None
        columns, rows, values = (np.concatenate(each) for each in zip(*self._rows))
        shape = (len(self._limits), self._width)
        most = np.append((self._fleet.rates > 0).astype(float), highest)
        found = linprog(
            cost,
            A_ub=csr_array((values, (rows, columns)), shape=shape),
            b_ub=self._limits,
            bounds=np.stack([np.zeros_like(most), most], axis=1),
            method="highs",
            options={"primal_feasibility_tolerance": TOLERANCE},
        )
        if found.status == 2:
            return None
        if found.status != 0:
            raise InternalError(f"the linear programme of a fleet was not solved: {found.message}")
        return np.asarray(found.x)


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
    found: dict[str, Finish] = {}
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
        found |= {name: Finish(now, dollars[name] if priced else None) for name in ending}
        left = {
            name: _later(job, passed, rate)
            for (name, job), rate in zip(left.items(), rates)
            if name not in ending
        }
    return {name: found[name] for name in fleet.jobs}


def _later(job: FleetJob, passed: float, rate: float) -> FleetJob:
    """Returns what is left of a job after seconds at a rate. Its deadline is not before the end at
    this rate, which met it, rounding aside."""
    steps = float(job.steps - rate * passed)
    deadline = job.deadline and max(job.deadline - passed, steps / rate)
    return dataclasses.replace(job, steps=steps, deadline=deadline)
