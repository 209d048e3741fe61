"""What a plan says of saves and of the return from one."""

from __future__ import annotations

import pytest
import torch

import infinity
from infinity.tools.plan.saves import Saves
from infinity.tools.train.settings import training_state_nbytes

GB = 10**9


@pytest.mark.parametrize(
    ("nbytes", "write", "read", "told", "warns"),
    [
        (12 * GB, 2 * GB, 4 * GB, ("in 6 s", "in 3 s"), False),
        (60 * GB, 2 * GB, 6 * GB, ("in 30 s", "in 10 s"), False),
        (61 * GB, 2 * GB, 6.1 * GB, ("in 30.5 s", "in 10 s"), True),
        (61 * GB, None, None, ("a checkpoint has 56.8 GiB",), False),  # no disk is planned
    ],
)
def test_a_plan_says_what_a_save_and_a_return_take(nbytes, write, read, told, warns):
    """Method: bytes over rates. Only what torchrun may cut off is warned of."""
    found = Saves(nbytes, write, read)
    assert all(each in found.line for each in told), found.line
    assert ("SIGUSR1 first" in found.line) == warns
    described = found.described()
    for where in (described, described["checkpoint"]):
        assert where["save_seconds"] == (write and nbytes / write)


def test_a_plans_checkpoint_has_the_bytes_of_a_saved_one(tmp_path):
    """Method: a bf16 model with AdamW is saved."""
    model = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(4)]).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    config = infinity.Config(params="host", optimizer="host")
    planned = training_state_nbytes(model, config)
    model, optimizer = infinity.wrap_model(model, optimizer, config)
    model(torch.ones(1, 128, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    infinity.save_checkpoint(tmp_path / "saved", model, optimizer)
    infinity.unwrap_model(model, optimizer)
    files = [path for path in (tmp_path / "saved").rglob("*.safetensors") if path.is_file()]
    assert planned == pytest.approx(sum(path.stat().st_size for path in files), rel=0.1)
