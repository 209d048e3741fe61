"""Shared: a parameter with a copy on another stage is marked while its stage is wrapped, and is a
unit of its own."""

from __future__ import annotations

import pytest
import torch

from infinity.core.units.handle import COUNTS
from infinity.core.wrap.described_model import read_model
from infinity.ext.pipeline.ties import Ties


@pytest.mark.parametrize("counts", [True, False])
def test_a_shared_parameter_is_alone_while_it_is_marked(counts):
    """Twin: another one is not, nor this one behind the block, which an error ends too."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    param = model[0].weight
    ties = Ties([param], counts=counts)
    with pytest.raises(KeyError), ties.marked():
        assert read_model(model).alone == {param} and getattr(param, COUNTS) is counts
        raise KeyError
    assert read_model(model).alone == set() and vars(param) == {}
    with ties.marked(), ties.marked():
        pass
    assert vars(param) == {}
