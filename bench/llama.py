"""A Llama-style model of torch alone, for machines that have nothing else: what the benchmarks of a
GPU train."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

LOSS_TOKENS = 4096  # whose logits are in memory at once
TABLE_ELEMENTS = 1 << 20  # of the values that weights are filled with
FLOPS = "6 x parameters without the embedding + causal attention"  # of a token, as counted here
PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default} | {
    getattr(torch.ops.aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    )
}  # what costs most to make again: matrix products, and attention by each of its kernels


@dataclass(frozen=True)
class Shape:
    """Widths and counts. ``key_heads`` are shared by groups of query heads."""

    width: int
    layers: int
    heads: int
    key_heads: int
    inner: int
    vocabulary: int

    @property
    def parameters(self) -> int:
        """How many there are."""
        attention = 2 * self.width * self.width * (1 + self.key_heads / self.heads)
        block = attention + 3 * self.width * self.inner + 2 * self.width
        return int(self.layers * block + 2 * self.vocabulary * self.width + self.width)

    def flops(self, length: int) -> int:
        """Counts the operations of a token's forward and backward in a sequence of ``length``: six
        for each parameter but the embedding's, which is a look-up, and attention's, of which half
        of the scores are computed. What is computed again is not counted."""
        computed = self.parameters - self.vocabulary * self.width
        return 6 * computed + 6 * self.layers * length * self.width


SHAPES = {
    "tiny": Shape(64, 2, 4, 2, 128, 256),
    "1.1B": Shape(2048, 22, 32, 4, 5632, 32000),
    "1.3B": Shape(2048, 24, 16, 16, 5632, 32000),
    "8B": Shape(4096, 32, 32, 8, 14336, 128256),
    "13B": Shape(5120, 40, 40, 40, 13824, 32000),
    "20B": Shape(6144, 44, 48, 48, 16384, 32000),
    "27B": Shape(7168, 44, 56, 56, 18944, 32000),
    "34B": Shape(8192, 48, 64, 8, 22016, 32000),
}


class Linear(nn.Linear):
    """A linear layer without bias, filled by :func:`fill`."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Fills the weight."""
        fill(self.weight)


class Embedding(nn.Embedding):
    """An embedding, filled by :func:`fill`."""

    def reset_parameters(self) -> None:
        """Fills the weight."""
        fill(self.weight)


@torch.no_grad()
def fill(weight: torch.Tensor) -> None:
    """Fills ``weight`` with a table of random values, repeated: drawing billions of them would take
    minutes of one processor. Zeros would make a GPU's products faster than they are."""
    if weight.is_meta:
        return
    generator = torch.Generator().manual_seed(weight.numel())
    # In fp32, whatever the default is: the same weights for each system
    table = torch.randn(TABLE_ELEMENTS, generator=generator, device="cpu", dtype=torch.float32)
    table = table.mul_(0.02).to(weight)
    for part in weight.view(-1).split(TABLE_ELEMENTS):
        part.copy_(table[: part.numel()])


class Attention(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.heads, self.key_heads, self.size = (
            shape.heads,
            shape.key_heads,
            shape.width // shape.heads,
        )
        self.query = Linear(shape.width, shape.width)
        self.key = Linear(shape.width, self.key_heads * self.size)
        self.value = Linear(shape.width, self.key_heads * self.size)
        self.out = Linear(shape.width, shape.width)

    def forward(self, x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        def split(values: torch.Tensor, heads: int) -> torch.Tensor:
            return values.unflatten(-1, (heads, self.size)).transpose(1, 2)

        query, key = (
            _turned(split(self.query(x), self.heads), turn),
            _turned(split(self.key(x), self.key_heads), turn),
        )
        value = split(self.value(x), self.key_heads)
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=self.heads != self.key_heads
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


def _turned(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Rotary positions."""
    first, second = x.chunk(2, -1)
    cos, sin = turn.to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Block(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.before, self.attention = nn.RMSNorm(shape.width), Attention(shape)
        self.between = nn.RMSNorm(shape.width)
        self.gate = Linear(shape.width, shape.inner)
        self.up = Linear(shape.width, shape.inner)
        self.down = Linear(shape.inner, shape.width)

    def forward(self, x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x), turn)
        y = self.between(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def _keeps_products(_: Any, operation: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    if operation in PRODUCTS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


class Llama(nn.Module):
    """``model(ids)`` is the loss of predicting each token from those before it. Blocks are computed
    again in the backward, unless ``recomputes`` is cleared. Of the first ``products_kept`` blocks
    the results of matrix products and attention are kept, and only the others are computed
    again."""

    recomputes = True
    products_kept = 0

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.embed = Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = Linear(shape.width, shape.vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        places = torch.arange(ids.size(1), device=ids.device, dtype=torch.float32)
        half = self.shape.width // self.shape.heads // 2
        angles = places[:, None] * 10000.0 ** (-torch.arange(half, device=ids.device) / half)
        turn = torch.stack([angles.cos(), angles.sin()])
        by_operation = partial(create_selective_checkpoint_contexts, _keeps_products)
        for place, block in enumerate(self.blocks):
            if place < self.products_kept:
                x = checkpoint(block, x, turn, use_reentrant=False, context_fn=by_operation)
            elif self.recomputes:
                x = checkpoint(block, x, turn, use_reentrant=False)
            else:
                x = block(x, turn)
        x, wanted = self.norm(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        total = x.new_zeros((), dtype=torch.float32)
        for begin in range(0, len(wanted), LOSS_TOKENS):
            part = slice(begin, begin + LOSS_TOKENS)
            total = total + checkpoint(self._loss, x[part], wanted[part], use_reentrant=False)
        return total / len(wanted)

    def _loss(self, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(x).float(), wanted, reduction="sum")
