"""Averages of weights at home: torch's bits, in checkpoints, and in the place of the weights for an
evaluation.

Words used here: **plain** and **wrapped** as in `runs.py`; **torch's** is an AveragedModel beside
the plain model.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from models import at_home, differing, loss_of, tokens, transformer
from torch import nn
from torch.optim import swa_utils

import infinity
from infinity import native
from infinity.core.run.job import Job
from infinity.core.units.kept import Kept, KeptArrays
from infinity.ext.averages import weight_average
from infinity.ext.averages.weight_average import WeightAverage

SEED = 180
HOMES = ["device", "hostile"]
KINDS = {
    "ema": (
        lambda model: infinity.ema(model, 0.9),
        lambda: {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
    ),
    "swa": (infinity.swa, dict),
}


def pair(
    home: str, folder: Path, dtype: torch.dtype = torch.float32, **more: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = transformer(SEED, dropout=0.0, width=32, blocks=3).to(dtype)
    model.positions.requires_grad_(False)  # one that no step changes
    optimizer = torch.optim.AdamW(
        [param for param in model.parameters() if param.requires_grad], lr=1e-2, fused=True
    )
    return (
        infinity.wrap_model(model, optimizer, at_home(home, home, folder, **more))
        if home
        else (model, optimizer)
    )


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    loss_of(model, tokens(SEED + number)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("kind", KINDS)
def test_an_average_has_the_bits_of_torchs(kind, home, tmp_path):
    """Also: evaluated in `applied`, saved from there, and the weights are themselves again behind
    it."""
    ours, theirs = KINDS[kind]
    model, optimizer = pair(home, tmp_path)
    plain, plain_optimizer = pair("", tmp_path)
    average, expected = ours(model), swa_utils.AveragedModel(plain, **theirs())
    for number in range(4):
        step(model, optimizer, number), step(plain, plain_optimizer, number)
        average.update(), expected.update_parameters(plain)
    assert differing(average.state_dict(), expected.module.state_dict()) == []
    assert differing(average.state_dict(), model.state_dict()) != []
    with torch.no_grad(), average.applied():
        assert torch.equal(model(tokens(1)), expected(tokens(1)))
        assert differing(model.state_dict(), expected.module.state_dict()) == []
    with torch.no_grad():
        assert torch.equal(model(tokens(1)), plain(tokens(1)))
    step(model, optimizer, 4), step(plain, plain_optimizer, 4)
    assert differing(model.state_dict(), plain.state_dict()) == []


@pytest.mark.parametrize("home", [pytest.param("device", marks=pytest.mark.slow), "nvme"])
def test_the_average_of_16_bit_weights_is_of_their_masters(home, tmp_path):
    """Method: bf16 with split masters; after each step the masters, from the optimizer's state
    dict, are averaged by torch in fp32. Exchanged twice, weights, masters and the steps after are
    as if nothing had been."""
    model, optimizer = pair(home, tmp_path, torch.bfloat16)
    other, other_optimizer = pair(home, tmp_path, torch.bfloat16)
    average, expected = infinity.ema(model, 0.75), {}
    names = {param: name for name, param in model.named_parameters()}
    for number in range(3):
        step(model, optimizer, number), step(other, other_optimizer, number)
        average.update()
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for index, state in optimizer.state_dict()["state"].items():
            name, master = names[params[index]], state["master"]
            expected[name] = (
                master.clone() if name not in expected else expected[name].lerp_(master, 0.25)
            )
    found = average.state_dict()
    assert differing({name: found[name] for name in expected}, expected) == []
    with average.applied():
        assert torch.equal(
            model.state_dict()["norm.weight"], expected["norm.weight"].to(torch.bfloat16)
        )
    step(model, optimizer, 3), step(other, other_optimizer, 3)
    assert differing(model.state_dict(), other.state_dict()) == []
    states = optimizer.state_dict()["state"], other_optimizer.state_dict()["state"]
    assert [index for index, state in states[0].items() if differing(state, states[1][index])] == []


def test_an_average_is_in_checkpoints(tmp_path):
    """Method: two updates, a checkpoint, two more; from the checkpoint again, at another home. A
    model without an average loads it all the same, and one that has had no update begins anew."""
    model, optimizer = pair("nvme", tmp_path, torch.bfloat16)
    average = infinity.ema(model, 0.9)
    for number in range(4):
        if number == 2:
            infinity.save_checkpoint(tmp_path / "saved", model, optimizer)
        step(model, optimizer, number)
        average.update()
    resumed, its = pair("host", tmp_path, torch.bfloat16)
    again = infinity.ema(resumed, 0.9)
    infinity.load_checkpoint(tmp_path / "saved", resumed, its)
    assert again.updates == 2
    for number in (2, 3):
        step(resumed, its, number)
        again.update()
    assert differing(again.state_dict(), average.state_dict()) == []
    without, its = pair("host", tmp_path, torch.bfloat16)
    infinity.load_checkpoint(tmp_path / "saved", without, its)
    infinity.save_checkpoint(tmp_path / "without", without, its)
    infinity.load_checkpoint(tmp_path / "without", resumed, None)
    assert again.updates == 0


def test_a_state_dict_goes_round(tmp_path):
    model, optimizer = pair("nvme", tmp_path)
    average = infinity.ema(model, 0.9)
    step(model, optimizer, 0)
    average.update()
    saved = {name: value.clone() for name, value in average.state_dict().items()}
    step(model, optimizer, 1)
    average.update()
    average.load_state_dict(saved)
    assert differing(average.state_dict(), saved) == [] or set(
        differing(average.state_dict(), saved)
    ) <= {"positions"}
    with pytest.raises(infinity.UsageError, match="missing"):
        average.load_state_dict({})
    plain, _ = pair("", tmp_path)
    plain.load_state_dict(average.state_dict())


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_load_that_is_cut_short_is_carried_to_its_end(when, tmp_path, monkeypatch):
    """Method: Ctrl-C comes before or after the third parameter's write; the next use has all of
    what was loaded, and its count."""

    model, optimizer = pair("nvme", tmp_path)
    average = infinity.ema(model, 0.9)
    step(model, optimizer, 0)
    average.update()
    saved = {name: value + 1 for name, value in average.state_dict().items()}
    write, calls = Kept.write_own, []

    def interrupted(self, handle, values):
        calls.append(handle)
        if len(calls) == 3 and when == "before":
            raise KeyboardInterrupt
        write(self, handle, values)
        if len(calls) == 3 and when == "after":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Kept, "write_own", interrupted)
        with pytest.raises(KeyboardInterrupt):
            average.load_state_dict(saved, updates=7)
    found = average.state_dict()
    averaged = average._handles()
    assert (
        all(torch.equal(found[name], saved[name]) for name in averaged)
        and len(averaged) > 5
        and average.updates == 7
    )


@pytest.mark.parametrize("change", ["update", "exchange"])
def test_a_change_that_is_cut_short_is_carried_to_its_end(change, tmp_path, monkeypatch):
    """Method: the write of the fifth piece raises, once before and once after the bytes went out;
    going on gives the bits of a run in which nothing was raised."""
    ends = []
    for when in ("never", "before", "after"):
        model, optimizer = pair("nvme", tmp_path)
        average = infinity.ema(model, 0.9)
        for number in range(2):
            step(model, optimizer, number)
            average.update()
        write, calls = KeptArrays.write, []

        def interrupted(self, piece, parts, write=write, calls=calls, when=when):
            calls.append(piece)
            if len(calls) == 5 and when == "before":
                raise KeyboardInterrupt
            write(self, piece, parts)
            if len(calls) == 5 and when == "after":
                raise KeyboardInterrupt

        monkeypatch.setattr(KeptArrays, "write", interrupted)
        try:
            if change == "update":
                average.update()
            else:
                average._average.is_wanted = True
                average._exchange()
        except KeyboardInterrupt:
            pass
        monkeypatch.setattr(KeptArrays, "write", write)
        with torch.no_grad():
            seen = model(tokens(3))
        if change == "exchange":
            assert average._average.is_exchanged
            average._average.is_wanted = False
            average._bring_back()
        step(model, optimizer, 2)
        average.update()
        ends.append((seen, average.state_dict(), average.updates))
    for seen, state, updates in ends[1:]:
        assert torch.equal(seen, ends[0][0]) and updates == ends[0][2]
        assert differing(state, ends[0][1]) == []


@pytest.mark.parametrize("way", ["in", "out"])
def test_applied_ends_with_the_weights_whatever_cuts_it_short(way, tmp_path, monkeypatch):
    """Method: Ctrl-C at the fifth piece of the exchange at the block's begin, or at its end. Behind
    it the model has its weights, and another `applied` the averages. Without it the block is
    entered: the twin."""
    model, optimizer = pair("host", tmp_path)
    average = infinity.ema(model, 0.9)
    for number in range(2):
        step(model, optimizer, number)
        average.update()
    weights, averages = (
        {name: value.clone() for name, value in one.state_dict().items()}
        for one in (model, average)
    )
    write, left, entered = KeptArrays.write, [], []

    def interrupted(self, *args, write=write):
        if left and not left.pop():
            raise KeyboardInterrupt
        write(self, *args)

    def evaluate():
        with average.applied():
            entered.append(differing(model.state_dict(), averages))
            left.extend([0, 1, 1, 1, 1] if way == "out" else [])

    monkeypatch.setattr(KeptArrays, "write", interrupted)
    left.extend([0, 1, 1, 1, 1] if way == "in" else [])
    with pytest.raises(KeyboardInterrupt):
        evaluate()
    assert entered == ([] if way == "in" else [[]])
    assert differing(model.state_dict(), weights) == []
    way = "neither"
    evaluate()
    assert (
        entered[-1] == []
        and differing(model.state_dict(), weights) == []
        and differing(average.state_dict(), averages) == []
    )
    step(model, optimizer, 2)


def test_the_weights_that_applied_has_put_aside_stay_as_they_are(tmp_path):
    """Method: inside `applied` the averages' places have the weights; what reads or writes
    averages, or applies them once more, is refused there."""
    model, optimizer = pair("host", tmp_path)
    average = infinity.ema(model, 0.9)
    for number in range(2):
        step(model, optimizer, number)
        average.update()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    averages = {name: value.clone() for name, value in average.state_dict().items()}

    def nested() -> None:
        with average.applied():
            pass

    with average.applied():
        unwrapped = partial(infinity.unwrap_model, model)
        for refused in (
            nested,
            average.state_dict,
            lambda: average.load_state_dict(averages),
            unwrapped,
            average.remove,
        ):
            with pytest.raises(infinity.UsageError, match="average.applied"):
                refused()
        assert differing(model.state_dict(), averages) == []
    assert differing(model.state_dict(), weights) == []
    average.load_state_dict(weights)
    assert differing(average.state_dict(), weights) == []
    infinity.unwrap_model(model)
    assert differing(model.state_dict(), weights) == []


def test_an_average_is_removed_from_a_parked_model(tmp_path):
    """Method: parked with its average, which is removed before anything was read back; the run goes
    on with the bits of one without."""
    found = []
    for averages in (False, True):
        model, optimizer = pair("host", tmp_path)
        step(model, optimizer, 0)
        if averages:
            average = infinity.ema(model, 0.9)
            average.update()
            infinity.park(model, tmp_path)
            average.remove()
        step(model, optimizer, 1)
        found.append(model.state_dict())
    assert differing(*found) == []


def test_an_average_that_is_not_there_yet_is_not_read(tmp_path):
    """Method: on disk, in the space of an average that was removed, whose bytes are still there.
    The run goes on."""
    model, optimizer = pair("nvme", tmp_path)
    average = infinity.ema(model, 0.9)
    step(model, optimizer, 0)
    average.update()
    average.remove()
    average = infinity.ema(model, 0.5)
    with pytest.raises(infinity.UsageError, match="no average yet"):
        average.state_dict()
    step(model, optimizer, 1)
    average.update()
    assert average.updates == 1 and average.state_dict()


def test_what_does_not_go_together_is_refused(tmp_path):
    model, optimizer = pair("nvme", tmp_path)
    with pytest.raises(infinity.ConfigError, match="from 0 to 1"):
        infinity.ema(model, 1.5)
    average = infinity.ema(model, 0.9)
    with pytest.raises(infinity.UsageError, match="no average yet"), average.applied():
        pass
    with pytest.raises(infinity.UsageError, match="an average already"):
        infinity.swa(model)
    step(model, optimizer, 0)
    average.update()
    loss_of(model, tokens(SEED)).backward()
    with average.applied():
        for refused in (
            optimizer.step,
            average.update,
            lambda: infinity.save_checkpoint(tmp_path / "c", model, optimizer),
        ):
            with pytest.raises(infinity.UsageError, match="average.applied"):
                refused()
    optimizer.step()
    average.remove()
    infinity.swa(model).remove()
    frozen, _ = infinity.wrap_model(transformer(SEED), None)
    with pytest.raises(infinity.UsageError, match="without an optimizer"):
        infinity.ema(frozen, 0.9)


def test_an_average_keeps_within_the_budget(tmp_path):
    """Method: on disk it takes no memory but its checksums; with a host budget that is full it is a
    CapacityError, and nothing is kept."""
    model, optimizer = pair("nvme", tmp_path)
    before = infinity.stats(model).tiers
    average = infinity.ema(model, 0.9)
    step(model, optimizer, 0)
    average.update()
    after = infinity.stats(model).tiers
    on_disk = after["nvme"].planned_nbytes - before["nvme"].planned_nbytes
    assert on_disk >= sum(p.numel() for p in model.parameters()) * 4
    sums = native.sums_nbytes(on_disk)
    assert after["host"].peak_nbytes == before["host"].peak_nbytes + sums > sums > 0
    probe, its = pair("host", tmp_path)
    planned = infinity.stats(probe).tiers["host"].planned_nbytes
    full, its = pair("host", tmp_path, host_memory=planned + 64 * 1024)
    for _ in range(2):
        with pytest.raises(infinity.CapacityError, match="the average needs"):
            infinity.ema(full, 0.9)
    step(full, its, 0)


@pytest.mark.parametrize(
    "home, budget, start",
    [
        ("host", "host_memory", "peak_nbytes"),
        ("nvme", "nvme_capacity", "peak_nbytes"),
        ("host", "host_memory", "half"),  # some of its arrays would fit
    ],
)
def test_the_budget_that_the_error_of_an_average_names_is_enough(tmp_path, home, budget, start):
    """For all arrays of the average: it is taken as the error says, and the average is made. On
    disk it takes no more than its bytes. Twin: a block less is refused again."""
    model, _ = pair(home, tmp_path)
    tier = infinity.stats(model).tiers[home]
    whole = 4 * sum(param.numel() for param in model.parameters())
    given = tier.planned_nbytes + (whole // 2 if start == "half" else 0)
    small, _ = pair(home, tmp_path, **{budget: given})
    with pytest.raises(infinity.CapacityError, match="the average needs") as raised:
        infinity.ema(small, 0.9)
    named = int(re.search(rf"Config\({budget}=(\d+)\)", str(raised.value))[1])
    assert named >= tier.planned_nbytes + whole
    tight, _ = pair(home, tmp_path, **{budget: named - 4096})
    with pytest.raises(infinity.CapacityError, match="the average needs"):
        infinity.ema(tight, 0.9)
    fits, its = pair(home, tmp_path, **{budget: named})
    infinity.ema(fits, 0.9)
    step(fits, its, 0)
    if home == "nvme":
        assert infinity.stats(fits).tiers["nvme"].planned_nbytes == named


def test_an_average_leaves_room_for_what_is_planned(tmp_path):
    """Method: the device's budget is the least that works, of which gradients take a part in the
    backward alone: an average is refused before, and the job trains on. Twin: with twice that
    memory both go."""
    with pytest.raises(infinity.CapacityError) as told:
        pair("device", tmp_path, device_memory=1)
    given = int(re.search(r"Config\(device_memory=(\d+)\)", str(told.value))[1])
    model, optimizer = pair("device", tmp_path, device_memory=given)
    with pytest.raises(infinity.CapacityError, match="the average needs .* is planned"):
        infinity.ema(model, 0.9)
    step(model, optimizer, 0)
    model, optimizer = pair("device", tmp_path, device_memory=2 * given)
    infinity.ema(model, 0.9).update()
    step(model, optimizer, 0)


def test_averages_that_copy_the_model_are_refused_by_name(tmp_path):
    """Method: torch's AveragedModel. Twin: an average of copies of the weights, as diffusers'
    EMAModel keeps it, is what plain torch has."""
    model, _ = pair("nvme", tmp_path)
    with pytest.raises(infinity.UsageError, match=r"infinity\.ema"):
        swa_utils.AveragedModel(model)
    shadow = [param.clone().detach() for param in model.parameters()]
    with torch.no_grad():
        for mean, param in zip(shadow, model.parameters()):
            mean.sub_(0.5 * (mean - 2 * param))
    state = model.state_dict()
    values = [1.5 * state[name] for name, _ in model.named_parameters()]
    assert list(map(torch.equal, shadow, values)) == [True] * len(values)


def test_the_weights_come_back_whatever_ends_the_block(tmp_path, monkeypatch):
    """Method: the swap back is interrupted before anything moved, and a write to an older state
    dict is refused there. The next use brings the weights back, and the job goes on. Twin: in a
    block that is not interrupted they come back at its end.
    """
    for how in ("nothing", "an interrupt", "a stale write"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        model, optimizer = infinity.wrap_model(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            {"params": "host", "optimizer": "host"},
        )
        average = infinity.ema(model, 0.5)
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update()
        older = model.state_dict()
        expected = {name: value.clone() for name, value in older.items()}
        if how == "nothing":
            with average.applied():
                assert differing(model.state_dict(), expected)
        elif how == "an interrupt":
            with pytest.raises(KeyboardInterrupt), average.applied():
                monkeypatch.setattr(
                    weight_average,
                    "wait_idle",
                    lambda job: (_ for _ in ()).throw(KeyboardInterrupt()),
                )
            monkeypatch.undo()
        else:
            with pytest.raises(infinity.UsageError, match="snapshot"), average.applied():
                for value in older.values():
                    value.mul_(0.5)
        assert not differing(model.state_dict(), expected), how
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        infinity.unwrap_model(model, optimizer)


def small(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    """A wrapped model of one tied weight and a bias, after an update of its average."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(dtype)
    model[1].weight = model[0].weight
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0)
    model, optimizer = infinity.wrap_model(
        model, torch.optim.SGD(model.parameters(), lr=1.0), {"params": "host", "optimizer": "host"}
    )
    model.optimizer = [optimizer]  # which keeps it alive
    average = infinity.ema(model, 0.5)
    average.update()
    return model, average


