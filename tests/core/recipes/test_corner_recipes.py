"""Corners of torch that a parameter at rest once got wrong: each has plain torch's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from recipe_cases import Recipes, Run, assert_same_at_home, descend, draw, fit, mlp
from torch import nn
from torch.nn import functional as F

RECIPES = Recipes()
recipe = RECIPES.add


def started(run: Run) -> tuple[nn.Module, Any, torch.Tensor]:
    """A model of two layers after a step, and its last weight."""
    torch._dynamo.reset()
    model, optimizer = run.start(mlp(8, 8, 4))
    run.log(descend(optimizer, fit(model)))
    return model, optimizer, model[2].weight


def said(work: Callable[[], Any]) -> str:
    """What the error of ``work`` says; empty if it has none."""
    try:
        work()
    except Exception as error:  # noqa: BLE001 - compared with torch's own
        return str(error)
    return ""


# --- compiled helpers ---


def compiled(function: Callable) -> Callable:
    return torch.compile(function, backend="eager")


@recipe
def a_compiled_penalty_of_a_view(run: Run) -> None:
    model, optimizer, weight = started(run)
    of_row, row = compiled(lambda weight: weight[0].abs().sum()), weight[1]
    of_view = compiled(lambda view: view.abs().sum())
    closure = compiled(lambda x: (x * weight[0, 0] + weight.t()[1, 0]).sum())
    for at in range(2):
        loss = fit(model, at) + of_row(weight) + of_view(row) + closure(draw(3))
        run.log(descend(optimizer, loss))


@recipe
def a_compiled_copy(run: Run) -> None:
    model, optimizer, weight = started(run)

    @compiled
    @torch.no_grad()
    def double(weight):
        weight.copy_(weight * 2)
        weight[0].clamp_(-0.1, 0.1)

    double(weight)
    run.log(weight.sum(), descend(optimizer, fit(model)))


@recipe
def a_compiled_average(run: Run) -> None:
    model, optimizer, _ = started(run)
    average = [p.detach().clone() for p in model.parameters()]

    @compiled
    @torch.no_grad()
    def update():
        for mean, p in zip(average, model.parameters()):
            mean.lerp_(p, 0.1)

    for at in range(2):
        run.log(descend(optimizer, fit(model, at)))
        update()
    run.log(average)


@recipe
def a_compiled_norm_of_a_gradient(run: Run) -> None:
    model, _, weight = started(run)
    fit(model, 1).backward()
    run.log(compiled(lambda p: p.grad.norm())(weight))


# --- memory ---


@recipe
def a_weight_that_is_set(run: Run) -> None:
    """As ``parametrize`` does when a parametrised weight is assigned."""
    model, optimizer, weight = started(run)
    for value in (torch.ones(4, 8), 2 * torch.ones(4, 8)):
        with torch.no_grad():
            weight.set_(value.clone())
        run.log(weight, descend(optimizer, fit(model)))


@recipe
def strides_and_offsets(run: Run) -> None:
    model, optimizer, weight = started(run)
    bias = model[2].bias
    run.log(bias.as_strided((2,), (1,), 0), said(lambda: bias.as_strided((2,), (1,), 7)))
    run.log(bias[2:].as_strided((2,), (1,), bias[2:].storage_offset()))
    run.log(said(lambda: weight.as_strided((70,), (1,))))
    for view in (bias, weight, weight.narrow(1, 2, 3), weight[3], weight.chunk(2)[1], weight.t()):
        run.log(view.storage_offset())
    run.log(weight.as_strided_scatter(torch.ones(2), (2,), (1,), 5))
    run.log(torch.as_strided_copy(weight, (2,), (1,), 30))
    with torch.no_grad():
        bias.as_strided((2,), (1,), 0).fill_(7.0)
    loss = torch.as_strided(bias, (2, 1), (2, 1), storage_offset=1).sum()
    run.log(descend(optimizer, loss * weight.as_strided((3,), (9,)).sum()))


# --- writes that torch does not count ---


@recipe
def a_write_that_fails_in_the_middle(run: Run) -> None:
    model, optimizer, weight = started(run)
    run.log(said(lambda: weight.data.index_fill_(0, torch.tensor([0, 99]), 1.0)))
    run.log(weight[0], dict(model.state_dict()))
    run.log(descend(optimizer, fit(model)))


@recipe
def statistics_in_parameters(run: Run) -> None:
    model, optimizer, _ = started(run)
    F.batch_norm(torch.ones(2, 8), model[0].bias.data, model[0].weight.data[0], training=True)
    run.log(model[0].bias, dict(model.state_dict()))
    run.log(descend(optimizer, fit(model)))


# --- gradients ---


@recipe
def views_used_twice_by_one_operation(run: Run) -> None:
    model, optimizer = run.start(mlp(8, 8))
    weight = model[0].weight
    for at in range(2):
        row, columns = weight[0], weight.t()
        loss = (row * row).sum() + 0.1 * row.sum() + torch.cat([row, row, weight[1]]).sin().sum()
        loss = loss + (columns @ columns).sum() + columns.sin().sum()
        run.log(descend(optimizer, loss + model(draw(6, 8, at=at)).pow(2).mean()))
    leaf = weight.detach().requires_grad_()
    ((leaf * leaf).sum() + leaf[0].sum()).backward()
    run.log(leaf.grad)


@recipe
def zeros_for_unused_parameters(run: Run) -> None:
    model, _, weight = started(run)
    params = list(model.parameters())
    loss = weight.pow(2).sum()
    for more in ({"allow_unused": True}, {}):
        run.log(
            torch.autograd.grad(loss, params, materialize_grads=True, retain_graph=True, **more)
        )
    run.log(
        said(lambda: torch.autograd.grad(loss, params, materialize_grads=True, allow_unused=False))
    )


@recipe
def broadcast_with_other_tensors(run: Run) -> None:
    model, optimizer, _ = started(run)
    bias = model[2].bias
    one, other = torch.meshgrid(bias, torch.arange(3.0), indexing="ij")
    wide = torch.broadcast_tensors(bias, torch.ones(3, 4))[0]
    run.log(one, other, wide, descend(optimizer, (one * other).sum() + wide.sin().sum()))


# --- lists ---


@recipe
def lists_of_other_lengths(run: Run) -> None:
    model, _, _ = started(run)
    params = list(model.parameters())
    ones = [torch.ones_like(p) for p in params]
    with torch.no_grad():
        run.log(said(lambda: torch._foreach_add_(params, [1.0, 2.0])))
        run.log(said(lambda: torch._foreach_add_(params, [torch.ones(())] * 3)))
        torch._foreach_addcdiv_(params, ones, ones, torch.arange(1.0, 5.0))
        torch._foreach_addcmul_(params, ones, ones, [1.0, 2.0, 3.0, 4.0])
        torch._foreach_lerp_(params, ones, 0.5)
        run.log(torch._foreach_pow(params, 2.0))


@recipe
def a_weight_compared_with_itself(run: Run) -> None:
    model, _, weight = started(run)
    run.log(torch.equal(weight, weight), weight.equal(weight.detach()))
    with torch.no_grad():
        weight[0, 0] = float("nan")
    run.log(torch.equal(weight, weight), torch.equal(weight.data, weight))
    with torch.no_grad():
        weight.zero_()


@RECIPES.each()
def test_a_recipe_has_the_bits_of_plain_torch(recipe, tmp_path):
    """Method: the recipe runs plain and at home; all that it logs and the final states agree."""
    assert_same_at_home(recipe, tmp_path)


@pytest.mark.parametrize("is_resident", [False, True], ids=["at rest", "resident"])
def test_the_storage_of_a_parameter_gives_no_bytes(is_resident, tmp_path):
    """Method: its address is asked for before and after an operation that brings the parameter.
    Twin: the operation's result is plain torch's."""

    def recipe(run: Run) -> None:
        model, _, weight = started(run)
        if is_resident:
            run.log(weight.norm())
        if hasattr(weight, "_infinity"):
            with pytest.raises(RuntimeError):
                weight.untyped_storage().data_ptr()
        run.log(weight.norm(), weight)

    assert_same_at_home(recipe, tmp_path)
