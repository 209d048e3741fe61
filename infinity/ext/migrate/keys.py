"""Keys of other tools' configurations: a row for each in `keys.toml`, with what becomes of it."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VERSION = "0.19.8"  # of DeepSpeed, whose keys are known
MAPPED, NOT_NEEDED, LOOP, REFUSED = "mapped", "not needed", "loop", "refused"
Sections = dict[str, dict[str, "Key"]]  # a table's path, "" or with a dot at its end -> its keys


@dataclass(frozen=True)
class Key:
    """One key. ``why``: the field it maps to, or the reason for its fate. ``off``: further values
    that switch it off. ``removed``: only older versions of its tool have it."""

    name: str
    fate: str
    why: str
    off: tuple[Any, ...]
    removed: bool


def read_keys(tool: str) -> Sections:
    """Reads the keys of a tool."""
    tables = tomllib.loads(Path(__file__).with_name("keys.toml").read_text())[tool]
    off, removed = tables.pop("off", {}), tables.pop("removed", ())
    return {
        "" if path == "top." else path: {
            name: Key(name, fate, why, tuple(off.get(name, ())), name in removed)
            for fate, reasons in fates.items()
            for why, names in reasons.items()
            for name in names
        }
        for paths, fates in tables.items()
        for path in (f"{each}." for each in paths.split())
    }
