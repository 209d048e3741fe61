"""The public contract, point by point: parameters at rest, stand-ins for gradients, state dicts, wrap and unwrap.

Words used here: **home**, **least**, **child** as in `models.py`. **at rest**: outside a forward or backward, when a
parameter's bytes are at home and it holds none. **touch**: anything that would need those bytes.
What may crash is done in a child: a crash is then one failed test.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import gc
import io
import json
import os
import pickle
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import (
    TIERS,
    VOCABULARY,
    ChildRaised,
    TinyTransformer,
    at_home,
    bits,
    differing,
    environment,
    gradients,
    in_child,
    least_host_memory,
    leftovers,
    loss_of,
    prescribed,
    seeded,
    survey,
    swap_files,
    ties_away,
    tokens,
    transformer,
    with_least,
)
from runs import adamw
from torch import nn

import infinity

SEED = 30
LR = 1e-2
MIB = 2**20

every_home = pytest.mark.parametrize("home", TIERS)
both_ends = pytest.mark.parametrize("home", ["nvme", "device"])


def wrapped(home: str, folder: Path, model: nn.Module | None = None, **more: Any) -> tuple[Any, Any]:
    """A wrapped transformer (or ``model``); on disk with the least host memory, so with gradients on disk too."""
    model = transformer(SEED) if model is None else model
    optimizer = adamw(model, LR)
    config = at_home(home, home, folder, **more)
    return infinity.wrap_model(model, optimizer, with_least(model, optimizer, config) if home == "nvme" else config)


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, at: int = 0) -> torch.Tensor:
    """Forward and backward of one batch, and a step where there is an optimizer."""
    torch.manual_seed(at)
    loss = loss_of(model, tokens(SEED + at))
    loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


# ---------------------------------------------------------------------------------------------------------------------
# Parameters at rest
# ---------------------------------------------------------------------------------------------------------------------


@every_home
def test_parameters_at_rest_keep_what_they_are(home, tmp_path):
    """Method: compare identity, shape, strides, dtype, device and the rest of a parameter's metadata before the wrap,
    at rest, and after a step; away from the device there is no storage behind it."""
    model = prescribed(SEED)
    before = {
        name: (id(p), p.shape, p.stride(), p.dtype, p.device, p.requires_grad, p.is_leaf, p.numel(), p.dim(), p.layout)
        for name, p in model.named_parameters()
    }
    model, optimizer = wrapped(home, tmp_path, model)
    for at in range(2):
        now = {
            name: (id(p), p.shape, p.stride(), p.dtype, p.device, p.requires_grad, p.is_leaf, p.numel(), p.dim(), p.layout)
            for name, p in model.named_parameters()
        }
        assert now == before
        for name, param in model.named_parameters():
            assert isinstance(param, nn.Parameter) and isinstance(param, torch.Tensor)
            if home != "device":
                assert param.untyped_storage().nbytes() == 0, name
        model(gradients(prescribed(SEED), at)).backward()
        optimizer.step()
        optimizer.zero_grad()


METADATA: dict[str, Callable[[nn.Parameter], Any]] = {
    "shape": lambda p: p.shape,
    "size": lambda p: (p.size(), p.size(0)),
    "stride": lambda p: p.stride(),
    "numel": lambda p: (p.numel(), p.nelement(), torch.numel(p)),
    "dim": lambda p: (p.dim(), p.ndim, p.ndimension()),
    "dtype": lambda p: p.dtype,
    "device": lambda p: p.device,
    "layout": lambda p: p.layout,
    "requires_grad": lambda p: p.requires_grad,
    "is_leaf": lambda p: p.is_leaf,
    "grad_fn": lambda p: p.grad_fn,
    "grad": lambda p: p.grad,
    "element_size": lambda p: (p.element_size(), p.itemsize, p.nbytes),
    "is_floating_point": lambda p: (p.is_floating_point(), torch.is_floating_point(p), p.is_complex()),
    "is_contiguous": lambda p: (p.is_contiguous(), p.is_contiguous(memory_format=torch.channels_last)),
    "is_cuda": lambda p: (p.is_cuda, p.is_cpu, p.is_meta, p.is_sparse, p.is_quantized),
    "len": lambda p: len(p),
    "hash": lambda p: hash(p) == id(p),
    "in a dict": lambda p: {p: 1}[p],
    "is": lambda p: p is p,
    "storage_offset": lambda p: p.storage_offset() * 0,
    "version": lambda p: isinstance(p._version, int),
    "requires_grad_": lambda p: p.requires_grad_(True) is p,
    "detach shape": lambda p: (p.detach().shape, p.data.shape, p.detach().requires_grad),
    "is_tensor": lambda p: (torch.is_tensor(p), isinstance(p, nn.Parameter)),
    "get_device": lambda p: p.get_device(),
    "type name": lambda p: p.type(),
    "to itself": lambda p: p.to(p.device) is p and p.to(p.dtype) is p and p.cpu() is p,
}


@pytest.fixture(scope="module")
def seen_at_rest(tmp_path_factory) -> Callable[[str], dict[str, Any]]:
    """What each look at a parameter at rest gives, by home; the model itself is not kept, so that nothing is held."""

    @functools.cache
    def results(home: str) -> dict[str, Any]:
        model, _ = wrapped(home, tmp_path_factory.mktemp("swap"))
        seen: dict[str, Any] = {}
        for name, look in METADATA.items():
            try:
                seen[name] = look(model.blocks[0].feed[0].weight)
            except Exception as error:  # noqa: BLE001 - the test compares it
                seen[name] = f"{type(error).__name__}: {error}"
        return seen

    return results


@pytest.mark.parametrize("look", METADATA)
@both_ends
def test_metadata_of_parameters_at_rest(look, home, seen_at_rest):
    """Method: ask a parameter at rest what needs none of its bytes; the answer is a plain parameter's."""
    assert seen_at_rest(home)[look] == METADATA[look](transformer(SEED).blocks[0].feed[0].weight)


@every_home
def test_printing_a_parameter_at_rest(home, tmp_path):
    """Method: repr, str and format of a parameter name it and its home; printing the model works."""
    model, _ = wrapped(home, tmp_path)
    param = model.blocks[0].feed[0].weight
    for text in (repr(param), str(param), f"{param}", f"{param.detach()}"):
        assert "blocks.0.feed.0.weight" in text and home in text and "256" in text
    assert "Linear" in repr(model) and "Parameter" in repr(list(model.parameters())[0])
    assert repr(nn.ParameterList(list(model.parameters())[:2]))


