"""Programs of several ranks: forks over gloo, of which one may come late, fail alone, have a disk
that fails, or be lost, and some may be interrupted inside of the engine.

Each rank has a plain side of its own, with the batches of all: its sums have the same bits.
**meet**: ranks wait for each other beside all that they do with the engine. **lost**: a rank that
is gone. The others have to be told so by a PeerError; then one of them goes on alone, from the last
save. **bound**: when faults end, ranks have met again within so many tries of a step, each of which
ends within the limit of the process group.
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
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from models import leftovers
from prepared import DIES_WITH_PARENT
from sim_actions import ACTIONS, UsersError, backward, failing
from sim_disk import MILD, SAID, SimulatedDisk
from sim_models import blocks_of
from sim_network import SimulatedNetwork
from sim_play import PROOF, Game, caught
from sim_program import Program
from sim_world import Side, Snapshot, Wrong, differing, forget, is_typed, typed
from striker import MARK, Striker

from infinity.errors import PeerError, StorageError

PATIENCE = timedelta(seconds=20)  # of the process group
TRIES = 6  # until ranks that diverged have met again
WORLDS = (2, 2, 2, 2, 4)  # of which averages are exact
KEPT_ACTIONS = ("step", "evaluate", "edit_weight", "set_rate", "save", "load", "look")
OF_RANKS = ("late", "alone", "struck", "disk_fails")
STRUCK = ("step", "evaluate", "edit_weight", "save")
HOMES = ("host", "nvme")


def draw_ranks(seed: int) -> Program:
    """Draws a program of two or four ranks."""
    rng = random.Random(f"ranks {seed}")
    world = rng.choice(WORLDS)
    optimizer = rng.choice(["AdamW", "Adam", "SGD"])
    odd = rng.randrange(2) if optimizer == "SGD" else 0
    family = rng.choice(["chain", "tied", "adapters"])
    model = {"family": family, "seed": rng.randrange(100), "width": 16, "blocks": 3, "odd": odd}
    config = {"params": rng.choice(HOMES), "optimizer": rng.choice(HOMES)}
    config["shard"] = rng.choice(["parameters", "gradients", "optimizer"])
    if rng.random() < 0.3:
        config["activations"] = rng.choice(HOMES)
    disk, network = {}, {}
    if "nvme" in config.values():
        disk = {name: rate for name, rate in MILD.items() if rng.random() < 0.3}
    fails = "nvme" in (config["params"], config["optimizer"]) and rng.random() < 0.5
    if fails:
        disk[rng.choice(SAID)] = rng.choice([0.02, 0.1, 0.5])
    if disk:
        disk["seed"] = rng.randrange(1 << 30)
    if rng.random() < 0.5:
        network = {"late": rng.choice([0.02, 0.2]), "seed": rng.randrange(1 << 30)}
    actions = []
    for _ in range(rng.randrange(3, 8)):
        name = rng.choice([*KEPT_ACTIONS, "late", "alone", "struck", *["disk_fails"] * fails])
        if name == "struck":
            given = draw_struck(rng, world)
        elif name in OF_RANKS:
            given = {"rank": rng.randrange(world), "data": rng.randrange(1000)}
        else:
            given = ACTIONS[name].draw(rng) | plain_options(name)
        actions.append((name, given))
    if rng.random() < 0.3:
        given = {"rank": rng.randrange(world), "at": rng.choice([0, rng.randrange(60)])}
        actions.append(("lost", given))
    return Program(
        model,
        optimizer,
        config,
        tuple(actions),
        room=rng.choice([None, None, 1.0, 2.0]),
        disk=disk,
        dtype=rng.choice(["", "", "autocast"]),
        network=network,
        ranks=world,
    )


def draw_struck(rng: random.Random, world: int) -> dict[str, Any]:
    """Draws an action that an exception ends on some ranks, each at a point inside of the
    engine."""
    name = rng.choice(STRUCK)
    given = ACTIONS[name].draw(rng) | plain_options(name)
    count = rng.choice([1, 1, 1, world])
    points = {str(rank): rng.randrange(1, 4000) for rank in rng.sample(range(world), count)}
    return {"work": [name, given], "points": points}


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

    def __init__(
        self,
        program: Program,
        disk: SimulatedDisk,
        network: SimulatedNetwork,
        folder: Path,
        rank: int,
        store: Any,
    ):
        own = folder / str(rank)
        own.mkdir(exist_ok=True)
        super().__init__(program, disk, own)
        self.engine.saved = folder / "saved"
        self.rank, self.network, self._store, self._met = rank, network, store, 0
        for side in (self.plain, self.engine):
            side.rank, side.ranks = rank, program.ranks

    def meet(self, says: bool = False) -> bool:
        """Waits for the others. Returns whether any of them ``says`` so."""
        if self.plain.ranks == 1:
            return says
        self._met += 1
        self._store.add(f"said {self._met}", int(says))
        if self._store.add(f"met {self._met}", 1) == self.program.ranks:
            self._store.set(f"all {self._met}", "")
        self._store.wait([f"all {self._met}"], 3 * PATIENCE)
        return self._store.add(f"said {self._met}", 0) > 0

    def act(self, name: str, given: dict[str, Any]) -> None:
        if name == "late":
            if given["rank"] == self.rank:
                time.sleep(0.2)
        elif name in (*OF_RANKS, "lost"):
            getattr(self, name)(**given)
        else:
            super().act(name, given)

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

    def struck(self, work: list, points: dict[str, int]) -> None:
        """Interrupts ranks in an action. All have the state before it or that after it."""
        name, given = work
        before, number, point = self.plain.snapshot(), self.plain.number, points.get(str(self.rank))
        shown, striker = (
            ACTIONS[name].play(self.plain, **given),
            Striker(KeyboardInterrupt, "signal"),
        )
        if self.plain.number > number:
            self.doubtful.add(number)
        run = partial(striker.run, point) if point else caught
        error, seen = run(partial(self.play, name, given))
        if error is not None:
            self.counts[f"{type(error).__name__} in struck"] += 1
            if not is_typed(error) and (MARK not in str(error) or not striker.place):
                raise Wrong("untyped", f"{type(error).__name__}: {error}")
        else:
            self.compare(shown, seen)
        forget(error)
        self.come_together(before)
        self.prove()

    def come_together(self, before: Snapshot) -> None:
        """Finds out on all ranks which state they have, or has them start again."""

        def read() -> None:
            self.engine.model.train()
            self.engine.optimizer.zero_grad()
            self.agree(before)

        # As users go on: an interrupted rank's next use of the engine tells the others
        for _ in range(TRIES):
            after, refusal = self.plain.snapshot(), typed(read)
            if refusal is None:
                break
            self.plain.restore(after)
            self.counts[f"{type(refusal).__name__} afterwards"] += 1
        if self.meet(refusal is not None):
            return self.start_again(before)
        went_on = bool(differing(Side(before).tensors(), self.plain.tensors()))
        if self.meet(went_on) and self.meet(not went_on):
            raise Wrong("torn", f"this rank {'made' if went_on else 'did not make'} the change")
        return None

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

    def disk_fails(self, rank: int, data: int) -> None:
        """Has the disk of one rank fail, in steps and saves. All are told, and start again from the
        last save."""
        before, error = self.plain.snapshot(), None
        if rank == self.rank:
            self.disk.turn(True)
        for number, name in enumerate(("step", "save", "step", "step")):
            given = PROOF | {"data": data + number} if name == "step" else {"wait": True}
            if name == "save":
                self.doubtful.add(self.plain.number)
            shown = ACTIONS[name].play(self.plain, **given)
            error, seen = caught(lambda name=name, given=given: self.play(name, given))
            if error is not None:
                break
            self.compare(shown, seen)
        self.disk.turn(False)
        if error is not None:
            if not isinstance(error, (PeerError, StorageError)):
                raise Wrong("untyped", f"{type(error).__name__}: {error}")
            if not isinstance(error, StorageError) and "StorageError" not in str(error):
                raise Wrong("untold", f"a disk failed: {error}")
            self.counts[f"{type(error).__name__} in disk_fails"] += 1
            forget(error)
        if self.meet(error is not None):
            self.start_again(before)
        self.prove()

    def play(self, name: str, given: dict[str, Any]) -> Any:
        return ACTIONS[name].play(self.engine, **given)

    def start_again(self, before: Snapshot) -> None:
        """Drops the model, and has all ranks begin with the last save, or with ``before`` if there
        is none."""
        engine, plain = self.engine, self.plain
        engine.drop()
        self.meet()
        refusal = typed(lambda: self.load_anew(max(plain.saves))) if plain.saves else None
        if not plain.saves or self.meet(refusal is not None):
            if plain.saves and not self.doubtful.issuperset(plain.saves):
                raise Wrong("lost", f"the last save does not load: {refusal}")
            engine.drop()
            self.meet()
            plain.restore(before)
            engine.restore(before)
            engine.wrap(engine.config)
            self.counts["started over"] += 1
        else:
            self.agree(plain.snapshot())
            self.counts["went on anew"] += 1

    def lost(self, rank: int, at: int) -> None:
        """Ends one rank, before its collective ``at``. The others have to learn of it; then the
        first of them goes on alone, with the last save."""
        if rank == self.rank:
            self.network.lose_after(at)
        for _ in range(TRIES if rank == self.rank else 2 * TRIES):
            before = self.plain.snapshot()
            shown = ACTIONS["step"].play(self.plain, **PROOF)
            error, seen = caught(lambda: self.play("step", PROOF))
            if error is not None:
                break
            self.compare(shown, seen)
        if rank == self.rank:
            os._exit(0)
        if not isinstance(error, PeerError):
            raise Wrong("untyped", f"a rank is lost: {type(error).__name__}: {error}")
        self.counts["PeerError in lost"] += 1
        forget(error)
        del error
        self.engine.drop()
        if self.rank == min({0, 1} - {rank}):
            self.go_on_alone(before)
        raise Ended

    def go_on_alone(self, before: Snapshot) -> None:
        """Goes on as a process of its own, with what all ranks saved."""
        dist.destroy_process_group()
        for side in (self.plain, self.engine):
            side.rank, side.ranks = 0, 1
        self.start_again(before)
        self.prove()
        self.engine.drop()
        if left := leftovers(self.engine.swap):
            raise Wrong("leak", f"a dropped model leaves {left}")

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
        self.counts["fault late to a collective"] += self.network.late
        self.counts.update({f"fault {kind}": n for kind, n in self.disk.struck().items() if n})


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
    own_disk = program.disk | {"seed": program.disk.get("seed", 0) + 1000 * rank}
    with (
        SimulatedDisk(own_disk if program.disk else {}) as disk,
        SimulatedNetwork(program.network, rank) as network,
    ):
        met = dist.PrefixStore("sim", store)
        game = RankGame(program, disk, network, folder, rank, met)
        game.run()
    return dict(game.counts)
