"""Losses that read the head's weight outside of its forward, and write its gradient in theirs: the
model at home has the bits of the plain one.

**fused loss**: an autograd function over hidden states, the head's weight and labels, which never
has all logits at once. TRL's is part of its trainers, whose tests are test_trl.py's. Liger's runs
here where it is installed, in Triton's interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import at_home
from trainer_cases import SEED, VOCABULARY, llama

import infinity

PIECE = 8  # rows of logits at once


class FusedLoss(torch.autograd.Function):
    """Cross entropy of a linear head, a few rows at a time. The gradients are made in the forward,
    and kept, as Liger's are."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor):
        loss = hidden.new_zeros(())
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for begin in range(0, len(hidden), PIECE):
            rows = slice(begin, begin + PIECE)
            logits = hidden[rows] @ weight.T
            logs = torch.log_softmax(logits, dim=-1)
            loss -= logs.gather(1, labels[rows, None]).sum()
            grads = logs.exp()
            grads.scatter_add_(1, labels[rows, None], -torch.ones_like(labels[rows, None]).float())
            grad_hidden[rows] = grads @ weight
            grad_weight += grads.T @ hidden[rows]
        ctx.save_for_backward(grad_hidden / len(hidden), grad_weight / len(hidden))
        return loss / len(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        return *(grad * each for each in ctx.saved_tensors), None


def run(loss_of: Any, home: dict[str, Any] | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(SEED)
    model = llama(attention_dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    if home is not None:
        model, optimizer = infinity.wrap_model(model, optimizer, home)
    losses = []
    for step in range(3):
        drawn = torch.Generator().manual_seed(step)
        ids = torch.randint(0, VOCABULARY, (2, 12), generator=drawn)
        hidden = model.model(ids).last_hidden_state[:, :-1].flatten(0, 1)
        loss = loss_of(hidden, model.lm_head.weight, ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def plain(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(hidden @ weight.T, labels)


@pytest.mark.parametrize("home", ["device", "hostile"])
def test_a_fused_loss_has_the_bits_of_the_plain_model(home, tmp_path):
    """Twin: it is not the same arithmetic as the plain loss, whose losses are near."""
    config = at_home(home, home, tmp_path)
    ours, theirs = (run(FusedLoss.apply, config), run(FusedLoss.apply, None))
    assert ours[0] == theirs[0]
    assert all(torch.equal(ours[1][name], value) for name, value in theirs[1].items())
    assert ours[0] == pytest.approx(run(plain, None)[0], rel=1e-5)


LIGER = """
import sys
sys.path[:0] = sys.argv[2:]
import test_fused_losses as tests
from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
loss = LigerFusedLinearCrossEntropyLoss()
of_liger = lambda hidden, weight, labels: loss(weight, hidden, labels)
home = {"params": "nvme", "optimizer": "nvme", "nvme_paths": [sys.argv[1]]}
ours, theirs = tests.run(of_liger, home), tests.run(of_liger, None)
assert ours[0] == theirs[0], (ours[0], theirs[0])
assert all(tests.torch.equal(ours[1][name], value) for name, value in theirs[1].items())
"""


@pytest.mark.slow
def test_ligers_loss_has_the_bits_of_the_plain_model(tmp_path):
    pytest.importorskip("liger_kernel")
    folders = [str(Path(__file__).parent), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", LIGER, str(tmp_path), *folders],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