def save(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


TOUCHES: dict[str, Callable[[Any], Any]] = {
    "add": lambda p: p + 1,
    "radd": lambda p: 1 + p,
    "mul": lambda p: p * p,
    "neg": lambda p: -p,
    "matmul": lambda p: p @ p.t(),
    "t": lambda p: p.t(),
    "T": lambda p: p.T,
    "view": lambda p: p.view(-1),
    "reshape": lambda p: p.reshape(-1),
    "flatten": lambda p: p.flatten(),
    "clone": lambda p: p.clone(),
    "detach clone": lambda p: p.detach().clone(),
    "data clone": lambda p: p.data.clone(),
    "data add_": lambda p: p.data.add_(1),
    "data index": lambda p: p.data[0],
    "data sum": lambda p: p.data.sum(),
    "sum": lambda p: p.sum(),
    "torch.sum": lambda p: torch.sum(p),
    "norm": lambda p: p.norm(),
    "linalg": lambda p: torch.linalg.vector_norm(p),
    "mean item": lambda p: p.mean().item(),
    "index": lambda p: p[0],
    "slice": lambda p: p[:, 1:3],
    "mask": lambda p: p[p > 0],
    "set index": lambda p: p.data.__setitem__(0, 1.0),
    "iterate": lambda p: list(p),
    "unbind": lambda p: p.unbind(),
    "equal": lambda p: torch.equal(p, p),
    "==": lambda p: (p == p).all(),
    "allclose": lambda p: torch.allclose(p, p),
    "isnan": lambda p: torch.isnan(p).any(),
    "stack": lambda p: torch.stack([p, p]),
    "cat": lambda p: torch.cat([torch.zeros(1, p.shape[1]), p]),
    "out=": lambda p: torch.add(torch.ones(p.shape), 1, out=p.detach()),
    "where": lambda p: torch.where(torch.ones(p.shape, dtype=torch.bool), p, torch.zeros(())),
    "foreach add": lambda p: torch._foreach_add([p], 1),
    "foreach mul_": lambda p: torch._foreach_mul_([p.detach()], 2),
    "foreach norm": lambda p: torch._foreach_norm([p]),
    "aten": lambda p: torch.ops.aten.add.Tensor(p, p),
    "aten packet": lambda p: torch.ops.aten.sum(p),
    "linear": lambda p: nn.functional.linear(torch.ones(1, p.shape[1]), p),
    "embedding": lambda p: nn.functional.embedding(torch.tensor([1]), p),
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "init": lambda p: nn.init.normal_(p),
    "fill_": lambda p: p.detach().fill_(1),
    "zero_": lambda p: p.detach().zero_(),
    "add_ no_grad": lambda p: torch.no_grad()(lambda: p.add_(1))(),
    "copy from": lambda p: torch.empty(p.shape).copy_(p),
    "numpy": lambda p: p.detach().numpy(),
    "numpy force": lambda p: p.numpy(force=True),
    "asarray": lambda p: np.asarray(p.detach()),
    "array": lambda p: np.array(p.data),
    "tolist": lambda p: p.tolist(),
    "item": lambda p: p[0, 0].item(),
    "float": lambda p: float(p.flatten()[0]),
    "contains": lambda p: 0.0 in p,
    "to dtype": lambda p: p.to(torch.float64),
    "double": lambda p: p.double(),
    "half": lambda p: p.half(),
    "to copy": lambda p: p.to(p.dtype, copy=True),
    "type": lambda p: p.type(torch.float64),
    "from_dlpack": lambda p: torch.from_dlpack(p.detach()),
    "np from_dlpack": lambda p: np.from_dlpack(p.detach()),
    "as_tensor": lambda p: torch.as_tensor(p.detach()) + 0,
    "tensor": lambda p: torch.tensor(p.detach()),
    "set_": lambda p: p.detach().set_(torch.ones(3)),
    "resize_": lambda p: p.detach().resize_(3),
    "as_strided": lambda p: p.as_strided((2, 2), (1, 1)),
    "bytes": lambda p: bytes(p.detach().numpy()),
    "typed storage": lambda p: p.storage()[0],
    "share_memory_": lambda p: p.share_memory_(),
    "pickle": pickle.dumps,
    "pickle data": lambda p: pickle.dumps(p.data),
    "deepcopy": copy.deepcopy,
    "copy data": lambda p: copy.deepcopy(p.data),
    "torch.save": save,
    "torch.save data": lambda p: save({"w": p.data}),
    "data =": lambda p: setattr(p, "data", torch.ones(p.shape)),
    "autograd grad": lambda p: torch.autograd.grad(torch.ones((), requires_grad=True) * 2, [p], allow_unused=True),
    "backward": lambda p: p.sum().backward(),
    "histc": lambda p: torch.histc(p),
    "svd": lambda p: torch.linalg.svd(p),
}


def plainly(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return [plainly(item) for item in value] if isinstance(value, (list, tuple)) else value


@pytest.fixture(scope="module")
def touched(tmp_path_factory) -> Callable[[str], dict[str, str]]:
    """What went wrong with each touch, by home: tried in children, for some may crash."""

    @functools.cache
    def tried(home: str) -> dict[str, str]:
        folder = tmp_path_factory.mktemp("swap")
        kept: dict[str, Any] = {}

        def check(name: str) -> None:
            if not kept:
                kept["model"], kept["optimizer"] = wrapped(home, folder)
                kept["state"] = kept["model"].state_dict()
            model = kept["model"]
            try:
                touch_once(model, TOUCHES[name])
                assert differing(model.state_dict(), kept["state"]) == [], "the model was changed"
                assert torch.isfinite(step(model))
                model.zero_grad()
            except BaseException:
                kept.clear()  # whatever it left is not the next one's
                raise

        return survey(TOUCHES, check)

    return tried


def touch_once(model: nn.Module, touch: Callable[[Any], Any]) -> None:
    try:
        found = plainly(touch(model.blocks[0].feed[0].weight))
    except infinity.UsageError as error:
        assert any(way in str(error) for way in ("full_params", "state_dict", "unwrap_model")), str(error)
        return
    except infinity.InfinityError:
        raise
    except (RuntimeError, TypeError, BufferError, IndexError, ValueError, NotImplementedError) as error:
        # torch's own refusal would be as good, if it said what to do.
        raise AssertionError(f"{type(error).__name__} instead of UsageError: {error}") from error
    expected = plainly(touch(transformer(SEED).blocks[0].feed[0].weight))
    if isinstance(expected, (torch.Tensor, np.ndarray, list)):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    else:
        assert type(found) is type(expected) and found == expected, f"{found!r} instead of {expected!r}"


@pytest.mark.parametrize("touch", TOUCHES)
@every_home
def test_touching_a_parameter_at_rest_raises_and_names_the_way(touch, home, touched):
    """Method: some ninety ways to reach a parameter's bytes at rest; each raises UsageError naming what to use instead
    (or gives the very result of a plain parameter), and none gives garbage, crashes or changes the model."""
    complaint = touched(home).get(touch)
    assert complaint is None, complaint


# Ways that go around __torch_function__: nobody can name the parameter there, and torch's own refusal is the answer.
AROUND: dict[str, Callable[[Any], Any]] = {
    "vmap": lambda p: torch.func.vmap(lambda row: row.sum())(p),
    "grad": lambda p: torch.func.grad(lambda q: q.sum())(p),
    "jvp": lambda p: torch.func.jvp(torch.sin, (p,), (torch.ones(p.shape),)),
    "tensor": lambda p: torch.tensor(p),
    "as_tensor dtype": lambda p: torch.as_tensor(p, dtype=torch.float64),
    "to_dlpack": lambda p: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(p.detach())),
    "data_ptr": lambda p: p.data_ptr() and p.untyped_storage().data_ptr() and None,
    "storage clone": lambda p: p.untyped_storage().clone().nbytes(),
    "over storage": lambda p: torch.empty(0).set_(p.untyped_storage(), 0, p.shape, p.stride()).sum(),
    "write over storage": lambda p: torch.empty(0).set_(p.untyped_storage(), 0, p.shape, p.stride()).zero_().sum(),
    "trace": lambda p: torch.jit.trace(lambda x: x + 1, p)(torch.ones(p.shape)),
}


@pytest.mark.parametrize("way", AROUND)
def test_ways_around_torch_function_work_on_a_plain_parameter(way):
    """Method: the twin of the next: what is refused there is no error of its own."""
    AROUND[way](transformer(SEED).blocks[0].feed[0].weight)


@pytest.mark.parametrize("home", ["host", "nvme"])
def test_ways_around_torch_function_never_crash(home, tmp_path):
    """Method: reach the bytes at rest from where torch asks no subclass; an error, and the model is as it was."""

    def check(way: str) -> None:
        folder = tmp_path / way.replace(" ", "-")
        folder.mkdir()
        model, optimizer = wrapped(home, folder)
        state = model.state_dict()
        with pytest.raises((RuntimeError, BufferError, infinity.UsageError)):
            AROUND[way](model.blocks[0].feed[0].weight)
        assert differing(model.state_dict(), state) == []
        assert torch.isfinite(step(model, optimizer))

    complaints = survey(AROUND, check)
    assert not complaints, complaints


@every_home
def test_a_tensor_kept_from_a_forward_never_crashes(home, tmp_path):
    """Method: a module keeps views of its weight and hands them to nobody; used after the forward they raise, or (at
    home on the device) are the weight's values."""

    class Keeper(nn.Linear):
        def forward(self, x):
            self.kept = [self.weight.detach(), self.weight.t(), self.weight.view(-1)[3:], self.weight.data[1]]
            return super().forward(x)

    def work():
        model = nn.Sequential(Keeper(8, 8), nn.Linear(8, 8))
        values = [kept.clone() for kept in (model(torch.ones(1, 8)), model[0].kept)[1]]
        model, _ = infinity.wrap_model(model, config=at_home(home, home, tmp_path))
        model(torch.ones(1, 8)).sum().backward()
        for kept, value in zip(model[0].kept, values):
            try:
                assert torch.equal(kept, value)
            except RuntimeError:
                assert home != "device"

    in_child(work)


@every_home
def test_copy_into_a_parameter_at_rest_reaches_its_home(home, tmp_path):
    """Method: p.data.copy_(value) and p.copy_(value) under no_grad, as loaders and initialisers do; the home has the
    value, and a value of another shape is refused as torch refuses it."""
    model, _ = wrapped(home, tmp_path, param_dtype="bf16")
    param = model.blocks[1].feed[0].weight
    value = torch.randn(param.shape, generator=torch.Generator().manual_seed(SEED))
    param.data.copy_(value)
    assert torch.equal(model.state_dict()["blocks.1.feed.0.weight"], value)
    with torch.no_grad():
        param.copy_(2 * value)
    assert torch.equal(model.state_dict()["blocks.1.feed.0.weight"], 2 * value)
    with torch.no_grad():
        param.copy_(torch.tensor(3.0))
    assert torch.equal(model.state_dict()["blocks.1.feed.0.weight"], torch.full_like(value, 3.0))
    with pytest.raises(RuntimeError):
        param.data.copy_(torch.ones(5))
    assert torch.equal(model.state_dict()["blocks.1.feed.0.weight"], torch.full_like(value, 3.0))


CONVERSIONS: dict[str, Callable[[nn.Module], Any]] = {
    "to(cpu)": lambda m: m.to("cpu"),
    "to(device)": lambda m: m.to(torch.device("cpu"), non_blocking=True),
    "to(dtype)": lambda m: m.to(torch.float32),
    "to(both)": lambda m: m.to(torch.device("cpu"), torch.float32),
    "cpu": lambda m: m.cpu(),
    "float": lambda m: m.float(),
    "train": lambda m: m.train(),
    "requires_grad_": lambda m: m.requires_grad_(True),
    "zero_grad": lambda m: m.zero_grad(),
}


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
@both_ends
def test_conversions_of_the_model_that_change_nothing(convert, home, tmp_path):
    """Method: what frameworks call on every model (to(device), float(), ...), when it asks for what is so already."""
    model, optimizer = wrapped(home, tmp_path)
    before = model.state_dict()
    assert convert(model) in (model, None)
    assert differing(model.state_dict(), before) == []
    step(model, optimizer)


@pytest.mark.parametrize(
    "convert",
    [nn.Module.half, nn.Module.bfloat16, nn.Module.double, nn.Module.share_memory],
    ids=["half", "bfloat16", "double", "share_memory"],
)
@both_ends
def test_conversions_of_the_model_that_would_change_it_raise(convert, home, tmp_path):
    """Method: the twin; another dtype is refused by name, and the model is as it was."""
    model, optimizer = wrapped(home, tmp_path)
    before = model.state_dict()
    with pytest.raises(infinity.UsageError):
        convert(model)
    assert differing(model.state_dict(), before) == []
    step(model, optimizer)


# ---------------------------------------------------------------------------------------------------------------------
# Stand-ins for gradients
# ---------------------------------------------------------------------------------------------------------------------


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
    "shape": lambda g: (tuple(g.shape), g.dtype, g.device, g.numel(), g.is_sparse, g.requires_grad, g.grad_fn, g.stride()),
    "copy": lambda g: torch.empty(g.shape).copy_(g),
    "deepcopy": lambda g: copy.deepcopy(g).clone(),
    "pickle": lambda g: pickle.loads(pickle.dumps(g)).clone(),
    "save": lambda g: torch.load(io.BytesIO(save(g)), weights_only=False).clone(),
    "iterate": lambda g: torch.stack([row.sum() for row in g]),
    "histc": lambda g: torch.histc(g, 5),
    "repr": lambda g: "tensor" in repr(g),
}


