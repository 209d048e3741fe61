"""Changes: what extensions change in a model before a wrap reads it is made, settled, undone and
released at its time."""

from __future__ import annotations

import pytest
import torch
from deleted import needs
from torch import nn

import infinity
from infinity.core import seams
from infinity.core.wrap import wrap
from infinity.core.wrap.changes import Changes
from infinity.errors import ConfigError

said: list[str] = []
MADE = "make First", "make Second"


class First(seams.Change):
    """Says what it is asked for."""

    fails = False

    def prepare(self, model):
        said.append(f"prepare {type(self).__name__}")

    def make(self, model, optimizers, config):
        said.append(f"make {type(self).__name__}")
        if self.fails:
            raise ConfigError("it does not fit")

    def settle(self):
        said.append(f"settle {type(self).__name__}")

    def undo(self):
        said.append(f"undo {type(self).__name__}")

    def release(self):
        said.append(f"release {type(self).__name__}")


class Second(First):
    """The same."""


class Failing(First):
    """Fails in the middle."""

    fails = True


@pytest.fixture(autouse=True)
def nothing_said():
    said.clear()


def use(monkeypatch, *kinds: type) -> None:
    """Lets `kinds` be the changes, after the extensions' own."""
    monkeypatch.setattr(seams, "CHANGES", [*seams.CHANGES, *kinds])


def wrapped() -> tuple:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return infinity.wrap_model(model, optimizer, {"params": "host", "optimizer": "host"})


def test_changes_are_made_in_their_order_settled_by_a_wrap_and_released_by_an_unwrap(monkeypatch):
    """Reads what each change was asked for. Twin: none is undone."""
    use(monkeypatch, First, Second)
    model, optimizer = wrapped()
    assert said == ["prepare First", "prepare Second", *MADE, "settle Second", "settle First"]
    said.clear()
    infinity.unwrap_model(model, optimizer)
    assert said == ["release Second", "release First"]


def test_a_wrap_that_fails_undoes_all_changes_in_reverse(monkeypatch):
    """Lets the second of three fail. Twin: nothing is settled or released."""
    use(monkeypatch, First, Failing, Second)
    with pytest.raises(ConfigError, match="it does not fit"):
        wrapped()
    assert said[:3] == ["prepare First", "prepare Failing", "prepare Second"]
    assert said[3:] == ["make First", "make Failing", "undo Second", "undo Failing", "undo First"]


def test_a_change_that_defines_nothing_does_nothing(monkeypatch):
    """Twin: a wrap without it gives the same weights."""
    torch.manual_seed(0)
    plain = wrapped()[0].state_dict()
    use(monkeypatch, seams.Change)
    torch.manual_seed(0)
    model, optimizer = wrapped()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in plain.items())
    infinity.unwrap_model(model, optimizer)


@needs("ext/packed")
def test_the_changes_of_extensions_are_found():
    """By hand: five, of four folders."""
    assert [type(each).__name__ for each in Changes()._made] == [
        *("Lasting", "Ties", "Quantized", "CodedWeights", "Packed"),
    ]


class Shelf:
    """A place as the seam describes it: of a tensor in a list, which torch does not list."""

    def __init__(self, module: nn.Module):
        self._shelf = module.shelf

    @property
    def tensor(self) -> torch.Tensor:
        return self._shelf[0]

    def replace(self, tensor: torch.Tensor) -> None:
        self._shelf[0] = tensor


class Shelved(seams.Extension):
    """Knows such tensors."""

    @classmethod
    def unlisted(cls, model):
        modules = model.named_modules()
        return [(f"{name}.shelf", Shelf(m)) for name, m in modules if "shelf" in vars(m)]


@pytest.mark.parametrize("is_known", [True, False])
def test_a_tensor_in_an_extensions_place_is_back_after_a_wrap_that_failed(is_known, monkeypatch):
    """Twin: without the extension the other tensor stays."""
    model, others = nn.Sequential(nn.Linear(4, 4)), [*seams.kinds(), *[Shelved] * is_known]
    model[0].shelf = [torch.ones(4)]
    before = model[0].shelf[0]
    monkeypatch.setattr("infinity.core.wrap.described_model.kinds", lambda: others)

    def fails(*_):
        model[0].shelf[0] = torch.zeros(4)
        raise ValueError("in the end")

    monkeypatch.setattr(wrap, "_commit", fails)
    with pytest.raises(ValueError, match="in the end"):
        infinity.wrap_model(model, None, {"params": "host"})
    assert (model[0].shelf[0] is before) == is_known
