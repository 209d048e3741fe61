"""infinity.accumulate: several micro-batches in one pass, with the bits of a plain loop, whatever
strikes between them.

**elsewhere**: a device whose memory the processor does not use, as a GPU's is; here it is the
processor's all the same. **plain**: the same loop over micro-batches without the engine.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import models
import pytest
import threaded_device
import torch
from inside import parts_of
from torch import nn

import infinity
from infinity.core.machine import accelerator

HOMES = ("device", "host", "nvme")
MICRO, STEPS, WIDTH = 4, 3, 32


class Elsewhere(threaded_device.ThreadedDevice):
    is_host = False


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
        for _ in range(3)
    ]
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def loss_of(model: nn.Module, step: int, part: int) -> torch.Tensor:
    return (
        model(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + part)))
        .square()
        .mean()
    )


def train(model: nn.Module, optimizer: Any, *, joined: bool, steps: int = STEPS) -> list[float]:
    told = []
    for step in range(steps):
        with infinity.accumulate(model) if joined else nullcontext():
            for part in range(MICRO):
                loss = loss_of(model, step, part)
                loss.backward()
                told.append(loss.item())
        told.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
    return told


def trained(
    config: dict | None, *, joined: bool = True
) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    model, optimizer = build()
    if config is None:
        return train(model, optimizer, joined=False), model.state_dict(), None
    model, optimizer = infinity.wrap_model(model, optimizer, config)
    told = train(model, optimizer, joined=joined)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    stats = infinity.stats(model)
    infinity.unwrap_model(model, optimizer)
    return told, weights, stats


@pytest.mark.parametrize("home", HOMES)
def test_the_bits_are_those_of_a_plain_loop(home, swap):
    plain, ours = trained(None), trained(models.at_home(home, home, swap))
    assert ours[0] == plain[0]
    assert not models.differing(ours[1], plain[1])


@pytest.mark.parametrize("home", ["host", "nvme"])
def test_gradients_go_home_once_a_step_from_a_device_elsewhere(home, swap, monkeypatch):
    """The twin: without the block they go with every backward. The bits are the same."""
    monkeypatch.setitem(accelerator.KINDS, "cpu", Elsewhere)
    config = models.at_home(home, home, swap)
    joined, apart = trained(config), trained(config, joined=False)
    assert joined[0] == apart[0] and not models.differing(joined[1], apart[1])
    sent = [stats.edges["device->host"].nbytes for *_, stats in (joined, apart)]
    assert MICRO * sent[0] == sent[1] > 0


def test_greedysnake_weights_stay_between_micro_batches(swap):
    """A window that holds them all: each unit comes once a step; the twin brings it for each
    micro-batch."""
    config = models.at_home("host", "host", swap) | {"device_memory": "4MiB"}
    loads = [
        trained(config, joined=joined)[2].edges["host->device"].nbytes for joined in (True, False)
    ]
    assert MICRO * loads[0] == loads[1] > 0


def test_a_device_without_room_for_gradients_changes_no_bit(swap, monkeypatch):
    """They land with each backward then, as without the block: the sums are the same."""
    monkeypatch.setitem(accelerator.KINDS, "cpu", Elsewhere)
    config = models.at_home("host", "host", swap)
    model, optimizer = build()
    infinity.wrap_model(model, optimizer, config)
    window = parts_of(model).planned.plan.planned_nbytes(infinity.core.machine.tiers.Tier.DEVICE)
    infinity.unwrap_model(model)
    tight, plain = trained(config | {"device_memory": window}), trained(None)
    assert tight[0] == plain[0] and not models.differing(tight[1], plain[1])


def test_updates_in_the_backward_wait_for_the_last_micro_batch(swap):
    model, optimizer = infinity.wrap_model(*build(), models.at_home("nvme", "nvme", swap))
    plain, plain_optimizer = build()
    for step in range(STEPS):
        with optimizer.step_in_backward(), infinity.accumulate(model):
            for part in range(MICRO):
                loss_of(model, step, part).backward()
        optimizer.step()
        optimizer.zero_grad()
        for part in range(MICRO):
            loss_of(plain, step, part).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    assert not models.differing(model.state_dict(), plain.state_dict())


USES = {
    "p.grad": lambda model, optimizer: model[0][0].weight.grad,
    "p.grad =": lambda model, optimizer: setattr(model[0][0].weight, "grad", None),
    "step": lambda model, optimizer: optimizer.step(),
    "zero_grad": lambda model, optimizer: optimizer.zero_grad(),
    "clip": lambda model, optimizer: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "save_checkpoint": lambda model, optimizer: infinity.save_checkpoint(
        "nowhere", model, optimizer
    ),
    "load_checkpoint": lambda model, optimizer: infinity.load_checkpoint(
        "nowhere", model, optimizer
    ),
    "load_state_dict": lambda model, optimizer: model.load_state_dict(build()[0].state_dict()),
    "optimizer.load_state_dict": lambda model, optimizer: optimizer.load_state_dict(
        optimizer.state_dict()
    ),
    "full_params": lambda model, optimizer: infinity.full_params(model, writeback=True).__enter__(),
    "park": lambda model, optimizer: infinity.park(model, "nowhere"),
    "unwrap_model": lambda model, optimizer: infinity.unwrap_model(model, optimizer),
}


@pytest.mark.parametrize("use", USES)
def test_gradients_are_not_to_be_had_between_micro_batches(use):
    """Nor is what sets values, or takes gradients along. A typed error that says when; caught
    inside the block it leaves the sums as they are."""
    model, optimizer = infinity.wrap_model(*build(), {"params": "host", "optimizer": "host"})
    plain, plain_optimizer = build()
    with infinity.accumulate(model):
        loss_of(model, 0, 0).backward()
        with pytest.raises(infinity.UsageError, match="is not available here"):
            USES[use](model, optimizer)
        with infinity.full_params(model) as params:  # the twin: values alone are read
            assert not models.differing(params, model.state_dict())
        loss_of(model, 0, 1).backward()
    optimizer.step()
    for part in range(2):
        loss_of(plain, 0, part).backward()
    plain_optimizer.step()
    assert not models.differing(model.state_dict(), plain.state_dict())


def test_a_block_inside_another_is_refused():
    model, _ = infinity.wrap_model(*build(), {"params": "host", "optimizer": "host"})
    with infinity.accumulate(model):
        with (
            pytest.raises(infinity.UsageError, match="inside another one"),
            infinity.accumulate(model),
        ):
            pass
        loss_of(model, 0, 0).backward()
    assert model[0][0].weight.grad is not None


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("where", ["between", "in a forward", "in a backward"])
def test_an_exception_leaves_no_half_sum_to_be_stepped(home, where, swap):
    """Gradients are torn, which the step says; after zero_grad the loop goes on with the bits of a
    plain one."""
    model, optimizer = infinity.wrap_model(*build(), models.at_home(home, home, swap))
    struck = []

    def strike(*_: Any) -> None:
        if struck:
            raise KeyboardInterrupt

    (
        model[1].register_forward_hook
        if where == "in a forward"
        else model[1].register_full_backward_hook
    )(strike)
    with pytest.raises(KeyboardInterrupt), infinity.accumulate(model):
        loss_of(model, 0, 0).backward()
        struck.append(True)
        if where == "between":
            raise KeyboardInterrupt
        loss_of(model, 0, 1).backward()
    with pytest.raises(infinity.UsageError, match="half done"):
        optimizer.step()
    struck.clear()
    optimizer.zero_grad()
    plain, plain_optimizer = build()
    assert train(model, optimizer, joined=True) == train(plain, plain_optimizer, joined=False)
    assert not models.differing(model.state_dict(), plain.state_dict())


def test_an_evaluation_beside_it_and_a_block_without_backwards():
    model, optimizer = infinity.wrap_model(*build(), {"params": "host", "optimizer": "host"})
    with infinity.accumulate(model), torch.no_grad():
        first = [loss_of(model, 0, part).item() for part in range(2)]
    assert all(param.grad is None for param in model.parameters())
    plain, _ = build()
    assert first == [loss_of(plain, 0, part).item() for part in range(2)]
    assert not any(unit.residency.name == "RESIDENT" for unit in parts_of(model).units)
    plain_told = train(*build(), joined=False)
    assert train(model, optimizer, joined=True) == plain_told