def test_a_write_to_a_tensor_of_an_averages_state_dict_is_a_write_to_the_average():
    """By torch, past its counter, and to a tied weight, which is one tensor: the average is that,
    in a state dict, in `applied()` and in the next blend. Twins: what is not written, the weights,
    and another dtype, which is rounded once."""
    for dtype in (torch.float32, torch.bfloat16):
        model, average = small(dtype)
        state = average.state_dict()
        assert state["0.weight"] is state["1.weight"]
        state["0.weight"].mul_(3)
        state["0.bias"].data[1] = 5
        read = average.state_dict()
        assert bool((read["0.weight"] == 3).all()) and read["0.bias"].tolist() == [1, 5, 1, 1]
        assert bool((read["1.bias"] == 1).all())
        assert bool((model.state_dict()["0.weight"] == 1).all())
        with average.applied():
            assert bool((model.state_dict()["0.weight"] == 3).all())
        average.update()
        assert bool((average.state_dict()["0.weight"] == 2).all())


def test_a_write_to_an_average_that_was_updated_since_is_told_and_changes_nothing():
    """As does a load. Twins: read, it is as it was; a state dict from after it is written to."""
    for change in ("update", "load"):
        _, average = small()
        state = average.state_dict()
        if change == "update":
            average.update()
        else:
            average.load_state_dict(dict(average.state_dict()))
        assert bool((state["0.bias"] == 1).all())
        state["0.bias"].fill_(7)
        with pytest.raises(infinity.UsageError, match="the average of 0.bias: .* a snapshot"):
            average.state_dict()
        assert bool((average.state_dict()["0.bias"] == 1).all())
        average.state_dict()["0.bias"].fill_(7)
        assert bool((average.state_dict()["0.bias"] == 7).all())


