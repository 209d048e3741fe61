"""Coded weights: functions of torch compute with dense values, copies and moves keep the codes.

Twins: another scale gives another weight; a function of the dense weight is no longer coded.
"""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from infinity.errors import UsageError
from infinity.ext.coded.coded import Coded, noting_unpacked
from infinity.ext.coded.schemes import Gguf, Mxfp4, Scaled

BF16 = torch.bfloat16


def fp8(shape: tuple[int, ...], block: tuple[int, int], dtype: torch.dtype = BF16) -> Coded:
    draws = torch.Generator().manual_seed(0)
    codes = torch.randn(shape, generator=draws).to(torch.float8_e4m3fn)
    counts = [-(-size // each) for size, each in zip(shape[-2:], block)]
    scales = torch.rand((*shape[:-2], *counts), generator=draws) + 0.5
    return Coded(codes, scales, Scaled(block), dtype)


def mxfp4(experts: int = 4) -> Coded:
    draws = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (experts, 6, 2, 16), dtype=torch.uint8, generator=draws)
    powers = torch.randint(120, 130, (experts, 6, 2), dtype=torch.uint8, generator=draws)
    return Coded(codes, powers, Mxfp4(), BF16)


def test_products_and_their_gradients_are_those_of_the_dense_weight():
    weight = nn.Parameter(fp8((64, 128), (32, 32)), requires_grad=False)
    x = torch.randn(2, 3, 128, dtype=BF16, generator=torch.Generator().manual_seed(1))
    found = []
    for each in (weight, weight.dequantize()):
        given = x.clone().requires_grad_()
        out = nn.functional.linear(given, each)
        out.square().sum().backward()
        found.append((out.detach(), given.grad))
    assert all(map(torch.equal, *found))
    assert torch.equal(x @ weight.t(), x @ weight.dequantize().t())
    assert type(weight + 0) is torch.Tensor


@pytest.mark.parametrize("make", [mxfp4, lambda: fp8((4, 32, 64), (16, 32))])
@pytest.mark.parametrize(
    "at", [2, -1, torch.tensor(1), torch.tensor([3, 0, 3]), slice(1, 3), torch.ones(4).bool()]
)
def test_some_experts_are_those_of_the_dense_weight(make, at):
    """Claim: bits, and that an index of experts unpacks these alone."""
    weight = make()
    with noting_unpacked() as made:
        found = weight[at]
    assert torch.equal(found, weight.dequantize()[at])
    alone = isinstance(at, (int, torch.Tensor)) and getattr(at, "dtype", None) != torch.bool
    (unpacked,) = made.values()
    assert unpacked.shape.numel() == (found.numel() if alone else weight.numel())


@pytest.mark.parametrize(
    "copied",
    [
        lambda weight: weight.detach(),
        lambda weight: weight.clone(),
        lambda weight: weight.to("cpu", copy=True),
        copy.deepcopy,
        lambda weight: nn.Parameter(weight, requires_grad=False),
        lambda weight: pickle.loads(pickle.dumps(weight)),
    ],
    ids=["detach", "clone", "to", "deepcopy", "Parameter", "pickle"],
)
def test_copies_keep_the_codes(copied):
    weight = mxfp4()
    other = copied(weight)
    assert isinstance(other, Coded) and other.scheme == weight.scheme and other.dtype == BF16
    assert torch.equal(other.codes, weight.codes) and torch.equal(other.scales, weight.scales)


@pytest.mark.parametrize("convert", [torch.Tensor.float, lambda weight: weight.to(torch.float64)])
def test_another_dtype_has_the_rounding_of_the_first(convert):
    """Twin: codes alone, in fp32, are not rounded to bf16."""
    weight = fp8((48, 64), (16, 32))
    other = convert(weight)
    assert isinstance(other, Coded) and other.dtype != BF16
    assert torch.equal(other.dequantize(), convert(weight.dequantize()))
    plain = Coded(weight.codes, weight.scales, weight.scheme, torch.float32)
    assert not torch.equal(plain.dequantize(), weight.float().dequantize())
    layer = nn.Linear(64, 48, bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    assert torch.equal(layer.float().weight.dequantize(), weight.dequantize().float())


CHANGES = {
    "zero_": lambda weight: weight.zero_(),
    "add_": lambda weight: weight.add_(1),
    "in place": lambda weight: weight.__iadd__(1),
    "item": lambda weight: weight.__setitem__(0, 1.0),
    "data": lambda weight: setattr(weight, "data", weight.dequantize()),
    "data in place": lambda weight: weight.data.mul_(2),
    "copy": lambda weight: weight.copy_(weight.dequantize()),
    "init": nn.init.zeros_,
    "out": lambda weight: torch.add(torch.ones(48, 64), 1, out=weight),
    "foreach": lambda weight: torch._foreach_mul_([weight], 2.0),
    "requires_grad_": lambda weight: weight.requires_grad_(),
    "requires_grad": lambda weight: setattr(weight, "requires_grad", True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_would_change_it_is_refused(change):
    """Claim: nothing is lost without a word. Twin: the dense weight is changed."""
    weight = fp8((48, 64), (16, 32), torch.float32)
    before = weight.dequantize()
    with torch.no_grad():
        with pytest.raises(UsageError, match="infinity.dequantize"):
            CHANGES[change](weight)
        dense = before.clone()
        if "data" not in change and change != "copy":
            CHANGES[change](dense)
            assert dense.requires_grad or not torch.equal(dense, before)
    assert torch.equal(weight.dequantize(), before)


def test_weights_of_one_form_are_copied_and_loaded():
    weight = fp8((48, 64), (16, 32))
    other = Coded(weight.codes.clone(), weight.scales * 2, weight.scheme, BF16)
    layer = nn.Linear(64, 48, bias=False)
    layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
    layer.load_state_dict({"weight": other})
    assert torch.equal(layer.weight.dequantize(), other.dequantize())
    with pytest.raises(RuntimeError, match="is not changed or trained"):
        layer.load_state_dict({"weight": weight.dequantize()})
    file = io.BytesIO()
    torch.save({"weight": other}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["weight"]
    assert torch.equal(loaded.dequantize(), other.dequantize())


def test_rows_of_a_table_are_unpacked_alone():
    """Method: a table in GGUF's Q8_0. Twin: FP8 has scales for several rows."""
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("diffusers.quantizers.gguf.utils")
    values = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)).numpy()
    codes = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    ids = torch.tensor([[3, 1], [49, 3]])
    tables = (
        (Coded(torch.from_numpy(codes), None, Gguf("Q8_0"), torch.float32), ids.numel()),
        (fp8((50, 64), (16, 32)), 50),
    )
    for table, rows in tables:
        with noting_unpacked() as made:
            found = nn.functional.embedding(ids, table)
        assert torch.equal(found, nn.functional.embedding(ids, table.dequantize()))
        assert [len(torch.empty(each.shape)) for each in made.values()] == [rows]


def test_a_module_can_be_moved_and_described():
    layer = nn.Linear(64, 64, bias=False)
    layer.weight = nn.Parameter(fp8((64, 64), (32, 32)), requires_grad=False)
    assert "Coded((64, 64), torch.bfloat16" in repr(layer.weight)
    meta = copy.deepcopy(layer).to("meta")
    assert meta.weight.is_meta and meta.weight.codes.is_meta and not layer.weight.is_meta
    assert layer.weight.numel() == 64 * 64 and layer.weight.is_floating_point()
