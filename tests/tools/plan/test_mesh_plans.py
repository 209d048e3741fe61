"""Meshes on paper: the plan of each is that of the code that runs, and the fastest is found.

**paper**: a child process with torch's process group "fake", in which no rank but this one is.
**one by one**: every mesh planned by itself, without a limit by others.
"""

from __future__ import annotations

import dataclasses
import os
import random
import types
from collections.abc import Callable
from typing import Any

import mesh_jobs
import pytest
import torch
import torch.distributed as dist
from ranks import run_all

from infinity.core.machine.accelerator import make_device
from infinity.core.machine.traffic import Traffic
from infinity.errors import CapacityError, ConfigError, InternalError
from infinity.tools.plan import mesh_candidate
from infinity.tools.plan.machine_file import Machine
from infinity.tools.plan.mesh_choice import MeshPlan, best_of
from infinity.tools.plan.mesh_plans import Search, plan_meshes
from infinity.tools.plan.mesh_shape import MeshShape, meshes_of
from infinity.tools.plan.on_paper import in_children, shard_on_paper

pytest.importorskip("transformers", minversion="5.23")  # which applies plans
SEED, RANKS = 20261130, 8
mesh_jobs.on_meta()  # imports what each child would have to import by itself
DGX = Machine.read("dgx-h100")


def on_paper(work: Callable[[], Any]) -> Any:
    return in_children([work], RANKS)[0]


def draw_machine(draw: random.Random) -> Machine:
    """With rates over several decades, and memory that is tight for the small model."""
    rates = ("device_flops", "device_link", "host_link", "network", "disk_read", "disk_write")
    return dataclasses.replace(
        DGX,
        devices=draw.choice([1, 2, 4, 8]),
        **{name: getattr(DGX, name) * 10 ** draw.uniform(-5, 0) for name in rates},
        host_bandwidth=10 ** draw.uniform(8, 11),
        latency=10 ** draw.uniform(-6, -3),
    )


def draw_job(job: mesh_candidate.Job, draw: random.Random) -> mesh_candidate.Job:
    config = dataclasses.replace(
        job.config,
        params="auto",
        optimizer="auto",
        device_memory=int(10 ** draw.uniform(6, 7.5)),
        host_memory=int(10 ** draw.uniform(6, 7.5)),
        nvme_paths=(".",),
        nvme_capacity=int(10 ** draw.uniform(6, 8)),
    )
    batch = dataclasses.replace(
        job.batch,
        samples=draw.choice([1, 6, 8, 32]),
        length=draw.choice([8, 32]),
        flops=10 ** draw.uniform(6, 12),
        recomputes=draw.random() < 0.5,
    )
    return dataclasses.replace(job, config=config, batch=batch, machine=draw_machine(draw))


def compared(count: int, tp: int) -> Callable[[], tuple[int, int, int]]:
    """Plans random machines: how many had a mesh that fits, one that does not, and how many were
    faster with twice the links."""

    def work() -> tuple[int, int, int]:
        draw, fitting, refused, faster = random.Random(SEED + tp), 0, 0, 0
        meshes = [mesh for mesh in meshes_of(RANKS) if mesh.tp == tp]
        first = mesh_jobs.job_of(mesh_jobs.on_meta(), meshes[0])
        for _ in range(count):
            job = draw_job(first, draw)
            one_by_one = [_planned(job, mesh) for mesh in meshes]
            plans = [plan for plan in one_by_one if plan is not None]
            together = best_of(p for _, p, _ in plan_meshes([job], meshes) if p is not None)
            assert [plan.mesh for plan in together] == [plan.mesh for plan in best_of(plans)]
            assert [p.step_seconds for p in together] == [p.step_seconds for p in best_of(plans)]
            fitting += len(plans)
            refused += len(meshes) - len(plans)
            for plan in plans:
                assert plan.mesh.ranks == RANKS and plan.slower >= 1 - 1e-9 and plan.why
                assert plan.step_seconds >= max(rank.step_seconds for rank in plan.ranks)
            links = {"device_link": 2 * job.machine.device_link, "network": 2 * job.machine.network}
            links["host_link"] = 2 * job.machine.host_link
            quicker = dataclasses.replace(job, machine=dataclasses.replace(job.machine, **links))
            for before in plans:
                after = _planned(quicker, before.mesh)
                assert after is not None and after.step_seconds <= before.step_seconds * (1 + 1e-9)
                faster += after.step_seconds < 0.99 * before.step_seconds
        return fitting, refused, faster

    return work


