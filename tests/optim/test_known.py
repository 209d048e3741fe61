"""Known: every rule and every class steps as its library does, from every home.

Method: a small model takes 20 steps of its own gradients beside the library's optimizer. Homes,
budgets and units of vectors have the same bits (`tests/native/test_kernel.py` has the units).
Twins: another learning rate differs; a class that is changed is refused.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial

import flashoptim_here
import pytest
import torch
from lazily import Lazily
from marks import few
from small_net import furthest, model, same, steps, wrapped
from torch import nn, optim

import infinity
from infinity import native
from infinity.errors import ConfigError, UsageError
from infinity.optim.known import ALIASES, KNOWN

bitsandbytes, torchao = Lazily("bitsandbytes"), Lazily("torchao.optim")
pytestmark = pytest.mark.filterwarnings("ignore")
HOMES = ["device", "host", "nvme"]
Make = Callable[[list[nn.Parameter]], optim.Optimizer]


def of_flashoptim(name: str, params: list[nn.Parameter], **settings) -> optim.Optimizer:
    kind = getattr(flashoptim_here.imported(), name)
    return kind(params, quantize=False, master_weight_bits=None, fused=False, **settings)


TORCHS: dict[str, Make] = {
    "AdamW": lambda params: optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "Adam": lambda params: optim.Adam(params, lr=1e-2, weight_decay=0.1),
    "SGD": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "Adadelta": lambda params: optim.Adadelta(params, lr=1.0, rho=0.8, weight_decay=0.01),
    "Adagrad": lambda params: optim.Adagrad(params, lr=1e-2, lr_decay=0.01, weight_decay=0.01),
    "Adamax": lambda params: optim.Adamax(params, lr=2e-3, weight_decay=0.1, maximize=True),
    "RAdam": lambda params: optim.RAdam(params, lr=1e-2, weight_decay=0.1),
    "RAdam, decoupled": lambda params: optim.RAdam(
        params, lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1, decoupled_weight_decay=True
    ),
    "RMSprop": lambda params: optim.RMSprop(params, lr=1e-3, weight_decay=0.01),
    "RMSprop, momentum": lambda params: optim.RMSprop(params, lr=1e-3, momentum=0.9),
    "Rprop": lambda params: optim.Rprop(params, lr=1e-3),
}
OTHERS: dict[str, Make] = {
    "bitsandbytes AdamW": lambda p: bitsandbytes.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "bitsandbytes Adam": lambda p: bitsandbytes.optim.Adam(p, lr=1e-2, weight_decay=0.1),
    "bitsandbytes PagedAdamW32bit": lambda p: bitsandbytes.optim.PagedAdamW32bit(p, lr=1e-2),
    "bitsandbytes Lion": lambda p: bitsandbytes.optim.Lion(p, lr=1e-3, weight_decay=0.1),
}
OTHERS |= {
    f"flashoptim {name}": partial(of_flashoptim, name, **settings)
    for name, settings in {
        "FlashAdamW": {"lr": 1e-2, "weight_decay": 0.1},
        "FlashAdam": {"lr": 1e-2, "weight_decay": 0.1},
        "FlashLion": {"lr": 1e-3, "weight_decay": 0.1},
        "FlashSGD": {"lr": 0.1, "momentum": 0.9},
    }.items()
}
EIGHT_BITS: dict[str, Make] = {
    "bitsandbytes AdamW8bit": lambda p: bitsandbytes.optim.AdamW8bit(p, lr=1e-2),
    "bitsandbytes PagedAdamW8bit": lambda p: bitsandbytes.optim.PagedAdamW8bit(p, lr=1e-2),
    "bitsandbytes AdamW, 8 bits": lambda p: bitsandbytes.optim.AdamW(p, lr=1e-2, optim_bits=8),
    "torchao AdamW8bit": lambda p: torchao.AdamW8bit(p, lr=1e-2),
}
MADE = TORCHS | OTHERS


def run(make: Make, home: str | None, folder, **config) -> tuple[dict, dict]:
    net, optimizer = wrapped(make, home, folder, **config)
    steps(net, optimizer, 20)
    state = ALIASES["bitsandbytes.optim.adamw.AdamW"].flat(optimizer.state_dict())["state"]
    return (
        {name: value.detach().clone() for name, value in net.state_dict().items()},
        {i: {k: torch.as_tensor(v).clone() for k, v in of.items()} for i, of in state.items()},
    )


@pytest.mark.parametrize("case", MADE)
def test_twenty_steps_are_the_librarys_from_every_home(case, tmp_path):
    """Claim: the library's weights within a hundred-thousandth of what they moved by, its keys, and
    the same bits from every home. flashoptim corrects biases in fp32, which costs it a digit."""
    theirs, state = run(MADE[case], None, tmp_path)
    found = [run(MADE[case], home, tmp_path) for home in HOMES]
    moved = furthest(theirs, dict(model().state_dict()))
    near = 1e-4 if case.startswith("flashoptim") else 1e-5
    assert furthest(found[0][0], theirs) < near * moved + 2e-7
    assert {i: set(of) for i, of in found[0][1].items()} == {i: set(of) for i, of in state.items()}
    for i, of in state.items():
        for key, value in of.items():
            assert torch.allclose(found[0][1][i][key].float(), value.float(), rtol=1e-3, atol=1e-5)
    assert same(found[0], found[1]) and same(found[0], found[2])


@pytest.mark.parametrize("case", few(MADE, 6))
def test_another_rate_shows(case, tmp_path):
    """The twin."""

    def faster(params):
        optimizer = MADE[case](params)
        for group in optimizer.param_groups:
            group["lr"] *= 1.01
        return optimizer

    theirs, _ = run(MADE[case], None, tmp_path)
    found, _ = run(faster, "host", tmp_path)
    moved = furthest(theirs, dict(model().state_dict()))
    assert furthest(found, theirs) > 1e-5 * moved + 2e-7


@pytest.mark.parametrize("case", MADE)
def test_states_load_both_ways(case, tmp_path):
    """Claim: a job goes on from the library's state with the library's numbers, and the library
    from the job's."""
    plain = wrapped(MADE[case], None, tmp_path)
    steps(*plain, 5)
    ours = wrapped(MADE[case], "host", tmp_path)
    ours[0].load_state_dict(plain[0].state_dict())
    ours[1].load_state_dict(plain[1].state_dict())
    back = infinity.unwrap_model(*ours)
    again = wrapped(MADE[case], "nvme", tmp_path)
    again[0].load_state_dict(plain[0].state_dict())
    again[1].load_state_dict(plain[1].state_dict())
    for net, optimizer in (plain, back, again):
        steps(net, optimizer, 5, seed=2)
    for net, _ in (back, again):
        assert furthest(dict(net.state_dict()), dict(plain[0].state_dict())) < 2e-5


