"""Module settings: ranks that have built other models are told before anything changed; two ranks
over gloo, of which the second differs."""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from models import at_home
from ranks import Jobs
from torch import nn

from infinity.core.wrap.module_settings import describe_modules, describe_orders

ORDERS = {
    "transposed": "the memory order of 0.weight is row-major on rank 0 and by dims 1, 0 on rank 1",
    "as_strided": (
        "the memory order of 2.inner.weight is row-major on rank 0 and by dims 1, 0 on rank 1"
    ),
    "channels_last": (
        "the memory order of 4.1.weight is row-major on rank 0 and by dims 0, 2, 3, 1 on rank 1"
    ),
}
SETTINGS = {
    "an activation": "module 1 is torch.nn.modules.activation.ReLU(inplace=False) on rank 0 and",
    "a dropout": "module 3 is torch.nn.modules.dropout.Dropout(inplace=False, p=0.0) on rank 0 and",
    "a module more": "module 5 is absent on rank 0 and torch.nn.modules.dropout.Dropout(",
    "a function": "act=torch.nn.functional.relu, heads=2",
    "heads": "heads=4",
    "a method": "squash=None.TensorBase.tanh",
    "a partial": "('other', 3)",
}
HOST = {"params": "host", "optimizer": "host"}


@pytest.fixture(scope="module")
def two(standing_ranks, launch_folder) -> Mapping[str, Any]:
    """Everything that two ranks do."""
    swap = launch_folder / "swap"
    places = [
        {"config": HOST | {"shard": "gradients"}},
        {"config": at_home("nvme", "nvme", swap)},
        {"config": HOST, "replicas": True},
    ]
    jobs: dict[str, dict] = {
        f"differs:{apart}": {"apart": apart, **place} for apart, place in zip(ORDERS, places)
    }
    jobs |= {f"differs:{apart}": {"apart": apart, "config": HOST} for apart in SETTINGS}
    jobs |= {f"differs:{apart}": {"apart": apart, "config": HOST} for apart in ("gaps", "its own")}
    jobs["differs:twin"] = {"apart": "transposed", "config": HOST, "fault": True}
    for home in ("device", "host", "nvme"):
        config = at_home(home, home, swap)
        jobs[f"in_two_orders:{home}"] = {"config": config, "folder": str(launch_folder / home)}
    return Jobs(standing_ranks(2), "built_jobs", jobs)


def settings_of(model: nn.Module, **given) -> dict[str, str]:
    return describe_modules({each: name for name, each in model.named_modules()}, **given)


@pytest.mark.parametrize("apart", ORDERS)
def test_a_parameter_in_another_memory_order_is_refused_by_name_and_ranks(two, apart):
    """Arrays are flat in the parameter's own order, so bytes of two orders must not be
    exchanged."""
    for rank in two[f"differs:{apart}"]:
        assert rank["said"].startswith(f"ConfigError: wrap_model: {ORDERS[apart]}"), rank["said"]
        assert "weight.data = weight.data.contiguous()" in rank["said"]
        assert "an attribute whose name begins with _ is not compared" in rank["said"]


@pytest.mark.parametrize("apart", SETTINGS)
def test_modules_with_other_settings_are_refused_by_name(two, apart):
    for rank in two[f"differs:{apart}"]:
        assert rank["said"].startswith("ConfigError: wrap_model: module "), rank["said"]
        assert SETTINGS[apart] in rank["said"], rank["said"]


def test_what_ranks_may_have_of_their_own_is_taken(two):
    """Seeds, ranks, names of devices and folders, times and private counters; a weight with gaps,
    which flat arrays do not have."""
    for apart in ("gaps", "its own"):
        for rank in two[f"differs:{apart}"]:
            assert rank["said"] == "was taken" and torch.equal(rank["weights"], rank["right"])


def test_without_the_comparison_other_weights_are_trained(two):
    """The failing twin."""
    for rank in two["differs:twin"]:
        assert rank["said"] == "was taken" and not torch.equal(rank["weights"], rank["right"])


@pytest.mark.parametrize("home", ["device", "host", "nvme"])
def test_an_order_that_all_ranks_have_is_right(two, home):
    """Weights stored transposed on all ranks; optimizer state and loaded values in another order on
    one; a checkpoint that is loaded in another order than it was saved. torch's own products have
    other last bits then."""
    for rank in two[f"in_two_orders:{home}"]:
        assert rank == [True] * 4


def test_an_order_is_that_of_the_elements_alone():
    """A dim of one element has no order; an expanded weight and one with gaps are stored without
    repeats and gaps."""
    told = describe_orders(
        {
            "kernel of one": torch.empty(4, 3, 1, 1).to(memory_format=torch.channels_last),
            "expanded": torch.empty(1, 3).expand(4, 3),
            "with gaps": torch.empty(4, 6)[:, ::2],
            "turned": torch.empty(2, 3, 4).permute(2, 0, 1),
        }.items()
    )
    assert [*told.values()] == ["row-major"] * 3 + ["by dims 1, 2, 0"]


def test_settings_leave_out_what_is_not_plain():
    """Private names, tensors, and modules that are ``unlike``. Twin: a plain attribute is told."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    before = settings_of(model)
    model[0]._seen, model[0].table, model[0].local_rank = 3, torch.ones(2), 1
    model.eval()
    assert settings_of(model) == before
    model[0].heads = 4
    assert settings_of(model) != before
    assert settings_of(model, unlike=[model[0]]).keys() == {"the outermost module", "module 1"}


class Count(int):
    def __repr__(self) -> str:
        return object.__repr__(self)


class Away:
    def __getattr__(self, name: str) -> None:
        raise RuntimeError(f"no {name} here")


class Kind(enum.Enum):
    OWN = object()


def in_itself() -> list:
    made: list = []
    made.append(made)
    return made


@pytest.mark.parametrize(
    "value, told",
    [
        (Count(3), "value=3"),
        (Kind.OWN, "value=Kind.OWN"),
        (torch.Tensor.relu, "value=None.TensorBase.relu"),
        (functools.partial(str.lower, "A"), "value=(None.str.lower, ('A'), ())"),
        (Away(), ""),
        (mock.MagicMock(), ""),
        (in_itself(), ""),
        ((each for each in ()), ""),
        (torch.Size([2, 3]), "value=(2, 3)"),
    ],
    ids="count enum method partial attributes mock itself generator size".split(),
)
def test_settings_are_told_by_text_that_every_process_has(value, told):
    """Without code of the user's classes. Twin: what is left out and what is told, above."""
    model = nn.Identity()
    model.value = value
    text = settings_of(model)["the outermost module"]
    assert text == f"torch.nn.modules.linear.Identity({told})"


def test_long_settings_become_a_digest_that_tells_them_apart():
    model, told = nn.Identity(), []
    for last in (1, 2, 1):
        model.table = [*range(5000), last]
        told.append(settings_of(model)["the outermost module"])
    assert told[0] == told[2] != told[1] and max(map(len, told)) < 1200
