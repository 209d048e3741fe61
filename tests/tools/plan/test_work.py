"""Work: the seconds of a model's operations, by the sizes of its products, beside what was measured
and published: products of one H100."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from infinity.ext.pipeline.choice import NAMES
from infinity.tools.plan.machine_file import Machine
from infinity.tools.plan.mesh_shape import SCHEDULES, UNFLUSHED
from infinity.tools.plan.work import TOKENS, CountingWork, Work, product_seconds

transformers = pytest.importorskip("transformers", minversion="5.23")

# m, n, k and TFLOP/s in bf16 of one H100, from OpenXLA's table (xla/service/gpu/model,
# matmul_interpolator_data.h): those of 8e9 operations or more among its first
PRODUCTS_OF_H100 = [
    (4096, 4096, 4096, 783.3),
    (2048, 2048, 2048, 632.0),
    (4096, 4096, 256, 392.2),
    (4096, 2048, 512, 447.0),
    (2048, 1024, 2048, 523.3),
    (1024, 2048, 2048, 524.3),
]


@pytest.mark.parametrize(("m", "n", "k", "teraflops"), PRODUCTS_OF_H100)
def test_products_take_what_was_measured(m, n, k, teraflops):
    """Twin: at the rate of the largest they are up to twice as fast."""
    machine = Machine.read("dgx-h100")
    rates = {"flops": machine.product_flops, "bandwidth": machine.device_bandwidth}
    found = 2 * m * n * k / product_seconds(1, m, n, k, **rates)
    assert found == pytest.approx(teraflops * 1e12, rel=0.12)
    assert machine.product_flops > teraflops * 1e12


def test_work_is_counted_and_grows_with_its_tokens():
    """A layer and an activation: its product, and the bytes that the others touch. Of several
    samples the products have more rows; those of attention are more."""
    weight, x = torch.empty(32, 16, device="meta"), torch.empty(TOKENS, 16, device="meta")
    with CountingWork() as counting:
        hidden = torch.nn.functional.linear(x, weight).relu()
        scores = hidden @ hidden.T
        torch.bmm(scores[None], hidden[None])
    work = counting.work
    assert work.products == {
        (1, TOKENS, 32, 16): 1,
        (1, TOKENS, TOKENS, 32): 1,
        (1, TOKENS, 32, TOKENS): 1,
    }
    assert work.touched == 2 * 32 * 4 and work.scored == 0.0
    rates = {"flops": 1e12, "bandwidth": 1e11}
    there = SimpleNamespace(product_flops=1e12, device_bandwidth=1e11)
    one, two = (Work(work.products).seconds(n, 64, there) for n in (1, 2))
    added = Work(work.products, added=3e6)  # gradients, to those of earlier micro-batches
    assert added.seconds(2, 64, there) == pytest.approx(two + 3e6 / 1e11)
    by_hand = [
        product_seconds(1, 128, 32, 16, **rates),
        product_seconds(2, 64, 64, 32, **rates),
        product_seconds(2, 64, 32, 64, **rates),
    ]
    assert two == pytest.approx(sum(by_hand)) and one < two < 2 * one
    assert work.plus(work, 2).seconds(1, 64, there) == pytest.approx(3 * work.seconds(1, 64, there))


def test_schedules_to_ask_for_are_those_of_pipelines_and_one_without_flush():
    assert set(SCHEDULES) == {*NAMES, UNFLUSHED}
