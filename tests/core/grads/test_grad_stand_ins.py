"""Stand-ins for gradients act on the bytes at home."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contract_cases import LR, SEED, both_ends, save, step, wrapped
from models import (
    at_home,
    survey,
    transformer,
)
from runs import adamw
from torch import nn

import infinity


@pytest.fixture
def pair(home, tmp_path) -> tuple[nn.Module, nn.Module, Any]:
    return after_backward(home, tmp_path)


def after_backward(home: str, folder: Path) -> tuple[nn.Module, nn.Module, Any]:
    """A plain model, the same wrapped, and its optimizer, after the same backward."""
    plain = transformer(SEED)
    model, optimizer = wrapped(home, folder, copy.deepcopy(plain))
    assert all(p.grad is None for p in model.parameters())
    for one in (plain, model):
        step(one)
    return plain, model, optimizer


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "norm": lambda g: g.norm(),
    "sum": lambda g: g.sum(),
    "+": lambda g: g + 1,
    "clone": lambda g: g.clone(),
    "detach": lambda g: g.detach().clone(),
    "data": lambda g: g.data.clone(),
    "abs max item": lambda g: g.abs().max().item(),
    "isfinite": lambda g: torch.isfinite(g).all(),
    "isnan any": lambda g: g.isnan().any().item(),
    "index": lambda g: g[0].clone(),
    "mask": lambda g: g[g > 0],
    "view": lambda g: g.view(-1).clone(),
    "t": lambda g: g.t().contiguous(),
    "float": lambda g: g.float(),
    "to": lambda g: g.to(torch.float64),
    "cpu": lambda g: g.cpu().clone(),
    "tolist": lambda g: g.tolist(),
    "numpy": lambda g: g.numpy(),
    "asarray": lambda g: np.asarray(g),
    "cat": lambda g: torch.cat([g, g]),
    "==": lambda g: (g == 0).sum(),
    "equal": lambda g: torch.equal(g, g.clone()),
    "stats": lambda g: torch.stack([g.mean(), g.std(), g.min(), g.max()]),
    "foreach": lambda g: torch._foreach_norm([g])[0],
    "matmul": lambda g: g @ g.t(),
    "shape": lambda g: (
        tuple(g.shape),
        g.dtype,
        g.device,
        g.numel(),
        g.is_sparse,
        g.requires_grad,
        g.grad_fn,
        g.stride(),
    ),
    "copy": lambda g: torch.empty(g.shape).copy_(g),
    "deepcopy": lambda g: copy.deepcopy(g).clone(),
    "pickle": lambda g: pickle.loads(pickle.dumps(g)).clone(),
    "save": lambda g: torch.load(io.BytesIO(save(g)), weights_only=False).clone(),
    "iterate": lambda g: torch.stack([row.sum() for row in g]),
    "histc": lambda g: torch.histc(g, 5),
    "repr": lambda g: "tensor" in repr(g),
}


@pytest.fixture(scope="module")
def grads_used(tmp_path_factory, chosen) -> Callable[[str], dict[str, str]]:
    """What went wrong with each read and write of a gradient, by home: tried in children, for some
    may crash."""

    @functools.cache
    def tried(home: str) -> dict[str, str]:
        folder = tmp_path_factory.mktemp("swap")
        kept: list[tuple] = []  # in a child: what reads leave as it was serves them all

        def check(case: str) -> None:
            kind, _, name = case.partition(" ")
            if kind == "write":
                write_once(home, folder, name)
                return
            if not kept:
                kept.append(after_backward(home, folder))
            read_once(*kept[0][:2], name)

        return survey(
            [
                f"{kind} {name}"
                for kind in ("read", "write")
                for name, where in sorted(chosen(kind, "home"))
                if where == home
            ],
            check,
        )

    return tried


SOME = ("blocks.0.feed.0.weight", "tokens.weight", "positions")


def read_once(plain: nn.Module, model: nn.Module, name: str) -> None:
    for parameter in SOME:
        expected, grad = plain.get_parameter(parameter).grad, model.get_parameter(parameter).grad
        assert grad is model.get_parameter(parameter).grad
        try:
            found = READS[name](grad)
        except infinity.UsageError:
            continue
        except (RuntimeError, TypeError) as error:
            assert any(
                text in str(error)
                for text in (
                    "is not supported for tensor subclasses",
                    "__deepcopy__",
                    "cannot pickle",
                )
            ), str(error)
            continue  # torch's own refusal
        right = READS[name](expected)
        if isinstance(right, (torch.Tensor, np.ndarray, list)):
            torch.testing.assert_close(found, right, rtol=0, atol=0)
        else:
            assert found == right
        assert torch.equal(model.get_parameter(parameter).grad.clone(), expected)


def write_once(home: str, folder: Path, name: str) -> None:
    plain, model, optimizer = after_backward(home, folder)
    for parameter in SOME:
        try:
            WRITES[name](model.get_parameter(parameter).grad)
        except infinity.UsageError:
            return
        except (RuntimeError, TypeError) as error:
            assert "is not supported for tensor subclasses" in str(error), str(error)
            return  # torch's own refusal
        WRITES[name](plain.get_parameter(parameter).grad)
        found = model.get_parameter(parameter).grad.clone()
        torch.testing.assert_close(
            found, plain.get_parameter(parameter).grad, rtol=0, atol=0, msg=f"{parameter} differs"
        )
    adamw(plain, LR).step()
    optimizer.step()
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("read", READS)
@both_ends
def test_reading_a_gradient(read, home, grads_used):
    """Method: read the stand-in in the ways that training code reads p.grad; the result is the
    plain gradient's, or a UsageError, and the stand-in stays what it was."""
    complaint = grads_used(home).get(f"read {read}")
    assert complaint is None, complaint


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "mul_": lambda g: g.mul_(0.5),
    "mul_ tensor": lambda g: g.mul_(torch.tensor(0.25)),
    "mul_ vector": lambda g: g.mul_(torch.arange(g.shape[-1], dtype=g.dtype)),
    "div_": lambda g: g.div_(3),
    "zero_": lambda g: g.zero_(),
    "fill_": lambda g: g.fill_(0.5),
    "add_": lambda g: g.add_(1.0),
    "sub_": lambda g: g.sub_(0.5),
    "copy_": lambda g: g.copy_(torch.full(g.shape, 0.25)),
    "clamp_": lambda g: g.clamp_(-1e-3, 1e-3),
    "index": lambda g: g.__setitem__(0, 0.0),
    "range": lambda g: g.__setitem__((slice(None), slice(0, 2)), 7.0),
    "mask": lambda g: g.__setitem__(g > 0, 0.0),
    "masked_fill_": lambda g: g.masked_fill_(g > 0, 0.0),
    "row": lambda g: g[0].zero_(),
    "view": lambda g: g.view(-1)[:5].fill_(3.0),
    "narrow": lambda g: g.narrow(0, 0, 1).add_(1.0),
    "data": lambda g: g.data.mul_(0.5),
    "detach": lambda g: g.detach().add_(1.0),
    "foreach": lambda g: torch._foreach_mul_([g], 0.5),
    "mul_ then view": lambda g: g.mul_(0.5).view(-1)[:3].mul_(2.0),
    "five factors": lambda g: [g.mul_(1 + 1 / 3) for _ in range(7)],
    "nan_to_num_": lambda g: torch.nan_to_num_(g),
    "sign_": lambda g: g.sign_(),
    "numpy": lambda g: np.multiply(g.numpy(), 0.5, out=g.numpy()),
}


