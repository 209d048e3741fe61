"""CardMemory: what an accelerator can give beside libraries and other processes, and what a job
does with it.

Words used here: see `test_device` (the model, `train`, `trained`, `same`, devices that stand in).
"""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from device_cases import (  # noqa: F401
    SEED,
    VOCABULARY,
    Elsewhere,
    a_model,
    compute_on,
    kernels,
    same,
    train,
    trained,
)
from torch import nn

import infinity
from infinity.core.grads import values
from infinity.core.machine.tiers import Tier
from infinity.core.run import activation_store
from infinity.core.wrap.lay_out import lay_out
from infinity.errors import CapacityError


@pytest.mark.parametrize("homes", ["auto", "host"])
@pytest.mark.parametrize("is_unified", [True, False])
def test_one_memory_is_one_home(homes, is_unified, compute_on, kernels):
    """Claim: where host and device are one memory, nothing is copied, nor charged twice. Twin: two
    memories, and the same bits."""

    class Integrated(Elsewhere):
        memory = SimpleNamespace(
            is_unified=is_unified,
            engine_nbytes=lambda: 1 << 30,
            left_nbytes=lambda several_ranks: 1 << 30,
        )

    config = {"params": homes, "optimizer": homes}
    expected = trained({"params": "host", "optimizer": "host"})
    compute_on(Integrated, kernels)
    found = trained(config)
    assert same(found, expected)
    edges = found[2].edges
    copied = edges["host->device"].nbytes + edges["device->host"].nbytes
    assert (copied == 0) == (is_unified or homes == "auto")
    plan, _ = lay_out(*a_model(), infinity.Config(**config))
    in_both = [plan.planned_nbytes(tier) for tier in (Tier.DEVICE, Tier.HOST)]
    assert is_unified <= (in_both[1] < in_both[0] // 100)


def _scaled(config, clip: bool) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], list[int]]:
    """Trains with a GradScaler whose first scale overflows. Returns the losses and weights, and how
    many gradients each step brought to the device to unscale them."""
    model, optimizer = infinity.wrap_model(*a_model(torch.float32), config)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=2.0**127, backoff_factor=2.0**-100, growth_interval=3
    )
    told, brought = [], []

    def change_own(self, handle, change, real=values.GradValues.change_own):
        brought[-1] += 1
        return real(self, handle, change)

    generator = torch.Generator().manual_seed(SEED)
    with mock.patch.object(values.GradValues, "change_own", change_own):
        for _ in range(6):
            brought.append(0)
            ids = torch.randint(0, VOCABULARY, (16, 32), generator=generator)
            logits = model(ids).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, ids.flatten(), reduction="sum")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if clip:
                told.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).clone())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            told.append(loss.detach().clone())
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    infinity.unwrap_model(model, optimizer)
    return told, weights, brought


@pytest.mark.parametrize("clip", [False, True])
def test_gradients_without_overflow_are_unscaled_by_a_factor(clip, compute_on):
    """Claim: with the same bits, and without a copy to the device. Twins: the first step, when no
    norms are there yet, and an overflow, bring every gradient."""
    config = {"params": "host", "optimizer": "host"}
    expected_told, expected, _ = _scaled(config, clip)
    compute_on(Elsewhere)
    told, weights, brought = _scaled(config, clip)
    assert all(torch.equal(a, b) or (a.isnan() and b.isnan()) for a, b in zip(told, expected_told))
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    count = len(list(a_model()[0].parameters()))
    assert brought[0] == count and brought.count(0) >= 3 and set(brought) == {0, count}


@pytest.mark.parametrize("room, expected", [("all", "kept"), ("some", "recomputed")])
def test_blocks_are_recomputed_once_the_card_is_full(
    room, expected, compute_on, kernels, monkeypatch
):
    """Claim: what is free on the card is used before anything is recomputed, with the same bits.
    Method: a card with room for all that the blocks save, and for a part of it."""
    monkeypatch.setattr(activation_store, "SMALLEST_NBYTES", 1)
    monkeypatch.setattr("infinity.ext.blocks.blocks._send_rate", lambda *_: 1.0)  # no choice

    class Card(Elsewhere):
        memory = SimpleNamespace(
            is_unified=False,
            engine_nbytes=lambda: 1 << 20,
            left_nbytes=lambda several_ranks: 64 << 20,
            unused_nbytes=lambda: (64 << 20) if room == "all" else (1 << 19),
        )

    found = []
    for device, config in ((Elsewhere, {}), (Card, {"recompute": True})):
        compute_on(device, kernels)
        model, optimizer = infinity.wrap_model(
            *a_model(), {"params": "host", "optimizer": "host", **config}
        )
        told = train(model, optimizer, steps=6)
        blocks = infinity.stats(model).blocks
        found.append([*told, *(value.clone() for value in model.state_dict().values())])
        infinity.unwrap_model(model, optimizer)
    assert all(map(torch.equal, *found))
    assert blocks[expected] >= 1 and blocks["sent"] == 0
    assert (blocks["kept"] == 4) == (room == "all")


@pytest.mark.parametrize("given, told", [(1 << 30, True), (1 << 20, False)])
def test_a_budget_that_the_card_cannot_give_is_planned_with_what_it_can(
    given, told, compute_on, caplog
):
    """Twin: a budget that it can give stays, and nothing is said."""

    class Card(Elsewhere):
        memory = SimpleNamespace(
            is_unified=False,
            engine_nbytes=lambda: 2 << 20,
            left_nbytes=lambda several_ranks: 2 << 20,
        )

    compute_on(Card)
    config = {"params": "host", "optimizer": "host", "device_memory": given}
    model, optimizer = infinity.wrap_model(*a_model(), config)
    budget = infinity.stats(model).tiers["device"].budget_nbytes
    own = sum(param.nbytes for param in a_model()[0].parameters())  # they move into the plan
    assert budget == min(given, (2 << 20) + own)
    assert ("can give 2.2 MiB" in caplog.text) == told
    infinity.unwrap_model(model, optimizer)


def test_a_card_that_has_nothing_left_is_an_error_that_says_so(compute_on):
    class Full(Elsewhere):
        memory = SimpleNamespace(
            is_unified=False, engine_nbytes=lambda: 0, left_nbytes=lambda several_ranks: 0
        )

    compute_on(Full)
    with torch.device("meta"):
        model, optimizer = a_model()
    with pytest.raises(CapacityError, match="nothing left beside other tensors"):
        infinity.wrap_model(model, optimizer, {"device": "cpu", "device_memory": "1GiB"})


@pytest.mark.parametrize(
    "config",
    [
        {"params": "host", "optimizer": "host", "device_memory": "400KiB"},
        {"params": "host", "optimizer": "host", "host_memory": "1GiB"},
        {"device_memory": "400KiB", "host_memory": "1GiB"},
    ],
    ids=str,
)
def test_budgets_hold_on_one_memory_too(config, compute_on, kernels):
    """Claim: homes on the host that were asked for are taken where the device's budget has no room
    for them."""

    class Integrated(Elsewhere):
        memory = SimpleNamespace(
            is_unified=True,
            engine_nbytes=lambda: 1 << 20,
            left_nbytes=lambda several_ranks: 1 << 30,
        )

    compute_on(Integrated, kernels)
    assert same(trained(config), trained({"params": "host", "optimizer": "host"}))
