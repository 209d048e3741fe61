"""Admission: parameters that were frozen at the wrap are stepped, or nothing has changed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from inside import parts_of
from models import at_home
from small import RAMP, AtHome, Small

import infinity
from infinity.core.machine.tiers import Tier
from infinity.core.units.flat_param_spec import MOMENTS
from infinity.core.units.handle import set_raw_grad
from infinity.errors import CapacityError, UsageError
from infinity.ext.class_step import admission
from infinity.ext.class_step.admission import admit

FROZEN = 4, 5  # layers that are trained later


def with_frozen(
    home: str = "host", folder: Path | None = None, *, dtype: torch.dtype = torch.float32, **config
) -> AtHome:
    """A Small of which four layers are trained, with momentum."""
    model = Small().to(dtype)
    for index in FROZEN:
        model.layers[index].weight.requires_grad_(False)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(params, lr=1.0, momentum=0.5)
    config = at_home(home, home, folder, **config)
    model, optimizer = infinity.wrap_model(model, optimizer, config)
    return AtHome(model, optimizer, parts_of(model).engine)


class Told:
    """What an admission has asked for."""

    def __init__(self, job: AtHome):
        self.job, self.hooked, self.ended = job, [], []
        engine = job.engine
        self.arguments = (parts_of(engine).job, engine._resources)

    def admit(self, *indices: int, moments: int = 1, then: Any = None) -> None:
        job, resources = self.arguments
        params = [self.job.handles[index].param for index in indices]
        admit(
            job,
            resources,
            params,
            moments_of=lambda _: dict.fromkeys(MOMENTS[:moments], torch.float32),
            hook=self.hooked.append,
            then=then or (lambda: self.ended.append(True)),
        )


def arrays_of(job: AtHome, index: int) -> dict[str, list]:
    """What a layer has at home."""
    flat_param, store = job.handles[index].flat_param, parts_of(job).store
    flat_param.homes.wait()
    return {
        name: store.read(array, 0, 8).float().tolist() for name, array in flat_param.arrays.items()
    }


def charged(job: AtHome) -> list[int]:
    return [account.charged_nbytes for account in parts_of(job).ledger.accounts.values()]


@pytest.mark.parametrize("home", ["device", "host", "nvme"])
def test_a_latecomer_has_the_arrays_of_a_trained_parameter(home, tmp_path):
    """Its moments are zeros, its value is kept; its gradient is tracked. Twin: the one that stays
    frozen has its weight alone."""
    job = with_frozen(home, tmp_path)
    told, (late, frozen) = Told(job), (job.handles[index] for index in FROZEN)
    trained = list(parts_of(job).trained)
    told.admit(4)
    assert late.flat_param.spec.stepped and not frozen.flat_param.spec.stepped
    tiers = parts_of(job).planned.plan.tiers_of(late.unit.index)
    assert {name: array.tier for name, array in late.flat_param.arrays.items()} == {
        name: tiers[name] for name in ("weight", "grad", "exp_avg")
    }
    assert tiers["exp_avg"].value == home
    found = arrays_of(job, 4)
    assert found["weight"] == [1.0] * 8 and found["exp_avg"] == [0.0] * 8
    assert list(frozen.flat_param.arrays) == ["weight"] and frozen.grad is None
    assert len(told.hooked) == 1 and told.hooked[0] is late.param
    assert parts_of(job).trained == [*trained, late]
    assert parts_of(job).gradients.values.handles[-1] is late and told.ended == [True]
    parts_of(job).passes.hook(late.param)
    late.param.requires_grad_(True)
    job.optimizer.param_groups.append({**job.optimizer.param_groups[0], "params": [late.param]})
    for step in (1, 2):
        late.param.grad = torch.stack([RAMP, RAMP])
        job.optimizer.step()
        job.optimizer.zero_grad()
        assert arrays_of(job, 4)["exp_avg"][:4] == (RAMP * (1.0, 1.5)[step - 1]).tolist()


def test_disk_space_that_had_other_bytes_is_zeroed(tmp_path):
    """Method: space is taken, written and freed before."""
    job = with_frozen("nvme", tmp_path)
    store = parts_of(job).store
    old = [store.allocator.allocate_more(Tier.NVME, 1 << 16, "old") for _ in range(2)]
    for array in old:
        store.write(array, 0, torch.full((array.numel,), 7).to(array.dtype), version=0)
        store.allocator.free_more(array)
    Told(job).admit(4, 5)
    for index in FROZEN:
        flat_param = job.handles[index].flat_param
        for name in ("exp_avg", "grad"):
            array = flat_param.arrays[name]
            assert store.read(array, 0, array.numel).count_nonzero() == 0


@pytest.mark.parametrize("master", ["fp32", "split", "none"])
@pytest.mark.parametrize("pieces", [1, 4])
def test_a_master_is_the_weight(master, pieces, monkeypatch):
    """However many pieces it is made in. Twins: a split one has no bits below it, or there is
    none."""
    monkeypatch.setattr(admission, "ZEROED_AT_ONCE", 4096 // pieces)
    job = with_frozen(dtype=torch.bfloat16, master=master)
    parts_of(job).edits.write_value(job.handles[4], RAMP.bfloat16())
    Told(job).admit(4)
    flat_param, store = job.handles[4].flat_param, parts_of(job).store
    found = arrays_of(job, 4)
    assert ("master" in found) == (master != "none") and found["exp_avg"] == [0.0] * 8
    if master == "fp32":
        assert found["master"] == RAMP.tolist() * 2
        array = flat_param.arrays["master"]
        weight = store.read(flat_param.weight, 0, array.numel).float()
        assert torch.equal(store.read(array, 0, array.numel), weight)
    elif master == "split":
        assert found["master"] == [0.0] * 8


def test_parameters_of_a_shard_that_is_stepped_need_no_more():
    """One of a layer of which the other was trained. Twin: its record is made all the same."""
    model = Small(bias=True)
    model.layers[0].bias.requires_grad_(False)
    params = [param for param in model.parameters() if param.requires_grad]
    model, optimizer = infinity.wrap_model(
        model, torch.optim.SGD(params, lr=1.0, momentum=0.5), at_home("host", "host", None)
    )
    job = AtHome(model, optimizer, parts_of(model).engine)
    told, late = Told(job), job.handles[1]
    arrays, is_stepped = dict(late.flat_param.arrays), late.flat_param.spec.stepped
    told.admit(1)
    assert late.grad is not None and late in parts_of(job).trained
    assert not is_stepped or late.flat_param.arrays == arrays


def test_a_parameter_that_is_trained_already_is_hooked_once():
    """An interrupted admission is asked for again. Twin: a new one beside it is."""
    job = with_frozen()
    told = Told(job)
    told.admit(4)
    record = job.handles[4].grad
    told.admit(4, 5)
    assert job.handles[4].grad is record and len(told.hooked) == 2
    assert parts_of(job).trained.count(job.handles[4]) == 1


def test_the_plan_and_its_sizes_have_what_was_added():
    """Twin: those of the units that did not change are as they were."""
    job = with_frozen()
    planned = parts_of(job).planned
    sizes, terms = list(planned.sizes), {t: dict(of) for t, of in planned.plan.terms.items()}
    Told(job).admit(4)
    unit = job.handles[4].unit.index
    for index, (now, before) in enumerate(zip(planned.sizes, sizes, strict=True)):
        assert (now == before) == (index != unit)
        assert [flat.spec.stepped for flat in now.flat_params] == [
            index != job.handles[5].unit.index
        ]
    host, nbytes = planned.plan.terms[Tier.HOST], 4 * 4096
    for name in ("gradients", "optimizer state"):
        assert host[name] - terms[Tier.HOST].get(name, 0) == nbytes
    assert host["weights"] == terms[Tier.HOST]["weights"]
    assert planned.plan.terms[Tier.NVME] == terms[Tier.NVME]


def test_what_runs_has_ended_before_an_admission(tmp_path):
    """Updates, gradients that are on their way to a disk, and copies of weights."""
    job, waits = with_frozen("nvme", tmp_path), []
    job.backward(RAMP)
    first, engine = job.handles[0], job.engine
    first.flat_param.homes.commit(
        first.flat_param.homes.draft(), SimpleNamespace(wait=lambda: waits.append(True))
    )
    engine.gradients.homes.view(first, write=True).fill_(3.0)
    released = []
    release = parts_of(engine).prefetcher.release_all
    parts_of(engine).prefetcher.release_all = lambda units: (released.extend(units), release(units))
    Told(job).admit(4)
    assert waits == [True] and released == list(parts_of(engine).units)
    assert engine.gradients.homes.view(first, write=False).tolist() == [[3.0] * 4] * 2
    parts_of(engine).prefetcher.release_all = release


def test_a_larger_updater_takes_the_place_of_the_one_before(tmp_path, monkeypatch):
    """With the new staging of gradients. Twin: if the slots are as they were it stays."""
    job = with_frozen("nvme", tmp_path)
    resources, used, staged = parts_of(job)._resources, [], []
    updates, homes = parts_of(job).updates, parts_of(job).gradients.homes
    monkeypatch.setattr(updates, "use", lambda updater, *more: used.append((updater, *more)))
    monkeypatch.setattr(homes, "stage_in", lambda pool: staged.append(pool))
    monkeypatch.setattr(resources, "make_updater", lambda: "new")
    for index, is_refitted in ((4, False), (5, True)):
        sizes = []
        monkeypatch.setattr(
            resources, "refit", lambda all_, new=is_refitted: (sizes.append(list(all_)), new)[1]
        )
        Told(job).admit(index)
        assert sizes == [parts_of(job).planned.sizes]
        assert staged.pop() is resources.grad_staging
    plan = parts_of(job).planned.plan
    assert used == [("new", parts_of(job).device, plan.device_slot_nbytes)]


# --- what is refused ---


def refused(job: AtHome, kind: type, message: str, *indices: int) -> None:
    """The admission raises, and nothing has changed."""
    told, before = (
        Told(job),
        (charged(job), list(parts_of(job).trained), parts_of(job).planned.plan),
    )
    with pytest.raises(kind, match=message):
        told.admit(*indices)
    assert told.hooked == [] == told.ended
    assert (charged(job), parts_of(job).trained, parts_of(job).planned.plan) == before
    for index in FROZEN:
        flat_param = job.handles[index].flat_param
        assert list(flat_param.arrays) == ["weight"] and not flat_param.spec.stepped


def test_a_parameter_that_is_not_this_jobs_is_refused():
    """A plain one, and another model's. Twin: its own is taken."""
    job, other = with_frozen(), with_frozen()
    engine = job.engine
    for param in (torch.nn.Parameter(torch.ones(3)), other.handles[4].param):
        shape = rf"\({', '.join(map(str, param.shape))},?\)"
        with pytest.raises(UsageError, match=rf"of shape {shape} is not one that wrap_model"):
            admit(
                parts_of(engine).job,
                engine._resources,
                [job.handles[4].param, param],
                moments_of=lambda _: {"exp_avg": torch.float32},
                hook=lambda param: pytest.fail("hooked"),
                then=lambda: pytest.fail("ended"),
            )
    assert list(job.handles[4].flat_param.arrays) == ["weight"]
    Told(job).admit(4)


