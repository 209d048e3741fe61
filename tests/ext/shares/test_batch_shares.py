"""Shares in one process: what they are asked for, when they are refused, and how they end. What
several ranks do is in `ext/shares/test_shares_over_ranks.py`."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from inside import parts_of
from torch import nn

import infinity
from infinity.core.run.registry import wrapped_here
from infinity.ext.shares.shares import _checked_batch
from infinity.ranks.parallel_dims import ParallelDims

HOST = {"params": "host", "optimizer": "host"}


@pytest.fixture(autouse=True)
def drops_other_models() -> None:
    """Collects the models that other tests have dropped."""
    gc.collect()


def trained(*more: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 4), *more, nn.Linear(4, 4))
    return infinity.wrap_model(model, torch.optim.SGD(model.parameters(), lr=0.1), HOST)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_one_rank_has_every_batch_whole_and_its_bits():
    """Also beyond the 20 steps after which shares are chosen. Twin: a loop without Shares."""
    ends = []
    for given in (True, False):
        torch.manual_seed(0)
        model, optimizer = trained()
        shares = infinity.Shares(batch=6, model=model) if given else None
        for number in range(22):
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(number))
            step(model, optimizer, x[shares.slice] if shares else x)
            assert shares is None or (shares.slice == slice(0, 6) and not shares.after_step())
        ends.append({name: value.clone() for name, value in model.state_dict().items()})
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


def test_shares_of_tokens_are_parts_of_one_row():
    model, _ = trained()
    assert infinity.Shares(tokens=8192, model=model).slice == slice(0, 8192)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "give batch, the samples of a step, or tokens instead"),
        ({"batch": 4, "tokens": 4}, "give batch"),
        ({"batch": 0}, "batch=0 must be a whole number from 1"),
        ({"batch": 2.5}, "batch=2.5 must be a whole number"),
        ({"batch": True}, "batch=True must be"),
        ({"tokens": "many"}, "tokens='many' must be"),
    ],
    ids=str,
)
def test_what_is_no_batch_is_refused(given, said):
    model, _ = trained()
    with pytest.raises(infinity.ConfigError, match=said):
        infinity.Shares(**given, model=model)
    assert parts_of(model).collectives.weighing is None


@pytest.mark.parametrize(
    ("axis", "field", "why"),
    [
        ("cp", "cp_group", "parts of the same samples"),
        ("pp", "pp_group", "its micro-batches must be equal"),
        ("ep", "expert_group", "add up gradients of other ranks' samples"),
    ],
)
def test_axes_whose_ranks_need_equal_parts_are_refused(axis, field, why):
    """Twin: without the axis the batch is taken."""
    ranks = ParallelDims(size=2)
    assert _checked_batch(12, None, ranks) == 12
    with pytest.raises(infinity.ConfigError, match=f"has a {axis} axis: .*{why}.*equal part"):
        _checked_batch(12, None, replace(ranks, **{field: object()}))


def test_batch_norm_is_refused():
    """A sample's result depends on the samples beside it. Twin: with GroupNorm it is taken."""
    model, _ = trained(nn.BatchNorm1d(4))
    with pytest.raises(infinity.ConfigError, match="Shares: 1 is a BatchNorm1d.*GroupNorm"):
        infinity.Shares(batch=4, model=model)
    model, _ = trained(nn.GroupNorm(1, 4))
    infinity.Shares(batch=4, model=model)


def test_the_only_trained_model_is_found(monkeypatch):
    """A frozen one beside it is none. Twins: none, and two."""
    others = list(wrapped_here())  # of other tests, which something may still hold
    found = lambda: [each for each in wrapped_here() if each not in others]
    monkeypatch.setattr("infinity.ext.shares.shares.wrapped_here", found)
    with pytest.raises(infinity.UsageError, match="0 wrapped models.*wrap_model first"):
        infinity.Shares(batch=4)
    frozen, _ = infinity.wrap_model(nn.Linear(4, 4), None, {"params": "host"})
    model, _ = trained()
    shares = infinity.Shares(batch=4)
    assert parts_of(model).collectives.weighing is shares._split
    other, _ = trained()
    with pytest.raises(infinity.UsageError, match="2 wrapped models.*model=model"):
        infinity.Shares(batch=4)
    assert len(found()) == 3
    infinity.Shares(batch=4, model=other)
    with pytest.raises(infinity.UsageError, match="is not wrapped"):
        infinity.Shares(batch=4, model=nn.Linear(4, 4))


def test_shares_do_not_change_while_gradients_wait_for_their_step():
    """The refused calls change nothing else either. Twin: the step of a model that nobody asked."""
    ends = []
    for asked in (True, False):
        torch.manual_seed(0)
        model, optimizer = trained()
        shares = infinity.Shares(batch=4, model=model)
        model(torch.ones(4, 4)).square().sum().backward()
        for call in (
            shares.after_step,
            lambda: shares.load_state_dict({"shares": [4]}),
            lambda: infinity.Shares(batch=4, model=model),
        ):
            if asked:
                with pytest.raises(infinity.UsageError, match="1 backwards.*wait for their step"):
                    call()
        optimizer.step()
        optimizer.zero_grad()
        assert not shares.after_step()
        ends.append({name: value.clone() for name, value in model.state_dict().items()})
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


def test_weights_end_with_the_object_and_the_newer_one_has_them():
    """An older one that is still there is told so. Twin: its end changes nothing of the newer
    one."""
    model, _ = trained()
    bulk = parts_of(model).collectives
    first = infinity.Shares(batch=4, model=model)
    second = infinity.Shares(batch=6, model=model)
    with pytest.raises(infinity.UsageError, match="use the newer one"):
        first.after_step()
    del first
    assert bulk.weighing.batch == 6 and second.slice == slice(0, 6)
    del second
    assert bulk.weighing is None


def test_an_unwrapped_model_has_no_shares():
    model, optimizer = trained()
    shares = infinity.Shares(batch=4, model=model)
    plain, plain_optimizer = infinity.unwrap_model(model, optimizer)
    with pytest.raises(infinity.UsageError, match="unwrapped"):
        shares.after_step()
    step(plain, plain_optimizer, torch.ones(2, 4))


@pytest.mark.parametrize(
    "state", [None, {}, {"shares": 4}, {"shares": [0]}, {"shares": [1.5]}], ids=str
)
def test_what_is_no_state_is_refused(state):
    model, _ = trained()
    shares = infinity.Shares(batch=4, model=model)
    with pytest.raises(infinity.ConfigError, match="not a state of Shares"):
        shares.load_state_dict(state)
    shares.load_state_dict(shares.state_dict())
    shares.load_state_dict({"shares": [3, 9]})  # of two ranks
    assert shares.state_dict() == {"shares": [4]}
