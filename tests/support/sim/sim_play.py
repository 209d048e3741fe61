"""Plays a program on both sides, and judges it.

**disturbed**: an action in which an exception or a fault came. Then both sides go on as people do:
with the state before it, with the state after it, or with the last save, and nothing else. What
they go on with has to take a step: that is the bound of liveness.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import os
import threading
import traceback
from pathlib import Path
from typing import Any

import torch
from models import environment, leftovers
from sim_actions import ACTIONS
from sim_device import late
from sim_disk import SimulatedDisk
from sim_models import build
from sim_program import OPTIMIZERS, Program
from sim_world import (
    EngineSide,
    Side,
    Snapshot,
    Wrong,
    differing,
    forget,
    is_typed,
    typed,
    wait_for_saves,
)
from striker import MARK, Striker

import infinity
from infinity.errors import CapacityError, CorruptionError, StorageError

PROOF = {  # the step after a disturbance
    **dict.fromkeys(("together", "keep"), False),
    **{"data": 7, "micro": 1, "clip": None, "edit": "", "at": 0, "how": "", "late": ""},
}


def play(program: Program, folder: Path) -> collections.Counter[str]:
    """Plays ``program``, and returns what there is to count. Raises Wrong."""
    with (
        late(program.late) if program.late else contextlib.nullcontext(),
        SimulatedDisk(program.disk) as disk,
        environment(INFINITY_IO=program.io),
    ):
        game = Game(program, disk, folder)
        game.run()
    return game.counts


def start_of(program: Program) -> Snapshot:
    """Makes the model and its optimizer."""
    model = build(**program.model)
    if program.dtype == "bf16":
        model.to(torch.bfloat16)
    if program.late:
        model.to("late:0")
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    held_out = [name for name, _ in named[len(named) - program.held_out :]]
    params = [param for name, param in named if name not in held_out]
    for name, param in named:
        param.requires_grad_(name not in held_out)
    make = getattr(torch.optim, program.optimizer)
    options = dict(OPTIMIZERS[program.optimizer])
    if program.late and program.optimizer == "SGD":
        options["foreach"] = False
    return Snapshot(model, make(params, **options), None, held_out)


class Game:
    """One program while it is played.

    counts
        Bits that were compared, faults, errors.
    doubtful
        Saves that came in a disturbed action, or while the disk failed: they need not be there.
    """

    def __init__(self, program: Program, disk: SimulatedDisk, folder: Path):
        self.program, self.disk = program, disk
        self.counts: collections.Counter[str] = collections.Counter()
        self.plain = Side(start_of(program), program.dtype)
        rooms = {"device_memory": program.device_room, "host_memory": program.room}
        self.engine = EngineSide(self.plain, disk, folder, rooms)
        self.doubtful: set[int] = set()
        self.plain.on_disk = self.on_disk
        self.behind = False  # the last save need not be written yet

    def run(self) -> None:
        self.engine.wrap(self.program.config)
        for at, (name, given) in enumerate(self.program.actions):
            self.told(f"action {at}, {name} {given}", name, given)
        self.disk.turn(False)
        self.told("the end", "look", {})
        self.end()
        self.counts["actions"] += len(self.program.actions)
        self.counts.update({f"fault {kind}": n for kind, n in self.disk.struck().items() if n})

    def told(self, what: str, name: str, given: dict[str, Any]) -> None:
        """Plays an action, and says where it was if that is wrong."""
        try:
            self.act(name, given)
        except Wrong as wrong:
            raise Wrong(wrong.kind, f"{what}: {wrong.text}") from None

    def act(self, name: str, given: dict[str, Any]) -> None:
        """Plays an action on both sides."""
        before, number, kind = self.plain.snapshot(), self.plain.number, ACTIONS[name]
        shown = kind.play(self.plain, **given)
        striker = Striker(KeyboardInterrupt, "signal")
        points = given.get("points", 0)
        if points:
            error, seen = striker.run(points, lambda: kind.play(self.engine, **given))
        else:
            error, seen = caught(lambda: kind.play(self.engine, **given))
        if self.plain.number > number and (error is not None or self.disk.was_on):
            self.doubtful.add(number)
        if name == "faults" and self.behind:
            self.doubtful.update(self.plain.saves)
        self.behind = given.get("wait") is False or (self.behind and not given.get("wait"))
        if error is None:
            self.follow_load(before)
            self.compare(shown, seen)
            return
        self.counts[f"{type(error).__name__} in {name}"] += 1
        self.judge(given["work"][0] if points else name, error, bool(striker.place))
        forget(error)
        del error
        self.go_on(before)

    def follow_load(self, before: Snapshot) -> None:
        """Has the plain side load the save that the engine found, if that is one of those that may
        be there."""
        loaded, self.engine.loaded = self.engine.loaded, None
        if loaded is None:
            return
        if loaded not in self.on_disk():
            raise Wrong("lost", f"save {loaded} was loaded, not one of {self.on_disk()}")
        self.plain.restore(self.plain.saves[loaded])
        self.engine.held_out = list(self.plain.held_out)

    def on_disk(self) -> list[int]:
        """The saves of which one is on the disk, the newest first."""
        found = []
        for number in sorted(self.plain.saves, reverse=True):
            found.append(number)
            if number not in self.doubtful:
                break
        return found

    def compare(self, shown: Any, seen: Any) -> None:
        """Compares what both users see."""
        one, other = (
            each if isinstance(each, dict) else dict(enumerate(each or []))
            for each in (shown, seen)
        )
        self.counts["bits"] += sum(8 * value.nbytes for value in one.values())
        if found := differing(one, other):
            raise Wrong("bits", f"values {found[:4]} of {len(one)} differ from plain torch's")

    def judge(self, name: str, error: BaseException, struck: bool) -> None:
        """Raises Wrong for an error that nothing here explains."""
        if struck and (MARK in str(error) or is_typed(error)):
            return
        if name == "scarce" and isinstance(error, (torch.OutOfMemoryError, CapacityError)):
            return
        said = f"{type(error).__name__}: {str(error)[:300]}"
        if not is_typed(error):
            where = "".join(traceback.format_exception(error)[-3:])
            raise Wrong("untyped", f"{said}\n{where}")
        if isinstance(error, (StorageError, CorruptionError)) and self.disk.was_on:
            return
        if isinstance(error, CapacityError) and any(self.engine.rooms.values()):
            return
        if name == "load" and self.doubtful.issuperset(self.plain.saves):
            return  # there is none
        raise Wrong("refused", said)

    # --- after a disturbance ---

    def go_on(self, before: Snapshot) -> None:
        """Ends the faults, and has both sides go on."""
        self.disk.turn(False)
        gc.collect()
        engine, plain = self.engine, self.plain
        for side in (plain, engine):
            side.model.train()
        plain.optimizer.zero_grad()

        def read() -> None:
            if not engine.is_wrapped:
                engine.wrap(engine.config)
            engine.optimizer.zero_grad()
            self.agree(before)

        if (refusal := typed(read)) is not None:
            self.counts[f"{type(refusal).__name__} afterwards"] += 1
            self.restart(before)
        self.prove()

    def agree(self, before: Snapshot) -> None:
        """Finds out whether the engine has the state before or that after the action."""
        now, form = self.engine.tensors(), self.engine.form()
        after = differing(now, self.plain.tensors())
        self.counts["bits"] += sum(8 * value.nbytes for value in now.values())
        if after or form != self.plain.form():
            other = Side(before)
            if (found := differing(now, other.tensors())) or form != other.form():
                raise Wrong(
                    "lost",
                    f"neither the state after the action ({after[:3]} differ) nor that before"
                    f" ({found[:3]} differ)",
                )
            self.plain.restore(before)
        self.engine.held_out = list(self.plain.held_out)

    def restart(self, before: Snapshot) -> None:
        """Goes on with the last save: in place, or after a new start."""
        engine, plain = self.engine, self.plain
        saves = self.on_disk()
        forms = {each.form() for each in (engine, plain, *(plain.saves[at] for at in saves))}
        if saves and len(forms) == 1:  # else the save that loads may be of another form
            if typed(engine.load) is None and engine.loaded is not None:
                self.follow_load(before)
                self.agree(before)
                self.counts["went on in place"] += 1
                return
        engine.drop()
        wait_for_saves()
        if left := leftovers(engine.swap):
            raise Wrong("leak", f"a dropped model leaves {left}")
        said = []
        for number in saves:
            if (refusal := typed(lambda number=number: self.load_anew(number))) is None:
                self.agree(before)
                self.counts["went on anew"] += 1
                return
            said.append(str(refusal))
            engine.drop()
        if saves and not self.doubtful & set(saves):
            raise Wrong("lost", f"the last save does not load: {said}")
        plain.restore(before._replace(average=None))
        engine.restore(before)
        engine.wrap(engine.config)
        self.counts["started over"] += 1

    def load_anew(self, number: int) -> None:
        """Wraps a model of the form of a save, with other values, and loads it."""
        engine, snapshot = self.engine, self.plain.saves[number]
        engine.restore(snapshot)
        with torch.no_grad():
            for param in engine.model.parameters():
                param.add_(1)
        engine.wrap(engine.config)
        if snapshot.average is not None:
            engine.average = infinity.ema(engine.model, 0.75)
        engine.loaded = infinity.load_checkpoint(engine.saved, engine.model, engine.optimizer)
        self.follow_load(snapshot)
        # An older save may have loaded: without an average, and with what is frozen now.
        if self.plain.average is None and engine.average is not None:
            engine.average.remove()
            engine.average = None
        for ours, theirs in zip(self.plain.model.parameters(), engine.model.parameters()):
            ours.requires_grad_(theirs.requires_grad)

    def prove(self) -> None:
        """Takes one step on both sides: the job is alive."""
        shown = ACTIONS["step"].play(self.plain, **PROOF)
        error, seen = caught(lambda: ACTIONS["step"].play(self.engine, **PROOF))
        if error is not None:
            raise Wrong("not alive", f"{type(error).__name__}: {error}")
        self.compare(shown, seen)
        self.compare(self.plain.tensors(), self.engine.tensors())

    # --- the end ---

    def end(self) -> None:
        """Unwraps or drops the model. Raises Wrong for what stays."""
        engine = self.engine
        for name, tier in infinity.stats(engine.model).tiers.items():
            if tier.budget_nbytes is not None and tier.peak_nbytes > tier.budget_nbytes:
                raise Wrong("budget", f"{tier.peak_nbytes} of {tier.budget_nbytes} bytes of {name}")
        if len(self.program.actions) % 2 and typed(engine.unwrap) is None:
            self.plain.average = None
            self.agree(self.plain.snapshot())
        engine.drop()
        wait_for_saves()
        if left := left_behind(engine.swap):
            raise Wrong("leak", ", ".join(left))


def caught(work: Any) -> tuple[BaseException | None, Any]:
    """What came out of ``work``: an exception, or a result."""
    try:
        return None, work()
    except Exception as error:  # noqa: BLE001 - it is judged
        return error, None


def left_behind(swap: Path) -> list[str]:
    """What a model that is gone has left, but for descriptors."""
    left = leftovers(swap)
    left += [each.name for each in threading.enumerate() if each.name.startswith("infinity")]
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        left.append("saved-tensor hooks on the user's thread")
    if not torch._C._is_torch_function_enabled() or not torch.is_grad_enabled():
        left.append("torch's modes on the user's thread")
    return left


def descriptors() -> int:
    """Counts the open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))
