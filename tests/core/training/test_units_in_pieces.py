"""Units that are larger than their staging come from a disk, and their gradients go there, in
pieces: no bit changes, and the host holds none of them whole."""

from __future__ import annotations

import pytest
import torch
from inside import parts_of
from models import at_home, least_host_memory, seeded, with_least
from torch import nn

import infinity
from infinity.core.grads import opened
from infinity.core.machine.tiers import Tier
from infinity.core.plan import memory_terms
from infinity.core.units import arrival
from infinity.errors import CapacityError

SEED, KIB = 3, 1024
PIECE = 192 * KIB
WIDTH, ROWS = 180, 1999  # a table of 1.4 MB, whose gradients land use by use


class Model(nn.Module):
    """A table, tied to a head or not, with a block of several parameters between."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.block = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU())
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.block(self.table(ids))))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    for module in (opened, memory_terms, arrival):
        monkeypatch.setattr(module, "PIECE_NBYTES", PIECE)


def made(*, tied: bool, **config):
    model = seeded(SEED, lambda: Model(tied=tied))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), config


def trained(model, optimizer, config) -> list[torch.Tensor]:
    """Trains by all that reads or changes a gradient. Returns what came out."""
    model, optimizer = infinity.wrap_model(model, optimizer, config)
    seen = []
    for step in range(4):
        for micro in range(2):
            generator = torch.Generator().manual_seed(2 * step + micro)
            ids = torch.randint(ROWS, (2, 9), generator=generator)
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten())
            loss.backward()
            seen.append(loss.detach())
            if step:
                order = (2.0, float("inf"))[step % 2]
                seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1, order))
        weight = model.table.weight
        if step == 2:
            weight.grad.add_(1e-3)
            seen.append(weight.grad.clone())
        if step == 3:
            weight.grad = weight.grad * 2
        optimizer.step()
        optimizer.zero_grad(set_to_none=step != 1)
    job = parts_of(model)
    account = job.ledger.accounts[Tier.HOST]
    assert account.peak_nbytes <= account.planned_nbytes
    apart = {
        passes
        for unit in job.units
        for passes in (unit.in_pieces, job.gradients.homes.are_in_pieces(unit.flat_params[0]))
        if unit.weight_nbytes > PIECE
    }
    assert apart == {"host_memory" in config}
    model, optimizer = infinity.unwrap_model(model, optimizer)
    states = [each["exp_avg"] for each in optimizer.state.values()]
    return [*seen, *states, *(param.detach() for param in model.parameters())]


@pytest.mark.parametrize("tied", [False, True])
def test_units_larger_than_their_staging_have_the_bits_of_memory(tmp_path, tied):
    """The least host memory, whose staging holds pieces, against state on the host. Twin: there
    nothing passes in pieces."""
    model, optimizer, config = made(tied=tied, **at_home("host", "host", None))
    expected = trained(model, optimizer, config)
    model, optimizer, config = made(tied=tied, **at_home("nvme", "nvme", tmp_path))
    found = trained(model, optimizer, with_least(model, optimizer, config))
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_the_least_host_memory_holds_no_unit(tmp_path, monkeypatch):
    """The error's number counts pieces, and suffices for a step. Twin: with pieces as large as the
    largest unit it counts that."""
    model, optimizer, config = made(tied=True, **at_home("nvme", "nvme", tmp_path))
    with pytest.raises(CapacityError, match=r"staged gradients 192.0 KiB"):
        infinity.wrap_model(model, optimizer, {**config, "host_memory": 1})
    least = least_host_memory(model, optimizer, config)
    monkeypatch.setattr(memory_terms, "PIECE_NBYTES", 1 << 30)
    whole = least_host_memory(model, optimizer, config)
    assert whole - least > 2 * (ROWS * WIDTH * 4 - PIECE)
    monkeypatch.setattr(memory_terms, "PIECE_NBYTES", PIECE)
    with pytest.raises(CapacityError):
        infinity.wrap_model(model, optimizer, {**config, "host_memory": least - 1})


def test_a_piece_that_stays_away_is_found(tmp_path, monkeypatch):
    """The twin of all: were one piece of a weight not brought, bits would differ."""
    bring = arrival._bring

    def forgets(store, home, begin, there):
        bring(store, home, begin, there[: -PIECE // 8] if there.nbytes > PIECE else there)

    model, optimizer, config = made(tied=True, **at_home("host", "host", None))
    expected = trained(model, optimizer, config)
    model, optimizer, config = made(tied=True, **at_home("nvme", "nvme", tmp_path))
    config = with_least(model, optimizer, config)
    monkeypatch.setattr(arrival, "_bring", forgets)
    assert not all(map(torch.equal, trained(model, optimizer, config), expected))
