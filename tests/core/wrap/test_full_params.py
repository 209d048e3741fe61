"""full_params lends whole parameters, and takes edits home."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from contract_cases import SEED, every_home, step, wrapped
from models import (
    bits,
    differing,
    environment,
    in_child,
    ties_away,
    transformer,
)
from torch import nn

import infinity


@pytest.mark.parametrize("dtype", [None, "bf16"])
@every_home
def test_full_params_gives_the_values(home, dtype, tmp_path):
    """Method: gather all, by name, by module prefix and by list; names and values are those of the
    model."""
    values = dict(transformer(SEED).named_parameters())
    if dtype:
        values = {name: ties_away(value) for name, value in values.items()}
    model, _ = wrapped(home, tmp_path, param_dtype=dtype)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    wanted = {
        "all": (None, names),
        "one": ("norm.weight", {"norm.weight"}),
        "module": (["blocks.1"], {n for n in names if n.startswith("blocks.1.")}),
        "some": (
            ["blocks.0.norm1", "positions"],
            {"blocks.0.norm1.weight", "blocks.0.norm1.bias", "positions"},
        ),
        "tied": (["head.weight"], {"head.weight"}),
        "root": ("", names),
        "none": ([], set()),
    }
    for what, (asked, expected) in wanted.items():
        with infinity.full_params(model, asked) as params:
            assert set(params) == expected, what
            for name, param in params.items():
                assert torch.equal(
                    param, values[name if name != "head.weight" else "tokens.weight"].detach()
                ), name
                assert param.requires_grad  # what is computed from it trains
        with torch.no_grad(), infinity.full_params(model, asked) as params:
            assert not any(param.requires_grad for param in params.values())


def test_full_params_refuses_unknown_names(tmp_path):
    """Method: a typo and a prefix that is no module; UsageError names the nearest name."""
    model, _ = wrapped("nvme", tmp_path)
    for wrong, near in (
        ("norm.wieght", "norm.weight"),
        ("block", ""),
        ("blocks.0.norm1.", ""),
        ("blocks.0.norm", ""),
    ):
        with (
            pytest.raises(infinity.UsageError, match=f"{wrong}.*{near}"),
            infinity.full_params(model, [wrong]),
        ):
            pass


@pytest.mark.parametrize("dtype", [None, "bf16"])
@every_home
def test_full_params_writes_edits_back(home, dtype, tmp_path):
    """Method: train a step so that masters have low bits, edit some elements with writeback;
    exactly those change, in weight and master, and every other element's master keeps its bits."""
    model, optimizer = wrapped(home, tmp_path, param_dtype=dtype)
    step(model, optimizer)
    before = model.state_dict()
    with infinity.full_params(model, ["blocks.1"], writeback=True) as params:
        params["blocks.1.feed.0.weight"][3, 5:9] = 0.25
        params["blocks.1.norm1.bias"].mul_(2.0).add_(1.0)
    after = model.state_dict()
    assert set(differing(before, after)) == {"blocks.1.feed.0.weight", "blocks.1.norm1.bias"}
    expected = before["blocks.1.feed.0.weight"].clone()
    expected[3, 5:9] = 0.25
    assert torch.equal(after["blocks.1.feed.0.weight"], expected)
    state = optimizer.state_dict()["state"]
    step(model, optimizer, 1)
    assert len(state) == len(list(model.parameters()))


@pytest.mark.parametrize("how", ["no writeback", "exception"])
@pytest.mark.parametrize("dtype", [None, "bf16"])
@every_home
def test_refused_edits_leave_the_old_values(home, dtype, how, tmp_path):
    """Method: edit without writeback (UsageError at the end), or raise in a block with writeback;
    the old values stand, to the bit, and the model goes on."""
    model, optimizer = wrapped(home, tmp_path, param_dtype=dtype)
    step(model, optimizer)
    before = model.state_dict()
    with pytest.raises(infinity.UsageError if how == "no writeback" else ZeroDivisionError):
        with infinity.full_params(
            model, ["blocks", "norm"], writeback=how == "exception"
        ) as params:
            params["norm.weight"].zero_()
            params["blocks.2.feed.0.weight"][0, 0] = float("nan")
            if how == "exception":
                1 / 0
    assert differing(model.state_dict(), before) == []
    step(model, optimizer, 1)


@pytest.mark.parametrize("edit", [float("nan"), float("inf"), -0.0, 1e30], ids=str)
def test_full_params_writes_odd_values(edit, tmp_path):
    """Method: NaN, infinity, minus zero and a huge value as edits of a split master; they come back
    as they are."""
    model, _ = wrapped("nvme", tmp_path, param_dtype="bf16")
    with infinity.full_params(model, ["norm.weight"], writeback=True) as params:
        params["norm.weight"][7] = edit
        expected = params["norm.weight"].clone()
    with infinity.full_params(model, ["norm.weight"]) as params:
        assert torch.equal(bits(params["norm.weight"]), bits(expected))
    value = model.state_dict()["norm.weight"][7]
    assert torch.equal(bits(value.bfloat16()), bits(expected[7]))


