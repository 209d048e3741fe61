"""What computes on state in memory, under pytest-benchmark (bench_loops.py)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch

from infinity import native
from infinity.config import Config
from infinity.core.step.known import Known
from infinity.errors import ConfigError
from infinity.ext.class_step.known_elsewhere import BY_RULE
from infinity.tools.bench import adam

from . import rules as rules_theme
from .recorded import record

KIB, MIB = 1024, 1024 * 1024
MASTERS = {"own": adam.FP32, "split": adam.SPLIT}
MOMENTS = {
    "fp32": (native.DType.FLOAT32, 4),
    "bf16": (native.DType.BFLOAT16, 2),
    "int8": (native.DType.INT8, 1),
}
# Of classes whose libraries may not be here
OF_LIBRARIES = {
    "lr": 1e-3,
    "eps": 1e-8,
    "betas": (0.9, 0.99, 0.999),
    "alpha": 5.0,
    "t_alpha_beta3": None,
}
COUNTS = (256 * KIB, 16 * MIB)  # parameters: state that caches hold, and state that they do not
SUMMED = (4 * KIB, 64 * KIB, MIB, 32 * MIB)


def variants(rules: Mapping[native.Rule, Known]) -> list[adam.Variant]:
    """Returns a variant of each of ``rules`` with each form of its master and moments."""
    found = []
    for rule, known in rules.items():
        for name, (dtype, nbytes) in MOMENTS.items():
            group = _group(known, all_moments=name == "fp32")
            moments = known.moments_of([group])
            try:
                known.arrays_of(moments, Config(moments=name))
            except ConfigError:  # the rule has no such moments
                continue
            for master, layout in MASTERS.items():
                wide = 4 if master == "own" else 2
                sizes = {"weight": wide, "grad": wide} | dict.fromkeys(moments.values(), nbytes)
                sizes |= {} if master == "own" else {"master": 2}
                label, kept = f"{rule.name.lower()}-{master}-{name}", layout | {"moments": dtype}
                settings = rules_theme.settings_of(known, group)
                found.append(adam.Variant(label, kept, sizes, rule, settings))
    return found


def _group(known: Known, *, all_moments: bool) -> dict[str, Any]:
    """Makes a group of an optimizer's, with the settings that give it moments: not those that are
    in fp32 alone, unless ``all_moments``."""
    group: dict[str, Any] = dict(OF_LIBRARIES)
    if isinstance(known.kind, type):
        group |= known.kind([torch.zeros(1)]).param_groups[0]
    for moment, key in known.only_with.items():
        if key not in known.instead and (all_moments or moment not in known.exact):
            group[key] = True if key in known.flags else 0.9
    return group


def _record_step(benchmark: Any, group: str, ours: adam.Ours) -> None:
    ceiling, unit = ("moving the same bytes", ours.move), "G parameters/s"
    record(benchmark, group, ours.step, amount=ours.count, unit=unit, ceiling=ceiling)


@pytest.mark.parametrize("threads", [1, "all"])
@pytest.mark.parametrize("variant", adam.VARIANTS, ids=lambda each: each.name)
def test_adam(benchmark, settings, variant, threads):
    """Measures the optimizer's kernel, by threads, beside a loop that moves its bytes."""
    count = settings.scaled(adam.PARAMETERS // 4, 64 * KIB)
    ours = adam.Ours(variant, count, settings.threads if threads == "all" else threads)
    _record_step(benchmark, f"adam, {threads} threads", ours)


@pytest.mark.parametrize("count", COUNTS, ids=lambda count: f"{count // KIB}Ki")
@pytest.mark.parametrize("variant", variants(BY_RULE), ids=lambda each: each.name)
def test_rule(benchmark, settings, variant, count):
    """Measures each rule's kernel on one thread, by form and size, beside a loop that moves its
    bytes."""
    few = count if count == COUNTS[0] else settings.scaled(count, 64 * KIB)
    ours = adam.Ours(variant, few, 1)  # a ceiling that starts threads is none for small sizes
    _record_step(benchmark, f"rule {variant.rule.name.lower()}, {count // KIB} Ki", ours)


@pytest.mark.parametrize("nbytes", SUMMED, ids=lambda nbytes: f"{nbytes // KIB}KiB")
def test_checksum(benchmark, nbytes):
    """Measures the checksum of bytes in memory beside a loop that only reads them."""
    memory = native.Region(nbytes, True, 1)
    streams = [(memory.address, 1, True, False)]
    values = native.tensor_at(memory, memory.address, nbytes, torch.uint8)
    ceiling = ("reading the same bytes", partial(native.move_streams, streams, nbytes, 1))
    job = partial(native.crc32c, values)
    record(benchmark, "checksum", job, amount=nbytes, unit="GB/s", ceiling=ceiling)
