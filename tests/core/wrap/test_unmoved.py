"""What stays with a model's modules is counted; what nothing can move is refused by name.

Twins: the same model without it is wrapped; a subclass with memory of its own is.
"""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import nn

import infinity
from infinity.core.wrap.described_model import read_model
from infinity.core.wrap.unmoved import unmoved_nbytes
from infinity.errors import ConfigError


class Named(nn.Parameter):
    """A library's own kind of parameter."""


class Hollow(torch.Tensor):
    """A wrapper whose bytes lie elsewhere."""

    @staticmethod
    def __new__(cls, shape):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.uint8)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].shape)
        raise NotImplementedError


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def test_a_parameter_without_memory_is_refused_by_name():
    refused, allowed = model(), model()
    refused[1].codes = nn.Parameter(Hollow((64, 64)), requires_grad=False)
    allowed[1].codes = Named(torch.ones(4, 4), requires_grad=False)
    before = dict(refused.named_parameters())
    with pytest.raises(ConfigError, match=r"1\.codes is a Hollow .*4096 elements.*bitsandbytes"):
        infinity.wrap_model(refused, None, {"params": "host"})
    assert all(param is before[name] for name, param in refused.named_parameters())
    infinity.wrap_model(allowed, None, {"params": "host"})


def test_objects_of_other_libraries_are_refused_with_what_works(monkeypatch):
    """Method: a module of the library's name with a class of a wrapper, set as an attribute."""
    library = types.ModuleType("triton_kernels")
    exec("class Tensor:\n    pass", library.__dict__)
    monkeypatch.setitem(sys.modules, "triton_kernels", library)
    refused = model()
    refused[0].blocks = library.Tensor()
    with pytest.raises(ConfigError, match=r"0\.blocks .*triton_kernels.*dequantize=True"):
        infinity.wrap_model(refused, None, {"params": "host"})
    del refused[0].blocks
    infinity.wrap_model(refused, None, {"params": "host"})


def test_each_storage_is_counted_once():
    """Claim: buffers and unmoved parameters count; views of one storage once; what moves does
    not."""
    counted = model()
    assert unmoved_nbytes(read_model(counted)) == 0
    counted[0].register_buffer("mean", torch.zeros(100))
    counted[1].register_buffer("same", counted[0].mean[:50])
    counted[1].codes = Named(torch.zeros(10), requires_grad=False)
    assert unmoved_nbytes(read_model(counted)) == 400 + 40