def _planned(job: mesh_candidate.Job, mesh: MeshShape) -> MeshPlan | None:
    try:
        return Search(job).best(mesh)
    except (ConfigError, CapacityError):
        return None


def check(count: int) -> None:
    found = in_children([compared(count, tp) for tp in (1, 2)], RANKS)
    fitting, refused, faster = (sum(each) for each in zip(*found))
    assert fitting and refused and faster, found


def test_the_fastest_mesh_is_that_of_all_planned_one_by_one():
    """Method: a small model on random machines; what is refused is a typed error. Twice the links
    are never slower, and sometimes faster."""
    check(2)


@pytest.mark.slow
def test_the_fastest_mesh_of_fifty_random_machines():
    check(50)


def test_the_child_has_its_own_group_and_leaves_ours_alone():
    """Method: what a child raises is raised here; one that ends is told. This process has no group
    afterwards."""
    seen = on_paper(lambda: (dist.get_backend(), dist.get_world_size(), os.getpid()))
    assert seen[:2] == ("fake", RANKS) and seen[2] != os.getpid()

    def refuses() -> None:
        raise ConfigError("no such model")

    with pytest.raises(ConfigError, match="no such model"):
        on_paper(refuses)
    with pytest.raises(InternalError, match="ZeroDivisionError"):
        on_paper(lambda: 1 / 0)
    with pytest.raises(InternalError, match="ended with status 3"):
        on_paper(lambda: os._exit(3))
    assert not dist.is_initialized()


