"""Cluster: machine files, gathers in a window, and how a prediction grows with nodes. Bytes beside
measured ones: `distributed/test_lockstep.py`."""

from __future__ import annotations

import dataclasses

import pytest
from torch import float32

import infinity
from infinity import native
from infinity.core.machine.tiers import Tier
from infinity.core.plan.memory_plan import MemoryPlan
from infinity.core.plan.unit_sizes import FlatParamSize, UnitSize
from infinity.core.units.flat_param_spec import ARRAYS, FlatParamSpec
from infinity.tools.plan.cluster import gathers_of, predict_cluster, timeline_of
from infinity.tools.plan.machine_file import MACHINES, Machine

SPEC = FlatParamSpec(
    wrapped_dtype=float32,
    dtype=float32,
    master=native.Master.OWN,
    grad_dtype=float32,
    moment_dtype=float32,
    moments=("exp_avg", "exp_avg_sq"),
    stepped=True,
)
HOST = dict.fromkeys(ARRAYS, Tier.HOST)


def units_of(count: int, ranks: int = 2, numel: int = 1 << 20) -> list[UnitSize]:
    return [
        UnitSize(f"unit {index}", (FlatParamSize(SPEC, numel, ranks),)) for index in range(count)
    ]


def plan_of(window: int, tiers: dict = HOST) -> MemoryPlan:
    return MemoryPlan(tiers, 1, 0, 0, 0, 1, 0, 0, window)


@pytest.mark.parametrize(
    ("window", "gathers"),
    [
        (2, [1, 2, 2, 2, 2, 2, 1, 1]),
        (3, [1, 2, 2, 2, 2, 1, 1, 1]),
        (7, [1, 1, 1, 1, 1, 1, 1, 1]),
        (100, [1] * 8),
    ],
)
def test_gathers_of_a_window(window, gathers):
    """What is still there when the backward begins is not gathered again; the first unit's backward
    needs no weights."""
    units = units_of(8)
    assert gathers_of(plan_of(window * units[0].weight_nbytes), units) == gathers


def test_machine_files_that_come_along_are_whole_and_name_sources():
    for path in MACHINES.glob("*.toml"):
        machine = Machine.read(path.stem)
        assert machine.sources and machine.devices >= 1 and machine.device_memory > 0
    assert Machine.read("dgx-h100").devices == Machine.read("dgx-h100.toml").devices == 8


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (
            lambda text: text.replace("flops = 989e12", ""),
            r"\[devices\] flops = None must be a finite number above 0",
        ),
        (
            lambda text: text.replace("latency = 10e-6", "latency = -1"),
            r"\[links\] latency = -1 must be",
        ),
        (lambda text: text.replace("count = 8", "count = 2.5"), "must be a whole number"),
        (lambda text: text + "[", "dgx.toml"),
        (lambda text: text.replace('memory = "80GB"', 'memory = "many"'), "many"),
        (lambda text: text.replace("[links]", "[lines]"), r"\[links\] device = None must be"),
    ],
)
def test_machine_files_that_lack_something_are_refused(tmp_path, harm, said):
    path = tmp_path / "dgx.toml"
    path.write_text(harm((MACHINES / "dgx-h100.toml").read_text()))
    with pytest.raises(infinity.ConfigError, match=said):
        Machine.read(str(path))


def test_a_machine_that_is_not_there_is_told_with_those_that_are(tmp_path):
    with pytest.raises(infinity.ConfigError, match="dgx-h100"):
        Machine.read(str(tmp_path / "none.toml"))


def test_nodes_share_the_state_and_pass_more():
    """Per rank: state and its traffic shrink with the ranks, what passes between them nears the
    whole weights, and one node needs no network."""
    machine = Machine.read("dgx-h100")
    one, four = (
        predict_cluster(
            plan_of(1 << 40),
            units_of(16, nodes * 8, 1 << 26),
            machine,
            nodes,
            compute=1e15 / machine.device_flops,
        )
        for nodes in (1, 4)
    )
    assert four.ranks == 4 * one.ranks and four.edges["optimizer"] * 4 == one.edges["optimizer"]
    assert (
        one.edges["all-gather"] == 16 * (7 << 26) // 8 * 4
        and four.edges["all-gather"] == 16 * (31 << 26) // 32 * 4
    )
    assert one.seconds["network"] == 0 < four.seconds["network"]
    assert one.step_seconds >= max(one.seconds.values()) and one.bottleneck == "compute"


