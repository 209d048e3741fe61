"""Axes: which ranks of a mesh are one job. Method: torch's fake process group of eight ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from lone import lone_group
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from infinity import ConfigError
from infinity.ranks.axes import members_of, rank_rows

ME = 5


@pytest.fixture(scope="module", autouse=True)
def eight() -> Iterator[None]:
    with lone_group(rank=ME, size=8):
        yield


def mesh(**axes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def test_a_slice_beside_an_axis_of_another_name_is_a_job():
    assert members_of(mesh(slow=2, dp=4)["dp"]) == [4, 5, 6, 7]
    assert rank_rows(mesh(slow=2, dp=4)["dp"]).tolist() == [[[[4, 5, 6, 7]]]]
    assert members_of(mesh(dp=4, slow=2)["dp"]) == [1, 3, 5, 7]
    assert members_of(mesh(slow=8, dp=1)["dp"]) == [ME]
    inside = mesh(slow=2, dp=2, tp=2)["dp", "tp"]
    assert rank_rows(inside).tolist() == [[[[4, 6]], [[5, 7]]]]


def test_a_mesh_of_all_ranks_is_one_job():
    for whole in (None, mesh(dp=8), mesh(dp=4, tp=2)):
        assert members_of(whole) == list(range(8))


@pytest.mark.parametrize("left_out", ["tp", "pp", "dp_replicate"])
def test_an_axis_that_the_job_needs_is_not_left_out(left_out):
    """Twin of the first: its ranks would train models of their own by mistake."""
    cut = mesh(**{left_out: 2, "dp": 4})["dp"]
    assert members_of(cut) == list(range(8))
    with pytest.raises(ConfigError, match="makes 4 ranks, but the job has 8"):
        rank_rows(cut)


def test_a_mesh_of_some_ranks_is_refused():
    with pytest.raises(ConfigError, match="makes 2 ranks, but the job has 8"):
        rank_rows(DeviceMesh("cpu", [4, ME], mesh_dim_names=("dp",)))


def test_axes_without_a_meaning_are_refused():
    with pytest.raises(ConfigError, match="axes must be named"):
        rank_rows(mesh(slow=2, dp=4))
