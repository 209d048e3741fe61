"""Run files: the state that a running job publishes in a folder, for other programs.

run     a job on this machine: a folder below ``runs`` in the cache
        (:func:`infinity.core.machine.disk_profile.cache_folder`)
status  the present state of a rank: one small file, replaced atomically
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.machine.kernel import process_space
from ...untrusted import Format, is_regular, parse_json, read_text

STATUS, PLAN, HISTORY = "status", "plan", "history"
OURS = ("status-rank", "plan-rank", "history-rank")  # prefixes of a run's file names
MOST_NBYTES = 16 * 1024 * 1024
FORMAT = Format("file of a run", number=1, unnumbered=1)
KEPT_RUNS = 20  # ended ones
STALE_SECONDS = 30  # without news: the process computes one long unit, waits, or is gone
LOST_SECONDS = 300  # without news from another host: no more counted as running


@dataclass(frozen=True)
class Process:
    """A process, identified by id and start time: ids alone are reused."""

    pid: int
    started: int

    @property
    def is_running(self) -> bool:
        """Whether this very process still runs."""
        return self.started == start_of(self.pid)


def start_of(pid: int) -> int:
    """Returns the start time of a process, in kernel ticks since boot; 0 if there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def this_process() -> Process:
    """Returns the calling process."""
    return Process(os.getpid(), start_of(os.getpid()))


def job_name() -> str:
    """Returns a name for this process's job: by its launcher, if any, which all ranks of a machine
    have in common. It includes the start time, because containers of one name reuse process ids."""
    pid = os.getppid() if int(os.environ.get("WORLD_SIZE") or 1) > 1 else os.getpid()
    return f"{os.uname().nodename}-{pid}-{start_of(pid)}"


def write(folder: Path, kind: str, rank: int, content: dict[str, Any]) -> None:
    """Replaces a file of a run atomically. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{kind}-rank{rank}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(FORMAT.numbered(content)))
    os.replace(partial, path)


def read(folder: Path, kind: str) -> Iterator[dict[str, Any]]:
    """Yields the contents of a run's files of ``kind``, in rank order. Skips files that are not
    ours."""
    for _, content in _files(folder, kind):
        yield content


def read_known(folder: Path, kind: str) -> Iterator[dict[str, Any]]:
    """Yields what :func:`read` does. Raises UsageError for a file of a newer format."""
    for path, content in _files(folder, kind):
        FORMAT.check(path, content)
        yield content


def _files(folder: Path, kind: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    paths: list[Path] = []
    with contextlib.suppress(OSError):
        paths = sorted(
            folder.glob(f"{kind}-rank*.json"), key=lambda path: (len(path.name), path.name)
        )
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            if is_regular(path, links=False) and isinstance(
                content := parse_json(read_text(path, most_nbytes=MOST_NBYTES)), dict
            ):
                yield path, content


def is_number(value: Any) -> bool:
    """Returns whether a value is a finite number below 1e18: no bool or text, no integer too long
    for a float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1e18 < value < 1e18


def process_of(status: dict[str, Any]) -> Process:
    """Returns the process that wrote a status; an invalid one if it is not given."""
    pid, started = status.get("pid"), status.get("started")
    whole = all(
        isinstance(value, int) and not isinstance(value, bool) and value > 0
        for value in (pid, started)
    )
    return Process(pid, started) if whole else Process(0, -1)


def is_here(status: dict[str, Any]) -> bool:
    """Returns whether the process id in a status is valid here: by the kernel's name, or else by
    the host's."""
    space = status.get("space")
    if isinstance(space, str) and space:
        return space == process_space()
    return status.get("host") == os.uname().nodename


def is_running(folder: Path) -> bool:
    """Returns whether a process of the run is running. A process of another machine or container
    counts as running."""
    statuses = list(read(folder, STATUS))
    here = [status for status in statuses if is_here(status)]
    return any(process_of(status).is_running for status in here) or len(here) < len(statuses)


def silence(statuses: Iterable[dict[str, Any]], now: float) -> float | None:
    """Returns the seconds since the last write of any rank; None: none says when."""
    times = [at for status in statuses if is_number(at := status.get("at"))]
    return max(0.0, now - max(times)) if times else None


def is_stalled(status: dict[str, Any], now: float) -> bool:
    """Tells whether a rank that has not ended wrote nothing for a while."""
    has_ended = str(status.get("phase", "")).startswith("ended")
    return not has_ended and (silence([status], now) or 0.0) > STALE_SECONDS


def counts_as_running(job: dict[str, Any], now: float) -> bool:
    """Tells whether a job that :func:`infinity.tools.watch.top.look` read runs: its process lives,
    or, on another host, wrote not long ago."""
    if not job["running"] or has_ended(job):
        return False
    return is_among(job["ranks"]) or (silence(job["ranks"], now) or 0.0) <= LOST_SECONDS


def is_among(statuses: Iterable[dict[str, Any]]) -> bool:
    """Tells whether a process of the statuses runs on this host."""
    return any(is_here(status) and process_of(status).is_running for status in statuses)


def state_of(job: dict[str, Any], now: float) -> str:
    """Says what a job that :func:`infinity.tools.watch.top.look` read does, by its processes here
    and the age of what it wrote last."""
    if not job["running"] or (has_ended(job) and not is_among(job["ranks"])):
        return "over"
    if has_ended(job):
        return "ended, its process runs"
    silent = silence(job["ranks"], now) or 0.0
    if silent <= STALE_SECONDS:
        return "running"
    where = "its process runs" if is_among(job["ranks"]) else "its host may tell more"
    return f"no news for {silent:.0f} s, {where}"


def has_ended(job: dict[str, Any]) -> bool:
    """Tells whether every rank of a job has said that it ended."""
    return bool(job["ranks"]) and all(
        str(status.get("phase", "")).startswith("ended") for status in job["ranks"]
    )


def runs(root: Path) -> list[Path]:
    """Lists the runs in ``root``, newest first."""
    folders: list[tuple[float, Path]] = []
    with contextlib.suppress(OSError):
        for folder in root.iterdir():
            with contextlib.suppress(OSError):  # removed just now, by another job that starts
                if folder.is_dir() and not folder.is_symlink() and any(read(folder, STATUS)):
                    folders.append((folder.stat().st_mtime, folder))
    return [folder for _, folder in sorted(folders, key=lambda entry: -entry[0])]


def is_ours(folder: Path) -> bool:
    """Returns whether a folder has a run's files and nothing else."""
    with contextlib.suppress(OSError):
        names = [entry.name for entry in folder.iterdir()]
        return bool(names) and all(
            name.startswith(OURS) and name.endswith((".json", ".partial")) for name in names
        )
    return False


def remove_old(root: Path, keep: int = KEPT_RUNS) -> None:
    """Removes the oldest ended runs, except ``keep``. Ignores failures."""
    for folder in [folder for folder in runs(root) if is_ours(folder) and not is_running(folder)][
        keep:
    ]:
        shutil.rmtree(folder, ignore_errors=True)
