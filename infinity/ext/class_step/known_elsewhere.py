"""KnownElsewhere: the classes of other libraries that are stepped at home, and how.

They step by a rule that torch's classes have too, or by their own code (:mod:`.class_step`). Each
has one entry here, and a row in the tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from ... import native
from ...core.step.known import ADAM, BETAS, BOTH, FIRST, FOURTH, KNOWN, SECOND, THIRD, Known
from ...core.units.forms import local_of
from ...errors import ConfigError
from .entries import Elsewhere, class_entry
from .measured import Prodigy
from .mixture import Mixture

INSIDE = "__bnb_optimizer_quant_state__"  # where bitsandbytes has moments in a state dict
OF_BITS = {"optim_bits", "min_8bit_size"}  # settings of single parameters that are honoured


def _overrides(optimizer: Any, index: int, place: int) -> list[dict[str, Any]]:
    """Lists the settings that bitsandbytes' GlobalOptimManager has for one parameter, by its number
    in its group, by itself, and by its module: those are applied in the first step."""
    manager, param = optimizer.mng, optimizer.param_groups[index]["params"][place]
    of_modules = [
        override
        for module, name, override in manager.module_weight_config_triple
        if getattr(module, name, None) is param
    ]
    of_param = manager.index2config.get((index, place)), manager.pid2config.get(id(param))
    return [override for override in (*of_param, *of_modules) if override]


def _of_bits(optimizer: Any, index: int, place: int) -> str:
    """Returns the dtype of a parameter's moments by bitsandbytes' ``init_state``."""
    settings = {key: getattr(optimizer.args, key) for key in OF_BITS}
    for override in _overrides(optimizer, index, place):
        settings |= override
    if (bits := settings["optim_bits"]) not in (8, 32):
        raise ConfigError(f"the optimizer's group {index} has optim_bits={bits}: set it to 8 or 32")
    numel = optimizer.param_groups[index]["params"][place].numel()
    return "int8" if bits == 8 and numel >= settings["min_8bit_size"] else "fp32"


def _of_blocks(optimizer: Any, index: int, place: int) -> str:
    """Returns the dtype of a parameter's moments by torchao's ``_new_buffer``."""
    numel = local_of(optimizer.param_groups[index]["params"][place]).numel()
    return "int8" if numel >= 4096 and numel % optimizer.block_size == 0 else "fp32"


def _of_quantize(optimizer: Any, index: int, place: int) -> str:
    """Returns the dtype of a parameter's moments by the ``quantize`` of its group."""
    return "int8" if optimizer.param_groups[index]["quantize"] else "fp32"


def _of_bitsandbytes() -> Iterator[Elsewhere]:
    """Yields those of bitsandbytes. Its Adam decays weights as AdamW does. Homes do what its paging
    does. ``optim_bits=8`` becomes moments in our 8 bits."""
    of_adam = {"state1": FIRST, "state2": SECOND}
    lion = {"lr": "lr", "betas": BETAS, "weight_decay": "weight_decay"}
    families = {
        "adamw.%sAdamW%s": (native.Rule.ADAMW, "Optimizer8bit.step", ADAM, of_adam),
        "adam.%sAdam%s": (native.Rule.ADAMW, "Optimizer8bit.step", ADAM, of_adam),
        "lion.%sLion%s": (native.Rule.LION, "Optimizer8bit.step", lion, {"state1": FIRST}),
    }
    for path, (rule, *rest) in families.items():
        for words in product(("", "Paged"), ("", "32bit", "8bit")):
            kind = "bitsandbytes.optim." + path % words
            yield Elsewhere(rule, kind, *rest, flags={}, inside=INSIDE, dtype_of=_of_bits)


def _of_torchao() -> Iterator[Elsewhere]:
    """Yields those of torchao that keep moments in 8 bits."""
    for name, rule in (("AdamW", native.Rule.ADAMW), ("Adam", native.Rule.ADAM)):
        path = f"torchao.optim.adam.{name}8bit"
        yield Elsewhere(
            rule, path, "_AdamBase.step", ADAM, BOTH, {}, dtype="int8", dtype_of=_of_blocks
        )


