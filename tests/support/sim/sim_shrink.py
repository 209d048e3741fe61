"""Shrinks a program that fails: to few actions, then to plain options."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from sim_actions import ACTIONS, Action
from sim_program import Program

Fails = Callable[[Program], bool]
MOST = 200  # programs that are tried


class Enough(Exception):
    """So many programs were tried."""


def shrink(program: Program, fails: Fails, most: int = MOST) -> Program:
    """Returns the shortest program found that ``fails``, as ``program`` does."""
    tried, best = 0, program

    def works(candidate: Program) -> bool:
        nonlocal tried, best
        if tried >= most:
            raise Enough
        tried += 1
        if not fails(candidate):
            return False
        best = candidate
        return True

    try:
        shorten(program, works)
        while any(works(simpler) for simpler in plainer(best)):
            pass
        shorten(best, works)
    except Enough:
        pass
    return best


def shorten(program: Program, works: Fails) -> None:
    """Leaves out actions: halves of them, then quarters, then single ones (Zeller's ddmin)."""
    actions, parts = list(program.actions), 2
    while len(actions) > 1 or (actions and parts == 2):
        size = max(1, len(actions) // parts)
        for begin in range(0, len(actions), size):
            left = actions[:begin] + actions[begin + size :]
            if works(dataclasses.replace(program, actions=tuple(left))):
                actions, parts = left, max(2, parts - 1)
                break
        else:
            if size == 1:
                return
            parts = min(2 * parts, len(actions))


def plainer(program: Program) -> Iterator[Program]:
    """Yields programs with one plainer option each."""

    def change(**fields: object) -> Program:
        return dataclasses.replace(program, **fields)

    for name, plain_value in {"room": None, "device_room": None, "dtype": "", "late": 0.0}.items():
        if getattr(program, name) != plain_value:
            yield change(**{name: plain_value})
    for name in program.network:
        yield change(network={key: r for key, r in program.network.items() if key != name})
    if program.io != "threads":
        yield change(io="threads")
    if program.held_out:
        yield change(held_out=0)
    for name in program.disk:
        yield change(disk={key: rate for key, rate in program.disk.items() if key != name})
    for name in program.config:
        if name not in ("params", "optimizer"):
            yield change(config={key: v for key, v in program.config.items() if key != name})
        elif program.config[name] != "device":
            homes = {"params": "device", "optimizer": "device"}
            yield change(config=program.config | homes)
            if program.config[name] == "nvme":
                yield change(config=program.config | {name: "host"})
    plain = {"blocks": 2, "width": 16, "odd": 0, "seed": 0, "family": "chain"}
    for name, value in plain.items():
        if program.model[name] != value:
            yield change(model=program.model | {name: value})
    if program.optimizer != "AdamW" and not program.model["odd"]:
        yield change(optimizer="AdamW")
    for at, action in enumerate(program.actions):
        for simpler in plainer_action(action):
            actions = list(program.actions)
            actions[at] = simpler
            yield change(actions=tuple(actions))


def plainer_action(action: Action) -> Iterator[Action]:
    """Yields an action with one plainer argument each."""
    name, given = action
    for key, plain in ACTIONS[name].plain.items():
        if given[key] != plain:
            yield name, given | {key: plain}
