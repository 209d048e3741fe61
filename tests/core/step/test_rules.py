"""Recognition is exact: only a step that is a known one is taken over, and what the kernels do not
honour is refused wherever it comes from, with nothing changed."""

from __future__ import annotations

import functools

import pytest
import torch
from deleted import needs
from lion import Lion as PlainLion
from torch import nn

import infinity
from infinity import native
from infinity.core import seams
from infinity.core.step.known import Known
from infinity.core.step.rules import Recogniser, recognise
from infinity.errors import ConfigError, UsageError

CPU = {"params": "host", "optimizer": "host"}


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def backward(model: nn.Module, optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 8)).square().sum().backward()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [value.clone() for value in model.state_dict().values()]


class OwnStep(torch.optim.AdamW):
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.data.add_(param.grad, alpha=-1)


class OwnStepOfSgd(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        return super().step(closure)


class OwnInit(torch.optim.Adam):
    def _init_group(self, *args):
        return super()._init_group(*args)


class OnlyNamed(torch.optim.AdamW):
    """Another constructor is no other step."""

    def __init__(self, params, rate):
        super().__init__(params, lr=rate)


class MedallionAdam(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2, "betas": (0.9, 0.99)})

    def step(self, closure=None):
        pass


def patched(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    before = optimizer.step

    @functools.wraps(before)  # which also copies what torch marks its own functions with
    def step(closure=None):
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad.mul_(0)
        return before(closure)

    optimizer.step = step
    return optimizer


def patched_then_scheduled(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step = (lambda self, closure=None: None).__get__(optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


def false_lion(name: str, **wrong):
    """A class called Lion whose update is another one."""

    class Lion(PlainLion):
        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                for param in group["params"]:
                    param.data.add_(1e-3)

    return Lion


REFUSED = {
    "a step of its own": (lambda m: OwnStep(m.parameters()), "step()"),
    "one that calls torch's": (lambda m: OwnStepOfSgd(m.parameters(), lr=0.1), "step()"),
    "another part of a step": (lambda m: OwnInit(m.parameters()), "_init_group"),
    "patched on the object": (patched, "replaced on the object"),
    "patched, then scheduled": (patched_then_scheduled, "replaced on the object"),
    "lion in its name": (lambda m: MedallionAdam(m.parameters()), "MedallionAdam is not supported"),
    "another's Lion": (
        lambda m: false_lion("Lion")(m.parameters(), lr=0.1),
        "does not step as Lion does",
    ),
    "a flag of one group": (
        lambda m: torch.optim.AdamW(
            [{"params": m[0].parameters()}, {"params": m[2].parameters(), "capturable": True}]
        ),
        "capturable",
    ),
    "differentiable": (
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, differentiable=True),
        "differentiable",
    ),
}


@needs("ext/class_step")
@pytest.mark.parametrize("what", REFUSED)
def test_what_would_not_run_is_refused(what):
    build, said = REFUSED[what]
    model = make()
    before = weights(model)
    with pytest.raises(ConfigError) as error:
        infinity.wrap_model(model, build(model), CPU)
    assert said in str(error.value), str(error.value)
    assert (
        all(map(torch.equal, before, weights(model)))
        and type(next(model.parameters())) is nn.Parameter
    )


def test_a_step_patched_on_torchs_class_is_refused(monkeypatch):
    before = torch.optim.SGD.step
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self, closure=None: before(self, closure))
    model = make()
    with pytest.raises(ConfigError, match="is not torch's"):
        infinity.wrap_model(model, torch.optim.SGD(model.parameters(), lr=0.1), CPU)


ACCEPTED = {
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
    "another constructor": lambda m: OnlyNamed(m.parameters(), 1e-2),
    "Adam, decoupled": lambda m: torch.optim.Adam(
        m.parameters(), lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True
    ),
    "AdamW, coupled by its group": lambda m: torch.optim.AdamW(
        [{"params": m.parameters(), "decoupled_weight_decay": False}], lr=1e-2
    ),
    "Lion": lambda m: PlainLion(m.parameters(), lr=1e-2),
}


@needs("ext/class_step")
@pytest.mark.parametrize("what", ACCEPTED)
@pytest.mark.parametrize("scheduled", [False, True])
def test_what_is_known_runs_as_torch_runs_it(what, scheduled):
    """The other side: the same formula, also under a scheduler, which puts a function of its own
    around step()."""

    def run(wrapped: bool) -> list[torch.Tensor]:
        model = make()
        optimizer = ACCEPTED[what](model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if scheduled else None
        if wrapped:
            model, optimizer = infinity.wrap_model(model, optimizer, CPU)
        for _ in range(3):
            backward(model, optimizer)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
        return weights(model)

    for ours, torchs in zip(run(True), run(False)):
        torch.testing.assert_close(ours, torchs, rtol=1e-6, atol=1e-7)


# --- what comes after the wrap ---

SWITCHED = {
    "amsgrad": ("adamw", {"amsgrad": True}, "amsgrad=True"),
    "differentiable": ("adamw", {"differentiable": True}, "differentiable=True"),
    "coupled decay": ("adamw", {"decoupled_weight_decay": False}, "decoupled_weight_decay"),
    "decoupled decay": ("adam", {"decoupled_weight_decay": True}, "decoupled_weight_decay"),
    "momentum": ("sgd", {"momentum": 0.9}, "momentum"),
}
MADE = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=1e-2),
}


