"""What has the memory of weights before a wrap keeps the values of before: that is said once, and
not of ordinary models."""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
import re
import types
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from models import at_home
from safetensors.torch import load_file, save_file
from torch import nn

import infinity
from infinity.core.wrap import aliases

HOMES = ("device", "host", "nvme")


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def said_at_wrap(model: nn.Module, config: dict[str, Any], caplog) -> list[str]:
    """Wraps, trains a step, and returns what was said of memory."""
    optimizer = torch.optim.AdamW(
        [param for param in model.parameters() if param.requires_grad], lr=1e-2
    )
    caplog.clear()
    with caplog.at_level(logging.WARNING, "infinity"):
        model, optimizer = infinity.wrap_model(model, optimizer, config)
    infinity.unwrap_model(model, optimizer)
    return [
        record.getMessage() for record in caplog.records if "share memory" in record.getMessage()
    ]


def flat(model: nn.Module) -> torch.Tensor:
    """All weights as shards of one buffer."""
    buffer = torch.cat([param.detach().reshape(-1) for param in model.parameters()])
    at = 0
    for param in model.parameters():
        param.data = buffer[at : at + param.numel()].view_as(param)
        at += param.numel()
    return buffer


def made_of_a_tensor(model: nn.Module) -> torch.Tensor:
    held = torch.ones(8, 8)
    model[0].weight = nn.Parameter(held)
    return held


HOLDS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "an array": (
        lambda model: model[0].weight.detach().numpy(),
        "1 of this model's parameters (0.weight)",
    ),
    "numpy's export": (
        lambda model: np.from_dlpack(model[0].weight.detach()),
        "1 of this model's parameters (0.weight)",
    ),
    "torch's export": (
        lambda model: torch.from_dlpack(model[0].weight.detach()),
        "1 of this model's parameters (0.weight)",
    ),
    "detached": (
        lambda model: [param.detach() for param in model.parameters()],
        "4 of this model's parameters (0.weight, 0.bias, 1.weight, ...)",
    ),
    "a row": (lambda model: model[1].weight.data[2], "1 of this model's parameters (1.weight)"),
    "a flat buffer": (flat, "4 of this model's parameters (0.weight"),
    "what it was made of": (made_of_a_tensor, "1 of this model's parameters (0.weight)"),
}


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("how", HOLDS)
def test_what_keeps_the_old_values_is_told_of_once(how, home, tmp_path, caplog):
    """Method: something else has a weight's memory at the wrap, in each way. In the twin it is let
    go before."""
    hold, told = HOLDS[how]
    model = make()
    held = hold(model)
    (message,) = said_at_wrap(model, at_home(home, home, tmp_path), caplog)
    assert told in message and "state_dict()" in message
    del held, model
    model = make()
    hold(model)
    assert said_at_wrap(model, at_home(home, home, tmp_path), caplog) == []


