"""Passes: what a forward holds, and what of it is no activation."""

from __future__ import annotations

import pytest
import torch
from inside import parts_of
from models import seeded
from torch import nn

import infinity
from infinity.core.params.parameter import StoredParameter
from infinity.errors import CapacityError
from infinity.torch_private import top_hooks


def test_a_forward_that_finds_no_room_for_its_second_unit_lets_the_first_go(monkeypatch):
    """Method: an owner of two units, of which the second cannot be held. Nothing but the error is
    left of it, since the model may catch that and go on. Twin: with room both are held."""
    model = seeded(1, lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(2))))
    model, _ = infinity.wrap_model(
        model, torch.optim.SGD(model.parameters(), lr=0.1), {"params": "host", "optimizer": "host"}
    )
    engine = parts_of(model).engine
    prefetcher, passes, units = (
        parts_of(engine).prefetcher,
        engine.passes,
        parts_of(engine).units[:2],
    )

    def hold(unit, *, real=prefetcher.hold, **how):
        if unit is units[1]:
            raise CapacityError("no room")
        return real(unit, **how)

    with monkeypatch.context() as patch:
        patch.setattr(prefetcher, "hold", hold)
        with pytest.raises(CapacityError, match="no room"):
            passes.enter(model[0], units, is_root=False)
    assert not any(map(prefetcher.is_held, units)) and not passes.job.running.frames
    passes.enter(model[0], units, is_root=False)
    assert all(map(prefetcher.is_held, units))
    passes.leave(model[0], (), {}, None)
    assert not any(map(prefetcher.is_held, units)) and not passes.job.running.frames


@pytest.mark.parametrize("place", ["edits of the first unit", "hooks on the output"])
def test_a_forward_whose_end_fails_lets_all_units_go(place, monkeypatch):
    """Method: an owner of two units, whose forward ends in an error that the model may catch. A
    unit that stayed held would never be evicted, nor send its edits home. Twin: without it."""
    model = seeded(1, lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(2))))
    model, _ = infinity.wrap_model(
        model, torch.optim.SGD(model.parameters(), lr=0.1), {"params": "host", "optimizer": "host"}
    )
    engine = parts_of(model).engine
    prefetcher, passes = parts_of(engine).prefetcher, engine.passes
    units = parts_of(engine).units[:2]

    def fail(*args):
        raise infinity.UsageError("cannot be sent home")

    for fails in (True, False):
        passes.enter(model[0], units, is_root=False)
        with monkeypatch.context() as patch:
            if fails:
                on_output = place == "hooks on the output"
                where = (passes, "_watch_backward") if on_output else (units[0], "write_edits")
                patch.setattr(*where, fail)
                with pytest.raises(infinity.UsageError, match="sent home"):
                    passes.leave(model[0], (), {}, torch.ones(2))
            else:
                passes.leave(model[0], (), {}, torch.ones(2))
        assert not any(map(prefetcher.is_held, units)) and not passes.job.running.frames
        assert {type(param) for param in model.parameters()} == {StoredParameter}


class Masked(nn.Module):
    """All that autograd saves of 64 KiB and more is the table."""

    def __init__(self, *, is_buffer: bool) -> None:
        super().__init__()
        self.linear, table = nn.Linear(4, 256), torch.ones(256, 256)
        if is_buffer:
            self.register_buffer("table", table)
        else:
            self.table = table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.table


def test_a_buffer_is_no_activation():
    """It stays on the device anyway: sending it home would free nothing. Twin: the same tensor, of
    which nobody knows that it stays."""

    def moved(is_buffer: bool) -> int:
        model = Masked(is_buffer=is_buffer)
        config = {"params": "host", "optimizer": "host", "activations": "host"}
        model, _ = infinity.wrap_model(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
        model(torch.ones(256, 4)).sum().backward()
        return infinity.stats(model).edges["device->host"].nbytes

    assert moved(False) - moved(True) == 256 * 256 * 4


class Seen(nn.Linear):
    """Notes the hooks for saved tensors that its forwards run in."""

    def forward(self, x):
        self.hooks.append(top_hooks(True))
        return super().forward(x)


class Inside(Seen):
    """Has a weight, and a layer with another one."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.inner = Seen(4, 4)

    def forward(self, x):
        return super().forward(self.inner(x))


def test_all_forwards_save_by_one_pair_of_hooks():
    """Claim: a forward makes none: what it makes lives until the backward, and has the garbage
    collector look through everything more often. Twin: other hooks around get a pair of ours for
    each forward, for it keeps them."""
    model = nn.Sequential(Inside(), Inside())
    Seen.hooks = found = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = infinity.wrap_model(model, optimizer, {"params": "host", "units": ["Seen"]})
    around = torch.autograd.graph.saved_tensors_hooks(lambda each: each, lambda each: each)
    model(torch.ones(2, 4)).sum().backward()
    model(torch.ones(2, 4)).sum().backward()
    assert len(found) == 8 and len({id(pack) for pack, _ in found}) == 1
    with around:
        model(torch.ones(2, 4)).sum().backward()
    model(torch.ones(2, 4)).sum().backward()
    first, inner, second, _ = [pack for pack, _ in found[8:12]]
    assert first is inner and len({first, second, found[0][0]}) == 3
    assert {pack for pack, _ in found[12:]} == {found[0][0]}
