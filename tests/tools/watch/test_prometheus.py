"""`infinity top --prometheus`: the text that Prometheus reads, from files and from a port."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from infinity.core.machine.kernel import process_space
from infinity.errors import ConfigError, StorageError
from infinity.tools.cli import main
from infinity.tools.watch import prometheus, run_files
from infinity.tools.watch.prometheus import (
    METRICS,
    RUNNING,
    TYPE,
    place_of,
    server_of,
    text_of,
    write_file,
)
from infinity.tools.watch.top import look

DOCS = Path(__file__).parents[3] / "docs" / "watching.md"
STATUS = {
    "rank": 0,
    "at": 1764000000.5,
    "step": 7,
    "steps": 20,
    "loss": 2.5,
    "tokens_per_second": 100.0,
    "step_seconds": 0.25,
    "remaining_seconds": 3.25,
    "tiers": {
        "host": {
            "charged_nbytes": 10,
            "peak_nbytes": 20,
            "planned_nbytes": 30,
            "budget_nbytes": None,
        },
        "nvme": {"charged_nbytes": 5, "peak_nbytes": 5, "planned_nbytes": 5, "budget_nbytes": 9},
    },
    "edges": {
        "nvme->host": {"nbytes": 2**40, "rate": 1e9, "limit": 2e9, "stall_seconds": 1.5},
        "device->host": {"nbytes": 3, "rate": 0.0, "limit": None, "stall_seconds": 0.0},
    },
    "shares": {"compute": 0.75, "disk": 0.25},
    "audited_nbytes": {"updates": 4096},
}


def jobs(*statuses: dict, folder: str = "/runs/node7-1", running: bool = True) -> list[dict]:
    return [{"folder": folder, "running": running, "ranks": list(statuses)}]


def samples(text: str) -> dict[tuple, float]:
    """Reads the text by Prometheus' own parser: values by name and labels."""
    parser = pytest.importorskip("prometheus_client.parser")
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_text_has_every_figure_of_every_rank():
    """Method: two ranks, read by Prometheus' own parser. Twin: what a status lacks is left out."""
    now = {"at": time.time()}
    found = samples(text_of(jobs(STATUS, STATUS | now | {"rank": 1, "step": 6, "loss": None})))
    of = [("rank", "0"), ("run", "node7-1")]
    edge, tier = ("edge", "nvme->host"), ("tier", "host")
    assert found["infinity_running", ("run", "node7-1")] == 1
    over = samples(text_of(jobs(STATUS | {"phase": "ended: 7 steps"})))
    assert over["infinity_running", ("run", "node7-1")] == 0
    assert found["infinity_steps_total", *of] == 7
    assert found["infinity_steps_total", ("rank", "1"), ("run", "node7-1")] == 6
    assert found["infinity_loss", *of] == 2.5
    assert ("infinity_loss", ("rank", "1"), ("run", "node7-1")) not in found
    assert found["infinity_status_timestamp_seconds", *of] == 1764000000.5
    assert found["infinity_edge_bytes_total", edge, *of] == 2**40
    assert found["infinity_edge_limit_bytes_per_second", edge, *of] == 2e9
    assert found["infinity_tier_charged_bytes", *of, tier] == 10
    assert ("infinity_tier_budget_bytes", *of, tier) not in found
    assert found["infinity_tier_budget_bytes", *of, ("tier", "nvme")] == 9
    assert found["infinity_time_ratio", ("cause", "disk"), *of] == 0.25
    assert found["infinity_audited_bytes_total", ("kind", "updates"), *of] == 4096
    names = {name for name, *_ in found}
    assert names == {metric.name for metric in (*METRICS, RUNNING)}


