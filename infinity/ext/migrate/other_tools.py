"""Other tools: recognises by its own keys whose configuration a table is.

A tool is known by keys that Infinity has not, wherever they stand beside words that both have
(`optimizer`, `compile`, `device`). DeepSpeed's, Accelerate's and FSDP's tables are translated;
those of the others are refused by the tool's name.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from .accelerate import is_accelerate
from .deepspeed import is_deepspeed

ACCELERATE, DEEPSPEED = "Accelerate", "DeepSpeed"
EXPECTED, COMPILE = "expects_optimizer", "compile"  # keys of Infinity whose value may be a table


def _read_tools() -> dict[str, list[str]]:
    file = tomllib.loads(Path(__file__).with_name("other_tools.toml").read_text())
    return {
        tool: [file["remedies"].get(what_to_do, what_to_do), *sets]
        for tool, (what_to_do, *sets) in file["tools"].items()
    }


TOOLS = _read_tools()  # tool -> what to do, then sets of keys, of which one is there whole


def refuse_others(mapping: Mapping, where: str = "") -> None:
    """Raises ConfigError, with the tool's name and what to do, for a configuration of a tool that
    is not read here."""
    for tool, (what_to_do, *sets) in TOOLS.items():
        for marks in (each.split() for each in sets):
            if all(_has(mapping, mark) for mark in marks):
                keys = ", ".join(mark.removeprefix("*.") for mark in marks)
                raise ConfigError(
                    f"{where}this is a configuration of {tool} (it has {keys}), and not one of"
                    f" Infinity. What to do: {what_to_do}."
                )


def whose(mapping: Mapping, names: Sequence[str], where: str = "", way_out: str = "") -> str | None:
    """Returns the tool, DEEPSPEED or ACCELERATE, whose configuration ``mapping`` is; None if it has
    only ``names``, the keys of Infinity. Raises ConfigError as :func:`refuse_others`, for keys of
    both, and for an unknown key, with ``way_out`` at the end."""
    refuse_others(mapping, where)
    owner = DEEPSPEED if is_deepspeed(mapping) else None
    owner = owner or (ACCELERATE if is_accelerate(mapping) else None)
    own = [key for key in mapping if key in names]
    tables = [key for key in own if isinstance(mapping[key], Mapping) and key != EXPECTED]
    if owner is not None:
        if mixed := [key for key in own if key not in tables]:
            theirs = next(key for key in mapping if key not in names)
            raise ConfigError(
                f"{where}unknown config key {theirs!r}: it is {owner}'s, and {', '.join(mixed)} is"
                f" Infinity's. Leave {mixed[0]} out, and change what is read: dataclasses.replace("
                f"Config.from_{owner.lower()}(...), {mixed[0]}=...)"
            )
        return owner
    unknown = [key for key in mapping if key not in names]
    for key in unknown:
        inside = mapping[key]
        if isinstance(inside, Mapping) and (is_deepspeed(inside) or is_accelerate(inside)):
            tool = DEEPSPEED if is_deepspeed(inside) else ACCELERATE
            raise ConfigError(
                f"{where}{key} holds a configuration of {tool}, and it is read alone: give the"
                f" table {key} itself, or a file of it{way_out}"
            )
    near = {key: difflib.get_close_matches(str(key), names, n=1, cutoff=0.7) for key in unknown}
    strange = [key for key in unknown if not near[key]]
    if tables not in ([], [COMPILE]) or len(strange) > max(1, len(mapping) // 2):
        raise ConfigError(
            f"{where}{', '.join(map(str, [*tables, *strange][:6]))}: this is not a configuration of"
            f" Infinity, nor one of DeepSpeed, Accelerate or FSDP, which are read. The keys are"
            f" {', '.join(names)}{way_out}"
        )
    for key in unknown:
        hint = (
            f"did you mean {near[key][0]!r}?" if near[key] else f"the keys are {', '.join(names)}"
        )
        raise ConfigError(f"{where}unknown config key {key!r}: {hint}{way_out}")
    return None


def _has(mapping: Mapping, mark: str) -> bool:
    table, _, key = mark.rpartition(".")
    if not table:
        return key in _plain(mapping)
    inside = mapping.values() if table == "*" else [_plain(mapping).get(table)]
    return any(isinstance(each, Mapping) and key in _plain(each) for each in inside)


def _plain(mapping: Mapping) -> dict[str, Any]:
    """Returns a table by its keys as Python would have them: without the dashes of options."""
    return {str(key).lstrip("-").replace("-", "_"): value for key, value in mapping.items()}
