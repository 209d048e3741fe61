"""Transforms of torch.func take parameters at rest, and give plain torch's bits."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import at_home
from recipe_cases import Recipes, Run, assert_same_at_home, descend, draw, fit, mlp
from torch import func, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

import infinity

RECIPES = Recipes()
recipe = RECIPES.add
X = draw(6, 8)


def loss_of(weight: torch.Tensor) -> torch.Tensor:
    return F.linear(X, weight).sin().pow(2).sum()


def forward_mode(weight: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(weight, weight.detach().cos())
        return forward_ad.unpack_dual(F.linear(X, dual).sin()).tangent.clone()


# From a weight of 4 x 8: the whole of it, or detached.
OF_A_WEIGHT: dict[str, Callable[[torch.Tensor], Any]] = {
    "vmap": lambda w: torch.vmap(torch.dot, (0, 0))(w, w),
    "vmap over the second dimension": lambda w: torch.vmap(torch.sum, -1)(w),
    "vmap beside it": lambda w: torch.vmap(lambda row: w @ row)(X),
    "vmap of a view": lambda w: torch.vmap(lambda row: w.t()[2:] @ row)(X[:, :4]),
    "vmap of vmap": lambda w: torch.vmap(torch.vmap(torch.sin))(w),
    "grad": lambda w: func.grad(loss_of)(w),
    "grad_and_value": lambda w: func.grad_and_value(loss_of)(w),
    "grad of grad": lambda w: func.grad(lambda v: func.grad(loss_of)(v).sin().sum())(w),
    "grad beside it": lambda w: func.grad(lambda x: F.linear(x, w).sin().sum())(X),
    "a gradient of each row": lambda w: torch.vmap(
        func.grad(lambda v, row: F.linear(row, v).sin().sum()), (None, 0)
    )(w, X),
    "vjp": lambda w: func.vjp(lambda v: F.linear(X, v), w)[1](torch.ones(6, 4)),
    "jvp": lambda w: func.jvp(loss_of, (w,), (torch.ones(4, 8),)),
    "jacrev": lambda w: func.jacrev(lambda v: (v @ X[0]).sin())(w),
    "jacfwd": lambda w: func.jacfwd(lambda v: (v @ X[0]).sin())(w),
    "hessian": lambda w: func.hessian(lambda v: (v @ X[0]).sin().sum())(w),
    "forward mode": forward_mode,
    "functional.hvp": lambda w: torch.autograd.functional.hvp(loss_of, w, torch.ones(4, 8)),
    "functional.jacobian": lambda w: torch.autograd.functional.jacobian(loss_of, w),
}


@pytest.mark.parametrize("is_detached", [False, True], ids=["whole", "detached"])
@pytest.mark.parametrize("transform", OF_A_WEIGHT)
def test_a_transform_of_a_weight_has_the_bits_of_plain_torch(transform, is_detached, tmp_path):
    """Method: between two steps, so that the weight is not that of the wrap."""

    def recipe(run: Run) -> None:
        model, optimizer = run.start(mlp(8, 4))
        for at in range(2):
            run.log(descend(optimizer, fit(model, at)))
            weight = model[0].weight.detach() if is_detached else model[0].weight
            run.log(OF_A_WEIGHT[transform](weight))

    assert_same_at_home(recipe, tmp_path)


@recipe
def a_transform_in_the_loss(run: Run) -> None:
    """Gradients reach the parameters through what grad and vmap give."""
    model, optimizer = run.start(mlp(8, 4))
    for at in range(3):
        curvature = func.grad(loss_of)(model[0].weight).pow(2).sum()
        rows = torch.vmap(lambda row: row.sin().sum())(model[0].weight).sum()
        run.log(descend(optimizer, fit(model, at) + 0.1 * curvature + rows))


@recipe
def all_parameters_in_a_dict(run: Run) -> None:
    model, optimizer = run.start(mlp(8, 16, 4))

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        hidden = F.linear(x, weights["0.weight"], weights["0.bias"]).relu()
        return F.linear(hidden, weights["2.weight"], weights["2.bias"]).pow(2).sum()

    for at in range(2):
        weights = dict(model.named_parameters())
        found = func.grad(loss)(weights, draw(6, 8, at=at))
        run.log(found, torch.vmap(func.grad(loss), (None, 0))(weights, draw(6, 8, at=at)))
        with torch.no_grad():
            for name, p in model.named_parameters():
                p -= 0.1 * found[name]
        run.log(descend(optimizer, fit(model, at)))


@recipe
def rows_written_by_vmap(run: Run) -> None:
    model, optimizer = run.start(mlp(8, 4))
    for at in range(2):
        torch.vmap(lambda row: row.mul_(0.5))(model[0].weight.data)
        run.log(descend(optimizer, fit(model, at)))


@RECIPES.each()
def test_a_recipe_has_the_bits_of_plain_torch(recipe, tmp_path):
    """Method: the recipe runs plain and at home; all that it logs and the final states agree."""
    assert_same_at_home(recipe, tmp_path)


def test_an_edit_between_a_transform_and_its_backward_is_an_error(tmp_path):
    """As in torch, whose saved weight was changed. Twin: without the edit the backward runs."""
    model = nn.Sequential(nn.Linear(8, 4))
    model, _ = infinity.wrap_model(
        model, torch.optim.SGD(model.parameters(), lr=0.1), at_home("nvme", "nvme", tmp_path)
    )
    for is_edited in (False, True):
        squares = torch.vmap(lambda row: row.pow(2).sum())(model[0].weight).sum()
        if is_edited:
            with torch.no_grad():
                model[0].weight.mul_(2.0)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                squares.backward()
        else:
            squares.backward()


def test_nothing_is_held_after_a_transform(tmp_path):
    """Method: the model and all of its parameters are gone once the last reference is."""
    model = nn.Sequential(nn.Linear(8, 4))
    model, optimizer = infinity.wrap_model(
        model, torch.optim.SGD(model.parameters(), lr=0.1), at_home("nvme", "nvme", tmp_path)
    )
    for transform in OF_A_WEIGHT.values():
        transform(model[0].weight)
    gone = [weakref.ref(model), *map(weakref.ref, model.parameters())]
    del model, optimizer
    gc.collect()
    assert [reference() for reference in gone] == [None] * len(gone)


def test_transforms_of_plain_tensors_compile_as_before():
    """Twin: uncompiled. What wraps a tensor for a transform is traced, too."""
    torch._dynamo.reset()

    def rows(x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(func.grad(lambda row: row.sin().sum()))(x)

    assert torch.equal(torch.compile(rows, backend="eager", fullgraph=True)(X), rows(X))
