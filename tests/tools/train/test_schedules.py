"""The learning rates of a DeepSpeed JSON's scheduler, under torch's."""

from __future__ import annotations

import json

import pytest
import torch

from infinity.errors import ConfigError
from infinity.tools.train.schedules import a_scheduler, shares

PEAK, STEPS = 3e-4, (0, 1, 2, 5, 19, 59, 199)
RATES = {"warmup_num_steps": 7, "warmup_min_lr": 1e-5, "warmup_max_lr": PEAK}
DECAY = RATES | {"total_num_steps": 60}
COSINE = {"warmup_num_steps": 7, "warmup_min_ratio": 0.01, "cos_min_ratio": 0.001}
COSINE |= {"total_num_steps": 60}
# Rates of those steps, by DeepSpeed 0.19.8's own schedulers (runtime/lr_schedules.py)
THEIRS = [
    ("WarmupLR", RATES, [1e-5, 1e-5, 0.00011330008426132641, 0.00024985536785060566, *[3e-4] * 3]),
    (
        "WarmupLR",
        RATES | {"warmup_type": "linear"},
        [1e-5, 1e-5, 5.1428571428571415e-05, 0.00017571428571428566, *[3e-4] * 3],
    ),
    (
        "WarmupDecayLR",
        DECAY | {"warmup_type": "log"},
        [1e-5, 1e-5, 0.00011330008426132641, 0.00024985536785060566]
        + [0.00023981132075471696, 2.0943396226415094e-05, 1e-5],
    ),
    (
        "WarmupDecayLR",
        DECAY | {"warmup_type": "linear"},
        [1e-5, 1e-5, 5.1428571428571415e-05, 0.00017571428571428566]
        + [0.00023981132075471696, 2.0943396226415094e-05, 1e-5],
    ),
    (
        "WarmupCosineLR",
        COSINE,
        [0.0, 2.9999999999999997e-06, 0.00010879353457108259, 0.0002486449801780341]
        + [0.00026366305963791876, 5.631767951164454e-07, 3e-07],
    ),
    (
        "WarmupCosineLR",
        COSINE | {"warmup_type": "linear"},
        [0.0, 2.9999999999999997e-06, 4.5428571428571425e-05, 0.0001727142857142857]
        + [0.00026366305963791876, 5.631767951164454e-07, 3e-07],
    ),
]


def rates(scheduler: str | None) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
    share = shares(scheduler, lr=PEAK, steps=60, warmup_steps=7)
    schedule, found = torch.optim.lr_scheduler.LambdaLR(optimizer, share), []
    for _ in range(max(STEPS) + 1):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return [found[step] for step in STEPS]


@pytest.mark.parametrize(("kind", "params", "theirs"), THEIRS)
def test_each_step_has_deepspeeds_rate(kind, params, theirs):
    """Twin: the loop's own schedule has other rates."""
    scheduler = a_scheduler(json.dumps({"type": kind, "params": params}))
    assert rates(scheduler) == pytest.approx(theirs, rel=1e-14)
    assert rates(None) != pytest.approx(theirs, rel=1e-2)


def test_a_value_of_auto_is_the_jobs():
    """Twin: a value that is left out is DeepSpeed's own."""
    auto = {"warmup_num_steps": "auto", "total_num_steps": "auto", "warmup_min_lr": 1e-5}
    scheduler = a_scheduler(json.dumps({"type": "WarmupDecayLR", "params": auto}))
    assert rates(scheduler) == pytest.approx(THEIRS[2][2], rel=1e-14)
    left_out = a_scheduler(json.dumps({"type": "WarmupDecayLR", "params": {"warmup_min_lr": 1e-5}}))
    assert rates(left_out)[-3] < rates(scheduler)[-3]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "give the section"),
        ('{"type": "OneCycle", "params": {}}', "WarmupDecayLR"),
        ('{"type": "WarmupLR", "params": {"total_num_steps": 9}}', "has no total_num_steps"),
        ('{"type": "WarmupLR", "params": {"warmup_num_steps": 0}}', "from 1 on"),
        ('{"type": "WarmupLR", "params": {"warmup_type": "cubic"}}', "log or linear"),
        ('{"type": "WarmupLR", "params": {"warmup_max_lr": [1e-3, 1e-4]}}', "a number"),
    ],
)
def test_a_scheduler_that_is_not_known_is_refused(text, said):
    """Twin: a known one is returned, with its names in order."""
    with pytest.raises(ConfigError, match=said):
        a_scheduler(text)
    assert a_scheduler('{"type": "WarmupLR"}') == '{"params": {}, "type": "WarmupLR"}'
