"""ForwardEdits: what a forward changes in its own parameters is kept or refused, and what it did
not change is neither."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import infinity
from infinity.core.params.forward_edits import ForwardEdits

DEVICE = {"params": "device", "optimizer": "device"}


class Edited(nn.Module):
    """Changes its bias, or its weight, in its forward."""

    def __init__(self, edit) -> None:
        super().__init__()
        self.linear, self.edit = nn.Linear(8, 8), edit
        with torch.no_grad():
            # As plain steps do: 300 is past the small numbers, of which Python has one object each.
            for _ in range(300):
                self.linear.weight.mul_(1)
        self.linear.register_forward_hook(lambda module, *_: self.edit(module))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def made(edit, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = Edited(edit).to(dtype)
    return infinity.wrap_model(model, torch.optim.AdamW(model.parameters()), DEVICE)[0]


def test_beside_a_change_through_data_the_others_are_let_be():
    """Method: a home that is the device, with masters; of a change in place nobody has the value
    before, so that an unchanged weight which was taken for changed would be refused."""
    model = made(lambda module: module.bias.data.fill_(2), torch.bfloat16)
    before = model.state_dict()["linear.weight"].clone()
    model(torch.ones(1, 8, dtype=torch.bfloat16))
    assert torch.equal(model.state_dict()["linear.weight"], before)
    assert bool((model.state_dict()["linear.bias"] == 2).all())


@torch.no_grad()
def fill(module: nn.Module) -> None:
    module.weight.fill_(2)


def test_a_change_in_place_is_kept_where_the_device_has_the_master():
    """Method: fp32, whose weights are their own masters. Twin: bf16 with low bits beside it, which
    could not follow, is refused."""
    model = made(fill, torch.float32)
    model(torch.ones(1, 8))
    assert bool((model.state_dict()["linear.weight"] == 2).all())
    with pytest.raises(infinity.UsageError, match="its master cannot follow"):
        made(fill, torch.bfloat16)(torch.ones(1, 8, dtype=torch.bfloat16))


@pytest.mark.parametrize("read_fails", [False, True])
def test_bytes_that_come_in_a_forward_are_no_edit(read_fails):
    """Method: a parameter that is compared by its bytes, as one that was exported. Claim: also if
    the read fails behind some of them. Twin: a change before others came is found all the same."""
    found = []
    for edits_first in (False, True):
        param = nn.Parameter(torch.zeros(64))
        edits = ForwardEdits([SimpleNamespace(params=[param])])
        edits.begin([param])
        if edits_first:
            param.data[0] = 1
        with contextlib.suppress(OSError), edits.adding_rows():
            param.data[1] = 2
            if read_fails:
                raise OSError("the disk")
        found.append(edits.look())
    assert found == [False, True]
