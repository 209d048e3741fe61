"""Wrap: what wrap_model says of an option that does nothing any more.

Words used here:

**speculate**: an option of earlier versions, which is accepted and changes nothing.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from deleted import needs
from inside import parts_of
from models import at_home, differing
from torch import nn

import infinity


def trained(config: Any, *, make: Any = torch.optim.AdamW, resume: Path | None = None) -> Any:
    """A small model after two steps, its plan, and what it saved if it resumed nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    model, optimizer = infinity.wrap_model(model, make(model.parameters()), config)
    if resume is not None and resume.exists():
        infinity.load_checkpoint(resume, model, optimizer)
    for _ in range(2):
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if resume is not None and not resume.exists():
        infinity.save_checkpoint(resume, model, optimizer)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    plan = parts_of(model).planned.plan
    infinity.unwrap_model(model, optimizer)
    return state, plan


def in_a_file(config: dict[str, Any], folder: Path) -> str:
    path = folder / "job.toml"
    path.write_text(
        "".join(
            f"{name} = {str(value).lower()}\n" for name, value in config.items() if value is True
        )
        + 'params = "host"\noptimizer = "host"\n'
    )
    return str(path)


HOST = {"params": "host", "optimizer": "host"}
CASES = {
    "a dict": lambda folder: HOST,
    "at home on NVMe": lambda folder: at_home("nvme", "nvme", folder, max_grad_norm=0.5),
    "whole gradients": lambda folder: HOST | {"shard": "optimizer"},
    "nothing to be ahead of": lambda folder: {"params": "device", "optimizer": "device"},
    "a step by its class": lambda folder: HOST,
    "a file": lambda folder: HOST,
}


@needs("ext/class_step")
@pytest.mark.parametrize("case", CASES)
def test_speculate_is_accepted_does_nothing_and_says_so_once(case, tmp_path, caplog):
    """Method: bits and plan beside the twin without it, of which nothing is said. Some of the cases
    were refused by earlier versions."""
    make = torch.optim.Adafactor if case == "a step by its class" else torch.optim.AdamW
    found, config = [], CASES[case](tmp_path)
    for more in ({}, {"speculate": True}):
        caplog.clear()
        given = in_a_file(config | more, tmp_path) if case == "a file" else config | more
        with caplog.at_level(logging.WARNING, "infinity"):
            found.append(trained(given, make=make))
        said = [text for text in caplog.messages if "speculate" in text]
        assert len(said) == len(more) and all("step_in_backward()" in text for text in said)
    (plain, planned), (ahead, theirs) = found
    assert differing(plain, ahead) == [] and planned == theirs


def test_a_checkpoint_of_a_job_with_speculate_resumes_without_it(tmp_path):
    """Twin: and the other way round. The four steps have the same bits."""
    ends = []
    for number, (first, second) in enumerate(((True, False), (False, True))):
        saved = tmp_path / f"saved{number}"
        trained(HOST | {"speculate": first}, resume=saved)
        ends.append(trained(HOST | {"speculate": second}, resume=saved)[0])
    assert differing(*ends) == []
