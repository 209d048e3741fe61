"""Models of simulated programs, tiny and drawn from a seed, and what is computed with them.

**family**: a way in which a model uses its parameters: a chain of blocks, a table that is also the
head, lists of layers that nobody calls, experts that some batches leave out, cells that run at each
position, a frozen base with adapters, layers whose weights are codes.
"""

from __future__ import annotations

import torch
from models import LENGTH, VOCABULARY, TinyTransformer, seeded
from packed_models import Buffered
from torch import nn
from torch.nn import functional as F

ROWS = 4


class Block(nn.Module):
    def __init__(self, width: int, odd: int) -> None:
        super().__init__()
        self.norm, inner = nn.LayerNorm(width), 2 * width + odd
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Chain(nn.Module):
    """Blocks that follow each other, over vectors."""

    def __init__(self, blocks: list[nn.Module], width: int, odd: int) -> None:
        super().__init__()
        self.blocks, self.out = nn.ModuleList(blocks), nn.Linear(width, 16 + odd)
        self.width = width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Experts(nn.Module):
    """A router that sends each row to one of three experts: many batches leave one out."""

    def __init__(self, width: int, odd: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 16 + odd)
        self.experts = nn.ModuleList(Block(width, odd) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x)[:, :3].softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return out


class Adapted(nn.Module):
    """A frozen layer beside a narrow pair that trains."""

    def __init__(self, base: nn.Module, width: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.narrow, self.wide = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x)) + self.wide(self.narrow(x))


class Uncalled(Chain):
    """Blocks that are lists of layers, which nobody calls."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, up, down in self.blocks:
            x = x + down(torch.relu(up(norm(x))))
        return self.out(x)


class Recurrent(nn.Module):
    """A cell that runs at each position, and a head tied to the table."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens, self.cell = nn.Embedding(VOCABULARY, width), nn.GRUCell(width, width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.tokens(ids)
        state, out = rows.new_zeros(len(ids), self.cell.hidden_size), []
        for column in rows.unbind(1):
            state = self.cell(column, state)
            out.append(self.head(state))
        return torch.stack(out, 1)


FAMILIES = {
    "chain": lambda width, blocks, odd: Chain(
        [Block(width, odd) for _ in range(blocks)], width, odd
    ),
    "tied": lambda width, blocks, odd: TinyTransformer(width=width, blocks=blocks, dropout=0.1),
    "uncalled": lambda width, blocks, odd: Uncalled(
        [nn.ModuleList(Block(width, odd).children()) for _ in range(blocks)], width, odd
    ),
    "mixture": lambda width, blocks, odd: Chain(
        [Experts(width, odd) for _ in range(blocks)], width, odd
    ),
    "recurrent": lambda width, blocks, odd: Recurrent(width),
    "adapters": lambda width, blocks, odd: Chain(
        [Adapted(nn.Linear(width, width), width) for _ in range(blocks)], width, odd
    ),
    "packed": lambda width, blocks, odd: Chain(
        [Adapted(Buffered(nn.Linear(64, 64)), 64) for _ in range(blocks)], 64, odd
    ),
}


def build(family: str, seed: int, width: int, blocks: int, odd: int) -> nn.Module:
    """Makes a model. ``odd``: 1, so that parameters do not fill vectors; torch's fused optimizers
    round what is left of one in another way, so only the others take it."""
    return seeded(seed, lambda: FAMILIES[family](width, blocks, odd)).train()


def batch_of(model: nn.Module, number: int) -> torch.Tensor:
    """Makes a batch where the model is, in its dtype."""
    draws, like = torch.Generator().manual_seed(number), next(model.parameters())
    if isinstance(model, Chain):
        batch = torch.randn(ROWS, model.width, generator=draws)
        return batch.to(like.device, like.dtype)
    return torch.randint(VOCABULARY, (ROWS, LENGTH), generator=draws).to(like.device)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Computes the loss of a batch: of the next token, or a square."""
    out = model(batch)
    if batch.is_floating_point():
        return out.square().mean()
    return F.cross_entropy(out[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The modules in which the user's own code may fail."""
    if isinstance(model, Uncalled):
        return [block[-1] for block in model.blocks]
    return list(getattr(model, "blocks", [])) or [model.cell]