@pytest.mark.parametrize("here", [True, False])
def test_a_silent_run_is_told_by_the_age_of_its_last_write(here, tmp_path, capsys):
    """Method: a run of this process and one of another host, whose last write is ever older; top
    and the text of Prometheus say the same. Twins: fresh news, and a rank that ended."""
    process = run_files.this_process()
    mine = {"pid": process.pid, "started": process.started, "space": process_space()}
    mine["host"] = os.uname().nodename
    status = STATUS | (mine if here else mine | {"space": "another-boot pid:[1]"})
    said, of = {}, (("rank", "0"), ("run", tmp_path.name))
    for age, phase in ((0, "step"), (100, "step"), (4000, "step"), (4000, "ended: 7 steps")):
        told = status | {"at": time.time() - age, "phase": phase}
        run_files.write(tmp_path, run_files.STATUS, 0, told)
        found = samples(text_of(look(tmp_path)))
        assert age <= found["infinity_status_age_seconds", *of] < age + 60
        assert found["infinity_stalled", *of] == (age > 0 and phase == "step")
        is_on = found["infinity_running", ("run", tmp_path.name)]
        assert is_on == (phase == "step" and (here or age <= 300))
        assert main(["top", "--once", str(tmp_path)]) == 0
        said[age, phase] = " ".join(capsys.readouterr().out.split())
    assert "running" in said[0, "step"] and "no news" not in said[0, "step"]
    where = "its process runs" if here else "its host may tell more"
    for age in (100, 4000):
        assert re.search(rf"no news for {age}|no news for {age + 1}", said[age, "step"])
        assert where in said[age, "step"] and " running" not in said[age, "step"]
    assert ("ended, its process runs" if here else " over ") in said[4000, "ended: 7 steps"]


@pytest.mark.parametrize(
    "status",
    [
        {"rank": "x", "tiers": [1], "edges": {"a": 3}, "shares": 4},
        {"step": True, "loss": float("nan"), "remaining_seconds": float("inf"), "at": "now"},
        {"step": 10**400, "shares": {'a"\\\n\x1b': 0.5, "b": "c"}, "loss": 10**400},
        {"shares": {"\ud800": 1}},
        {},
    ],
)
def test_a_strange_status_makes_no_text_that_is_refused(status):
    """Method: Prometheus' own parser reads what is left. Twin: another rank's are whole."""
    found = samples(text_of(jobs(status, STATUS | {"rank": 5}, folder='/runs/a"b')))
    assert found["infinity_steps_total", ("rank", "5"), ("run", 'a"b')] == 7
    assert sum(name == "infinity_loss" for name, *_ in found) == 1


@pytest.mark.parametrize("text", ['a"b', "a\\nb", "two\nlines", "\x1b[2J{},=", "\u00e9"])
def test_a_label_of_any_text_comes_back_as_it_was(text):
    """Method: the name of a run, a tier and a cause, through Prometheus' own parser."""
    status = {"shares": {text: 0.5}, "tiers": {text: {"peak_nbytes": 3}}}
    status |= {"at": time.time()}
    found = samples(text_of(jobs(status, folder=f"/runs/{text}")))
    of = ("rank", "0"), ("run", text)
    assert found["infinity_running", ("run", text)] == 1
    assert found["infinity_time_ratio", ("cause", text), *of] == 0.5
    assert found["infinity_tier_peak_bytes", *of, ("tier", text)] == 3


def test_names_have_their_units_and_counters_their_ending():
    """Twin: a name without a unit is found out."""
    units = "bytes|seconds|ratio|bytes_per_second|tokens_per_second|steps|loss|running|stalled"
    ends = re.compile(rf"infinity_\w*?(?:{units})(_total)?")
    for metric in (*METRICS, RUNNING):
        assert ends.fullmatch(metric.name), metric
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric
    assert not ends.fullmatch("infinity_speed") and not ends.fullmatch("infinity_tier_peak")


