"""The timeline of a run, whatever becomes of the run, and what `infinity trace` says of it.

Words used here: **timeline**: the file that `Config(trace=...)` names. **events**: its pieces of
work. **killed**: ended in a child (`models.py`) without a chance to close anything. **naive**:
computed second by second over whole numbers.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import math
import os
import resource
import signal
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inside import parts_of
from models import (
    at_home,
    differing,
    in_child,
    leftovers,
    loss_of,
    seeded,
    start_child,
    tokens,
    transformer,
)
from runs import adamw
from torch import nn

import infinity
from infinity.core.machine.traffic import COLLECTIVES, EDGES, PAST_HOST
from infinity.ranks.parallel_dims import ParallelDims
from infinity.tools import cli
from infinity.tools.watch import trace as summarise
from infinity.tools.watch.timeline import LANES, Timeline, trace_path

SEED = 90
LR = 1e-2
STEPS = 3

pytestmark = pytest.mark.timeout(120)


def trained(
    folder: Path, trace: Any, *, steps: int = STEPS, **more: Any
) -> tuple[nn.Module, torch.optim.Optimizer, dict]:
    """A model at home on disk after some steps, with its losses."""
    model = transformer(SEED, blocks=2)
    config = at_home("nvme", "nvme", folder, trace=trace, **more)
    model, optimizer = infinity.wrap_model(model, adamw(model, LR), config)
    losses = {}
    torch.manual_seed(SEED)
    for step in range(steps):
        loss = loss_of(model, tokens(SEED + step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[f"loss {step}"] = loss.detach()
    return model, optimizer, losses


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "timeline.json"


@pytest.fixture
def ended(swap, path) -> Path:
    """The timeline of a run that ended as it should."""
    infinity.unwrap_model(*trained(swap, path)[:2])
    return path


def run_trace(capsys, *arguments: Any) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of `infinity trace`."""
    capsys.readouterr()
    status = cli.main(["trace", *map(str, arguments)])
    return status, *capsys.readouterr()


def work_of(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text()) if event["ph"] == "X"]


def units_of(folder: Path) -> set[str]:
    model = transformer(SEED, blocks=2)
    model, _ = infinity.wrap_model(model, adamw(model, LR), at_home("host", "host", folder))
    return {unit.name for unit in parts_of(model).units}


# --------------------------------------------------------------------------------------------------
# The file
# --------------------------------------------------------------------------------------------------


def test_the_timeline_is_json_with_every_lane_and_every_unit(ended, swap):
    """Method: three steps from disk, unwrapped; the file is one JSON array in Chrome's format, with
    all lanes by name, and in every step each unit's forward, backward and update."""
    events = json.loads(ended.read_text())
    names = {
        event["tid"]: event["args"]["name"]
        for event in events
        if event.get("name") == "thread_name"
    }
    assert set(names.values()) >= set(LANES) - {
        "stalled",
        PAST_HOST,
        *COLLECTIVES,
    }  # alone, nothing passes between ranks
    assert all(names[event["tid"]] == event["cat"] for event in work_of(ended))
    for event in work_of(ended):
        assert event.keys() >= {"pid", "tid", "ts", "dur", "name", "cat"}
        assert math.isfinite(event["ts"]) and math.isfinite(event["dur"]) and event["dur"] >= 0
    units = units_of(swap)
    for lane in ("forward", "backward", "optimizer"):
        found = [event["name"] for event in work_of(ended) if event["cat"] == lane]
        assert set(found) == units, lane
        assert all(found.count(unit) >= STEPS for unit in units), (lane, found)
    for lane in ("nvme->host", "host->device"):
        assert {event["name"] for event in work_of(ended) if event["cat"] == lane} >= units, lane
    assert [event["name"] for event in work_of(ended) if event["cat"] == "step"] == [
        f"step {i + 1}" for i in range(STEPS)
    ]


def test_a_row_never_holds_two_things_at_once(ended):
    """Method: events of one row in the order of their begin; each ends before the next begins, but
    for rounding."""
    rows: dict[int, list[tuple[float, float]]] = {}
    for event in work_of(ended):
        rows.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for row in rows.values():
        row.sort()
        assert all(end <= begin + 0.01 for (_, end), (begin, _) in zip(row, row[1:]))


