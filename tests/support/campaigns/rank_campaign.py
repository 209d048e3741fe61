"""A campaign over ranks: an exception, or a real Ctrl-C, at some moment of what several ranks do
together, and what they find who go on.

    python tests/support/campaigns/rank_campaign.py [--setups dp2,tp2] [--operations step,save]
    [--hows line,signal] [--strikes 5000] [--json out.json]

**setup**: how many ranks there are, and what they share a model for. **operation**: what all ranks
do together when one of them is struck. **how**: ``line``: an exception before any line inside the
package; ``signal``: SIGINT at a random moment; ``all``: SIGINT on every rank, as a terminal sends
it. **strike**: one operation in which that happened, and how all go on: zero_grad, forward,
backward, step. **outcome**: ``same`` bits as in a run that was not disturbed; ``typed``: an
InfinityError on every rank, within the timeout; ``silent``: other bits, and nobody was told;
``torch``: torch's own error of a collective inside the model (tensor parallelism), within the
timeout; ``untyped``; ``crash``; ``hang``.

The ranks of a setup play one strike after the other. Those that cannot go on end, and others take
their place.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import hashlib
import json
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

if __name__ == "__main__":
    sys.path[:0] = map(str, Path(__file__).parents[1].glob("*/"))

import prepared
from inside import parts_of
from parting_jobs import wrap as wrap_blocks
from ranks import join, rank_variables
from striker import MARK, PACKAGE, Striker

import infinity
from infinity.ranks import failure_report

STEPS = 2  # that all make behind a strike
TRIES = 6  # of such a step, before a rank gives up
FLAT = {"params": "host", "optimizer": "host"}
DATA = {"units": ["Linear"], **FLAT}
SETUPS: dict[
    str, tuple[int, str, dict[str, Any]]
] = {  # ranks, what they share a model for, the configuration
    "dp2": (2, "blocks", {"shard": "parameters"}),
    "dp2 whole": (2, "blocks", {"shard": "gradients"}),
    "dp2 late": (2, "blocks", {"shard": "optimizer"}),
    "dp2 nvme": (2, "blocks", {"shard": "parameters", "params": "nvme", "optimizer": "nvme"}),
    "tp2": (2, "tensors", FLAT),
    "pp2": (2, "stages", FLAT),
    "dp4": (4, "blocks", {"shard": "parameters"}),
    "replicas4": (4, "replicas", {"shard": "parameters"}),
    "dp2tp2": (4, "tensors", FLAT),
    "dp2pp2": (4, "stages", FLAT),
}
EXCEPTIONS = (KeyboardInterrupt, MemoryError)
HOWS = ("line", "signal", "all")
FINE = ("same", "typed", "torch")


# --- a user on each rank ---


class User:
    """This rank's part of a model, and what its user does with it."""

    def __init__(self, setup: str, folder: Path):
        self.folder = folder
        world, self.kind, config = SETUPS[setup]
        swap = folder / f"swap-{os.environ['RANK']}"
        swap.mkdir(exist_ok=True)
        config = config | {"nvme_paths": [str(swap)]}
        rank = dist.get_rank()
        self.data_rank, self.pipe = rank, None
        if self.kind in ("blocks", "replicas"):
            shape, names = (
                ((2, world // 2), ("dp_replicate", "dp_shard"))
                if self.kind == "replicas"
                else ((world,), ("dp",))
            )
            mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)
            own = {key: value for key, value in config.items() if key != "shard"}
            self.model, self.optimizer = wrap_blocks(
                config["shard"], config["shard"] == "parameters", mesh, **own
            )
            self.parts = [self.model]
            return
        axis = {"tensors": "tp", "stages": "pp"}[self.kind]
        shape, names = ((2, world // 2), (axis, "dp")) if world > 2 else ((2,), (axis,))
        mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)
        self.data_rank = mesh.get_local_rank("dp") if world > 2 else 0
        torch.manual_seed(0)
        if self.kind == "tensors":
            model = _Columns()
            parallelize_module(
                model, mesh["tp"], {"up.*": ColwiseParallel(), "down.*": RowwiseParallel()}
            )
            self.model, self.optimizer = infinity.wrap_model(
                model, torch.optim.AdamW(model.parameters(), lr=1e-2), config, mesh=mesh
            )
            self.parts = [self.model]
        else:
            model = nn.Sequential(*(_Tanh() for _ in range(4)))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            self.pipe, self.optimizer = infinity.parallel.pipeline(
                model,
                mesh,
                optimizer,
                config,
                schedule="1F1B",
                micro_batches=2,
                loss_fn=_loss,
                quiet=True,
            )
            self.model, self.parts = self.pipe.chunks, self.pipe.chunks

    @property
    def index(self) -> int:
        """Optimizer steps that were made, once what an exception left is put right."""
        engine = parts_of(self.parts).engine
        with engine.uses.begin():
            return engine.steps.index

    def data(self, number: int) -> torch.Tensor:
        return torch.randn(
            4, 64, generator=torch.Generator().manual_seed(100 * number + self.data_rank)
        )

    def backward(self, number: int) -> None:
        x = self.data(number)
        if self.pipe is not None:
            self.pipe.step(x, x.flip(1))
        elif self.kind == "tensors":
            self.model(x).square().mean().backward()
        else:
            self.model(x).backward()

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.backward(number)
        self.optimizer.step()

    def state(self) -> tuple[list[dict], dict]:
        return [part.state_dict() for part in self.parts], self.optimizer.state_dict()

    def load(self, state: tuple[list[dict], dict]) -> None:
        for part, values in zip(self.parts, state[0]):
            part.load_state_dict(values)
        self.optimizer.load_state_dict(state[1])

    def digest(self) -> str:
        told = hashlib.blake2b(digest_size=12)
        parts, optimizer = self.state()
        for values in (*parts, *(state for _, state in sorted(optimizer["state"].items()))):
            for name, value in sorted(values.items()):
                value = value.to_local() if hasattr(value, "to_local") else value
                told.update(name.encode())
                told.update(
                    value.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
                )
        return told.hexdigest()


class _Tanh(nn.Linear):
    def __init__(self) -> None:
        super().__init__(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(x))


class _Columns(nn.Module):
    """Blocks that tensor parallelism cuts by columns, then by rows, and a parameter that all
    have."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.ModuleList(nn.Linear(64, 64) for _ in range(3)) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down):
            x = x + down(torch.tanh(up(x)))
        return x * self.scale


def _loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (outputs - target).square().mean()


# --- operations ---

Operation = Callable[[User], None]
EDIT = 0.5


def forward(user: User) -> None:
    if user.pipe is not None:
        user.pipe.step(user.data(0), user.data(0).flip(1))
    else:
        user.model(user.data(0))


def evaluate(user: User) -> None:
    with torch.no_grad():
        user.model(user.data(0))


def backward(user: User) -> None:
    user.optimizer.zero_grad()
    user.backward(0)


def step(user: User) -> None:
    user.step(0)


def clip(user: User) -> None:
    user.optimizer.zero_grad()
    user.backward(0)
    infinity.clip_grad_norm_(user.optimizer, 1e6)
    user.optimizer.step()


def state(user: User) -> None:
    user.state()


def load_state(user: User) -> None:
    user.load(user.other)


def save(user: User) -> None:
    infinity.save_checkpoint(user.folder / "saved", user.model, user.optimizer)


def load(user: User) -> None:
    infinity.load_checkpoint(user.folder / "other", user.model, user.optimizer)


def read(user: User) -> None:
    for part in user.parts:
        with infinity.full_params(part):
            pass


def write(user: User) -> None:
    for part in user.parts:
        with infinity.full_params(part, writeback=True) as params:
            for value in params.values():
                value.mul_(EDIT)


OPERATIONS: dict[str, Operation] = {
    each.__name__: each
    for each in (
        forward,
        evaluate,
        backward,
        step,
        clip,
        state,
        load_state,
        save,
        load,
        read,
        write,
    )
}
STEPPING = {"step", "clip"}  # make a step themselves
CHANGING = {"load", "write"}  # leave other values, or the old ones
REPEATED = {
    "load_state"
}  # cut short, it is to be called again: torch's own sets parameter after parameter


def plays(setup: str, operation: str) -> bool:
    """Whether the setup has the operation: a pipeline's ranks evaluate nothing by themselves, and
    each edits its own stage, unheard by others."""
    return SETUPS[setup][1] != "stages" or operation not in ("evaluate", "write")


# --- one strike, on one rank ---


class Signals:
    """Sends this process SIGINT after some seconds of what :meth:`run` runs."""

    def __init__(self) -> None:
        self._armed, self.place = False, ""
        signal.signal(signal.SIGINT, self._arrives)

    def _arrives(self, number: int, frame: Any) -> None:
        if self._armed:
            self._armed = False
            while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
                frame = frame.f_back
            self.place = (
                f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno}"
                if frame is not None
                else "outside"
            )
            raise KeyboardInterrupt(MARK)

    def run(self, seconds: float, work: Callable[[], Any]) -> BaseException | None:
        """What came out of ``work``."""
        self.place, self._armed = "", True
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            work()
            return None
        except BaseException as error:  # noqa: BLE001 - it is what this is about
            return error
        finally:
            self._armed = False
            timer.cancel()


def forget(error: BaseException | None) -> None:
    """A user does not keep tracebacks; what they hold would be held as long."""
    seen = []
    while error is not None and error not in seen:
        seen.append(error)
        if error.__traceback__ is not None:
            traceback.clear_frames(error.__traceback__)
        error.__traceback__, error = None, error.__context__


def is_typed(error: BaseException) -> bool:
    """Whether ``error`` is ours, or torch's report of what a load_state_dict of a model met: ours,
    or the strike itself."""
    if isinstance(error, infinity.InfinityError):
        return not isinstance(error, infinity.InternalError)
    text = str(error)
    return (
        isinstance(error, RuntimeError)
        and text.startswith("Error(s) in loading state_dict")
        and ("rank" in text or MARK in text)
    )


def is_strike(error: BaseException | None) -> bool:
    """Whether ``error`` is the strike, or what torch's runtime of a pipeline makes of it."""
    seen = []
    while error is not None and error not in seen:  # what was raised from what may close a circle
        seen.append(error)
        error = error.__cause__ or error.__context__
    return any(str(each) == MARK for each in seen)


def is_torchs(error: BaseException) -> bool:
    """Whether ``error`` is what torch says of a collective of its own inside the model (tensor
    parallelism), in a backward that nothing of ours
    can catch: a lost connection, or the timeout."""
    frames = [each.filename for each in traceback.extract_tb(error.__traceback__)]
    ours = any(name.startswith(os.path.join(PACKAGE, "distributed")) for name in frames)
    return (
        isinstance(error, RuntimeError)
        and failure_report.LOST.search(str(error)) is not None
        and not ours
    )


class Player:
    """Plays strikes on this rank."""

    def __init__(self, setup: str, folder: Path):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._store = dist.PrefixStore("campaign", dist.distributed_c10d._get_default_store())
        self._met = 0
        self.signals = Signals()
        self.user = user = User(setup, folder)
        self._first = _copied(user.state())
        for number in (50, 51):
            user.step(number)
        user.other = _copied(user.state())
        infinity.save_checkpoint(folder / "other", user.model, user.optimizer)
        self._accepted: dict[str, list[str]] = {}
        self._size: dict[tuple[str, str], float] = {}  # points, or seconds, of an operation

    def meet(self) -> None:
        """Waits for the other ranks, beside all that they do with the engine."""
        self._met += 1
        if self._store.add(f"{self._met}", 1) == self.world:
            self._store.set(f"{self._met} all", "")
        self._store.wait([f"{self._met} all"], timedelta(seconds=120))

    def _begin(self) -> None:
        self.user.load(self._first)
        self.user.optimizer.zero_grad()
        self.meet()

    def learn(self, name: str) -> None:
        """Plays ``name`` undisturbed: what it takes, and where it ends."""
        if name in self._accepted:
            return
        self._begin()
        ends = []
        if name in CHANGING:  # or it was not done
            self._go_on(name, self.user.index)
            ends.append(self.user.digest())
            self._begin()
        start, began = self.user.index, time.monotonic()
        OPERATIONS[name](self.user)
        self._size[name, "signal"] = time.monotonic() - began
        self._go_on(name, start)
        ends.append(self.user.digest())
        self._begin()
        striker = Striker(KeyboardInterrupt, "line")
        striker.run(0, lambda: OPERATIONS[name](self.user))
        self._size[name, "line"] = striker.counted
        self.meet()
        self._accepted[name] = ends

    def _go_on(self, name: str, start: int, *, again: bool = False) -> list[str]:
        """Goes on as all ranks do, until its steps are made; ``again``: once they have done
        ``name`` again. Returns what was said on the way.
        Raises what ends this rank."""
        made, said, is_done = 0, [], not again
        while True:
            try:
                if not is_done:
                    OPERATIONS[name](self.user)
                    is_done = True
                if name in STEPPING:
                    made = self.user.index - start - 1
                if made == STEPS:
                    return said
                self.user.step(made + 1)
                made += 1
            except (infinity.InfinityError, RuntimeError) as error:
                if not is_typed(error):
                    raise
                said.append(f"{type(error).__name__}: {error}")
                forget(error)
                is_done = is_done and not (
                    name == "load" and "load a checkpoint" in said[-1].lower()
                )  # as it says
                if len(said) == TRIES or any(
                    channel.has_ended for channel in parts_of(self.user.parts).ranks.sync_channels
                ):
                    raise

    def play(self, name: str, how: str, seed: int) -> dict[str, Any]:
        """One strike: its outcome here, and what there is to say."""
        self.learn(name)
        self._begin()
        chance = random.Random(seed)
        struck = chance.randrange(self.world)
        where, kind = chance.random(), EXCEPTIONS[chance.randrange(len(EXCEPTIONS))]
        found: dict[str, Any] = {"place": "", "outcome": "same", "said": []}
        began = time.monotonic()
        try:
            start = self.user.index
            work = lambda: OPERATIONS[name](self.user)
            error = None
            if how == "line" and self.rank == struck:
                striker = Striker(kind, "line")
                error, _ = striker.run(1 + int(where * self._size[name, "line"]), work)
                found["place"] = striker.place
            elif how != "line" and (how == "all" or self.rank == struck):
                error = self.signals.run(where * 1.1 * self._size[name, "signal"], work)
                found["place"] = self.signals.place
            else:
                try:
                    work()
                except BaseException as told:  # noqa: BLE001 - judged below
                    error = told
            if error is not None:
                if not (is_strike(error) or is_typed(error)):
                    raise error
                found["said"].append(f"{type(error).__name__}: {error}")
                forget(error)
            found["said"] += self._go_on(
                name, start, again=name in REPEATED or (name == "load" and chance.random() < 0.5)
            )
            digest = self.user.digest()
            if digest in self._accepted[name]:
                found["end"] = self._accepted[name].index(digest)
            else:
                found["outcome"] = "silent"
        except infinity.InternalError as error:
            found |= {"outcome": "untyped", "said": [*found["said"], str(error)]}
        except infinity.InfinityError as error:
            found |= {
                "outcome": "typed",
                "said": [*found["said"], f"{type(error).__name__}: {error}"],
            }
        except BaseException as error:  # noqa: BLE001 - an outcome
            found |= {
                "outcome": (
                    "typed" if is_typed(error) else "torch" if is_torchs(error) else "untyped"
                ),
                "said": [*found["said"], "".join(traceback.format_exception(error)[-6:])],
            }
        found["seconds"] = round(time.monotonic() - began, 2)
        return found


def _copied(state: tuple[list[dict], dict]) -> tuple[list[dict], dict]:
    parts, optimizer = state
    moments = {
        i: {key: value.clone() for key, value in each.items()}
        for i, each in optimizer["state"].items()
    }
    return [{name: value.clone() for name, value in part.items()} for part in parts], optimizer | {
        "state": moments
    }


def rank_main(folder: Path) -> None:
    """What each rank runs: the strikes that the driver has written down, from the first that is not
    played."""
    faulthandler.register(signal.SIGUSR1)
    job = json.loads((folder / "job").read_text())
    rank = join()
    with open(folder / f"told.{rank}", "a", buffering=1) as told:
        player = Player(job["setup"], folder)
        for number, (name, how, seed) in enumerate(job["strikes"]):
            print(json.dumps({"begun": number}), file=told)
            found = player.play(name, how, seed)
            print(json.dumps({"number": number, **found}), file=told)
            if found["outcome"] != "same":
                break
    os._exit(0)


# --- the campaign ---


def launch(
    setup: str, strikes: list[tuple[str, str, int]], folder: Path, patience: float
) -> list[dict[str, Any]]:
    """Plays ``strikes`` on the ranks of a setup until they are through, or cannot go on. What came
    of each that was begun."""
    world = SETUPS[setup][0]
    (folder / "job").write_text(json.dumps({"setup": setup, "strikes": strikes}))
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    ranks = []
    hang = ""
    try:
        for rank in range(world):
            variables = rank_variables(rank, world, f"127.0.0.1:{port}") | {
                "RANK_TIMEOUT": f"{patience:g}"
            }
            ranks.append(prepared.start(__file__, "--rank", folder, variables=variables))
        size, quiet = -1, time.monotonic()
        while any(rank.returncode is None for rank in ranks):
            for rank in ranks:
                if rank.returncode is None:
                    try:
                        rank.wait(0.1)
                    except TimeoutError:
                        pass
            now = sum(path.stat().st_size for path in folder.glob("told.*"))
            if now != size:
                size, quiet = now, time.monotonic()
            if time.monotonic() - quiet > 120 + 6 * patience:
                for rank in ranks:
                    if rank.returncode is None:
                        os.kill(rank.pid, signal.SIGUSR1)
                time.sleep(2)
                hang = "\n".join(rank.stderr[-3000:] for rank in ranks)
                break
    finally:
        for rank in ranks:
            rank.kill()
    found = judge(setup, strikes, folder, ranks, hang)
    if not found:
        raise AssertionError(f"the ranks of {setup} did not begin: {ranks[0].stderr[-3000:]}")
    return found


def judge(setup: str, strikes: list, folder: Path, ranks: list, hang: str) -> list[dict[str, Any]]:
    of_ranks = []
    for rank in range(len(ranks)):
        path = folder / f"told.{rank}"
        lines = (
            [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        )
        of_ranks.append(lines)
    begun = max(
        (line["begun"] for lines in of_ranks for line in lines if "begun" in line), default=-1
    )
    judged = []
    for number in range(begun + 1):
        theirs = [
            next((line for line in lines if line.get("number") == number), None)
            for lines in of_ranks
        ]
        name, how, seed = strikes[number]
        outcomes = {line["outcome"] for line in theirs if line is not None}
        if any(line is None for line in theirs):
            crashed = any(rank.returncode not in (0, -signal.SIGKILL) for rank in ranks)
            outcome = (
                "hang"
                if hang
                else "crash"
                if crashed or not outcomes <= {"typed", "torch"}
                else "typed"
            )
        else:
            outcome = next(
                kind for kind in ("silent", "untyped", "torch", "typed", "same") if kind in outcomes
            )
            # Each stage has parameters of its own, and only the one that was struck knows that it
            # did not change them.
            if (
                outcome == "same"
                and SETUPS[setup][1] != "stages"
                and len({line["end"] for line in theirs}) > 1
            ):
                outcome = "silent"  # some have the old values, and some the new ones
        places = [line["place"] for line in theirs if line is not None and line["place"]]
        judged.append(
            {
                "operation": name,
                "how": how,
                "seed": seed,
                "outcome": outcome,
                "places": places,
                "told": sum(bool(line and line["said"]) for line in theirs),
                "said": (
                    [line["said"][-2:] if line else None for line in theirs]
                    if outcome != "same"
                    else []
                ),
                "errors": (
                    (hang or "\n".join(rank.stderr[-1500:] for rank in ranks))
                    if outcome in ("hang", "crash")
                    else ""
                ),
                "seconds": max((line["seconds"] for line in theirs if line), default=0.0),
            }
        )
    return judged


def play(
    setup: str, strikes: list[tuple[str, str, int]], patience: float = 10
) -> list[dict[str, Any]]:
    """Plays all of ``strikes``, on as many launches as that takes."""
    found: list[dict[str, Any]] = []
    while len(found) < len(strikes):
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            some = launch(setup, strikes[len(found) :], Path(folder), patience)
        found += some
    return found


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for name, among in (("setups", SETUPS), ("operations", OPERATIONS), ("hows", HOWS)):
        parser.add_argument(f"--{name}", default=",".join(among))
    parser.add_argument("--strikes", type=int, default=5000, help="that hit, in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--patience", type=float, default=10, help="the process group's timeout, in seconds"
    )
    parser.add_argument(
        "--batch", type=int, default=40, help="strikes of one setup before the next one's turn"
    )
    parser.add_argument("--json")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank_main(Path(args.rank))
    chance, turn = random.Random(args.seed), 0
    setups, operations, hows = (
        getattr(args, name).split(",") for name in ("setups", "operations", "hows")
    )
    of: dict[str, list[dict[str, Any]]] = {setup: [] for setup in setups}
    hits = 0
    while hits < args.strikes:
        setup = setups[turn % len(setups)]
        turn += 1
        possible = [name for name in operations if plays(setup, name)]
        strikes = [
            (chance.choice(possible), chance.choice(hows), chance.randrange(1 << 30))
            for _ in range(args.batch)
        ]
        found = play(setup, strikes, args.patience)
        of[setup] += found
        hits += sum(bool(each["places"]) for each in found)
        print(setup, summary(found), "of", hits, flush=True)
        for each in found:
            if each["outcome"] not in FINE:
                print("   ", json.dumps(each)[:3000], flush=True)
        if args.json:
            everything = {setup: summary(each) for setup, each in of.items()}
            told = [
                {"setup": setup, **each}
                for setup, theirs in of.items()
                for each in theirs
                if each["outcome"] != "same"
            ]
            Path(args.json).write_text(
                json.dumps({"strikes": hits, "outcomes": everything, "told": told}, indent=1)
            )
    return int(any(each["outcome"] not in FINE for theirs in of.values() for each in theirs))


def summary(found: list[dict[str, Any]]) -> dict[str, int]:
    """Counts outcomes of the strikes that hit."""
    return dict(
        collections.Counter(
            each["outcome"]
            for each in found
            if each["places"] or each["outcome"] in ("hang", "crash")
        )
    )


if __name__ == "__main__":
    sys.exit(main())