@pytest.fixture(scope="module")
def grads_used(tmp_path_factory) -> Callable[[str], dict[str, str]]:
    """What went wrong with each read and write of a gradient, by home: tried in children, for some may crash."""

    @functools.cache
    def tried(home: str) -> dict[str, str]:
        folder = tmp_path_factory.mktemp("swap")
        return survey(
            [*(f"read {name}" for name in READS), *(f"write {name}" for name in WRITES)],
            lambda case: (read_once if case.startswith("read") else write_once)(home, folder, case.partition(" ")[2]),
        )

    return tried


SOME = ("blocks.0.feed.0.weight", "tokens.weight", "positions")


def read_once(home: str, folder: Path, name: str) -> None:
    plain, model, _ = after_backward(home, folder)
    for parameter in SOME:
        expected, grad = plain.get_parameter(parameter).grad, model.get_parameter(parameter).grad
        assert grad is model.get_parameter(parameter).grad
        try:
            found = READS[name](grad)
        except infinity.UsageError:
            continue
        except (RuntimeError, TypeError) as error:
            assert "is not supported for tensor subclasses" in str(error) or "__deepcopy__" in str(error), str(error)
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
        torch.testing.assert_close(found, plain.get_parameter(parameter).grad, rtol=0, atol=0, msg=f"{parameter} differs")
    adamw(plain, LR).step()
    optimizer.step()
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("read", READS)
@both_ends
def test_reading_a_gradient(read, home, grads_used):
    """Method: read the stand-in in the ways that training code reads p.grad; the result is the plain gradient's, or a
    UsageError, and the stand-in stays what it was."""
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
    """Method: change the stand-in in place in the ways that training code does; afterwards it reads as the plain
    gradient after the same change, and the step applies it, or a UsageError says that this way is not open. What must
    not be is a change that is lost."""
    complaint = grads_used(home).get(f"write {write}")
    assert complaint is None, complaint


@both_ends
def test_gradient_is_none_before_backward_and_after_zero_grad(pair):
    """Method: look at p.grad before backward (in the fixture), after it, after zero_grad in both forms."""
    _, model, optimizer = pair
    assert all(p.grad is not None for p in model.parameters())
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("clip", [False, True])
@both_ends
def test_gradient_after_the_step_reads_as_before_it(clip, pair):
    """Method: read p.grad after optimizer.step() without zero_grad, as loggers do; it is what the step was given, with
    clipping done, as in torch."""
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


@pytest.mark.parametrize("write", ["mul_", "add_", "copy_", "index", "row", "clip", "view", "fill_"])
@both_ends
def test_changing_a_gradient_after_the_step_raises(write, pair):
    """Method: the step has consumed the gradient; any change but zeroing raises UsageError, in place or by a view."""
    _, model, optimizer = pair
    optimizer.step()
    grad = model.blocks[0].feed[0].weight.grad
    with pytest.raises(infinity.UsageError, match="zero_grad|clone"):
        {
            "mul_": lambda: grad.mul_(2),
            "add_": lambda: grad.add_(1),
            "copy_": lambda: grad.copy_(torch.zeros(grad.shape)),
            "index": lambda: grad.__setitem__(0, 1.0),
            "row": lambda: grad[0].add_(1.0),
            "clip": lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
            "view": lambda: grad.view(-1).mul_(2),
            "fill_": lambda: grad.fill_(1.0),
        }[write]()
    grad.zero_()
    assert not grad.any()


@pytest.mark.parametrize("how", ["zero_grad", "assigned None", "assigned another", "model gone"])
@both_ends
def test_a_stale_gradient_raises(how, pair):
    """Method: keep p.grad over zero_grad (or an assignment) and use it; it raises UsageError instead of showing
    another step's gradient."""
    _, model, optimizer = pair
    param = model.blocks[0].feed[0].weight
    stale = param.grad
    if how == "zero_grad":
        optimizer.zero_grad()
        step(model)
    elif how == "assigned None":
        param.grad = None
    elif how == "assigned another":
        param.grad = torch.ones(param.shape)
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
    value = torch.randn(plain.get_parameter(name).shape, generator=torch.Generator().manual_seed(SEED))
    for one in (plain, model):
        one.get_parameter(name).grad = value.clone()
        one.norm.weight.grad += 1
        one.norm.bias.grad *= 0.5
        one.positions.grad = None
    adamw(plain, LR).step()
    optimizer.step()
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "value", [torch.ones(3), torch.ones(64, dtype=torch.float64), "nonsense", 1.0], ids=["shape", "dtype", "str", "float"]
)
@both_ends
def test_assigning_what_is_no_gradient_raises(value, pair):
    """Method: p.grad = a tensor of another shape or dtype, or no tensor; refused as torch refuses it."""
    plain, model, _ = pair
    with pytest.raises((RuntimeError, TypeError)):
        plain.norm.weight.grad = value
    with pytest.raises((infinity.UsageError, RuntimeError, TypeError)):
        model.norm.weight.grad = value
    assert torch.equal(model.norm.weight.grad.clone(), plain.norm.weight.grad)


@both_ends
def test_backward_after_a_step_without_zero_grad_raises(pair):
    """Method: step, then backward without zero_grad: the gradients were consumed; UsageError names zero_grad, and with
    it the model goes on."""
    _, model, optimizer = pair
    optimizer.step()
    with pytest.raises(infinity.UsageError, match="zero_grad"):
        step(model)
    optimizer.zero_grad()
    step(model, optimizer, 1)


def test_after_the_refused_backward_the_bits_are_those_of_a_run_without_it(tmp_path):
    """Method: one of two runs forgets zero_grad once, is told, and repeats the step; same bits."""
    states = []
    for forgets in (False, True):
        model, optimizer = wrapped("nvme", tmp_path)
        for at in range(3):
            torch.manual_seed(at)
            loss_of(model, tokens(SEED + at)).backward()
            optimizer.step()
            if forgets and at == 1:
                with pytest.raises(infinity.UsageError):
                    step(model, at=2)
            optimizer.zero_grad()
        states.append(model.state_dict())
        del model, optimizer
    assert differing(*states) == []


def test_sparse_gradients_are_refused(tmp_path):
    """Method: an embedding with sparse=True; UsageError (or ConfigError at the wrap) names it."""
    model = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Linear(8, 8))
    with pytest.raises(infinity.InfinityError, match="sparse"):
        model, optimizer = infinity.wrap_model(
            model, torch.optim.SGD(model.parameters(), lr=0.1), at_home("host", "host", tmp_path)
        )
        model(torch.tensor([1, 2])).sum().backward()


# ---------------------------------------------------------------------------------------------------------------------
# full_params
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, "bf16"])
@every_home
def test_full_params_gives_the_values(home, dtype, tmp_path):
    """Method: gather all, by name, by module prefix and by list; names and values are those of the model."""
    values = dict(transformer(SEED).named_parameters())
    if dtype:
        values = {name: ties_away(value) for name, value in values.items()}
    model, _ = wrapped(home, tmp_path, param_dtype=dtype)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    wanted = {
        "all": (None, names),
        "one": ("norm.weight", {"norm.weight"}),
        "module": (["blocks.1"], {n for n in names if n.startswith("blocks.1.")}),
        "some": (["blocks.0.norm1", "positions"], {"blocks.0.norm1.weight", "blocks.0.norm1.bias", "positions"}),
        "tied": (["head.weight"], {"head.weight"}),
        "root": ("", names),
        "none": ([], set()),
    }
    for what, (asked, expected) in wanted.items():
        with infinity.full_params(model, asked) as params:
            assert set(params) == expected, what
            for name, param in params.items():
                assert torch.equal(param, values[name if name != "head.weight" else "tokens.weight"].detach()), name
                assert param.requires_grad  # what is computed from it trains
        with torch.no_grad(), infinity.full_params(model, asked) as params:
            assert not any(param.requires_grad for param in params.values())


def test_full_params_refuses_unknown_names(tmp_path):
    """Method: a typo and a prefix that is no module; UsageError names the nearest name."""
    model, _ = wrapped("nvme", tmp_path)
    for wrong, near in (("norm.wieght", "norm.weight"), ("block", ""), ("blocks.0.norm1.", ""), ("blocks.0.norm", "")):
        with pytest.raises(infinity.UsageError, match=f"{wrong}.*{near}"), infinity.full_params(model, [wrong]):
            pass


@pytest.mark.parametrize("dtype", [None, "bf16"])
@every_home
def test_full_params_writes_edits_back(home, dtype, tmp_path):
    """Method: train a step so that masters have low bits, edit some elements with writeback; exactly those change, in
    weight and master, and every other element's master keeps its bits."""
    model, optimizer = wrapped(home, tmp_path, param_dtype=dtype)
    step(model, optimizer)
    before = model.state_dict()
    with infinity.full_params(model, ["blocks.1"], writeback=True) as params:
        params["blocks.1.feed.0.weight"][3, 5:9] = 0.25
        params["blocks.1.norm1.bias"].mul_(2.0).add_(1.0)
    after = model.state_dict()
    assert set(differing(before, after)) == {"blocks.1.feed.0.weight", "blocks.1.norm1.bias"}
    expected = before["blocks.1.feed.0.weight"].clone()
    expected[3, 5:9] = 0.25
    assert torch.equal(after["blocks.1.feed.0.weight"], expected)
    state = optimizer.state_dict()["state"]
    step(model, optimizer, 1)
    assert len(state) == len(list(model.parameters()))