@every_home
def test_full_params_may_be_nested(home, tmp_path):
    """Method: a block inside another over the same unit; the outer tensors live on, and each writes
    its own edits."""

    def work():
        model, _ = wrapped(home, tmp_path)
        value = model.state_dict()["blocks.0.feed.0.weight"]
        with infinity.full_params(model, ["blocks.0"], writeback=True) as outer:
            with infinity.full_params(model, ["blocks.0.norm1"], writeback=True) as inner:
                inner["blocks.0.norm1.bias"].fill_(0.5)
            assert torch.equal(outer["blocks.0.feed.0.weight"], value)
            outer["blocks.0.norm2.bias"].fill_(0.25)
        state = model.state_dict()
        assert torch.equal(state["blocks.0.norm1.bias"], torch.full((64,), 0.5))
        assert torch.equal(state["blocks.0.norm2.bias"], torch.full((64,), 0.25))

    in_child(work)


LATE: dict[str, Callable[[nn.Module, Any], Any]] = {}


def late(use: Callable[[nn.Module, Any], Any]) -> Callable:
    LATE[use.__name__] = use
    return use


@late
def tensor_of_full_params(model, optimizer):
    with infinity.full_params(model, ["blocks.0"]) as params:
        kept = params["blocks.0.feed.0.weight"]
    return kept, "blocks.0.feed.0.weight"


@late
def view_of_a_parameter(model, optimizer):
    with infinity.full_params(model, ["blocks.0"]):
        kept = model.blocks[0].feed[0].weight.view(-1).view(256, 64)
    return kept, "blocks.0.feed.0.weight"


@late
def state_dict_inside(model, optimizer):
    with infinity.full_params(model, ["blocks.0"]):
        state = model.state_dict()
    return state["blocks.0.feed.0.weight"], "blocks.0.feed.0.weight"


@late
def step_inside(model, optimizer):
    step(model)
    with infinity.full_params(model, ["blocks.0"]) as params:
        with contextlib.suppress(infinity.UsageError):
            optimizer.step()
        kept = params["blocks.0.feed.0.weight"]
        return kept.clone(), None


@late
def load_inside(model, optimizer):
    state = {name: 2 * value for name, value in model.state_dict().items()}
    with infinity.full_params(model, ["blocks.0"]) as params:
        with contextlib.suppress(infinity.UsageError):
            model.load_state_dict(state)
        return params["blocks.0.feed.0.weight"].clone(), None


@late
def unwrap_inside(model, optimizer):
    with infinity.full_params(model, ["blocks.0"]) as params:
        with contextlib.suppress(infinity.UsageError):
            infinity.unwrap_model(model, optimizer)
        return params["blocks.0.feed.0.weight"].clone(), None


@late
def save_inside(model, optimizer):
    with infinity.full_params(model, ["blocks.0"]) as params:
        with contextlib.suppress(infinity.UsageError):
            infinity.save_checkpoint(os.environ["FOLDER"] + "/checkpoint", model, optimizer)
            infinity.load_checkpoint(os.environ["FOLDER"] + "/checkpoint", model, optimizer)
        return params["blocks.0.feed.0.weight"].clone(), "blocks.0.feed.0.weight"


@late
def loss_outside(model, optimizer):
    with infinity.full_params(model):
        penalty = sum(p.square().sum() for p in model.parameters())
    penalty.backward()
    return None, None


@pytest.mark.parametrize("use", LATE.values(), ids=LATE)
@every_home
def test_what_is_left_of_full_params_never_crashes(use, home, tmp_path):
    """Method: use the tensors of a full_params block after it, or do inside it what moves the
    weights; the result is right, or a Python exception says that it is too late: never garbage,
    never a crash."""
    folder = tmp_path / "swap"
    folder.mkdir()

    def work():
        with environment(FOLDER=str(tmp_path)):
            model, optimizer = wrapped(home, folder)
            state = model.state_dict()
            try:
                kept, name = use(model, optimizer)
                found = kept.clone() if kept is not None else None
            except (RuntimeError, infinity.InfinityError):
                return
        if name is not None:
            assert torch.equal(found, state[name])

    in_child(work)


class Clamped(nn.Linear):
    """Clamps its weight in a forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.enable_grad():
        model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def written(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.state_dict()["weight"].mul_(0.5)
    model.state_dict()


CHANGES: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Any]] = {
    "a forward": lambda model, optimizer: model(torch.ones(1, 4)),
    "a step": stepped,
    "a write to a state dict": written,
}
EDITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "counted": lambda copy: copy[0].fill_(7.0),
    "through data": lambda copy: copy.data[0].fill_(7.0),
    "by other memory": lambda copy: setattr(copy, "data", torch.full((4, 4), 7.0)),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("change", CHANGES)
def test_an_edit_of_what_has_changed_meanwhile_is_refused(change, edit):
    """Changes a weight in the block, then its copy, which would bring old values back. Twin: a copy
    that was written to with its own values."""
    torch.manual_seed(SEED)
    model = Clamped(4, 4)
    model, optimizer = infinity.wrap_model(
        model, torch.optim.SGD(model.parameters(), lr=0.1), {"params": "host", "optimizer": "host"}
    )
    model.load_state_dict({name: value * 9 for name, value in model.state_dict().items()})
    refusal = pytest.raises(infinity.UsageError, match="weight was edited, but a step, a load")
    ends = (lambda copy: copy.mul_(1.0), contextlib.nullcontext()), (EDITS[edit], refusal)
    for edits, end in ends:
        with end, torch.no_grad(), infinity.full_params(model, writeback=True) as params:
            CHANGES[change](model, optimizer)
            new = model.state_dict()["weight"].clone()
            edits(params["weight"])
        assert torch.equal(model.state_dict()["weight"], new)
