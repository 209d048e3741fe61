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
from small_net import model, steps, wrapped
from torch import nn, optim

import infinity
from infinity.errors import ConfigError, UsageError
from infinity.ext.class_step.known_elsewhere import ALIASES, ANY_PART, OF_PATHS, WHOLE

bitsandbytes, torchao = Lazily("bitsandbytes"), Lazily("torchao.optim")
adv_optm, optimi = Lazily("adv_optm"), Lazily("optimi")
pytestmark = pytest.mark.filterwarnings("ignore")
Make = Callable[[list[nn.Parameter]], optim.Optimizer]


EIGHT_BITS: dict[str, Make] = {
    "bitsandbytes AdamW8bit": lambda p: bitsandbytes.optim.AdamW8bit(p, lr=1e-2),
    "bitsandbytes PagedAdamW8bit": lambda p: bitsandbytes.optim.PagedAdamW8bit(p, lr=1e-2),
    "bitsandbytes AdamW, 8 bits": lambda p: bitsandbytes.optim.AdamW(p, lr=1e-2, optim_bits=8),
    "torchao AdamW8bit": lambda p: torchao.AdamW8bit(p, lr=1e-2),
}


def stepped(net: nn.Module, optimizer: optim.Optimizer) -> dict[str, torch.Tensor]:
    """The weights after 20 steps by given gradients."""
    for turn in range(20):
        for param in net.parameters():
            numbers = torch.arange(param.numel()) * (turn + 1.0)
            param.grad = torch.cos(numbers).view(param.shape) * 0.1
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def trained(make: Make, home: str, folder, **config) -> dict[str, torch.Tensor]:
    return stepped(*wrapped(make, home, folder, **config))


@pytest.mark.parametrize("case", EIGHT_BITS)
def test_classes_of_8_bits_have_moments_in_8_bits(case, tmp_path, caplog):
    """Claim: said in one line; parameters of 4096 elements have the bits of AdamW with
    moments="int8", smaller ones those of AdamW in fp32, as the class does."""
    with caplog.at_level(logging.INFO, "infinity"):
        found = trained(EIGHT_BITS[case], "nvme", tmp_path)
    assert "steps as ADAMW in the engine's kernels, with moments in int8, and in" in caplog.text
    # torchao keeps its rate in fp32
    rate = torch.tensor(1e-2).item() if "torchao" in case else 1e-2
    plain = partial(optim.AdamW, lr=rate)
    in_8_bits = trained(plain, "host", tmp_path, moments="int8")
    in_fp32 = trained(plain, "host", tmp_path)
    for name, value in found.items():
        one, other = in_8_bits[name], in_fp32[name]
        assert torch.equal(value, one if value.numel() >= 4096 else other)
        assert not torch.equal(one, other)


def by_module(manager, net: nn.Module) -> None:
    manager.register_module_override(net[1][0], "weight", {"optim_bits": 32})


def by_parameter(manager, net: nn.Module) -> None:
    manager.override_config(net[1][0].weight, "optim_bits", 32)


def by_size(manager, net: nn.Module) -> None:
    manager.override_config([net[1][0].weight], key_value_dict={"min_8bit_size": 4097})


def by_numbers(manager, net: nn.Module) -> None:
    by_parameter(manager, net)
    manager.register_parameters(net.parameters())
    manager.pid2config.clear()


@pytest.mark.parametrize("override", [by_module, by_parameter, by_size, by_numbers])
def test_what_the_manager_keeps_in_32_bits_stays_so(override):
    """Claim: overrides of single parameters are honoured, as transformers' Trainer makes one for
    each embedding; one after the wrap is refused. Twin: without it the parameter has other bits."""
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()

    def weight(make: Make, *overrides) -> torch.Tensor:
        manager.initialize()
        net = model()
        optimizer = make(list(net.parameters()))
        for each in overrides:
            each(manager, net)
        return stepped(*infinity.wrap_model(net, optimizer, {"params": "host"}))["1.0.weight"]

    in_fp32 = weight(partial(optim.AdamW, lr=1e-2))
    assert torch.equal(weight(EIGHT_BITS["bitsandbytes AdamW8bit"], override), in_fp32)
    assert not torch.equal(weight(EIGHT_BITS["bitsandbytes AdamW8bit"]), in_fp32)
    net = model()
    both = infinity.wrap_model(net, bitsandbytes.optim.AdamW8bit(net.parameters()))
    override(manager, net)
    with pytest.raises(UsageError, match=r"shape \(64, 64\) are in fp32 .*, and were in int8"):
        stepped(*both)


def test_a_class_of_32_bits_has_one_parameter_in_8():
    """Claim: an override of the bits counts both ways."""
    net = model()
    optimizer = bitsandbytes.optim.AdamW(net.parameters(), lr=1e-2)
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    manager.override_config(net[1][0].weight, "optim_bits", 8)
    net, _ = infinity.wrap_model(net, optimizer, {"params": "host"})
    dtypes = [p._infinity.flat_param.spec.moment_dtype for p in net.parameters() if p.ndim == 2]
    assert dtypes == [torch.float32, torch.uint8, torch.float32, torch.float32]


def test_groups_of_flashoptim_that_are_not_quantized_are_in_fp32(monkeypatch):
    """Claim: `quantize` is read in each group; weights without a master are, or are refused."""
    flash = flashoptim_here.imported()
    net = model().bfloat16()
    params = list(net.parameters())
    optimizer = flash.FlashAdamW(params[:2], quantize=False, master_weight_bits=None, fused=False)
    optimizer.add_param_group({"params": params[2:], "quantize": True})  # as on a GPU
    with pytest.raises(ConfigError, match=r"master_weight_bits=None.*Config\(master='none'\)"):
        infinity.wrap_model(net, optimizer, {"params": "host"})
    net, _ = infinity.wrap_model(net, optimizer, {"params": "host", "master": "none"})
    dtypes = [param._infinity.flat_param.spec.moment_dtype for param in net.parameters()]
    assert dtypes == [torch.float32] * 2 + [torch.uint8] * 6


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
    "rounding that is not done": (
        lambda p: adv_optm.SignSGD_adv(p, state_precision="bf16_sr"),
        "draws random numbers.*state_precision='bf16_sr'",
    ),
    "blocks below ours": (
        lambda p: torchao.AdamW8bit(p, block_size=32),
        "block_size=32 is not supported: set it to 64",
    ),
    "8 bits of a class's own code": (
        lambda p: bitsandbytes.optim.RMSprop(p, optim_bits=8),
        "optim_bits=8 with min_8bit_size=4096 is not",
    ),
    "a release of gradients": (
        lambda p: optimi.AdamW(p, lr=1e-3, gradient_release=True),
        "gradient_release=True is not supported",
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
