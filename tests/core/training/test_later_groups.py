"""Groups that are added after wrap_model: gradual unfreezing with torch's own habit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from deleted import needs
from inside import parts_of
from models import at_home, differing, loss_of, tokens, transformer
from torch import nn

import infinity
from infinity.core.machine.tiers import Tier

SEED = 23
LATER = [
    {"lr": 3e-3},
    {"lr": 1e-3, "weight_decay": 0.2},
]  # of the blocks from the last to the first
HOMES = ["device", "host", "nvme"]

pytestmark = needs("ext/class_step")


def frozen(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Three blocks of which nothing but the head, which is the embedding, is trained."""
    model = transformer(SEED, dropout=0.0, width=32, blocks=3).to(dtype).requires_grad_(False)
    model.head.requires_grad_(True)
    return model


def adamw(params: Any, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, fused=True, **more)


def home_of(folder: Path, home: str, **more: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    return at_home(home, home, folder, **more)


def thaw(model: nn.Module, optimizer: Any, number: int, *, only: str = "") -> None:
    params = [
        param for name, param in model.blocks[2 - number].named_parameters() if name.endswith(only)
    ]
    for param in params:
        param.requires_grad_(True)
    optimizer.add_param_group({"params": params, **LATER[number]})


def step(model: nn.Module, optimizer: Any, seed: int, micro_batches: int = 1) -> list[torch.Tensor]:
    losses = []
    for number in range(micro_batches):
        losses.append(loss_of(model, tokens(SEED + 10 * seed + number)))
        losses[-1].backward()
    optimizer.step()
    optimizer.zero_grad()
    return losses


def run(model: nn.Module, optimizer: Any, first: int) -> list[torch.Tensor]:
    """Six steps, with a group more before steps ``first`` and ``first + 2``; gradients are added up
    over two micro-batches."""
    losses = []
    for number in range(6):
        if number - first in (0, 2):
            thaw(model, optimizer, (number - first) // 2)
        losses += step(model, optimizer, number, 2)
    return losses


def same(model: nn.Module, optimizer: Any, plain: nn.Module, plain_optimizer: Any) -> None:
    assert differing(model.state_dict(), plain.state_dict()) == []
    ours, theirs = optimizer.state_dict(), plain_optimizer.state_dict()
    assert [group["params"] for group in ours["param_groups"]] == [
        group["params"] for group in theirs["param_groups"]
    ]
    assert ours["state"].keys() == theirs["state"].keys()
    for index, state in theirs["state"].items():
        assert (
            differing(
                {name: value for name, value in ours["state"][index].items() if name in state},
                state,
            )
            == []
        )


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("first", [0, 2])
def test_groups_added_later_train_as_in_torch(home, first, tmp_path):
    """Method: the head alone is wrapped; two blocks follow, each with settings of its own, before
    the first step and in mid-run, and a scheduler made before goes on. Losses, weights and moments
    are torch's bits; so is what unwrap_model gives back.
    """
    plain = frozen()
    plain_optimizer = adamw(plain.head.parameters())
    model = frozen()
    model, optimizer = infinity.wrap_model(
        model, adamw(model.head.parameters()), home_of(tmp_path, home)
    )
    assert (
        list(map(torch.equal, run(model, optimizer, first), run(plain, plain_optimizer, first)))
        == [True] * 12
    )
    same(model, optimizer, plain, plain_optimizer)
    assert all(
        tier.peak_nbytes <= tier.planned_nbytes for tier in infinity.stats(model).tiers.values()
    )
    model, optimizer = infinity.unwrap_model(model, optimizer)
    assert type(optimizer) is torch.optim.AdamW
    assert list(map(torch.equal, step(model, optimizer, 9), step(plain, plain_optimizer, 9))) == [
        True
    ]
    same(model, optimizer, plain, plain_optimizer)


@pytest.mark.parametrize("home", HOMES[1:])
@pytest.mark.parametrize(
    "more",
    [{"master": "split"}, {"master": "fp32"}, {"moments": "int8"}],
    ids=lambda more: str(*more.values()),
)
def test_masters_are_as_if_the_groups_had_been_there(home, more, tmp_path):
    """Method: bf16 weights; the other model has all groups from the start, and is thawed at the
    same steps."""
    ends = []
    for later in (True, False):
        model = frozen(torch.bfloat16)
        optimizer = adamw(model.head.parameters())
        if not later:
            for number, settings in enumerate(LATER):
                optimizer.add_param_group(
                    {"params": model.blocks[2 - number].parameters(), **settings}
                )
        model, optimizer = infinity.wrap_model(model, optimizer, home_of(tmp_path, home, **more))
        losses = []
        for number in range(5):
            if number in (1, 3):
                (
                    thaw(model, optimizer, number // 2)
                    if later
                    else model.blocks[2 - number // 2].requires_grad_(True)
                )
            losses += step(model, optimizer, number)
        ends.append((torch.stack(losses), model.state_dict(), optimizer.state_dict()["state"]))
    assert torch.equal(ends[0][0], ends[1][0]) and differing(ends[0][1], ends[1][1]) == []
    assert ends[0][2].keys() == ends[1][2].keys() and len(ends[0][2]) > 20
    for index, state in ends[0][2].items():
        assert differing(state, ends[1][2][index]) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("groups", ["added again", "there from the start"])
def test_a_checkpoint_after_a_group_was_added_resumes(dtype, groups, tmp_path):
    """Method: biases of a block are added first, its other parameters stay frozen in the same
    flat param; saved in mid-run, loaded into a model whose groups are added again, or were there
    when it was wrapped, of other values: both end with the same bits.
    """
    model = frozen(dtype)
    model, optimizer = infinity.wrap_model(
        model, adamw(model.head.parameters()), home_of(tmp_path / "a", "nvme", master="fp32")
    )
    step(model, optimizer, 0)
    thaw(model, optimizer, 0, only="bias")
    step(model, optimizer, 1)
    infinity.save_checkpoint(tmp_path / "saved", model, optimizer)
    expected = step(model, optimizer, 2)

    again = frozen(dtype)
    with torch.no_grad():
        for param in again.parameters():
            param.mul_(1.5)
    other = adamw(again.head.parameters())
    if groups == "there from the start":
        thaw(again, other, 0, only="bias")
    again, other = infinity.wrap_model(again, other, home_of(tmp_path / "b", "nvme", master="fp32"))
    if groups == "added again":
        thaw(again, other, 0, only="bias")
    infinity.load_checkpoint(tmp_path / "saved", again, other)
    assert torch.equal(step(again, other, 2)[0], expected[0])
    if (
        groups == "added again"
    ):  # also: what was loaded as frozen begins from its own bits when it follows
        for one, its in ((model, optimizer), (again, other)):
            rest = [
                param
                for name, param in one.blocks[2].named_parameters()
                if not name.endswith("bias")
            ]
            for param in rest:
                param.requires_grad_(True)
            its.add_param_group({"params": rest})
        assert torch.equal(step(again, other, 3)[0], step(model, optimizer, 3)[0])
    assert differing(again.state_dict(), model.state_dict()) == []
    states = [its.state_dict()["state"] for its in (optimizer, other)]
    for index, state in states[0].items():
        assert differing(state, states[1][index]) == []


def test_what_cannot_be_added_is_refused_and_changes_nothing(tmp_path):
    """Method: a parameter of another wrapped model, one that is in a group, settings that the rule
    does not honour, a model with an average, a gradient from before, a call inside a forward: each
    is refused, and the run goes on with torch's bits.
    """
    model, plain = frozen(), frozen()
    plain_optimizer = adamw(plain.head.parameters())
    model, optimizer = infinity.wrap_model(
        model, adamw(model.head.parameters()), home_of(tmp_path, "host")
    )
    block = list(model.blocks[2].parameters())
    other = frozen()
    infinity.wrap_model(other, adamw(other.head.parameters()), home_of(tmp_path, "host"))
    with pytest.raises(infinity.UsageError, match="not one that wrap_model"):
        optimizer.add_param_group({"params": [*block, other.head.weight]})
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [*block, model.head.weight]})
    with pytest.raises(infinity.UsageError, match="amsgrad"):
        optimizer.add_param_group({"params": block, "amsgrad": True})
    hook = model.blocks[0].register_forward_hook(
        lambda *given: optimizer.add_param_group({"params": block})
    )
    with pytest.raises(infinity.UsageError, match="inside a forward"):
        loss_of(model, tokens(SEED))
    hook.remove()
    assert len(optimizer.param_groups) == 1
    for number in range(2):
        assert torch.equal(
            step(model, optimizer, number)[0], step(plain, plain_optimizer, number)[0]
        )
    same(model, optimizer, plain, plain_optimizer)
    infinity.ema(model, 0.9)
    with pytest.raises(infinity.UsageError, match="average"):
        optimizer.add_param_group({"params": block})


@pytest.mark.parametrize("home", HOMES[1:])
def test_a_group_without_room_leaves_all_as_it_was(home, tmp_path, monkeypatch):
    """Method: the third array cannot be had; what was charged and who is stepped is as before. With
    room again, the group is added, and the run has torch's bits."""
    model, plain = frozen(), frozen()
    plain_optimizer = adamw(plain.head.parameters())
    model, optimizer = infinity.wrap_model(
        model, adamw(model.head.parameters()), home_of(tmp_path, home)
    )
    step(model, optimizer, 0), step(plain, plain_optimizer, 0)
    engine = parts_of(model).engine
    before = [
        parts_of(engine).ledger.accounts[tier].charged_nbytes for tier in (Tier.DEVICE, Tier.HOST)
    ]
    allocate, calls = type(parts_of(engine).store.allocator).allocate_later, []

    def failing(store, tier, dtype, numel, what):
        calls.append(what)
        if len(calls) == 3:
            raise infinity.CapacityError("no room")
        return allocate(store, tier, dtype, numel, what)

    monkeypatch.setattr(type(parts_of(engine).store.allocator), "allocate_later", failing)
    with pytest.raises(infinity.CapacityError, match="no room"):
        thaw(model, optimizer, 0)
    monkeypatch.undo()
    assert [
        parts_of(engine).ledger.accounts[tier].charged_nbytes for tier in (Tier.DEVICE, Tier.HOST)
    ] == before
    assert len(optimizer.param_groups) == 1 and {
        handle.name.partition(".")[0] for handle in parts_of(engine).trained
    } == {"tokens"}
    thaw(model, optimizer, 0), thaw(plain, plain_optimizer, 0)
    assert torch.equal(step(model, optimizer, 1)[0], step(plain, plain_optimizer, 1)[0])
    same(model, optimizer, plain, plain_optimizer)


def test_a_group_over_the_budget_is_refused_with_the_numbers(tmp_path):
    model = frozen()
    host = (
        infinity.stats(infinity.wrap_model(frozen(), None, home_of(tmp_path, "host"))[0])
        .tiers["host"]
        .planned_nbytes
    )
    model, optimizer = infinity.wrap_model(
        model, adamw(model.head.parameters()), home_of(tmp_path, "host", host_memory=host + 2**17)
    )
    with pytest.raises(infinity.CapacityError, match="host_memory"):
        thaw(model, optimizer, 0)
    assert torch.isfinite(step(model, optimizer, 0)[0])


@pytest.mark.parametrize("home, budget", [("host", "host_memory"), ("nvme", "nvme_capacity")])
def test_the_budget_that_the_error_of_a_group_names_is_enough(home, budget, tmp_path):
    """For all its parameters together. Twin: a block less is refused again."""

    def wrapped(**more: Any) -> tuple[nn.Module, Any]:
        model = frozen()
        config = home_of(tmp_path, home, **more)
        return infinity.wrap_model(model, adamw(model.head.parameters()), config)

    given = infinity.stats(wrapped()[0]).tiers[home].planned_nbytes
    model, optimizer = wrapped(**{budget: given})
    with pytest.raises(infinity.CapacityError, match="add_param_group of these") as raised:
        thaw(model, optimizer, 0)
    named = int(re.search(rf"Config\({budget}=(\d+)\)", str(raised.value))[1])
    model, optimizer = wrapped(**{budget: named - 4096})
    with pytest.raises(infinity.CapacityError):
        thaw(model, optimizer, 0)
    model, optimizer = wrapped(**{budget: named})
    thaw(model, optimizer, 0)
    assert torch.isfinite(step(model, optimizer, 0)[0])


@pytest.mark.parametrize("home", HOMES[1:])
def test_a_group_may_come_between_two_micro_batches(home, tmp_path):
    """Method: gradients have landed when the group comes, and more follow; all are clipped
    together, by torch's function."""
    model, plain = frozen(), frozen()
    plain_optimizer = adamw(plain.head.parameters())
    model, optimizer = infinity.wrap_model(
        model, adamw(model.head.parameters()), home_of(tmp_path, home)
    )
    for number in range(2):
        norms = []
        for one, its in ((model, optimizer), (plain, plain_optimizer)):
            loss_of(one, tokens(SEED + number)).backward()
            thaw(one, its, number)
            loss_of(one, tokens(SEED + 5 + number)).backward()
            norms.append(
                torch.nn.utils.clip_grad_norm_(
                    [param for group in its.param_groups for param in group["params"]], 0.1
                )
            )
            its.step()
            its.zero_grad()
        assert torch.equal(*norms)
    same(model, optimizer, plain, plain_optimizer)
