"""Shared: a parameter with a copy on another stage is marked as such while it is wrapped."""

from __future__ import annotations

import pytest
import torch

from infinity.ext.pipeline.shared import is_counted, is_shared, mark_shared, unmark


@pytest.mark.parametrize("counts", [True, False])
def test_a_marked_parameter_is_shared_and_counted_as_the_mark_says(counts):
    """Twin: another one is not shared, and is counted; so is this one without its mark."""
    param, other = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    mark_shared(param, counts=counts)
    assert is_shared(param) and is_counted(param) is counts
    assert not is_shared(other) and is_counted(other) is True
    for _ in range(2):
        unmark(param)
        assert not is_shared(param) and is_counted(param) is True
    assert param.__dict__ == {}


def test_a_parameter_may_be_marked_anew():
    param = torch.nn.Parameter(torch.ones(2))
    for counts in (False, True, False):
        mark_shared(param, counts=counts)
        assert is_shared(param) and is_counted(param) is counts
