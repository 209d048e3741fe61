"""A class that is not torch's is recognised by its step, or refused with what works instead."""

from __future__ import annotations

import pytest
import torch
from lion import Lion as PlainLion
from torch import nn

import infinity
from infinity import native
from infinity.core.step.rules import recognise
from infinity.errors import ConfigError

CPU = {"params": "host", "optimizer": "host"}


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def test_a_lion_that_does_nothing_is_known_by_its_name_and_settings():
    """As one without a step is. Twin: one that changes the weight, but keeps no moment."""

    class Lion(PlainLion):
        def step(self, closure=None):
            for param in self.param_groups[0]["params"]:
                param.data.add_(change)

    change = 0.0
    assert recognise(Lion(make().parameters())).rule == native.Rule.LION
    change = 1e-3
    with pytest.raises(ConfigError, match="does not step as Lion does"):
        recognise(Lion(make().parameters()))


def of_module(module: str, name: str) -> type:
    """A class of another library, as far as its name goes."""
    return type(
        name,
        (torch.optim.Optimizer,),
        {
            "__module__": module,
            "__init__": lambda self, params: torch.optim.Optimizer.__init__(self, params, {}),
        },
    )


INSTEAD = {
    ("bitsandbytes.optim.lamb", "LAMB8bit"): 'Use torch.optim.AdamW with Config(moments="int8")',
    (
        "apex.optimizers",
        "FusedAdamW",
    ): "Use torch.optim.AdamW: it is stepped at any home",
    ("torchao.optim.adam", "Adam4bit"): 'Use torch.optim.Adam with Config(moments="int8")',
    (
        "deepspeed.ops.adam.cpu_adam",
        "DeepSpeedCPUAdam",
    ): "Use torch.optim.Adam: it is stepped at any home",
    (
        "bitsandbytes.optim.ademamix",
        "PagedAdEMAMix8bit",
    ): "Use AdEMAMix of pytorch_optimizer: it is stepped at any home",
    ("mine.optimizers", "AdamW"): "Use torch.optim.AdamW: it is stepped",
    ("mine.optimizers", "Rotating"): "Supported are torch.optim.AdamW",
    ("pytorch_optimizer.optimizer.radam", "RAdam"): "Use torch.optim.RAdam: it is stepped",
} | dict.fromkeys(
    [
        ("pytorch_optimizer.optimizer.soap", "SOAP"),
        ("mine.optimizers", "Shampoo"),
        ("heavyball.optim", "PSGDKron"),
    ],
    "It keeps square matrices of the rows and of the columns of a parameter, which have no home"
    " here. Use torch.optim.Muon beside another optimizer: it is stepped at any home. Supported",
)


@pytest.mark.parametrize(("module", "name"), INSTEAD)
def test_a_refusal_names_the_classs_module_and_the_way_that_works(module, name):
    """Twin: torch's own class of that name is taken."""
    model = make()
    with pytest.raises(ConfigError) as error:
        infinity.wrap_model(model, of_module(module, name)(model.parameters()), CPU)
    assert f"optimizer {module}.{name} is not supported. {INSTEAD[module, name]}" in str(
        error.value
    )
    infinity.wrap_model(model, torch.optim.AdamW(model.parameters()), CPU)
