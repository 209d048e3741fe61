"""Remedies of a CapacityError: each that is printed is tried here, as its reader would."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from models import seeded
from torch import nn

import infinity
from infinity.core.machine import limits
from infinity.core.wrap import lay_out, remedies
from infinity.errors import CapacityError, ConfigError
from infinity.ext.tiles import layout

SEED = 5
ROWS, WIDTH = 4000, 64  # the largest unit is most of the model
DISK = {"params": "nvme", "optimizer": "nvme", "nvme_paths": ["swap"]}
HOST = {"params": "host", "optimizer": "host"}

# What was given -> what the remedies change, in the order in which they are printed.
CASES: dict[str, tuple[dict[str, Any], list[set[str]]]] = {
    "all on disk already": (DISK | {"host_memory": "200KiB"}, [{"host_memory"}]),
    "tiles would do": (DISK | {"host_memory": "3500KiB"}, [{"host_memory"}, {"device_memory"}]),
    "two budgets": (
        DISK | {"host_memory": "200KiB", "device_memory": "10KiB"},
        [{"host_memory", "device_memory"}],
    ),
    "the disk": (DISK | {"nvme_capacity": "1MiB"}, [{"nvme_capacity"}, {"params", "optimizer"}]),
    "state on the host": (
        DISK | {"optimizer": "host", "host_memory": "5MiB"},
        [{"host_memory"}, {"optimizer"}],
    ),
    "no folder yet": (
        HOST | {"host_memory": "8MiB"},
        [{"host_memory"}, {"optimizer", "nvme_paths"}],
    ),
    "homes left open": ({"host_memory": "7MiB"}, [{"host_memory"}, {"nvme_paths"}]),
    "at home on the device": (
        {"params": "device", "optimizer": "host", "device_memory": "600KiB"},
        [{"device_memory"}, {"params"}],
    ),
    "units that are too large": (
        HOST | {"units": ["Half"], "device_memory": "600KiB"},
        [{"device_memory"}, {"units"}],
    ),
}


class Half(nn.Sequential):
    """Blocks that a class name puts into one unit."""


def build() -> nn.Module:
    def blocks() -> nn.Module:
        two = (nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        return nn.Sequential(
            nn.Embedding(ROWS, WIDTH),
            Half(*(nn.Sequential(*copy.deepcopy(two)) for _ in range(4))),
            nn.Linear(WIDTH, ROWS),
        )

    return seeded(SEED, blocks)


def wrap(config: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build()
    return infinity.wrap_model(model, torch.optim.AdamW(model.parameters()), config)


def printed(error: Exception) -> list[dict[str, Any]]:
    """The changes that a message names, as Config's fields."""
    found = re.findall(r"Config\(((?:\w+=(?:'[^']*'|\[[^\]]*\]|\w+)(?:, )?)+)\)", str(error))
    return [eval(f"dict({fields})") for fields in found]


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INFINITY_SCRATCH", str(tmp_path / "scratch"))
    for name in ("swap", "scratch"):
        Path(name).mkdir()
    return tmp_path


@pytest.mark.parametrize("case", CASES)
def test_what_an_error_names_works(case, place):
    """Applies each remedy to what was given, and takes a step."""
    given, changed = CASES[case]
    with pytest.raises(CapacityError) as refused:
        wrap(given)
    print(refused.value)
    found = printed(refused.value)
    assert [set(each) for each in found] == changed
    for change in found:
        assert all(given.get(name) != value for name, value in change.items())
        model, optimizer = wrap(given | change)
        model(torch.arange(8)).sum().backward()
        optimizer.step()
        for name, tier in infinity.stats(model).tiers.items():
            assert tier.budget_nbytes is None or tier.peak_nbytes <= tier.budget_nbytes, name


def test_a_remedy_that_was_not_tried_need_not_work(place, monkeypatch):
    """The twin: with every plan taken for one that fits, the first change of all is named, and is
    refused again."""
    given, _ = CASES["the disk"]
    monkeypatch.setattr(lay_out.Ways, "refusal", lambda *args, **kwargs: None)
    with pytest.raises(CapacityError) as refused:
        wrap(given)
    monkeypatch.undo()
    monkeypatch.chdir(place)
    with pytest.raises((CapacityError, ConfigError)):
        wrap(given | printed(refused.value)[1])


def test_no_more_is_asked_for_than_the_machine_has(place, monkeypatch):
    """Leaves less memory than the least host budget: it is not named, and what works is."""
    monkeypatch.setattr(limits, "memory_left", lambda: 8_600_000)
    monkeypatch.setattr(limits, "for_the_engine", lambda nbytes: nbytes)
    with pytest.raises(CapacityError) as refused:
        wrap(HOST | {"host_memory": "8MiB"})
    assert "Make so much free" in str(refused.value)
    assert [set(each) for each in printed(refused.value)] == [{"optimizer", "nvme_paths"}]