@pytest.mark.parametrize("how", ["no writeback", "exception"])
@pytest.mark.parametrize("dtype", [None, "bf16"])
@every_home
def test_refused_edits_leave_the_old_values(home, dtype, how, tmp_path):
    """Method: edit without writeback (UsageError at the end), or raise in a block with writeback; the old values
    stand, to the bit, and the model goes on."""
    model, optimizer = wrapped(home, tmp_path, param_dtype=dtype)
    step(model, optimizer)
    before = model.state_dict()
    with pytest.raises(infinity.UsageError if how == "no writeback" else ZeroDivisionError):
        with infinity.full_params(model, ["blocks", "norm"], writeback=how == "exception") as params:
            params["norm.weight"].zero_()
            params["blocks.2.feed.0.weight"][0, 0] = float("nan")
            if how == "exception":
                1 / 0
    assert differing(model.state_dict(), before) == []
    step(model, optimizer, 1)


@pytest.mark.parametrize("edit", [float("nan"), float("inf"), -0.0, 1e30], ids=str)
def test_full_params_writes_odd_values(edit, tmp_path):
    """Method: NaN, infinity, minus zero and a huge value as edits of a split master; they come back as they are."""
    model, _ = wrapped("nvme", tmp_path, param_dtype="bf16")
    with infinity.full_params(model, ["norm.weight"], writeback=True) as params:
        params["norm.weight"][7] = edit
        expected = params["norm.weight"].clone()
    with infinity.full_params(model, ["norm.weight"]) as params:
        assert torch.equal(bits(params["norm.weight"]), bits(expected))
    value = model.state_dict()["norm.weight"][7]
    assert torch.equal(bits(value.bfloat16()), bits(expected[7]))


@every_home
def test_full_params_may_be_nested(home, tmp_path):
    """Method: a block inside another over the same unit; the outer tensors live on, and each writes its own edits."""

    def work():
        model, _ = wrapped(home, tmp_path)
        value = model.state_dict()["blocks.0.feed.0.weight"]
        with infinity.full_params(model, ["blocks.0"], writeback=True) as outer:
            with infinity.full_params(model, ["blocks.0.norm1"], writeback=True) as inner:
                inner["blocks.0.norm1.bias"].fill_(0.5)
            assert torch.equal(outer["blocks.0.feed.0.weight"], value)
            outer["blocks.0.norm2.bias"].fill_(0.25)
        state = model.state_dict()
        assert torch.equal(state["blocks.0.norm1.bias"], torch.full((64,), 0.5))
        assert torch.equal(state["blocks.0.norm2.bias"], torch.full((64,), 0.25))

    in_child(work)


LATE: dict[str, Callable[[nn.Module, Any], Any]] = {}


def late(use: Callable[[nn.Module, Any], Any]) -> Callable:
    LATE[use.__name__] = use
    return use


@late
def tensor_of_full_params(model, optimizer):
    with infinity.full_params(model, ["blocks.0"]) as params:
        kept = params["blocks.0.feed.0.weight"]
    return kept, "blocks.0.feed.0.weight"


@late
def view_of_a_parameter(model, optimizer):
    with infinity.full_params(model, ["blocks.0"]):
        kept = model.blocks[0].feed[0].weight.view(-1).view(256, 64)
    return kept, "blocks.0.feed.0.weight"


@late
def state_dict_inside(model, optimizer):
    with infinity.full_params(model, ["blocks.0"]):
        state = model.state_dict()
    return state["blocks.0.feed.0.weight"], "blocks.0.feed.0.weight"


@late
def step_inside(model, optimizer):
    step(model)
    with infinity.full_params(model, ["blocks.0"]) as params:
        with contextlib.suppress(infinity.UsageError):
            optimizer.step()
        kept = params["blocks.0.feed.0.weight"]
        return kept.clone(), None


@late
def load_inside(model, optimizer):
    state = {name: 2 * value for name, value in model.state_dict().items()}
    with infinity.full_params(model, ["blocks.0"]) as params:
        with contextlib.suppress(infinity.UsageError):
            model.load_state_dict(state)
        return params["blocks.0.feed.0.weight"].clone(), None


@late
def unwrap_inside(model, optimizer):
    with infinity.full_params(model, ["blocks.0"]) as params:
        with contextlib.suppress(infinity.UsageError):
            infinity.unwrap_model(model, optimizer)
        return params["blocks.0.feed.0.weight"].clone(), None


@late
def save_inside(model, optimizer):
    with infinity.full_params(model, ["blocks.0"]) as params:
        with contextlib.suppress(infinity.UsageError):
            infinity.save_checkpoint(os.environ["FOLDER"] + "/checkpoint", model, optimizer)
            infinity.load_checkpoint(os.environ["FOLDER"] + "/checkpoint", model, optimizer)
        return params["blocks.0.feed.0.weight"].clone(), "blocks.0.feed.0.weight"


@late
def loss_outside(model, optimizer):
    with infinity.full_params(model):
        penalty = sum(p.square().sum() for p in model.parameters())
    penalty.backward()
    return None, None


@pytest.mark.parametrize("use", LATE.values(), ids=LATE)
@every_home
def test_what_is_left_of_full_params_never_crashes(use, home, tmp_path):
    """Method: use the tensors of a full_params block after it, or do inside it what moves the weights; the result is
    right, or a Python exception says that it is too late: never garbage, never a crash."""
    folder = tmp_path / "swap"
    folder.mkdir()

    def work():
        with environment(FOLDER=str(tmp_path)):
            model, optimizer = wrapped(home, folder)
            state = model.state_dict()
            try:
                kept, name = use(model, optimizer)
                found = kept.clone() if kept is not None else None
            except (RuntimeError, infinity.InfinityError):
                return
        if name is not None:
            assert torch.equal(found, state[name])

    in_child(work)


# ---------------------------------------------------------------------------------------------------------------------
# State dicts, unwrap_model
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_home
def test_state_dicts_go_to_plain_torch_and_back(home, dtype, tmp_path):
    """Method: train wrapped, load both state dicts into plain torch and those into another wrap; all three take the
    next step alike, and the state dicts are equal to the bit."""
    model, optimizer = wrapped(home, tmp_path, transformer(SEED).to(dtype))
    for at in range(2):
        step(model, optimizer, at)
    plain = transformer(0).to(dtype)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1.0)
    state, optimizer_state = model.state_dict(), optimizer.state_dict()
    assert list(state) == list(plain.state_dict())
    assert {name: (v.dtype, v.shape) for name, v in state.items()} == {
        name: (v.dtype, v.shape) for name, v in plain.state_dict().items()
    }
    assert all(type(value) is torch.Tensor and not value.requires_grad for value in state.values())
    assert plain.load_state_dict(state).missing_keys == []
    plain_optimizer.load_state_dict(optimizer_state)
    again, again_optimizer = wrapped("host", tmp_path, transformer(1).to(dtype))
    again.load_state_dict(plain.state_dict())
    again_optimizer.load_state_dict(plain_optimizer.state_dict() if dtype == torch.float32 else optimizer_state)
    assert differing(again.state_dict(), state) == []
    assert optimizer_state["param_groups"][0]["lr"] == plain_optimizer.param_groups[0]["lr"] == LR
    if dtype == torch.float32:  # with 16 bits the masters' low bits are not in a state dict of 16 bits
        for one, its in ((model, optimizer), (plain, plain_optimizer), (again, again_optimizer)):
            step(one, its, 5)
        assert differing(again.state_dict(), model.state_dict()) == []
        torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-4)


@every_home
def test_state_dict_is_a_snapshot_that_saves(home, tmp_path):
    """Method: torch.save and safetensors take the state dict; later training does not change it; tied keys share a
    tensor as torch's do; prefixes and destinations work; metadata is there."""
    model, optimizer = wrapped(home, tmp_path)
    state = model.state_dict()
    kept = {name: value.clone() for name, value in state.items()}
    assert state["tokens.weight"].data_ptr() == state["head.weight"].data_ptr()
    assert state._metadata[""]["version"] == 1
    loaded = torch.load(io.BytesIO(save(state)))
    assert differing(loaded, kept) == []
    step(model, optimizer)
    assert differing(state, kept) == []
    destination = model.state_dict(prefix="model.")
    assert set(destination) == {f"model.{name}" for name in kept}
    assert destination["model.tokens.weight"].data_ptr() == destination["model.head.weight"].data_ptr()
    kept_vars = model.state_dict(keep_vars=True)
    assert set(kept_vars) == set(kept)
    save(optimizer.state_dict())


@every_home
def test_state_dict_of_a_submodule(home, tmp_path):
    """Method: state_dict() and load_state_dict() of a block and of a module that holds tied weights."""

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = TinyTransformer(blocks=2)
            self.extra = nn.Linear(VOCABULARY, 3)

        def forward(self, ids):
            return self.extra(self.inner(ids))

    model = seeded(SEED, Outer)
    values = copy.deepcopy(model.inner.state_dict())
    model, _ = wrapped(home, tmp_path, model)
    inner = model.inner.state_dict()
    assert differing(inner, values) == []
    assert inner["tokens.weight"].data_ptr() == inner["head.weight"].data_ptr()
    block = model.inner.blocks[1].state_dict()
    assert set(block) == set(model.inner.blocks[0].state_dict())
    model.inner.blocks[0].load_state_dict(block)
    assert differing(model.inner.blocks[0].state_dict(), block) == []


@both_ends
def test_load_state_dict_says_what_torch_says(home, tmp_path):
    """Method: strict=False with missing and unexpected keys, strict=True with them, a wrong shape, assign=True."""
    plain, (model, _) = transformer(SEED), wrapped(home, tmp_path)
    other = transformer(SEED + 1).state_dict()
    del other["norm.bias"]
    other["new"] = torch.ones(1)
    assert model.load_state_dict(other, strict=False) == plain.load_state_dict(other, strict=False)
    assert differing(model.state_dict(), plain.state_dict()) == []
    with pytest.raises(RuntimeError, match="Missing key.*norm.bias"):
        model.load_state_dict(other)
    wrong = transformer(SEED + 2).state_dict()
    wrong["norm.bias"] = torch.ones(5)
    with pytest.raises(RuntimeError, match="size mismatch for norm.bias"):
        model.load_state_dict(wrong)
    with pytest.raises(infinity.UsageError, match="assign"):
        model.load_state_dict(transformer(SEED).state_dict(), assign=True)


