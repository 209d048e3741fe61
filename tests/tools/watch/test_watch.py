"""Watch: tells what a loop does, and changes nothing of it."""

from __future__ import annotations

import errno
import gc
import json
import time

import pytest
import torch
from containers import Lists, batches
from inside import parts_of
from models import at_home, seeded
from torch import nn

import infinity
from infinity.tools.watch import run_files
from infinity.tools.watch import watch as watch_module

SEED = 4


def make() -> tuple:
    torch.manual_seed(SEED)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)))
    return infinity.wrap_model(
        model, torch.optim.AdamW(model.parameters()), {"params": "host", "optimizer": "host"}
    )


def step(model, optimizer) -> torch.Tensor:
    loss = model(torch.ones(2, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def statuses(folder) -> list[dict]:
    return list(run_files.read(folder, run_files.STATUS))


def test_a_watched_loop_has_the_bits_of_one_that_is_not(tmp_path):
    """Method: three steps, watched at every unit, against three that are not."""
    plain = make()
    expected = [step(*plain) for _ in range(3)]
    watched = make()
    with infinity.Watch(watched[0], steps=3, folder=tmp_path, every=0.0) as watch:
        found = []
        for _ in range(3):
            found.append(step(*watched))
            watch.update(loss=found[-1].item(), tokens=2)
    assert all(map(torch.equal, found, expected))
    assert all(
        torch.equal(a, b)
        for a, b in zip(plain[0].state_dict().values(), watched[0].state_dict().values())
    )


def test_a_status_says_where_the_loop_is(tmp_path, monkeypatch):
    """Method: every status of two steps is kept; they name the units of forwards, and steps, tiers
    and edges."""
    seen = []
    write = run_files.write
    monkeypatch.setattr(
        run_files,
        "write",
        lambda folder, kind, rank, content: (
            seen.append((kind, content)),
            write(folder, kind, rank, content),
        ),
    )
    model, optimizer = make()
    with infinity.Watch(model, steps=2, folder=tmp_path, every=0.0) as watch:
        for _ in range(2):
            watch.update(loss=step(model, optimizer).item(), tokens=2)
    told = [content for kind, content in seen if kind == run_files.STATUS]
    assert {each["phase"] for each in told} >= {"starting", "forward", "step", "ended"}
    assert {each["unit"] for each in told if each["phase"] == "forward"} == {"0", "1", "2", "3"}
    last = told[-1]
    assert (
        last["step"] == last["steps"] == 2
        and last["remaining_seconds"] == 0
        and last["tokens_per_second"] > 0
    )
    assert (
        last["tiers"]["host"]["charged_nbytes"] > 0 and last["edges"]["host->device"]["nbytes"] > 0
    )
    (history,) = run_files.read(tmp_path, run_files.HISTORY)
    assert [point[0] for point in history["points"]] == [1, 2]


def test_a_unit_that_is_a_list_is_told_of_as_the_modules_inside_run(tmp_path, monkeypatch):
    """Method: what is told in a forward of lists. Twin: the units of modules, above."""
    told = []
    monkeypatch.setattr(infinity.Watch, "_tell", lambda self, *what, now=False: told.append(what))
    model = seeded(SEED, Lists)
    model, _ = infinity.wrap_model(model, None, {"params": "host"})
    with infinity.Watch(model, folder=tmp_path):
        model(batches()[0])
    forwards = [unit for phase, unit in told if phase == "forward"]
    assert list(dict.fromkeys(forwards)) == [*(f"layers.{n}" for n in range(6)), "rest:head"]


def test_it_writes_no_more_often_than_it_is_told(tmp_path, monkeypatch):
    writes = []
    monkeypatch.setattr(run_files, "write", lambda folder, kind, rank, content: writes.append(kind))
    model, optimizer = make()
    with infinity.Watch(model, folder=tmp_path, every=3600.0) as watch:
        for _ in range(5):
            step(model, optimizer)
            watch.update()
    assert writes.count(run_files.STATUS) == 2  # as it began and as it ended


def test_a_folder_that_cannot_be_written_ends_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    model, optimizer = make()
    with infinity.Watch(model, folder=tmp_path / "file" / "below", every=0.0) as watch:
        step(model, optimizer)
        watch.update(loss=float("nan"))


def test_a_loop_that_fails_says_so_and_nothing_listens_any_more(tmp_path):
    """Twin: while it is watched, two events are listened to, and no module has a hook for it."""
    model, _ = make()
    events = parts_of(model).job.events

    def counts() -> tuple[int, int]:
        listeners = [each for each in vars(events).values() if isinstance(each, list)]
        return (
            sum(map(len, listeners)),
            sum(len(module._forward_pre_hooks) for module in model.modules()),
        )

    listeners, hooks = counts()
    with pytest.raises(KeyError), infinity.Watch(model, folder=tmp_path):
        assert counts() == (listeners + 2, hooks)
        raise KeyError("mine")
    assert statuses(tmp_path)[0]["phase"] == "ended by KeyError"
    assert counts() == (listeners, hooks)


def test_a_model_that_is_unwrapped_meanwhile_ends_nothing(tmp_path):
    """Method: unwrapped inside the block, and collected before its watch is closed; the last status
    says that the loop is over, with the steps."""
    model, optimizer = make()
    with infinity.Watch(model, folder=tmp_path / "unwrapped", every=0.0) as watch:
        step(model, optimizer)
        watch.update(loss=1.0)
        infinity.unwrap_model(model)
        watch.update(loss=2.0)
    (status,) = statuses(tmp_path / "unwrapped")
    assert status["phase"] == "ended" and status["step"] == 2
    model, optimizer = make()
    watch = infinity.Watch(model, folder=tmp_path / "gone", every=0.0)
    del model, optimizer
    gc.collect()
    watch.close()
    assert statuses(tmp_path / "gone")[0]["phase"] == "ended"


def test_two_models_of_one_process_have_a_folder_each(tmp_path, monkeypatch):
    """Also: what is closed leaves its folder's name, and nothing in the engine."""
    monkeypatch.setenv("INFINITY_CACHE", str(tmp_path))
    model, _ = make()
    other, _ = make()
    listeners = parts_of(model).events.unit_landed
    before = list(listeners)
    with infinity.Watch(model) as first, infinity.Watch(other) as second:
        assert (
            first.folder != second.folder
            and len(statuses(first.folder)) == len(statuses(second.folder)) == 1
        )
        assert len(listeners) == len(before) + 1
    with infinity.Watch(model) as again:
        assert again.folder == first.folder
    again.close()
    assert listeners == before


def test_a_long_history_is_thinned(tmp_path, monkeypatch):
    monkeypatch.setattr(watch_module, "MOST_POINTS", 8)
    model, _ = make()
    with infinity.Watch(model, folder=tmp_path, every=3600.0) as watch:
        for _ in range(100):
            watch.update(loss=1.0)
    (history,) = run_files.read(tmp_path, run_files.HISTORY)
    steps = [point[0] for point in history["points"]]
    assert len(steps) <= 9 and steps == sorted(steps) and steps[-1] > 80


def test_a_model_that_is_not_wrapped_is_refused(tmp_path):
    with pytest.raises(infinity.UsageError, match="not wrapped"):
        infinity.Watch(nn.Linear(2, 2), folder=tmp_path)
    assert not list(tmp_path.iterdir()) and json.dumps({}) == "{}"


class Slow:
    """A loader of batches of 3 x 4 numbers that takes its time: 20 ms, and ten times as long as the
    step before it did, so that a busy machine does not make the step the slower one."""

    def __init__(self, count: int):
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self):
        step = 0.0
        for _ in range(self._count):
            time.sleep(max(0.02, 10 * step))
            begin = time.perf_counter()
            yield {"x": torch.ones(3, 4), "name": "batch"}
            step = time.perf_counter() - begin


def test_the_wait_for_data_is_an_edge(tmp_path):
    """Claim: its seconds and bytes, in `stats()` and the status; and it is named as the bottleneck.
    The twin: a loop that does not say where its data comes from has no such edge."""
    (model, optimizer), told = make(), []
    with infinity.Watch(model, folder=tmp_path / "watched") as watch:
        batches = watch.data(Slow(6))
        assert len(batches) == 6
        for batch in batches:
            assert batch["x"].shape == (3, 4)
            step(model, optimizer)
            told.append(infinity.stats(model).bottleneck)
    found = infinity.stats(model)
    assert found.edges["data"].stall_seconds >= 6 * 0.02
    assert found.edges["data"].nbytes == 6 * 3 * 4 * 4
    # Of any step: another one may be slower than it was before, on a busy machine.
    assert any("the data alone needs" in each for each in told)
    assert statuses(tmp_path / "watched")[-1]["edges"]["data"]["stall_seconds"] >= 6 * 0.02
    model, optimizer = make()
    step(model, optimizer)
    assert "data" not in infinity.stats(model).edges


def test_data_that_is_watched_changes_no_bit(tmp_path):
    def trained(watched: bool) -> torch.Tensor:
        model, optimizer = make()
        with infinity.Watch(model, folder=tmp_path / str(watched)) as watch:
            loader = torch.utils.data.DataLoader(range(8), batch_size=2, shuffle=True)
            torch.manual_seed(1)
            for _ in watch.data(loader) if watched else loader:
                step(model, optimizer)
        return torch.rand(3), next(iter(model.state_dict().values())).clone()

    assert all(map(torch.equal, trained(True), trained(False)))


def test_an_error_of_the_loader_is_the_loops(tmp_path):
    def broken():
        yield 1
        raise KeyError("of the data")

    model, _ = make()
    with infinity.Watch(model, folder=tmp_path / "watched") as watch:
        with pytest.raises(KeyError, match="of the data"):
            list(watch.data(broken()))
        with pytest.raises(infinity.UsageError, match="a int cannot be iterated over"):
            watch.data(3)


def add_average(model, optimizer, folder) -> None:
    infinity.ema(model, 0.9)


def add_and_remove(model, optimizer, folder) -> None:
    infinity.swa(model).remove()


def add_group(model, optimizer, folder) -> None:
    model[-1].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[-1].parameters())})


