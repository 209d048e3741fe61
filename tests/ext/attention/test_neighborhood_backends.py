"""Backends of neighborhood attention: which is chosen, and what is said about it; NATTEN's layout,
and FlexAttention's blocks.

**double**: a module in NATTEN's place, with its functions' names, parameters and layout, that
computes by the oracle (`attention_cases`). **stub**: what the choice reads of a tensor on a GPU.
"""

from __future__ import annotations

import inspect
import logging
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from attention_cases import dense, drawn, windows, with_gradients
from hypothesis import assume, given, settings
from torch.nn.attention.flex_attention import create_block_mask

import infinity
from infinity.errors import ConfigError
from infinity.ext.attention import neighborhood_backends as backends
from infinity.ext.attention.attention_tiles import axes_of
from infinity.ext.attention.neighborhood_flex import block_mask, in_blocks, out_of_blocks


def double(version: str = "0.21.6", kernels: bool = True) -> ModuleType:
    """NATTEN's double."""

    def attend(query, key, value, kernel_size, stride=1, dilation=1, is_causal=False):
        naxes = query.dim() - 3
        flat = [each.flatten(1, naxes).transpose(1, 2) for each in (query, key, value)]
        rule = (query.shape[1:-2], kernel_size, stride, dilation, is_causal)
        names = ("shape", "window", "stride", "dilation", "causal")
        out = dense(*flat, **dict(zip(names, rule)))
        return out.transpose(1, 2).unflatten(1, query.shape[1:-2])

    found = ModuleType("natten")
    found.__version__, found.HAS_LIBNATTEN = version, kernels
    found.na1d = found.na2d = found.na3d = attend
    return found


@pytest.fixture
def natten(monkeypatch):
    """Puts a module, or None for nothing, in NATTEN's place."""

    def put(module: ModuleType | None) -> None:
        monkeypatch.setitem(sys.modules, "natten", module)
        backends.natten_or_why.cache_clear()
        backends.tell.cache_clear()

    put(None)
    yield put
    backends.natten_or_why.cache_clear()


def stub(heads: int = 4, width: int = 64, dtype=torch.bfloat16, device: str = "cuda"):
    return SimpleNamespace(
        device=torch.device(device), dtype=dtype, shape=(2, heads, 64, width), requires_grad=True
    )


CHOICES = [
    (double(), [stub()] * 3, "natten", "its kernels are here"),
    (None, [stub()] * 3, "flex", "no natten: NATTEN is not installed"),
    (double("0.17.5"), [stub()] * 3, "flex", "NATTEN 0.17.5 is older than 0.21"),
    (double(kernels=False), [stub()] * 3, "flex", "NATTEN was built without kernels"),
    (double(), [stub(width=60)] * 3, "flex", "multiples of 8, given 60 and 60"),
    (double(), [stub(8), stub(4), stub(4)], "flex", "8 heads share the keys of 4"),
    (
        double(),
        [stub(dtype=torch.float64)] * 3,
        "tiles",
        "no flex: .* no kernels for torch.float64",
    ),
    (None, [stub(width=8)] * 3, "tiles", "no flex: its least width is 16, given 8 and 8"),
    (double(), [stub(device="cpu")] * 3, "tiles", "no natten: .* on cpu; no flex: .* on cpu"),
]


@pytest.mark.parametrize(("module", "tensors", "name", "why"), CHOICES)
def test_the_first_that_takes_the_tensors_is_chosen_and_said_once(
    module, tensors, name, why, natten, caplog
):
    """Method: two choices and one line. Twin: in most rows the next one takes the tensors."""
    natten(module)
    with caplog.at_level(logging.INFO, "infinity"):
        assert [backends.choose(tensors, None) for _ in range(2)] == [name, name]
    (line,) = caplog.messages
    assert line.startswith(f"neighborhood attention runs by {name} (")
    assert caplog.records[0].name.startswith("infinity") and len(line) < 200
    assert re.search(why, line), line


REFUSED = [
    (None, [stub()] * 3, "natten", "NATTEN is not installed"),
    (double(), [stub(device="cpu")] * 3, "natten", "it needs CUDA, and the tensors are on cpu"),
    (double(), [stub(width=60)] * 3, "natten", "its widths are multiples of 8"),
    (None, [stub(device="cpu")] * 3, "flex", "it has no backward on a processor"),
    (None, [stub(dtype=torch.float64)] * 3, "flex", "no kernels for torch.float64"),
]


