"""Dispatch keys: operations on a tensor ask its class from the time it is told to."""

from __future__ import annotations

import pytest
import torch

from infinity.core.machine import dispatch_keys


class Told(torch.Tensor):
    """Notes the operations on it, and runs them as on a plain tensor."""

    told: list[str] = []

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.told.append(func.__name__)
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


@torch.jit.script
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


WAYS = {
    "tensor": torch.tensor,
    "Tensor": lambda x: torch.Tensor(x).clone(),
    "sparse": lambda x: torch.sparse_coo_tensor(torch.tensor([[0, 2]]), x).to_dense(),
    "scripted": doubled,
}


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("way", WAYS)
def test_what_asks_no_function_asks_the_class(way):
    """Method: a tensor whose class is changed. Twin: before it is told to, and after it is told not
    to any more, torch asks nobody."""
    tensor, go = torch.tensor([1.0, 2.0]), WAYS[way]
    expected, counts = go(tensor), []
    tensor.__class__ = Told
    for change in (
        dispatch_keys.clear_python_key,
        dispatch_keys.set_python_key,
        dispatch_keys.clear_python_key,
    ):
        change(tensor)
        assert dispatch_keys.has_python_key(tensor) == (change is dispatch_keys.set_python_key)
        Told.told.clear()
        with torch._C.DisableTorchFunctionSubclass():
            assert torch.equal(go(tensor), expected)
        counts.append(len(Told.told))
    assert counts[0] == counts[2] == 0 < counts[1]


def test_another_data_leaves_the_keys():
    """As a parameter's memory is replaced while it is at rest. Twin: one that is not asked."""
    for asks in (True, False):
        tensor = torch.ones(2)
        tensor.__class__ = Told
        if asks:
            dispatch_keys.set_python_key(tensor)
        tensor.data = torch.zeros(2)
        assert dispatch_keys.has_python_key(tensor) == asks
        dispatch_keys.clear_python_key(tensor)


def test_in_a_torch_that_differs_nothing_is_changed(monkeypatch):
    monkeypatch.setattr(dispatch_keys, "_place", lambda: None)
    tensor = torch.ones(2)
    dispatch_keys.set_python_key(tensor)
    assert not dispatch_keys.has_python_key(tensor)


def test_a_wrapper_keeps_its_own_key():
    """Leaves its key to a tensor of a wrapper's class, which has no memory. Twin: a plain tensor
    that had the key runs as before."""
    inner = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    dispatch_keys.clear_python_key(inner)
    assert dispatch_keys.has_python_key(inner) and inner.sum().item() == 5.0
    plain = torch.ones(2)
    dispatch_keys.set_python_key(plain)
    dispatch_keys.clear_python_key(plain)
    assert not dispatch_keys.has_python_key(plain)