class Transposed(nn.Module):
    """Saves a view of its weight for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


def with_a_graph(model: nn.Module, *, frozen: bool) -> tuple[nn.Module, Any]:
    model.requires_grad_(not frozen)
    rest = nn.Sequential(model, nn.Linear(8, 8))
    return rest, rest(torch.randn(2, 8, requires_grad=True))


def assigned(state: dict[str, torch.Tensor]) -> tuple[nn.Module, Any]:
    model = make()
    model.load_state_dict(state, assign=True)
    return model, state


def stepped() -> nn.Module:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    return model


def tied() -> nn.Module:
    model = make()
    model[1].weight = model[0].weight
    return model


def loaded_by_torch(path, **how: Any) -> dict[str, torch.Tensor]:
    torch.save(make().state_dict(), path)
    return torch.load(path, **how)


def loaded_by_safetensors(path) -> dict[str, torch.Tensor]:
    save_file(make().state_dict(), path)
    return load_file(path)


def from_pretrained(path) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=67)
    transformers.GPT2LMHeadModel(config).save_pretrained(path)
    return transformers.GPT2LMHeadModel.from_pretrained(path)


def with_adapters(path) -> nn.Module:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(
        from_pretrained(path), peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    )


def whole(path) -> nn.Module:
    torch.save(make(), path)
    return torch.load(path, weights_only=False)


def held_state(model: nn.Module) -> tuple[nn.Module, Any]:
    return model, model.state_dict()


ORDINARY: dict[str, Callable] = {
    "built": lambda path: make(),
    "stepped": lambda path: stepped(),
    "tied": lambda path: tied(),
    "recurrent": lambda path: nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 8, 2)),
    "shared with processes": lambda path: make().share_memory(),
    "loaded whole": lambda path: whole(path / "model.pt"),
    "assigned": lambda path: assigned(loaded_by_torch(path / "state.pt")),
    "mapped": lambda path: assigned(loaded_by_torch(path / "state.pt", mmap=True)),
    "assigned from safetensors": lambda path: assigned(
        loaded_by_safetensors(path / "model.safetensors")
    ),
    "from_pretrained": lambda path: from_pretrained(path / "pretrained"),
    "with adapters": lambda path: with_adapters(path / "pretrained"),
    "with its state dict": lambda path: held_state(make()),
    "with a graph": lambda path: with_a_graph(Transposed(), frozen=False),
    "with a graph over frozen weights": lambda path: with_a_graph(Transposed(), frozen=True),
}


@pytest.mark.parametrize("kind", ORDINARY)
def test_nothing_is_said_of_ordinary_models(kind, tmp_path, caplog):
    """Method: models as they come are wrapped, with what their makers keep; nothing is said. In the
    twin one tensor is held beside."""
    made = ORDINARY[kind](tmp_path)
    model, kept = made if isinstance(made, tuple) else (made, None)
    assert said_at_wrap(model, at_home("host", "host", tmp_path), caplog) == []
    del made, model, kept
    made = ORDINARY[kind](tmp_path)
    model, kept = made if isinstance(made, tuple) else (made, None)
    held = next(model.parameters()).detach()
    assert len(said_at_wrap(model, at_home("host", "host", tmp_path), caplog)) == 1
    del held, kept


def test_nothing_is_looked_for_where_nothing_is_held(tmp_path, caplog, monkeypatch):
    """The list of all objects is long, and is not asked for without need."""
    monkeypatch.setattr(
        aliases.gc, "get_objects", lambda: pytest.fail("all objects were looked through")
    )
    assert said_at_wrap(stepped(), at_home("host", "host", tmp_path), caplog) == []


def test_weights_of_another_wrapped_model_are_passed_over(tmp_path, caplog):
    """Method: one model is at home, whose memory must not be looked at; an array of another one's
    is told of all the same."""
    other, _ = infinity.wrap_model(make(), None, at_home("host", "host", tmp_path))
    model = make()
    held = model[0].weight.detach().numpy()
    assert len(said_at_wrap(model, at_home("host", "host", tmp_path), caplog)) == 1
    del held
    infinity.unwrap_model(other)


@dataclasses.dataclass(frozen=True)
class Frozen:
    inner: Any
    more: Any


@dataclasses.dataclass(slots=True)
class Slots:
    first: torch.Tensor


class WithViews(nn.Module):
    """Attributes of each kind that are views of weights, used in its forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.c = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b = nn.utils.spectral_norm(nn.Linear(8, 8))  # keeps one until its first forward
        self.first = self.a.weight.data.view(-1)[:16]
        self.rows = [self.c.weight.detach()[2]]
        self.turned = {"w": ([self.c.weight.data.t()], "a text")}
        self.turned["itself"] = self.turned
        held = self.a.weight.data[3]
        self.closed = lambda x: x * held.sum()
        self.a.register_forward_hook(lambda module, args, out: self.closed(out))
        self.record = Frozen(Slots(self.c.weight.data[:, 1]), deque([self.a.bias.data[:2]]))
        self.c.bias.beside = self.c.bias.data[:1]
        self.scaled = functools.partial(torch.mul, other=self.c.weight.data[4])
        self.trained = [self.c.weight[5]]  # with its graph, so that it has a part in the gradient

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.c(self.b(self.a(x))) * self.first.sum() + self.rows[0].sum()
        y = y + (self.turned["w"][0][0] @ x.t()).sum() + self.c.bias.beside
        y = y * self.record.inner.first.sum() + self.record.more[0].sum()
        return self.scaled(y) + self.trained[0] * x


