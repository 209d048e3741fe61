"""park gives a model's memory to something else, and the next use brings every bit back.

Words used here: **plain** and **wrapped** as in `runs.py`.
"""

from __future__ import annotations

import contextlib
import copy
import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from inside import parts_of
from models import at_home, differing, loss_of, tokens, transformer
from torch import nn

import infinity
from infinity import native

SEED = 181


def pair(
    home: str, folder: Path, width: int = 32, **more: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = transformer(SEED, dropout=0.0, width=width, blocks=3).to(torch.bfloat16)
    return infinity.wrap_model(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), at_home(home, home, folder, **more)
    )


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> torch.Tensor:
    loss = loss_of(model, tokens(SEED + number))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def ends(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = dict(model.state_dict())
    for index, state in optimizer.state_dict()["state"].items():
        found |= {
            f"{index}.{name}": value for name, value in state.items() if torch.is_tensor(value)
        }
    return {name: value.clone() for name, value in found.items()}


@pytest.mark.parametrize("home", ["device", "host", "hostile"])
def test_a_parked_run_is_the_same(home, tmp_path):
    """Method: parked after each step, brought back by resume, by the next forward and by a state
    dict in turn; an average is parked too."""
    found = []
    for parks in (False, True):
        model, optimizer = pair(home, tmp_path)
        average, losses = infinity.ema(model, 0.9), []
        for number in range(4):
            losses.append(step(model, optimizer, number))
            average.update()
            if parks:
                parked = infinity.park(model, tmp_path)
                assert parked > 0  # with a home on a disk, the memory for gradients
                if number == 1:
                    infinity.resume(model)
                    infinity.resume(model)
                if number == 2:
                    model.state_dict()
        found.append((losses, ends(model, optimizer), average.state_dict()))
    assert all(map(torch.equal, *(losses for losses, _, _ in found)))
    assert differing(found[0][1], found[1][1]) == [] and differing(found[0][2], found[1][2]) == []


@pytest.mark.parametrize("home", ["device", "host", "nvme"])
@pytest.mark.parametrize(
    "more",
    [{"moments": "int8"}, {"moments": "bf16"}, {"moments": "int8", "master": "fp32"}],
    ids=["int8", "bf16", "fp32 master"],
)
def test_state_of_any_size_is_parked(home, more, tmp_path):
    """Method: moments whose scales are a few bytes each, which no disk writes by themselves; parked
    twice between steps, the bits are those of a run that was not, and the disk's space is taken
    once."""
    found = []
    for parks in (False, True):
        model, optimizer = pair(home, tmp_path, **more)
        for number in range(3):
            step(model, optimizer, number)
            if parks:
                infinity.park(model, tmp_path)
                planned = infinity.stats(model).tiers["nvme"].planned_nbytes
                infinity.resume(model)
                infinity.park(model, tmp_path)
                assert infinity.stats(model).tiers["nvme"].planned_nbytes == planned
        found.append(ends(model, optimizer))
    assert differing(*found) == []


def test_the_memory_is_given_back(tmp_path):
    """Method: 40 MiB of state on the host; the process shrinks by nearly all of it while parked,
    and the disk's space is taken again by the next park."""
    model, optimizer = pair("host", tmp_path, width=512)
    step(model, optimizer, 0)
    infinity.park(model, tmp_path)
    infinity.resume(model)
    planned, before = (
        infinity.stats(model).tiers["nvme"].planned_nbytes,
        psutil.Process().memory_info().rss,
    )
    parked = infinity.park(model, tmp_path)
    after = psutil.Process().memory_info().rss
    assert parked > 100 * 2**20
    assert before - after > 0.9 * parked
    assert infinity.stats(model).tiers["nvme"].planned_nbytes == planned
    infinity.resume(model)
    assert psutil.Process().memory_info().rss > after + 0.9 * parked
    step(model, optimizer, 1)


@pytest.mark.parametrize("way", ["park", "resume"])
def test_cut_short_it_comes_back_whole(way, tmp_path, monkeypatch):
    """Method: the write, or the read, of the seventh array raises KeyboardInterrupt; going on gives
    the bits of an uninterrupted run."""
    found = []
    for cut in (False, True):
        model, optimizer = pair("host", tmp_path)
        step(model, optimizer, 0)
        if way == "resume":
            infinity.park(model, tmp_path)
        with monkeypatch.context() as patched:
            calls, name = [], "empty" if way == "park" else "read"
            store = parts_of(model).store
            target = store.allocator if way == "park" else store
            original = getattr(target, name)

            def interrupted(*args: Any, calls=calls, original=original, cut=cut) -> Any:
                calls.append(args)
                if cut and len(calls) == 7:
                    raise KeyboardInterrupt
                return original(*args)

            patched.setattr(target, name, interrupted)
            try:
                infinity.park(model, tmp_path) if way == "park" else infinity.resume(model)
            except KeyboardInterrupt:
                assert cut
        step(model, optimizer, 1)
        found.append(ends(model, optimizer))
    assert differing(*found) == []


def test_bytes_that_changed_on_the_disk_are_seen(tmp_path):
    """The twin: what comes back is verified; a bit that is flipped in the swap file is a
    CorruptionError, not a wrong weight."""
    from models import swap_files

    model, optimizer = pair("host", tmp_path)
    infinity.park(model, tmp_path)
    with open(swap_files(tmp_path)[-1], "r+b") as file:
        file.seek(1000)
        byte = file.read(1)
        file.seek(1000)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(infinity.CorruptionError):
        infinity.resume(model)


def test_without_a_folder_one_on_a_disk_is_found(tmp_path, monkeypatch):
    """Twin: where none can be used, the error says which were looked at."""
    model, optimizer = pair("host", tmp_path)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    monkeypatch.setenv("INFINITY_SCRATCH", str(tmp_path))
    assert infinity.park(model) > 0
    infinity.resume(model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    monkeypatch.setenv("INFINITY_SCRATCH", str(tmp_path / "absent"))
    with pytest.raises(infinity.ConfigError, match="needs a folder.*absent"):
        infinity.park(model)


def test_what_cannot_be_parked_is_refused(tmp_path):
    model, optimizer = pair("host", tmp_path)
    with pytest.raises(infinity.ConfigError, match="no folder"):
        infinity.park(model, tmp_path / "absent")
    loss_of(model, tokens(SEED)).backward()
    with pytest.raises(infinity.UsageError, match="between backward and step"):
        infinity.park(model, tmp_path)
    optimizer.step()
    small, _ = pair("host", tmp_path, nvme_capacity="64KiB")
    with pytest.raises(infinity.CapacityError):
        infinity.park(small, tmp_path)
    small(tokens(SEED))


CHANGES = {
    "nobody": (lambda grad: None, False),
    "added to": (lambda grad: grad.add_(1e-30), True),
    "by a view": (lambda grad: grad.view(-1).add_(1e-30), True),
    "to not a number": (lambda grad: grad.mul_(float("nan")), True),
    "zeroed again": (lambda grad: grad.add_(1).zero_(), False),
}


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("what", ["save", "park"])
def test_zeros_behind_a_step_are_nothing_to_lose(what, how, tmp_path):
    """Method: zero_grad(set_to_none=False), a change of one gradient, then a save or a park. Twin:
    what was changed is refused, and a step behind it applies it."""
    model = nn.Linear(4, 4)
    model, optimizer = infinity.wrap_model(
        model, torch.optim.SGD(model.parameters(), lr=0.1), {"params": "host", "optimizer": "host"}
    )
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    change, is_refused = CHANGES[how]
    change(model.weight.grad)
    with (
        pytest.raises(infinity.UsageError, match="between backward and step")
        if is_refused
        else contextlib.nullcontext()
    ):
        if what == "save":
            infinity.save_checkpoint(tmp_path / "saved", model, optimizer)
        else:
            infinity.park(model, tmp_path)
    assert model.weight.grad is not None
    optimizer.step()


def test_a_folder_that_takes_no_file_ends_nothing(tmp_path, monkeypatch):
    """Method: the system refuses the swap file, as it does to who may not write there; the run goes
    on with the bits of one that was not parked."""
    from infinity.core.homes import swap_folders

    def refused(io: native.IoEngine, folder: str, nbytes: int) -> int:
        raise infinity.StorageError(errno.EACCES, "cannot make a swap file", folder)

    found = []
    for parks in (False, True):
        model, optimizer = pair("host", tmp_path)
        step(model, optimizer, 0)
        if parks:
            with (
                monkeypatch.context() as patched,
                pytest.raises(infinity.StorageError, match="cannot make"),
            ):
                patched.setattr(swap_folders, "create_swap_file", refused)
                infinity.park(model, tmp_path)
        step(model, optimizer, 1)
        found.append(ends(model, optimizer))
    assert differing(*found) == []


def test_each_park_lies_in_the_folder_that_it_was_given(tmp_path):
    """Method: parked in one folder, resumed, parked in another; each then has swap files, and as
    many when it is used again."""
    from models import swap_files

    model, optimizer = pair("host", tmp_path)
    folders = [tmp_path / name for name in ("one", "two")]
    found = []
    for folder in (folders[0], folders[1], folders[0]):
        folder.mkdir(exist_ok=True)
        infinity.park(model, folder)
        infinity.resume(model)
        found.append([len(swap_files(each)) for each in folders])
    assert found[0][0] > 0 == found[0][1] and found[1][1] > 0
    assert found[2] == found[1] == [found[0][0], found[1][1]]
    step(model, optimizer, 0)


def test_a_region_that_is_discarded_keeps_its_address_and_reads_as_zeros():
    region = native.Region(3 * 2**20, True, 1)
    flat = native.tensor_at(region, region.address, 3 * 2**20, torch.uint8)
    flat.fill_(7)
    region.discard()
    assert flat.data_ptr() == region.address and not flat.any()
    flat.fill_(9)
    assert bool((flat == 9).all())


class Branches(nn.Module):
    """Two branches, of which the backward runs the second one first. ``ends``: is called with what
    the second one makes."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(16, 16), nn.Linear(16, 16)
        self.ends: Callable[[torch.Tensor], torch.Tensor] = lambda made: made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.head(self.cell(x))
        return first + self.head(self.ends(self.cell(x + 1)))


class UsersError(Exception):
    pass


def fails(_grad: torch.Tensor) -> None:
    raise UsersError


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        fails(grad)


def hooked(made: torch.Tensor) -> torch.Tensor:
    made.register_hook(fails)
    return made


FAILING = {"a hook": hooked, "a function": Fails.apply, "the forward": fails}


@pytest.mark.parametrize("where", [*FAILING, "no module"])
@pytest.mark.parametrize("looks", [False, True], ids=["at once", "after a use"])
def test_an_error_of_the_users_keeps_nothing_from_being_parked(where, looks, tmp_path):
    """Method: an error ends a backward while a branch waits, whose graph torch keeps, or a forward;
    also before the engine knew of that backward. The model is parked, and the next step is plain
    torch's. Twin: a loss that the user keeps is refused."""
    torch.manual_seed(SEED)
    model = Branches()
    plain, x = copy.deepcopy(model), torch.randn(4, 16)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    model, optimizers[1] = infinity.wrap_model(
        model, optimizers[1], at_home("device", "device", tmp_path)
    )
    for each, optimizer in zip((plain, model), optimizers):
        each.ends = FAILING.get(where, each.ends)
        with pytest.raises(UsersError):
            loss = each(x).sum()
            (loss if where in FAILING else loss + hooked(each(x).sum() * 1)).backward()
        each.ends = lambda made: made
        optimizer.zero_grad()
    if looks:
        model.state_dict()
    if where != "the forward":
        with pytest.raises(infinity.UsageError, match="loss that is kept, also by an exception"):
            infinity.park(model, tmp_path)
        del loss
    assert infinity.park(model, tmp_path) > 0
    for each, optimizer in zip((plain, model), optimizers):
        each(x).sum().backward()
        optimizer.step()
    assert differing(plain.state_dict(), model.state_dict()) == []
