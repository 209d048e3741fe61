"""The error of a card without memory in a wrapped model says where it is, and what needs less."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import infinity
from infinity.core.run.registry import wrapped
from infinity.ext.blocks.no_memory import LESS, note_memory

HOST = {"params": "host", "optimizer": "host"}


class Full(nn.Module):
    """A layer whose products do not fit."""

    def __init__(self, error: Exception):
        super().__init__()
        self.weight, self._error = nn.Parameter(torch.ones(4)), error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise self._error


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError])
def test_only_a_forward_without_memory_is_told_what_needs_less(kind):
    """Method: an error of torch's inside a block of a wrapped model, which passes two modules of
    the engine. Twin: another error gets no note."""
    model = nn.Sequential(nn.Linear(4, 4), Full(kind("CUDA out of memory. Tried to allocate")))
    infinity.wrap_model(model, torch.optim.AdamW(model.parameters()), HOST)
    with pytest.raises(kind, match="CUDA out of memory") as found:
        model(torch.ones(2, 4))
    notes = getattr(found.value, "__notes__", [])
    assert len(notes) == (kind is torch.OutOfMemoryError)
    assert all("planned for state" in note and note.endswith(LESS) for note in notes)
    for remedy in ("recompute=True", "--gradient-checkpointing", "--micro-batch 1", "sequences"):
        assert remedy in LESS


def test_the_note_has_what_is_free_on_a_card():
    """Method: the memory of a card stood in for. Twin: a card that does not tell."""
    model = nn.Linear(4, 4)
    infinity.wrap_model(model, torch.optim.AdamW(model.parameters()), HOST)
    job = wrapped(model).engine.job
    for free, said in ((3 << 20, "3.0 MiB free"), (None, "planned for state. ")):
        device = SimpleNamespace(
            where=torch.device("meta"), memory=SimpleNamespace(free_nbytes=lambda free=free: free)
        )
        note_memory(
            SimpleNamespace(device=device, planned=job.planned), error := torch.OutOfMemoryError()
        )
        assert said in error.__notes__[0]
