"""Training has the numbers of plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deleted import needs
from lion import Lion
from models import (
    at_home,
    gradients,
    loss_of,
    prescribed,
    tokens,
    transformer,
    with_least,
)
from runs import Yardstick, plain_run, wrapped_run
from training_cases import CLIP_STEPS, LR, SEED, a_model, both_ends, hardest, sizes_of, within_ulps

import infinity


def test_fp32_equals_plain_adamw_over_several_steps(tmp_path):
    """Method: train plain, plain with 4 ulps of disturbance, and wrapped from NVMe under the least
    budget; every weight is as near to plain torch as rounding explains."""
    batches = [tokens(SEED + step) for step in range(6)]
    loop = {
        "lr": LR,
        "clip_steps": CLIP_STEPS,
        "loss_of": loss_of,
        "before_forward": torch.manual_seed,
    }
    model = transformer(SEED)
    plain = plain_run(copy.deepcopy(model), batches, **loop)
    nudged = plain_run(copy.deepcopy(model), batches, nudged=True, **loop)
    yardstick = Yardstick.measure(plain, nudged, lr=LR)
    assert yardstick.share_within(1e-2 * LR) > 0.8
    config = with_least(*a_model(), at_home("nvme", "nvme", tmp_path))
    yardstick.check(wrapped_run(model, batches, config=config, **loop))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=LR),
    "AdamW-settings": lambda p: torch.optim.AdamW(
        p, lr=LR, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3
    ),
    "AdamW-low-beta1": lambda p: torch.optim.AdamW(p, lr=LR, betas=(0.3, 0.9)),
    "AdamW-maximize": lambda p: torch.optim.AdamW(p, lr=LR, maximize=True),
    "AdamW-foreach": lambda p: torch.optim.AdamW(p, lr=LR, foreach=True),
    "AdamW-fused": lambda p: torch.optim.AdamW(p, lr=LR, fused=True),
    "AdamW-tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(LR)),
    "Adam": lambda p: torch.optim.Adam(p, lr=LR),
    "Adam-decay": lambda p: torch.optim.Adam(p, lr=LR, weight_decay=0.3),
    "Adam-foreach": lambda p: torch.optim.Adam(p, lr=LR, weight_decay=0.3, foreach=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=LR),
    "SGD-decay": lambda p: torch.optim.SGD(p, lr=LR, weight_decay=0.3),
    "SGD-momentum": lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9, weight_decay=0.1),
    "SGD-dampening": lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9, dampening=0.4),
    "SGD-nesterov": lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9, nesterov=True),
    "SGD-maximize": lambda p: torch.optim.SGD(p, lr=LR, momentum=0.5, maximize=True, foreach=True),
    "Lion": lambda p: Lion(p, lr=LR),
    "Lion-decay": lambda p: Lion(p, lr=LR, betas=(0.95, 0.98), weight_decay=0.3),
}
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


@needs("ext/class_step")
@every_optimizer
@both_ends
def test_prescribed_gradients_step_as_in_torch(make, home, tmp_path):
    """Method: give the same gradients to a plain and a wrapped optimizer; after one step every
    weight is within 4 ulps of torch's, after five within 4 ulps a step, and so are moments, step
    counts and what torch keeps beside them.
    """
    plain = prescribed(SEED)
    model = copy.deepcopy(plain)
    plain_optimizer, optimizer = make(plain.parameters()), make(model.parameters())
    model, optimizer = infinity.wrap_model(
        model, optimizer, hardest(home, model, optimizer, tmp_path)
    )
    largest = sizes_of(plain)
    for step in range(5):
        for one, its in ((plain, plain_optimizer), (model, optimizer)):
            one(gradients(plain, SEED + step)).backward()
            its.step()
            its.zero_grad()
        within_ulps(model.state_dict(), plain.state_dict(), largest, 4 * (step + 1))
    ours, theirs = optimizer.state_dict(), plain_optimizer.state_dict()
    for index, expected in theirs["state"].items():
        for key, value in expected.items():
            found = ours["state"][index][key]
            assert (found.dtype, found.shape) == (value.dtype, value.shape), key
            torch.testing.assert_close(
                found, value, rtol=1e-5, atol=1e-7, msg=lambda m: f"{index} {key}: {m}"
            )


PAIRS = [f"pairs.{number}.{name}" for number in range(8) for name in ("matrix", "vector")]


@both_ends
@pytest.mark.parametrize("fused", [True, None])
def test_the_bits_are_those_of_the_fused_adamw(fused, home, tmp_path):
    """Method: the same gradients to plain and wrapped AdamW on a processor, five steps. Twin:
    torch's default computes in another order, and has other bits."""
    plain = prescribed(SEED)
    model = copy.deepcopy(plain)
    theirs, ours = (
        torch.optim.AdamW(each.parameters(), lr=LR, fused=fused) for each in (plain, model)
    )
    model, ours = infinity.wrap_model(model, ours, hardest(home, model, ours, tmp_path))
    for step in range(5):
        for one, its in ((plain, theirs), (model, ours)):
            one(gradients(plain, SEED + step)).backward()
            its.step()
            its.zero_grad()
    # In whole vectors: torch computes the last values of an array one by one, and rounds twice.
    found, wanted = (
        torch.cat([each[name].flatten()[: each[name].numel() // 16 * 16] for name in PAIRS])
        for each in (model.state_dict(), plain.state_dict())
    )
    assert torch.equal(found, wanted) == bool(fused)


@needs("ext/class_step")
@every_optimizer
def test_optimizer_state_has_the_keys_that_torch_keeps(make, tmp_path):
    """Method: after a step, compare the keys of state_dict() with the plain optimizer's: no more,
    no fewer."""
    plain, model = prescribed(SEED), prescribed(SEED)
    plain_optimizer, optimizer = make(plain.parameters()), make(model.parameters())
    model, optimizer = infinity.wrap_model(model, optimizer, at_home("host", "host", tmp_path))
    for one, its in ((plain, plain_optimizer), (model, optimizer)):
        one(gradients(plain, SEED)).backward()
        its.step()
    ours, theirs = optimizer.state_dict(), plain_optimizer.state_dict()
    assert {i: set(s) for i, s in ours["state"].items()} == {
        i: set(s) for i, s in theirs["state"].items()
    }
    assert [set(group) for group in ours["param_groups"]] == [
        set(group) for group in theirs["param_groups"]
    ]


@pytest.mark.parametrize(
    "change", [{"lr": 1.001 * LR}, {"weight_decay": 0.0101}, {"betas": (0.9, 0.9991)}], ids=str
)
def test_slightly_wrong_hyperparameters_are_seen(change):
    """Method: the twin; with one hyperparameter a little off, plain torch itself is further than 4
    ulps away."""
    one, other = prescribed(SEED), prescribed(SEED)
    largest = sizes_of(one)
    for model, settings in ((one, {}), (other, change)):
        optimizer = torch.optim.AdamW(model.parameters(), **{"lr": LR, **settings})
        for step in range(2):
            model(gradients(one, SEED + step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(AssertionError, match="ulps off"):
        within_ulps(other.state_dict(), one.state_dict(), largest, 8)
