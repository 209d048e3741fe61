"""Programs of several ranks: forks over gloo, of which one may come late, fail alone or be lost.

Each rank has a plain side of its own, with the batches of all: its sums have the same bits.
**meet**: ranks wait for each other beside all that they do with the engine. **lost**: a rank that
is gone. The others have to be told so by a PeerError.
"""

from __future__ import annotations

import collections
import ctypes
import json
import os
import random
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from prepared import DIES_WITH_PARENT
from sim_actions import ACTIONS, UsersError, backward, failing
from sim_disk import SimulatedDisk
from sim_models import blocks_of
from sim_play import PROOF, Game, caught
from sim_program import Program
from sim_world import Wrong, forget, is_typed

from infinity.errors import PeerError

PATIENCE = timedelta(seconds=20)  # of the process group
TRIES = 6  # until ranks that diverged have met again
WORLD = 2
KEPT_ACTIONS = ("step", "evaluate", "edit_weight", "set_rate", "save", "load", "look")
HOMES = ("host", "nvme")


def draw_ranks(seed: int) -> Program:
    """Draws a program of two ranks."""
    rng = random.Random(f"ranks {seed}")
    optimizer = rng.choice(["AdamW", "Adam", "SGD"])
    odd = rng.randrange(2) if optimizer == "SGD" else 0
    family = rng.choice(["chain", "tied", "adapters"])
    model = {"family": family, "seed": rng.randrange(100), "width": 16, "blocks": 3, "odd": odd}
    config = {"params": rng.choice(HOMES), "optimizer": rng.choice(HOMES)}
    config["shard"] = rng.choice(["parameters", "gradients", "optimizer"])
    actions = []
    for _ in range(rng.randrange(3, 8)):
        name = rng.choice([*KEPT_ACTIONS, "late", "alone"])
        if name in ("late", "alone"):
            given = {"rank": rng.randrange(WORLD), "data": rng.randrange(1000)}
        else:
            given = ACTIONS[name].draw(rng) | plain_options(name)
        actions.append((name, given))
    if rng.random() < 0.3:
        actions.append(("lost", {"rank": rng.randrange(WORLD), "data": rng.randrange(1000)}))
    return Program(model, optimizer, config, tuple(actions), ranks=WORLD)


def plain_options(name: str) -> dict[str, Any]:
    """Options of an action that have the bits of one process over ranks."""
    return {
        "step": PROOF | {"data": 11},
        "evaluate": {"how": "no_grad"},
        "edit_weight": {"how": "full_params"},
        "save": {"wait": True},
    }.get(name, {})


