"""Time shares: they sum to one."""

from __future__ import annotations

import pytest

from infinity.tools.watch.time_shares import shares_of, shares_text


def test_shares_of_waits_sum_to_one():
    found = shares_of(10.0, {"disk": 2.0, "data": 3.0, "copies": 0.0})
    assert found == {"compute": 0.5, "disk": 0.2, "data": 0.3, "copies": 0.0}
    assert shares_text(found) == "compute 50%, disk 20%, data 30%"
    assert sum(shares_of(1.0, {"disk": 2.0, "data": 3.0}).values()) == pytest.approx(1.0)
    assert shares_of(0.0, {"disk": 0.0}) == {"compute": 1.0, "disk": 0.0}
