"""Sketches: projections of the gradients that reach outputs, and floats as ordered integers."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch

from infinity.ext.dtensor.sketches import Sketches, number_of_ordered, ordered, projected

MOST = 256  # outputs between two steps


def sign(number: int) -> int:
    """By integers of Python: the sixteenth bit of a multiple of the golden ratio's constant."""
    return -1 if number * 2654435761 >> 15 & 1 else 1


def signed_sum(values: list[float]) -> float:
    return math.fsum(sign(i + 1) * value for i, value in enumerate(values))


def watched(sketches: Sketches, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """An output with the numbers 1, 2, ... and a gradient for it."""
    numel = math.prod(shape)
    leaf = torch.arange(1.0, numel + 1).view(shape).requires_grad_()
    output = leaf * 1
    sketches.watch(output)
    return output, torch.linspace(-3, 4, numel).view(shape).clone()


@pytest.mark.parametrize("shape", [(2, 3, 4), (7,), ()], ids=str)
def test_a_sketch_is_the_projection_of_the_rows_projections(shape):
    """Method: rows are along the last dimension; both signs occur among the first seven."""
    assert len({sign(number) for number in range(1, 8)}) == 2
    sketches = Sketches()
    output, grad = watched(sketches, shape)
    output.backward(grad)
    (sample,), (sketch,) = sketches.take()
    width = shape[-1] if shape else 1
    rows = [signed_sum(row.tolist()) for row in grad.reshape(-1, width)]
    expected = torch.tensor([signed_sum(rows), math.sqrt(math.fsum(x * x for x in rows))])
    torch.testing.assert_close(sketch, expected)
    assert torch.equal(sample, output.detach().reshape(-1))


def test_sketches_are_fp32_whatever_the_gradient_is():
    sketches = Sketches()
    leaf = torch.ones(2, 4, dtype=torch.bfloat16, requires_grad=True)
    output = leaf * 1
    sketches.watch(output)
    output.backward(torch.ones_like(output))
    samples, found = sketches.take()
    assert [each.dtype for each in (*samples, *found)] == [torch.float32] * 2


def test_what_was_taken_is_forgotten():
    """Twin: a second backward is sketched again. An output that none reached has no sketch."""
    sketches = Sketches()
    output, grad = watched(sketches, (4,))
    assert sketches.take() == ([], [])
    output.backward(grad, retain_graph=True)
    assert [len(each) for each in sketches.take()] == [1, 1]
    assert sketches.take() == ([], [])
    output.backward(grad)
    assert [len(each) for each in sketches.take()] == [1, 1]


def test_of_many_outputs_the_last_are_kept():
    sketches = Sketches()
    leaf = torch.ones(1, requires_grad=True)
    for number in range(MOST + 3):
        output = leaf * number
        sketches.watch(output)
        output.backward(torch.ones(1))
    samples, found = sketches.take()
    assert [int(sample) for sample in samples] == list(range(3, MOST + 3))
    assert len(found) == MOST


def test_the_gradient_passes_unchanged_and_unread_after_the_end():
    """Claim: an output that outlives the sketches holds nothing of them."""
    sketches = Sketches()
    leaf = torch.ones(3, requires_grad=True)
    output = leaf * 2
    sketches.watch(output)
    gone = weakref.ref(sketches)
    del sketches
    gc.collect()
    assert gone() is None
    output.backward(torch.tensor([1.0, 2.0, 3.0]))
    assert leaf.grad.tolist() == [2.0, 4.0, 6.0]


def test_tensors_are_projected_as_one():
    """Twin: in another order they are another vector of the same norm."""
    first, second = torch.tensor([1.0, -2.0, 5.0]), torch.tensor([3.0, 0.5], dtype=torch.float64)
    values = [1.0, -2.0, 5.0, 3.0, 0.5]
    found = projected([first, second])
    assert found == (signed_sum(values), pytest.approx(math.sqrt(39.25)))
    other = projected([second, first])
    assert other[0] == signed_sum(values[3:] + values[:3]) and other[1] == pytest.approx(found[1])
    assert projected([]) == (0.0, 0.0)


ASCENDING = [-math.inf, -1e300, -1.5, -1.0, -5e-324, 0.0, 5e-324, 1.0, 1.5, 1e300, math.inf]


def test_integers_keep_the_order_of_the_floats():
    numbers = [ordered(value) for value in ASCENDING]
    assert numbers == sorted(set(numbers))
    assert all(-(2**63) <= number < 2**63 for number in numbers)
    assert [number_of_ordered(number) for number in numbers] == ASCENDING


def test_both_zeros_are_one_and_nan_is_above_all():
    assert ordered(-0.0) == ordered(0.0) == 0
    assert ordered(math.nan) == ordered(math.inf) > ordered(1e308)
    assert ordered(-math.nan) == ordered(math.inf)