class RankGame(Game):
    """One rank's game."""

    def __init__(self, program: Program, disk: SimulatedDisk, folder: Path, rank: int, store: Any):
        own = folder / str(rank)
        own.mkdir(exist_ok=True)
        super().__init__(program, disk, own)
        self.engine.saved = folder / "saved"
        self.rank, self._store, self._met = rank, store, 0
        for side in (self.plain, self.engine):
            side.rank, side.ranks = rank, program.ranks

    def meet(self) -> None:
        self._met += 1
        if self._store.add(f"met {self._met}", 1) == self.program.ranks:
            self._store.set(f"all {self._met}", "")
        self._store.wait([f"all {self._met}"], 3 * PATIENCE)

    def act(self, name: str, given: dict[str, Any]) -> None:
        if name in ACTIONS:
            super().act(name, given)
        elif name == "late":
            if given["rank"] == self.rank:
                time.sleep(0.2)
        else:
            {"alone": self.alone, "lost": self.lost}[name](**given)

    def alone(self, rank: int, data: int) -> None:
        """Has the user's own code fail on one rank. The others are told; then all go on."""
        blocks = blocks_of(self.engine.model)

        def work() -> None:
            if rank != self.rank:
                backward(self.engine, data)
                return
            with failing(blocks[1], False):
                backward(self.engine, data)

        error, _ = caught(work)
        fine = isinstance(error, UsersError) if rank == self.rank else error is None
        if not fine and (error is None or not is_typed(error)):
            raise Wrong("untyped", f"{type(error).__name__}: {error}")
        self.counts[f"{type(error).__name__} in alone"] += 1
        forget(error)
        self.prove()

    def prove(self) -> None:
        """Takes one step. Ranks that diverged are told so, and try again as their users do."""
        for _ in range(TRIES):
            self.engine.optimizer.zero_grad()
            error, seen = caught(lambda: ACTIONS["step"].play(self.engine, **PROOF))
            if error is None:
                break
            if not is_typed(error):
                raise Wrong("untyped", f"{type(error).__name__}: {error}")
            self.counts[f"{type(error).__name__} afterwards"] += 1
            forget(error)
        else:
            raise Wrong("not alive", f"after {TRIES} tries: {error}")
        self.compare(ACTIONS["step"].play(self.plain, **PROOF), seen)
        self.compare(self.plain.tensors(), self.engine.tensors())

    def lost(self, rank: int, data: int) -> None:
        """Ends one rank. The others have to learn of it."""
        if rank == self.rank:
            os._exit(0)
        for _ in range(TRIES):
            error, _ = caught(lambda: ACTIONS["step"].play(self.engine, **PROOF))
            if error is not None:
                break
        if not isinstance(error, PeerError):
            raise Wrong("untyped", f"a rank is lost: {type(error).__name__}: {error}")
        self.counts["PeerError in lost"] += 1
        forget(error)
        self.engine.drop()
        raise Ended

    def run(self) -> None:
        try:
            self.engine.wrap(self.program.config)
            for at, (name, given) in enumerate(self.program.actions):
                self.told(f"rank {self.rank}, action {at}, {name} {given}", name, given)
            self.told(f"rank {self.rank}, the end", "look", {})
            self.meet()
        except Ended:
            pass
        self.counts["actions"] += len(self.program.actions)


class Ended(Exception):
    """The program is over: a rank was lost."""


def play_ranks(program: Program, folder: Path) -> collections.Counter[str]:
    """Plays a program on so many forks. Raises Wrong for what any of them says."""
    children = []
    for rank in range(program.ranks):
        if (pid := os.fork()) == 0:
            run_rank(lambda rank=rank: play_rank(program, folder, rank), folder / f"told {rank}")
        children.append(pid)
    statuses = [os.waitpid(pid, 0)[1] for pid in children]
    counts: collections.Counter[str] = collections.Counter()
    lost = {given["rank"] for name, given in program.actions if name == "lost"}
    for rank, status in enumerate(statuses):
        path = folder / f"told {rank}"
        if not path.exists():
            if status or rank not in lost:
                raise Wrong("crash", f"rank {rank} ended with {status}")
            continue
        told = json.loads(path.read_text())
        if told["kind"]:
            raise Wrong(told["kind"], told["text"])
        counts.update(told["counts"])
    return counts


def die_with_parent() -> None:
    """Has this fork end with who forked it, if that is killed."""
    ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)


def run_rank(work: Callable[[], dict[str, int]], path: Path) -> None:
    """Runs a rank in a fork, writes what it says, and ends."""
    die_with_parent()
    told: dict[str, Any] = {"kind": "", "text": "", "counts": {}}
    try:
        told["counts"] = work()
    except Wrong as wrong:
        told |= {"kind": wrong.kind, "text": wrong.text}
    except BaseException as error:  # noqa: BLE001 - it is told
        told |= {"kind": "untyped", "text": f"{type(error).__name__}: {error}"}
    part = path.with_suffix(".part")
    part.write_text(json.dumps(told))
    part.rename(path)
    os._exit(0)


def play_rank(program: Program, folder: Path, rank: int) -> dict[str, int]:
    store = dist.FileStore(str(folder / "store"), program.ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=program.ranks, timeout=PATIENCE
    )
    with SimulatedDisk(program.disk) as disk:
        game = RankGame(program, disk, folder, rank, dist.PrefixStore("sim", store))
        game.run()
    return dict(game.counts)
