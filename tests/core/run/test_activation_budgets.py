"""Activations at home: what moves and what stays, budgets, the disk."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import re
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from activations_cases import (  # noqa: F401
    KIB,
    LR,
    MIB,
    SEED,
    WIDTH,
    Between,
    a_backward_in_parts,
    a_graph_that_is_dropped,
    a_transformer,
    both_homes,
    configuration,
    language,
    language_loop,
    moved,
    no_hooks_left,
    right,
    rows_of,
    spare,
    stepped,
    trained,
    two_live_graphs,
    wrapped,
)
from inside import parts_of
from models import (
    differing,
    environment,
    in_child,
    least_host_memory,
    leftovers,
    loss_of,
    seeded,
    transformer,
)
from runs import adamw
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import infinity
from infinity import native
from infinity.core.run import activation_store

TYPED = (infinity.StorageError, infinity.CorruptionError)
pytestmark = pytest.mark.timeout(120)  # a hang is a failure, too


def moved_in_a_forward(model: nn.Module, *args: Any) -> int:
    before = moved(model)
    model(*args)
    return moved(model) - before


@both_homes
def test_saved_activations_leave_the_device(home, tmp_path):
    """Method: weak references to the storages that layers return; after a forward all of more than
    64 KiB are gone with activations at home, though the graph lives, and some live on with
    activations on the device."""

    def alive(kind: str) -> int:
        model, _ = wrapped(a_transformer(), configuration(kind, a_transformer(), tmp_path))
        refs = []

        def note(module, args, out):
            if out.untyped_storage().nbytes() >= 64 * KIB:
                refs.append(StorageWeakRef(out.untyped_storage()))

        for block in model.blocks:
            for module in block.modules():
                if isinstance(module, (nn.Linear, nn.GELU, nn.LayerNorm)):
                    module.register_forward_hook(note)
        loss = loss_of(model, language(0))
        assert len(refs) >= 10
        count = sum(not ref.expired() for ref in refs)
        loss.backward()
        return count

    assert alive("device") > 0
    assert alive(home) == 0


@both_homes
def test_a_storage_goes_home_once_however_often_it_is_saved(home, tmp_path):
    """Method: save one tensor by one operation and by twenty; as many bytes move."""

    def moved_by(times: int) -> int:
        build = lambda: Between(lambda h: sum(h.sin() for _ in range(times)) + h.t().cos().t())
        model, _ = wrapped(build, configuration(home, build, tmp_path))
        return moved_in_a_forward(model, rows_of(0, 1000, WIDTH))

    assert moved_by(20) == moved_by(1) > 0


@both_homes
def test_buffers_and_foreign_parameters_stay(home, tmp_path):
    """Method: a layer multiplies with a buffer and with a parameter of a class of its own, which
    are saved; as many bytes move as when it multiplies with numbers."""

    class Foreign(nn.Parameter):
        pass

    class Scaled(nn.Module):
        def __init__(self, with_tensors: bool) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
            self.register_buffer("factor", torch.randn(1000, WIDTH))
            self.foreign = Foreign(torch.randn(1000, WIDTH), requires_grad=False)
            self.with_tensors = with_tensors

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
                x = x * self.factor * self.foreign.t().t() if self.with_tensors else x * 2.0 * 3.0
            return x

    def moved_by(with_tensors: bool) -> int:
        build = lambda: Scaled(with_tensors)
        model, _ = wrapped(build, configuration(home, build, tmp_path))
        return moved_in_a_forward(model, rows_of(0, 1000, WIDTH))

    assert moved_by(True) == moved_by(False) > 0


def test_nothing_moves_without_gradients(tmp_path):
    """Method: a forward in no_grad, inference_mode and with gradients, which alone moves
    something."""
    model, _ = wrapped(a_transformer(), configuration("host", a_transformer(), tmp_path))
    with torch.no_grad():
        assert moved_in_a_forward(model, language(0)) == 0
    with torch.inference_mode():
        assert moved_in_a_forward(model, language(0)) == 0
    assert moved_in_a_forward(model, language(0)) > 0


def kept_nbytes(model: nn.Module, graphs: int) -> int:
    """Bytes of distinct storages of 64 KiB and more that stay on the device in as many forwards
    with living graphs."""
    kept: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if (
            tensor.untyped_storage().nbytes() >= activation_store.SMALLEST_NBYTES
            and tensor.is_floating_point()
        ):
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            alive.append(tensor)  # so that no storage has the address of another
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = [model(language(i)) for i in range(graphs)]
    nbytes = sum(kept.values())
    sum(output.square().mean() for output in outputs).backward()
    return nbytes


@pytest.mark.parametrize("graphs", [1, 2])
def test_auto_keeps_on_the_device_what_its_budget_has_room_for_and_no_more(graphs, tmp_path):
    """Method: count what stays under budgets from nothing to plenty, with one living graph and with
    two; it is never more than the room, mostly more than half of it, and nothing moves where there
    is plenty."""
    config = {"params": "device", "optimizer": "device", "activations": "auto"}
    model, _ = wrapped(a_transformer(), config)
    planned = infinity.stats(model).tiers["device"].planned_nbytes
    over = {}
    for room in (0, 512 * KIB, 2 * MIB, 512 * MIB):
        model, optimizer = wrapped(a_transformer(), config | {"device_memory": planned + room})
        if room == 512 * MIB:
            assert moved_in_a_forward(model, language(0)) == 0
        nbytes = kept_nbytes(model, graphs)
        if nbytes > room:
            over[room] = nbytes
        assert nbytes >= min(room, 2 * MIB) // 2
    assert not over, f"room -> kept: {over}"


def test_auto_without_room_on_the_host_keeps_what_does_not_fit(tmp_path):
    """Method: "auto" with neither device nor host memory to spare: the optimizer's bits are right
    and no error is raised, as activations on the device were nobody's demand to move."""
    model, _ = wrapped(
        a_transformer(), {"params": "device", "optimizer": "device", "activations": "auto"}
    )
    tiers = infinity.stats(model).tiers
    config = {"params": "device", "optimizer": "device", "activations": "auto"}
    config |= {
        "device_memory": tiers["device"].planned_nbytes,
        "host_memory": tiers["host"].planned_nbytes + 400 * KIB,
    }
    scenario = (a_transformer(), language_loop)
    right, least_moved = trained(scenario, configuration("device", scenario[0], tmp_path))
    found, has_moved = trained(scenario, config)
    assert differing(found, right) == []
    assert has_moved > least_moved


