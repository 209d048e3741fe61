"""What the tests of neighborhood attention share.

Words used here: **oracle**: dense attention under a mask that is written from the definition, one
query at a time. **windows**: shape, window, stride, dilation and causality, as the call takes them.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

Windows = dict[str, tuple]


def row_of(query: int, n: int, window: int, stride: int, dilation: int, causal: bool) -> list[int]:
    """The keys of one query of an axis of ``n`` tokens."""
    group = list(range(query % dilation, n, dilation))
    at, last = group.index(query), len(group) - 1
    begin = at - at % stride
    if causal:
        leader = min(begin + stride - 1, last)
        return [group[j] for j in range(at + 1) if leader - j < window]
    left = window // 2
    right = left + window % 2 - 1
    centre = min(begin + stride // 2, last)
    centre = max(left, min(centre, last - right))
    return [group[j] for j in range(centre - left, centre + right + 1)]


def visible(shape, window, stride, dilation, causal) -> torch.Tensor:
    """Which key each query reads: bools of tokens x tokens."""
    of_axes = []
    for n, *rule in zip(shape, window, stride, dilation, causal):
        of_axis = np.zeros((n, n), dtype=bool)
        for query in range(n):
            of_axis[query, row_of(query, n, *rule)] = True
        of_axes.append(of_axis)
    return torch.from_numpy(functools.reduce(np.kron, of_axes))


def dense(q, k, v, **windows) -> torch.Tensor:
    """The oracle."""
    mask = visible(**windows).to(q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


@st.composite
def windows(draw: Any) -> Windows:
    """Grids of 1 to 3 axes of up to 24 tokens."""
    naxes = draw(st.integers(1, 3))
    rows = []
    for _ in range(naxes):
        n = draw(st.integers(2, 24 if naxes < 3 else 9))
        dilation = draw(st.integers(1, min(3, n // 2)))
        window = draw(st.integers(2, n // dilation))
        rows.append((n, window, draw(st.integers(1, window)), dilation, draw(st.booleans())))
    return dict(zip(("shape", "window", "stride", "dilation", "causal"), zip(*rows)))


def drawn(shape, dtype=torch.float64, *, heads: int = 2, width: int = 4) -> list[torch.Tensor]:
    """Queries, keys and values that require gradients; the keys have one head."""
    generator = torch.Generator().manual_seed(math.prod(shape))
    return [
        torch.randn(2, each, math.prod(shape), width, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
        for each in (heads, 1, 1)
    ]


def with_gradients(attend, tensors, **windows) -> list[torch.Tensor]:
    """The output, and the gradients of queries, keys and values."""
    out = attend(*tensors, **windows)
    generator = torch.Generator().manual_seed(1)
    dy = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out)
    return [out.detach(), *torch.autograd.grad(out, tensors, dy)]
