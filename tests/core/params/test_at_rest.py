"""Parameters at rest answer what they can, and refuse the rest."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from contract_cases import SEED, both_ends, every_home, save, step, wrapped
from models import (
    at_home,
    differing,
    gradients,
    in_child,
    prescribed,
    survey,
    transformer,
)
from torch import nn

import infinity


@every_home
def test_parameters_at_rest_keep_what_they_are(home, tmp_path):
    """Method: compare identity, shape, strides, dtype, device and the rest of a parameter's
    metadata before the wrap, at rest, and after a step; away from the device there is no storage
    behind it."""
    model = prescribed(SEED)
    before = {
        name: (
            id(p),
            p.shape,
            p.stride(),
            p.dtype,
            p.device,
            p.requires_grad,
            p.is_leaf,
            p.numel(),
            p.dim(),
            p.layout,
        )
        for name, p in model.named_parameters()
    }
    model, optimizer = wrapped(home, tmp_path, model)
    for at in range(2):
        now = {
            name: (
                id(p),
                p.shape,
                p.stride(),
                p.dtype,
                p.device,
                p.requires_grad,
                p.is_leaf,
                p.numel(),
                p.dim(),
                p.layout,
            )
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
    "is_floating_point": lambda p: (
        p.is_floating_point(),
        torch.is_floating_point(p),
        p.is_complex(),
    ),
    "is_contiguous": lambda p: (
        p.is_contiguous(),
        p.is_contiguous(memory_format=torch.channels_last),
    ),
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
    "is_shared": lambda p: (
        p.is_shared(),
        p.detach().is_shared(),
        p.untyped_storage().is_shared(),
        p.is_pinned(),
    ),
    "to itself": lambda p: p.to(p.device) is p and p.to(p.dtype) is p and p.cpu() is p,
}


@pytest.fixture(scope="module")
def seen_at_rest(tmp_path_factory) -> Callable[[str], dict[str, Any]]:
    """What each look at a parameter at rest gives, by home; the model itself is not kept, so that
    nothing is held."""

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
    """Method: ask a parameter at rest what needs none of its bytes; the answer is a plain
    parameter's."""
    assert seen_at_rest(home)[look] == METADATA[look](transformer(SEED).blocks[0].feed[0].weight)


@every_home
def test_printing_a_parameter_at_rest(home, tmp_path):
    """Method: repr of a parameter names it and its home; str and format show its values as torch
    does; printing the model works."""
    model, _ = wrapped(home, tmp_path)
    param = model.blocks[0].feed[0].weight
    for text in (repr(param), repr(param.detach())):
        assert "blocks.0.feed.0.weight" in text and home in text and "256" in text
    plain = nn.Parameter(param.detach().clone())
    assert str(param) == f"{param}" == str(plain) and f"{param.detach()}" == str(plain.detach())
    assert "Linear" in repr(model) and "Parameter" in repr(list(model.parameters())[0])
    assert repr(nn.ParameterList(list(model.parameters())[:2]))


TOUCHES: dict[str, Callable[[Any], Any]] = {
    "vmap": lambda p: torch.func.vmap(lambda row: row.sum())(p),
    "func.grad": lambda p: torch.func.grad(lambda q: q.sin().sum())(p),
    "func.jvp": lambda p: torch.func.jvp(torch.sin, (p,), (torch.ones(p.shape),)),
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
    "init": lambda p: nn.init.normal_(p, generator=torch.Generator().manual_seed(SEED)),
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
    "tensor of it": torch.tensor,
    "Tensor of it": lambda p: torch.Tensor(p) * 2,
    "tensor of a type": torch.FloatTensor,
    "tensor to train": lambda p: torch.tensor(p, requires_grad=True) + 0,
    "tensor of elements": lambda p: torch.tensor([p[0, 0], p[1, 0]]),
    "as_tensor dtype": lambda p: torch.as_tensor(p, dtype=torch.float64),
    "new": lambda p: torch.zeros(1).new(p) + torch.zeros(1).new_tensor(p),
    "sparse": lambda p: torch.sparse_coo_tensor(torch.tensor([[0, 1]]), p[:2]).to_dense(),
    "sparse of it": lambda p: torch.sparse_coo_tensor(torch.arange(len(p))[None], p).to_dense(),
    "as_subclass": lambda p: p.as_subclass(torch.Tensor) * 2,
    "scripted": lambda p: SCRIPTED(p),
    "scripted, grad": lambda p: torch.autograd.grad(SCRIPTED(p).square().sum(), p),
    "scripted over a list": lambda p: OVER_A_LIST([p, p.detach()]),
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
    "autograd grad": lambda p: torch.autograd.grad(
        torch.ones((), requires_grad=True) * 2, [p], allow_unused=True
    ),
    "backward": lambda p: p.sum().backward(),
    "histc": lambda p: torch.histc(p),
    "svd": lambda p: torch.linalg.svd(p),
}