def test_a_group_that_is_there_stays_as_it_was(tmp_path):
    """Method: a rank of a real job plans, and passes values in its own group afterwards."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        assert on_paper(dist.get_world_size) == RANKS
        value = torch.ones(3)
        dist.all_reduce(value)
        assert value.tolist() == [1, 1, 1] and dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()


def test_parts_hold_and_save_what_a_trial_counts():
    """A rank of two parts sends in each layer, and saves less than one with all; what is between
    layers and after them is told apart. Twin: a model that looks at values is estimated."""
    whole, parts = (on_paper(lambda tp=tp: _trials(mesh_jobs.on_meta(), tp)) for tp in (1, 2))
    assert whole["layer"].forward_nbytes == whole["layer"].backward_nbytes == 0
    # An all-reduce after attention and one after the MLP, each of width 64 in fp32.
    assert parts["layer"].forward_nbytes == 2 * 64 * 4
    assert parts["layer"].backward_nbytes >= 2 * 64 * 4
    assert parts["layer"].saved < whole["layer"].saved
    assert whole["layer"].is_counted and parts["after"].saved >= 98 * 4
    estimated = on_paper(lambda: _trials(_looking(), 1))
    assert not estimated["layer"].is_counted and estimated["layer"].saved == 64 * 34 * 2


def test_a_fused_loss_saves_no_logits_unless_they_are_divided():
    """98 scores in fp32 of each token less. Twin: two tensor ranks save what they did."""
    for tp, less in ((1, 98 * 4), (2, 0)):
        whole, fused = (
            on_paper(lambda tp=tp, is_on=is_on: _trials(mesh_jobs.on_meta(), tp, fused_loss=is_on))
            for is_on in (False, True)
        )
        assert whole["after"].saved - fused["after"].saved == less
        assert whole["layer"] == fused["layer"]


def _trials(model: torch.nn.Module, tp: int, **how: bool) -> dict[str, Any]:
    paper = shard_on_paper(model, tp, **how)
    return {"layer": paper.layer, "after": paper.after}


def _looking() -> torch.nn.Module:
    """A model whose layers read a value of their input."""
    model = mesh_jobs.on_meta()

    def forward(self, x, *arguments, **options):
        return x * x.sum().item()

    for layer in model.model.layers:
        layer.forward = types.MethodType(forward, layer)
    return model


def test_what_does_not_fit_the_device_fits_with_its_state_elsewhere():
    """The same mesh in less and less memory: all on the device; then on the host, with how much
    slower; then refused with the numbers."""

    def work() -> list[str]:
        mesh = MeshShape(2, 2, 2)
        job, found = mesh_jobs.job_of(mesh_jobs.on_meta(), mesh), []
        for memory in (1 << 30, 1_300_000, 1000):
            config = dataclasses.replace(
                job.config, params="auto", optimizer="auto", device_memory=memory
            )
            machine = dataclasses.replace(DGX, host_link=1e6, device_flops=1e15)
            each = dataclasses.replace(job, config=config, machine=machine)
            try:
                found.append(Search(each).best(mesh).why)
            except CapacityError as error:
                found.append(str(error))
        return found

    roomy, tight, refused = on_paper(work)
    assert "host" not in roomy
    assert "in RAM" in tight and "x slower" in tight
    assert "a device has 1000 B" in refused and "--gradient-checkpointing" in refused


MESHES = {"pp2 x tp2": ({"tp": 2}, (2, 1, 2)), "pp2 x dp2": ({}, (2, 2, 1))}


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_a_step_sends_exactly_what_is_planned_in_the_planned_order(name, tmp_path):
    """Method: four ranks over gloo; bytes between stages as they are handed over, those of tp as
    they are dispatched, those of data ranks as the engine counts them. Failing twin: other
    cuts."""
    axes, sizes = MESHES[name]
    jobs = {"executed:mesh": {"axes": axes}}
    ranks = run_all(tmp_path, 4, jobs, script="mesh_jobs.py")["executed:mesh"]
    planned = mesh_jobs.planned(sizes, (2, 2))
    assert len(planned) == 2
    for number, rank in enumerate(ranks):
        expected = planned[number // 2]
        assert {**rank, "done": None} == {**expected, "done": None}
        assert [tuple(each) for each in rank["done"]] == expected["done"]
    other = mesh_jobs.planned(sizes, (1, 3))
    axis = "tp" if axes else "dp"
    assert [rank[axis] for rank in other] != [rank[axis] for rank in planned]


@pytest.mark.slow
def test_divided_experts_are_gathered_and_reduced_as_planned(tmp_path):
    """Method: two stages of a mixture whose two data ranks have two of four experts each. The
    tokens that leave are those that the routers choose: near what all chosen as often would be.
    Failing twin: the same ranks without ep gather and reduce the experts, too."""
    jobs = {"executed:mesh": {"axes": {"ep": 2}}}
    ranks = run_all(tmp_path, 4, jobs, script="mesh_jobs.py")["executed:mesh"]
    planned = mesh_jobs.planned((2, 1, 1, 2), (2, 2))
    for number, rank in enumerate(ranks):
        expected = planned[number // 2]
        assert {name: rank[name] for name in ("pp", "dp")} == {
            name: expected[name] for name in ("pp", "dp")
        }
        assert [tuple(each) for each in rank["done"]] == expected["done"]
    for rank in (0, 2):  # of a stage together: what one sends less, the other sends more
        sent = sum(each["ep"] for each in ranks[rank : rank + 2])
        assert sent == pytest.approx(2 * planned[rank // 2]["ep"], rel=0.35)

    def whole() -> dict[str, int]:
        shape = MeshShape(2, 2, 1)
        job = mesh_jobs.job_of(mesh_jobs.on_meta("mixtral"), shape)
        return mesh_jobs.candidate_of(job, shape, (2, 2)).plan().ranks[0].edges

    edges = in_children([whole], 4)[0]
    assert all(edges[name] > 2 * planned[0]["dp"][name] for name in planned[0]["dp"])


@pytest.mark.slow
def test_a_pipeline_that_is_planned_wraps_and_one_that_is_refused_does_not(tmp_path, monkeypatch):
    """Method: budgets around the least that works; the planner is given this machine's processor
    for a device, and four ranks over gloo wrap with the
    same budgets."""
    monkeypatch.setattr(
        mesh_candidate, "OnPaper", lambda: make_device(torch.device("cpu"), Traffic())
    )
    none = mesh_candidate.Saved(0, 0, 0, 0)  # the engine plans none
    monkeypatch.setattr(mesh_candidate.Candidate, "_activations", lambda *_: none)
    shape, budgets = MeshShape(2, 2, 1), (500_000, 900_000, 1_100_000, 1_400_000, 4_000_000)

    def work() -> list[bool]:
        first, found = mesh_jobs.job_of(mesh_jobs.on_meta(), shape), []
        for memory in budgets:
            config = dataclasses.replace(first.config, device_memory=memory)
            way = mesh_jobs.candidate_of(dataclasses.replace(first, config=config), shape, (2, 2))
            try:
                found.append(bool(way.plan()))
            except CapacityError:
                found.append(False)
        return found

    planned = in_children([work], 4)[0]
    jobs = {
        f"wraps:{number}": {
            "axes": {},
            "config": mesh_jobs.HOMES | {"device_memory": memory, "host_memory": 4 << 30},
        }
        for number, memory in enumerate(budgets)
    }
    ranks = run_all(tmp_path, 4, jobs, script="mesh_jobs.py")
    told = [ranks[f"wraps:{number}"] for number in range(len(planned))]
    assert set(planned) == {True, False}
    for fits, said in zip(planned, told):
        assert all((each == "was taken") == fits for each in said), (planned, told)