def _of_flashoptim() -> Iterator[Elsewhere]:
    """Yields those of flashoptim. A split master has all 32 bits of its 24; moments that it
    quantizes are in our 8 bits. Its SGD dampens the first gradient, too: the rule does not."""
    of_momentum = {"momentum_buffer": FIRST}
    lion = {"lr": "lr", "betas": BETAS, "weight_decay": "weight_decay"}
    sgd = {key: key for key in ("lr", "momentum", "weight_decay")}
    rules = {
        "AdamW": (native.Rule.ADAMW, ADAM, BOTH, {}),
        "Adam": (native.Rule.ADAM, ADAM, BOTH, {}),
        "Lion": (native.Rule.LION, lion, {"exp_avg": FIRST}, {}),
        "SGD": (native.Rule.SGD, sgd, of_momentum, {"momentum_buffer": "momentum"}),
    }
    for name, (rule, settings, moments, only_with) in rules.items():
        yield Elsewhere(
            rule,
            f"flashoptim.optimizers.Flash{name}",
            "FlashOptimizer.step",
            settings,
            moments,
            {},
            only_with=only_with,
            ignored=("initial_lr", "master_bytewidth", "quantize"),
            counts_steps=name.startswith("Adam"),
            dtype_of=_of_quantize,
        )


# By rules that torch has no class of
OF_PATHS = (
    Elsewhere(
        native.Rule.ADEMAMIX,
        "pytorch_optimizer.optimizer.ademamix.AdEMAMix",
        "AdEMAMix.step",
        ADAM | {"betas": (*BETAS, "beta3")},
        BOTH | {"exp_avg_slow": THIRD},
        {"weight_decouple": "decoupled", "fixed_decay": "fixed_decay"},
        of_object={"maximize": "maximize"},
        exact={"exp_avg_slow": "moves by less in a step than narrow numbers round"},
        counters=Mixture,
        counts_steps=False,
        counts_in_groups=True,
        own_code_with=("cautious", "stable_adamw"),
    ),
    Elsewhere(
        native.Rule.ADAN,
        "pytorch_optimizer.optimizer.adan.Adan",
        "Adan.step",
        ADAM | {"betas": (*BETAS, "beta3")},
        BOTH | {"exp_avg_diff": THIRD, "previous_grad": FOURTH},
        {"weight_decouple": "decoupled"},
        of_object={"maximize": "maximize", "max_grad_norm": ""},
        counts_steps=False,
        counts_in_groups=True,
        own_code_with=("use_gc", "adanorm"),
    ),
)
# Every rule of the kernels
BY_RULE: dict[native.Rule, Known] = KNOWN | {known.rule: known for known in OF_PATHS}
# Module -> classes that step by their own code: any part of a parameter, or whole ones
ANY_PART = {
    "adan_pytorch.adan": "Adan",
    "adv_optm.optim.AdamW_adv": "AdamW_adv",
    "adv_optm.optim.Adopt_adv": "Adopt_adv",
    "adv_optm.optim.Lion_adv": "Lion_adv",
    "adv_optm.optim.SignSGD_adv": "SignSGD_adv",
    "bitsandbytes.optim.adagrad": "Adagrad",
    "bitsandbytes.optim.rmsprop": "RMSprop",
    "lion_pytorch.lion_pytorch": "Lion",
    "optimi.adam": "Adam",
    "optimi.adamw": "AdamW",
    "optimi.adan": "Adan",
    "optimi.lion": "Lion",
    "optimi.radam": "RAdam",
    "optimi.sgd": "SGD",
    "pytorch_optimizer.optimizer.adabelief": "AdaBelief",
    "pytorch_optimizer.optimizer.adamc": "AdamC",
    "pytorch_optimizer.optimizer.ademamix": "SimplifiedAdEMAMix",
    "pytorch_optimizer.optimizer.adopt": "ADOPT",
    "pytorch_optimizer.optimizer.diffgrad": "DiffGrad",
    "pytorch_optimizer.optimizer.exadam": "EXAdam",
    "pytorch_optimizer.optimizer.grams": "Grams",
    "pytorch_optimizer.optimizer.kate": "Kate",
    "pytorch_optimizer.optimizer.laprop": "LaProp",
    "pytorch_optimizer.optimizer.lion": "Lion",
    "pytorch_optimizer.optimizer.qhadam": "QHAdam",
    "pytorch_optimizer.optimizer.qhm": "QHM",
    "pytorch_optimizer.optimizer.sgd": "SGDW SignSGD",
    "pytorch_optimizer.optimizer.tiger": "Tiger",
    "pytorch_optimizer.optimizer.yogi": "Yogi",
    "schedulefree.adamw_schedulefree": "AdamWScheduleFree",
    "schedulefree.radam_schedulefree": "RAdamScheduleFree",
    "schedulefree.sgd_schedulefree": "SGDScheduleFree",
}
WHOLE = {
    "came_pytorch.CAME": "CAME",
    "prodigyopt.prodigy": "Prodigy",
    "optimi.stableadamw": "StableAdamW",
    "pytorch_optimizer.optimizer.adalite": "Adalite",
    "pytorch_optimizer.optimizer.adamp": "AdamP",
    "pytorch_optimizer.optimizer.adamw": "StableAdamW",
    "pytorch_optimizer.optimizer.amos": "Amos",
    "pytorch_optimizer.optimizer.came": "CAME",
    "pytorch_optimizer.optimizer.fadam": "FAdam",
    "pytorch_optimizer.optimizer.lamb": "Lamb",
    "pytorch_optimizer.optimizer.mars": "MARS",
    "pytorch_optimizer.optimizer.muon.adago": "AdaGO",
    "pytorch_optimizer.optimizer.muon.muon": "Muon",
    "pytorch_optimizer.optimizer.novograd": "NovoGrad",
    "pytorch_optimizer.optimizer.sm3": "SM3",
    "transformers.optimization": "Adafactor",
}
# Their step is a base class's
STEPS = {"optimi.adamw.AdamW": "Adam.step"}


