"""Buffers stay with their modules, and are counted where they lie."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from models import seeded
from torch import nn

import infinity
from infinity.core.wrap import lay_out

SEED, MIB = 8, 2**20
HOST = {"params": "host", "optimizer": "host"}


class WithBuffers(nn.Module):
    """8 MiB of buffers over a layer of a few KiB, and views of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("table", torch.ones(2 * MIB))
        self.register_buffer("part", self.table[:16])
        self.register_buffer("same", self.table[16:32], persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.part


def wrap(**config: Any) -> tuple[Any, Any]:
    model = seeded(SEED, WithBuffers)
    return infinity.wrap_model(model, torch.optim.AdamW(model.parameters()), {**HOST, **config})


@pytest.mark.parametrize("budget, tier", [("host_memory", "host"), ("device_memory", "device")])
def test_buffers_count_where_they_lie(budget, tier):
    """Method: 8 MiB of buffers under 4 MiB: refused, by name, with the least that works; with that
    a step runs within the plan, and stats tells them, each storage once."""
    with pytest.raises(
        infinity.CapacityError, match=r"buffers 8\.0 MiB.*give it smaller ones"
    ) as refused:
        wrap(**{budget: "4MiB"})
    least = int(re.search(r"works here is [^()]*\((\d+) bytes", str(refused.value))[1])
    model, optimizer = wrap(**{budget: least})
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    stats = infinity.stats(model)
    assert stats.buffers_nbytes == 8 * MIB
    assert 8 * MIB <= stats.tiers[tier].peak_nbytes <= stats.tiers[tier].planned_nbytes <= least
    assert model.table.numel() == 2 * MIB and model.part.data_ptr() == model.table.data_ptr()


def test_buffers_on_meta_are_counted_before_they_are_there():
    """Method: the same model on meta, where a buffer has no storage yet."""
    with torch.device("meta"):
        model = WithBuffers()
    with pytest.raises(infinity.CapacityError, match=r"buffers 8\.0 MiB"):
        infinity.wrap_model(model, None, {"params": "host", "host_memory": "4MiB"})


def test_without_the_count_they_pass_in_silence(monkeypatch):
    """The twin: with nothing counted the same model is taken under a budget that it exceeds."""
    monkeypatch.setattr(lay_out, "unmoved_nbytes", lambda model: 0)
    model, _ = wrap(host_memory="4MiB")
    assert infinity.stats(model).tiers["host"].peak_nbytes < 4 * MIB
