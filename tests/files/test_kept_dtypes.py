"""Kept dtypes: which parameters stay in fp32 when the rest of a model has a 16-bit dtype."""

from __future__ import annotations

import torch
from torch import nn

from infinity.core.wrap.described_model import read_model
from infinity.core.wrap.parts import Parts, parts_of
from infinity.files.kept_dtypes import computing_dtypes, keeps_fp32

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.feed = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)


class Planned(Layer):
    """A model with a plan of dtypes, as those of transformers."""

    def __init__(self, **plan: torch.dtype):
        super().__init__()
        self.plan = plan or {"router": F32}

    def _get_dtype_plan(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        return self.plan if dtype is BF16 else {}


def of_pattern(pattern: str, *more: str) -> nn.Module:
    return Planned(**{pattern: F32}, **dict.fromkeys(more, F32))


def kept_of(model: nn.Module, *names: str, dtype: torch.dtype | None = BF16) -> list[bool]:
    return [keeps_fp32(parts_of(model)[0], dtype)(name) for name in names]


def test_what_the_plan_of_a_model_has_in_fp32_stays():
    """Twins: other names, what the plan has in another dtype, and for another dtype none."""
    model = Planned(router=F32, bias=F32, feed=BF16)
    names = ("router.weight", "bias", "feed.weight", "other")
    assert kept_of(model, *names) == [True, True, False, False]
    assert kept_of(model, "router.weight", dtype=F16) == [False]
    assert kept_of(model, "router.weight", dtype=None) == [False]
    assert kept_of(Layer(), "router.weight") == [False]


def test_a_plan_is_asked_only_for_a_dtype():
    model = Planned()
    model._get_dtype_plan = {"router": F32}  # no function
    assert kept_of(model, "router.weight") == [False]
    model._get_dtype_plan = lambda dtype: {"router": F32}
    assert kept_of(model, "router.weight", dtype=None) == [False]


def test_a_star_in_a_plan_stands_for_any_text():
    """Twin: only there."""
    model = of_pattern("layers.*.router")
    names = ("layers.10.mlp.router.weight", "model.layers.0.router", "layers.0.feed.weight")
    assert kept_of(model, *names, "router.layers.0.weight") == [True, True, False, False]
    assert kept_of(of_pattern("router*"), "router.weight", "route.weight") == [True, False]


def test_adapted_layers_are_known_by_their_own_names():
    """Twin: a name that only begins as PEFT's does not."""
    model = of_pattern("router.weight")
    names = ("router.base_layer.weight", "router.base_layers.weight", "router.lora_A.weight")
    assert kept_of(model, *names) == [True, False, False]
    assert kept_of(of_pattern("routers.weight"), "router.base_layers.weight") == [False]


def test_the_plan_of_a_model_inside_is_for_its_own_parameters():
    """By their names inside. Twins: a sibling whose name begins alike, and one without a plan."""
    model = nn.ModuleDict(
        {"text": of_pattern("^router"), "text2": of_pattern("^feed"), "c": Layer()}
    )
    names = ("text.router.weight", "text.feed.weight", "text2.router.weight", "text2.feed.weight")
    assert kept_of(model, *names) == [True, False, False, True]
    assert kept_of(model, "c.router.weight", "router.weight") == [False, False]


def test_a_plan_covers_the_models_inside_it():
    """Twin: without one around it a model's own plan counts."""
    inner, outer = of_pattern("feed"), Planned()
    outer.deep = nn.Sequential(inner)
    names = ("deep.0.feed.weight", "deep.0.router.weight")
    assert kept_of(outer, *names) == [False, True]
    assert kept_of(nn.ModuleDict({"deep": outer.deep}), *names) == [True, False]
    around = nn.ModuleDict({"model": outer})
    assert kept_of(around, *(f"model.{name}" for name in names)) == [False, True]


def test_the_first_part_of_a_model_speaks_for_all():
    """Twin: the plan of the second is not asked, nor if it is the only one."""
    first, second = Planned(), of_pattern("feed")
    first.only, second.last = nn.Linear(1, 1), nn.Linear(1, 1)
    assert kept_of(Parts([first, second]), "1.router.weight", "1.feed.weight") == [True, False]
    assert kept_of(Parts([Layer(), Planned()]), "1.router.weight") == [False]


# --- what a parameter computes in ---


def test_a_parameter_computes_in_the_dtype_of_the_job_unless_it_is_kept():
    """Twins: integers, and a job without a dtype, leave each its own."""
    model = Planned().to(F16)
    model.table = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
    dtype_of = computing_dtypes(read_model(model), BF16)
    params = model.router.weight, model.feed.weight, model.table
    assert [dtype_of(param) for param in params] == [F16, BF16, torch.int64]
    dtype_of = computing_dtypes(read_model(model), None)
    assert [dtype_of(param) for param in params] == [F16, F16, torch.int64]


def test_a_tied_parameter_is_kept_under_any_of_its_names():
    """Twin: what is equal to it is not."""
    model = Planned()
    model.head = nn.Linear(2, 2, bias=False)
    model.feed.weight = model.router.weight
    nn.init.ones_(model.router.weight), nn.init.ones_(model.head.weight)
    dtype_of = computing_dtypes(read_model(of_tied := nn.Sequential(model)), BF16)
    assert dtype_of(model.feed.weight) is F32 and dtype_of(of_tied[0].head.weight) is BF16
    around = nn.ModuleDict({"first": nn.Linear(2, 2, bias=False), "model": Planned()})
    around["first"].weight = around["model"].router.weight
    assert computing_dtypes(read_model(around), BF16)(around["first"].weight) is F32
