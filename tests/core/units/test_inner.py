"""Inner tensors: found below all inner subclasses, counted, and put together again."""

from __future__ import annotations

import torch
import torch.distributed as dist
from deleted import needs
from lone import lone_group
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

from infinity.core.units.inner import (
    filled,
    has_inner,
    inner_places,
    inner_tensors,
    nbytes_of,
    rebuilt,
)

A, B, C = torch.ones(2), torch.zeros(2), torch.full((2,), 3.0)


@needs("ext/dtensor")
def test_inner_tensors_are_those_of_inner_subclasses_as_well():
    """By hand: two levels. Twins: a plain tensor, a parameter, and a DTensor, which has a form."""
    deep = TwoTensor(TwoTensor(A, B), TwoTensor(C, A))
    assert [tensor.tolist() for tensor in inner_tensors(deep)] == [
        each.tolist() for each in (A, B, C, A)
    ]
    names = [name for name, _, _ in inner_places("w", deep)]
    assert names == ["w.a.a", "w.a.b", "w.b.a", "w.b.b"]
    assert has_inner(deep) and not has_inner(A) and not has_inner(nn.Parameter(A))
    assert not has_inner(None) and not has_inner("w")
    with lone_group():
        mesh = dist.init_device_mesh("cpu", (1,))
        assert not has_inner(distribute_tensor(A, mesh, [Shard(0)]))


def test_the_bytes_of_a_subclass_are_those_of_its_inner_tensors():
    """By hand. Twins: a plain tensor, and a sparse one, which has none of its own."""
    assert nbytes_of(TwoTensor(A, TwoTensor(B, C))) == 3 * 8
    assert nbytes_of(A) == 8 and nbytes_of(A.to_sparse()) == 0


def test_a_subclass_is_put_together_of_changed_inner_tensors():
    """Method: the inner tensors plus one. Twin: the subclass of before keeps its own."""
    value = TwoTensor(A.clone(), B.clone())
    made = rebuilt(value, lambda inner: inner + 1)
    assert type(made) is TwoTensor
    assert made.a.tolist() == [2, 2] and made.b.tolist() == [1, 1]
    assert value.a.tolist() == [1, 1] and value.b.tolist() == [0, 0]


def test_what_is_not_managed_is_filled_with_itself():
    """Twins: no tensor; a plain one; a subclass, which is another one with the same values."""
    assert filled("extra") == "extra" and filled(None) is None and filled(A) is A
    value = TwoTensor(A, B)
    made = filled(value)
    assert made is not value and made.a is A and made.b is B