@pytest.mark.parametrize("write", WRITES)
@both_ends
def test_writing_to_a_gradient(write, home, grads_used):
    """Method: change the stand-in in place in the ways that training code does; afterwards it reads
    as the plain gradient after the same change, and the step applies it, or a UsageError says that
    this way is not open. What must not be is a change that is lost."""
    complaint = grads_used(home).get(f"write {write}")
    assert complaint is None, complaint


@both_ends
def test_gradient_is_none_before_backward_and_after_zero_grad(pair):
    """Method: look at p.grad before backward (in the fixture), after it, after zero_grad in both
    forms."""
    _, model, optimizer = pair
    assert all(p.grad is not None for p in model.parameters())
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("clip", [False, True])
@both_ends
def test_gradient_after_the_step_reads_as_before_it(clip, pair):
    """Method: read p.grad after optimizer.step() without zero_grad, as loggers do; it is what the
    step was given, with clipping done, as in torch."""
    plain, model, optimizer = pair
    if clip:
        for one in (plain, model):
            torch.nn.utils.clip_grad_norm_(one.parameters(), 0.01)
    plain_optimizer = adamw(plain, LR)
    plain_optimizer.step()
    optimizer.step()
    for name, param in plain.named_parameters():
        assert torch.equal(model.get_parameter(name).grad.clone(), param.grad), name
        assert torch.equal(model.get_parameter(name).grad.norm(), param.grad.norm()), name


