"""Known classes of other libraries: those of 8 bits, those that are refused, and their names.

Their steps are tested beside torch's (`test_known.py`) and beside each library's own
(`test_class_step.py`).
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from functools import partial

import flashoptim_here
import pytest
import torch
from lazily import Lazily
from small_net import steps, wrapped
from torch import nn, optim

from infinity.errors import ConfigError, UsageError
from infinity.optim.known import OF_PATHS
from infinity.optim.known_elsewhere import ALIASES, ANY_PART, WHOLE

bitsandbytes, torchao = Lazily("bitsandbytes"), Lazily("torchao.optim")
pytestmark = pytest.mark.filterwarnings("ignore")
Make = Callable[[list[nn.Parameter]], optim.Optimizer]


EIGHT_BITS: dict[str, Make] = {
    "bitsandbytes AdamW8bit": lambda p: bitsandbytes.optim.AdamW8bit(p, lr=1e-2),
    "bitsandbytes PagedAdamW8bit": lambda p: bitsandbytes.optim.PagedAdamW8bit(p, lr=1e-2),
    "bitsandbytes AdamW, 8 bits": lambda p: bitsandbytes.optim.AdamW(p, lr=1e-2, optim_bits=8),
    "torchao AdamW8bit": lambda p: torchao.AdamW8bit(p, lr=1e-2),
}


def trained(make: Make, home: str, folder, **config) -> dict[str, torch.Tensor]:
    net, optimizer = wrapped(make, home, folder, **config)
    steps(net, optimizer, 20)
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


@pytest.mark.parametrize("case", EIGHT_BITS)
def test_classes_of_8_bits_have_moments_in_8_bits(case, tmp_path, caplog):
    """Claim: said in one line; the bits of AdamW with moments="int8"."""
    with caplog.at_level(logging.INFO, "infinity"):
        found = trained(EIGHT_BITS[case], "nvme", tmp_path)
    assert "steps as ADAMW in the engine's kernels, with moments in int8" in caplog.text
    # torchao keeps its rate in fp32
    rate = torch.tensor(1e-2).item() if "torchao" in case else 1e-2
    plain = partial(optim.AdamW, lr=rate)
    expected = trained(plain, "host", tmp_path, moments="int8")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def with_codes(params: list[nn.Parameter]) -> optim.Optimizer:
    optimizer = bitsandbytes.optim.AdamW8bit(params)
    for param in params:
        codes = torch.zeros(param.shape, dtype=torch.uint8)
        optimizer.state[param] = {"step": 1, "state1": codes, "state2": codes}
    return optimizer


def with_a_step_of_its_own(params: list[nn.Parameter]) -> optim.Optimizer:
    optimizer = bitsandbytes.optim.AdamW(params)
    optimizer.step = lambda closure=None: None
    return optimizer


def with_a_limit(params: list[nn.Parameter]) -> optim.Optimizer:
    optimizer = bitsandbytes.optim.AdamW(params)
    optimizer.args.max_unorm = 0.5
    return optimizer


def with_rates_of_its_own(params: list[nn.Parameter]) -> optim.Optimizer:
    optimizer = bitsandbytes.optim.AdamW(params)
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    manager.override_config(params[0], "lr", 1.0)
    return optimizer


@pytest.fixture(autouse=True)
def no_rates_of_others():
    """The library's manager is one for the process, and knows parameters by their ids."""
    yield
    if "bitsandbytes" in sys.modules:
        bitsandbytes.optim.GlobalOptimManager.get_instance().initialize()


REFUSED: dict[str, tuple[Make, str]] = {
    "codes": (with_codes, "has state1 in 8 bits: give wrap_model a fresh one"),
    "a step of its own": (with_a_step_of_its_own, "was replaced on the object"),
    "a limit": (with_a_limit, "max_unorm=0.5 is not supported: set it to 0.0"),
    "rates of single parameters": (with_rates_of_its_own, "sets lr of single parameters"),
    "stochastic rounding": (
        lambda p: torchao.AdamW8bit(p, bf16_stochastic_round=True),
        "bf16_stochastic_round=True is not supported",
    ),
    "a decay of its own rate": (
        lambda p: flashoptim_here.imported().FlashAdamW(
            p, quantize=False, master_weight_bits=None, fused=False, decouple_lr=True
        ),
        "decouple_lr=True is not supported",
    ),
    "amsgrad": (lambda p: torchao.AdamW8bit(p, amsgrad=True), "amsgrad=True, which is not"),
    "4 bits": (lambda p: torchao.AdamW4bit(p), "torchao.optim.adam.AdamW4bit is not supported"),
    "a sum that begins": (
        lambda p: optim.Adagrad(p, initial_accumulator_value=0.1),
        "initial_accumulator_value=0.1",
    ),
    "no rule": (lambda p: optim.LBFGS(p), "LBFGS is not supported.*Adadelta, Adagrad, Adamax"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_step_otherwise_is_refused(what, tmp_path):
    make, said = REFUSED[what]
    with pytest.raises(ConfigError, match=said):
        wrapped(make, "host", tmp_path)


def test_codes_are_no_state_to_load(tmp_path):
    """Claim: a state dict in 8 bits is not read as numbers."""
    net, optimizer = wrapped(EIGHT_BITS["bitsandbytes AdamW8bit"], "host", tmp_path)
    steps(net, optimizer, 1)
    saved = optimizer.state_dict()
    state = saved["state"][0]
    saved["state"][0] = state | {"state1": torch.zeros_like(state["state1"], dtype=torch.uint8)}
    before = optimizer.state_dict()["state"][0]["state1"].clone()
    with pytest.raises(UsageError, match="codes of another library"):
        optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state_dict()["state"][0]["state1"], before)


def test_every_class_named_is_one_of_its_library():
    for modules in (WHOLE, ANY_PART):
        for module, names in modules.items():
            for name in names.split():
                found = getattr(importlib.import_module(module), name)
                assert f"{found.__module__}.{found.__qualname__}" == f"{module}.{name}"


def test_only_four_libraries_have_classes_that_step_by_a_rule():
    of_rules = [path for path, known in ALIASES.items() if known.rule is not None]
    libraries = {path.partition(".")[0] for path in of_rules}
    assert libraries == {"bitsandbytes", "flashoptim", "pytorch_optimizer", "torchao"}


def test_every_class_with_a_rule_of_its_own_is_one_of_its_library():
    for known in OF_PATHS:
        module, _, name = known.kind.rpartition(".")
        found = getattr(importlib.import_module(module), name)
        assert f"{found.__module__}.{found.__qualname__}" == known.kind
