"""The Python of a step: how many functions the engine calls for each block.

A small model on a fast device waits for them, so their number may only fall. Counted by
`sys.setprofile`, on one thread, without functions of C: no clock.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import infinity
from infinity.core.run.saved_weights import Unpack

# Of a block and step, beside those of plain torch, by the home; a change may lower them
MOST = {"host": 738, "device": 442}
INLINED = ("<listcomp>", "<dictcomp>", "<setcomp>")  # since Python 3.12


class Block(nn.Module):
    """A layer as Llama's: nine parameters."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x):
        hidden, heads = self.before(x), (*x.shape[:2], 4, -1)
        q, k, v = (f(hidden).view(heads).transpose(1, 2) for f in (self.q, self.k, self.v))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).reshape(x.shape))
        hidden = self.between(x)
        return x + self.down(nn.functional.silu(self.gate(hidden)) * self.up(hidden))


def calls_of(blocks: int, home: str | None) -> int:
    """Counts the calls of the sixth step of a model."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(blocks)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if home is not None:
        config = {"params": home, "optimizer": home}
        model, optimizer = infinity.wrap_model(model, optimizer, config)
    x, calls = torch.randn(2, 16, 64), 0

    def see(frame, event, argument):
        nonlocal calls
        calls += event == "call" and frame.f_code.co_name not in INLINED

    try:
        for step in range(6):
            if step == 5:
                sys.setprofile(see)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        sys.setprofile(None)
    return calls


def per_block(home: str | None) -> float:
    return (calls_of(16, home) - calls_of(8, home)) / 8


def test_a_block_and_step_take_few_calls(monkeypatch):
    """Twin: one more for each saved tensor is seen, and none where autograd saves the weights."""
    plain, found = per_block(None), {home: per_block(home) for home in MOST}
    print(f"plain {plain:.0f}, {found}")
    assert 40 < plain < 200
    assert all(found[home] - plain <= MOST[home] for home in MOST)
    unpack = Unpack.__call__
    monkeypatch.setattr(Unpack, "__call__", lambda self, saved: unpack(self, saved))
    assert per_block("host") > found["host"] + 20
    assert per_block("device") < found["device"] + 3
