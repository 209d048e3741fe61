"""Translation: of another tool's keys into the fields of a Config, with a line about every key.

mapped       to a field
not needed   with the reason
off          the key is switched off or unset
unknown      not a key of the tool; an error if the caller is strict
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import ConfigError
from .keys import LOOP, MAPPED, NOT_NEEDED, REFUSED, Key, Sections

AUTO = "auto"
SWITCH = "true or false"  # what a value has to be


def is_on(value: Any, off: tuple[Any, ...] = ()) -> bool:
    """Tells whether a value switches something on: a size above 1, a fraction, a text but "auto".

    Of a table, ``enabled`` decides, or that of its ``shared_parameters``; without one, whether any
    value inside is on. ``off``: further values that are off.
    """
    if isinstance(value, Mapping):
        shared = value.get("shared_parameters")
        switch = shared if isinstance(shared, Mapping) and "enabled" in shared else value
        return (
            switch["enabled"] not in (False, None, AUTO)
            if "enabled" in switch
            else any(map(is_on, value.values()))
        )
    if isinstance(value, int) and not isinstance(value, bool):
        return value > 1
    return value not in (None, False, "", AUTO, [], 0.0, *off)


class Translation:
    """A translation in progress: the fields set so far, and a report line for every key. ``loop``:
    what the training loop has."""

    tool: str
    sections: Sections
    known = ""  # which of its keys, in messages
    noes: tuple[str, ...] = ()  # texts that switch off

    def __init__(self, mapping: Mapping, *, strict: bool, loop: Mapping[str, Any] | None):
        self.mapping, self.strict, self.loop = mapping, strict, loop
        self.fields: dict[str, Any] = {}
        self.report: list[str] = []

    def find(self, path: str, name: str) -> Key | None:
        """Finds the row of a key; None if it is unknown."""
        return self.sections[path].get(name)

    def map(self, key: str, **fields: Any) -> None:
        """Sets fields from ``key``. Raises ConfigError if another key set another value."""
        for name, value in fields.items():
            if self.fields.get(name) not in (None, value):
                raise ConfigError(
                    f"{self.tool} {key} asks for {name}={value!r}, and another key for"
                    f" {self.fields[name]!r}: leave one of them out"
                )
        self.fields |= fields
        mapped = ", ".join(f"{name}={value!r}" for name, value in fields.items())
        self.report.append(f"{key} mapped to {mapped}")

    def off(self, key: str, why: str = "") -> None:
        """Reports that ``key`` has no effect."""
        self.report.append(f"{key} off" + (f": {why}" if why else ""))

    def section(self, path: str, parent: Mapping, key: str) -> Mapping:
        """Returns the table ``key`` of ``parent``; empty if absent, null or false. Raises
        ConfigError if it is not a table."""
        value = parent.get(key)
        if value is None or value is False:
            if key in parent:
                self.off(f"{path}{key}")
            return {}
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self.tool} {path}{key}={value!r} is not a table of keys")
        return value

    def value(
        self,
        path: str,
        table: Mapping,
        name: str,
        kind: str = SWITCH,
        is_one: Callable[[Any], bool] = lambda value: isinstance(value, bool) or value == 0,
    ) -> Any:
        """Returns a value of a table; None if it is absent or left to the loop. Raises ConfigError
        if it is not of its kind."""
        value = table.get(name)
        if value is None or value == AUTO:
            return None
        if not is_one(value):
            raise ConfigError(f"{self.tool} {path}{name}={value!r} is not {kind}")
        return value

    def rest(self, path: str, table: Mapping, *taken: str) -> None:
        """Reports every key of ``table`` that maps to no field, except the ``taken`` ones. Raises
        ConfigError for one that is switched on and not supported, or unknown if strict."""
        for key, value in table.items():
            known = self.find(path, str(key))
            if known is None and str(key).startswith("_"):
                self.off(f"{path}{key}", "a remark")
            elif known is None:
                self.unknown(path, key, self.sections[path])
            elif known.fate != MAPPED and known.name not in taken:
                self._note(f"{path}{key}", known, value)

    def _note(self, key: str, known: Key, value: Any) -> None:
        why, on = known.why.replace("`", ""), is_on(value, known.off + self.noes)
        if known.fate == REFUSED and on:
            raise ConfigError(
                f"{self.tool} {key}={value!r} is not to be had here: {why}. Leave it out."
            )
        if known.fate != NOT_NEEDED and not on:
            self.off(key)
        else:
            fate = "left to the loop" if known.fate == LOOP else known.fate
            self.report.append(f"{key} {fate}: {why}")

    def unknown(self, path: str, key: Any, names: Any) -> None:
        """Reports a key that the tool does not have. ``names``: those that it has there. Raises
        ConfigError if strict."""
        near = difflib.get_close_matches(str(key), names, n=1)
        elsewhere = [section for section in self.sections if self.find(section, str(key))]
        hint = f": did you mean {path}{near[0]}?" if near else ""
        if elsewhere and not near:
            hint = f": it belongs to {elsewhere[0].removesuffix('.') or 'the top level'}"
        if self.strict:
            raise ConfigError(
                f"{self.tool} {path}{key} is unknown{self.known}{hint}. Correct it, leave it out,"
                f" or have it ignored by from_{self.tool.lower()}(..., strict=False)."
            )
        self.report.append(f"{path}{key} unknown{hint}")