@both_ends
def test_loading_the_models_own_state_dict_changes_nothing(home, tmp_path):
    """Method: load_state_dict(state_dict()) in mid-training of an fp32 model, of one that computes in bf16, and of the
    optimizer; the run goes on with the bits of one without."""
    for dtype in (None, "bf16"):
        states = []
        for reloads in (False, True):
            model, optimizer = wrapped(home, tmp_path, param_dtype=dtype)
            for at in range(3):
                step(model, optimizer, at)
                if reloads and at == 1:
                    model.load_state_dict(model.state_dict())
                    optimizer.load_state_dict(optimizer.state_dict())
            states.append(model.state_dict())
            del model, optimizer
        assert differing(*states) == []


def test_optimizer_state_dict_is_refused_before_anything_changes(tmp_path):
    """Method: a state dict with other groups, and one with a moment of a wrong shape; UsageError, and state and hyperparameters are as they were."""
    model, optimizer = wrapped("nvme", tmp_path)
    step(model, optimizer)
    before = optimizer.state_dict()
    other = copy.deepcopy(before)
    other["param_groups"][0]["params"] = other["param_groups"][0]["params"][:-1]
    wrong = copy.deepcopy(before)
    wrong["param_groups"][0]["lr"] = 5.0
    wrong["state"][3]["exp_avg"] = torch.ones(2, 3)
    for bad in (other, wrong):
        with pytest.raises((infinity.UsageError, ValueError)):
            optimizer.load_state_dict(bad)
        now = optimizer.state_dict()
        assert now["param_groups"] == before["param_groups"]
        torch.testing.assert_close(now["state"], before["state"], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_home
def test_unwrap_gives_plain_objects_back(home, dtype, tmp_path):
    """Method: wrap, train, unwrap; the same model and optimizer objects, plain parameters with bytes, no hook of the
    engine's, gradients and state where torch has them, nothing left on disk, and it can be wrapped again."""
    model = transformer(SEED).to(dtype)
    optimizer = adamw(model, LR)
    identities = {name: id(p) for name, p in model.named_parameters()}
    hooks = {name: hooks_of(module) for name, module in model.named_modules()}
    wrapped_model, managed = infinity.wrap_model(model, optimizer, at_home(home, home, tmp_path))
    assert wrapped_model is model and isinstance(managed, torch.optim.Optimizer)
    for at in range(2):
        step(model, managed, at)
    step(model, at=3)
    values = model.state_dict()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    plain, plain_optimizer = infinity.unwrap_model(model, managed)
    assert plain is model and plain_optimizer is optimizer and type(optimizer) is torch.optim.AdamW
    assert {name: id(p) for name, p in model.named_parameters()} == identities
    assert {name: hooks_of(module) for name, module in model.named_modules()} == hooks
    for name, param in model.named_parameters():
        assert type(param) is nn.Parameter and param.is_leaf and param.requires_grad and param.dtype == dtype
        assert param.untyped_storage().nbytes() >= param.nbytes
        assert not param._backward_hooks and not getattr(param, "_post_accumulate_grad_hooks", None), name
        assert not [key for key in vars(param) if "infinity" in key], name
        assert torch.equal(param.grad, grads[name])
    assert model.head.weight is model.tokens.weight
    assert differing(model.state_dict(), values) == []
    assert {int(state["step"]) for state in optimizer.state.values()} == {2}
    assert leftovers(tmp_path) == []
    copy.deepcopy(model), save(model.state_dict()), pickle.dumps(model.norm.weight)
    with pytest.raises(infinity.UsageError):
        infinity.unwrap_model(model, optimizer)
    with pytest.raises(infinity.UsageError):
        managed.step()
    optimizer.step()
    optimizer.zero_grad()
    step(model, optimizer, 4)
    model, managed = infinity.wrap_model(model, optimizer, at_home(home, home, tmp_path))
    step(model, managed, 5)


def hooks_of(module: nn.Module) -> dict[str, int]:
    names = [name for name in vars(module) if "hook" in name and isinstance(vars(module)[name], dict)]
    return {name: len(vars(module)[name]) for name in names}


@every_home
def test_training_continues_after_unwrap_as_if_nothing_had_been(home, tmp_path):
    """Method: wrap and unwrap at once, then train by torch: the bits of a run that was never wrapped; and after
    wrapped steps, plain ones have the bits of plain ones from the same state."""
    plain, model = transformer(SEED), transformer(SEED)
    plain_optimizer, optimizer = adamw(plain, LR), adamw(model, LR)
    for one, its in ((plain, plain_optimizer), (model, optimizer)):
        step(one, its, 0)
    model, managed = infinity.wrap_model(model, optimizer, at_home(home, home, tmp_path))
    model, optimizer = infinity.unwrap_model(model, managed)
    for at in (1, 2):
        for one, its in ((plain, plain_optimizer), (model, optimizer)):
            step(one, its, at)
    assert differing(model.state_dict(), plain.state_dict()) == []

    model, managed = infinity.wrap_model(model, optimizer, at_home(home, home, tmp_path))
    step(model, managed, 3)
    plain.load_state_dict(model.state_dict())
    plain_optimizer.load_state_dict(managed.state_dict())
    model, optimizer = infinity.unwrap_model(model, managed)
    for one, its in ((plain, plain_optimizer), (model, optimizer)):
        step(one, its, 4)
    assert differing(model.state_dict(), plain.state_dict()) == []


@pytest.mark.parametrize("dtype", [None, "bf16"])
@every_home
def test_state_dict_after_a_pass_that_failed(home, dtype, tmp_path):
    """Method: an exception in the middle of a backward, then state_dict(): the values, in the dtypes the model was
    wrapped with, that stay valid when training goes on. What is saved after a crash must be what was trained."""

    def work():
        model, optimizer = wrapped(home, tmp_path, param_dtype=dtype)
        step(model, optimizer)
        expected = model.state_dict()
        for at, failing in enumerate((model.blocks[1].norm1.weight, model.blocks[5].feed[0].weight, model.positions)):
            hook = failing.register_hook(lambda grad: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                step(model, at=at)
            hook.remove()
            state = model.state_dict()
            assert differing(state, expected) == []
            for name in ("blocks.0.norm1.weight", "blocks.4.feed.0.weight", "positions"):
                with contextlib.suppress(infinity.UsageError):
                    value = expected[name] if dtype is None else ties_away(expected[name])
                    assert torch.equal(model.get_parameter(name).detach().clone(), value)
            optimizer.zero_grad()
            with torch.no_grad():
                model(tokens(0))
            assert differing(state, expected) == []
        step(model, optimizer, 1)

    in_child(work)


@pytest.mark.parametrize("where", ["forward", "backward"])
@every_home
def test_state_dict_in_the_middle_of_a_pass(home, where, tmp_path):
    """Method: call state_dict() from a forward hook and from a gradient hook, as callbacks do; the values, and valid
    afterwards."""

    def work():
        model, optimizer = wrapped(home, tmp_path, param_dtype="bf16")
        step(model, optimizer)
        expected, seen = model.state_dict(), []

        def look(*args):
            seen.append(model.state_dict())

        if where == "forward":
            model.blocks[3].feed.register_forward_hook(look)
        else:
            model.blocks[3].norm2.weight.register_hook(look)
        step(model)
        optimizer.zero_grad()
        with torch.no_grad():
            model(tokens(0))
        assert seen and all(differing(state, expected) == [] for state in seen)

    in_child(work)


@both_ends
def test_unwrap_between_clip_and_step(home, tmp_path):
    """Method: clip, then unwrap before the step; the plain gradients are the clipped ones, and the plain step is that
    of a run that was never wrapped."""
    plain = transformer(SEED, dropout=0.0)
    plain_optimizer = adamw(plain, LR)
    model, optimizer = wrapped(home, tmp_path, transformer(SEED, dropout=0.0))
    for one in (plain, model):
        step(one)
        torch.nn.utils.clip_grad_norm_(one.parameters(), 0.01)
    model, optimizer = infinity.unwrap_model(model, optimizer)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, param.grad, rtol=1e-5, atol=1e-8)
    plain_optimizer.step()
    optimizer.step()
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)


def test_unwrap_without_its_optimizer(tmp_path):
    """Method: unwrap with the optimizer left out: it is found, or its absence is said; never left half-wrapped."""
    model = transformer(SEED)
    optimizer = adamw(model, LR)
    model, managed = infinity.wrap_model(model, optimizer, at_home("nvme", "nvme", tmp_path))
    step(model, managed)
    try:
        _, found = infinity.unwrap_model(model)
    except infinity.UsageError:
        infinity.unwrap_model(model, managed)
    else:
        assert found is optimizer
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert len(optimizer.state) == len(list(model.parameters()))


# ---------------------------------------------------------------------------------------------------------------------
# Wrapping: what is refused, and that nothing is changed then
# ---------------------------------------------------------------------------------------------------------------------


def test_wrapping_twice_is_refused(tmp_path):
    """Method: wrap a wrapped model, a model that contains it, one inside it, and a plain model with its optimizer."""
    model, managed = wrapped("nvme", tmp_path)
    config = at_home("nvme", "nvme", tmp_path)
    for again in (model, nn.Sequential(model), model.blocks[0]):
        with pytest.raises(infinity.UsageError, match="unwrap_model"):
            infinity.wrap_model(again, None, config)
    with pytest.raises(infinity.InfinityError):
        infinity.wrap_model(transformer(SEED), managed, config)
    with pytest.raises(infinity.InfinityError):
        infinity.wrap_model(model, managed, config)
    step(model, managed)