BUDGET_OF = {"host": "host_memory", "nvme": "nvme_capacity"}


def generous(home: str, folder: Path) -> dict[str, Any]:
    """Weights and state on the device, so that the home's budget is for activations."""
    paths = {"nvme_paths": [str(folder)]} if home == "nvme" else {}
    return {"params": "device", "optimizer": "device", "activations": home, **paths}


def needed(home: str, folder: Path, rows: int) -> int:
    """Bytes of the home that a step with so many rows takes."""
    model, optimizer = wrapped(a_transformer(), generous(home, folder))
    if home == "nvme":
        return activation_nbytes(rows)
    stepped(optimizer, loss_of(model, language(0, rows)))
    return infinity.stats(model).tiers[home].peak_nbytes


def activation_nbytes(rows: int) -> int:
    """What of a step's activations is moved, by the host's account: NVMe's is taken in larger
    portions."""
    model, optimizer = wrapped(a_transformer(), generous("host", Path()))
    before = infinity.stats(model).tiers["host"].peak_nbytes
    stepped(optimizer, loss_of(model, language(0, rows)))
    return infinity.stats(model).tiers["host"].peak_nbytes - before


@both_homes
def test_a_budget_too_small_is_an_error_with_numbers_and_the_model_trains_on(home, tmp_path):
    """Method: a budget for 24 rows; 48 raise a CapacityError that says how much of what is needed,
    and what to do, and 24 train after that as if nothing had been. On disk free space is in pieces,
    by the order in which transfers end."""
    budget = needed(home, tmp_path, rows=24) * (5 if home == "nvme" else 4) // 4

    def run(with_failure: bool) -> dict[str, torch.Tensor]:
        model, optimizer = wrapped(
            a_transformer(), generous(home, tmp_path) | {BUDGET_OF[home]: budget}
        )
        found = {}
        for step in range(3):
            if with_failure and step != 1:
                with pytest.raises(infinity.CapacityError) as refused:
                    loss_of(model, language(9, rows=48)).backward()
                text = str(refused.value)
                del refused  # its traceback holds the graph
                assert BUDGET_OF[home] in text and "micro_batch" in text, text
                assert len(re.findall(r"\d [KM]iB", text)) >= 3, text
                optimizer.zero_grad()
            torch.manual_seed(step)
            found[f"loss {step}"] = stepped(
                optimizer, loss_of(model, language(step, rows=24))
            ).detach()
        account = infinity.stats(model).tiers[home]
        assert account.peak_nbytes <= account.budget_nbytes
        return found | model.state_dict()

    assert differing(run(True), run(False)) == []