@pytest.mark.parametrize("home", [None, *HOMES])
def test_attributes_that_are_views_of_weights_follow_them(home, tmp_path):
    """Trains a model that computes with views of its weights, writes through them, and unwraps it:
    all as in torch. Twin: plain torch, the case None, against views that were cloned."""

    def found(model: nn.Module, config: dict | None) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if config is not None:
            model, optimizer = infinity.wrap_model(model, optimizer, config)
        values = []
        for step in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            values.append(loss.item())
        with torch.no_grad():
            model.first.zero_()
            model.rows[0].fill_(2.0)
            values += [model.a.weight.sum().item(), model.c.weight.sum().item()]
        if config is not None:
            infinity.unwrap_model(model, optimizer)
        model.a.weight.data.fill_(1.0)
        return [*values, model.first.sum().item(), model.turned["w"][0][0].sum().item()]

    if home is None:
        model = WithViews()
        model.first = model.first.clone()
        assert found(model, None) != found(WithViews(), None)
    else:
        assert found(WithViews(), at_home(home, home, tmp_path)) == found(WithViews(), None)


def a_buffer(model: nn.Module) -> None:
    model[0].register_buffer("first", model[0].weight.data.view(-1)[:16])


def a_flat_buffer(model: nn.Module) -> None:
    model.whole = flat(model)


def a_tuple(model: nn.Module) -> None:
    model[1].parts = (model[1].weight.data[:4], model[1].weight.data[4:])


def a_tuple_in_a_list(model: nn.Module) -> None:
    model[0].groups = [{"halves": (model[0].weight.data[:4],)}]


def other_bits(model: nn.Module) -> None:
    model[0].bits = model[0].weight.data.view(torch.int32)


def an_array_in_an_object(model: nn.Module) -> None:
    model[0].kept = types.SimpleNamespace(array=model[0].weight.detach().numpy()[2:])


def a_default_of_a_hook(model: nn.Module) -> None:
    def hook(module, args, out, row=model[1].weight.data[0]):
        return out + row

    model[1].register_forward_hook(hook)


def a_set_in_a_frozen_object(model: nn.Module) -> None:
    model[0].kept = Frozen({model[0].weight.data[1]}, None)


@pytest.mark.parametrize(
    "add, name, weight",
    [
        (a_buffer, "0.first", "0.weight"),
        (a_flat_buffer, "whole", "0.weight"),
        (a_tuple, "1.parts[0]", "1.weight"),
        (a_tuple_in_a_list, "0.groups[0]['halves'][0]", "0.weight"),
        (other_bits, "0.bits", "0.weight"),
        (an_array_in_an_object, "0.kept.array", "0.weight"),
        (a_default_of_a_hook, "1._forward_hooks[", "1.weight"),
        (a_set_in_a_frozen_object, "0.kept.inner[0]", "0.weight"),
    ],
)
def test_a_view_that_cannot_follow_its_weight_is_refused_by_name(add, name, weight, tmp_path):
    """Wraps a model with each. Twin: a clone of the same values is the model's own."""
    model = make()
    add(model)
    with pytest.raises(
        infinity.ConfigError, match=re.escape(name) + f".*is a view of the weight {weight}"
    ):
        infinity.wrap_model(model, None, at_home("host", "host", tmp_path))
    assert type(model[0].weight) is nn.Parameter
    model = make()
    model[0].register_buffer("first", model[0].weight.data.view(-1)[:16].clone())
    infinity.wrap_model(model, None, at_home("host", "host", tmp_path))


def test_what_took_the_place_of_a_view_stays_after_the_unwrap(tmp_path):
    """Replaces two of three views while the model is wrapped. Twin: the third follows its weight,
    and the model goes with its last reference."""
    model = make()
    model.rows = [row for row in model[0].weight.data[:3]]
    model.more = types.SimpleNamespace(row=model[1].weight.data[0], model=model)
    model, _ = infinity.wrap_model(model, None, at_home("host", "host", tmp_path))
    model.rows[0], model.more.row = torch.ones(8), None
    model.rows.pop()
    infinity.unwrap_model(model)
    assert torch.equal(model.rows[0], torch.ones(8)) and model.more.row is None
    model[0].weight.data.fill_(2.0)
    assert len(model.rows) == 2 and torch.equal(model.rows[1], torch.full((8,), 2.0))
    model, _ = infinity.wrap_model(model, None, at_home("host", "host", tmp_path))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