@torch.jit.script
def SCRIPTED(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + x.norm()


@torch.jit.script
def OVER_A_LIST(each: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([x.view(-1)[1:] for x in each])


def plainly(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return [plainly(item) for item in value] if isinstance(value, (list, tuple)) else value


@pytest.fixture(scope="module")
def touched(tmp_path_factory, chosen) -> Callable[[str], dict[str, str]]:
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
                touched = touch_once(model, TOUCHES[name])
                expected = kept["state"] | {f"{PLACE}.weight": touched}
                assert differing(model.state_dict(), expected) == [], "the model was changed"
                kept["state"] = model.state_dict()
                assert torch.isfinite(step(model))
                model.zero_grad()
            except BaseException:
                kept.clear()  # whatever it left is not the next one's
                raise

        return survey(
            [name for name, where in sorted(chosen("touch", "home")) if where == home], check
        )

    return tried


PLACE = "blocks.0.feed.0"


def touch_once(model: nn.Module, touch: Callable[[Any], Any]) -> torch.Tensor:
    """Touches the weight of a wrapped model. Returns the value that it then has to have: that of a
    plain parameter, or its own of before if the touch was refused."""
    before = model.state_dict()[f"{PLACE}.weight"].clone()
    plain = nn.Parameter(before.clone())
    try:
        found = plainly(touch(model.get_submodule(PLACE).weight))
    except infinity.UsageError as error:
        assert any(way in str(error) for way in ("full_params", "state_dict", "unwrap_model")), str(
            error
        )
        return before
    except infinity.InfinityError:
        raise
    except (
        RuntimeError,
        TypeError,
        BufferError,
        IndexError,
        ValueError,
        NotImplementedError,
    ) as error:
        # torch's own refusal would be as good, if it said what to do.
        raise AssertionError(f"{type(error).__name__} instead of UsageError: {error}") from error
    expected = plainly(touch(plain))
    if isinstance(expected, (torch.Tensor, np.ndarray, list)):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    else:
        assert type(found) is type(expected) and found == expected, (
            f"{found!r} instead of {expected!r}"
        )
    return plain.detach()


@pytest.mark.parametrize("touch", TOUCHES)
@every_home
def test_touching_a_parameter_at_rest_does_what_torch_does_or_names_the_way(touch, home, touched):
    """Method: some ninety ways to reach a parameter's bytes at rest; each raises UsageError naming
    what to use instead (or gives the very result of a plain parameter), and none gives garbage,
    crashes or changes the model.
    """
    complaint = touched(home).get(touch)
    assert complaint is None, complaint


# Ways to a storage, which torch gives without asking a class: nobody can name the parameter there,
# and torch's own refusal is the answer.
AROUND: dict[str, Callable[[Any], Any]] = {
    "to_dlpack": lambda p: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(p.detach())),
    "data_ptr": lambda p: p.data_ptr() and p.untyped_storage().data_ptr() and None,
    "storage clone": lambda p: p.untyped_storage().clone().nbytes(),
    "over storage": lambda p: (
        torch.empty(0).set_(p.untyped_storage(), 0, p.shape, p.stride()).sum()
    ),
    "write over storage": lambda p: (
        torch.empty(0).set_(p.untyped_storage(), 0, p.shape, p.stride()).zero_().sum()
    ),
    "trace": lambda p: torch.jit.trace(lambda x: x + 1, p)(torch.ones(p.shape)),
}


@pytest.mark.parametrize("way", AROUND)
def test_ways_around_torch_function_work_on_a_plain_parameter(way):
    """Method: the twin of the next: what is refused there is no error of its own."""
    AROUND[way](transformer(SEED).blocks[0].feed[0].weight)


@pytest.mark.parametrize("home", ["host", "nvme"])
def test_ways_around_torch_function_never_crash(home, tmp_path):
    """Method: reach the bytes at rest from where torch asks no subclass; an error, and the model is
    as it was."""

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
    """Method: a module keeps views of its weight and hands them to nobody; used after the forward
    they raise, or (at home on the device) are the weight's values."""

    class Keeper(nn.Linear):
        def forward(self, x):
            self.kept = [
                self.weight.detach(),
                self.weight.t(),
                self.weight.view(-1)[3:],
                self.weight.data[1],
            ]
            return super().forward(x)

    def work():
        model = nn.Sequential(Keeper(8, 8), nn.Linear(8, 8))
        values = [kept.clone() for kept in (model(torch.ones(1, 8)), model[0].kept)[1]]
        model, _ = infinity.wrap_model(model, config=at_home(home, home, tmp_path))
        model(torch.ones(1, 8)).sum().backward()
        for kept, value in zip(model[0].kept, values):
            assert not kept.is_shared()  # of which torch's own function would end the process
            try:
                assert torch.equal(kept, value)
            except RuntimeError:
                assert home != "device"

    in_child(work)


@every_home
def test_copy_into_a_parameter_at_rest_reaches_its_home(home, tmp_path):
    """Method: p.data.copy_(value) and p.copy_(value) under no_grad, as loaders and initialisers do;
    the home has the value, and a value of another shape is refused as torch refuses it."""
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
    """Method: what frameworks call on every model (to(device), float(), ...), when it asks for what
    is so already."""
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
