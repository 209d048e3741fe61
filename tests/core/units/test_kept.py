"""Kept arrays: a feature of three unlike ones has no line about their memory, files and parks.

Words used here:

**sketch**: an extension that keeps a mean, marks of one byte and wide numbers of one layer, and
counts its updates.
"""

from __future__ import annotations

import logging
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from inside import parts_of
from models import at_home, seeded
from torch import nn

import infinity
from infinity import native
from infinity.core import seams
from infinity.core.homes import swap_space
from infinity.core.machine.tiers import Tier
from infinity.core.seams import Extension
from infinity.core.units.pieces import pieces_of, read_value
from infinity.errors import CapacityError, ConfigError, CorruptionError, InternalError
from infinity.ext.averages.change import Progress, change_pieces

NAMES = ("sketch_mean", "sketch_marks", "sketch_wide")


class Sketch(Extension):
    """See above. It is in no file of the package."""

    kind: type[Sketch] | None = None
    promised: list[seams.Term] = []

    @classmethod
    def terms(cls, config: Any, units: Any, device: Any) -> list[seams.Term]:
        return cls.promised

    @classmethod
    def begin(cls, config: Any, device: Any, collectives: Any, events: Any) -> Sketch:
        return (cls.kind or cls)()

    def install(self, job: Any, model: Any) -> None:
        mean, marks, wide = NAMES
        keep, self.job, self.count = job.kept.keep, job, 0
        last = job.kept.stepped[-1:]
        self.kept = [
            keep(mean, keeper=self, saved_as="sketch"),
            keep(marks, torch.uint8, keeper=self, saved_as="sketch"),
            keep(wide, torch.float64, last, keeper=self, saved_as="sketch"),
        ]

    def update(self) -> None:
        flat_params = list(self.kept[0].flat_params)
        for flat_param in flat_params:
            flat_param.homes.wait_idle()
        change_pieces(flat_params, self.changed, self.job.kept.write, Progress())
        self.count += 1

    def changed(self, piece: Any) -> dict[str, torch.Tensor]:
        value, parts = read_value(self.job.store, piece), {}
        for kept in self.kept:
            if piece.flat_param in kept.flat_params:
                parts[kept.name] = (kept.read(piece) + value * 8).to(kept.read(piece).dtype)
        return parts

    def values(self) -> dict[str, torch.Tensor]:
        return {
            kept.name: torch.cat([kept.read(piece) for piece in pieces_of(kept.flat_params)])
            for kept in self.kept
        }

    def describe(self) -> Any:
        return {"count": self.count}

    def resume(self, told: Any) -> None:
        self.count = told["count"] if told else 0


class Refusing(Sketch):
    """A sketch that cannot be made."""

    def install(self, job: Any, model: Any) -> None:
        super().install(job, model)
        raise ConfigError("no sketch of this model")


@pytest.fixture(autouse=True)
def kinds(monkeypatch):
    """The extensions that every wrap asks: the one of this file as well."""
    monkeypatch.setattr(seams, "EXTENSIONS", [*seams.EXTENSIONS, Sketch])
    return monkeypatch


