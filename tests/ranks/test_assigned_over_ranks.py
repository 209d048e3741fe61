"""Tensors that are assigned to ``p.grad``, and hooks on it, over several ranks."""

from __future__ import annotations

import pytest
from ranks import Jobs

pytestmark = pytest.mark.timeout(700)


@pytest.mark.parametrize("mode", ["parameters", "gradients", "optimizer"])
def test_an_assigned_tensor_is_the_gradient_until_that_parts_from_it(mode, standing_ranks):
    """A flat buffer is clamped after its views were assigned: the bits of clip_grad_value_. Twin:
    changed once the gradient is another one, it raises on every rank."""
    jobs = Jobs(standing_ranks(2), "assigned_jobs", {"assigned": {"shard": mode}})
    for found in jobs["assigned"]:
        assert found["different"] == []
        # With ZeRO-1 a backward on top of a gradient that was set is refused by itself.
        assert all(
            "assigned" in said or (mode == "optimizer" and "backward" in said)
            for said in found["said"]
        ), found["said"]


@pytest.mark.parametrize("mode", ["parameters", "gradients", "optimizer"])
def test_a_hook_on_a_gradient_has_the_sum_that_it_has_in_torchs_data_parallel(mode, standing_ranks):
    """Method: hooks that scale, clip or replace, from before and after the wrap, with one and three
    backwards a step, in one pass or not: the bits of DistributedDataParallel. Twin: if ranks
    average after each backward, one pass of three has other gradients for its hooks."""
    jobs = Jobs(standing_ranks(2), "assigned_jobs", {"hooked": {"shard": mode}})
    for found in jobs["hooked"]:
        assert found["different"] == [] and bool(found["by pass"]) == (mode != "optimizer")