def test_the_table_of_the_page_is_what_is_published():
    rows = re.findall(
        r"^\| `(infinity_\w+)` \| (\w+) \| ([`\w, ]+) \| (.+) \|$", DOCS.read_text(), re.M
    )
    assert rows == [
        (
            metric.name,
            metric.kind,
            ", ".join(f"`{label}`" for label in labels),
            metric.help,
        )
        for metric, labels in [
            (RUNNING, ["run"]),
            *((each, ["run", "rank", *filter(None, [each.label])]) for each in METRICS),
        ]
    ]


@pytest.fixture
def run(tmp_path):
    """The folder of a run whose process has ended."""
    folder = tmp_path / "node7-9"
    run_files.write(folder, run_files.STATUS, 0, STATUS)
    return folder


def test_a_file_is_replaced_and_no_other(run, tmp_path, capsys):
    """Method: written twice by the command; a file of somebody else's stays as it was."""
    out = tmp_path / "infinity.prom"
    for step in (7, 8):
        run_files.write(run, run_files.STATUS, 0, STATUS | {"step": step})
        assert main(["top", str(run), "--once", "--prometheus", str(out)]) == 0
        assert samples(out.read_text())[
            "infinity_steps_total", ("rank", "0"), ("run", "node7-9")
        ] == (step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["infinity.prom", "node7-9"]
    other = tmp_path / "node.prom"
    other.write_text("# HELP node_load1 mine\n")
    assert main(["top", str(run), "--once", "--prometheus", str(other)]) == 2
    assert "was not made by Infinity" in capsys.readouterr().err
    assert other.read_text() == "# HELP node_load1 mine\n"


def test_a_file_without_jobs_is_one_that_may_be_replaced(tmp_path):
    """Twin: a folder in its place is refused."""
    out = tmp_path / "infinity.prom"
    for _ in range(2):
        write_file(out, list, 1.0, once=True)
    assert samples(out.read_text()) == {} and out.read_text().startswith("# HELP infinity_running")
    (tmp_path / "folder.prom").mkdir()
    with pytest.raises((ConfigError, StorageError)):
        write_file(tmp_path / "folder.prom", list, 1.0, once=True)


def test_a_port_of_this_machine_is_scraped(monkeypatch):
    """Method: a server on a free port, over HTTP. Twins: another path, a folder that is gone, and
    a port that is taken."""
    monkeypatch.setattr(prometheus, "silence", lambda statuses, now: 9.0)
    found: list = [jobs(STATUS)]

    def read():
        if not found:
            raise ConfigError("no status of a job")
        return found[0]

    with server_of(0, read) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        with urllib.request.urlopen(f"{address}/metrics", timeout=30) as answer:
            assert answer.headers["Content-Type"] == TYPE
            assert answer.read().decode() == text_of(jobs(STATUS))
        found.clear()
        for path, status in (("", 404), ("/metrics", 503)):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(address + path, timeout=30)
            assert refused.value.code == status
            refused.value.close()
        with pytest.raises(ConfigError, match="in use. Give another port"):
            server_of(server.server_port, read)
        server.shutdown()


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, -15)])
def test_a_port_is_served_until_a_signal(sent, status, tmp_path, capsys):
    """Method: the command in a process of its own is scraped, and then sent the signal; the help
    and the page name both. Twin: without a signal it still serves."""
    command = [sys.executable, "-m", "infinity", "top", "--prometheus", "0"]
    environment = os.environ | {"INFINITY_CACHE": str(tmp_path)}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        # A shell has its background jobs, such as these tests, ignore SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        address = process.stdout.readline().strip()
        for _ in range(2):
            with urllib.request.urlopen(address, timeout=60) as answer:
                assert answer.status == 200
            assert process.poll() is None
        process.send_signal(sent)
        assert process.wait(60) == status
    assert "until Ctrl-C or SIGTERM" in " ".join(DOCS.read_text().split())
    assert main(["top", "--help"]) == 0
    assert "until Ctrl-C or SIGTERM" in " ".join(capsys.readouterr().out.split())


def test_a_place_is_a_port_or_a_file():
    assert place_of("9464") == 9464 and place_of("a/b.prom") == Path("a/b.prom")