@pytest.mark.parametrize(
    ("given", "left"),
    [(DISK, 4 << 20), ({"nvme_paths": ["swap"]}, 4 << 20), (None, 4 << 20), (HOST, 11_200_000)],
    ids=str,
)
def test_what_fits_in_tiles_is_tiled_unasked(given, left, place, monkeypatch, caplog):
    """Leaves memory for tiles, and not for the largest unit, without a budget: a line tells of it,
    and a step is torch's. Twins: with memory for all nothing is tiled; with less it is refused."""
    plain = build()
    rate = torch.optim.AdamW(plain.parameters())
    plain(torch.arange(8)).square().sum().backward()
    rate.step()

    def tiled(left: int) -> bool:
        caplog.clear()
        monkeypatch.setattr(limits, "memory_left", lambda: left)
        monkeypatch.setattr(limits, "for_the_engine", lambda nbytes: nbytes)
        model, optimizer = wrap(given)
        model(torch.arange(8)).square().sum().backward()
        optimizer.step()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[name])
        return "run in tiles" in caplog.text

    assert tiled(left) and not tiled(64 << 20)
    with pytest.raises(CapacityError, match="Make so much free"):
        tiled(1 << 20)


def test_changes_are_the_smallest_first():
    """Lists the homes to try beside given ones: one change before two, and none that was given or
    that the engine has tried itself."""
    config = infinity.Config(params="device", optimizer="host")
    assert remedies._homes(config, steps=True)[:3] == [
        {"optimizer": "nvme"},
        {"params": "host"},
        {"params": "nvme"},
    ]
    assert {"optimizer": "host"} not in remedies._homes(config, steps=True)
    assert remedies._homes(infinity.Config(), steps=True) == []
    assert all("optimizer" not in each for each in remedies._homes(config, steps=False))


class ByHand(nn.Module):
    """Uses the weights of its layers as ``use`` says; the code of that is outside of the model."""

    def __init__(self, use: Any):
        super().__init__()
        self.table, self.head = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, ROWS, bias=False)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.use = use

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.use(self, self.body(self.table(ids))).square().mean()


BY_HAND = {
    "a function": lambda m, x: torch.nn.functional.linear(x, m.head.weight),
    "a penalty": lambda m, x: m.head(x).mean() + m.head.weight.pow(2).sum(),
    "weight norm": lambda m, x: x @ (m.head.weight / m.head.weight.norm(dim=1, keepdim=True)).T,
    "a tied head": lambda m, x: x @ m.table.weight.T,
    "two at once": lambda m, x: x @ (m.head.weight * m.table.weight).T,
}


@pytest.mark.parametrize(
    ("use", "home"),
    [(use, HOST | {"device_memory": "400KiB"}) for use in BY_HAND]
    + [
        ("a function", DISK | {"device_memory": "700KiB"}),
        ("a tied head", {"device_memory": "700KiB"}),
        ("two at once", DISK | {"device_memory": "700KiB"}),
    ],
    ids=str,
)
def test_a_forward_that_uses_a_weight_by_hand_names_a_budget_that_works(use, home, place):
    """Applies what the first forward's error names, once: two steps run, with torch's losses."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = seeded(SEED, lambda: ByHand(BY_HAND[use]))
        return model, torch.optim.AdamW(model.parameters())

    def losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        found = []
        for _ in range(2):
            loss = model(torch.arange(8))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    with pytest.raises(CapacityError, match="does not fit the device window") as refused:
        losses(*infinity.wrap_model(*made(), home))
    (change,) = printed(refused.value)
    assert str(refused.value).endswith(f"Config(device_memory={change['device_memory']})")
    wrapped = infinity.wrap_model(*made(), home | change)
    assert losses(*wrapped) == losses(*made())
    device = infinity.stats(wrapped[0]).tiers["device"]
    assert device.peak_nbytes <= device.budget_nbytes


def test_a_budget_that_was_not_planned_with_need_not_work(place, monkeypatch):
    """The twin: with every budget taken for enough, what the window lacks is added, and the layer
    is in tiles again."""
    monkeypatch.setattr(lay_out, "_refuses_window", lambda *given: None)
    home = HOST | {"device_memory": "400KiB"}
    model, _ = infinity.wrap_model(ByHand(BY_HAND["a function"]), None, home)
    with pytest.raises(CapacityError) as refused:
        model(torch.arange(8))
    (change,) = printed(refused.value) or [{"device_memory": "1200KiB"}]
    model, _ = infinity.wrap_model(ByHand(BY_HAND["a function"]), None, home | change)
    with pytest.raises(CapacityError):
        model(torch.arange(8))


class Shown(nn.Module):
    """Uses its head by hand, which its code shows."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(2 * ROWS, WIDTH), nn.Linear(WIDTH, ROWS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(self.table(ids), self.head.weight)


def test_what_code_shows_to_be_used_by_hand_is_not_tiled(place, caplog, monkeypatch):
    """Gives the least that the wrap names: the table runs in tiles, and the head is whole. Twin: if
    the code is not read, the head is in tiles, and the first forward has no room for it."""

    def run(given: Any) -> None:
        model = Shown()
        model, _ = infinity.wrap_model(
            model, torch.optim.SGD(model.parameters(), 0.1), HOST | {"device_memory": given}
        )
        model(torch.arange(8)).sum().backward()

    def least() -> int:
        with pytest.raises(CapacityError) as refused:
            run("16KiB")
        return printed(refused.value)[0]["device_memory"]

    run(least())
    assert "table.weight" in caplog.text and "head.weight" not in caplog.text
    monkeypatch.setattr(layout, "used_by_hand", lambda modules: set())
    with pytest.raises(CapacityError, match=r"head.weight .* does not fit the device window"):
        run(least())
