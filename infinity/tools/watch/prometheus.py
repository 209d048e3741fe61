"""Prometheus: the figures of `infinity top` in Prometheus' text format, at an address of this
machine or as a file for node_exporter's textfile collector.

The format is written here: of the package prometheus_client only its escaping would be used, for
its registry counts what happens in its own process, and these figures are read from files of
others.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ...errors import ConfigError, InfinityError, StorageError
from .run_files import counts_as_running, is_number, is_stalled, silence

BEGIN = b"# HELP infinity_"
TYPE = "text/plain; version=0.0.4; charset=utf-8"
SUFFIX = ".prom"  # node_exporter reads no others
HOST, MOST_PORT = "127.0.0.1", 65535
Read = Callable[[], list[dict[str, Any]]]


@dataclass(frozen=True)
class Metric:
    """A metric. ``entry``: its key in a status. With a ``label``, the status has a table at
    ``table``, with an entry for each of the label's values."""

    name: str
    kind: str
    help: str
    entry: str
    label: str | None = None
    table: str | None = None


RUNNING = Metric(
    "infinity_running",
    "gauge",
    "1 while a process of the run lives, or wrote within 300 s on another host, and has not ended"
    " the run",
    "running",
)
STALLED = Metric(
    "infinity_stalled",
    "gauge",
    "1 if the rank has not ended, and wrote nothing for more than 30 s",
    "stalled",
)
METRICS = (
    Metric("infinity_status_timestamp_seconds", "gauge", "Unix time of the status", "at"),
    Metric("infinity_status_age_seconds", "gauge", "time since the status was written", "age"),
    STALLED,
    Metric("infinity_steps_total", "counter", "steps that the loop has taken", "step"),
    Metric("infinity_planned_steps", "gauge", "steps that the loop will take in all", "steps"),
    Metric("infinity_loss", "gauge", "loss of the last step", "loss"),
    Metric(
        "infinity_tokens_per_second", "gauge", "tokens of all ranks per second", "tokens_per_second"
    ),
    Metric("infinity_step_seconds", "gauge", "mean time of the last steps", "step_seconds"),
    Metric("infinity_remaining_seconds", "gauge", "time to the last step", "remaining_seconds"),
    *(
        Metric(f"infinity_tier_{name}_bytes", "gauge", text, f"{name}_nbytes", "tier", "tiers")
        for name, text in (
            ("charged", "what a tier holds"),
            ("peak", "the most that a tier has held"),
            ("planned", "what a tier will hold at most"),
            ("budget", "what a tier may hold"),
        )
    ),
    Metric("infinity_edge_bytes_total", "counter", "moved over an edge", "nbytes", "edge", "edges"),
    Metric(
        "infinity_edge_bytes_per_second",
        "gauge",
        "moved between the last two statuses",
        "rate",
        "edge",
        "edges",
    ),
    Metric(
        "infinity_edge_limit_bytes_per_second",
        "gauge",
        "measured rate of an edge's disks",
        "limit",
        "edge",
        "edges",
    ),
    Metric(
        "infinity_edge_stall_seconds_total",
        "counter",
        "time in which the loop waited for an edge",
        "stall_seconds",
        "edge",
        "edges",
    ),
    Metric(
        "infinity_time_ratio",
        "gauge",
        "share of the time between the last two statuses",
        "",
        "cause",
        "shares",
    ),
    Metric(
        "infinity_audited_bytes_total",
        "counter",
        "compared by audits",
        "",
        "kind",
        "audited_nbytes",
    ),
)


def text_of(jobs: list[dict[str, Any]]) -> str:
    """Writes the jobs that :func:`infinity.tools.watch.top.look` read. Values that are no finite
    numbers are left out."""
    lines: list[str] = []
    names = [Path(job["folder"]).name for job in jobs]
    now = time.time()
    running = [
        ({"run": name}, float(counts_as_running(job, now))) for name, job in zip(names, jobs)
    ]
    _add(lines, RUNNING, running)
    ranks = [
        ({"run": name, "rank": str(status.get("rank", 0))}, status | _age(status, now))
        for name, job in zip(names, jobs)
        for status in job["ranks"]
    ]
    for metric in METRICS:
        samples = [
            (labels | more, value)
            for labels, status in ranks
            for more, value in _values(metric, status)
            if is_number(value)
        ]
        if samples:
            _add(lines, metric, samples)
    return "\n".join(lines) + "\n"