def test_a_refused_activation_raises_once_and_says_nothing_else(tmp_path, monkeypatch):
    """Method: everything that Python reports as unraisable during a CapacityError, which users see
    as noise."""
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: seen.append(repr(report.exc_value)))
    model, optimizer = wrapped(
        a_transformer(), generous("host", tmp_path) | {"host_memory": 300 * KIB}
    )
    with pytest.raises(infinity.CapacityError):
        loss_of(model, language(0))
    gc.collect()
    assert seen == []


@both_homes
def test_batches_of_many_lengths_need_no_more_than_the_longest(home, tmp_path):
    """Method: a budget of one and a quarter times what the longest batch takes; batches of all
    lengths train in it, in any order, as data that is not padded comes."""
    budget = needed(home, tmp_path, rows=40) * 5 // 4
    model, optimizer = wrapped(
        a_transformer(), generous(home, tmp_path) | {BUDGET_OF[home]: budget}
    )
    for step, rows in enumerate((40, 24, 31, 36, 22, 27, 40, 33, 38, 40)):
        stepped(optimizer, loss_of(model, language(step, rows)))


@both_homes
def test_the_budget_that_one_step_takes_is_enough_and_less_is_not(home, tmp_path):
    """Method: exactly what a step was charged works, in every step; three quarters of that raises a
    CapacityError."""
    budget = needed(home, tmp_path, rows=32)
    model, optimizer = wrapped(
        a_transformer(), generous(home, tmp_path) | {BUDGET_OF[home]: budget}
    )
    for step in range(3):
        stepped(optimizer, loss_of(model, language(step)))
    account = infinity.stats(model).tiers[home]
    assert account.peak_nbytes <= budget == account.budget_nbytes
    model, optimizer = wrapped(
        a_transformer(), generous(home, tmp_path) | {BUDGET_OF[home]: budget * 3 // 4}
    )
    with pytest.raises(infinity.CapacityError):
        stepped(optimizer, loss_of(model, language(0)))


def test_a_disk_that_is_nearly_full_holds_what_fits(tmp_path, monkeypatch):
    """Method: shutil.disk_usage tells of 32 MiB that are free, ten times as much as the activations
    need; a step goes through. The twin: with 32 KiB there is a CapacityError."""
    import shutil
    from types import SimpleNamespace

    def run(free: int) -> None:
        monkeypatch.setattr(
            shutil, "disk_usage", lambda path: SimpleNamespace(total=free, used=0, free=free)
        )
        model, optimizer = wrapped(a_transformer(), generous("nvme", tmp_path))
        stepped(optimizer, loss_of(model, language(0)))

    assert activation_nbytes(32) < 16 * MIB
    with pytest.raises(infinity.CapacityError, match="NVMe"):
        run(32 * KIB)
    run(32 * MIB)


@pytest.mark.parametrize(
    "loop", [two_live_graphs, a_graph_that_is_dropped, a_backward_in_parts, language_loop]
)
@both_homes
def test_from_the_third_step_on_nothing_grows(home, loop, tmp_path):
    """Method: the loop three times over, then three times more; no tier is charged more, and as
    many descriptors are open. The twin: a graph that is kept does take more."""
    model, optimizer = wrapped(a_transformer(), generous(home, tmp_path))
    seen = []
    for _ in range(6):
        for _ in loop(model, optimizer):
            pass
        peaks = {tier: account.peak_nbytes for tier, account in infinity.stats(model).tiers.items()}
        seen.append((peaks, len(os.listdir("/proc/self/fd"))))
    assert seen[2:] == seen[2:3] * 4
    before = infinity.stats(model).tiers["host"].peak_nbytes
    held = [loss_of(model, language(i)) for i in range(4)]
    assert home == "nvme" or infinity.stats(model).tiers["host"].peak_nbytes > before
    sum(held).backward()


@both_homes
def test_forwards_without_a_backward_leave_nothing(home, tmp_path):
    """Method: forwards whose losses are dropped; the charge stays that of one. On disk it may
    double once, for writes of one forward that have not ended."""
    model, _ = wrapped(a_transformer(), generous(home, tmp_path))
    loss_of(model, language(0))
    before, disk = (
        infinity.stats(model).tiers[home].peak_nbytes,
        parts_of(model).activations.home._disk,
    )
    for step in range(6):
        while disk is not None and disk._staging.wait_for_transfer():
            pass
        loss_of(model, language(step))
    most = 2 * before if home == "nvme" else before
    assert before <= infinity.stats(model).tiers[home].peak_nbytes <= most


@pytest.mark.parametrize("home", [None, "device", "auto", "host"])
def test_a_graph_that_nobody_holds_is_freed(home, tmp_path):
    """Method: weak references to what the layers return in a forward (with gradients, as
    evaluations often are) whose loss is dropped; none is alive afterwards. Plain torch is one of
    the cases."""
    model = seeded(SEED, a_transformer())
    if home is not None:
        config = configuration(home, a_transformer(), tmp_path)
        if home == "auto":
            config["device_memory"] += 2 * MIB
        model, _ = infinity.wrap_model(model, adamw(model, LR), config)
    refs: dict[str, StorageWeakRef] = {}
    for name, module in model.named_modules():
        module.register_forward_hook(
            lambda m, args, out, name=name: refs.update(
                {name: StorageWeakRef(out.untyped_storage())}
            )
        )
    loss = loss_of(model, language(0))
    assert home == "host" or any(not ref.expired() for ref in refs.values())
    del loss
    gc.collect()
    assert [name for name, ref in refs.items() if not ref.expired()] == []


@pytest.mark.parametrize("holding", ["nothing", "a graph", "a tensor"])
@both_homes
def test_everything_is_given_back_with_the_model(home, holding, tmp_path):
    """Method: in a child, 48 MiB of activations; when model and optimizer (and what is held of the
    graph) are dropped, descriptors, files and all but a few MiB of memory are gone."""

    def resident() -> int:
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def work():
        build = lambda: Between(lambda h: h.sin().cos().tanh())

        def once(rows: int):
            model, optimizer = wrapped(build, generous(home, tmp_path))
            x = rows_of(0, rows, WIDTH).requires_grad_()
            stepped(optimizer, model(x).square().mean())
            loss = model(x).square().mean()
            engine = weakref.ref(parts_of(model).engine)
            held = {"nothing": None, "a graph": loss, "a tensor": x}[holding]
            del model, optimizer, loss, x
            gc.collect()
            assert engine() is None
            return held

        once(1000)
        gc.collect()
        descriptors, before = sorted(os.listdir("/proc/self/fd")), resident()
        held = once(60_000)
        assert leftovers(tmp_path) == []
        assert sorted(os.listdir("/proc/self/fd")) == descriptors
        del held
        gc.collect()
        return (resident() - before) / MIB

    assert in_child(work) < 16


@both_homes
def test_a_backward_after_unwrapping_is_right_or_refused(home, tmp_path):
    """Method: unwrap between forward and backward. Plain torch's gradients, or an error that names
    what to do."""

    def gradient(kind: str | None):
        model = seeded(SEED, a_transformer())
        optimizer = adamw(model, LR)
        if kind is not None:
            model, optimizer = infinity.wrap_model(model, optimizer, generous(kind, tmp_path))
        torch.manual_seed(0)
        loss = loss_of(model, language(0))
        if kind is not None:
            model, optimizer = infinity.unwrap_model(model, optimizer)
        loss.backward()
        return model.norm.weight.grad.clone()

    try:
        found = gradient(home)
    except (infinity.InfinityError, RuntimeError) as error:
        assert "NoneType" not in str(error)
        return
    torch.testing.assert_close(found, gradient(None), rtol=1e-5, atol=1e-7)


def on_disk_only(folder: Path) -> dict[str, Any]:
    """Activations on disk through the smallest staging memory there is."""
    config = {
        "params": "host",
        "optimizer": "host",
        "activations": "nvme",
        "nvme_paths": [str(folder)],
    }
    model = transformer(SEED, blocks=2)
    return {"host_memory": least_host_memory(model, adamw(model, LR), config), **config}


refused_uring = native.uring_refusal()
ENGINES = [
    pytest.param(
        "uring", marks=pytest.mark.skipif(bool(refused_uring), reason=f"io_uring: {refused_uring}")
    ),
    "threads",
]


@pytest.mark.parametrize(
    "faults", ["", "seed=3,short_transfer=0.3,delay=0.1,reorder=0.3", "seed=4,short_transfer=0.9"]
)
@pytest.mark.parametrize("engine", ENGINES)
def test_io_engines_and_faults_that_heal_change_no_bit(engine, faults, right, tmp_path):
    """Method: each engine, with transfers shortened, delayed and reordered by seed, under the least
    host memory."""
    with environment(INFINITY_IO=engine, INFINITY_FAULTS=faults):
        found, _ = trained((a_transformer(), language_loop), on_disk_only(tmp_path))
    assert differing(found, right) == []
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("numel", [16_384, 16_385, 131_072, 131_073, 700_001])
def test_tensors_of_every_size_pass_through_the_smallest_staging(numel, tmp_path):
    """Method: tensors of 64 KiB to 2.7 MiB, of whole blocks and of one element more, through
    staging memory for half a MiB; several of them at once, so that reads ahead have to give way."""

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList(torch.ones(1) for _ in range(4))

        def forward(self, x):
            for scale in self.scales:
                x = (x * scale).sin() * scale.exp()
            return x

    def loop(model, optimizer):
        for step in range(2):
            yield stepped(optimizer, model(rows_of(step, numel)).square().mean())

    config = {
        "params": "host",
        "optimizer": "host",
        "activations": "nvme",
        "nvme_paths": [str(tmp_path)],
    }
    model = Large()
    config["host_memory"] = least_host_memory(model, adamw(model, LR), config)
    right, _ = trained((Large, loop), configuration("device", Large, tmp_path))
    found, has_moved = trained((Large, loop), config)
    assert differing(found, right) == []
    assert has_moved > 2 * 4 * 4 * numel
    assert config["host_memory"] < 2 * MIB


def until_an_error(
    faults: str, folder: Path
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor] | None, Exception | None]:
    """Losses of completed steps under faults, the weights where they can be had, and the error."""
    with environment(INFINITY_FAULTS=faults):
        model, optimizer = wrapped(a_transformer(), on_disk_only(folder))
        torch.manual_seed(SEED)
        losses, error = [], None
        try:
            for step in range(3):
                loss = loss_of(model, language(step))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
        except TYPED as caught:
            error = caught.with_traceback(None)  # or it would hold the model
            with pytest.raises(TYPED):  # nor may a later step go on from here
                stepped(optimizer, loss_of(model, language(step)))
        try:
            state = {name: value.clone() for name, value in model.state_dict().items()}
        except TYPED:
            state = None
        return losses, state, error


