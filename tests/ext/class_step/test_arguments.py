"""Arguments: every argument of every known class is honoured, or refused by its name.

Method: the cases are made from the signatures. A small model takes eight steps by given gradients,
once by the class itself and once from home, with one argument at another value than its default.
The results are equal; or the wrap raises an error of ours that has the argument's name; or the
class itself refuses the value. Twins: most values change the results of the class; one that is
dropped on the way is found.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import flashoptim_here
import pytest
import torch
from marks import every
from torch import nn, optim

import infinity
from infinity.core.step.rules import TORCHS
from infinity.errors import InfinityError
from infinity.ext.class_step.entries import BY_CLASS
from infinity.ext.class_step.known_elsewhere import ALIASES

pytestmark = pytest.mark.filterwarnings("ignore")
CLASSES = [
    *(f"torch.optim.{kind.__name__}" for kind in (*TORCHS, *(known.kind for known in BY_CLASS))),
    *ALIASES,
]
STEPS = 8
RATE = 0.01
# Other values than any default. A class with other values has them below
VALUES: dict[str, tuple] = {
    "adamw_betas": ((0.5, 0.6),),
    "adamw_eps": (0.1,),
    "adamw_lr": (0.1,),
    "adamw_wd": (0.5,),
    "adjust_lr_fn": ("original", "match_rms_adamw"),
    "alpha": (0.5,),
    "beta": (0.8,),
    "beta1": (0.9,),
    "beta1_warmup": (3,),
    "beta2_decay": (-0.4,),
    "beta2_min": (0.5,),
    "beta3": (0.9,),
    "betas_1d": ((0.5, 0.6),),
    "block_size": (32, 128, 1024),
    "c_coef": (0.5,),
    "centered_wd": (0.1,),
    "centered_wd_mode": ("full", "int8"),
    "clip": (0.1,),
    "clip_lambda": (lambda step: 0.01, None),
    "clip_threshold": (0.1,),
    "d": (0.1,),
    "d0": (1e-4,),
    "d_coef": (0.5,),
    "dampening": (0.3,),
    "decay_rate": (-0.5,),
    "delta": (0.5,),
    "ema_alpha": (0.5,),
    "eps": (1e-3,),
    "eps1": (1e-2,),
    "eps2": (1e-1,),
    "eps_2": (0.1,),
    "etas": ((0.4, 1.5),),
    "extra_l2": (0.1,),
    "fim_dtype": (torch.bfloat16,),
    "foreach": (True, False),
    "fused": (True,),
    "g_norm_min": (10.0,),
    "gamma": (0.2,),
    "growth_rate": (1.02,),
    "initial_accumulator": (0.2,),
    "initial_accumulator_value": (0.2,),
    "k_logging": (1,),
    "k_warmup_steps": (2,),
    "kahan_sum": (True,),
    "kappa_p": (1.5,),
    "lambd": (0.1,),
    "layer_key_fn": (lambda param: param.ndim,),
    "lr": (0.013,),
    "lr_1d": (0.1,),
    "lr_decay": (0.2,),
    "mars_type": ("lion", "shampoo"),
    "master_weight_bits": (32,),
    "max_grad_norm": (0.5,),
    "max_lr": (0.5,),
    "min_8bit_size": (64, 5000, 100000),
    "min_beta1": (0.5,),
    "momentum": (0.7,),
    "momentum_decay": (0.1,),
    "momentum_dtype": (torch.bfloat16,),
    "n_sma_threshold": (2,),
    "nesterov_coef": (0.5,),
    "ns_coefficients": ((3.0, -4.0, 2.0),),
    "ns_coeffs": ("quintic", "polar_express"),
    "ns_method": ("gram_newton_schulz",),
    "ns_reset_steps": ((1,),),
    "ns_steps": (3,),
    "nu": (0.5,),
    "nus": ((0.7, 0.8),),
    "optim_bits": (8,),
    "orthogonal_gradient": ("flattened", "iterative"),
    "p": (0.25,),
    "r": (1.0,),
    "ratio_min": (0.5,),
    "restart_cond": (lambda state: state["step"] == 2,),
    "rho": (0.6,),
    "slice_p": (3,),
    "state_precision": ("bf16_sr", "fp32", "int8_sr", "factored"),
    "step_sizes": ((1e-3, 0.02),),
    "steps_before_using_centered": (1,),
    "t0": (2.0,),
    "t_alpha_beta3": (12.0,),
    "tau": (2.0,),
    "tiny_spike": (1e-3,),
    "torch_init": (True,),
    "triton": (True, False),
    "v": (1e-2,),
    "warmup_steps": (3,),
    "wd_ratio": (0.5,),
    "weight_decay": (0.1,),
    "weight_decay_1d": (0.5,),
    "weight_lr_power": (1.0,),
}
# Arguments of **kwargs that pytorch_optimizer's classes read
UNNAMED = "cautious", "use_gc", "stable_adamw", "adam_debias", "adanorm"
# Argument -> others without which it has no effect, as far as a class has them
NEEDED: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("decoupled_weight_decay", "weight_decouple", "decouple", "decouple_wd", "decouple_lr"),
        {"weight_decay": 0.1},
    ),
    **dict.fromkeys(
        ("fisher_wd", "cautious_wd", "geometric_wd", "wd_ratio", "adam_wd"), {"weight_decay": 0.1}
    ),
    **dict.fromkeys(
        ("normed_momentum", "initial_accumulator", "torch_init", "grad_averaging", "dampening"),
        {"momentum": 0.9},
    ),
    **dict.fromkeys(
        ("beta2_min", "ema_alpha", "tiny_spike", "k_warmup_steps", "k_logging", "layer_key_fn"),
        {"kourkoutas_beta": True},
    ),
    **dict.fromkeys(("n_sma_threshold", "degenerated_to_sgd"), {"rectify": True}),
    "centered_wd_mode": {"centered_wd": 0.1},
    "fixed_decay": {"weight_decay": 0.1, "weight_decouple": True},
    "max_lr": {"weight_decay": 0.1, "decouple_lr": True},
    "min_8bit_size": {"optim_bits": 8},
    "min_beta1": {"beta1_warmup": 3},
    "nesterov": {"momentum": 0.9},
    "nesterov_coef": {"momentum": 0.9, "nesterov": True},
    "steps_before_using_centered": {"centered": True},
}
# What a class needs to step here at all, and values of it alone
ALWAYS = {
    "flashoptim": {"quantize": False, "master_weight_bits": None, "fused": False},
    "transformers": {"relative_step": False},
}
OWN_VALUES = {("optimi", "dampening"): (True,), ("transformers", "relative_step"): (True,)}
OWN_NEEDED: dict[tuple[str, str], dict[str, Any]] = {
    ("transformers", "relative_step"): {"lr": None},
    ("transformers", "warmup_init"): {"lr": None, "relative_step": True},
}


@pytest.fixture(autouse=True)
def not_compiled(monkeypatch):
    """torchao and adv_optm compile their steps, which takes seconds each."""
    monkeypatch.setattr(torch, "compile", lambda what=None, **_: what or (lambda given: given))


def class_of(path: str) -> type:
    module, _, name = path.rpartition(".")
    if module.startswith("flashoptim"):
        flashoptim_here.imported()
    else:
        pytest.importorskip(module.partition(".")[0])
    return getattr(importlib.import_module(module), name)


def cases_of(path: str) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yields each argument of a class, all that the class is given, and the same without it."""
    kind, library = class_of(path), path.partition(".")[0]
    of_class = inspect.signature(kind.__init__).parameters
    always = {"lr": RATE} | ALWAYS.get(library, {})
    yield "all defaults", always, always
    for name, parameter in of_class.items():
        if name in ("self", "params", "args"):
            continue  # "args" of bitsandbytes holds other arguments
        needed = {k: v for k, v in NEEDED.get(name, {}).items() if k in of_class}
        needed = always | needed | OWN_NEEDED.get((library, name), {})
        if parameter.kind is parameter.VAR_KEYWORD:
            yield from ((each, always | {each: True}, always) for each in UNNAMED)
            continue
        for value in values_of(library, name, parameter.default):
            yield name, needed | {name: value}, {k: v for k, v in needed.items() if k != name}


