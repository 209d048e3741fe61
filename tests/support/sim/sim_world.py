"""Both sides of a simulated program: plain torch, and the engine.

**side**: a model, its optimizer and an average. **snapshot**: a copy of the plain side, with the
way in which its parameters are frozen and grouped. **agreed**: the state that both sides have.
"""

from __future__ import annotations

import copy
import functools
import gc
import re
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from models import at_home, bits
from sim_disk import SimulatedDisk

import infinity
from infinity.errors import InfinityError, InternalError

SAVED_WITHIN = 30  # seconds that a save, and what it replaced, may take behind a model that is gone
BEHIND = ("infinity save", "infinity-removal")  # threads; the first starts the second

Tensors = dict[str, torch.Tensor]


class Wrong(AssertionError):
    """The contract is broken. ``kind``: how."""

    def __init__(self, kind: str, text: str):
        super().__init__(f"{kind}: {text}")
        self.kind, self.text = kind, text


class Snapshot(NamedTuple):
    """The plain side at one time."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    average: Any
    held_out: list[str]

    def copy(self) -> Snapshot:
        return copy.deepcopy(self)

    def form(self) -> tuple:
        """What a checkpoint does not bring: groups, what is frozen, an average."""
        groups = tuple(len(group["params"]) for group in self.optimizer.param_groups)
        frozen = tuple(param.requires_grad for param in self.model.parameters())
        return groups, frozen, self.average is not None


class Side:
    """The plain side. ``number``: of the next save; ``rank`` of ``ranks``: whose batches it has;
    ``dtype``: of the weights, or "autocast"."""

    is_engine = False
    rank, ranks = 0, 1
    on_disk: Callable[[], list[int]]  # the saves of which one is there, the newest first

    def __init__(self, start: Snapshot, dtype: str = ""):
        self.number, self.dtype = 0, dtype
        self.restore(start)

    @functools.cached_property
    def saves(self) -> dict[int, Snapshot]:
        """What was saved, by number."""
        return {}

    def restore(self, snapshot: Snapshot) -> None:
        """Goes back to what the side once was."""
        self.model, self.optimizer, self.average, self.held_out = snapshot.copy()

    def snapshot(self) -> Snapshot:
        return Snapshot(self.model, self.optimizer, self.average, self.held_out).copy()

    def form(self) -> tuple:
        return Snapshot(self.model, self.optimizer, self.average, self.held_out).form()

    def tensors(self) -> Tensors:
        """Returns all that the side has, by name."""
        found = {f"model {name}": value for name, value in self.model.state_dict().items()}
        for at, entry in self.optimizer.state_dict()["state"].items():
            for name, value in entry.items():
                if isinstance(value, torch.Tensor):
                    found[f"optimizer {at} {name}"] = value
        for at, group in enumerate(self.optimizer.param_groups):
            found[f"group {at} lr"] = torch.tensor(float(group["lr"]), dtype=torch.float64)
        found |= {f"average {name}": value for name, value in self.averages().items()}
        return {name: value.detach().cpu().clone() for name, value in found.items()}

    def averages(self) -> Tensors:
        """Returns the average of what trains."""
        if self.average is None:
            return {}
        state = (self.average if self.is_engine else self.average.module).state_dict()
        stepped = {id(each) for group in self.optimizer.param_groups for each in group["params"]}
        named = self.model.named_parameters()
        return {name: state[name] for name, param in named if id(param) in stepped}

    @property
    def states(self) -> tuple[dict, dict]:
        """Copies of both state dicts."""
        return copy.deepcopy((dict(self.model.state_dict()), self.optimizer.state_dict()))

    def save(self, wait: bool) -> None:
        self.optimizer.zero_grad()
        self.saves[self.number] = self.snapshot()
        self.number += 1

    def load(self) -> None:
        self.optimizer.zero_grad()
        if self.is_loadable():
            self.restore(self.saves[max(self.saves)])

    def is_loadable(self) -> bool:
        """Tells whether every save that may be on the disk has the form of this side."""
        found = [self.saves[number] for number in self.on_disk()]
        return bool(found) and all(each.form() == self.form() for each in found)


class EngineSide(Side):
    """The side whose model is wrapped. ``plain``: the other one."""

    is_engine = True

    def __init__(
        self, plain: Side, disk: SimulatedDisk, folder: Path, rooms: dict[str, float | None]
    ):
        self.plain, self.disk, self.folder, self.rooms = plain, disk, folder, rooms
        self.scratch, self.swap, self.saved = folder / "scratch", folder / "swap", folder / "saved"
        for each in (self.scratch, self.swap):
            each.mkdir(exist_ok=True)
        self.is_wrapped = False
        self.loaded: int | None = None  # the save that was loaded last
        super().__init__(plain.snapshot(), plain.dtype)

    def restore(self, snapshot: Snapshot) -> None:
        """Takes the model of a snapshot, which is not wrapped: its average is torch's."""
        super().restore(snapshot)
        self.average = None

    @property
    def saves(self) -> dict[int, Snapshot]:
        """Those of the plain side."""
        return self.plain.saves

    @property
    def on_disk(self) -> Callable[[], list[int]]:
        return self.plain.on_disk

    def wrap(self, config: dict[str, Any]) -> None:
        """Wraps the model, with ``rooms`` of memory."""
        homes = config.get("params", "auto"), config.get("optimizer", "auto")
        more = {key: value for key, value in config.items() if key not in ("params", "optimizer")}
        self.config = config
        if self.dtype == "bf16":  # as torch steps such weights
            more = {"master": "none", "moments": "bf16", **more}
        options = at_home(*homes, self.swap, **more)
        if more.get("activations") == "nvme":
            options["nvme_paths"] = [str(self.swap)]
        for budget, room in self.rooms.items():
            if room is not None:
                options[budget] = int(self.least(options, budget) * room)
        self._wrap(options)

    def least(self, options: dict[str, Any], budget: str) -> int:
        """The least memory that works, as the refusal of one byte says."""
        try:
            self._wrap({**options, budget: 1})
        except infinity.CapacityError as error:
            found = re.search(r"the least that works here is [^()]*\((\d+) bytes\)", str(error))
            if found is None:
                raise Wrong("untold", f"the least that works is not named: {error}") from None
            return int(found[1])
        self.unwrap()
        return 1 << 20

    def _wrap(self, options: dict[str, Any]) -> None:
        self.model, self.optimizer = infinity.wrap_model(self.model, self.optimizer, options)
        self.is_wrapped = True

    def unwrap(self) -> None:
        self.average = None
        self.model, self.optimizer = infinity.unwrap_model(self.model, self.optimizer)
        self.is_wrapped = False

    def save(self, wait: bool) -> None:
        self.optimizer.zero_grad()
        infinity.save_checkpoint(
            self.saved, self.model, self.optimizer, self.plain.number - 1, wait=wait, overwrite=True
        )

    def load(self) -> None:
        self.optimizer.zero_grad()
        if self.is_loadable():
            self.loaded = infinity.load_checkpoint(self.saved, self.model, self.optimizer)

    def drop(self) -> None:
        """Lets go of the model, as one does who starts again."""
        self.model = self.optimizer = self.average = None
        self.is_wrapped = False
        gc.collect()


