"""Neighborhood attention on a GPU: every backend that is there against the tiles, in values and
gradients."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(path) for path in Path(__file__).parents[1].glob("support/*/")]

from attention_cases import drawn, with_gradients

import infinity
from infinity.ext.attention.neighborhood_backends import BACKENDS, refusal

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA: torch sees none")
CASES = [
    {"shape": (700,), "window": (99,), "stride": (7,), "causal": (True,)},
    {"shape": (20, 40), "window": (8, 16), "stride": (1, 4), "dilation": (2, 1)},
    {"shape": (6, 18, 20), "window": (4, 9, 10), "stride": (2, 8, 1)},
]


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "tiles"])
@pytest.mark.parametrize("windows", CASES)
def test_every_backend_computes_what_the_tiles_do(windows, backend):
    """Method: in bf16, against tiles in fp32. Twin: another window is not equal."""
    exact = [
        each.detach().bfloat16().float().expand(-1, 2, -1, -1).cuda().requires_grad_()
        for each in drawn(windows["shape"], width=32)
    ]
    tensors = [each.detach().bfloat16().requires_grad_() for each in exact]
    if why := refusal(backend, tensors, forced=True):
        pytest.skip(why)
    call = infinity.neighborhood_attention
    right = with_gradients(call, exact, **windows, backend="tiles")
    found = with_gradients(call, tensors, **windows, backend=backend)
    for ours, theirs in zip(found, right):
        torch.testing.assert_close(ours.float(), theirs, atol=0.05, rtol=0.05)
    other = windows | {"window": 2, "stride": 1}
    assert (with_gradients(call, tensors, **other, backend=backend)[0] - found[0]).abs().max() > 0.1