def values_of(library: str, name: str, default: Any) -> tuple:
    if (library, name) in OWN_VALUES:
        return OWN_VALUES[library, name]
    if name == "betas":
        return ((0.5, 0.6, 0.7)[: len(default)],)
    if isinstance(default, tuple) and name == "eps":
        return (tuple(1e-2 if each is None else max(each * 100, 1e-2) for each in default),)
    if isinstance(default, bool):
        return (not default,)
    return VALUES[name]  # a new argument of a library needs a line there


class Net(nn.Module):
    """Parameters of less than 4096 elements, of as many, and of more in no whole block of 256."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.of_blocks, self.of_no_blocks = nn.Linear(64, 64), nn.Linear(65, 64)
        self.last = nn.Linear(64, 7)


def groups_for(kind: type, net: nn.Module) -> list:
    params = list(net.parameters())
    matrices = [param for param in params if param.ndim == 2]
    if kind is optim.Muon:
        return matrices
    if "optimizer.muon" in kind.__module__:
        others = [param for param in params if param.ndim != 2]
        return [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
    return params


def trained(
    kind: type, given: dict[str, Any], home: str | None
) -> tuple[dict[str, torch.Tensor], set[str]]:
    """The weights after some steps; and the names of parameters whose moments the class has in 8
    bits."""
    net = Net()
    names = {param: name for name, param in net.named_parameters()}
    optimizer = kind(groups_for(kind, net), **given)
    if home is not None:
        net, optimizer = infinity.wrap_model(net, optimizer, {"params": home, "optimizer": home})
    if hasattr(optimizer, "train"):
        optimizer.train()
    params = {param for group in optimizer.param_groups for param in group["params"]}
    for turn in range(STEPS):
        for place, param in enumerate(names):
            numbers = torch.arange(param.numel()) * (turn + 1.0) * (place + 1)
            size = 10.0 ** (-place % 3) * (1.0, 0.1, 2.0, 0.5)[turn % 4]
            param.grad = torch.cos(numbers).view(param.shape) * size if param in params else None
        optimizer.step()
        optimizer.zero_grad()
    in_8_bits = {
        names[param]
        for param in params
        for value in (optimizer.state.get(param, {}) if home is None else {}).values()
        if isinstance(value, torch.Tensor) and value.shape == param.shape
        if value.dtype == torch.uint8 or type(value).__name__ == "OptimState8bit"
    }
    return {name: value.detach().clone() for name, value in net.state_dict().items()}, in_8_bits


def outcome(path: str, name: str, given: dict[str, Any], run: Callable = trained) -> str:
    """How a class with an argument is stepped here: "" is neither as the class does, nor refused by
    its name."""
    kind, start = class_of(path), dict(Net().state_dict())
    try:
        theirs, in_8_bits = trained(kind, given, None)
    except (Exception, SystemExit):  # noqa: BLE001 - lion_pytorch ends it without Triton
        return "refused by the class"
    try:
        ours, _ = run(kind, given, "host")
    except InfinityError as error:
        return "refused" if name in str(error) else ""
    near = 1e-4 if path.startswith("flashoptim") else 2e-5
    for key, value in theirs.items():
        apart, moved = (value - ours[key]).abs(), (value - start[key]).abs()
        if key in in_8_bits:  # whose codes are not ours
            is_equal = apart.mean() < 0.1 * moved.mean()
        else:
            is_equal = apart.max() < near * moved.max() + 2e-7
        if not is_equal:
            return ""
    return "honoured"


@pytest.mark.parametrize("path", every(CLASSES, 11))
def test_every_argument_is_honoured_or_refused_by_name(path):
    found = {
        (name, str(given.get(name))): outcome(path, name, given)
        for name, given, _ in cases_of(path)
    }
    assert found["all defaults", "None"] == "honoured"
    assert not [case for case, how in found.items() if not how]


@pytest.mark.parametrize("path", ["torch.optim.AdamW", "torchao.optim.adam.AdamW8bit"])
def test_an_argument_that_is_dropped_is_found(path):
    """The twin: most arguments that are honoured change the class's own results."""
    changes = []
    for name, given, without in cases_of(path):
        if outcome(path, name, given) != "honoured":
            continue
        with_it, without_it = (trained(class_of(path), each, None)[0] for each in (given, without))
        if not all(torch.equal(with_it[key], without_it[key]) for key in with_it):
            dropped = outcome(path, name, given, lambda kind, _, home: trained(kind, without, home))
            changes.append((name, dropped))
    assert len(changes) > 3
    # Of these the changes are below what is compared
    assert {name for name, dropped in changes if dropped} <= {"fused", "block_size"}