def test_a_gradient_from_before_is_refused():
    job = with_frozen()
    set_raw_grad(job.handles[5].param, torch.zeros(2, 4))
    refused(job, UsageError, "layers.5.weight has a gradient from before", 4, 5)
    set_raw_grad(job.handles[5].param, None)
    Told(job).admit(4, 5)


@pytest.mark.parametrize("what", ["ranks", "device"])
def test_several_ranks_and_other_devices_are_refused(what):
    job = with_frozen()
    told = Told(job)
    real, resources = told.arguments
    other = (
        SimpleNamespace(alone=False)
        if what == "ranks"
        else SimpleNamespace(is_host=False, where="cuda")
    )
    fields = {name: getattr(real, name) for name in real.__dataclass_fields__} | {what: other}
    told.arguments = SimpleNamespace(**fields), resources
    with pytest.raises(UsageError, match="several ranks" if what == "ranks" else "on cuda"):
        told.admit(4)
    assert list(job.handles[4].flat_param.arrays) == ["weight"]


@pytest.mark.parametrize("home", ["device", "host", "nvme"])
def test_without_free_memory_it_is_refused(home, tmp_path, monkeypatch):
    """Of all flat params together: the device is the machine's memory here. Twin: with just enough
    it is taken."""
    each = 2 * 4 * 4096  # a gradient or a moment of both; with moments on disk gradients are not
    job, nbytes = with_frozen(home, tmp_path), each if home == "nvme" else 2 * each
    for free in (nbytes - 1, nbytes):
        asked = []
        monkeypatch.setattr(
            admission,
            "measured_free",
            lambda tier, *more, free=free: (asked.append(tier), free)[1],
        )
        if free < nbytes:
            refused(
                job, CapacityError, f"in the same arrays, need {nbytes >> 10}.0 KiB on", *FROZEN
            )
        else:
            Told(job).admit(*FROZEN)
            assert set(asked) == {Tier.HOST, *[Tier.NVME] * (home == "nvme")}


