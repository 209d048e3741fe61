"""Norms of landed gradients: taken as they land, and those of the bytes at home whenever they are
asked for."""

from __future__ import annotations

import random

import pytest
import torch
from models import differing
from torch import nn

import infinity


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(40, 300), nn.GELU(), nn.Linear(300, 300), nn.GELU(), nn.Linear(300, 10)
    )


def backward(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model(torch.randn(8, 40, generator=generator)).square().mean().backward()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("home", ["host", "nvme"])
def test_a_norm_is_that_of_the_bytes_at_home(home, seed, tmp_path):
    """Method: random sequences of backward, scaling, edits, zeroing and norms of several orders, on
    the wrapped model and on a plain one; every norm has the same bits."""
    print(f"seed {seed}")
    plain, model = build(), build()
    config = {"params": home, "optimizer": home, "nvme_paths": [str(tmp_path)]}
    model, optimizer = infinity.wrap_model(model, torch.optim.AdamW(model.parameters()), config)
    rng = random.Random(seed)
    for one in (plain, model):
        backward(one, 0)
    for turn in range(25):
        action, order, index = (
            rng.choice(["norm"] * 4 + ["backward", "scale", "edit", "zero", "row", "kept view"]),
            rng.choice([1, 2, 3, float("inf")]),
            rng.randrange(6),
        )
        seen = []
        for one in (plain, model):
            grad = list(one.parameters())[index].grad
            if action == "backward":
                backward(one, turn)
            elif action == "scale":
                grad.mul_(0.37)
            elif action == "edit":
                grad.add_(0.125)
            elif action == "zero":
                grad.zero_()
            elif (
                action == "row" and grad.dim() and (one is plain or home == "host")
            ):  # a view of one on disk is refused
                grad[0] = 0.25
            elif action == "kept view" and (one is plain or home == "host"):
                kept = grad.view(-1)
                torch.linalg.vector_norm(grad, order)
                kept.mul_(3)
            elif home == "nvme" and one is model and action in ("row", "kept view"):
                with torch.no_grad():
                    if action == "row":
                        grad.copy_(
                            torch.cat([torch.full_like(grad.clone()[:1], 0.25), grad.clone()[1:]])
                        )
                    else:
                        grad.copy_(grad.clone() * 3)
            seen.append(torch.linalg.vector_norm(grad, order))
        assert torch.equal(*seen), (turn, action, order)
    norms = [torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1) for one in (plain, model)]
    assert torch.equal(*norms)
    assert (
        differing(
            {str(i): p.grad.clone() for i, p in enumerate(model.parameters())},
            {str(i): p.grad for i, p in enumerate(plain.parameters())},
        )
        == []
    )


def test_norms_of_a_second_step_read_nothing_from_the_disk(tmp_path):
    """Method: gradients at home on NVMe, a host budget below them; from the second step on clipping
    reads no byte, since norms were taken as gradients landed. Twin: the first time it reads them
    all."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    config = {
        "params": "nvme",
        "optimizer": "nvme",
        "nvme_paths": [str(tmp_path)],
        "host_memory": "7MiB",
    }
    model, optimizer = infinity.wrap_model(model, torch.optim.AdamW(model.parameters()), config)
    grads = sum(4 * p.numel() for p in model.parameters())
    read = []
    for _ in range(3):
        model(torch.ones(2, 512)).square().mean().backward()
        before = infinity.stats(model).edges["nvme->host"].nbytes
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        read.append(infinity.stats(model).edges["nvme->host"].nbytes - before)
        optimizer.step()
        optimizer.zero_grad()
    assert read[0] >= grads and read[1:] == [0, 0]


def test_a_sparse_tensor_is_refused_as_a_gradient():
    """Assigning one is a UsageError that says so; the dense one is taken."""
    layer = torch.nn.Linear(4, 4)
    model, optimizer = infinity.wrap_model(
        layer, torch.optim.AdamW(layer.parameters()), {"params": "host", "optimizer": "host"}
    )
    with pytest.raises(infinity.UsageError, match="dense"):
        model.weight.grad = torch.eye(4).to_sparse()
    assert model.weight.grad is None
    model.weight.grad = torch.eye(4)
    assert torch.equal(model.weight.grad, torch.eye(4))
    infinity.unwrap_model(model, optimizer)