@pytest.mark.parametrize("write", ["mul_", "add_", "index", "row", "clip", "view", "torn"])
@both_ends
def test_changing_a_gradient_after_the_step(write, pair):
    """Method: changed in place or by a view on both models, then stepped again: torch's gradients
    and weights. Twin: after a backward that failed, no gradient is changed."""
    plain, model, optimizer = pair
    plain_optimizer = adamw(plain, LR)
    changes: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
        "mul_": lambda _, grad: grad.mul_(2),
        "add_": lambda _, grad: grad.add_(1),
        "index": lambda _, grad: grad.__setitem__(0, 1.0),
        "row": lambda _, grad: grad[0].add_(1.0),
        "clip": lambda one, _: torch.nn.utils.clip_grad_norm_(one.parameters(), 1e-3),
        "view": lambda _, grad: grad.view(-1).mul_(2),
    }
    for one, its in ((plain, plain_optimizer), (model, optimizer)):
        its.step()
        if write == "torn":
            continue
        changes[write](one, one.blocks[0].feed[0].weight.grad)
        its.step()
    for name, param in plain.named_parameters():
        assert torch.equal(model.get_parameter(name).grad.clone(), param.grad), name
    torch.testing.assert_close(model.state_dict(), plain.state_dict())  # AdamW within some ulps
    if write == "torn":
        hook = model.blocks[0].feed[0].weight.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            step(model)
        hook.remove()
        first = next(model.parameters())
        with pytest.raises(infinity.UsageError, match="half done"):
            first.grad.mul_(0.5)


VIEWED: dict[str, Callable[[torch.Tensor], Any]] = {
    "row": lambda g: g[0] + 0,
    "item": lambda g: g[0, 1].item(),
    "flat": lambda g: g.view(-1).norm(),
    "T": lambda g: g.T @ g,
    "view of a view": lambda g: g.flatten()[3:5] * 2,
    "rows": lambda g: torch.stack([row.sum() for row in g]),
    "strided": lambda g: g.as_strided((3, 2), (2, 1), 5).clone(),
    "two views": lambda g: torch.dot(g.view(-1), g.flatten()),
    "values": lambda g: g[0].tolist(),
    "numbers": lambda g: (g.T.shape, g.T.stride(), g.view(-1).numel(), g[0].dtype),
}


