"""Methods: what `infinity train --method` learns from preferred answers with. Each is a trainer of
TRL."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any

from ...errors import ConfigError, UsageError


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method. ``paired``: each sample has a preferred and a rejected answer. ``refers``: compares
    with the model as it was. ``settings``: of its configuration, beside the options."""

    name: str
    kind: str  # of TRL's trainer and configuration: DPO of DPOTrainer and DPOConfig
    data: str
    paired: bool = True
    refers: bool = False
    takes_tools: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def trainer(self) -> str:
        return f"{self.kind}Trainer"


_PAIRS = "pairs of a preferred and a rejected answer"
METHODS = {
    each.name: each
    for each in (
        Method(name="dpo", kind="DPO", data=_PAIRS, refers=True, takes_tools=True),
        Method(
            name="kto",
            kind="KTO",
            data="answers with a label, or pairs",
            paired=False,
            refers=True,
            takes_tools=True,
        ),
        Method(name="orpo", kind="ORPO", data=_PAIRS),
        # SimPO is CPO's loss without its term of likelihood, as TRL's documentation has it
        Method(
            name="simpo",
            kind="CPO",
            data=_PAIRS,
            settings={"loss_type": "simpo", "cpo_alpha": 0.0},
        ),
    )
}

# Options of the loop for samples, which a trainer of TRL has no place for, and what else to do.
_UNUSED = {
    "pack": "Leave it out: TRL packs no pairs.",
    "minutes": "Give --steps or --epochs",
    "stalls": "Leave it out.",
    "scheduler": "Give --lr and --warmup-steps: TRL's trainer follows a cosine after them.",
    "prompt": "Leave it out, and talk to the result: infinity generate OUT --chat",
    "quantize": "Leave it out: --lora alone streams the base from its home.",
}
_OPTIMIZERS = {"adamw": "adamw_torch_fused", "adafactor": "adafactor"}


def check_method(args: argparse.Namespace) -> None:
    """Raises ConfigError, or UsageError for an option that does not go with ``--method``, before
    anything is read."""
    method = METHODS.get(args.method or "")
    if method is None:
        for option in ("beta", "precompute_reference"):
            if getattr(args, option):
                raise ConfigError(
                    f"--{option.replace('_', '-')} is of a method that learns from preferred"
                    " answers: add --method dpo"
                )
        return
    for option, remedy in _UNUSED.items():
        if getattr(args, option):
            raise UsageError(f"--{option} is not for the method {method.name}. {remedy}")
    if args.data is None:
        raise ConfigError(f"--method {method.name} learns from {method.data}: add --data FILE")
    if args.optim not in _OPTIMIZERS:
        raise UsageError(
            f"--optim {args.optim} is not for the method {method.name}: TRL's trainer steps one"
            f" optimizer. Give {' or '.join(_OPTIMIZERS)}."
        )
    if args.precompute_reference and (not method.refers or args.lora_rank is not None):
        why = (
            "with --lora the reference is the model itself, its adapters off"
            if method.refers
            else f"{method.name} has none"
        )
        raise UsageError(
            f"--precompute-reference is of a reference model, and {why}. Leave it out."
        )
    if method.name == "kto" and args.batch_size < 2:
        raise ConfigError(
            "--method kto compares each answer with the next one of its micro-batch: give"
            " --batch-size 2 or more."
        )
    if args.device is not None and ":" in args.device and args.device != "cuda:0":
        raise UsageError(
            f"--device {args.device} is not for the method {method.name}: TRL's trainer takes"
            " the first GPU that it sees. Set CUDA_VISIBLE_DEVICES, and give --device cuda"
        )


def optimizer_of(optim: str) -> str:
    """Returns the name of an optimizer of `infinity train` in transformers' arguments."""
    return _OPTIMIZERS[optim]
