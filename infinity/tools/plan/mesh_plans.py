"""Mesh plans: finds the fastest way to train a sharded model on each of many meshes.

candidate  a schedule, and the samples of a micro-batch, on one mesh
limit      seconds of the slowest of the fastest meshes so far: what takes longer is not planned
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from functools import cached_property

from ...errors import CapacityError, ConfigError
from ...ext.pipeline.choice import WEIGHTS_APART, Choice, check_counts, choose, layer_nbytes
from ..cli.amounts import format_seconds
from .mesh_candidate import Candidate, Job
from .mesh_choice import SHOWN, MeshPlan, best_of
from .mesh_shape import UNFLUSHED, MeshShape
from .on_paper import tell
from .saved import by_least, is_faster, sizes_of

TRIED = ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS")


class Search:
    """The search for the fastest candidates of one job."""

    def __init__(self, job: Job):
        self._job = job
        self._chosen: dict[tuple[str, int], Choice] = {}

    def best(self, mesh: MeshShape, limit: float = math.inf, rival: float = math.inf) -> MeshPlan:
        """Finds the fastest way to train on ``mesh``. Raises ConfigError or CapacityError if there
        is none, with the reason of the one that came nearest; ``limit``: none that takes so many
        seconds is looked at. ``rival``: the seconds of another way on this mesh; a way that takes
        as long may come with too few of its own."""
        best: MeshPlan | None = None
        refused: ConfigError | CapacityError | None = None
        candidates: list[Candidate] = []
        for name in self._names(mesh):
            for candidate in self._candidates(mesh, name, limit):
                if isinstance(candidate, Candidate):
                    candidates.append(candidate)
                elif not isinstance(refused, CapacityError):
                    refused = (
                        candidate
                        if refused is None or isinstance(candidate, CapacityError)
                        else refused
                    )
        for candidate in sorted(
            candidates, key=lambda each: by_least(each.least_seconds, each.samples)
        ):
            # Nothing that is added to a run makes it shorter.
            if best is not None and not is_faster(candidate.least_seconds, best.step_seconds):
                break
            if best is not None and not is_faster(candidate.run.seconds, best.step_seconds):
                continue
            try:
                plan = candidate.plan(min(rival, math.inf if best is None else best.step_seconds))
            except CapacityError as error:
                refused = error
                continue
            if best is None or is_faster(plan.step_seconds, best.step_seconds):
                best = plan
        if best is None:
            raise refused or ConfigError(f"{mesh}: no schedule fits")
        return best

    def _names(self, mesh: MeshShape) -> tuple[str, ...]:
        """Returns the schedules to try. Raises ConfigError for one that is asked for and is not to
        be had."""
        job, asked = self._job, self._job.schedule
        if mesh.pp == 1:
            if asked is not None:
                raise ConfigError(f"{mesh}: one stage has no schedule: leave out --schedule")
            return TRIED[:1]  # there is nothing to choose
        apart = job.batch.recomputes
        if asked is None:
            return tuple(name for name in TRIED if not (apart and name in WEIGHTS_APART))
        if apart and asked in WEIGHTS_APART:
            raise ConfigError(
                f"--schedule {asked} with --gradient-checkpointing: torch computes a block again"
                " for each group of its weights, about six times. Leave one of both out"
            )
        if asked == UNFLUSHED and job.config.max_grad_norm is not None:
            raise ConfigError(
                f"--schedule {UNFLUSHED} takes no max_grad_norm: a norm is of all"
                " stages, which would wait for each other"
            )
        if asked == UNFLUSHED and job.paper.is_tied:
            raise ConfigError(
                f"--schedule {UNFLUSHED}: this model's embedding table is also its head, which two"
                " stages would update apart. Choose a schedule with a flush"
            )
        return (asked,)

    def _candidates(
        self, mesh: MeshShape, name: str, limit: float
    ) -> Iterator[Candidate | ConfigError | CapacityError]:
        """Yields the candidates with a schedule whose activations fit, with each number of samples
        a micro-batch that divides them, and why others are none."""
        if self._job.batch.samples % mesh.data:
            yield ConfigError(
                f"{mesh}: {self._job.batch.samples} samples of a step do not divide by the"
                f" {mesh.data} data ranks"
            )
            return
        each = self._job.batch.samples // mesh.data
        for samples in sizes_of(each):
            try:
                choice = self._choose(mesh, "1F1B" if name == UNFLUSHED else name, each // samples)
                candidate = Candidate(self._job, mesh, choice, samples, flushes=name != UNFLUSHED)
                if candidate.least_seconds >= limit:
                    seconds = format_seconds(candidate.least_seconds)
                    yield ConfigError(f"{mesh}: takes {seconds} or more, others less")
                else:
                    candidate.check_room()
                    yield candidate
            except CapacityError as error:  # more samples need more
                yield error
                return
            except ConfigError as error:
                yield error

    @cached_property
    def _of_layers(self) -> tuple[list[float], list[int]]:
        """The cost and the bytes of each layer."""
        chain = self._job.paper.chain
        return chain.costs(), layer_nbytes(chain, self._job.config)

    def _choose(self, mesh: MeshShape, name: str, micro_batches: int) -> Choice:
        chain, ranks = self._job.paper.chain, mesh.pp
        if ranks == 1:
            return Choice("1F1B", (len(chain.layers),), 1, micro_batches, "")
        if self._job.paper.uncut:
            raise ConfigError(self._job.paper.uncut)
        if (choice := self._chosen.get((name, ranks))) is None:
            asked = {"schedule": name, "micro_batches": micro_batches, "chunks": None}
            costs, nbytes = self._of_layers
            counted = {"costs": costs, "load_rate": None, "nbytes": nbytes}
            choice = choose(chain, self._job.config, ranks, **counted, **asked)
            self._chosen[name, ranks] = choice
        check_counts(name, choice.chunks // ranks, len(chain.layers), ranks, micro_batches)
        return dataclasses.replace(choice, micro_batches=micro_batches)


def best_way(searches: Iterable[Search], mesh: MeshShape, limit: float = math.inf) -> MeshPlan:
    """Finds the fastest way of several searches. Raises what the last one that says more than
    another raised, if there is none: see :meth:`Search.best`."""
    best: MeshPlan | None = None
    refused: ConfigError | CapacityError | None = None
    for search in searches:
        try:
            rival = math.inf if best is None else best.step_seconds
            plan = search.best(mesh, limit, rival)
        except (ConfigError, CapacityError) as error:
            if refused is None or isinstance(error, CapacityError):
                refused = error
            continue
        if best is None or plan.step_seconds < best.step_seconds:
            best, limit = plan, min(limit, plan.step_seconds)
    if best is None:
        raise refused or ConfigError(f"{mesh}: nothing was tried")
    return best


def plan_meshes(
    jobs: Iterable[Job], meshes: Iterable[MeshShape]
) -> list[tuple[MeshShape, MeshPlan | None, Exception | None]]:
    """Plans every mesh that may be among the fastest, with the fastest of ``jobs``. Returns its
    plan, or None and the reason."""
    searches = [Search(job) for job in jobs]
    plans = list[tuple[MeshShape, MeshPlan | None, Exception | None]]()
    for mesh in sorted(meshes, key=lambda mesh: (mesh.pp, mesh)):
        fastest = best_of(plan for _, plan, _ in plans if plan is not None)
        limit = fastest[-1].step_seconds if len(fastest) == SHOWN else math.inf
        try:
            plans.append((mesh, best_way(searches, mesh, limit), None))
        except (ConfigError, CapacityError) as error:
            plans.append((mesh, None, error))
        plan = plans[-1][1]
        tell((str(mesh), plan and plan.step_seconds))
    return plans