class Made:
    def __init__(self, home: str, swap: Path, dtype: torch.dtype = torch.bfloat16, **more: Any):
        model = seeded(3, lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))).to(dtype)
        model[0].requires_grad_(False)
        trained = [param for param in model.parameters() if param.requires_grad]
        self.model, self.optimizer = infinity.wrap_model(
            model, torch.optim.AdamW(trained, lr=0.1), at_home(home, home, swap) | more
        )
        self.sketch = parts_of(self.model).find(Sketch)
        self.job = parts_of(self.model).job

    def train(self, steps: int = 1) -> Made:
        dtype = self.model[0].weight.dtype
        for _ in range(steps):
            self.model(torch.ones(2, 64, dtype=dtype)).float().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.sketch.update()
        return self

    def held(self) -> dict[str, int]:
        """The bytes that arrays of a name take, with their last page."""
        found: dict[str, int] = dict.fromkeys(NAMES, 0)
        for homes in (flat.homes for unit in self.job.units for flat in unit.flat_params):
            for name, array in homes.kept.items():
                found[name] += -(-array.nbytes // native.BLOCK_NBYTES) * native.BLOCK_NBYTES
        return found


HOMES = ["device", "host", "nvme"]
TIERS = dict(zip(HOMES, (Tier.DEVICE, Tier.HOST, Tier.NVME)))


@pytest.mark.parametrize("home", HOMES)
def test_kept_arrays_are_planned_charged_and_freed(home, swap):
    """Method: terms, plan and charges with and without the extension. Twin: a frozen layer has no
    array, and what is gone can be freed again."""
    made, tier = Made(home, swap), TIERS[home]
    before = {name: nbytes for name, nbytes in made.held().items() if nbytes}
    terms, account = made.job.planned.plan.terms, made.job.ledger.accounts[tier]
    assert set(before) == set(NAMES)
    assert {name: terms[tier][name] for name in NAMES} == before
    assert not any(flat.homes.kept for flat in made.job.units[0].flat_params)
    planned, charged = account.planned_nbytes, account.charged_nbytes
    made.job.remove(made.sketch)
    terms = made.job.planned.plan.terms[tier]
    assert not set(NAMES) & set(terms) and not any(made.held().values())
    if tier is not Tier.NVME:  # space of a swap file stays its own
        assert planned - account.planned_nbytes == sum(before.values())
        assert charged - account.charged_nbytes == sum(before.values())
    for kept in made.sketch.kept:
        kept.free()
    infinity.unwrap_model(made.model, made.optimizer)


@pytest.mark.parametrize("home", HOMES)
def test_a_term_of_their_name_was_the_plan_of_kept_arrays(home, kinds, swap):
    """Method: plans and accounts with a term for each name, as large, smaller and larger. Twin: a
    term of another name stays."""
    made, tier = Made(home, swap), TIERS[home]
    shares = zip(NAMES, made.held().values(), (1.0, 0.5, 2.0))
    terms = [seams.Term(tier, name, int(share * nbytes)) for name, nbytes, share in shares]
    planned, account = made.job.planned.plan.terms, made.job.ledger.accounts[tier]
    kinds.setattr(Sketch, "promised", [*terms, seams.Term(tier, "more", 4096)])
    again = Made(home, swap)
    assert again.job.planned.plan.terms[tier] == planned[tier] | {"more": 4096}
    assert again.job.ledger.accounts[tier].planned_nbytes == account.planned_nbytes + 4096
    again.job.remove(again.sketch)
    again.job.add(Sketch())  # the second time no term is left
    assert again.job.planned.plan.terms[tier] == planned[tier] | {"more": 4096}


def test_a_budget_that_holds_the_term_of_kept_arrays_holds_the_arrays(kinds, swap):
    """Method: terms as large as the arrays, and the budget of the plan. Twin: a page less has no
    room for one of them."""
    sizes: dict[str, Any] = {"device_memory": "1MiB"}
    made = Made("host", swap, **sizes)
    needs = made.job.ledger.accounts[Tier.HOST].planned_nbytes
    terms = [seams.Term(Tier.HOST, name, nbytes) for name, nbytes in made.held().items()]
    kinds.setattr(Sketch, "promised", terms)
    again = Made("host", swap, host_memory=needs, **sizes).train()
    account = again.job.ledger.accounts[Tier.HOST]
    assert account.peak_nbytes <= account.planned_nbytes == needs
    kinds.setattr(Sketch, "promised", terms[:2])
    with pytest.raises(CapacityError, match="sketch_wide"):
        Made("host", swap, host_memory=needs - native.BLOCK_NBYTES, **sizes)


def test_on_a_disk_kept_arrays_take_what_they_need(monkeypatch, swap):
    """At most twice. Those that come in their place take no more. Twin: the volumes of many arrays
    are large."""
    made = Made("nvme", swap)
    space, held = made.job.store.allocator.space, sum(made.held().values())
    sizes = [added.nbytes for added in space.added]
    assert held <= sum(sizes) <= 2 * held
    made.job.remove(made.sketch)
    made.job.add(Sketch())
    assert [added.nbytes for added in space.added] == sizes
    monkeypatch.setattr(swap_space, "GROWTH_NBYTES", 1 << 20)
    allocate = made.job.store.allocator.allocate_more
    arrays = [allocate(Tier.NVME, 1 << 16, "more") for _ in range(32)]
    more = [added.nbytes for added in space.added[len(sizes) :]]
    assert len(arrays) == 32 and len(more) < 9 and max(more) == 1 << 20


def test_arrays_for_which_there_is_no_room_undo_the_wrap(kinds, swap):
    """Twins: with as much as the plan says it fits; an extension that refuses is undone as well,
    and the model trains as it did before."""
    sizes: dict[str, Any] = {"device_memory": "1MiB"}
    needs = Made("host", swap, **sizes).job.ledger.accounts[Tier.HOST].planned_nbytes
    Made("host", swap, host_memory=needs, **sizes)
    with pytest.raises(CapacityError, match="sketch_wide"):
        Made("host", swap, host_memory=needs - native.BLOCK_NBYTES, **sizes)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kinds.setattr(Sketch, "kind", Refusing)
    with pytest.raises(ConfigError, match="no sketch"):
        infinity.wrap_model(model, optimizer, at_home("host", "host", swap))
    assert type(model.weight) is nn.Parameter and not model._forward_pre_hooks
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(("home", "to"), [("device", "nvme"), ("host", "nvme"), ("device", "host")])
def test_kept_arrays_are_parked_with_the_optimizers(home, to, swap):
    """Twin: a park of the weights alone leaves them."""
    made = Made(home, swap).train()
    before = made.sketch.values()
    parking = infinity.park(made.model, swap, what="weights")
    whole = infinity.park(made.model, swap)
    assert whole - parking >= sum(made.sketch.values()[name].nbytes for name in NAMES)
    infinity.resume(made.model)
    assert all(torch.equal(before[name], now) for name, now in made.sketch.values().items())


@pytest.mark.parametrize("home", HOMES)
def test_kept_arrays_are_saved_and_loaded(home, swap, tmp_path):
    """Method: saved in the middle, trained on, loaded into another job, trained as far. Twins:
    without the load the arrays differ; a damaged file is refused before anything changes."""
    made = Made(home, swap).train(2)
    infinity.save_checkpoint(tmp_path / "saved", made.model, made.optimizer)
    saved = made.sketch.values()
    expected = made.train(2).sketch.values()
    again = Made(home, swap).train()
    assert not any(torch.equal(saved[name], now) for name, now in again.sketch.values().items())
    infinity.load_checkpoint(tmp_path / "saved", again.model, again.optimizer)
    assert again.sketch.count == 2
    assert all(torch.equal(saved[name], now) for name, now in again.sketch.values().items())
    again.train(2)
    assert all(torch.equal(expected[name], now) for name, now in again.sketch.values().items())
    (file, *_) = sorted(tmp_path.glob("saved/*/sketch-*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptionError, match=file.name):
        infinity.load_checkpoint(tmp_path / "saved", again.model, again.optimizer)
    assert again.sketch.count == 4


def test_what_a_checkpoint_lacks_begins_anew_and_what_it_has_too_much_is_told(
    kinds, swap, tmp_path, caplog
):
    """Method: a job with sketches and one without load each other's."""
    made = Made("host", swap).train()
    infinity.save_checkpoint(tmp_path / "with", made.model, made.optimizer)
    kinds.undo()
    other = Made("host", swap)
    assert other.sketch is None
    infinity.save_checkpoint(tmp_path / "without", other.model, other.optimizer)
    assert not list(tmp_path.glob("without/*/sketch*"))
    with caplog.at_level(logging.WARNING):
        infinity.load_checkpoint(tmp_path / "with", other.model, other.optimizer)
    assert "'sketch' beside the weights" in caplog.text
    infinity.load_checkpoint(tmp_path / "without", made.model, made.optimizer)
    assert made.sketch.count == 0
    assert not any(values.any() for values in made.sketch.values().values())


@pytest.mark.parametrize(
    ("name", "saved_as"),
    [
        ("weight", None),
        ("sketch_mean", None),
        ("mine", "unit"),
        ("mine", "sketch"),
        ("Mine-1", None),
    ],
)
def test_arrays_get_a_name_of_their_own(name, saved_as, swap):
    """Method: names of a flat param's arrays, of others that are kept, of others' files, and one
    that no file has. Twin: a name of its own."""
    made = Made("host", swap)
    with pytest.raises(InternalError, match=name if saved_as is None else saved_as):
        made.job.kept.keep(name, saved_as=saved_as)
    assert NAMES[0] in made.job.units[1].flat_params[0].homes.kept
    made.job.kept.keep("mine").free()


def test_a_keeper_that_refuses_what_it_told_changes_nothing(swap, tmp_path):
    """Method: of a checkpoint with another count than it takes."""
    made = Made("host", swap).train()
    infinity.save_checkpoint(tmp_path / "saved", made.model, made.optimizer)
    before = made.train().sketch.values()

    def expect(told: Any) -> None:
        raise ValueError(f"{told} is no count")

    made.sketch.expect = expect
    with pytest.raises(CorruptionError, match="no count"):
        infinity.load_checkpoint(tmp_path / "saved", made.model, made.optimizer)
    assert all(torch.equal(before[name], now) for name, now in made.sketch.values().items())


def documented() -> dict[str, Any]:
    """The example of docs/seams.md, run."""
    text = (Path(__file__).parents[3] / "docs/seams.md").read_text()
    begin, end = (
        text.index("    from functools import partial"),
        text.index("A user gets no reference"),
    )
    found: dict[str, Any] = {}
    exec(textwrap.dedent(text[begin:end]), found)
    return found


def test_the_mean_of_the_documentation_is_torchs_and_is_resumed(kinds, swap, tmp_path):
    """Method: the example's code, against the mean by hand; saved, loaded elsewhere and trained
    further. Twin: before the load the other mean is another one."""
    kinds.undo()
    example, means = documented(), {}
    model = seeded(3, lambda: nn.Linear(8, 4))
    model, optimizer = infinity.wrap_model(
        model, torch.optim.SGD(model.parameters(), lr=0.5), at_home("host", "host", swap)
    )
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    example["start"](model)  # later: the steps before are not in the mean
    for count in (1, 2, 3):
        model(torch.ones(2, 8) * count).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, value in model.state_dict().items():
            means[name] = means[name].lerp(value, 1 / count) if count > 1 else value.clone()
    infinity.save_checkpoint(tmp_path / "saved", model, optimizer)
    other = seeded(4, lambda: nn.Linear(8, 4))
    other, again = infinity.wrap_model(
        other, torch.optim.SGD(other.parameters(), lr=0.5), at_home("host", "host", swap)
    )
    example["start"](other)
    for is_loaded in (False, True):
        if is_loaded:
            infinity.load_checkpoint(tmp_path / "saved", other, again)
        for name, param in other.named_parameters():
            mean = example["mean_of"](other, param)
            assert torch.equal(mean, means[name]) == is_loaded
            assert torch.equal(example["mean_of"](model, model.get_parameter(name)), means[name])
    counts = [parts_of(each).find(example["Polyak"]).count for each in (model, other)]
    assert counts == [3, 3]