class Muon(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None: ...


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], type, list[str]]] = {
    "unsupported": (lambda m: torch.optim.RMSprop(m.parameters()), infinity.ConfigError, ["RMSprop", "AdamW", "SGD", "Lion"]),
    "of the user": (lambda m: Muon(m.parameters()), infinity.ConfigError, ["Muon", "AdamW"]),
    "Adamax": (lambda m: torch.optim.Adamax(m.parameters()), infinity.ConfigError, ["Adamax", "AdamW"]),
    "amsgrad": (lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True), infinity.ConfigError, ["amsgrad"]),
    "differentiable": (lambda m: torch.optim.Adam(m.parameters(), differentiable=True), infinity.ConfigError, ["differ"]),
    "of another model": (lambda m: torch.optim.AdamW(transformer(1).parameters()), infinity.ConfigError, ["parameter"]),
    "of more": (lambda m: torch.optim.SGD([*m.parameters(), torch.ones(7, requires_grad=True)], 0.1), infinity.ConfigError, ["7"]),
    "no optimizer": (lambda m: "adam", infinity.ConfigError, ["str"]),
}


@pytest.mark.parametrize("refused", REFUSED)
def test_optimizers_that_are_refused(refused, tmp_path):
    """Method: an unsupported kind, unsupported settings, other parameters; the error lists what is supported or names
    the parameter, and the model was not touched."""
    make, kind, words = REFUSED[refused]
    model = transformer(SEED)
    with pytest.raises(kind) as raised:
        infinity.wrap_model(model, make(model), at_home("nvme", "nvme", tmp_path))
    assert all(word in str(raised.value) for word in words), str(raised.value)
    assert all(type(p) is nn.Parameter for p in model.parameters()) and leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("config", "kind", "words"),
    [
        ({"parms": "host"}, infinity.ConfigError, ["parms", "params"]),
        ({"nvme_path": "/tmp"}, infinity.ConfigError, ["nvme_path", "nvme_paths"]),
        ({"completely_wrong": 1}, infinity.ConfigError, ["completely_wrong"]),
        ({"params": "gpu"}, infinity.ConfigError, ["gpu", "device", "host", "nvme"]),
        ({"params": "nvme"}, infinity.ConfigError, ["nvme_paths"]),
        ({"optimizer": "nvme", "nvme_paths": []}, infinity.ConfigError, ["nvme_paths"]),
        ({"host_memory": "48 GiBs"}, infinity.ConfigError, ["host_memory", "48 GiBs"]),
        ({"host_memory": -1}, infinity.ConfigError, ["host_memory"]),
        ({"host_memory": 1.5}, infinity.ConfigError, ["host_memory"]),
        ({"param_dtype": "int8"}, infinity.ConfigError, ["param_dtype"]),
        ({"master": "half"}, infinity.ConfigError, ["master", "split"]),
        ({"units": ["NoSuchBlock"]}, infinity.ConfigError, ["NoSuchBlock", "Block"]),
        ({"max_grad_norm": -1}, infinity.ConfigError, ["max_grad_norm"]),
        ({"micro_batch": 0}, infinity.ConfigError, ["micro_batch"]),
        ({"checksums": "yes"}, infinity.ConfigError, ["checksums"]),
        ("/no/such/file.toml", infinity.ConfigError, ["/no/such/file.toml"]),
        (17, infinity.ConfigError, ["int"]),
        ({"params": "host", "host_memory": "1KiB"}, infinity.CapacityError, ["host_memory", "bytes"]),
        ({"device_memory": "1KiB", "params": "device"}, infinity.CapacityError, ["device_memory", "bytes"]),
    ],
    ids=str,
)
def test_configs_that_are_refused(config, kind, words):
    """Method: unknown keys, values out of range, budgets too small; the error is typed and names key and remedy, and
    the model was not touched."""
    model = transformer(SEED)
    optimizer = adamw(model, LR)
    with pytest.raises(kind) as raised:
        infinity.wrap_model(model, optimizer, config)
    assert all(word in str(raised.value) for word in words), str(raised.value)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    with contextlib.suppress(infinity.InfinityError, TypeError):
        infinity.Config(**config) if isinstance(config, dict) else None


def test_config_in_all_its_forms(tmp_path):
    """Method: keywords, a dict, TOML and JSON paths give the same frozen config; sizes may be text; positional
    arguments and assignment raise."""
    expected = infinity.Config(params="nvme", nvme_paths=[str(tmp_path)], host_memory="1.5GiB", param_dtype="bf16")
    assert expected.host_memory == 1536 * MIB and expected.param_dtype is torch.bfloat16
    (tmp_path / "c.toml").write_text(
        f'params = "nvme"\nnvme_paths = ["{tmp_path}"]\nhost_memory = "1.5GiB"\nparam_dtype = "bf16"\n'
    )
    (tmp_path / "c.json").write_text(
        json.dumps({"params": "nvme", "nvme_paths": [str(tmp_path)], "host_memory": "1.5GiB", "param_dtype": "bf16"})
    )
    model = nn.Linear(2, 2)
    for form in (expected, tmp_path / "c.toml", str(tmp_path / "c.json")):
        infinity.wrap_model(model, None, form)
        infinity.unwrap_model(model)
    with pytest.raises(AttributeError):
        expected.params = "host"
    with pytest.raises(TypeError):
        infinity.Config("nvme")