def fail(*args: Any) -> None:
    raise MemoryError("no room")


@pytest.mark.parametrize("fails", ["second flat param", "slots"])
def test_what_was_allocated_before_a_failure_is_freed(fails, monkeypatch):
    """Twin: the next admission has its room."""
    job = with_frozen()
    resources, arrays, freed = parts_of(job)._resources, parts_of(job).store.allocator, []
    free = arrays.free_more
    with monkeypatch.context() as patched:
        patched.setattr(arrays, "free_more", lambda array: (freed.append(array), free(array)))
        if fails == "slots":
            patched.setattr(resources, "refit", fail)
        else:
            homes = job.handles[5].flat_param.homes
            patched.setattr(admission, "allocate_missing", guarded(homes))
        refused(job, MemoryError, "no room", *FROZEN)
    assert len(freed) == (4 if fails == "slots" else 2)  # a gradient and a moment of each
    Told(job).admit(*FROZEN)


def guarded(homes: Any) -> Any:
    """Lets one flat param's allocation fail."""
    allocate = admission.allocate_missing
    return lambda store, of, *args: (fail if of is homes else allocate)(store, of, *args)


def test_an_interrupt_in_the_middle_of_the_change_does_not_undo_it():
    """It is made again until it is whole. Method: the last part of it is cut short once."""
    job, ends = with_frozen(), []

    def then() -> None:
        ends.append(True)
        if len(ends) == 1:
            raise KeyboardInterrupt

    told = Told(job)
    with pytest.raises(KeyboardInterrupt):
        told.admit(4, then=then)
    assert len(ends) == 2 and len(told.hooked) == 1
    assert parts_of(job).trained.count(job.handles[4]) == 1
    assert "exp_avg" in job.handles[4].flat_param.arrays
