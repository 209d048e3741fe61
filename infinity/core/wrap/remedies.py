"""Remedies: what to change in a configuration whose plan does not fit. Each is tried before it is
named: the same model is planned with it.

remedy   fields of Config that differ from what was given, and the words for them
works    plans a configuration; returns None, or the CapacityError of the plan
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from ...choices import AUTO
from ...config import Config
from ...errors import CapacityError, ConfigError
from ..machine import scratch
from ..machine.sizes import format_nbytes
from ..machine.tiers import BUDGETS

Works = Callable[[Config], "CapacityError | None"]
MOST_TRIES = 4 * len(BUDGETS)  # of budgets that are short one after the other
LEAST_POWER = 16  # of two: the smallest budget of the device that is tried
LOWER = ("host", "nvme")  # homes below the device


def with_remedies(
    error: CapacityError,
    config: Config,
    works: Works,
    *,
    steps: bool,
    largest_nbytes: int,
    frees: bool,
    share: Fraction = Fraction(1),
) -> CapacityError:
    """Returns ``error`` with the changes after which the plan fits: larger budgets, if budgets were
    given, and the smallest change of something else. ``steps``: whether an optimizer steps the
    model. ``largest_nbytes``: the weights of its largest unit. ``frees``: whether others may use
    memory of the machine. ``share``: this rank's part of its budgets. Tries some twenty plans."""
    larger = _larger(error, config, works, share)
    larger = larger or "make so much free" * bool(frees and error.needed)
    return _told(error, [larger, _other(config, works, steps, largest_nbytes)])


def with_larger_budgets(
    error: CapacityError, config: Config, works: Works, share: Fraction
) -> CapacityError:
    """Returns ``error``, of a running job, with the budgets that are enough for what it needed."""
    return _told(error, [_larger(error, config, works, share)])


def _told(error: CapacityError, remedies: list[str]) -> CapacityError:
    """Adds ``remedies`` to an error. Nothing follows them: their last word may be copied."""
    text = " or ".join(filter(None, remedies)) or "nothing that can be set makes it fit"
    made = CapacityError(f"{error} {text[0].upper()}{text[1:]}")
    made.needed = error.needed
    return made


def _larger(error: CapacityError, config: Config, works: Works, share: Fraction) -> str:
    """Returns the budgets that are enough, if all that are short were given."""
    larger: dict[str, Any] = {}
    for _ in range(MOST_TRIES):
        for name, nbytes in error.needed.items():
            if getattr(config, name) is None:
                return ""
            larger[name] = nbytes
        if refused := works(dataclasses.replace(config, **larger)):
            error = refused
        else:
            part = {**dict.fromkeys(larger, share), "device_memory": 1}
            whole = {name: math.ceil(larger[name] / part[name]) for name in larger}
            amounts = (
                f"{name} by {format_nbytes(whole[name] - int(getattr(config, name) / part[name]))}"
                for name in whole
            )
            return f"raise {' and '.join(amounts)}: {_as_config(whole)}"
    return ""


def _other(config: Config, works: Works, steps: bool, largest_nbytes: int) -> str:
    """Returns the smallest change of anything but a budget that is enough."""
    for change, words in _changes(config, steps, largest_nbytes):
        try:
            if works(dataclasses.replace(config, **change)) is None:
                return f"{words}: {_as_config(change)}"
        except ConfigError:
            continue  # not to be combined with the rest of the configuration
    return ""


def _changes(
    config: Config, steps: bool, largest_nbytes: int
) -> Iterator[tuple[Mapping[str, Any], str]]:
    if config.units != AUTO:
        yield {"units": AUTO}, "let the engine choose the units"
    if config.weights_on_host:
        yield {"weights_on_host": None}, "let the engine choose what it caches"
    if config.activations in LOWER:
        yield {"activations": AUTO}, "leave activations on the device"
    usable = (
        [] if config.nvme_paths else [each for each in scratch.candidates() if not each.refusal]
    )
    largest = max(usable, key=lambda each: each.usable_nbytes, default=None)
    folder: dict[str, Any] = {"nvme_paths": (largest.folder,)} if largest is not None else {}
    if folder and AUTO in (config.params, config.optimizer):
        yield folder, "add a folder on a disk"
    for homes in _homes(config, steps):
        on_disk = "nvme" in homes.values()
        if on_disk and not (config.nvme_paths or folder):
            continue
        words = (
            "move more to disk"
            if on_disk
            else "keep more on the host"
            if "nvme" in (config.params, config.optimizer)
            else "give the weights a lower home"
            if "params" in homes
            else "give the optimizer's state a lower home"
        )
        yield homes | (folder if on_disk else {}), words
    if config.device_memory is None and config.host_memory is not None:
        for power in range(largest_nbytes.bit_length() - 1, LEAST_POWER - 1, -1):
            # What is staged of a tiled layer is small, too.
            yield {"device_memory": 1 << power}, "run large layers in tiles"


def _homes(config: Config, steps: bool) -> list[dict[str, Any]]:
    """Returns other homes than the given ones, the smallest changes first. Those that were left to
    the engine have been tried."""
    asked = {"params": config.params} | ({"optimizer": config.optimizer} if steps else {})
    choices = [(home,) if home == AUTO else (home, *LOWER) for home in asked.values()]
    others = [
        {name: home for name, home in zip(asked, homes) if home != asked[name]}
        for homes in dict.fromkeys(itertools.product(*choices))
    ]
    return sorted(
        (each for each in others if each), key=lambda each: (len(each), sorted(each.items()))
    )


def _as_config(fields: Mapping[str, Any]) -> str:
    shown = {
        name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()
    }
    return f"Config({', '.join(f'{name}={value!r}' for name, value in shown.items())})"
