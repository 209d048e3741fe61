"""A tiled weight's gradient passes between the device and a disk in pieces.

Words used here:

**table**: an embedding and a head that share a weight, or not, in tiles.
**piece**: `PIECE` bytes here, less than a tile, so that tiles begin and end inside of pieces.
"""

from __future__ import annotations

import pytest
import torch
from inside import parts_of
from models import least_host_memory, seeded, with_least
from tiling_cases import DEVICE, KIB, SEED, config, device
from torch import nn

import infinity
from infinity.core.grads import opened, values
from infinity.core.machine.tiers import Tier
from infinity.core.plan import memory_terms
from infinity.errors import CapacityError

WIDTH, ROWS = 60, 8209  # rows of 240 bytes: no tile ends with a block of the disk
PIECE = 128 * KIB
NORMS = (2.0, float("inf"))


class Table(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.mid = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.mid(self.table(ids)))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    for module in (opened, memory_terms):
        monkeypatch.setattr(module, "PIECE_NBYTES", PIECE)
    monkeypatch.setattr(values, "NORM_NUMEL", PIECE // 8)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    ids = torch.randint(ROWS, (2, 9), generator=torch.Generator().manual_seed(step))
    logits = model(ids)
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids.roll(1, 1).flatten())


def trained(home: str, folder, *, tied: bool) -> tuple[list[torch.Tensor], bool]:
    """Trains by all that reads or changes a gradient: sums of two backwards, clipping between them,
    zeros that stay, reads and writes of ``p.grad``. Returns what came out, and whether the table's
    gradient passed in pieces."""
    model = seeded(SEED, lambda: Table(tied=tied))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    asked = config(folder, home)
    if home == "nvme":  # with more, gradients are at home on the host
        asked = with_least(model, optimizer, asked)
    model, optimizer = infinity.wrap_model(model, optimizer, asked)
    seen: list = []
    for step in range(4):
        loss = loss_of(model, step)
        loss.backward()
        if step:
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, NORMS[step % 2]))
            loss_of(model, 10 + step).backward()
        weight = model.table.weight
        if step == 2:
            weight.grad[5].mul_(3.0)
            weight.grad.add_(1e-3)
            seen.append(weight.grad.clone())
        if step == 3:
            weight.grad = weight.grad * 2
        optimizer.step()
        seen.append(loss.detach())
        optimizer.zero_grad(set_to_none=step != 1)
    (unit,) = [unit for unit in parts_of(model).units if unit.name.startswith("table")]
    is_apart = parts_of(model).gradients.homes.are_in_pieces(unit.flat_params[0])
    assert device(model).peak_nbytes <= device(model).planned_nbytes
    model, optimizer = infinity.unwrap_model(model, optimizer)
    states = [each["exp_avg"] for each in optimizer.state.values()]
    return [*seen, *states, *(param.detach() for param in model.parameters())], is_apart


@pytest.mark.parametrize("tied", [False, True])
def test_a_gradient_in_pieces_has_the_bits_of_one_in_memory(swap, monkeypatch, tied):
    """The same training with all state on the host and on disk, whose staging holds a piece. Twin:
    with a staging for the whole gradient nothing is apart, and the bits are the same too."""
    expected, was_apart = trained("host", None, tied=tied)
    found, is_apart = trained("nvme", swap, tied=tied)
    assert (is_apart, was_apart) == (True, False)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    for module in (opened, memory_terms):
        monkeypatch.setattr(module, "PIECE_NBYTES", 8 * ROWS * WIDTH)
    whole, is_apart = trained("nvme", swap, tied=tied)
    assert not is_apart and all(map(torch.equal, whole, expected))


def test_a_piece_that_stays_away_is_found(swap, monkeypatch):
    """The twin of the test above: were one piece of a gradient not written, bits would differ."""
    expected, _ = trained("host", None, tied=True)
    pieces = opened.OpenedGrads.pieces
    lost: list[bool] = []

    def forgets(self, array, begin, end, *, fresh, write):
        keeps = write and not (begin and fresh and not lost)
        lost.extend([True] * (write and not keeps))
        return pieces(self, array, begin, end, fresh=fresh, write=keeps)

    monkeypatch.setattr(opened.OpenedGrads, "pieces", forgets)
    found, _ = trained("nvme", swap, tied=True)
    assert not all(map(torch.equal, found, expected))


def test_the_least_host_memory_has_a_piece_of_the_gradient(swap):
    """The error's number counts a piece, and suffices. Twin: a byte less does not."""
    model = seeded(SEED, lambda: Table(tied=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    asked = config(swap, "nvme", host_memory=1)
    with pytest.raises(CapacityError, match=r"staged gradients 128.0 KiB"):
        infinity.wrap_model(model, optimizer, asked)
    least = least_host_memory(model, optimizer, asked)
    with pytest.raises(CapacityError):
        infinity.wrap_model(model, optimizer, {**asked, "host_memory": least - 1})
    model, optimizer = infinity.wrap_model(model, optimizer, {**asked, "host_memory": least})
    loss_of(model, 0).backward()
    optimizer.step()
    account = parts_of(model).ledger.accounts[Tier.HOST]
    assert account.peak_nbytes <= account.planned_nbytes == least


def test_an_embedding_reads_the_rows_of_its_tokens():
    """Two tokens at the ends of an embedding that runs in tiles: their rows are copied to the
    device, with those between near ones, and no others. Twin: tokens everywhere need all rows."""
    ids = {"two": torch.tensor([[0, ROWS - 1]]), "all": torch.arange(ROWS)[None]}
    found = {}
    for name, each in ids.items():
        table = seeded(SEED, lambda: nn.Sequential(nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, 3)))
        expected = table(each)
        model, _ = infinity.wrap_model(table, torch.optim.SGD(table.parameters()), config())
        model(each)  # the small layer's weights are there afterwards
        before = infinity.stats(model).edges["host->device"].nbytes
        assert torch.equal(model(each), expected)
        found[name] = infinity.stats(model).edges["host->device"].nbytes - before
    small = (WIDTH + 1) * 3 * 4
    assert found["two"] <= 2 * WIDTH * 4 + small + 64 * KIB < ROWS * WIDTH * 4 <= found["all"]
    assert DEVICE < ROWS * WIDTH * 4
