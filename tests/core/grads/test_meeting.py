"""Meeting: rows of lookups and whole gradients add up in autograd's order."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from infinity.core.grads.meeting import Meeting, lookup_gradient

ROWS, WIDTH = 40, 6


def met(ids: list[torch.Tensor]) -> Meeting:
    spec = SimpleNamespace(dtype=torch.float32)
    handle = SimpleNamespace(flat_param=SimpleNamespace(spec=spec), param=torch.empty(ROWS, WIDTH))
    return Meeting(handle, ids)


@pytest.mark.parametrize("lengths", [(7,), (5, 9), (60,), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("padding", [None, 2])
def test_rows_and_whole_gradients_add_up_as_torch_adds_them(lengths, padding):
    """Adds one whole gradient, then each lookup's, to gradients that are there. Twin: the parts,
    added one after the other, have other bits."""
    torch.manual_seed(sum(lengths))
    ids = [torch.randint(0, ROWS, (n,)) for n in lengths]
    ids[0][:1] = 2
    dys = [torch.randn(n, WIDTH) for n in lengths]
    there, whole = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    denses = [lookup_gradient(dy, i, ROWS, padding) for dy, i in zip(dys, ids)]
    right = there + sum(denses, whole.clone())

    meeting = met(ids)
    found = there + meeting.keep_rows(whole.clone())
    for i, dy in zip(ids, dys):
        meeting.add(i, dy, padding)
    at, rows = meeting.rows()
    found.index_add_(0, at, rows)
    assert torch.equal(found.view(torch.int32), right.view(torch.int32))

    one_by_one = there + whole
    for dense in denses:
        one_by_one += dense
    assert not torch.equal(one_by_one, right)


def test_a_zero_below_zero_becomes_one_above_as_in_a_sum():
    """Gives -0.0 in a row that no lookup reads: the sum with a lookup's zeros is 0.0. Twin: without
    a lookup it stays."""
    whole = torch.full((ROWS, WIDTH), -0.0)
    kept = met([torch.tensor([1])]).keep_rows(whole.clone())
    assert not kept.signbit().any()
    assert met([]).keep_rows(whole.clone()).signbit().all()
