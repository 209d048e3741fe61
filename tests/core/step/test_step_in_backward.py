"""step_in_backward: units are stepped while the backward goes on, with the arithmetic of a step
after it."""

from __future__ import annotations

import contextlib

import pytest
import torch
from models import Fail, at_home, differing, loss_of, seeded, tokens, transformer
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity

SEED = 11


def trained(home: str, folder, how: str, *, frozen: bool = False, micro: int = 1):
    model = transformer(SEED)
    if frozen:
        for param in model.blocks[0].parameters():
            param.requires_grad_(False)
        next(model.blocks[1].parameters()).requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer = infinity.wrap_model(model, optimizer, at_home(home, home, folder))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    losses = []
    for step in range(4):
        torch.manual_seed(step)
        for index in range(micro):
            loss = loss_of(model, tokens(SEED + step + index)) / micro
            if how == "inside" and index == micro - 1:
                with optimizer.step_in_backward():
                    loss.backward()
            else:
                loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return losses, model.state_dict(), optimizer.state_dict()["state"]


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("frozen", [False, True], ids=["all", "partly frozen"])
@pytest.mark.parametrize("home", ["device", "host", "nvme"])
def test_the_same_bits_as_a_step_after_the_backward(home, frozen, micro, tmp_path):
    """Method: train with the step inside the last backward and after it; losses, weights and
    moments have the same bits."""
    inside, after = (
        trained(home, tmp_path, how, frozen=frozen, micro=micro) for how in ("inside", "after")
    )
    assert torch.equal(torch.stack(inside[0]), torch.stack(after[0]))
    assert differing(inside[1], after[1]) == []
    for index, state in after[2].items():
        assert differing(inside[2][index], state) == []


def test_units_are_stepped_before_the_backward_ends(tmp_path):
    """Method: a hook on the first block's input looks at the last block's gradients: consumed
    already. Twin: without the context they have landed and wait."""
    seen = []
    for inside in (True, False):
        model = seeded(
            SEED,
            lambda: nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4))),
        )
        model, optimizer = infinity.wrap_model(
            model, torch.optim.AdamW(model.parameters()), at_home("host", "host", tmp_path)
        )
        x = torch.ones(2, 64, requires_grad=True)
        x.register_hook(lambda _: seen.append(model[3][0].weight._infinity.grad.state.name))
        loss = model(x).sum()
        if inside:
            with optimizer.step_in_backward():
                loss.backward()
        else:
            loss.backward()
        optimizer.step()
    assert seen == ["CONSUMED", "LANDED"]


def test_what_was_stepped_cannot_be_clipped(tmp_path):
    """Method: clip after a backward that stepped; UsageError. max_grad_norm with it is refused
    before anything happens."""
    for options, when in (({}, "after"), ({"max_grad_norm": 1.0}, "before")):
        model = transformer(SEED)
        config = at_home("host", "host", tmp_path, **options)
        model, optimizer = infinity.wrap_model(model, torch.optim.AdamW(model.parameters()), config)
        loss = loss_of(model, tokens(SEED))
        before = model.state_dict()
        if when == "before":
            with (
                pytest.raises(infinity.UsageError, match="max_grad_norm"),
                optimizer.step_in_backward(),
            ):
                loss.backward()
            assert differing(model.state_dict(), before) == []
            continue
        with optimizer.step_in_backward():
            loss.backward()
        with pytest.raises(infinity.UsageError, match="are stepped"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def test_an_exception_inside_ends_the_job(tmp_path):
    """Method: a backward that fails half-way after units were stepped; nothing can be trained or
    saved on after it, and a checkpoint from before loads into a new model. Twin: one that fails
    before any unit was stepped can be tried again.
    """

    def build(place: int) -> nn.Module:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks, self.fails = nn.ModuleList(nn.Linear(64, 64) for _ in range(4)), True

            def forward(self, x):
                for number, block in enumerate(self.blocks):
                    x = block(x)
                    x = Fail.apply(x) if self.fails and number == place else x
                return x

        return seeded(SEED, Model)

    for place, ends in ((1, True), (3, False)):
        model = build(place)
        model, optimizer = infinity.wrap_model(
            model, torch.optim.AdamW(model.parameters()), at_home("host", "host", tmp_path)
        )
        with pytest.raises(ValueError, match="stop"), optimizer.step_in_backward():
            model(torch.ones(2, 64)).sum().backward()
        model.fails = False
        if ends:
            with pytest.raises(infinity.UsageError, match="step_in_backward"):
                model(torch.ones(2, 64))
        else:
            optimizer.zero_grad()
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()


@pytest.mark.parametrize("use", ["save_checkpoint", "unwrap_model"])
@pytest.mark.parametrize("where", ["inside", "behind"])
def test_half_a_step_is_neither_saved_nor_unwrapped(use, where, tmp_path):
    """Method: a save or an unwrap when the backward has stepped its units, in the block or behind
    it. Twin: after step() both are done, and the weights are those of a run without the attempt."""
    found = []
    for tries in (True, False):
        model = transformer(SEED)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = infinity.wrap_model(model, optimizer, at_home("host", "host", tmp_path))

        def attempt(model=model, optimizer=optimizer) -> None:
            (
                infinity.save_checkpoint(tmp_path / "half", model, optimizer)
                if use == "save_checkpoint"
                else infinity.unwrap_model(model)
            )

        torch.manual_seed(SEED)  # of the dropout
        with optimizer.step_in_backward():
            loss_of(model, tokens(SEED)).backward()
            if tries and where == "inside":
                with pytest.raises(infinity.UsageError, match="part of the units are stepped"):
                    attempt()
        if tries and where == "behind":
            with pytest.raises(infinity.UsageError, match="part of the units are stepped"):
                attempt()
        optimizer.step()
        found.append(model.state_dict())
        attempt()
    assert differing(*found) == []


class Twice(nn.Module):
    """Runs its blocks twice, each in a checkpoint."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in [*self.blocks, *self.blocks]:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("home", ["device", "host"])
def test_a_block_that_runs_twice_is_stepped_once_both_are_behind(home, reentrant):
    """A reentrant checkpoint's own backward brings the gradients of one use. Twin: a step after the
    backward, in plain torch."""
    found = []
    for wraps in (False, True):
        model = seeded(3, lambda: Twice(reentrant=reentrant))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
        if wraps:
            model, optimizer = infinity.wrap_model(model, optimizer, at_home(home, home, None))
        for step in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            loss = model(x.requires_grad_()).square().mean()
            with optimizer.step_in_backward() if wraps else contextlib.nullcontext():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([param.detach().clone() for param in model.parameters()])
    assert all(map(torch.equal, *found))