@pytest.mark.parametrize(("module", "tensors", "forced", "why"), REFUSED)
def test_a_forced_backend_is_refused_with_the_reason(module, tensors, forced, why, natten):
    """Twin: tiles take them all."""
    natten(module)
    with pytest.raises(ConfigError, match=f'backend="{forced}" cannot be used: .*{why}'):
        backends.choose(tensors, forced)
    assert backends.choose(tensors, "tiles") == "tiles"


@settings(max_examples=25, deadline=None)
@given(windows())
def test_natten_gets_its_layout_and_parameters(given_windows):
    """Method: its double, against the oracle, with gradients. Twin: a grid whose axes are turned
    has another result."""
    tensors = drawn(given_windows["shape"])
    call = lambda *each, **rule: backends.attend_by_natten(*each, axes_of(**rule))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "natten_or_why", double)
        found = with_gradients(call, tensors, **given_windows)
        turned = [
            call(*drawn((24,)), shape=shape, window=window)
            for shape, window in (((4, 6), (2, 5)), ((6, 4), (5, 2)))
        ]
    assert all(map(torch.equal, found, with_gradients(dense, tensors, **given_windows)))
    assert not torch.equal(*turned)


@settings(max_examples=40, deadline=None)
@given(windows())
def test_nattens_own_windows_are_these(given_windows):
    """Method: where NATTEN is installed, its FlexAttention on the processor."""
    module = pytest.importorskip("natten")
    shape, *rule = given_windows.values()
    assume(shape != rule[0])  # it takes these for plain attention, which has no causal form here
    tensors = [each.detach().float() for each in drawn(shape, width=16)]
    with torch.no_grad():
        attend = getattr(module, f"na{len(shape)}d")
        out = attend(
            *(each.transpose(1, 2).unflatten(1, shape) for each in tensors),
            *rule,
            backend="flex-fna",
        )
    found = infinity.neighborhood_attention(*tensors, **given_windows)
    torch.testing.assert_close(out.flatten(1, len(shape)).transpose(1, 2), found)


@settings(max_examples=6, deadline=None)
@given(windows())
def test_flex_attention_under_our_blocks_is_the_oracle(given_windows):
    """Method: its eager form, on the processor, and its blocks against those that torch finds by
    trying every pair of tokens. Twin: blocks may be read in vain with dilation only."""
    tensors = [each.detach().float() for each in drawn(given_windows["shape"], width=16)]
    found = infinity.neighborhood_attention(*tensors, **given_windows, backend="flex")
    torch.testing.assert_close(found, dense(*tensors, **given_windows), atol=1e-5, rtol=1e-5)
    axes = axes_of(**given_windows)
    assert torch.equal(out_of_blocks(in_blocks(tensors[0], axes), axes), tensors[0])
    mask = block_mask(axes, torch.device("cpu"))
    tried = create_block_mask(mask.mask_mod, None, None, *mask.seq_lengths, device="cpu")
    ours, theirs = mask.to_dense(), tried.to_dense()
    assert (ours >= theirs).all() and (max(given_windows["dilation"]) > 1 or ours.equal(theirs))


def test_blocks_that_are_read_whole_need_no_mask():
    """Method: they are listed apart, as torch lists them. Twin: with a shorter stride fewer are,
    and with dilation none is."""
    counts = []
    for stride in (256, 1):
        mask = block_mask(axes_of(1024, 512, stride), torch.device("cpu"))
        tried = create_block_mask(mask.mask_mod, None, None, *mask.seq_lengths, device="cpu")
        assert torch.equal(mask.full_kv_num_blocks, tried.full_kv_num_blocks)
        assert torch.equal(mask.kv_num_blocks, tried.kv_num_blocks)
        counts.append(mask.full_kv_num_blocks.sum().item())
    assert counts[0] == 8 * 4 > counts[1]
    dilated = block_mask(axes_of(1024, 512, 256, 2), torch.device("cpu"))
    assert not dilated.full_kv_num_blocks.any() and dilated.kv_num_blocks.sum() == 8 * 8


def test_the_double_has_nattens_parameters():
    """Method: where NATTEN is installed, its functions take what the double takes, in its order."""
    module = pytest.importorskip("natten")
    ours = list(inspect.signature(double().na1d).parameters)
    for function in (module.na1d, module.na2d, module.na3d):
        assert list(inspect.signature(function).parameters)[: len(ours)] == ours