def test_state_on_the_device_is_stepped_at_the_devices_rate(tmp_path):
    """Method: all state on the devices: the host's memory and links move nothing, and the
    optimizer's time is its bytes over the devices' rate. Twins: a state on the host, which costs
    the host's, and a machine file without the rate, which says so."""
    machine, units = Machine.read("dgx-h100"), units_of(4, 8, 1 << 26)
    device = dict.fromkeys(HOST, Tier.DEVICE)
    found = predict_cluster(plan_of(1 << 40, device), units, machine, 1, compute=0.0)
    nbytes = sum(
        flat.nbytes("grad") + 2 * sum(map(flat.nbytes, ("weight", "exp_avg", "exp_avg_sq")))
        for unit in units
        for flat in unit.flat_params
    )
    assert found.edges["optimizer"] == nbytes and found.seconds[
        "optimizer on device"
    ] == pytest.approx(nbytes / machine.device_bandwidth)
    assert (
        found.seconds["optimizer"] == found.seconds["host's links"] == 0
        and found.edges["host->device"] == found.edges["device->host"] == 0
    )
    busy = predict_cluster(
        plan_of(1 << 40, device), units, machine, 1, compute=1e15 / machine.device_flops
    )
    assert busy.step_seconds == pytest.approx(
        sum(busy.seconds[what] for what in ("compute", "optimizer on device", "meetings"))
    )
    there = predict_cluster(plan_of(1 << 40, HOST), units, machine, 1, compute=0.0)
    assert there.seconds["optimizer on device"] == 0 and there.seconds[
        "optimizer"
    ] == pytest.approx(8 * nbytes / machine.host_bandwidth)
    mixed = predict_cluster(
        plan_of(1 << 40, HOST | {"exp_avg": Tier.DEVICE}), units, machine, 1, compute=0.0
    )
    assert (
        0 < mixed.seconds["optimizer on device"] < found.seconds["optimizer on device"]
        and mixed.edges["optimizer"] == nbytes
    )
    path = tmp_path / "old.toml"
    path.write_text((MACHINES / "dgx-h100.toml").read_text().replace("bandwidth = 3.0e12", ""))
    old = predict_cluster(plan_of(1 << 40, device), units, Machine.read(str(path)), 1, compute=0.0)
    assert (
        old.seconds["optimizer on device"] == 0
        and "no bandwidth in [devices]" in old.assumptions[-1]
    )
    alone = predict_cluster(plan_of(1 << 40, device), units_of(4, 1), machine, 1, compute=0.0)
    assert min(alone.edges.values()) == 0


def test_state_on_the_host_that_the_device_steps_costs_the_device_and_the_link():
    """Method: weights on the device, moments and gradients on the host, slots of a device that
    alone can access the weights. The host's memory passes nothing; moments go up and down, a
    gradient up again. Twin: without slots the processor steps what is on the host."""
    machine, units = Machine.read("dgx-h100"), units_of(4, 1, 1 << 26)
    tiers = HOST | {"weight": Tier.DEVICE}
    plan = dataclasses.replace(plan_of(1 << 40, tiers), device_slot_nbytes=1)
    found = predict_cluster(plan, units, machine, 1, compute=0.0)
    of = {name: sum(u.flat_params[0].nbytes(name) for u in units) for name in ARRAYS}
    moments = of["exp_avg"] + of["exp_avg_sq"]
    assert found.seconds["optimizer"] == 0
    assert found.seconds["optimizer on device"] == pytest.approx(
        (of["grad"] + 2 * (moments + of["weight"])) / machine.device_bandwidth
    )
    assert found.edges["host->device"] == moments + of["grad"]
    assert found.edges["device->host"] == moments + of["grad"]
    twin = predict_cluster(plan_of(1 << 40, tiers), units, machine, 1, compute=0.0)
    assert twin.seconds["optimizer"] > 0 and twin.edges["host->device"] == 0
    slow = dataclasses.replace(machine, host_link=1e9)
    jobs = timeline_of(plan, units, slow, compute=0.0).jobs
    steps = sum(job.seconds for job in jobs if job.queue == "optimizer on device")
    assert steps == pytest.approx((moments + of["grad"]) / 1e9)


def test_the_slowest_resource_decides():
    """Method: state on disk, and hardly any compute. The disks' time is their bytes over their
    rates."""
    machine = Machine.read("dgx-h100")
    tiers = HOST | {"exp_avg": Tier.NVME, "exp_avg_sq": Tier.NVME}
    units = units_of(4, 8, 1 << 26)
    found = predict_cluster(plan_of(1 << 40, tiers), units, machine, 1, compute=0.0)
    assert found.bottleneck == "disks"
    nbytes = (
        2
        * sum(flat.nbytes("exp_avg") for unit in units for flat in unit.flat_params)
        * machine.devices
    )
    assert found.seconds["disks"] == pytest.approx(
        nbytes / (8 * machine.disk_read) + nbytes / (8 * machine.disk_write)
    )


def test_one_rank_waits_for_slow_checksums():
    """They pass the same bytes as the disks. Twin: fast ones."""
    fast = Machine.read("h200")
    plan, units = plan_of(1 << 40, dict.fromkeys(HOST, Tier.NVME)), units_of(4, 1)
    slow = dataclasses.replace(fast, checksum_rate=fast.disk_read / 10)
    seconds = [timeline_of(plan, units, machine, compute=0.0).seconds for machine in (fast, slow)]
    assert seconds[1] > 5 * seconds[0]


def test_units_at_home_on_the_device_take_no_window():
    """Nor are they counted as gathered."""
    units = units_of(4, 1)
    placed = {name: {0: Tier.DEVICE, 2: Tier.DEVICE} for name in HOST}
    plan = dataclasses.replace(plan_of(units[0].weight_nbytes), placed=placed)
    assert gathers_of(plan, units) == [0, 2, 0, 1]


def test_the_lookup_of_an_embedding_computes_nothing():
    """Twin: it is also the head, whose compute is at the forward's end."""
    machine, units = Machine.read("h200"), units_of(4, 1)
    for name in ("lookup", "tied"):
        found = timeline_of(
            plan_of(1 << 40),
            units,
            machine,
            compute=1e15 / machine.device_flops,
            **{name: "unit 0"},
        )
        first = next(job for job in found.jobs if job.unit == 0 and job.kind == "forward")
        assert first.seconds == 0.0
        computes = sum(job.seconds for job in found.jobs if job.queue == "compute")
        assert computes == pytest.approx(1e15 / machine.device_flops)
