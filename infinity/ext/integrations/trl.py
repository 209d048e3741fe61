"""TRL's SFTTrainer, DPOTrainer and GRPOTrainer over models at home; DPO's reference model streams.

    home = {"params": "nvme", ...}
    trainer = InfinityDPOTrainer(model=model, ref_model=reference, args=args, ..., infinity=home)

For other trainers of TRL: ``class MyTrainer(InfinityMixin, trl.RewardTrainer): ...``.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...core.run.registry import is_wrapped
from ...core.wrap.wrap import wrap_model
from ...errors import ConfigError
from ...library_versions import require
from ..park.park import park
from .accelerate import Given
from .trainer import InfinityMixin

trl = require("trl")


class InfinitySFTTrainer(InfinityMixin, trl.SFTTrainer):
    """Fine-tunes a model at home as TRL's SFTTrainer does, with the keyword ``infinity``."""


class InfinityDPOTrainer(InfinityMixin, trl.DPOTrainer):
    """Trains a model at home as TRL's DPOTrainer does. ``infinity_reference`` configures the
    reference model, whose weights stream; it has its own budgets."""


class InfinityGRPOTrainer(InfinityMixin, trl.GRPOTrainer):
    """Trains a model at home as TRL's GRPOTrainer does.

    infinity_park
        "host" or "nvme": parks the optimizer's state there while completions are generated, so that
        its memory is free for them. The next update brings it back. None: it stays.

    Raises ConfigError for another place.
    """

    def __init__(self, *args: Any, infinity_park: str | None = None, **kwargs: Any):
        if infinity_park not in (None, "host", "nvme"):
            raise ConfigError(f"infinity_park={infinity_park!r}: give 'host', 'nvme' or None")
        self._park_to = infinity_park
        super().__init__(*args, **kwargs)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        if self._park_to is not None and is_wrapped(self.model):
            park(self.model, to=self._park_to, what="optimizer")
        return super()._generate(*args, **kwargs)


@functools.cache
def trainer_over_home(kind: str) -> tuple[type, type]:
    """Returns the trainer of TRL for a ``kind`` ("DPO", "KTO", "ORPO" or "CPO") over a model at
    home, and its configuration. Raises ConfigError if this TRL has none."""
    for place in ("trl", f"trl.experimental.{kind.lower()}"):
        try:
            with warnings.catch_warnings():  # that it is experimental is no news to its users
                warnings.simplefilter("ignore")
                module = importlib.import_module(place)
                theirs, config = (
                    getattr(module, f"{kind}{name}") for name in ("Trainer", "Config")
                )
        except (ImportError, AttributeError):
            continue
        return type(f"Infinity{kind}Trainer", (InfinityMixin, theirs), {}), config
    raise ConfigError(
        f"TRL {trl.__version__} has no {kind}Trainer. python -m pip install --upgrade trl"
    )


@contextmanager
def real_adapters(model: nn.Module) -> Iterator[None]:
    """Gives adapters that PEFT adds inside the block to a ``model`` on meta values, which it draws
    as for any model. PEFT puts adapters on the device of the weights: inside the block these are on
    the CPU, each one element that is seen in all places."""
    held = [
        (module, name, param)
        for module in model.modules()
        for name, param in module._parameters.items()
        if param is not None and param.is_meta
    ]
    places = {
        id(param): nn.Parameter(
            torch.zeros((), dtype=param.dtype).expand(param.shape), param.requires_grad
        )
        for _, _, param in held
    }
    for module, name, param in held:
        module._parameters[name] = places[id(param)]
    try:
        yield
    finally:
        for module, name, param in held:
            module._parameters[name] = param.requires_grad_(places[id(param)].requires_grad)


@contextmanager
def asked_at_home(reference: nn.Module | None, config: Given) -> Iterator[None]:
    """Lets TRL's trainer, which is made inside the block, compute the log-probabilities of a
    ``reference`` on meta, whose weights stream. It names the file of them by a hash of the weights,
    which would be in memory at once: a name that no other job has does as well."""
    if reference is None:
        yield
        return
    wrap_model(reference, None, config)
    name = torch.tensor(list(os.urandom(16)), dtype=torch.uint8)
    reference.state_dict = lambda: {"job": name}
    try:
        yield
    finally:
        del reference.state_dict
