"""Expected: an optimizer is the one that a configuration names, by class and hyperparameters.

Twins: another class, another rate.
"""

from __future__ import annotations

import pytest
import torch
from torch import optim

from infinity.errors import ConfigError
from infinity.ext.migrate.expected import check_expected

ADAMW = {"type": "AdamW", "lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.01}


def params() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(2))]


@pytest.mark.parametrize("expected", [None, ADAMW.items(), [("type", "AdamW")]])
def test_the_expected_optimizer_is_taken(expected):
    check_expected(optim.AdamW(params()), expected)


def test_adam_without_decay_is_adamw():
    """Claim: both step the same then. Twin: with a decay they do not."""
    check_expected(optim.Adam(params()), [("type", "AdamW"), ("weight_decay", 0)])
    with pytest.raises(ConfigError, match=r"is Adam\(.*expects AdamW"):
        check_expected(optim.Adam(params(), weight_decay=0.1), [("type", "AdamW")])


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: optim.SGD(params(), lr=1e-3), r"is SGD\(lr=0.001.*expects AdamW\(lr=0.001"),
        (lambda: optim.AdamW(params(), lr=2e-3), r"is AdamW\(lr=0.002.*leave it to the loop"),
        (lambda: optim.AdamW(params(), betas=(0.8, 0.999)), r"betas=\(0.8, 0.999\)"),
    ],
)
def test_another_one_is_refused(made, said):
    with pytest.raises(ConfigError, match=said):
        check_expected(made(), ADAMW.items())
