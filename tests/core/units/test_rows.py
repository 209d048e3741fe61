"""Rows: a flat param keeps the steps that rows miss where a kernel steps whole blocks of them.

Twins: rows that share a block of moments, and weights that no kernel steps, are stepped whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from infinity import native
from infinity.core.units.flat_param import FlatParam
from infinity.core.units.flat_param_spec import FlatParamSpec

F32 = torch.float32
BLOCK = native.MOMENT_BLOCK


class Chosen:
    """Chooses among four rows, and tells what steps were made for."""

    count = 4

    def make_steps(self, places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        return list(places)


@pytest.mark.parametrize(
    ("widths", "stepped", "places"),
    [
        ((BLOCK, 2 * BLOCK), True, [(0, BLOCK), (4 * BLOCK, 2 * BLOCK)]),
        ((BLOCK, BLOCK + 1), True, None),
        ((BLOCK, 2 * BLOCK), False, None),
    ],
)
def test_steps_of_rows_are_kept_where_each_row_has_blocks_of_its_own(widths, stepped, places):
    spec = FlatParamSpec(F32, F32, native.Master.OWN, F32, F32, (), stepped=stepped)
    flat_param = FlatParam(spec, [nn.Parameter(torch.ones(4, width)) for width in widths])
    assert flat_param.homes.rows is None
    flat_param.homes.update_by_rows(Chosen())
    assert flat_param.homes.rows == places