def wrapped(kind: str):
    model = make()
    model, optimizer = infinity.wrap_model(model, MADE[kind](model), CPU)
    backward(model, optimizer)
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("what", SWITCHED)
@pytest.mark.parametrize(
    "way", ["load_state_dict", "param_groups", "checkpoint", "step_in_backward"]
)
def test_what_is_switched_on_later_is_refused_before_anything_changes(what, way, tmp_path):
    kind, change, said = SWITCHED[what]
    model, optimizer = wrapped(kind)
    before, groups = weights(model), [dict(group) for group in optimizer.param_groups]
    with pytest.raises((UsageError, ConfigError)) as error:
        if way == "load_state_dict":
            state = optimizer.state_dict()
            state["param_groups"][0] |= change
            optimizer.load_state_dict(state)
        elif way == "checkpoint":
            other, theirs = wrapped(kind)
            theirs.param_groups[0].update(change)
            infinity.save_checkpoint(tmp_path / "saved", other, theirs)
            infinity.load_checkpoint(tmp_path / "saved", model, optimizer)
        elif way == "param_groups":
            backward(model, optimizer)
            optimizer.param_groups[0].update(change)
            optimizer.step()
        else:
            optimizer.param_groups[0].update(change)
            with optimizer.step_in_backward():
                backward(model, optimizer)
    assert said in str(error.value), str(error.value)
    assert all(map(torch.equal, before, weights(model)))
    if way in ("param_groups", "step_in_backward"):
        for name in change:
            optimizer.param_groups[0][name] = groups[0][name]
    assert [dict(group) for group in optimizer.param_groups] == groups
    backward(model, optimizer)
    optimizer.step()  # goes on


@pytest.mark.parametrize("way", ["load_state_dict", "param_groups"])
def test_maximize_switched_on_later_is_done(way):
    def run(plain: bool) -> list[torch.Tensor]:
        model = make()
        optimizer = MADE["adamw"](model)
        if not plain:
            model, optimizer = infinity.wrap_model(model, optimizer, CPU)
        for turn in range(3):
            backward(model, optimizer)
            optimizer.step()
            if way == "load_state_dict":
                state = optimizer.state_dict()
                state["param_groups"][0]["maximize"] = True
                optimizer.load_state_dict(state)
            else:
                optimizer.param_groups[0]["maximize"] = True
        return weights(model)

    for ours, torchs in zip(run(False), run(True)):
        torch.testing.assert_close(ours, torchs, rtol=1e-6, atol=1e-7)


def test_accelerates_wrapper_says_the_order():
    accelerate = pytest.importorskip("accelerate")
    model = make()
    optimizer = accelerate.Accelerator(cpu=True).prepare(torch.optim.AdamW(model.parameters()))
    with pytest.raises(ConfigError, match="accelerator.prepare"):
        infinity.wrap_model(model, optimizer, CPU)


