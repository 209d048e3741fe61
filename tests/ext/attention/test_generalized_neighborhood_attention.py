"""Generalized neighborhood attention (Hassani et al. 2025): values and gradients of the tiles equal
dense attention under the mask of the definition, in the memory of a tile.

Words used here: **oracle**, **windows**: see `attention_cases`.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from activations_cases import both_homes, moved, stepped
from attention_cases import dense, drawn, visible, windows, with_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from live import Live
from models import seeded
from runs import adamw
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.errors import ConfigError
from infinity.ext.attention import neighborhood
from infinity.ext.attention.attention_tiles import axes_of, read_tiles

CASES = {
    "1-D over two tiles": ((600,), (99,), (7,), (1,), (False,)),
    "1-D causal and dilated": ((555,), (60,), (1,), (3,), (True,)),
    "blocks": ((64, 32), (8, 8), (8, 8), (1, 1), (False, False)),
    "2-D mixed": ((37, 20), (11, 4), (3, 1), (2, 3), (False, True)),
    "3-D as video": ((6, 18, 20), (4, 9, 10), (2, 8, 1), (1, 1, 1), (True, False, False)),
    "3-D dilated": ((9, 10, 21), (4, 5, 7), (1, 2, 7), (2, 2, 3), (False, False, False)),
    "everything": ((16, 16), (16, 16), (1, 1), (1, 1), (False, False)),
}
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def named(case: tuple) -> dict[str, tuple]:
    return dict(zip(("shape", "window", "stride", "dilation", "causal"), case))


def worst(found, right) -> float:
    """The largest difference, as a share of the largest value."""
    return max(
        ((a.double() - b.double()).abs().max() / b.double().abs().max()).item()
        for a, b in zip(found, right)
    )


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gna_values_and_gradients_are_those_of_dense_attention(case, dtype):
    """Method: against the oracle in fp64, grouped heads. Twin: another window is not equal."""
    given_windows = named(case)
    tensors = drawn(given_windows["shape"], dtype)
    exact = [each.detach().double().requires_grad_() for each in tensors]
    right = with_gradients(dense, exact, **given_windows)
    found = with_gradients(infinity.neighborhood_attention, tensors, **given_windows)
    assert worst(found, right) < 4 * BOUNDS[dtype]
    other = given_windows | {"window": tuple(2 for _ in given_windows["shape"]), "stride": 1}
    assert worst(with_gradients(infinity.neighborhood_attention, tensors, **other), right) > 0.1


def test_gradients_in_16_bits_do_not_lose_what_many_tiles_add(monkeypatch):
    """Method: a value is in 17 tiles, and its gradient the sum of its weights; bf16 against fp32 of
    the same values. Twin: sums in bf16 lose more."""

    def loss() -> float:
        tensors = [each.detach() for each in drawn((8192,), torch.bfloat16, heads=1)]
        grads = []
        for dtype in (torch.bfloat16, torch.float32):
            q, k, v = (each.to(dtype).requires_grad_() for each in tensors)
            out = infinity.neighborhood_attention(q, k, v, shape=8192, window=4096)
            grads += torch.autograd.grad(out.sum(), v)
        return worst(grads[:1], grads[1:])

    assert loss() < 2**-8
    monkeypatch.setattr(torch, "promote_types", lambda ours, theirs: ours)
    assert loss() > 2**-8


@settings(max_examples=60, deadline=None)
@given(windows(), st.sampled_from(list(BOUNDS)))
def test_any_windows_give_the_oracle(given_windows, dtype):
    """Method: the same, with tiles so small that each grid has several."""
    tensors = drawn(given_windows["shape"], dtype)
    exact = [each.detach().double().requires_grad_() for each in tensors]
    right = with_gradients(dense, exact, **given_windows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighborhood, "QUERY_TILE", {1: (5,), 2: (4, 3), 3: (2, 3, 4)})
        found = with_gradients(infinity.neighborhood_attention, tensors, **given_windows)
    assert worst(found, right) < 4 * BOUNDS[dtype]


@pytest.mark.parametrize("what", ["key", "value"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_key_reaches_only_the_queries_that_read_it(bad, what):
    """Method: one key of 600, nan or infinite; queries and gradients without it keep the oracle's
    values. Twin: those that read it do not, and torch under a mask loses them all."""
    given_windows = named(CASES["1-D over two tiles"])
    tensors = drawn((600,))
    right = with_gradients(dense, tensors, **given_windows)
    with torch.no_grad():
        tensors[1 if what == "key" else 2][:, :, 300] = bad
    reads = visible(**given_windows)[:, 300]
    out, dq, *_ = with_gradients(infinity.neighborhood_attention, tensors, **given_windows)
    assert (
        worst([out[:, :, ~reads], dq[:, :, ~reads]], [each[:, :, ~reads] for each in right]) < 1e-12
    )
    assert not out[:, :, reads].isfinite().all()
    assert not dense(*tensors, **given_windows)[:, :, ~reads].isfinite().all()


def test_forward_and_backward_take_the_memory_of_a_few_tiles():
    """Method: 16 K tokens, all results of all operations, output and gradients among them. Twin:
    the oracle takes more for an eighth of the tokens."""
    n, window = 16384, 1024
    nbytes = 4 * 256 * (window + 255)  # of a tile's scores
    with Live() as live:
        with_gradients(
            infinity.neighborhood_attention, drawn((n,), torch.float32), shape=n, window=window
        )
    assert live.peak_nbytes < 8 * nbytes
    given_windows = named(((n // 8,), (window,), (1,), (1,), (False,)))
    with Live() as live:
        with_gradients(dense, drawn((n // 8,), torch.float32), **given_windows)
    assert live.peak_nbytes > 8 * nbytes


def test_keys_read_are_those_that_the_simulator_counts(monkeypatch):
    """Method: what torch's attention is called with, in forward and backward, against the hulls of
    the simulator; the keys of a tile are its largest. Twin: a longer window reads more."""
    calls = []
    attend = F.scaled_dot_product_attention

    def spy(q, k, v, attn_mask=None, **more):
        calls.append((q.shape[2], k.shape[2], attn_mask is not None))
        return attend(q, k, v, attn_mask, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)

    def largest(**given_windows) -> int:
        calls.clear()
        with_gradients(infinity.neighborhood_attention, drawn((32, 48), width=2), **given_windows)
        reading = read_tiles(axes_of(**given_windows), (16, 16), (1, 1))
        assert len(calls) == 2 * 2 * 3 and {queries for queries, _, _ in calls} == {256}
        assert {masked for *_, masked in calls} == {not reading.block_sparse}
        assert max(keys for _, keys, _ in calls) == reading.tiles
        return reading.tiles

    given_windows = {"shape": (32, 48), "window": (8, 16)}
    assert largest(**given_windows, stride=(4, 4)) < largest(shape=(32, 48), window=(16, 32))
    assert largest(**given_windows | {"window": 16}, stride=16) == 256


class Windowed(nn.Module):
    """Tokens x 32 through an attention of four heads over windows."""

    def __init__(self, recompute: bool = False):
        super().__init__()
        self.inner, self.outer, self.recompute = nn.Linear(32, 96), nn.Linear(32, 32), recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False) if self.recompute else self.block(x)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.inner(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        out = infinity.neighborhood_attention(*heads, shape=(24, 32), window=(9, 12), stride=(1, 4))
        return self.outer(out.transpose(1, 2).flatten(2))


def trained(config: dict | None, recompute: bool = False) -> tuple[list[torch.Tensor], int]:
    model = seeded(3, lambda: Windowed(recompute))
    optimizer = adamw(model, 1e-2)
    if config is not None:
        model, optimizer = infinity.wrap_model(model, optimizer, config)
    x = torch.randn(2, 24 * 32, 32, generator=torch.Generator().manual_seed(4))
    losses = [stepped(optimizer, model(x).square().mean()).detach() for _ in range(3)]
    state = [value.clone() for value in model.state_dict().values()]
    return losses + state, moved(model) if config is not None else 0


@both_homes
def test_the_home_of_saved_tensors_changes_no_bit(home, swap):
    """Method: three steps, with activations at home and on the device. Twin: with a home
    all queries, keys and values move."""
    config = {"params": "host", "optimizer": "host", "nvme_paths": [str(swap)]}
    right, least = trained(config | {"activations": "device"})
    found, has_moved = trained(config | {"activations": home})
    assert all(map(torch.equal, found, right))
    saved = 3 * 2 * 24 * 32 * 96 * 4  # bytes
    assert has_moved - least >= saved


def test_recomputed_compiled_and_in_autocast():
    """Method: the bits of the plain call, under checkpoint and under torch.compile; in autocast, of
    tensors that were cast before. Twin: without autocast others."""
    assert all(map(torch.equal, trained(None, recompute=True)[0], trained(None)[0]))
    tensors = drawn((20, 30), torch.float32)

    def attend(q, k, v):
        return infinity.neighborhood_attention(q + 0, k, v, shape=(20, 30), window=5) + 0

    plain = with_gradients(attend, tensors)
    compiled = with_gradients(torch.compile(attend, backend="eager"), tensors)
    assert all(map(torch.equal, compiled, plain))
    with torch.autocast("cpu", torch.bfloat16):
        casts = with_gradients(attend, tensors)
    by_hand = with_gradients(lambda *each: attend(*(t.bfloat16() for t in each)), tensors)
    assert casts[0].dtype is torch.bfloat16 and all(map(torch.equal, casts, by_hand))
    assert not torch.equal(casts[0].float(), plain[0])


def test_only_what_is_asked_for_gets_a_gradient():
    """Method: keys alone need one; the others have none, and a second derivative is refused."""
    q, k, v = drawn((40,))
    out = infinity.neighborhood_attention(q.detach(), k, v.detach(), shape=40, window=7)
    (grad,) = torch.autograd.grad(out.square().sum(), k, create_graph=True)
    right = dense(q.detach(), k, v.detach(), **named(((40,), (7,), (1,), (1,), (False,))))
    assert worst([grad], torch.autograd.grad(right.square().sum(), k)) < 1e-12
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def tensors_of(**sizes: tuple) -> list:
    return [torch.zeros(sizes.get(name, (2, 4, 64, 8))) for name in "qkv"]


WRONG = [
    ({"q": (2, 4, 63, 8)}, {}, r"q \(2, 4, 63, 8\) float32 cpu, .* has 64 tokens"),
    ({"k": (2, 4, 64)}, {}, r"k \(2, 4, 64\) .* batch x heads x tokens x width"),
    ({"k": (1, 4, 64, 8)}, {}, "one batch size"),
    ({"k": (2, 4, 64, 4)}, {}, "q and k one width"),
    ({"k": (2, 3, 64, 8), "v": (2, 3, 64, 8)}, {}, "q a multiple of them"),
    ({"v": (2, 2, 64, 8)}, {}, "k and v have the same heads"),
    ({}, {"shape": (8, 9)}, r"shape=\(8, 9\) has 72 tokens"),
    ({}, {"window": 1}, "tokens 64, window 1"),
    ({}, {"stride": -1}, "stride -1"),
    ({}, {"backend": "cudnn"}, "backend='cudnn' is not one of natten, flex, tiles"),
]


@pytest.mark.parametrize(("sizes", "wrong", "said"), WRONG)
def test_what_does_not_fit_is_refused_with_its_numbers(sizes, wrong, said):
    """Twin: the same call without what is wrong."""
    right = {"shape": 64, "window": 8}
    assert infinity.neighborhood_attention(*tensors_of(), **right).shape == (2, 4, 64, 8)
    with pytest.raises(ConfigError, match=said):
        infinity.neighborhood_attention(*tensors_of(**sizes), **right | wrong)
    with pytest.raises(ConfigError, match="one dtype of fp16"):
        infinity.neighborhood_attention(*(each.int() for each in tensors_of()), **right)