LASTING = {"eio": infinity.StorageError, "enospc": infinity.StorageError}
LASTING |= {"bit_flip": infinity.CorruptionError, "lost_write": infinity.CorruptionError}


@pytest.mark.parametrize("first", [0, 60])
@pytest.mark.parametrize("fault", LASTING)
def test_a_lasting_fault_ends_in_a_typed_error(fault, first, right, tmp_path):
    """Method: from one transfer on all fail; there is the error of its type, and what completed
    before is right."""
    losses, _, error = until_an_error(f"seed=1,{fault}=1.0,first_piece={first}", tmp_path)
    assert isinstance(error, LASTING[fault]), error
    assert str(error)
    assert fault not in ("eio", "enospc") or str(tmp_path) in str(error), error
    assert all(torch.equal(loss, right[f"yield {i}"]) for i, loss in enumerate(losses))
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fault", LASTING)
def test_a_passing_fault_never_gives_a_wrong_number(fault, seed, right, tmp_path):
    """Method: two in a hundred transfers fail; every completed step is right, and so are the
    weights after three."""
    losses, state, error = until_an_error(
        f"seed={seed},{fault}=0.02,first_piece={10 * seed}", tmp_path
    )
    assert all(torch.equal(loss, right[f"yield {i}"]) for i, loss in enumerate(losses))
    if error is None:
        assert (
            differing(
                state,
                {name: value for name, value in right.items() if not name.startswith("yield")},
            )
            == []
        )