@pytest.mark.parametrize("of", ["the average", "the average, in part written", "the model"])
def test_tensors_of_an_average_that_are_loaded_into_it_stay_its_own(of):
    """As in torch. Method: written to after the load. Twins: another state dict of the average is a
    snapshot from the load on, and what the model gave stays the model's."""
    for dtype in (torch.float32, torch.bfloat16):
        model, average = small(dtype)
        state, other = average.state_dict(), average.state_dict()
        if of == "the average, in part written":
            state["0.bias"][0] = 5
        given = model.state_dict() if of == "the model" else state
        average.load_state_dict(given, updates=3)
        assert average.updates == 3
        given["0.bias"].fill_(7)
        given["0.weight"].data.mul_(3)
        found = model if of == "the model" else average
        assert bool((found.state_dict()["0.bias"] == 7).all())
        assert bool((found.state_dict()["1.weight"] == 3).all())
        other["1.bias"].fill_(7)
        with pytest.raises(infinity.UsageError, match="the average of 1.bias: .* a snapshot"):
            average.state_dict()


def test_a_write_to_an_average_inside_applied_is_told():
    """Nothing is changed, neither the weights nor the average. Twin: after the block it counts."""
    model, average = small()
    state = average.state_dict()
    with average.applied():
        state["0.bias"].fill_(7)
        with pytest.raises(infinity.UsageError, match="the average of 0.bias was written to insi"):
            model.state_dict()
        assert bool((model.state_dict()["0.bias"] == 1).all())
    assert bool((average.state_dict()["0.bias"] == 1).all())
    average.state_dict()["0.bias"].fill_(7)
    assert bool((average.state_dict()["0.bias"] == 7).all())


