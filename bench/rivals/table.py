"""The table of rivals, `rivals.toml`: what each needs, how it is run, and the sweep."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from infinity.errors import ConfigError, UsageError

FILE = Path(__file__).with_name("rivals.toml")
HOMES = ("device", "host", "nvme")
PINNED = re.compile(r"[A-Za-z0-9][\w.-]*==[\w.+!]+")
ROW = 256  # tokens


@dataclass(frozen=True)
class Rival:
    """One system. ``systems``: names of :mod:`bench.systems` -> the home of ours that each is
    like."""

    packages: Sequence[str] = ()
    command: str = ""
    install: str = ""
    needs: str = ""
    absent: str = ""
    systems: Mapping[str, str] = field(default_factory=dict)
    ranks: Sequence[str] = ()
    themes: Sequence[str] = ()


@dataclass(frozen=True)
class Sweep:
    """What is measured of each: models, tokens of a step, homes of ours, processes."""

    sizes: Sequence[str]
    tokens: Sequence[int]
    homes: Sequence[str]
    ranks: Sequence[int]


@dataclass(frozen=True)
class Table:
    """The whole file."""

    sweep: Sweep
    rivals: Mapping[str, Rival]

    def chosen(self, names: Sequence[str], option: str) -> dict[str, Rival]:
        """Returns the rivals with these names. Raises UsageError for one that is not listed."""
        if unknown := [name for name in names if name not in self.rivals]:
            raise UsageError(
                f"{option} {unknown[0]} is no rival: choose from {', '.join(self.rivals)}"
            )
        return {name: self.rivals[name] for name in names}


@cache
def read(path: Path = FILE) -> Table:
    """Reads a table. Raises ConfigError, which names the entry, for one that cannot be run."""
    from ..systems import SIZES, SYSTEMS

    def wrong(entry: str, what: str) -> ConfigError:
        return ConfigError(f"{path}: {entry}: {what}")

    def names(entry: str, found: Any, known: Sequence[str]) -> None:
        if unknown := [each for each in found if each not in known]:
            raise wrong(entry, f"{unknown[0]!r} is none of {', '.join(known)}")

    def made(kind: type, entry: str, found: Any) -> Any:
        if not isinstance(found, dict):
            raise wrong(entry, "give a table")
        names(entry, found, [each.name for each in fields(kind)])
        for key, value in found.items():
            shape = str if key in ("command", "install", "needs", "absent") else list
            if not isinstance(value, dict if key == "systems" else shape):
                raise wrong(f"{entry}.{key}", f"{value!r} is not of the right kind")
        try:
            return kind(**found)
        except TypeError as error:  # a key that is missing
            raise wrong(entry, str(error).partition("() ")[2]) from None

    try:
        found = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no table of rivals: {error}") from error
    names("the file", found, ("sweep", "rivals"))
    sweep = made(Sweep, "sweep", found.get("sweep"))
    names("sweep.sizes", sweep.sizes, [*SIZES])
    names("sweep.homes", sweep.homes, HOMES)
    for key, multiple in (("tokens", ROW), ("ranks", 1)):
        for count in getattr(sweep, key):
            if type(count) is not int or count < 1 or count % multiple:
                raise wrong(f"sweep.{key}", f"{count!r} is no multiple of {multiple}")
    rivals = {}
    for name, given in found.get("rivals", {}).items():
        rival = rivals[name] = made(Rival, f"rivals.{name}", given)
        for pin in rival.packages:
            if not isinstance(pin, str) or not PINNED.fullmatch(pin):
                raise wrong(f"rivals.{name}.packages", f"{pin!r} is not pinned: give NAME==VERSION")
        if bool(rival.packages) + bool(rival.command) + bool(rival.absent) != 1:
            raise wrong(f"rivals.{name}", "give one of packages, command and absent")
        if rival.needs not in ("", "cuda"):
            raise wrong(f"rivals.{name}.needs", f'{rival.needs!r} is not "cuda"')
        names(f"rivals.{name}.systems", rival.systems, [*SYSTEMS])
        names(f"rivals.{name}.systems", rival.systems.values(), HOMES)
        names(f"rivals.{name}.ranks", rival.ranks, [*rival.systems])
    return Table(sweep, rivals)


def rival_of(system: str) -> str:
    """Returns the name of the rival that a system of :mod:`bench.systems` is of, by the first word
    of both names; "" for ours, and for what is beside both."""
    word = system.partition("_")[0]
    for name, rival in read().rivals.items():
        if word in {listed.partition("_")[0] for listed in rival.systems}:
            return name
    return ""