def test_a_device_that_hangs_is_an_error(tmp_path):
    """Method: in a child, no transfer is ever answered; the step ends in a StorageError, not in a
    hang."""

    def work():
        with environment(INFINITY_IO_TIMEOUT="1"):
            return type(until_an_error("seed=1,hang=1.0", tmp_path)[2]).__name__

    assert in_child(work, seconds=60) == "StorageError"


def test_several_folders_hold_activations(tmp_path):
    """Method: two folders; the bits stay and both are emptied."""
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    config = on_disk_only(folders[0]) | {
        "nvme_paths": [str(folder) for folder in folders],
        "host_memory": None,
    }
    right, _ = trained(
        (a_transformer(), language_loop), configuration("device", a_transformer(), tmp_path)
    )
    found, _ = trained((a_transformer(), language_loop), config)
    assert differing(found, right) == []
    assert [leftovers(folder) for folder in folders] == [[], []]


@pytest.mark.parametrize("checksums", [True, False])
def test_losses_are_finite_and_equal_without_checksums(checksums, right, tmp_path):
    """Method: checksums on and off; the bits are those of the device."""
    found, _ = trained(
        (a_transformer(), language_loop),
        on_disk_only(tmp_path) | {"checksums": checksums, "host_memory": None},
    )
    assert differing(found, right) == []
    assert all(
        math.isfinite(value.item()) for name, value in found.items() if name.startswith("yield")
    )