def wait_for_saves() -> None:
    """Waits for the threads that save beside what goes on, as long as one may take."""
    until = time.monotonic() + SAVED_WITHIN
    while behind := [each for each in threading.enumerate() if each.name in BEHIND]:
        behind[0].join(max(0.0, until - time.monotonic()))
        if time.monotonic() > until:
            return


def forget(error: BaseException | None) -> None:
    """Lets go of what tracebacks hold: a user does not keep them."""
    seen = []
    while error is not None and error not in seen:
        seen.append(error)
        if error.__traceback__ is not None:
            traceback.clear_frames(error.__traceback__)
        error.__traceback__, error = None, error.__cause__ or error.__context__


def is_typed(error: BaseException) -> bool:
    return isinstance(error, InfinityError) and not isinstance(error, InternalError)


def differing(one: Tensors, other: Tensors) -> list[str]:
    """Names whose bits differ, or that one side lacks."""
    return [
        name
        for name in sorted(one.keys() | other.keys())
        if name not in one
        or name not in other
        or (one[name].dtype, one[name].shape) != (other[name].dtype, other[name].shape)
        or not torch.equal(bits(one[name]), bits(other[name]))
    ]


def typed(work: Callable[[], Any]) -> InfinityError | None:
    """Runs ``work``, and returns its typed error."""
    try:
        work()
    except InfinityError as error:
        if not is_typed(error):
            raise
        forget(error)
        return error
    return None