def objects_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that a failed wrap could have changed."""
    return {
        "parameters": {n: (id(p), type(p), p.data_ptr(), p.requires_grad) for n, p in model.named_parameters()},
        "hooks": {n: hooks_of(m) for n, m in model.named_modules()},
        "attributes": {n: sorted(vars(m)) for n, m in model.named_modules()},
        "parameter attributes": {n: sorted(vars(p)) for n, p in model.named_parameters()},
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
        "group identities": [id(g) for g in optimizer.param_groups],
        "state keys": [sorted(optimizer.state[p]) for p in optimizer.state],
        "class": type(optimizer),
    }


def values_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    values = {name: t.detach().clone() for name, t in model.state_dict().items()}
    values |= {f"grad {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    for i, state in enumerate(optimizer.state.values()):
        values |= {f"{i} {key}": value.clone() for key, value in state.items() if torch.is_tensor(value)}
    return values


CAUSES = ["host budget", "device budget", "disk budget", "no folder", "a file", "second folder", "disk full", "disk fills up",
          "write fails at once", "write fails late", "write fails very late", "weights missing", "weights of another shape",
          "weights damaged", "interrupted", "bad environment"]  # fmt: skip


@pytest.mark.parametrize("cause", CAUSES)
def test_a_failed_wrap_leaves_everything_as_it_was(cause, tmp_path, monkeypatch):
    """Method: let the wrap of a model in mid-training fail for many causes, early and late; parameters, gradients,
    optimizer state, hooks and attributes are what they were, to the bit and to the object, nothing is left on disk, and
    with the cause gone the same wrap works."""
    swap = tmp_path / "swap"
    swap.mkdir()
    model = transformer(SEED)
    optimizer = adamw(model, LR)
    step(model, optimizer)
    step(model)
    config: dict[str, Any] = at_home("nvme", "nvme", swap)
    kind: type[BaseException] = infinity.InfinityError
    with monkeypatch.context() as patch:
        bad = dict(config)
        if cause == "host budget":
            bad["host_memory"], kind = 1, infinity.CapacityError
        elif cause == "device budget":
            bad["device_memory"], kind = 1, infinity.CapacityError
        elif cause == "disk budget":
            bad["nvme_capacity"], kind = 1, infinity.CapacityError
        elif cause == "no folder":
            bad["nvme_paths"] = [str(tmp_path / "none")]
        elif cause == "a file":
            (tmp_path / "file").write_text("")
            bad["nvme_paths"] = [str(tmp_path / "file")]
        elif cause == "second folder":
            bad["nvme_paths"] = [str(swap), str(tmp_path / "none")]
        elif cause == "disk full":
            usage = shutil.disk_usage(swap)._replace(free=1000)
            patch.setattr(shutil, "disk_usage", lambda path: usage)
            kind = infinity.CapacityError
        elif cause == "disk fills up":
            patch.setenv("INFINITY_FAULTS", "seed=1,enospc=1.0")
        elif cause.startswith("write fails"):
            first = {"write fails at once": 0, "write fails late": 20, "write fails very late": 38}[cause]
            patch.setenv("INFINITY_FAULTS", f"seed=1,eio=1.0,first_piece={first}")
            kind = infinity.StorageError
        elif cause == "weights missing":
            bad["weights"] = tmp_path / "none.safetensors"
        elif cause == "weights of another shape":
            from safetensors.torch import save_file

            save_file({"norm.bias": torch.ones(3), "tokens.weight": torch.ones(67, 64)}, tmp_path / "w.safetensors")
            bad["weights"] = tmp_path / "w.safetensors"
        elif cause == "weights damaged":
            (tmp_path / "w.safetensors").write_bytes(b"nonsense" * 100)
            bad["weights"] = tmp_path / "w.safetensors"
        elif cause == "interrupted":
            from infinity.state.shard import ParamShard

            written = []

            def interrupted(self, *args, **kwargs):
                written.append(1)
                if len(written) == 20:
                    raise KeyboardInterrupt
                return original(self, *args, **kwargs)

            original = ParamShard.write_value
            patch.setattr(ParamShard, "write_value", interrupted)
            kind = KeyboardInterrupt
        elif cause == "bad environment":
            patch.setenv("INFINITY_FAULTS", "nonsense=1")
        objects, values = objects_of(model, optimizer), values_of(model, optimizer)
        with pytest.raises(kind):
            infinity.wrap_model(model, optimizer, bad)
    assert objects_of(model, optimizer) == objects
    assert differing(values_of(model, optimizer), values) == []
    assert leftovers(swap) == []
    model, optimizer = infinity.wrap_model(model, optimizer, config)
    optimizer.step()
    optimizer.zero_grad()
    step(model, optimizer, 1)


@pytest.mark.parametrize("folder", ["under a file", "read-only"])
def test_a_folder_that_cannot_be_written_is_a_typed_error(folder, tmp_path):
    """Method: a path under a regular file, and a folder on a read-only mount where one can be made; the error is typed
    and names the folder."""
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "swap"
    with contextlib.ExitStack() as stack:
        if folder == "read-only":
            place = tmp_path / "ro"
            place.mkdir()
            if os.system(f"mount -t tmpfs -o ro none {place} 2>/dev/null") != 0:
                pytest.skip("needs the right to mount")
            stack.callback(os.system, f"umount -l {place}")
        model = transformer(SEED)
        with pytest.raises((infinity.StorageError, infinity.ConfigError), match=str(place)) as raised:
            infinity.wrap_model(model, adamw(model, LR), at_home("nvme", "nvme", place))
        if isinstance(raised.value, infinity.StorageError):
            assert raised.value.errno in (errno.EROFS, errno.ENOTDIR, errno.EACCES) and isinstance(raised.value, OSError)
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_models_without_parameters_and_with_odd_ones(tmp_path):
    """Method: a model with no parameter at all, with an empty one only, with a frozen integer one; and fp64, which
    cannot be trained, is refused by name."""
    config = at_home("nvme", "nvme", tmp_path)
    nothing = nn.Sequential(nn.ReLU())
    assert infinity.wrap_model(nothing, None, config) == (nothing, None)
    assert torch.equal(nothing(torch.ones(2)), torch.ones(2))
    infinity.unwrap_model(nothing)

    empty = nn.ParameterList([nn.Parameter(torch.empty(0, 4))])
    model, optimizer = infinity.wrap_model(empty, torch.optim.AdamW(empty.parameters()), config)
    optimizer.step()
    assert model.state_dict()["0"].shape == (0, 4)

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.arange(12).view(3, 4), requires_grad=False)
            self.mask = nn.Parameter(torch.tensor([True, False, True, True]), requires_grad=False)
            self.wide = nn.Parameter(torch.ones(4, dtype=torch.float64), requires_grad=False)
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x * self.mask) + self.table.sum(0) * self.wide.float()

    plain = seeded(SEED, Mixed)
    model = copy.deepcopy(plain)
    model, optimizer = infinity.wrap_model(model, torch.optim.AdamW(model.linear.parameters()), config)
    assert torch.equal(model(torch.ones(4)), plain(torch.ones(4)))
    assert differing(model.state_dict(), plain.state_dict()) == []
    double = nn.Linear(3, 3).double()
    with pytest.raises(infinity.ConfigError, match="weight.*float64"):
        infinity.wrap_model(double, torch.optim.AdamW(double.parameters()), config)


# --- meta ---


def meta_transformer() -> nn.Module:
    with torch.device("meta"):
        return TinyTransformer(dropout=0.0)


@pytest.mark.parametrize("tied_name", ["tokens.weight", "head.weight", "both"])
@pytest.mark.parametrize("home", ["host", "nvme"])
def test_model_on_meta_takes_its_weights_from_safetensors(home, tied_name, tmp_path):
    """Method: save a model's tensors (a tied one under either name, or both), build it on meta and wrap it with
    weights=; its state dict has the saved bits, and it trains as the saved model does."""
    from safetensors.torch import save_file

    plain = transformer(SEED, dropout=0.0)
    tensors = {name: value.clone() for name, value in plain.state_dict().items()}
    if tied_name != "both":
        del tensors[{"tokens.weight": "head.weight", "head.weight": "tokens.weight"}[tied_name]]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "swap").mkdir()
    model = meta_transformer()
    identities = [id(p) for p in model.parameters()]
    config = at_home(home, home, tmp_path / "swap", weights=tmp_path / "model.safetensors")
    model, optimizer = infinity.wrap_model(model, adamw(model, LR), config)
    assert [id(p) for p in model.parameters()] == identities
    assert differing(model.state_dict(), plain.state_dict()) == []
    other, other_optimizer = infinity.wrap_model(plain, adamw(plain, LR), at_home(home, home, tmp_path / "swap"))
    for one, its in ((model, optimizer), (other, other_optimizer)):
        step(one, its)
    assert differing(model.state_dict(), other.state_dict()) == []


def test_a_file_that_lacks_a_weight_is_no_silent_mixture(tmp_path):
    """Method: weights= lacks one bias (its layer's weight is there), or has none of the model's names; the error names
    what is missing, or at least every tensor that is in the file has its value from there."""
    from safetensors.torch import save_file

    tensors = {name: value.clone() for name, value in transformer(SEED).state_dict().items() if name != "head.weight"}
    del tensors["blocks.1.feed.0.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    try:
        model, _ = infinity.wrap_model(meta_transformer(), None, {"weights": tmp_path / "model.safetensors"})
    except infinity.ConfigError as error:
        assert "blocks.1.feed.0.bias" in str(error)
    else:
        state = model.state_dict()
        assert differing({name: state[name] for name in tensors}, tensors) == []
    save_file({f"wrong.{name}": value for name, value in tensors.items()}, tmp_path / "wrong.safetensors")
    with pytest.raises(infinity.ConfigError):
        infinity.wrap_model(meta_transformer(), None, {"weights": tmp_path / "wrong.safetensors"})


def test_model_on_meta_without_weights_is_initialised_by_its_modules(tmp_path):
    """Method: build on meta modules that have reset_parameters, wrap without weights=; every value is drawn (none is
    left as it was allocated), seeds repeat it, and a module without reset_parameters is named."""

    def build():
        with torch.device("meta"):
            return nn.Sequential(nn.Embedding(20, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8))

    states = []
    for _ in range(2):
        torch.manual_seed(SEED)
        model, _ = infinity.wrap_model(build(), None, at_home("nvme", "auto", tmp_path))
        states.append(model.state_dict())
    assert differing(*states) == []
    state = states[0]
    assert torch.equal(state["1.weight"], torch.ones(8)) and torch.equal(state["4.running_var"], torch.ones(8))
    assert 0 < state["2.weight"].abs().max() <= 8**-0.5 and 0.5 < state["0.weight"].std() < 1.5
    with pytest.raises(infinity.ConfigError, match="positions"):
        infinity.wrap_model(meta_transformer(), None, {})


def test_transformers_model_on_meta(tmp_path):
    """Method: a Llama (rotary buffers that are in no file) and a GPT-2 built on meta from their saved folders; outputs
    have the bits of from_pretrained's."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 1, "vocab_size": 67, "max_position_embeddings": 32}  # fmt: skip
    configs = [
        transformers.LlamaConfig(**sizes),
        transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=67, n_positions=32),
    ]
    for config in configs:
        torch.manual_seed(SEED)
        saved = transformers.AutoModelForCausalLM.from_config(config).eval()
        folder = tmp_path / type(config).__name__
        saved.save_pretrained(folder)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        model, _ = infinity.wrap_model(model.eval(), None, at_home("nvme", "auto", tmp_path, weights=folder))
        with torch.no_grad():
            assert torch.equal(model(tokens(SEED)).logits, saved(tokens(SEED)).logits)


def test_failed_wrap_of_a_meta_model_leaves_it_on_meta(tmp_path):
    """Method: let the wrap fail after the weights were read; parameters and buffers are the meta ones they were."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    before = {name: id(t) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    for faults in ("eio=1.0", "eio=1.0,first_piece=3"):
        with environment(INFINITY_FAULTS=faults), pytest.raises(infinity.StorageError):
            infinity.wrap_model(model, torch.optim.AdamW(model.parameters()), at_home("nvme", "nvme", tmp_path))
        assert {name: id(t) for name, t in [*model.named_parameters(), *model.named_buffers()]} == before
        assert all(t.is_meta for t in [*model.parameters(), *model.buffers()])
        assert all(type(p) is nn.Parameter for p in model.parameters())


# ---------------------------------------------------------------------------------------------------------------------
# Stats, budgets, and what is left behind
# ---------------------------------------------------------------------------------------------------------------------


def test_stats_has_the_fields_that_were_promised(tmp_path):
    """Method: train from disk; every field is there, has moved in the right direction, and as_dict() is JSON."""
    model, optimizer = wrapped("nvme", tmp_path)
    fresh = infinity.stats(model)
    assert fresh.steps == 0 and isinstance(fresh, infinity.Stats)
    for at in range(3):
        step(model, optimizer, at)
    stats = infinity.stats(model)
    assert set(stats.edges) == {"nvme->host", "host->nvme", "host->device", "device->host"}
    for name, edge in stats.edges.items():
        assert edge.nbytes > fresh.edges[name].nbytes and edge.busy_seconds > 0 and edge.stall_seconds >= 0, name
    assert set(stats.tiers) == set(TIERS)
    for tier in stats.tiers.values():
        assert 0 <= tier.peak_nbytes <= tier.planned_nbytes
    assert stats.tiers["host"].budget_nbytes > 0 and stats.tiers["device"].budget_nbytes is None
    assert stats.steps == 3 and stats.step_seconds > 0 and stats.bound_seconds > 0
    assert isinstance(stats.bottleneck, str) and stats.bottleneck.count(".") >= 1
    plain = json.loads(json.dumps(stats.as_dict()))
    assert plain["tiers"]["nvme"]["peak_nbytes"] == stats.tiers["nvme"].peak_nbytes
    assert set(plain) >= {"edges", "tiers", "steps", "step_seconds", "bound_seconds", "bottleneck"}
    parameters = sum(p.nbytes for p in transformer(SEED).parameters())
    moved = stats.edges["nvme->host"].nbytes - fresh.edges["nvme->host"].nbytes
    assert moved >= 3 * 3 * parameters, "three steps read weights and both moments at least once each"
    with pytest.raises(infinity.UsageError):
        infinity.stats(nn.Linear(2, 2))


def test_counts_of_bytes_are_exact_where_the_design_gives_them(tmp_path):
    """Method: the split master's table of bytes per parameter (14 read, 12 written with one pass over the weights)
    against what steps really move, up to padding."""
    model, optimizer = infinity.wrap_model(
        *(lambda m: (m, adamw(m, LR)))(transformer(SEED)), at_home("nvme", "nvme", tmp_path, param_dtype="bf16")
    )
    for at in range(2):
        step(model, optimizer, at)
    infinity.save_checkpoint  # settle below without moving more than a step's bytes
    before = infinity.stats(model).edges
    for at in range(4):
        step(model, optimizer, at)
    with torch.no_grad():
        model(tokens(1))
    after = infinity.stats(model).edges
    elements = sum(p.numel() for p in model.parameters())
    read = (after["nvme->host"].nbytes - before["nvme->host"].nbytes) / 4 / elements
    written = (after["host->nvme"].nbytes - before["host->nvme"].nbytes) / 4 / elements
    assert 10 <= read <= 1.35 * (2 + 2 + 2 + 2 + 8), f"{read:.1f} bytes read per parameter and step"
    assert 10 <= written <= 1.35 * 12, f"{written:.1f} bytes written per parameter and step"


@pytest.mark.parametrize("homes", [(p, o) for p in TIERS for o in TIERS], ids="-".join)
def test_steady_state_takes_nothing_more(homes, tmp_path):
    """Method: after the second step the tiers' peaks and the open descriptors stay what they are, over training, eval,
    clipping and state dicts."""
    model = transformer(SEED)
    optimizer = adamw(model, LR)
    config = at_home(*homes, tmp_path)
    if "nvme" in homes:
        config = with_least(model, optimizer, config)
    model, optimizer = infinity.wrap_model(model, optimizer, config)
    seen = []
    for at in range(6):
        torch.manual_seed(at)
        loss_of(model, tokens(SEED + at)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(tokens(0))
        if at >= 2:
            model.state_dict(), optimizer.state_dict()
        tiers = infinity.stats(model).tiers
        seen.append(({name: tier.peak_nbytes for name, tier in tiers.items()}, len(os.listdir("/proc/self/fd"))))
    assert seen[1:] == [seen[1]] * 5


GROWTH = """
import os, sys
sys.path[:0] = [{root!r}, {tests!r}]
import torch
torch.set_num_threads(1)
from torch import nn
import infinity