@pytest.mark.parametrize("moments", few(["int8", "bf16"], 1))
@pytest.mark.parametrize("case", TORCHS)
def test_smaller_moments_have_the_same_bits_from_every_home(case, moments, tmp_path):
    """Claim: and they are near those in fp32, or refused for the rule."""
    make = TORCHS[case]
    if case == "Rprop" and moments == "int8":
        with pytest.raises(ConfigError, match="moments='int8' is not for RPROP: choose fp32 or"):
            wrapped(make, "host", tmp_path, moments=moments)
        return
    found = [run(make, home, tmp_path, moments=moments) for home in HOMES]
    assert same(found[0], found[1]) and same(found[0], found[2])
    whole, _ = run(make, "host", tmp_path)
    moved = furthest(whole, dict(model().state_dict()))
    assert 0 < furthest(found[0][0], whole) < 0.5 * moved


@pytest.mark.parametrize("case", EIGHT_BITS)
def test_classes_of_8_bits_have_moments_in_8_bits(case, tmp_path, caplog):
    """Claim: said in one line; the bits of AdamW with moments="int8"."""
    with caplog.at_level(logging.INFO, "infinity"):
        found, _ = run(EIGHT_BITS[case], "nvme", tmp_path)
    assert "steps as ADAMW in the engine's kernels, with moments in int8" in caplog.text
    # torchao keeps its rate in fp32
    rate = torch.tensor(1e-2).item() if "torchao" in case else 1e-2
    plain = partial(optim.AdamW, lr=rate)
    expected, _ = run(plain, "host", tmp_path, moments="int8")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("case", MADE)
def test_a_job_resumes_to_the_bit(case, tmp_path):
    whole = wrapped(MADE[case], "host", tmp_path)
    steps(*whole, 4)
    infinity.save_checkpoint(tmp_path / "saved", *whole)
    resumed = wrapped(MADE[case], "nvme", tmp_path)
    infinity.load_checkpoint(tmp_path / "saved", *resumed)
    for net, optimizer in (whole, resumed):
        steps(net, optimizer, 4, seed=2)
    for name, value in whole[0].state_dict().items():
        assert torch.equal(value, resumed[0].state_dict()[name])


# --- refusals ---


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
        lambda p: of_flashoptim("FlashAdamW", p, decouple_lr=True),
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


def test_every_rule_has_a_class_and_a_test():
    assert set(KNOWN) == set(native.Rule.__members__.values())
    tested = {name.partition(",")[0] for name in TORCHS}
    assert {known.kind.__name__ for known in KNOWN.values() if known.kind} == tested
    of_rules = [path for path, known in ALIASES.items() if known.rule is not None]
    assert all(path.startswith(("bitsandbytes.", "flashoptim.", "torchao.")) for path in of_rules)
