"""Room for shadows: it is planned, a lack of it is said at once, and nothing is left in it.

Words used here: see `test_speculation` (shadow).
"""

from __future__ import annotations

import copy
import gc
import os
import re

import pytest
from inside import parts_of
from models import (
    at_home,
    differing,
    environment,
    least_host_memory,
    leftovers,
    seeded,
)
from speculation_cases import (
    FORMS,
    HOMES,
    SEED,
    Job,
    Odd,
    adamw,
    backwards,
    both_ends,
    tiny,
)
from torch import nn

import infinity
from infinity import native
from infinity.core.machine.sizes import parse_nbytes
from infinity.core.machine.tiers import Tier


@pytest.mark.parametrize("form", ["fp32", "int8"])
@both_ends
def test_no_room_is_said_before_anything_changed(home, form, tmp_path):
    """Method: a budget that just holds the model; the error names speculate and how much is
    missing, which then is enough."""
    name, tier = {"host": ("host_memory", "host"), "nvme": ("nvme_capacity", "nvme")}[home]
    model, setup = seeded(SEED, Odd), HOMES[home] | FORMS[form]
    least = infinity.stats(Job(tmp_path, False, **setup).model).tiers[tier].planned_nbytes
    if home == "host":
        least = (
            infinity.stats(Job(tmp_path, False, host_memory="least", **setup).model)
            .tiers[tier]
            .planned_nbytes
        )
    config = at_home(home, home, tmp_path / "swap", speculate=True, **{name: least}, **FORMS[form])
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(infinity.CapacityError, match="speculate=True") as told:
        infinity.wrap_model(model, adamw(model), config)
    assert differing(dict(model.state_dict()), before) == [] and not leftovers(tmp_path / "swap")
    more = parse_nbytes(re.search(r"\((.*?) for the smallest", str(told.value))[1], name)
    assert parts_of(Job(tmp_path, True, **{name: least + more}, **setup)).planned.plan.shadowed


@pytest.mark.parametrize("home", ["state on nvme", "weights on nvme", "cached"])
def test_what_was_enough_stays_enough_with_more_memory(home, tmp_path):
    """Method: host memory from the least in small steps; once there is room for shadows there
    always is."""
    setup = {key: value for key, value in HOMES[home].items() if key == "home"}
    model = tiny()["build"]()
    (tmp_path / "swap").mkdir()
    least = least_host_memory(
        model, adamw(model), at_home(*setup["home"], tmp_path / "swap", speculate=True)
    )
    rooms = []
    for more in range(0, 2 * 2**20, 2**17):
        try:
            rooms.append(
                bool(
                    parts_of(
                        Job(tmp_path, True, host_memory=least + more, **setup, **tiny())
                    ).planned.plan.shadowed
                )
            )
        except infinity.CapacityError:
            rooms.append(False)
    assert rooms[-1] and rooms == sorted(rooms)


def test_checksums_of_shadows_are_planned(tmp_path):
    """Method: add up 4 bytes for each block on disk that has a checksum; the plan has at least as
    many."""
    job = Job(
        tmp_path,
        True,
        home=("nvme", "nvme"),
        build=lambda: nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))),
    )
    arrays = [
        array
        for flat in job.flat_params
        for array in (*flat.arrays.values(), *flat.homes.beside.values())
    ]
    needed = sum(
        4 * -(-array.nbytes // native.CHECKSUM_NBYTES)
        for array in arrays
        if array.tier is Tier.NVME
    )
    assert (
        len(parts_of(job).planned.plan.shadowed) == 8
        and needed <= parts_of(job).planned.plan.terms[Tier.HOST]["checksums"]
    )


@pytest.mark.parametrize("home", ["host", "nvme", "cached"])
def test_nothing_is_left_of_shadows_under_way(home, tmp_path):
    """Method: with shadows whose transfers are late, unwrap (the weights are the last step's, the
    gradients there) or drop the model; folder, descriptors and threads are as before."""

    def count() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    Job(tmp_path, True)
    before, found = count(), []
    with environment(INFINITY_FAULTS="seed=1,delay=1.0,delay_seconds=0.005"):
        for speculate in (False, True, True):
            job = Job(tmp_path, speculate, **HOMES[home])
            backwards(1)(job)
            job.backward(1)
            assert bool(job.count()) == speculate
            if len(found) < 2:
                model, optimizer = infinity.unwrap_model(job.model, job.optimizer)
                optimizer.step()
                found.append({name: value.clone() for name, value in model.state_dict().items()})
                del model, optimizer
            del job
    assert differing(*found) == [] and leftovers(tmp_path / "swap") == [] and count() == before