def _age(status: dict[str, Any], now: float) -> dict[str, float | None]:
    return {"age": silence([status], now), "stalled": float(is_stalled(status, now))}


def _values(metric: Metric, status: dict[str, Any]) -> Iterator[tuple[dict[str, str], Any]]:
    if metric.label is None:
        yield {}, status.get(metric.entry)
        return
    table = status.get(metric.table or "")
    for key, entry in table.items() if isinstance(table, dict) else ():
        value = entry if not metric.entry else isinstance(entry, dict) and entry.get(metric.entry)
        yield {metric.label: key}, value


def _add(lines: list[str], metric: Metric, samples: list[tuple[dict[str, str], float]]) -> None:
    lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
    seen = set()
    for labels, value in samples:
        inside = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items())
        if inside not in seen:  # two of one name make the whole text invalid
            seen.add(inside)
            lines.append(f"{metric.name}{{{inside}}} {value!r}")


def _escaped(text: str) -> str:
    text = text.encode(errors="replace").decode()  # no halves of characters, which UTF-8 lacks
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def place_of(text: str) -> int | Path:
    """Parses PORT or FILE."""
    if not text.isdecimal():
        path = Path(text)
        if path.suffix != SUFFIX:
            raise argparse.ArgumentTypeError(
                f"{text!r} is neither a port nor a file {SUFFIX}, which node_exporter reads"
            )
        return path
    if int(text) > MOST_PORT:
        raise argparse.ArgumentTypeError(f"{text} given, at most {MOST_PORT} possible")
    return int(text)


def write_file(path: Path, read: Read, interval: float, *, once: bool) -> None:
    """Replaces the file ``path`` atomically, once or every ``interval`` seconds until interrupted.
    Raises ConfigError for a file that is not of this kind, StorageError if it cannot be written."""
    from ...files.outputs import Output, check_outputs

    check_outputs([Output("--prometheus", path, made=BEGIN)], [], way=None)
    partial = path.with_name(f".{path.name}.partial")
    while True:
        try:
            partial.write_text(text_of(read()), encoding="utf-8")
            os.replace(partial, path)
        except OSError as error:
            raise StorageError(f"--prometheus {path} cannot be written: {error}") from error
        if once:
            return
        time.sleep(interval)


def server_of(port: int, read: Read) -> ThreadingHTTPServer:
    """Makes the server of ``/metrics`` at a port of localhost; 0 is any free one. Raises
    ConfigError for a port that is taken."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404, "the figures are at /metrics")
                return
            try:
                status, content = 200, text_of(read())
            except InfinityError as error:  # the folder of the run is gone
                status, content = 503, f"# {str(error).splitlines()[0]}\n"
            self.send_response(status)
            self.send_header("Content-Type", TYPE)
            self.end_headers()
            self.wfile.write(content.encode())

        def log_message(self, *given: Any) -> None:
            """Says nothing: a scrape every few seconds is no news."""

    try:
        return ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        raise ConfigError(
            f"--prometheus {port}: {error.strerror or error}. Give another port, or 0 for any free"
            " one."
        ) from error


def run(place: int | Path, read: Read, interval: float, *, once: bool) -> None:
    """Publishes the figures at ``place`` until interrupted. Raises ConfigError."""
    read()  # raises errors before anything is published
    try:
        if isinstance(place, Path):
            write_file(place, read, interval, once=once)
            return
        if once:
            raise ConfigError("--once is of a file: give --prometheus FILE.prom, or leave it out")
        with server_of(place, read) as server:
            print(f"http://{HOST}:{server.server_port}/metrics", flush=True)
            server.serve_forever()
    except KeyboardInterrupt:
        return  # Ctrl-C is the way to quit