def test_tensors_of_an_average_that_is_removed_are_their_users_own():
    """Twin: those of the model's state dict are not."""
    model, average = small()
    state, other = average.state_dict(), model.state_dict()
    average.remove()
    state["0.bias"].fill_(7)
    other["0.bias"].fill_(3)
    assert bool((model.state_dict()["0.bias"] == 3).all()) and bool((state["0.bias"] == 7).all())


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, RuntimeError])
def test_a_write_that_is_cut_short_is_carried_to_its_end(interrupt, monkeypatch):
    """Strikes the second of three averages that were written. Twin: without it none is missing."""
    _, average = small()
    real, calls = Kept.write_own, []

    def strike(*given: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise interrupt
        real(*given)

    for value in average.state_dict().values():
        value.fill_(0.5)
    with monkeypatch.context() as patched:
        patched.setattr(Kept, "write_own", strike)
        with pytest.raises(interrupt):
            average.state_dict()
    assert [float(value.mean()) for value in average.state_dict().values()] == [0.5] * 4


@pytest.mark.parametrize("at", ["extensions", "rights", "arrays", "listeners", "installed"])
def test_an_interrupt_while_an_average_is_made_leaves_none(at, monkeypatch):
    """Method: it comes behind each part of the average that joins. Twin: the next one is made, and
    one beside it is refused."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    infinity.wrap_model(model, optimizer, {"params": "host", "optimizer": "host"})
    owner, name = {
        "extensions": (WeightAverage, "rights"),
        "rights": (WeightAverage, "install"),
        "arrays": (KeptArrays, "_allocate"),
        "listeners": (KeptArrays, "keep"),
        "installed": (Job, "add"),
    }[at]
    original = getattr(owner, name)

    def interrupted(*args, **kwargs):
        if at not in ("extensions", "rights"):
            original(*args, **kwargs)
        monkeypatch.setattr(owner, name, original)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        infinity.ema(model, 0.9)
    infinity.ema(model, 0.9)
    with pytest.raises(infinity.UsageError, match="has an average already"):
        infinity.ema(model, 0.9)