@pytest.mark.parametrize("steps", [True, False], ids=["after the step", "before it"])
@both_ends
def test_a_view_of_a_gradient_reads_as_torchs(steps, pair):
    """Method: what logs take of gradients, on both models. Twin: once the gradient is zeroed a kept
    view reads zeros, also after the next backward."""
    plain, model, optimizer = pair
    if steps:
        optimizer.step()
    grad, expected = (each.blocks[0].feed[0].weight.grad for each in (model, plain))
    for name, read in VIEWED.items():
        found, right = read(grad), read(expected)
        assert torch.equal(found, right) if isinstance(right, torch.Tensor) else found == right, (
            name
        )
    optimizer.step() if not steps else None
    kept = grad.view(-1)[2:]
    optimizer.zero_grad(set_to_none=False)
    assert not (kept + 0).any()
    optimizer.zero_grad()
    step(model)
    assert not kept.any() and grad is not model.blocks[0].feed[0].weight.grad


@pytest.mark.parametrize("how", ["zero_grad", "assigned None", "model gone"])
@both_ends
def test_a_stale_gradient_raises(how, pair):
    """Method: keep p.grad over zero_grad (or ``p.grad = None``) and use it; it raises UsageError
    instead of showing another step's gradient."""
    _, model, optimizer = pair
    param = model.blocks[0].feed[0].weight
    stale = param.grad
    if how == "zero_grad":
        optimizer.zero_grad()
        step(model)
    elif how == "assigned None":
        param.grad = None
    else:
        infinity.unwrap_model(model, optimizer)
    with pytest.raises(infinity.UsageError):
        stale.norm()
    with pytest.raises(infinity.UsageError):
        stale.mul_(2.0)


@both_ends
def test_assigned_gradients_are_what_the_step_applies(pair):
    """Method: p.grad = tensor, p.grad += 1, p.grad *= 0.5 and p.grad = None."""
    plain, model, optimizer = pair
    name = "blocks.2.feed.0.weight"
    value = torch.randn(
        plain.get_parameter(name).shape, generator=torch.Generator().manual_seed(SEED)
    )
    for one in (plain, model):
        one.get_parameter(name).grad = value.clone()
        one.norm.weight.grad += 1
        one.norm.bias.grad *= 0.5
        one.positions.grad = None
    adamw(plain, LR).step()
    optimizer.step()
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "value",
    [torch.ones(3), torch.ones(64, dtype=torch.float64), "nonsense", 1.0],
    ids=["shape", "dtype", "str", "float"],
)
@both_ends
def test_assigning_what_is_no_gradient_raises(value, pair):
    """Method: p.grad = a tensor of another shape or dtype, or no tensor; refused as torch refuses
    it."""
    plain, model, _ = pair
    with pytest.raises((RuntimeError, TypeError)):
        plain.norm.weight.grad = value
    with pytest.raises((infinity.UsageError, RuntimeError, TypeError)):
        model.norm.weight.grad = value
    assert torch.equal(model.norm.weight.grad.clone(), plain.norm.weight.grad)


@both_ends
def test_gradients_that_are_kept_over_a_step_add_up_as_in_torch(home, tmp_path):
    """Method: steps without zero_grad, one of them with nothing new and one of them clipped; the
    bits of plain torch, gradients included. Twin: with zero_grad they are others."""

    def run(wrap: bool, *, clears: bool = False) -> list[torch.Tensor]:
        torch.manual_seed(SEED)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        if wrap:
            model, optimizer = infinity.wrap_model(model, optimizer, at_home(home, home, tmp_path))
        for at in range(4):
            model[2].requires_grad_(at != 2)
            model(torch.linspace(-1, 1, 24).view(3, 8) * (at + 1)).square().mean().backward()
            if at == 1:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            if at == 3:
                optimizer.step()
            if clears:
                optimizer.zero_grad()
        grads = [p.grad + 0 for p in model.parameters() if p.grad is not None]
        return [*(value.clone() for value in model.state_dict().values()), *grads]

    right = run(False)
    found = run(True)
    assert len(found) == 8 and all(map(torch.equal, found, right))
    assert not all(map(torch.equal, run(True, clears=True), right))
