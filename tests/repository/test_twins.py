"""Plain twins are computed once for the cases of a test that differ in their homes alone."""

from __future__ import annotations

import pytest
import torch
from twins import MOST, of_this_test, twin, without_homes


@pytest.mark.parametrize(
    ("one", "other", "are_same"),
    [
        ("a.py::test_b[nvme-fp32]", "a.py::test_b[device-fp32]", True),
        ("a.py::test_b[nvme-fp32]", "a.py::test_b[nvme-bf16]", False),
        ("a.py::test_b[norm-inf-host]", "a.py::test_b[norm-inf-hostile]", True),
        ("a.py::test_b", "a.py::test_c", False),
    ],
)
def test_only_homes_make_no_other_twin(one, other, are_same):
    assert (without_homes(one) == without_homes(other)) is are_same


def test_another_call_in_a_test_has_another_key():
    """Method: two calls here. Twin: a key of the caller's is as often the same as it says."""
    assert of_this_test() != of_this_test()
    runs: list[int] = []
    for _ in range(3):
        twin(lambda: runs.append(1), "a key", len(runs) > 0)
    assert len(runs) == 2


def test_a_twin_is_kept_as_it_was():
    """Method: what was given is changed, and is given again as it was. Twin: without a copy it
    would be changed; a run of another key gives other values."""

    def run() -> dict[str, list[torch.Tensor]]:
        return {"losses": [torch.ones(3, requires_grad=True) * 2]}

    first = twin(run, "changed")
    first["losses"][0].zero_()
    assert twin(dict, "changed")["losses"][0].tolist() == [2.0, 2.0, 2.0]
    assert first["losses"][0].tolist() == [0.0, 0.0, 0.0] and twin(dict, "another") == {}


def test_the_oldest_twins_are_dropped():
    runs: list[int] = []
    for number in range(MOST + 1):
        twin(lambda: runs.append(1), "dropped", number)
    twin(lambda: runs.append(1), "dropped", MOST)
    assert len(runs) == MOST + 1
    twin(lambda: runs.append(1), "dropped", 0)
    assert len(runs) == MOST + 2