@pytest.mark.parametrize("how", ["unwrapped", "dropped", "dropped after an exception"])
def test_the_timeline_is_whole_however_the_run_ends(how, swap, path):
    """Method: unwrap, drop, and drop after a failed forward; the file is JSON, and has every step's
    updates."""
    model, optimizer, _ = trained(swap, path)
    units = {unit.name for unit in parts_of(model).units}
    if how == "unwrapped":
        infinity.unwrap_model(model, optimizer)
    if how == "dropped after an exception":
        with pytest.raises(IndexError):
            loss_of(model, tokens(1) + 1000)
    del model, optimizer
    gc.collect()
    found = [event["name"] for event in work_of(path) if event["cat"] == "optimizer"]
    assert {unit: found.count(unit) for unit in units} == dict.fromkeys(units, STEPS)
    assert leftovers(swap) == []


def kill(how: str) -> None:
    if how == "os._exit":
        os._exit(3)
    os.kill(os.getpid(), getattr(signal, how))


@pytest.mark.parametrize("how", ["os._exit", "SIGKILL", "SIGTERM"])
def test_the_timeline_of_a_killed_job_can_be_read(how, swap, path, capsys):
    """Method: a child that is killed after three steps; `infinity trace` reads all of them."""

    def work() -> None:
        held = trained(swap, path)
        kill(how)

    child, reader = start_child(work)
    with os.fdopen(reader, "rb") as pipe:
        assert pipe.read() == b""
    os.waitpid(child, 0)
    with pytest.raises(ValueError):
        json.loads(path.read_text())
    status, out, err = run_trace(capsys, path, "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["steps"] == STEPS
    assert {"forward", "backward", "step"} <= set(json.loads(out)["lanes"])


def test_a_timeline_cut_anywhere_gives_what_was_whole(ended, tmp_path):
    """Method: the file cut at every byte of its first 3000 and last 300; what is read is the
    beginning of all events, or a ConfigError where there is none yet."""
    text, cut = ended.read_text(), tmp_path / "cut"
    whole = summarise.read(ended)
    for length in [*range(3000), *range(len(text) - 300, len(text))]:
        cut.write_text(text[:length])
        try:
            found = summarise.read(cut)
        except infinity.ConfigError:
            found = []
        assert found == whole[: len(found)]
        assert len(found) >= text[:length].count('"ph": "X"') - 1


def test_tracing_changes_no_bit(swap, path, caplog):
    """Method: losses, weights and moments with a timeline, without one, and with one on a full
    disk."""

    def run(trace: Any) -> dict[str, torch.Tensor]:
        model, optimizer, found = trained(swap, trace)
        moments = {
            f"{i} {k}": v for i, s in optimizer.state_dict()["state"].items() for k, v in s.items()
        }
        return found | moments | model.state_dict()

    right = run(None)
    assert differing(run(path), right) == []
    with caplog.at_level("WARNING", "infinity"):
        assert differing(run("/dev/full"), right) == []
    (said,) = [record.getMessage() for record in caplog.records]
    assert "/dev/full ends here: No space left on device" in said
    assert work_of(path)


def test_a_disk_that_fills_up_ends_the_timeline_not_the_training(swap, path, capsys):
    """Method: in a child, files may have 12 KiB; training goes on, and what was written can be
    read."""

    def work() -> bool:
        def run(trace: Path | None) -> dict[str, torch.Tensor]:
            model = transformer(SEED, blocks=2)
            model, optimizer = infinity.wrap_model(
                model, adamw(model, LR), at_home("host", "host", swap, trace=trace)
            )
            torch.manual_seed(SEED)
            for step in range(8):
                loss_of(model, tokens(step)).backward()
                optimizer.step()
                optimizer.zero_grad()
            return model.state_dict()

        right = run(None)
        resource.setrlimit(resource.RLIMIT_FSIZE, (12 * 1024, resource.RLIM_INFINITY))
        return differing(run(path), right) == []

    assert in_child(work)
    assert 0 < path.stat().st_size <= 12 * 1024
    assert run_trace(capsys, path)[0] == 0


def test_a_run_without_steps_has_a_timeline(path, capsys):
    """Method: inference from the host; the summary says no steps and draws."""
    model, _ = infinity.wrap_model(
        transformer(SEED, blocks=2), None, {"params": "host", "trace": path}
    )
    with torch.no_grad():
        model(tokens(0))
    infinity.unwrap_model(model)
    status, out, _ = run_trace(capsys, path, "--json", "--svg", path.with_suffix(".svg"))
    assert status == 0 and json.loads(out)["steps"] == 0
    assert set(json.loads(out)["lanes"]) >= {"forward", "host->device"}


def test_a_second_run_on_the_same_path_replaces_the_first(swap, path):
    """Method: five steps, then one, with the same path; the file is the second run's."""
    infinity.unwrap_model(*trained(swap, path, steps=5)[:2])
    infinity.unwrap_model(*trained(swap, path, steps=1)[:2])
    assert [event["name"] for event in work_of(path) if event["cat"] == "step"] == ["step 1"]


@pytest.mark.parametrize("micro_batch", [None, 2])
def test_activations_have_their_place_in_the_timeline(micro_batch, swap, path):
    """Method: activations at home on disk, with chunks and without; their moves are events by that
    name."""
    model = transformer(SEED, blocks=2)
    config = at_home("nvme", "nvme", swap, trace=path, activations="nvme", micro_batch=micro_batch)
    model, optimizer = infinity.wrap_model(model, adamw(model, LR), config)
    loss_of(model, tokens(0, rows=64 if micro_batch is None else 6)).backward()
    optimizer.step()
    infinity.unwrap_model(model, optimizer)
    moved = {event["cat"] for event in work_of(path) if event["name"] == "activations"}
    assert micro_batch is not None or moved == {"nvme->host", "host->device", "device->host"}
    assert {event["cat"] for event in work_of(path)} >= {"forward", "backward", "optimizer"}


# --- what is refused ---


UNWRITABLE = {
    "no such folder": lambda folder: folder / "none" / "timeline",
    "a folder": lambda folder: folder,
    "below a file": lambda folder: Path(__file__) / "timeline",
    "too long a name": lambda folder: folder / ("x" * 300),
    "nothing": lambda folder: "",
    "a null character": lambda folder: f"{folder}/a\0b",
    "a number": lambda folder: 12345,
    "a list": lambda folder: [str(folder / "timeline")],
}


@pytest.mark.parametrize("make", UNWRITABLE.values(), ids=UNWRITABLE)
def test_a_path_that_cannot_be_written_is_refused_before_anything_changed(make, swap):
    """Method: a ConfigError that names the key; model and optimizer are plain, no descriptor or
    file is left, and the same pair wraps with a path that can be written."""
    model = transformer(SEED, blocks=2)
    optimizer = adamw(model, LR)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    descriptors = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(infinity.ConfigError, match="trace"):
        infinity.wrap_model(model, optimizer, at_home("nvme", "nvme", swap, trace=make(swap)))
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert type(optimizer) is torch.optim.AdamW
    assert differing(dict(model.state_dict()), before) == []
    assert leftovers(swap) == []
    assert sorted(os.listdir("/proc/self/fd")) == descriptors
    infinity.unwrap_model(
        *infinity.wrap_model(
            model, optimizer, at_home("nvme", "nvme", swap, trace=swap / "timeline")
        )
    )
    assert work_of(swap / "timeline") == []


def test_a_failed_wrap_closes_its_timeline(swap, path):
    """Method: a wrap that fails after the timeline was opened (the disk refuses); as many
    descriptors are open."""
    model = transformer(SEED, blocks=2)
    optimizer = adamw(model, LR)
    missing = swap / "file"
    missing.write_text("")
    descriptors = sorted(os.listdir("/proc/self/fd"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INFINITY_FAULTS", "seed=1,eio=1.0")
        with pytest.raises(infinity.StorageError):
            infinity.wrap_model(model, optimizer, at_home("nvme", "nvme", swap, trace=path))
    gc.collect()
    assert sorted(os.listdir("/proc/self/fd")) == descriptors


# --- forked children ---


def waited_for(child: int, seconds: float = 5) -> int | None:
    """The exit status of a child; None after a hang, which ends it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


@pytest.mark.parametrize("end", ["os._exit", "exit handlers", "collection", "use", "step"])
def test_a_forked_child_does_not_write(end, swap, path):
    """Method: with events waiting in the buffer, fork a child that ends at once, runs its exit
    handlers, collects the model, or tries to use model or optimizer, which is refused; the child
    ends, the file has the bytes it had, and the parent trains on and its file is whole in the
    end."""

    def work() -> None:
        model, optimizer, _ = trained(swap, path, steps=1)
        with torch.no_grad():
            model(tokens(7))  # events that are not in the file yet
        before = path.read_bytes()
        child = os.fork()
        if not child:
            try:
                if end == "exit handlers":
                    atexit._run_exitfuncs()
                elif end == "collection":
                    del model, optimizer
                    gc.collect()
                elif end == "use":
                    for _ in range(200):
                        for attempt in (
                            lambda: model(tokens(0)),
                            model.state_dict,
                            optimizer.state_dict,
                        ):
                            with contextlib.suppress(infinity.UsageError):
                                attempt()
                                os._exit(1)
                elif end == "step":
                    with contextlib.suppress(infinity.UsageError):
                        for _ in range(3):
                            optimizer.step()
                        os._exit(1)
            except BaseException:  # noqa: BLE001 - the parent sees the status
                os._exit(2)
            finally:
                os._exit(0)
        status = waited_for(child)
        assert path.read_bytes() == before
        loss_of(model, tokens(8)).backward()
        infinity.unwrap_model(model, optimizer)
        assert status == 0, (
            f"the child ended with status {status}: 1 says that it was let, None that it hung"
        )

    in_child(work, seconds=30)
    assert json.loads(path.read_text())[-1]["args"] == {"labels": "ended"}
    names = [json.dumps(event) for event in work_of(path)]
    assert len(set(names)) == len(names)


def test_a_forked_childs_events_do_not_reach_the_file(path):
    """Method: a child adds a thousand events to its copy of the timeline, flushes and closes it;
    the file stays."""
    timeline = Timeline(path)
    timeline.add("forward", "the parent's", 0.0, 1.0)
    child = os.fork()
    if not child:
        try:
            for i in range(1000):
                timeline.add("forward", "the child's", i, i + 1)
            timeline.flush()
            timeline.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert path.read_bytes() == b""
    timeline.close()
    assert [event["name"] for event in work_of(path)] == ["the parent's"]


# --- Timeline by itself ---


NAMES = ["plain", "<&'\">", "ünïcödé", "\u2028 new\nline", 'quote" \\ backslash', "]", "],", "{"]


def test_any_name_comes_through(path, tmp_path, capsys):
    """Method: names with quotes, markup, line ends and brackets; they are read as they were, before
    and after the end."""
    timeline = Timeline(path)
    for i, name in enumerate(NAMES):
        timeline.add("forward", name, i, i + 0.5, detail=name)
    timeline.flush()
    assert [event["name"] for event in summarise.read(path)] == NAMES
    timeline.close()
    assert [event["name"] for event in summarise.read(path)] == NAMES
    assert [event["args"]["detail"] for event in work_of(path)] == NAMES
    timeline.close()  # a second time
    timeline.add("forward", "late", 0, 1)
    timeline.flush()
    assert [event["name"] for event in work_of(path)] == NAMES
    picture = tmp_path / "picture.svg"
    assert run_trace(capsys, path, "--svg", picture)[0] == 0
    titles = [element.text for element in ET.parse(picture).iter() if element.tag.endswith("title")]
    assert [title.rsplit(",", 1)[0] for title in titles] == NAMES


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(LANES), st.integers(0, 50), st.integers(0, 20)), max_size=40)
)
def test_rows_are_of_one_lane_and_never_hold_two_things_at_once(tmp_path_factory, works):
    """Method: random work in random lanes, not in order; every row has one lane's name and nothing
    overlaps in it."""
    path = tmp_path_factory.mktemp("timeline") / "timeline"
    timeline = Timeline(path)
    for lane, start, duration in works:
        timeline.add(lane, "work", start, start + duration)
    timeline.close()
    events = json.loads(path.read_text())
    path.unlink()
    names = [
        (event["tid"], event["args"]["name"])
        for event in events
        if event.get("name") == "thread_name"
    ]
    assert len(dict(names)) == len(names)
    taken: dict[int, set[int]] = {}
    for event, (lane, start, duration) in zip([e for e in events if e["ph"] == "X"], works):
        assert dict(names)[event["tid"]] == lane
        seconds = set(range(start, start + duration))
        assert not seconds & taken.setdefault(event["tid"], set())
        taken[event["tid"]] |= seconds


# --------------------------------------------------------------------------------------------------
# infinity trace
# --------------------------------------------------------------------------------------------------


def x(**changes: Any) -> str:
    event = {"pid": 1, "ph": "X", "name": "unit", "cat": "forward", "tid": 0, "ts": 1.0, "dur": 2.0}
    return json.dumps({key: value for key, value in (event | changes).items() if value is not ...})


GARBAGE: dict[str, str | bytes] = {
    "nothing": "",
    "an open bracket": "[",
    "an empty array": "[\n]\n",
    "text": "this is not a timeline\nat all\n",
    "bytes": bytes(range(128, 256)) * 8,
    "zeros": b"\0" * 4096,
    "another JSON": '{"theme": "io", "rows": []}',
    "an array of numbers": "[\n1,\n2\n]",
    "an array of texts": '[\n"a",\n"b"\n]',
    "metadata alone": '[\n{"ph": "M", "name": "process_name"},\n]',
    "garbage between": f"[\n{x()},\nnonsense,\n{x()}\n]",
    "no phase": f'[\n{x()},\n{{"ts": 1}},\n{x()}\n]',
    "no time": f"[\n{x()},\n{x(ts=...)},\n{x()}\n]",
    "no name": f"[\n{x()},\n{x(name=...)},\n{x()}\n]",
    "text as time": f"[\n{x()},\n{x(ts='soon')},\n{x()}\n]",
    "no number as time": f"[\n{x()},\n{x(ts=math.nan)},\n{x()}\n]",
    "infinity as duration": f"[\n{x()},\n{x(dur=math.inf)},\n{x()}\n]",
    "an immense number": (
        f"[\n{x()},\n{x(ts=1).replace('1.0', '1' + '0' * 400).replace(': 1,', ': 1' + '0' * 400 + ',')},\n{x()}\n]"  # noqa: E501
    ),
    "deep brackets": "[\n" + "[" * 100_000 + "\n" + x() + "\n]",
}


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_one_message_and_status_two(content, path, capsys):
    """Method: files that are no timelines, and timelines with one bad line between good ones;
    status 2, nothing on stdout, one line that names the file."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    status, out, err = run_trace(capsys, path, "--json", "--svg", path.with_suffix(".svg"))
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1 and err.startswith("infinity trace: ") and str(path) in err
    assert len(err) < 2000
    assert not path.with_suffix(".svg").exists()


ARGUMENTS = {
    "no such file": ["{folder}/none"],
    "a folder": ["{folder}"],
    "a picture in no folder": ["{file}", "--svg", "{folder}/none/a.svg"],
    "a picture over a folder": ["{file}", "--svg", "{folder}"],
    "negative steps": ["{file}", "--steps", "-1"],
    "very negative steps": ["{file}", "--steps=-100"],
    "half a step": ["{file}", "--steps", "0.5"],
    "no file": [],
    "two files": ["{file}", "{file}"],
}


@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS)
def test_bad_arguments_are_a_message_and_status_two(arguments, ended, tmp_path, capsys):
    """Method: paths that do not work and numbers that mean nothing; status 2 and no traceback."""
    filled = [argument.format(folder=tmp_path, file=ended) for argument in arguments]
    status, _, err = run_trace(capsys, *filled)
    assert status == 2
    assert err and "Traceback" not in err


def test_the_summary_adds_up(ended, capsys):
    """Method: the JSON against the events, and the text against the JSON."""
    status, out, err = run_trace(capsys, ended, "--json")
    found = json.loads(out)
    assert (status, err, found["steps"]) == (0, "", STEPS)
    events = work_of(ended)
    first, last = (
        min(event["ts"] for event in events),
        max(event["ts"] + event["dur"] for event in events),
    )
    assert found["seconds"] == pytest.approx((last - first) / 1e6, abs=1e-5)
    assert set(found["lanes"]) == {event["cat"] for event in events}
    for lane, of_lane in found["lanes"].items():
        of_events = [event for event in events if event["cat"] == lane]
        assert of_lane["events"] == len(of_events)
        assert of_lane["busy_seconds"] <= sum(event["dur"] for event in of_events) / 1e6 + 1e-5
        assert 0 <= of_lane["share"] <= 1 and 0 <= of_lane["under_compute"] <= 1 + 1e-9
    assert found["lanes"]["forward"]["under_compute"] == pytest.approx(1)
    waits = list(found["waited_for"].values())
    assert waits == sorted(waits, reverse=True) and len(waits) <= 5
    assert set(found["waited_for"]) <= {
        event["name"] for event in events if event["cat"] == "stalled"
    }
    status, out, _ = run_trace(capsys, ended)
    assert status == 0 and f"{STEPS} steps" in out
    assert all(f"\n{lane} " in out for lane in found["lanes"])


@pytest.mark.parametrize("count", [1, 2, STEPS, STEPS + 5, 0])
def test_the_last_steps_alone(count, ended, capsys):
    """Method: --steps N; so many steps, whose span is theirs, and fewer events than in all."""
    whole = json.loads(run_trace(capsys, ended, "--json")[1])
    found = json.loads(run_trace(capsys, ended, "--json", "--steps", count)[1])
    wanted = min(count, STEPS) or STEPS
    assert found["steps"] == wanted
    if count in (1, 2):
        steps = sorted(
            (event["ts"], event["ts"] + event["dur"])
            for event in work_of(ended)
            if event["cat"] == "step"
        )
        assert found["seconds"] >= (steps[-1][1] - steps[-count][0]) / 1e6 - 1e-5
        assert found["seconds"] < whole["seconds"]
        assert found["lanes"]["forward"]["events"] < whole["lanes"]["forward"]["events"]
    elif not count:
        assert found == whole


def test_the_picture_is_well_formed(ended, tmp_path, capsys):
    """Method: parse it; a rectangle with a title for every event and the name of every lane, all
    inside the picture."""
    picture = tmp_path / "picture.svg"
    assert run_trace(capsys, ended, "--svg", picture)[0] == 0
    root = ET.parse(picture).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    width, height = float(root.get("width")), float(root.get("height"))
    marks = [element for element in root if element.tag.endswith("rect") and len(element)]
    assert len(marks) == len(work_of(ended))
    for mark in marks:
        assert 0 <= float(mark.get("x")) <= width and 0 <= float(mark.get("y")) <= height
        assert float(mark.get("x")) + float(mark.get("width")) <= width + 1
    texts = {element.text for element in root.iter() if element.tag.endswith("text")}
    assert texts >= {event["cat"] for event in work_of(ended)}


def test_a_control_character_in_a_name_does_not_spoil_the_picture(path, tmp_path, capsys):
    """Method: a module may be called anything without a dot; XML has no way to write some
    characters."""

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("\x1b[1m", "\x00", "ok"):
                self.add_module(name, nn.Linear(300, 300))

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            for part in self.children():
                given = part(given)
            return given

    model = seeded(SEED, Parts)
    model, _ = infinity.wrap_model(model, None, {"params": "host", "trace": path})
    with torch.no_grad():
        model(torch.ones(1, 300))
    infinity.unwrap_model(model)
    assert {"\x1b[1m", "\x00", "ok"} <= {event["name"] for event in work_of(path)}
    assert run_trace(capsys, path, "--svg", tmp_path / "picture.svg")[0] == 0
    ET.parse(tmp_path / "picture.svg")


# --- intervals ---


intervals = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda drawn: (drawn[0], sum(drawn))),
    max_size=12,
)


