"""What several ranks, staging and shared memory add to a plan, in bytes counted by hand; and what a
forward holds at once."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
from deleted import needs
from test_plan import MIB, config_of, equal_units, plan_of, unit
from torch import nn

from infinity.config import Config
from infinity.core.machine.device import Device
from infinity.core.machine.tiers import Tier
from infinity.core.machine.traffic import Traffic
from infinity.core.plan.budgets import Budgets
from infinity.core.plan.memory_plan import LADDER, MemoryPlan
from infinity.core.plan.step_traffic import traffic
from infinity.core.plan.unit_sizes import bucket_numel
from infinity.core.wrap.described_model import read_model
from infinity.core.wrap.partition import Group, held_nbytes, partition
from infinity.errors import CapacityError

NUMEL = MIB  # elements of a unit: 2 MiB of bf16 weights, as much of gradients


def sharded(
    count: int,
    *,
    shards: int,
    whole_grad: bool = False,
    node_size: int = 0,
    numel: int = NUMEL,
) -> list:
    """Units of a job of some ranks."""
    units = equal_units(count, numel)
    return [
        dataclasses.replace(
            u,
            flat_params=tuple(
                dataclasses.replace(s, shards=shards, whole_grad=whole_grad, node_size=node_size)
                for s in u.flat_params
            ),
        )
        for u in units
    ]


def test_in_a_pass_of_several_micro_batches_all_gradients_wait_to_be_averaged(tmp_path):
    """Method: the least budget of ranks whose pass uses weights again, as a pipeline's does, holds
    every whole gradient; a byte less is refused. Twin: else it holds two, and what fills."""
    config = config_of(tmp_path, params="host", optimizer="host", device_memory=1)
    least = {}
    for reuses in (True, False):
        with pytest.raises(CapacityError) as told:
            plan_of(sharded(8, shards=4), config, held=2 * MIB, reuses=reuses)
        least[reuses] = told.value.needed["device_memory"]
    assert least[True] - least[False] == (8 - 3) * 2 * MIB
    for budget, fits in ((least[True], True), (least[True] - 1, False)):
        given = dataclasses.replace(config, device_memory=budget)
        with (
            contextlib.nullcontext()
            if fits
            else pytest.raises(CapacityError, match="averaged 16.0")
        ):
            plan = plan_of(sharded(8, shards=4), given, held=2 * MIB, reuses=True)
            assert plan.terms[Tier.DEVICE]["gradients to be averaged"] == 8 * 2 * MIB


def test_ranks_add_gradients_to_be_averaged_and_those_of_others(tmp_path):
    """Two whole gradients beside what is held while they fill, and two more that come from the
    others."""
    plan = plan_of(
        sharded(4, shards=4), config_of(tmp_path, params="host", optimizer="host"), held=2 * MIB
    )
    device = plan.terms[Tier.DEVICE]
    assert device["gradients to be averaged"] == 2 * 2 * MIB + 2 * MIB
    assert device["gradients of other ranks"] == 2 * 2 * MIB
    assert "node shards" not in device
    assert (
        "gradients of other ranks"
        not in plan_of(
            equal_units(4, NUMEL), config_of(tmp_path, params="host", optimizer="host")
        ).terms[Tier.DEVICE]
    )


def test_a_budget_without_room_for_whole_gradients_has_two_buckets(tmp_path):
    """One whole gradient waits beside what is held while they fill; two buckets are being reduced.
    Twins: a budget that has room, and none."""
    whole = 64 * MIB
    units, homes = sharded(4, shards=4, numel=whole // 2), {"params": "host", "optimizer": "host"}
    for budget, in_buckets in (("300MiB", True), ("520MiB", False), (None, False)):
        config = config_of(tmp_path, **homes, device_memory=budget)
        plan = plan_of(units, config, held=whole)
        device = plan.terms[Tier.DEVICE]
        assert plan.in_buckets == in_buckets
        assert device["gradients to be averaged"] == (2 if in_buckets else 3) * whole
        assert device["gradients of other ranks"] == (16 * MIB if in_buckets else 2 * whole)


@pytest.mark.parametrize(("shards", "itemsize"), [(2, 2), (2, 4), (4, 2), (512, 2)])
def test_two_buckets_and_what_comes_for_them_are_two_pieces(shards, itemsize):
    """Given and received of two buckets, and a sum in fp32. Twin: twice as many elements are
    more."""
    needed = lambda numel: 4 * shards * numel * itemsize + 4 * numel
    numel = bucket_numel(shards, itemsize)
    assert needed(numel) <= 2 * 8 * MIB < needed(2 * numel) and numel % 64 == 0


def test_whole_gradients_at_home_wait_for_nothing_on_the_device(tmp_path):
    plan = plan_of(
        sharded(4, shards=4, whole_grad=True),
        config_of(tmp_path, params="host", optimizer="host", shard="optimizer"),
    )
    assert "gradients to be averaged" not in plan.terms[Tier.DEVICE]
    assert (
        plan.terms[Tier.DEVICE]["gradients of other ranks"] == 2 * 2 * MIB
    )  # the host's own memory is the device here


@pytest.mark.parametrize("times", [1, 2, 3])
def test_what_autograd_adds_up_is_planned_as_far_as_averages_leave_no_room(tmp_path, times):
    """Counts one to three whole gradients of a unit, for ranks that keep whole gradients at home:
    two of other ranks are not there yet. Twin: ranks that add them up on the device have room."""

    def planned(**of_ranks) -> int:
        units = [
            dataclasses.replace(each, autograd_nbytes=times * 2 * MIB)
            for each in sharded(4, shards=4, **of_ranks)
        ]
        shard = "optimizer" if of_ranks else "parameters"
        config = config_of(tmp_path, params="host", optimizer="host", shard=shard)
        terms = plan_of(units, config, held=2 * MIB).terms[Tier.DEVICE]
        return terms.get("gradients in the backward", 0)

    assert planned(whole_grad=True) == max(0, times - 2) * 2 * MIB
    assert planned() == 0


@needs("ext/dtensor")
def test_a_machines_ranks_keep_their_part_of_every_weight(tmp_path):
    plan = plan_of(
        sharded(4, shards=8, node_size=4),
        config_of(tmp_path, params="nvme", optimizer="nvme", shard_in_node=True),
    )
    assert plan.terms[Tier.DEVICE]["node shards"] == 4 * 2 * MIB // 4


def test_activations_on_the_disk_are_staged_in_eight_slots(tmp_path):
    def staged(**values) -> tuple[int, MemoryPlan]:
        plan = plan_of(
            equal_units(2, NUMEL), config_of(tmp_path, params="host", optimizer="host", **values)
        )
        return plan.terms[Tier.HOST].get("staged activations", 0), plan

    nbytes, plan = staged(activations="nvme")
    assert nbytes == plan.activation_staging_nbytes == 8 * LADDER[0].service_nbytes
    assert staged()[0] == 0


@pytest.mark.parametrize("passes", [1, 3])
def test_a_step_moves_what_the_arrays_on_the_disk_ask_for(tmp_path, passes):
    """Of each pass the weights come twice and a gradient goes; what is added to is read, which the
    first is not, and once more by the step."""
    units = equal_units(3, NUMEL)
    plan = plan_of(units, config_of(tmp_path, params="nvme", optimizer="nvme"))
    plan = dataclasses.replace(
        plan,
        cached={},
        tiers=plan.tiers
        | dict.fromkeys(("weight", "grad", "master", "exp_avg", "exp_avg_sq"), Tier.NVME),
    )
    edges, weight, state = (
        traffic(plan, units, passes=passes),
        3 * 2 * MIB,
        3 * (2 + 2 + 4 + 4) * MIB,
    )
    assert all(plan.tiers_of(i)["grad"] is Tier.NVME for i in range(3))
    assert edges["host->device"] == 2 * passes * weight
    assert edges["device->host"] == passes * weight
    assert edges["nvme->host"] == 2 * passes * weight + passes * weight + state
    assert edges["host->nvme"] == passes * weight + state


def test_one_memory_is_counted_once(tmp_path):
    """If the processor computes and no ``host_memory`` is given, what the device and the host
    hold together has to fit, also where the device has a budget. Twin: both budgets are two
    memories, as they are given."""
    plan = plan_of(equal_units(4, NUMEL), config_of(tmp_path, params="host", optimizer="host"))
    device, host = (plan.planned_nbytes(tier) for tier in (Tier.DEVICE, Tier.HOST))
    assert device > 10 and host > device

    def over(free: int, **given) -> dict[Tier, int]:
        config = Config(nvme_paths=[str(tmp_path)], nvme_capacity="1TiB", **given)
        return Budgets(
            config, {Tier.DEVICE: free, Tier.HOST: free}, Device(torch.device("cpu"), Traffic())
        ).over(plan)

    assert over(device + host) == {}
    assert over(device + host - 1) == {Tier.HOST: 1}
    assert over(host) == {Tier.HOST: device}
    assert over(host - 5) == {Tier.HOST: device + 5}
    assert over(device - 3) == {Tier.DEVICE: 3, Tier.HOST: host + 3}
    assert over(device + host, device_memory=device) == {}
    assert over(device + host - 1, device_memory=device) == {Tier.HOST: 1}
    assert over(host, device_memory=device - 7, host_memory=host) == {Tier.DEVICE: 7}
    assert over(2 * host, device_memory=device - 7) == {Tier.DEVICE: 7}


# --- groups, and what is held at once ---


def test_what_a_forward_holds_at_once():
    """A nested forward holds its parents' units too; a unit of several owners may be held from its
    first use to its last."""
    outer = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    first, inner = outer[0], outer[1]
    groups = [
        Group("outer", [], [outer]),
        Group("first", [], [first]),
        Group("inner", [], [inner]),
        Group("a", [], [inner[0]]),
        Group("b", [], [inner[1]]),
        Group("tied", [], [first, inner[1]]),
    ]
    nbytes = {
        id(group): size
        for group, size in zip(groups, (1, 10, 100, 1000, 2000, 30_000), strict=True)
    }
    # The deepest way is outer, inner, b, with what is tied on it; and the tied unit once more for
    # its other use.
    assert held_nbytes(read_model(outer), groups, nbytes) == 1 + 100 + 2000 + 30_000 + 30_000
    nbytes[id(groups[3])] = 50_000
    assert held_nbytes(read_model(outer), groups, nbytes) == 1 + 100 + 50_000 + 30_000


def test_small_modules_share_a_unit_up_to_a_size():
    """256 KiB is small; together they are a unit of at most 1 MiB; what is larger is one of its
    own."""
    kib = 1024 // 4  # elements of fp32
    model = nn.Module()
    for name, size in (("a", 256), ("b", 255), ("c", 257), ("d", 256), ("e", 256), ("f", 2)):
        child = nn.Module()
        child.weight = nn.Parameter(torch.empty(size * kib))
        setattr(model, name, child)
    groups = {
        group.name: sum(p.numel() for p in group.params) // kib
        for group in partition(read_model(model), "auto")
    }
    assert groups == {"c": 257, "rest:a": 256 + 255 + 256 + 256, "rest:f": 2}


def test_a_unit_of_one_kind_is_as_large_as_its_arrays(tmp_path):
    """The twin: one array more is told by its term."""
    with_moments = plan_of(
        [unit("u", ("split", NUMEL))], config_of(tmp_path, params="host", optimizer="host")
    )
    frozen = plan_of(
        [unit("u", ("frozen", NUMEL))], config_of(tmp_path, params="host", optimizer="host")
    )
    assert with_moments.terms[Tier.HOST]["optimizer state"] == (2 + 4 + 4) * MIB
    assert "optimizer state" not in frozen.terms[Tier.HOST]
