"""rules: each optimizer's kernel on fp32 state in memory, against a loop that only moves its bytes,
and against torch's own class."""

from __future__ import annotations

from typing import Any

import torch

from infinity import native
from infinity.bench.adam import FP32, Ours, Variant
from infinity.bench.results import Measured, row
from infinity.bench.rounds import alternate, paired, tell
from infinity.bench.settings import Settings
from infinity.optim.known import KNOWN, Known

PARAMETERS = 32 * 1024 * 1024


def measure(settings: Settings) -> Measured:
    """Measures rows ``rules.<rule>``, with their ratio to torch's class."""
    count = settings.scaled(PARAMETERS, 64 * 1024)
    found = Measured([])
    for rule, known in KNOWN.items():
        if known.kind is not None:
            found.add(_measure(rule, known, count, settings))
    return found


def _measure(rule: native.Rule, known: Known, count: int, settings: Settings) -> Measured:
    name = f"rules.{rule.name.lower()}"
    tell(name)
    torchs = _torchs(known, count, settings.threads)
    hyper = native.Hyperparameters()
    known.set_on(hyper, torchs.param_groups[0])
    names = [each for each in dir(hyper) if not each.startswith("_") and each != "grad_factors"]
    moments = known.moments_of(torchs.param_groups).values()
    variant = Variant(
        name,
        FP32 | {"moments": native.DType.FLOAT32},
        dict.fromkeys(("weight", *moments, "grad"), 4),
        rule,
        {each: getattr(hyper, each) for each in names if each != "step"},
    )
    ours = Ours(variant, count, settings.threads)
    times = alternate(
        {"ours": ours.step, "moving": ours.move, "torch": torchs.step}, settings.rounds
    )
    rates = {who: [count / each / 1e9 for each in of_one.wall] for who, of_one in times.items()}
    ratios = {"torch": paired(times["ours"].wall, times["torch"].wall)}
    ceiling = ("moving the same bytes", rates["moving"])
    rows = [row(name, "G parameters/s", rates["ours"], ceiling=ceiling, ratios=ratios)]
    settings.show(rows)
    return Measured(rows)


def _torchs(known: Known, count: int, threads: int) -> Any:
    torch.set_num_threads(threads)
    param = torch.nn.Parameter(torch.randn(count) * 0.02)
    param.grad = torch.randn(count) * 1e-3
    switches = {*known.only_with.values()} - {*known.instead}
    more = {key: 0.9 if key == "momentum" else True for key in switches}
    return known.kind([param], **more)
