"""Packed weights: the bits of their own library at every home, and bytes that move and are counted.

Twins: a packed byte that is changed shows in the loss; a layer of a known class that a forward
repacks is told.
"""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from models import at_home
from packed_models import (
    BLOCKS,
    FORMATS,
    WIDTH,
    Block,
    Scaled,
    batch,
    gradients,
    losses,
    make,
    state,
    trained,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.core.params.forward_edits import COMPARED_FIRST
from infinity.core.units.inner import has_inner, inner_tensors
from infinity.errors import CapacityError, InfinityError
from infinity.ext.packed.packed import is_code

CODES = 2 * WIDTH * 2 * WIDTH  # weights in the packed layers of one block


def config(home: str, tmp_path, **more) -> infinity.Config:
    return infinity.Config(**at_home(home, home, tmp_path, **more))


def wrap(model: nn.Module, home: str, tmp_path, **more):
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
    return infinity.wrap_model(model, optimizer, config(home, tmp_path, **more))


@pytest.fixture(scope="module")
def at_device(tmp_path_factory):
    """The losses of every format with everything on the device, made once."""
    found = {}

    def of(kind: str) -> list[float]:
        if kind not in found:
            found[kind] = losses(*wrap(make(kind), "device", tmp_path_factory), range(3))
        return found[kind]

    return of


@pytest.mark.parametrize("home", ["device", "hostile"])
@pytest.mark.parametrize("kind", FORMATS)
def test_gradients_are_those_of_the_library_at_every_home(kind, home, tmp_path, caplog):
    """Claim: whatever the format and the home, each gradient has the bits of the model in memory,
    the blocks take their turns on the device, and no view of a weight keeps its memory."""
    expected = gradients(make(kind))
    with caplog.at_level(logging.WARNING, "infinity"):
        model, _ = wrap(make(kind), home, tmp_path)
        found = gradients(model)
    assert expected.keys() == found.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert not [said for said in caplog.messages if "stay in memory" in said]
    device = infinity.stats(model).tiers["device"]
    assert device.peak_nbytes <= device.planned_nbytes


@pytest.mark.parametrize("kind", FORMATS)
def test_training_is_the_same_at_every_home(kind, tmp_path, at_device):
    model, optimizer = wrap(make(kind), "hostile", tmp_path)
    before = state(model)
    assert losses(model, optimizer, range(3)) == at_device(kind)
    assert state(model) == before


def test_a_changed_byte_shows(tmp_path, at_device):
    """The twin of both."""
    model = make("buffers")
    model[0].up.qweight.view(-1)[0] ^= 1
    assert losses(*wrap(model, "host", tmp_path), range(1)) != at_device("buffers")[:1]


def test_a_copy_of_a_packed_weight_is_one_tensor_with_it(tmp_path, at_device):
    """Claim: codes of bitsandbytes that Module.to copied beside the weight move once. Twin: codes
    that differ from the weight's own are moved as they are."""
    kind = "bitsandbytes int8"
    held = {}
    for change in (0, 1):
        model = make(kind)
        model(batch(0))  # gives the codes to the state of each layer
        for layer in [each for each in model.modules() if hasattr(each, "state")]:
            layer.state.CB = layer.state.CB.clone()
            layer.state.CB[0, 0] ^= change
        model, optimizer = wrap(model, "host", tmp_path)
        held[change] = infinity.stats(model).tiers["host"].planned_nbytes
        if not change:
            assert losses(model, optimizer, range(3)) == at_device(kind)
    assert held[1] - held[0] >= BLOCKS * CODES


@pytest.mark.parametrize("kind", FORMATS)
def test_a_model_is_given_back_as_it_was(kind, tmp_path):
    """Claim: unwrapped, the model has its classes and its bytes, and computes."""
    plain, model = make(kind), make(kind)
    model, optimizer = wrap(model, "nvme", tmp_path)
    assert state(model) == state(plain)
    losses(model, optimizer, range(1))
    model, optimizer = infinity.unwrap_model(model, optimizer)
    assert state(model) == state(plain)
    for mine, given in zip(model.modules(), plain.modules()):
        assert type(mine) is type(given)
        for members in ("_parameters", "_buffers"):
            mine_, given_ = getattr(mine, members), getattr(given, members)
            assert {k: type(v) for k, v in mine_.items()} == {k: type(v) for k, v in given_.items()}
    losses(model, optimizer, range(1, 2))


@pytest.mark.parametrize(
    "kind", ["bitsandbytes nf4", "bitsandbytes int8", "torchao nf4", "buffers"]
)
def test_recomputed_blocks_have_the_same_bits(kind, tmp_path):
    class Recomputed(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = make(kind)

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    expected = gradients(Recomputed())
    found = gradients(wrap(Recomputed(), "nvme", tmp_path)[0])
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("kind", ["bitsandbytes nf4", "torchao int8", "buffers"])
def test_packed_bytes_are_charged_where_they_are(kind, tmp_path):
    """Claim: a budget of the device that two blocks fill is kept, and the rest is charged to the
    home; one that none fills is refused, with numbers."""
    whole, _ = wrap(make(kind, 6), "host", tmp_path)
    home = infinity.stats(whole).tiers["host"].planned_nbytes
    assert home > 6 * CODES // 2
    window = infinity.stats(whole).tiers["device"].planned_nbytes
    window += infinity.stats(whole).buffers_nbytes
    assert window < home // 2
    model, optimizer = wrap(make(kind, 6), "host", tmp_path, device_memory=window)
    losses(model, optimizer, range(2))
    assert 0 < infinity.stats(model).tiers["device"].peak_nbytes <= window
    with pytest.raises(CapacityError, match="device_memory"):
        wrap(make(kind), "host", tmp_path, device_memory=window // 8)


@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_below_the_lowest_trained_unit_is_not_brought_again(kind, tmp_path):
    """Claim: a backward brings no block below the first trained one. Method: three frozen blocks
    below one that is trained, at home in memory: bytes of one step against those of a forward."""
    model = make(kind, 4)
    for param in model[:3].parameters():
        param.requires_grad_(False)
    model, optimizer = wrap(model, "host", tmp_path)

    def moved() -> int:
        return infinity.stats(model).edges["host->device"].nbytes

    with torch.no_grad():
        model(batch(0))
        before = moved()
        model(batch(0))
    forward = moved() - before
    before = moved()
    losses(model, optimizer, range(1))
    assert moved() - before <= forward


def test_parts_are_read_outside_of_a_pass(tmp_path):
    """Claim: a part at rest is a tensor whose values a use brings, as of any parameter."""
    functional = pytest.importorskip("bitsandbytes.functional")
    plain = make("bitsandbytes nf4")
    model, _ = wrap(make("bitsandbytes nf4"), "nvme", tmp_path)
    mine, given = model[1].up.weight, plain[1].up.weight
    assert torch.equal(mine.quant_state.absmax.clone(), given.quant_state.absmax)
    assert torch.equal(mine.clone(), given.data)
    values = functional.dequantize_4bit(mine, mine.quant_state)
    assert torch.equal(values, functional.dequantize_4bit(given.data, given.quant_state))


def test_a_wrap_that_fails_leaves_the_packed_tensors(tmp_path):
    model = make("bitsandbytes nf4")
    parts = [block.up.weight.quant_state.absmax for block in model]
    before = [part.clone() for part in parts]
    with pytest.raises(InfinityError):
        wrap(model, "host", tmp_path, host_memory="4KiB")
    for block, part, value in zip(model, parts, before):
        assert block.up.weight.quant_state.absmax is part
        assert torch.equal(part, value)
    assert "_infinity_packed" not in model[0].up.weight.__dict__


@pytest.mark.parametrize("rests", [True, False], ids=["at rest", "after a forward"])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_load_of_other_codes_is_that_of_the_library(kind, rests, tmp_path):
    """Compares outputs and state dicts after a load into a plain and a wrapped model. Twin: they
    are not those from before, unless the library itself loads nothing."""
    models = make(kind, 1), make(kind, 1)
    other = make(kind, 1)
    torch.manual_seed(1)
    other[0].up, other[0].down = Block(FORMATS[kind]()).up, Block(FORMATS[kind]()).down
    given = other.state_dict()
    before = state(models[0])
    wrap(models[1], "hostile", tmp_path)
    found = []
    for model in models:
        if not rests:
            model(batch(0))
        try:
            said = str(model.load_state_dict(given, strict=False))
        except RuntimeError as error:
            said = type(error).__name__
        with torch.no_grad():
            found.append((said, state(model), [bytes(model(batch(0)).numpy()) for _ in "ab"]))
    assert found[0] == found[1]
    assert found[0][1] != before or kind == "hqq"


def _set(weight, given):
    weight.data = given.data


def _set_inner(weight, given):
    for inner, value in zip(inner_tensors(weight), inner_tensors(given), strict=True):
        inner.data.copy_(value)


CHANGES = {
    "copy_": lambda weight, given: weight.copy_(given),
    "detach": lambda weight, given: weight.detach().copy_(given),
    "rows": lambda weight, given: weight[:1].copy_(given[:1]),
    "data": _set,
    "inner": _set_inner,
}


def _changed_output(model: nn.Module, given: nn.Module, how: str, in_forward: bool) -> bytes | str:
    """Changes the weight of a layer that a library packed. Returns the next output, or the name of
    what is raised."""
    name = next(name for name in ("weight", "qweight", "W_q") if hasattr(given, name))

    def change(*_):
        CHANGES[how](getattr(model[0].up, name), getattr(given, name))

    with torch.no_grad():
        try:
            if in_forward:
                for _ in range(COMPARED_FIRST + 1):
                    model(batch(0))
                hook = model[0].up.register_forward_pre_hook(change)
                model(batch(0))
                hook.remove()
            else:
                change()
            return bytes(model(batch(0)).numpy())
        except (RuntimeError, TypeError, AttributeError, AssertionError) as error:
            return type(error).__name__


@pytest.mark.parametrize("in_forward", [False, True], ids=["at rest", "in a forward"])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_change_in_place_is_that_of_the_library(kind, in_forward, tmp_path):
    """Claim: a write to a packed weight, by any way that its library has, counts as in the model in
    memory, or raises a typed error. Twin: writes of the library change the output."""
    torch.manual_seed(1)
    given = Block(FORMATS[kind]()).up
    with torch.no_grad():
        before = bytes(make(kind, 1)(batch(0)).numpy())
    changed = []
    for how in CHANGES:
        plain, model = make(kind, 1), make(kind, 1)
        (tmp_path / how).mkdir()
        wrap(model, "hostile", tmp_path / how)
        expected = _changed_output(plain, given, how, in_forward)
        found = _changed_output(model, given, how, in_forward)
        assert found in (expected, "UsageError"), how
        changed.append(isinstance(found, bytes) and found != before)
    assert sum(changed) > 1


@pytest.mark.parametrize("how", ["keep_vars", "renamed", "small parts"])
def test_a_load_in_other_ways_sets_all_parts(how, tmp_path):
    """Of parameters at rest themselves, under names that a hook of the module changes, and of
    scales that are too small to move. Twin: the outputs before."""
    kind = "a class of one's own"
    model, other = make(kind, 1), make(kind, 1)
    for each in (other[0].up.weight, other[0].down.weight):
        each.codes.neg_()
        each.scales.mul_(2)
    with torch.no_grad():
        before, expected = model(batch(0)), other(batch(0))
    wrap(model, "host", tmp_path)
    given = other.state_dict()
    if how == "keep_vars":
        wrap(other, "host", tmp_path)
        given = other.state_dict(keep_vars=True)
    if how == "renamed":

        def rename(module, state, prefix, *_):
            state[f"{prefix}weight"] = state.pop(f"{prefix}old")

        model[0].up.register_load_state_dict_pre_hook(rename)
        given["0.up.old"] = given.pop("0.up.weight")
    model.load_state_dict(given)
    with torch.no_grad():
        assert torch.equal(model(batch(0)), expected) and not torch.equal(expected, before)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_job_resumes_from_a_checkpoint(kind, tmp_path, at_device):
    """Claim: packed weights are saved and loaded byte for byte, and training goes on with the same
    bits, from another home too."""
    model, optimizer = wrap(make(kind), "host", tmp_path)
    first = losses(model, optimizer, range(2))
    infinity.save_checkpoint(tmp_path / "saved", model, optimizer)
    other = make(kind)
    with torch.no_grad():
        for param in trained(other):
            param.zero_()
    other, optimizer = wrap(other, "nvme", tmp_path)
    infinity.load_checkpoint(tmp_path / "saved", other, optimizer)
    assert state(other) == state(model)
    assert first + losses(other, optimizer, range(2, 3)) == at_device(kind)


def test_scales_keep_their_dtype(tmp_path):
    """Claim: ``param_dtype`` is for what is computed with, not for scales beside codes."""
    model = make("parameters")
    model, _ = infinity.wrap_model(model, None, {"params": "host", "param_dtype": "bfloat16"})
    assert model[0].up.weight_scale_inv.dtype == torch.float32
    assert model[0].norm.weight.dtype == torch.bfloat16


def test_evaluation_does_not_pack_anew(tmp_path):
    """Claim: bitsandbytes packs codes anew for its kernel in evaluations on some processors; what
    is at home keeps its form."""
    model, _ = wrap(make("bitsandbytes nf4"), "host", tmp_path)
    before = state(model)
    with torch.no_grad():
        model.eval()(batch(0))
    assert state(model) == before
    model, _ = infinity.unwrap_model(model)
    assert (
        model[0].up.support_avx512bf16_for_cpu
        == make("bitsandbytes nf4")[0].up.support_avx512bf16_for_cpu
    )


class Counting(nn.Module):
    """Counts the tokens of each code, in a buffer of codes' dtype."""

    def __init__(self):
        super().__init__()
        self.register_buffer("counts", torch.zeros(4096, dtype=torch.int32))
        self.out = nn.Linear(4, 4)

    def forward(self, x):
        self.counts[: len(x)] += 1
        return self.out(x)


def test_a_buffer_that_a_forward_changes_keeps_the_change(tmp_path):
    model = nn.Sequential(Counting(), Counting())
    model, optimizer = wrap(model, "hostile", tmp_path)
    for _ in range(2):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    counts = model.state_dict()["1.counts"]
    assert counts[:3].tolist() == [2, 2, 2] and counts.sum() == 6


def test_updated_buffers_stay_with_their_module(tmp_path):
    """Claim: a buffer that is no code stays where it is, and is counted."""
    model = nn.Sequential(nn.Linear(4, 2048), nn.BatchNorm1d(2048))
    plain = copy.deepcopy(model)
    model, _ = wrap(model, "host", tmp_path)
    for one in (model, plain):
        one(torch.arange(12.0).view(3, 4))
    assert torch.equal(model[1].running_mean, plain[1].running_mean)
    buffers = sum(buffer.nbytes for buffer in plain.buffers())
    assert infinity.stats(model).buffers_nbytes == buffers


def test_two_layers_may_share_a_packed_weight(tmp_path):
    """Claim: parts that two modules use move once."""

    def tie(model):
        model[2].up = model[0].up
        return model

    expected = gradients(tie(make("bitsandbytes nf4")))
    found = gradients(wrap(tie(make("bitsandbytes nf4")), "nvme", tmp_path)[0])
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def test_blocks_outside_of_containers_own_their_parts(tmp_path):
    """Claim: packed layers that are in no repeated block move, too."""

    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Block(Scaled), Block(FORMATS["buffers"]())
            for name, param in self.named_parameters():
                param.requires_grad_("thin" in name)

        def forward(self, x):
            return self.second(self.first(x))

    torch.manual_seed(0)
    model = Bare()
    expected = gradients(copy.deepcopy(model))
    found = gradients(wrap(model, "nvme", tmp_path)[0])
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert BLOCKS > 1


@pytest.mark.parametrize(
    "kind", ["bitsandbytes nf4 in bf16", "bitsandbytes fp4 in fp32", "torchao fp8"]
)
def test_codes_that_look_like_floats_are_no_weights(kind, tmp_path):
    """Claim: a dtype to compute in changes the floats alone; the codes keep their bytes and move
    home, all of them. Twin: as floats in that dtype they would be others."""
    plain = make(kind)
    codes = [each for each in plain.parameters() if is_code(each) or has_inner(each)]
    assert len(codes) == 2 * BLOCKS
    model, _ = wrap(make(kind), "host", tmp_path, param_dtype="bf16")
    assert infinity.stats(model).buffers_nbytes < BLOCKS * 4096
    found = state(model)
    assert {name for name in found if ".up." in name} == {n for n in state(plain) if ".up." in n}
    assert [
        name for name in found if ".up.weight" in name and found[name] != state(plain)[name]
    ] == []
    for each in codes if not has_inner(codes[0]) else ():
        rounded = each.detach().to(torch.float16).to(each.dtype)
        assert not torch.equal(rounded.view(torch.uint8), each.detach().view(torch.uint8))


class HQQLinear(nn.Module):
    """A layer of codes under a dtype of floats, with what HQQ says of them."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        codes = torch.randint(0, 256, (linear.out_features, linear.in_features // 2, 2))
        self.W_q = nn.Parameter(codes.to(torch.uint8).view(torch.float16)[..., 0], False)
        self.meta = {"view_as_float": True, "scale": torch.rand(linear.out_features, 1)}

    def forward(self, x):
        codes = self.W_q.view(torch.uint8).to(x.dtype) / 256 - 0.5
        return x @ (codes * self.meta["scale"].to(x.dtype)).t()


def test_hqqs_codes_viewed_as_floats_keep_their_bytes(monkeypatch, tmp_path):
    """Claim: the bits of the model in memory, with a dtype to compute in. Twin: a class that is
    not HQQ's has floats, which are rounded."""
    made = {}
    for name in ("hqq.core.quantize", "another"):
        monkeypatch.setattr(HQQLinear, "__module__", name)
        torch.manual_seed(0)
        model = nn.Sequential(HQQLinear(nn.Linear(64, 64)), nn.Linear(64, 1))
        before = model[0].W_q.detach().clone().view(torch.uint8)
        model[0].requires_grad_(False)
        model, _ = wrap(model, "host", tmp_path, param_dtype="bf16")
        made[name] = torch.equal(model.state_dict()["0.W_q"].view(torch.uint8), before)
    assert made == {"hqq.core.quantize": True, "another": False}


@pytest.mark.parametrize("kind", ["torchao int8", "a class of one's own", "parameters"])
def test_dequantize_tells_of_weights_that_a_library_packed(kind, caplog):
    """Twin: a dense model."""
    with caplog.at_level(logging.WARNING, "infinity"):
        infinity.dequantize(nn.Linear(4, 4))
        assert not caplog.messages
        infinity.dequantize(make(kind, 1))
    (said,) = (each for each in caplog.messages if each.startswith("dequantize"))
    assert "leaves 2 weights as they are (0.up.weight, ...)" in said
