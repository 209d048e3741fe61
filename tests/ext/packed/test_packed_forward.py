"""Dense copies of packed weights are not kept for the backward: it makes them again.

Twins: the library alone keeps them; what depends on the input is kept, and told.
"""

from __future__ import annotations

import logging

import pytest
import torch
from packed_models import FORMATS, Rounded, batch, gradients, make, trained
from torch import nn

import infinity
from infinity.core.seams import Extension
from infinity.ext.packed import packed_forward
from infinity.ext.packed.packed_forward import PackedForward, PackedForwards


class Unpacking(nn.Module):
    """A layer that unpacks its codes where it computes, as libraries do. ``scaled``: by a scale of
    the input, too."""

    def __init__(self, *, scaled: bool = False):
        super().__init__()
        self.in_features, self.out_features, self.scaled = 64, 128, scaled
        codes = torch.randint(-8, 8, (128, 64), generator=torch.Generator().manual_seed(0))
        self.register_buffer("codes", codes.to(torch.int8))

    def forward(self, x):
        scale = x.detach().abs().amax() + 1 if self.scaled else 1.0
        return nn.functional.linear(x, self.codes.to(x.dtype) * scale)


def kept(call, x: torch.Tensor, numel: int = 64 * 128) -> list[int]:
    """The sizes of the plain tensors that a forward keeps for its backward."""
    found: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor.numel())
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = call(x)
    out.sum().backward()
    return [each for each in found if each >= numel]


def rows(count: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 64, generator=generator).requires_grad_()


def test_a_dense_weight_is_made_again_with_the_same_bits():
    layer, x, y = Unpacking(), rows(), rows()
    assert kept(layer, x) and not kept(PackedForward(layer, 128 * 64), y)
    assert torch.equal(x.grad, y.grad)


class Transposed(nn.Module):
    """A layer whose weight lies as inputs x outputs, and that does not say so."""

    def __init__(self):
        super().__init__()
        scales = torch.ones(64, 1)
        codes = torch.randint(-8, 8, (64, 128), dtype=torch.int8)
        self.weight = nn.Parameter(Rounded(codes, scales), False)

    def forward(self, x):
        return x @ self.weight.dequantize()


def test_the_width_of_a_layer_is_that_of_its_input():
    layer, x, y = Transposed(), rows(), rows()
    assert not kept(PackedForward(layer, layer.weight.numel()), x)
    assert kept(layer, y) and torch.equal(x.grad, y.grad)


def test_what_depends_on_the_input_is_kept_and_told(caplog, monkeypatch):
    monkeypatch.setattr(packed_forward, "_told", set())
    layer, x, y = Unpacking(scaled=True), rows(), rows()
    forward = PackedForward(layer, 128 * 64)
    with caplog.at_level(logging.WARNING, "infinity"):
        assert kept(layer, x) == kept(forward, y)
        kept(forward, rows())
    assert torch.equal(x.grad, y.grad)
    (said,) = caplog.messages
    assert "Unpacking" in said and "32.0 KiB" in said and "checkpoint" in said


def test_nothing_is_done_without_a_backward():
    layer = Unpacking()
    forward = PackedForward(layer, 128 * 64)
    with torch.no_grad():
        assert torch.equal(forward(rows()), layer(rows()))
    assert torch.equal(forward(rows().detach()), layer(rows()))
    assert not forward._known


def test_a_checkpoint_counts_what_is_saved():
    layer, x, y = Unpacking(), rows(), rows()
    forward = PackedForward(layer, 128 * 64)
    for call, each in ((layer, x), (forward, y)):
        torch.utils.checkpoint.checkpoint(call, each, use_reentrant=False).sum().backward()
    assert torch.equal(x.grad, y.grad)


@pytest.mark.parametrize("kind", ["torchao int8", "torchao fp8", "gguf", "a class of one's own"])
def test_wrapped_models_keep_no_dense_weights(kind, tmp_path, monkeypatch):
    """Claim: the gradients have the library's bits. Twin: without it, as many dense weights are
    kept as layers have a gradient of their input."""
    expected = gradients(make(kind))

    def dense(*, again: bool) -> int:
        if not again:
            monkeypatch.setattr(PackedForwards, "replace_forwards", Extension.replace_forwards)
        model = make(kind)
        model, _ = infinity.wrap_model(
            model, torch.optim.AdamW(trained(model)), {"params": "host", "optimizer": "host"}
        )
        model(batch(0)).pow(2).mean().backward()  # learns
        model.zero_grad()
        found = kept(model, batch(0).requires_grad_(), numel=512 * 1024)
        model.zero_grad()
        mine = gradients(model)
        assert all(torch.equal(mine[name], expected[name]) for name in expected)
        return len(found)

    assert FORMATS and dense(again=True) == 0 and dense(again=False) >= 6
