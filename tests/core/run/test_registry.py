"""Registry: the record of a wrapped model is found by the model, and lives as long as it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import infinity
from infinity.core.run.registry import engine_of, is_wrapped, whole_of, wrapped

HOST = {"params": "host", "optimizer": "host"}


def model_of(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = model_of()
    return infinity.wrap_model(model, torch.optim.SGD(model.parameters(), lr=0.1), HOST)


def test_a_record_is_found_by_its_model_alone():
    """Twins: a part of the model has none, nor has a model beside it."""
    model, optimizer = made()
    record = wrapped(model)
    assert record is wrapped(model) and engine_of(model) is record.engine
    assert record.model is whole_of(model) is model and record.optimizer is optimizer
    assert is_wrapped(model) and not is_wrapped(model[0]) and not is_wrapped(model_of())
    for other, name in ((model[0], "Linear"), (model_of(), "Sequential")):
        with pytest.raises(infinity.UsageError, match=f"this {name} is not wrapped"):
            wrapped(other)


@pytest.mark.parametrize("given", [3, None, [], (), [3], "text"], ids=repr)
def test_what_is_no_model_is_not_wrapped(given):
    with pytest.raises(infinity.UsageError, match=f"{type(given).__name__} is not wrapped"):
        wrapped(given)


def test_a_list_of_parts_stands_for_what_holds_them():
    """Claim: the list, a tuple of it and its first part are one wrapped model, whose whole has the
    parameters of all parts."""
    parts = [model_of(4), model_of(3)]
    params = [param for part in parts for param in part.parameters()]
    given, optimizer = infinity.wrap_model(parts, torch.optim.SGD(params, lr=0.1), HOST)
    record = wrapped(given)
    assert wrapped(tuple(given)) is wrapped(given[0]) is record
    whole = whole_of(given)
    assert whole is record.model and {*map(id, whole.parameters())} == {*map(id, params)}
    assert record.optimizer is optimizer


def test_a_model_without_an_optimizer_has_a_record_without_one():
    model, _ = infinity.wrap_model(model_of(), None, {"params": "host"})
    assert wrapped(model).optimizer is None and wrapped(model).model is model


def test_a_record_keeps_neither_model_nor_optimizer():
    """Method: the optimizer goes first, then the model; the record lives on. Twin: what is held is
    found by it."""
    model, optimizer = made()
    record = wrapped(model)
    gone = weakref.ref(model), weakref.ref(optimizer)
    gc.collect()
    assert record.optimizer is optimizer
    del optimizer
    gc.collect()
    assert gone[1]() is None and record.optimizer is None and record.model is model
    del model
    gc.collect()
    assert gone[0]() is None and record.model is None


def test_an_unwrapped_model_has_no_record():
    model, optimizer = made()
    infinity.unwrap_model(model, optimizer)
    assert not is_wrapped(model)
    for look in (wrapped, engine_of, whole_of):
        with pytest.raises(infinity.UsageError, match="is not wrapped"):
            look(model)


def test_a_begun_unwrap_hides_the_engine_until_it_is_over():
    """Twin: the record is found all the same, to go on by."""
    model, optimizer = made()
    record = wrapped(model)
    record.unwrapping = lambda: None
    with pytest.raises(infinity.UsageError, match="call it again, with the same model"):
        engine_of(model)
    assert wrapped(model) is record and is_wrapped(model)
    record.unwrapping = None
    assert engine_of(model) is record.engine
