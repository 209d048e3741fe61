"""Plays programs in children, so that a crash or a wait without end is a failure like others.

A child is a fork of this process, which has imported everything and has never used the engine. It
plays one program to be warm, then those that it was given, and ends with the first that fails: what
a failure left shows nothing about the next program.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import itertools
import json
import logging
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from sim_play import descriptors, play
from sim_program import Program
from sim_ranks import die_with_parent, play_ranks
from sim_world import Wrong

import infinity

SECONDS = float(
    os.environ.get("INFINITY_SIM_SECONDS") or 90
)  # after which a program waits without end
MOST = 20  # programs of one child
WARM = Program(
    {"family": "chain", "seed": 0, "width": 16, "blocks": 2, "odd": 0},
    "AdamW",
    {"params": "nvme", "optimizer": "nvme"},
    (("save", {"wait": True}), ("load", {})),
    disk={"delay": 0.1},
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a program ended. ``kind``: "" if nothing was wrong."""

    program: Program
    kind: str
    text: str = ""
    counts: dict[str, int] = dataclasses.field(default_factory=dict)


def prepare() -> None:
    """Imports what the children need."""
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    for name in infinity.__all__:
        getattr(infinity, name)
    gc.collect()
    gc.freeze()


def outcomes(
    programs: Iterable[Program], before: Callable[[], Any] | None = None
) -> Iterator[Outcome]:
    """Plays ``programs``, and tells of each how it ended. ``before``: is called in each child."""
    for batch in batches(programs):
        while batch:
            ended = 0
            for outcome in play_apart(batch, before):
                ended += 1
                yield outcome
            batch = batch[ended:]


def batches(programs: Iterable[Program]) -> Iterator[list[Program]]:
    """Yields the programs of one child each: of several ranks a single one."""
    for kind, group in itertools.groupby(programs, lambda each: (each.ranks == 1, each.late > 0)):
        while batch := list(itertools.islice(group, MOST if kind[0] else 1)):
            yield batch


def play_apart(batch: list[Program], before: Callable[[], Any] | None) -> Iterator[Outcome]:
    """Plays programs in a child until one fails."""
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as said, tempfile.TemporaryDirectory(prefix="sim-") as folder:
        child = os.fork()
        if child == 0:
            os.close(reader)
            become(writer, said.fileno(), lambda: play_all(batch, Path(folder), writer, before))
        os.close(writer)
        with os.fdopen(reader, "rb", buffering=0) as pipe:
            try:
                for program in batch:
                    line = read_line(pipe, SECONDS)
                    if line is None:
                        yield lost(program, child, said)
                        return
                    yield (outcome := Outcome(program, **json.loads(line)))
                    if outcome.kind:
                        return
            finally:
                end(child)


def become(writer: int, said: int, work: Callable[[], None]) -> None:
    """Does ``work`` as a child, and ends."""
    status = 1
    try:
        os.setsid()
        die_with_parent()
        for standard in (1, 2):
            os.dup2(said, standard)
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR2, all_threads=True)
        logging.disable(logging.CRITICAL)
        work()
        status = 0
    except BaseException:  # noqa: BLE001 - what it printed tells
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def play_all(
    batch: list[Program], folder: Path, writer: int, before: Callable[[], Any] | None
) -> None:
    """Plays programs, and writes how each ended."""
    if batch[0].ranks == 1:  # ranks are forks of a process that has not used the engine
        (folder / "warm").mkdir()
        late = batch[0].late
        play(
            dataclasses.replace(WARM, optimizer="SGD", late=late) if late else WARM, folder / "warm"
        )
    settled = descriptors()
    if before is not None:
        before()
    for number, program in enumerate(batch):
        own = folder / str(number)
        own.mkdir()
        kind, text, counts = "", "", {}
        try:
            counts = dict((play if program.ranks == 1 else play_ranks)(program, own))
        except Wrong as wrong:
            kind, text = wrong.kind, wrong.text
        except Exception as error:  # noqa: BLE001 - a defect of the simulator, or of the engine
            kind, text = "untyped", "".join(traceback.format_exception(error)[-6:])
        gc.collect()
        if not kind and (now := descriptors()) > settled:
            kind, text = "leak", f"{now - settled} descriptors"
        line = json.dumps({"kind": kind, "text": text, "counts": counts}).encode() + b"\n"
        os.write(writer, line)
        if kind:
            return


def read_line(pipe: Any, seconds: float) -> bytes | None:
    """The next line of a child. None: it is gone, or silent for so long."""
    line, deadline = b"", time.monotonic() + seconds
    while not line.endswith(b"\n"):
        left = max(0.0, deadline - time.monotonic())
        # One byte: what is read beyond the line would be of the next one.
        if not select.select([pipe], [], [], left)[0] or not (part := pipe.read(1)):
            return None
        line += part
    return line


def lost(program: Program, child: int, said: Any) -> Outcome:
    """What became of a child that told nothing more."""
    pid, status = 0, 0
    for _ in range(20):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        time.sleep(0.05)
    if not pid:
        os.killpg(child, signal.SIGUSR2)  # the stacks of it and its ranks
        time.sleep(0.5)
    said.seek(0)
    text = said.read().decode(errors="replace")[-12000:]
    return Outcome(program, "crash" if pid else "hang", f"status {status}\n{text}")


def end(child: int) -> None:
    """Ends a child and all that it started."""
    for work in (lambda: os.killpg(child, signal.SIGKILL), lambda: os.waitpid(child, 0)):
        try:
            work()
        except (ProcessLookupError, ChildProcessError):
            pass