class Lookahead(torch.optim.Optimizer):
    """Stands around another one, and has none of an optimizer's attributes."""

    def __init__(self, base: torch.optim.Optimizer):
        self.base = base


class Averaging:
    """The same, of a class of its own."""

    def __init__(self, base: torch.optim.Optimizer):
        self._inner = base


class Unfinished(torch.optim.Optimizer):
    def __init__(self, base: torch.optim.Optimizer):
        self.rate = 0.1


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Lookahead, "wrapper around SGD"),
        (Averaging, "wrapper around SGD"),
        (Unfinished, "no param_groups"),
    ],
)
def test_what_stands_around_an_optimizer_is_refused_by_name(kind, said):
    """Twin: the one inside is taken."""
    model = make()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=said):
        infinity.wrap_model(model, kind(inner), CPU)
    infinity.wrap_model(model, inner, CPU)


class Centralized(torch.optim.SGD):
    """An SGD whose class has one more setting."""

    def __init__(self, params, centralize):
        super().__init__(params, lr=0.1)
        self.defaults["centralize"] = centralize
        for group in self.param_groups:
            group["centralize"] = centralize


def test_a_setting_of_the_class_that_is_on_is_refused():
    """Twins: it is off; a key of a group that the class does not have is the user's own."""
    params = [*make().parameters()]
    with pytest.raises(ConfigError, match="has centralize=True, which is not supported"):
        recognise(Centralized(params, centralize=True))
    assert recognise(Centralized(params, centralize=False)).rule == native.Rule.SGD
    own = torch.optim.SGD([{"params": params, "centralize": True}], lr=0.1)
    assert recognise(own).rule == native.Rule.SGD


class Plain(torch.optim.Optimizer):
    """Gradient descent of a library that the engine has never heard of."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(param.grad, alpha=-group["lr"])


class Library(Recogniser):
    supported = "library.Plain"

    @classmethod
    def recognise(cls, optimizer):
        if type(optimizer) is Plain:
            return Known(native.Rule.SGD, "library.Plain", "Plain.step", {"lr": "lr"}, {}, {})


@needs("ext/class_step")
def test_a_recogniser_brings_a_class_with_a_rule_and_settings(monkeypatch):
    """It steps by the kernel, as the class does. Twins: without the recogniser the class is
    refused, as its own code needs every gradient; with it, another one by the names of both."""
    with pytest.raises(ConfigError, match="without a gradient raised"):
        recognise(Plain(make().parameters(), 0.1))
    monkeypatch.setattr(seams, "RULES", [*seams.RULES, Library])
    found = []
    for home in ("plain", "host"):
        model = make()
        optimizer = Plain(model.parameters(), 0.1)
        if home != "plain":
            model, optimizer = infinity.wrap_model(model, optimizer, CPU)
            assert optimizer.rule_name == "SGD"
        for _ in range(3):
            backward(model, optimizer)
            optimizer.step()
        found.append(weights(model))
    assert all(map(torch.equal, *found))
    with pytest.raises(ConfigError, match=r"Supported are torch.optim.AdamW.*, library.Plain, and"):
        recognise(torch.optim.LBFGS(make().parameters()))
    model = make()
    group = {"params": list(model.parameters()), "differentiable": True}
    with pytest.raises(ConfigError, match="group 0 has differentiable=True"):
        infinity.wrap_model(model, Plain([group], 0.1), CPU)


class Switching(torch.optim.AdamW):
    """An AdamW with a method of its own, which its step does not need."""

    def train(self):
        self.count = 1


def test_a_kernel_has_no_train_of_a_class():
    """Twin: a step after it is made."""
    model = make()
    model, optimizer = infinity.wrap_model(model, Switching(model.parameters()), CPU)
    with pytest.raises(UsageError, match="steps as ADAMW: its update runs in the engine's kernels"):
        optimizer.train()
    before = weights(model)
    backward(model, optimizer)
    optimizer.step()
    assert not any(map(torch.equal, before, weights(model)))