def keep_data(model, optimizer, folder) -> None:
    (folder / "data").write_bytes(bytes(1 << 16))
    data = infinity.data.NeverEvict([folder / "data"], memory="1MiB")
    model.kept = [data[0], data]


@pytest.mark.parametrize("home", ["device", "host", "nvme"])
@pytest.mark.parametrize("add", [add_average, add_and_remove, add_group, keep_data])
def test_the_memory_map_has_what_came_after_the_wrap(home, add, tmp_path):
    """Method: the plan of a watched run, before and after, beside stats(). Twin: as the model is
    wrapped no byte is without a part of its own."""
    torch.manual_seed(SEED)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    model[-1].requires_grad_(False)
    config = at_home(home, home, tmp_path)
    params = [param for param in model.parameters() if param.requires_grad]
    model, optimizer = infinity.wrap_model(model, torch.optim.AdamW(params), config)

    def shown() -> dict[str, dict]:
        return next(run_files.read(tmp_path / "run", run_files.PLAN))["tiers"]

    with infinity.Watch(model, folder=tmp_path / "run", every=0.0) as watch:
        first = shown()
        add(model, optimizer, tmp_path)
        watch.update()
        last = shown()
    assert not any(watch_module.LATER in of_tier["parts"] for of_tier in first.values())
    for tier, planned in infinity.stats(model).tiers.items():
        assert last[tier]["nbytes"] == planned.planned_nbytes == sum(last[tier]["parts"].values())
    if add is add_average:
        nbytes = sum(4 * param.numel() for param in params)
        assert (
            nbytes <= last[home]["parts"]["average"] == last[home]["nbytes"] - first[home]["nbytes"]
        )


@pytest.mark.parametrize("folder", ["/proc/none", "a file/below", "full"])
def test_a_status_that_cannot_be_written_is_told_once(folder, tmp_path, caplog, monkeypatch):
    """With the way out, and the training goes on. Twin: of one that is written nothing is told."""

    def refusing(*given) -> None:
        raise OSError(errno.ENOSPC, "no space")

    (tmp_path / "a file").write_text("")
    model, optimizer = make()
    for where in (tmp_path / folder, tmp_path / "fine"):
        caplog.clear()
        with (
            infinity.Watch(model, folder=where, every=0.0) as watch,
            monkeypatch.context() as patch,
        ):
            if where.name == "full":
                patch.setattr(run_files, "write", refusing)
            for _ in range(2):
                watch.update(loss=step(model, optimizer).item())
        told = [each for each in caplog.messages if "no status is written" in each]
        assert len(told) == (where.name != "fine")
        assert not told or "INFINITY_CACHE" in told[0]
