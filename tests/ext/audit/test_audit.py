"""Config(audit=share): planted flips are found and named, nothing is trained on or saved after
that, and without them the bits are those of a run without audits.

Words used here: **planted flip**: one bit that a test changes where a broken machine would.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from inside import parts_of
from models import at_home, differing
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.core.units.arrival import Arrival
from infinity.ext.audit import meetings, rotation
from infinity.ext.audit.told import line_of

SEED, WIDTH, STEPS = 640, 64, 5
HOMES = ["device", "host", "nvme"]


class Block(nn.Module):
    """A unit."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.change: Callable[[torch.Tensor], torch.Tensor] = lambda hidden: hidden

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.change(self.up(x))).square())


class Blocks(nn.Sequential):
    """A few of them. ``again``: by torch's checkpoint, as transformers has it."""

    again = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return x


def build(
    home: str, folder: Path, *, audit: float = 1.0, again: bool = False, **more: Any
) -> tuple[Any, Any]:
    torch.manual_seed(SEED)
    model = Blocks(*(Block() for _ in range(3))).to(torch.bfloat16)
    model.again = again
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = at_home(home, home, folder, units=["Block"], audit=audit, **more)
    return infinity.wrap_model(model, optimizer, config)


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number)).bfloat16()
    model(x).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def ends(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    found = dict(model.state_dict())
    for index, state in optimizer.state_dict()["state"].items():
        found |= {f"{index}.{name}": value for name, value in state.items() if name != "step"}
    return {name: value.clone() for name, value in found.items()}


def train(model: nn.Module, optimizer: Any, steps: int = STEPS) -> dict[str, torch.Tensor]:
    for number in range(steps):
        step(model, optimizer, number)
    return ends(model, optimizer)


def flip(values: torch.Tensor, seed: int) -> None:
    """Flips one bit of flat ``values``."""
    draw, raw = random.Random(seed), values.view(torch.uint8)
    raw[draw.randrange(raw.numel())] ^= 1 << draw.randrange(8)


def flats(model: nn.Module) -> list[Any]:
    return [flat for unit in parts_of(model).units for flat in unit.flat_params]


def part_of(flat: Any, name: str, index: int = 0) -> torch.Tensor:
    """The elements of array ``name`` of a flat param's parameter."""
    begin, end = flat.layout.part_at_home(name, index)
    return flat.arrays[name].flat[begin:end]


def flip_update(model: nn.Module, at: int, name: str, seed: int) -> None:
    """Plants a flip in what the update of step ``at`` wrote, before it is looked at."""
    planted: list[int] = []

    def plant(planned: Any, ticket: Any) -> Any:
        if planned.version == at and not planted:
            ticket.wait()
            planted.append(1)
            flip(part_of(planned.flat_param, name), seed)
        return ticket

    parts_of(model).events.update_submitted.insert(0, plant)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(rotation, "PIECE_NUMEL", 4096)


# --- nothing is wrong ---


@pytest.mark.parametrize("more", [{}, {"moments": "int8"}, {"master": "fp32"}], ids=str)
@pytest.mark.parametrize("home", HOMES)
def test_audits_change_no_bit(home, more, tmp_path):
    """Twin: something was audited, and with another learning rate the weights differ."""
    without = train(*build(home, tmp_path, audit=0.0, **more))
    model, optimizer = build(home, tmp_path, **more)
    assert not differing(without, train(model, optimizer))
    audited = infinity.stats(model).audited
    assert audited["found"] == [] and audited["pieces"]["updates"] == STEPS * 3 * 5
    assert bool(audited["pieces"]["homes in memory"]) == (
        home == "host" or (home == "nvme" and "moments" in more)  # scales are in memory always
    )
    assert (audited["pieces"]["gathered weights"] > 0) == (home != "device")
    optimizer.param_groups[0]["lr"] = 0.5
    assert differing(without, train(model, optimizer))


def test_a_job_without_audits_has_no_listener(tmp_path):
    """Twin: with them it has."""
    without, found = (build("host", tmp_path, audit=share)[0] for share in (0.0, 0.01))
    assert infinity.stats(without).audited == {}
    for name in ("update_planned", "update_submitted", "packing", "step_begun", "averaged"):
        assert not getattr(parts_of(without).events, name)
        assert getattr(parts_of(found).events, name)


def test_a_new_optimizer_is_no_finding(tmp_path):
    """Method: it begins with moments of zeros, which the engine writes behind what is audited and
    saved meanwhile. The save has the moments of before. Twin: a flip in one is found."""
    model, optimizer = build("host", tmp_path)
    step(model, optimizer, 0)
    before = [value.clone() for value in moments_of(optimizer)]
    saving = infinity.save_checkpoint(tmp_path / "saved", model, optimizer, wait=False)
    later = infinity.wrap_model(model, torch.optim.AdamW(model.parameters(), lr=1e-3))[1]
    assert not any(bool(value.any()) for value in moments_of(later))
    step(model, later, 1)
    saving.wait()
    again, its = build("host", tmp_path)
    infinity.load_checkpoint(tmp_path / "saved", again, its)
    assert all(torch.equal(*each) for each in zip(before, moments_of(its), strict=True))
    flat_param = parts_of(model).job.units[0].flat_params[0]
    flat_param.homes.wait()
    flat_param.arrays["exp_avg"].flat.view(torch.uint8)[7] ^= 1
    with pytest.raises(infinity.CorruptionError, match="exp_avg"):
        step(model, later, 2)


def moments_of(optimizer: Any) -> list[torch.Tensor]:
    """What is kept beside the weights, in order."""
    state = optimizer.state_dict()["state"]
    return [entry["exp_avg"] for _, entry in sorted(state.items())]


def test_what_users_change_is_no_finding(tmp_path):
    """Method: weights, moments and whole state change between audited steps, in each way that the
    engine has; the bits are those of a run without audits."""

    def run(share: float) -> dict[str, torch.Tensor]:
        model, optimizer = build("host", tmp_path, audit=share)
        average = infinity.ema(model, 0.5)
        first = next(iter(model.parameters()))
        train(model, optimizer, 2)
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        for change in (
            lambda: first.data.mul_(1.5),
            lambda: optimizer.state[first]["exp_avg"].zero_(),
            lambda: model.state_dict()["0.up.weight"][0].fill_(0.5),
            lambda: model.load_state_dict(saved),
            lambda: optimizer.load_state_dict(optimizer.state_dict()),
            lambda: (infinity.park(model), infinity.resume(model)),
            lambda: infinity.save_checkpoint(tmp_path / str(share), model, optimizer),
            lambda: infinity.load_checkpoint(tmp_path / str(share), model, optimizer),
            average.update,
        ):
            with torch.no_grad():
                change()
            step(model, optimizer, 7)
        with infinity.full_params(model, ["1"], writeback=True), torch.no_grad():
            model[1].up.bias.add_(1)
        step(model, optimizer, 8)
        if share:
            assert infinity.stats(model).audited["found"] == []
        return ends(model, optimizer)

    assert not differing(run(0.0), run(1.0))


# --- planted flips ---


@pytest.mark.parametrize("name", ["weight", "master", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("home", ["device", "host"])
def test_a_flip_in_an_update_is_found_and_named(home, name, tmp_path):
    """Twin: without audits the job trains on with it."""
    model, optimizer = build(home, tmp_path)
    flip_update(model, 2, name, SEED)
    with pytest.raises(infinity.CorruptionError, match=rf"update of {name} of 0\.up\.weight.*step"):
        train(model, optimizer)
    assert parts_of(model).steps.index <= 3
    assert infinity.stats(model).audited["found"]
    model, optimizer = build(home, tmp_path, audit=0.0)
    flip_update(model, 2, name, SEED)
    assert differing(train(*build(home, tmp_path, audit=0.0)), train(model, optimizer))


def test_nothing_is_saved_once_something_was_found(tmp_path):
    """Method: the flip is in the last update, so that the save is the first to read it. Twins: a
    save before it stands and loads, and a wrapped model of its own goes on."""
    model, optimizer = build("host", tmp_path)
    train(model, optimizer, 2)
    infinity.save_checkpoint(tmp_path / "saved", model, optimizer)
    before = ends(model, optimizer)
    flip_update(model, 3, "weight", SEED)
    model(torch.ones(2, WIDTH).bfloat16()).float().square().mean().backward()
    optimizer.step()
    for _ in range(2):
        with pytest.raises(infinity.CorruptionError, match=r"audit: .*last checkpoint"):
            infinity.save_checkpoint(tmp_path / "saved", model, optimizer)
    for read in (model.state_dict, optimizer.state_dict, lambda: step(model, optimizer, 1)):
        with pytest.raises(infinity.CorruptionError, match="audit"):
            read()
    other, its = build("host", tmp_path)
    infinity.load_checkpoint(tmp_path / "saved", other, its)
    assert not differing(before, ends(other, its))


@pytest.mark.parametrize("name", ["weight", "master", "exp_avg", "exp_avg_sq"])
def test_a_flip_in_a_home_is_found_when_it_is_read(name, tmp_path):
    """Twin: without audits it is not."""
    model, optimizer = build("host", tmp_path)
    train(model, optimizer, 2)
    flip(part_of(flats(model)[1], name), SEED)
    with pytest.raises(
        infinity.CorruptionError, match=rf"{name} of 1\.up\.weight.*at home in host"
    ):
        step(model, optimizer, 2)
    model, optimizer = build("host", tmp_path, audit=0.0)
    train(model, optimizer, 2)
    flip(part_of(flats(model)[1], name), SEED)
    step(model, optimizer, 2)


def test_a_flip_in_frozen_weights_at_home_is_found(tmp_path):
    """Twin: before it the pieces were compared and none was wrong."""
    torch.manual_seed(SEED)
    model = Blocks(*(Block() for _ in range(3)))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[1:].parameters(), lr=1e-2)
    config = at_home("host", "host", tmp_path, units=["Block"], audit=1.0)
    model, optimizer = infinity.wrap_model(model, optimizer, config)

    def train_on() -> None:
        for number in range(3):
            model(torch.ones(2, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    train_on()
    assert infinity.stats(model).audited["found"] == []
    flip(part_of(flats(model)[0], "weight"), SEED)
    with pytest.raises(infinity.CorruptionError, match=r"weight of 0\.up\.weight"):
        train_on()


@pytest.mark.parametrize("home", ["host", "nvme"])
def test_a_flip_in_a_gathered_weight_is_found(home, tmp_path, monkeypatch):
    """Twin: without audits it is not."""
    whole, planted = Arrival.finish, []

    def finish(self: Any, store: Any) -> None:
        whole(self, store)
        if self._name == "1" and planted:
            planted.pop()
            flip(self._buffers.flats[0][:100], SEED)

    monkeypatch.setattr(Arrival, "finish", finish)
    for share, finds in ((1.0, True), (0.0, False)):
        model, optimizer = build(home, tmp_path, audit=share)
        train(model, optimizer, 2)
        planted.append(1)
        if finds:
            with pytest.raises(
                infinity.CorruptionError, match=r"unit 1 .*not those at home.*step 3"
            ):
                step(model, optimizer, 2)
        else:
            step(model, optimizer, 2)


@pytest.mark.parametrize("way", ["torch's checkpoint", "micro_batch"])
def test_a_flip_in_a_recomputed_block_is_found(way, tmp_path):
    """Method: what the block computes has one other bit in the second run. Twins: not in blocks
    that are computed once, and without a flip none is found."""

    def run(again: bool, flips: bool, **more: Any) -> dict[str, Any]:
        model, optimizer = build("host", tmp_path, again=again, **more)

        def change(hidden: torch.Tensor) -> torch.Tensor:
            if torch._C._current_graph_task_id() == -1 or not flips:
                return hidden
            changed = hidden.detach().clone()
            changed.view(-1)[changed.argmax()].view(torch.int16).bitwise_xor_(1)
            return hidden + (changed - hidden).detach()

        model[1].change = change
        step(model, optimizer, 0)
        return infinity.stats(model).audited

    more = {"micro_batch": 4} if way == "micro_batch" else {}
    again = way != "micro_batch"
    with pytest.raises(infinity.CorruptionError, match=r"block 1 again .* step 1.*saved tensor"):
        run(again, True, **more)
    audited = run(again, False, **more)
    assert audited["pieces"]["recomputed blocks"] > 0 and not audited["found"]
    assert run(False, True)["pieces"]["recomputed blocks"] == 0


# --- the share ---


def test_all_pieces_come_before_one_comes_again():
    """Twin: a whole share takes all at once, a larger seed another order."""
    few = rotation.Rotation(50, 0.01, seed=3)
    assert sorted(index for step in range(100) for index in few.at(step)) == [*range(50)]
    again = [index for step in range(100, 200) for index in few.at(step)]
    assert sorted(again) == [*range(50)]
    assert [len(rotation.Rotation(50, 0.3, 3).at(step)) for step in range(4)] == [15, 15, 15, 15]
    assert sorted(rotation.Rotation(50, 1.0, 3).at(9)) == [*range(50)]
    assert rotation.Rotation(50, 1.0, 3).at(0) != rotation.Rotation(50, 1.0, 4).at(0)


def test_a_share_of_the_work_is_audited(tmp_path):
    """Twin: of all of it ten times as much."""
    counts = []
    for share in (0.1, 1.0):
        model, optimizer = build("host", tmp_path, audit=share)
        train(model, optimizer, 20)
        counts.append(infinity.stats(model).audited["pieces"]["updates"])
    assert counts == [30, 300]


@pytest.mark.parametrize("share", [2, -0.1, True, "some", float("nan")])
def test_a_share_that_is_none_is_refused(share):
    """Twin: 1 is one."""
    with pytest.raises(infinity.ConfigError, match="audit="):
        infinity.Config(audit=share)
    assert infinity.Config(audit=1).audit == 1


def test_what_is_not_audited_is_named(tmp_path):
    """Twin: an optimizer of the kernels names nothing."""
    torch.manual_seed(SEED)
    model = Blocks(Block(), Block())
    optimizer = torch.optim.Adafactor(model.parameters())
    config = at_home("host", "host", tmp_path, units=["Block"], audit=1.0)
    model, optimizer = infinity.wrap_model(model, optimizer, config)
    assert infinity.stats(model).audited["left_out"] == ["updates by an optimizer's own code"]
    assert infinity.stats(build("host", tmp_path)[0]).audited["left_out"] == []


def test_an_operation_that_is_not_deterministic_is_named():
    """Method: the nodes behind a tensor are walked, as on an accelerator. Twin: one from before."""
    from infinity.ext.audit.blocks import _next_node, _not_deterministic

    x = torch.ones(4, 4, requires_grad=True)
    before = x.cumsum(0)
    first = _next_node()
    assert [*_not_deterministic(before.exp(), first)] == []
    assert [*_not_deterministic(before.exp().cumsum(1).exp(), first)] == ["CumsumBackward0"]


# --- what is told ---


def test_a_line_tells_what_was_audited(tmp_path):
    """Twin: of a finding it names the first."""
    model, optimizer = build("host", tmp_path)
    train(model, optimizer, 1)
    audited = infinity.stats(model).audited
    assert "15 of updates" in line_of(audited) and "none wrong" in line_of(audited)
    assert "WRONG: a weight" in line_of(audited | {"found": ["a weight"]})
    assert line_of({}) is None and infinity.receipt(model)["audited"] == audited


def test_an_average_is_computed_again(tmp_path):
    """The sum of what ranks gave, in their order. Twin: one other bit."""
    given = torch.randn(3, 64, generator=torch.Generator().manual_seed(SEED)).bfloat16()
    average = (given[0].float() + given[1] + given[2]) / 3
    assert torch.equal(meetings.average_of(given, 3), average)
    flip(given[1], SEED)
    assert not torch.equal(meetings.average_of(given, 3), average)
