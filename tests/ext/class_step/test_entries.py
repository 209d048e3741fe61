"""Entries: what class steps need of memory is a term of the plan, counted by hand."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from inside import parts_of
from models import at_home, seeded
from torch import nn

import infinity
from infinity import native
from infinity.core import seams
from infinity.core.machine.tiers import Tier
from infinity.core.plan.unit_sizes import FlatParamSize, UnitSize
from infinity.core.seams import Term
from infinity.core.step.known import Known
from infinity.core.step.rules import Recogniser
from infinity.core.units.flat_param_spec import FlatParamSpec
from infinity.ext.class_step.class_costs import ClassPiece
from infinity.ext.class_step.entries import (
    BY_CLASS,
    STEP,
    SUMS,
    ClassSteps,
    class_entry,
    entry_of,
)
from infinity.ext.class_step.segments import EVERY, PIECE

SPEC = FlatParamSpec(
    wrapped_dtype=torch.float32,
    dtype=torch.float32,
    master=native.Master.OWN,
    grad_dtype=torch.float32,
    moment_dtype=torch.float32,
    moments=("exp_avg",),
    stepped=True,
    needs=ClassPiece(1000, temporaries=2, rows=1, columns=1),
)
SHAPES = ((10, 30), (20, 40))


def terms(*flat_params: FlatParamSize, is_host: bool = True) -> list[Term]:
    units = [UnitSize("u", flat_params)]
    return list(ClassSteps.terms(None, units, SimpleNamespace(is_host=is_host)))


def test_a_step_needs_the_largest_parameter_three_times_with_its_temporaries():
    """By hand: 800 elements, of which 3 arrays are read, stepped and written. Twins: the piece is
    the most, and another rank's part comes as well."""
    flat = FlatParamSize(SPEC, 1100, shapes=SHAPES)
    kept = Term(Tier.HOST, SUMS, 4 * (10 + 30 + 20 + 40))
    step = 4 * 800 * (3 * 3 + 2)
    assert terms(flat) == [Term(Tier.HOST, STEP, step), kept]
    assert terms(flat, is_host=False) == [*terms(flat), Term(Tier.DEVICE, STEP, step)]
    small = dataclasses.replace(flat, spec=dataclasses.replace(SPEC, needs=ClassPiece(100, 2)))
    assert terms(small)[0].nbytes == 4 * 100 * (3 * 3 + 2)
    over_two = dataclasses.replace(flat, shards=2)
    assert terms(over_two)[0].nbytes == 4 * 800 * (4 * 3 + 2)


def test_the_largest_step_of_all_is_planned_and_what_each_keeps():
    """Twins: what a kernel steps and what is frozen need nothing."""
    flat = FlatParamSize(SPEC, 1100, shapes=SHAPES)
    other = FlatParamSize(SPEC, 35, shapes=((5, 7),))
    both = terms(other, flat)
    assert both[0] == terms(flat)[0] and both[1].nbytes == terms(flat)[1].nbytes + 4 * 12
    by_kernel = dataclasses.replace(flat, spec=dataclasses.replace(SPEC, needs=None))
    frozen = dataclasses.replace(flat, spec=dataclasses.replace(SPEC, stepped=False))
    assert terms(by_kernel, frozen) == []


def test_a_size_without_shapes_counts_all_its_elements():
    assert terms(FlatParamSize(SPEC, 500))[0].nbytes == 4 * 500 * (3 * 3 + 2)


def test_an_entry_names_the_step_of_its_class():
    """Of a class, and of the path of one that is not imported. Twin: what is told is kept."""
    assert [known.step for known in BY_CLASS] == ["Adafactor.step", "Muon.step"]
    assert class_entry("lib.optim.Own").step == "Own.step"
    told = class_entry("lib.optim.Own", "Base.step", whole=True)
    assert told.step == "Base.step" and told.whole and told.rule is None


class SignMomentum(torch.optim.Optimizer):
    """An optimizer of three lines, as a user writes it."""

    def __init__(self, params, lr: float = 0.01, beta: float = 0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    moment = state.setdefault("moment", torch.zeros_like(param))
                    moment.lerp_(param.grad, 1 - group["beta"])
                    param.sub_(moment.sign(), alpha=group["lr"])


class SignMomentums(Recogniser):
    supported = "SignMomentum"

    @classmethod
    def recognise(cls, optimizer: torch.optim.Optimizer) -> Known | None:
        return entry_of(optimizer) if type(optimizer) is SignMomentum else None


@pytest.mark.parametrize("listed", [True, False])
def test_a_class_of_a_script_steps_in_pieces_once_its_recogniser_is_listed(
    listed, monkeypatch, swap
):
    """Compares weights after three steps from NVMe with the plain class's. Twin: not listed it
    steps whole parameters, with the same bits."""
    if listed:
        monkeypatch.setattr(seams, "RULES", [*seams.RULES, SignMomentums])
    found = []
    for wraps in (False, True):
        model = seeded(1, lambda: nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 8)))
        optimizer = SignMomentum(model.parameters())
        if wraps:
            model, optimizer = infinity.wrap_model(model, optimizer, at_home("nvme", "nvme", swap))
            flat = parts_of(model).units[0].flat_params[0]
            assert flat.spec.needs.numel == (PIECE if listed else EVERY)
        for step in range(3):
            model(torch.full((4, 64), step + 1.0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([value.clone() for value in model.state_dict().values()])
    assert all(map(torch.equal, *found))