def _by_class() -> Iterator[Elsewhere]:
    """Yields those of other libraries that step by their own code."""
    for whole, modules in ((False, ANY_PART), (True, WHOLE)):
        for module, names in modules.items():
            for name in names.split():
                path = f"{module}.{name}"
                inside = INSIDE if module.startswith("bitsandbytes") else None
                step = "Optimizer8bit.step" if inside else STEPS.get(path, "")
                measured = Prodigy if name == "Prodigy" else None
                yield class_entry(
                    path,
                    step,
                    whole=whole,
                    inside=inside,
                    measured=measured,
                    dtype_of=_of_bits if inside else None,
                )


# Path of a class of another library -> how it steps
ALIASES: dict[str, Elsewhere] = {
    str(known.kind): known
    for known in (
        *_of_bitsandbytes(),
        *_of_torchao(),
        *_of_flashoptim(),
        *OF_PATHS,
        *_by_class(),
    )
}


def as_it_is(known: Elsewhere, optimizer: torch.optim.Optimizer) -> Elsewhere:
    """Returns how a class of another library steps, with the settings and switches that it has.
    Raises ConfigError for a switch that the rule does not have."""
    if any(group.get(key) for group in optimizer.param_groups for key in known.own_code_with):
        return class_entry(known.kind)
    on = {name: switch for name, switch in known.of_object.items() if getattr(optimizer, name)}
    if lacking := [name for name, switch in on.items() if not switch]:
        name = lacking[0]
        raise ConfigError(
            f"optimizer {known.name}: {name}={getattr(optimizer, name)} is not supported: set it to"
            f" 0, and use Config({name}=...)"
        )
    return replace(known, always=(*known.always, *on.values()))


def refuse_overrides(optimizer: Any, name: str) -> None:
    """Raises ConfigError for settings of single parameters that bitsandbytes' GlobalOptimManager
    has, but for those of the bits of moments."""
    if not hasattr(optimizer, "mng"):
        return
    others = {
        key
        for index, group in enumerate(optimizer.param_groups)
        for place in range(len(group["params"]))
        for given in _overrides(optimizer, index, place)
        for key in given
        if key not in OF_BITS
    }
    if others:
        raise ConfigError(
            f"optimizer {name}: GlobalOptimManager sets {', '.join(sorted(others))} of single"
            " parameters, which is not supported: give these a group of their own"
        )
