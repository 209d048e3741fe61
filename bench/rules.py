"""rules: each optimizer's kernel on fp32 state in memory, against a loop that only moves its bytes,
and against its library's own class."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch

from infinity import native
from infinity.core.step.known import Known
from infinity.ext.class_step.known_elsewhere import BY_RULE
from infinity.tools.bench.adam import FP32, Ours, Variant
from infinity.tools.bench.results import Measured, row
from infinity.tools.bench.rounds import paired, tell
from infinity.tools.bench.settings import Settings

PARAMETERS = 32 * 1024 * 1024


def measure(settings: Settings) -> Measured:
    """Measures rows ``rules.<rule>``, with their ratio to the library's class. A note names each
    library that is not here."""
    count = settings.scaled(PARAMETERS, 64 * 1024)
    found = Measured([])
    for rule, known in BY_RULE.items():
        if (kind := _kind(known)) is not None:
            found.add(_measure(rule, known, kind, count, settings))
        elif known.kind is not None:
            found.notes.append(f"rules.{rule.name.lower()}: no {known.kind}")
    return found


def _kind(known: Known) -> type | None:
    """Returns the class; None if there is none, or if its library is not here."""
    if not isinstance(known.kind, str):
        return known.kind
    module, _, name = known.kind.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except ImportError:
        return None


def _measure(
    rule: native.Rule, known: Known, kind: type, count: int, settings: Settings
) -> Measured:
    name = f"rules.{rule.name.lower()}"
    tell(name)
    theirs = _theirs(known, kind, count, settings.threads)
    group = theirs.param_groups[0]
    moments = known.moments_of([group]).values()
    variant = Variant(
        name,
        FP32 | {"moments": native.DType.FLOAT32},
        dict.fromkeys(("weight", *moments, "grad"), 4),
        rule,
        settings_of(known, group),
    )
    ours = Ours(variant, count, settings.threads)
    times = settings.alternate({"ours": ours.step, "moving": ours.move, "class": theirs.step})
    rates = {who: [count / each / 1e9 for each in of_one.wall] for who, of_one in times.items()}
    library = kind.__module__.partition(".")[0]
    ratios = {library: paired(times["ours"].wall, times["class"].wall)}
    ceiling = ("moving the same bytes", rates["moving"])
    rows = [row(name, "G parameters/s", rates["ours"], ceiling=ceiling, ratios=ratios)]
    settings.show(rows)
    return Measured(rows)


def settings_of(known: Known, group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the kernel's hyperparameters in the first step of an optimizer's ``group``."""
    hyper = native.Hyperparameters()
    known.set_on(hyper, group)
    if known.counters is not None:
        for key, value in known.counters.step(group, 1, known.counters.first(group))[0].items():
            setattr(hyper, key, value)
    names = [each for each in dir(hyper) if not each.startswith("_")]
    return {each: getattr(hyper, each) for each in names if each not in ("step", "grad_factors")}


def _theirs(known: Known, kind: type, count: int, threads: int) -> Any:
    torch.set_num_threads(threads)
    param = torch.nn.Parameter(torch.randn(count) * 0.02)
    param.grad = torch.randn(count) * 1e-3
    switches = {*known.only_with.values()} - {*known.instead}
    more = {key: 0.9 if key == "momentum" else True for key in switches}
    return kind([param], **more)