def rss():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def build(width, blocks):
    with torch.device("meta"):
        return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(blocks)))

def run(model, optimizer, width):
    for step in range(3):
        dtype = next(model.parameters()).dtype
        model(torch.ones(1, width, dtype=dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

small = build(64, 3)
run(*infinity.wrap_model(small, torch.optim.AdamW(small.parameters()), {config!r}), 64)  # what torch loads once
del small
model = build({width}, {blocks})
before = rss()
model, optimizer = infinity.wrap_model(model, torch.optim.AdamW(model.parameters()), {config!r} | {{"host_memory": {budget}}})
wrapped = rss()
run(model, optimizer, {width})
after = rss()
stats = infinity.stats(model)
print(after - before, stats.tiers["host"].peak_nbytes, stats.tiers["device"].peak_nbytes, wrapped - before)
"""


@pytest.mark.parametrize("dtype", ["bf16", pytest.param(None, marks=pytest.mark.slow)])
def test_the_process_grows_by_no_more_than_its_budget(dtype, tmp_path):
    """Method: in a process of its own, wrap a model of 96 MB (fp32) on meta, with everything on disk and a host budget
    of 24 MiB more than the least; resident memory after three steps has grown by no more than the budget, the gathered
    weights, one unit's gradients and activations of torch's own, and 32 MiB."""
    import subprocess
    import sys

    width, blocks = 1024, 24
    config = at_home("nvme", "nvme", tmp_path, param_dtype=dtype)
    with torch.device("meta"):
        probe = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(blocks)))
    budget = least_host_memory(probe, torch.optim.AdamW(probe.parameters()), config) + 24 * MIB
    root = str(Path(infinity.__file__).parents[1])
    script = GROWTH.format(root=root, tests=str(Path(__file__).parent), config=config, width=width, blocks=blocks, budget=budget)
    # Without this, glibc keeps what torch frees, up to 32 MiB at a time.
    variables = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=variables)
    assert done.returncode == 0, done.stderr
    grown, host, device, wrapping = map(int, done.stdout.split())
    assert host <= budget
    unit = 4 * (width * width + width)
    allowed = budget + device + 2 * unit + 32 * MIB
    assert grown <= allowed, f"grew by {grown / MIB:.0f} MiB, {wrapping / MIB:.0f} in the wrap; {allowed / MIB:.0f} allowed"
    assert leftovers(tmp_path) == []


def held(folder: Path) -> tuple[int, int, list[str]]:
    """Descriptors, threads, and swap files in ``folder`` and rings that this process holds."""
    targets = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
    swap = [target for target in targets if target.startswith(f"{folder}/") or "io_uring" in target]
    return len(targets), len(os.listdir("/proc/self/task")), swap


@pytest.mark.parametrize("io_engine", ["uring", pytest.param("threads", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "after", ["wrap", "forward", "backward", "step", "exception", "generate graph", "optimizer first", "unwrap"]
)
def test_dropping_model_and_optimizer_frees_everything(after, io_engine, tmp_path):
    """Method: wrap, go on to a given moment, drop every reference and collect; descriptors, threads and swap folders
    are those of before, and so is the memory that the engine held."""
    from infinity import native

    if io_engine == "uring" and native.uring_refusal():
        pytest.skip(native.uring_refusal())

    def work():
        with environment(INFINITY_IO=io_engine):
            model, optimizer = wrapped("nvme", tmp_path)  # what a process allocates once
            step(model, optimizer)
            del model, optimizer
            gc.collect()
            before = held(tmp_path)
            assert before[2] == []
            model, optimizer = wrapped("nvme", tmp_path)
            assert len(swap_files(tmp_path)) == 1 and swap_files(tmp_path)[0].stat().st_size
            loss = None
            if after == "forward":
                loss = loss_of(model, tokens(SEED))
            elif after == "backward":
                step(model)
            elif after in ("step", "optimizer first"):
                step(model, optimizer)
            elif after == "exception":
                try:
                    model("nonsense")
                except TypeError:
                    pass
            elif after == "generate graph":
                loss = loss_of(model, tokens(SEED))
                step(model, optimizer)
            elif after == "unwrap":
                step(model, optimizer)
                model, optimizer = infinity.unwrap_model(model, optimizer)
            if after == "optimizer first":
                del optimizer
                gc.collect()
                optimizer = None
                with torch.no_grad():
                    model(tokens(1))
            del model, optimizer, loss
            gc.collect()
            assert held(tmp_path) == before
            assert leftovers(tmp_path) == []

    in_child(work)


def test_the_optimizer_alone_keeps_the_engine_alive(tmp_path):
    """Method: drop the model and keep the optimizer, then the other way round; what is left still works."""
    model, optimizer = wrapped("nvme", tmp_path)
    step(model, optimizer)
    del model
    gc.collect()
    state = optimizer.state_dict()
    assert len(state["state"]) > 10 and torch.isfinite(state["state"][0]["exp_avg"]).all()
    del optimizer
    assert leftovers(tmp_path) == []
    model, optimizer = wrapped("nvme", tmp_path)
    step(model, optimizer)
    del optimizer
    gc.collect()
    assert torch.isfinite(step(model))
    assert len(model.state_dict()) > 10


def test_several_wraps_live_side_by_side(tmp_path):
    """Method: three models wrapped on one folder, trained in turns; each has the bits of training alone."""
    alone = []
    for seed in range(3):
        model, optimizer = wrapped("nvme", tmp_path, transformer(seed))
        for at in range(2):
            step(model, optimizer, at)
        alone.append(model.state_dict())
        del model, optimizer
    pairs = [wrapped("nvme", tmp_path, transformer(seed)) for seed in range(3)]
    assert len(swap_files(tmp_path)) == 3 and os.listdir(tmp_path) == []
    for at in range(2):
        for model, optimizer in pairs:
            step(model, optimizer, at)
    for (model, _), state in zip(pairs, alone):
        assert differing(model.state_dict(), state) == []
    del pairs, model, optimizer, _
    assert leftovers(tmp_path) == []


def test_a_forked_child_cannot_use_the_model(tmp_path):
    """Method: run a forward in a forked child of the job; the child gets a typed error or right numbers, and the
    parent, whose I/O engine it is, trains on."""

    def work():
        model, optimizer = wrapped("nvme", tmp_path)
        with torch.no_grad():
            expected = loss_of(model.eval(), tokens(1)).item()

        def child():
            with torch.no_grad():
                return loss_of(model, tokens(1)).item()

        try:
            assert in_child(child, seconds=5) == expected
        except ChildRaised as error:
            assert error.kind in ("UsageError", "StorageError", "InfinityError"), error.kind
        step(model.train(), optimizer)
        with torch.no_grad():
            loss_of(model, tokens(1))

    in_child(work, seconds=15)


def test_a_model_runs_in_another_thread(tmp_path):
    """Method: train one step in a second thread, as a notebook or a streamer does; bits of the first thread's."""
    states = []
    for threaded in (False, True):
        model, optimizer = wrapped("nvme", tmp_path)
        step(model, optimizer, 0)
        if threaded:
            failed: list[BaseException] = []

            def run(model=model, optimizer=optimizer, failed=failed):
                try:
                    torch.set_num_threads(1)
                    step(model, optimizer, 1)
                except BaseException as error:  # noqa: BLE001 - the test raises it
                    failed.append(error)

            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
            assert not failed, failed
        else:
            step(model, optimizer, 1)
        step(model, optimizer, 2)
        states.append(model.state_dict())
        del model, optimizer
    assert differing(*states) == []
