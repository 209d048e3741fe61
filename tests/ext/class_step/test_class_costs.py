"""Costs of class steps: the plan has the bytes that a class makes and keeps.

Method: classes of our own, whose tensors are known; libraries' classes, whose peak was read from
the process (`VmHWM`) at 1024 x 1024. Twin: a class with one more temporary is counted so.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn, optim

import infinity
from infinity.config import Config
from infinity.core.step.rules import recognise
from infinity.core.wrap.lay_out import lay_out
from infinity.ext.class_step.class_costs import ClassPiece, Peak, costs_of


def test_a_peak_has_what_lives_at_the_same_time():
    """Claim: neither views, nor results in place, nor what was there before."""
    before = torch.ones(100)
    with Peak() as peak:
        before.add_(1).view(10, 10).t()
        one = before * 2
        two = one + 1
        del one
        three = two.mul(2)
        del two, three
        torch.ones(50)
    assert peak.nbytes == 2 * 400


class Made(optim.Optimizer):
    """Makes ``count`` temporaries of an element each, and keeps sums of rows and columns."""

    def __init__(self, params, count: int):
        super().__init__(params, {})
        self.count = count

    def step_one(self, param: torch.Tensor, state: dict) -> dict:
        made = [param.grad * each for each in range(self.count)]
        param.data.add_(made[-1], alpha=-0.1)
        if param.dim() == 1:
            return {"all": param.grad.square(), "step": torch.tensor(1.0)}
        rows, columns = param.grad.sum(1, keepdim=True), param.grad.sum(0)
        return {"rows": rows, "columns": columns, "moment": state.get("moment", made[0])}


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_class_has_its_temporaries_and_sums(count):
    made = Made([nn.Parameter(torch.zeros(1))], count)
    found = costs_of(made.step_one, ["moment"], torch.device("cpu"), ClassPiece(7))
    assert found == ClassPiece(7, count, rows=1, columns=1, elements=0.0, of_vectors=1.0)


# Arrays that are read, stepped and written, and temporaries; in pieces, as the process had them
OF_PROCESS = {
    "Muon": (lambda p: optim.Muon(p), 3 * 3, 12.02),
    "Adafactor": (lambda p: optim.Adafactor(p), 3 * 2, 7.00),
    "transformers": (lambda p: _of("transformers.optimization", "Adafactor")(p), 3 * 2, 8.00),
    "CAME": (lambda p: _of("came_pytorch", "CAME")(p, lr=1e-3), 3 * 3, 12.00),
    "AdamP": (lambda p: _of("pytorch_optimizer", "AdamP")(p, lr=1e-3), 3 * 4, 15.98),
}


def _of(module: str, name: str):
    return getattr(pytest.importorskip(module), name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", OF_PROCESS)
def test_a_librarys_class_has_the_bytes_of_the_process(case):
    make, arrays, of_process = OF_PROCESS[case]
    piece = recognise(make([nn.Parameter(torch.zeros(4, 4))])).needs
    assert arrays + piece.temporaries == pytest.approx(of_process, abs=0.1)


def test_the_plan_has_what_the_class_keeps():
    """Claim: the sums of matrices, stacks and vectors that Adafactor keeps are the plan's."""
    net = nn.ParameterList([torch.ones(6, 4), torch.ones(3, 6, 4), torch.ones(7), torch.ones(())])
    optimizer = optim.Adafactor(net.parameters())
    config = {"params": "host"}
    named = "sums of the optimizer's class"
    planned = lay_out(net, optimizer, Config(**config))[0].terms
    kept = next(each[named] for each in planned.values() if named in each)
    net, optimizer = infinity.wrap_model(net, optimizer, config)
    for param in net:
        param.grad = torch.ones_like(param)
    optimizer.step()
    found = [
        value.nbytes
        for of in optimizer.state_dict()["state"].values()
        for key, value in of.items()
        if key != "step"
    ]
    assert kept == sum(found) == 4 * (6 + 4 + 3 * (6 + 4) + 7 + 1)


@pytest.mark.parametrize(
    "shape, expected", [((6, 4), 6 * 2 + 4), ((3, 6, 4), 3 * (6 * 2 + 4)), ((7,), 7), ((0, 4), 0)]
)
def test_what_is_kept_follows_the_shape(shape, expected):
    piece = ClassPiece(1, rows=2, columns=1, of_vectors=1.0)
    assert piece.kept_nbytes(shape) == 4 * expected
    half = ClassPiece(1, elements=0.5)
    assert half.kept_nbytes((3, 5)) == 4 * math.ceil(7.5)