def seconds_of(given: list[tuple[float, float]]) -> set[int]:
    return {second for begin, end in given for second in range(begin, end)}


def is_disjoint(given: list[tuple[float, float]]) -> bool:
    return all(begin <= end for begin, end in given) and all(
        one[1] < other[0] for one, other in zip(given, given[1:])
    )


@settings(max_examples=300, deadline=None)
@given(intervals, intervals)
def test_union_common_and_length_equal_the_naive(one, other):
    """Method: random intervals over whole seconds, empty ones and neighbours among them, against
    sets of seconds."""
    first, second = summarise.union(one), summarise.union(iter(other))
    assert seconds_of(first) == seconds_of(one) and is_disjoint(first)
    assert summarise.length(first) == len(seconds_of(one))
    both = summarise.common(first, second)
    assert seconds_of(both) == seconds_of(one) & seconds_of(other) and is_disjoint(both)
    assert summarise.length(both) == len(seconds_of(one) & seconds_of(other))
    assert summarise.common(second, first) == both
    assert summarise.union(first) == first


lanes_of_work = st.lists(
    st.tuples(st.sampled_from([*LANES, "another"]), st.integers(0, 40), st.integers(0, 12)),
    min_size=1,
    max_size=30,
)


@settings(max_examples=150, deadline=None)
@given(lanes_of_work, st.integers(0, 5))
def test_summary_and_picture_of_any_events(works, count):
    """Method: random events; busy time, shares and time under compute against sets of seconds, for
    all steps and for the last; and a picture that parses."""
    events = [
        {"lane": lane, "name": "unit", "start": begin, "end": begin + more}
        for lane, begin, more in works
    ]
    chosen = summarise.last_steps(events, count)
    steps = sorted(event["start"] for event in events if event["lane"] == "step")
    if count and steps:
        since = steps[-min(count, len(steps))]
        assert all(event["start"] >= since and event["end"] >= event["start"] for event in chosen)
        assert sum(event["lane"] == "step" for event in chosen) >= min(count, len(steps))
    found = summarise.summary(chosen)
    compute = seconds_of(
        [(e["start"], e["end"]) for e in chosen if e["lane"] in ("forward", "backward")]
    )
    for lane, of_lane in found["lanes"].items():
        busy = seconds_of(
            [(event["start"], event["end"]) for event in chosen if event["lane"] == lane]
        )
        assert of_lane["busy_seconds"] == len(busy)
        assert of_lane["under_compute"] == pytest.approx(
            len(busy & compute) / len(busy) if busy else 0
        )
        assert 0 <= of_lane["share"] <= 1
    ET.fromstring(summarise.draw(chosen))


def test_lanes_of_extensions_are_drawn():
    """Method: a picture of the engine's lanes and of two others has all of them, the engine's
    first. Twin: a lane without an event is not there."""
    events = [
        {"lane": lane, "name": "work", "start": 0.0, "end": 1.0}
        for lane in ("polish", "forward", "data loading")
    ]
    picture = summarise.draw(events)
    places = [picture.index(f">{lane}<") for lane in ("forward", "polish", "data loading")]
    assert places == sorted(places) and ">backward<" not in picture


def test_edges_have_lanes():
    """Method: every edge that traffic is counted on has a lane of its own, once."""
    assert set(EDGES) <= set(LANES) and len(set(LANES)) == len(LANES)


def test_each_rank_has_a_timeline_of_its_own():
    """Twin: a rank that is alone has the name that was given."""
    assert trace_path(Path("a/trace.json"), ParallelDims()) == "a/trace.json"
    ranks = SimpleNamespace(alone=False, world_rank=3)
    assert trace_path("a.b/trace.json", ranks) == "a.b/trace-rank3.json"
