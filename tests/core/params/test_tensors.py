"""Tensors: writes into tensors of any strides, digests and fingerprints, and storage."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from infinity.core.machine import storage_guard
from infinity.core.params import tensors
from infinity.core.params.tensors import (
    _sum_of_places,
    checksum_of,
    digest_of,
    fingerprint,
    overwrite,
    put,
)
from infinity.ext.checkpoint.initialiser import give_storage, take_storage


def test_overwriting_an_expanded_tensor_writes_its_elements_once():
    """Twin: torch's own copy refuses it."""
    base = torch.zeros(2, 1)
    expanded, value = base.expand(2, 3), torch.tensor([[1.0] * 3, [2.0] * 3])
    with pytest.raises(RuntimeError, match="single memory location"):
        expanded.copy_(value)
    overwrite(expanded, value)
    assert base.tolist() == [[1], [2]]


def test_overwriting_any_other_tensor_is_a_copy_of_all_its_elements():
    param = nn.Parameter(torch.zeros(3, 2).t())
    value = torch.arange(6.0).view(2, 3)
    overwrite(param, value.double())
    assert torch.equal(param.detach(), value) and param.grad_fn is None
    value.fill_(-1)
    assert param[1, 2] == 5


def test_digests_are_equal_for_the_same_bits_and_differ_by_shape_dtype_or_bits():
    """The strides do not matter."""
    tensor = torch.arange(6.0).view(2, 3)
    same = tensor.t().contiguous().t()
    assert same.stride() != tensor.stride() and digest_of(same) == digest_of(tensor)
    assert digest_of(tensor)[:2] == ((2, 3), "torch.float32")
    negative_zero = tensor.clone()
    negative_zero[0, 0] = -0.0
    others = [tensor.view(3, 2), tensor.view(torch.int32), negative_zero, tensor.t()]
    assert len({digest_of(each) for each in (tensor, *others)}) == 5
    assert len({digest_of(each)[2] for each in (tensor, *others[:2])}) == 1


def test_a_digest_leaves_the_storage_resizable_as_numpy_would_not():
    tensor, seen = torch.ones(3), torch.ones(3)
    digest_of(tensor)
    seen.numpy()
    assert tensor.untyped_storage().resizable() and not seen.untyped_storage().resizable()


def test_a_checksum_is_the_crc_of_the_elements_in_row_major_order():
    """CRC-32C of "123456789" is e3069283, by its standard; other bytes have another."""
    digits = torch.tensor(list(b"123456789"), dtype=torch.uint8)
    assert checksum_of(digits) == 0xE3069283
    column_major = digits.view(3, 3).t().contiguous().t()
    assert column_major.stride() == (1, 3) and checksum_of(column_major) == 0xE3069283
    assert checksum_of(column_major.t()) != 0xE3069283


def test_a_checksum_continues_from_a_seed_and_of_nothing_is_the_seed():
    digits = torch.tensor(list(b"123456789"), dtype=torch.uint8)
    assert checksum_of(digits[4:], checksum_of(digits[:4])) == 0xE3069283
    assert checksum_of(digits[4:]) != 0xE3069283
    assert checksum_of(torch.empty(0), 17) == 17 and checksum_of(torch.empty(0)) == 0


WIDTHS = [torch.int8, torch.bfloat16, torch.float32, torch.float64, torch.complex128]


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("number", [fingerprint, lambda each: _sum_of_places(each.reshape(-1))])
def test_a_fingerprint_shows_every_element_and_its_place(number, dtype):
    """Method: each element changed by its lowest bit, and each pair of neighbours swapped; on the
    host and as a device computes it. Twin: a copy has the same."""
    tensor = torch.arange(1, 13).reshape(3, 4).to(dtype)
    kept = number(tensor)
    assert number(tensor.clone()) == kept
    for place in range(12):
        changed = tensor.clone()
        changed.view(torch.uint8).view(-1)[place * dtype.itemsize] ^= 1
        assert number(changed) != kept
    for place in range(11):
        swapped = tensor.clone().view(-1)
        swapped[[place, place + 1]] = swapped[[place + 1, place]]
        assert number(swapped) != kept


def test_a_fingerprint_takes_pieces_and_nothing(monkeypatch):
    values = torch.arange(10.0)
    whole = _sum_of_places(values)
    monkeypatch.setattr(tensors, "SUMMED_AT_ONCE", 3)
    assert _sum_of_places(values) == whole != _sum_of_places(values.flip(0))
    assert fingerprint(torch.empty(0)) == _sum_of_places(torch.empty(0)) == 0


def test_a_fingerprint_reads_in_storage_order_and_copies_nothing(monkeypatch):
    """Method: the memory that is read is the tensor's own, by rows, by columns and
    channels-last. Twin: with gaps, where only the elements count."""
    read = []
    crc32c = tensors.native.crc32c
    counted = SimpleNamespace(crc32c=lambda each: read.append(each.data_ptr()) or crc32c(each))
    monkeypatch.setattr(tensors, "native", counted)
    images = torch.rand(2, 3, 4, 5)
    for each in (images, images.permute(0, 3, 1, 2), images.transpose(1, 2)):
        fingerprint(each)
        assert read.pop() == each.data_ptr()
    gaps = images[..., ::2]
    kept = fingerprint(gaps)
    images[..., 1::2] = 7
    assert fingerprint(gaps) == kept
    images[..., 2] = 7
    assert fingerprint(gaps) != kept


@pytest.mark.parametrize("strides", ["row-major", "column-major", "gaps"])
def test_values_are_put_at_their_row_major_places_and_nowhere_else(strides):
    tensor = {
        "row-major": torch.zeros(3, 4),
        "column-major": torch.zeros(4, 3).t(),
        "gaps": torch.zeros(3, 8)[:, ::2],
    }[strides]
    put(tensor, 3, torch.tensor([1, 2, 3], dtype=torch.int64))
    assert tensor.tolist() == [[0, 0, 0, 1], [2, 3, 0, 0], [0, 0, 0, 0]]


def test_a_parameter_without_storage_cannot_be_read_until_storage_is_given_back():
    param = nn.Parameter(torch.ones(3, 2).t())
    take_storage(param)
    assert param.untyped_storage().nbytes() == 0
    if storage_guard.is_available():
        with pytest.raises(RuntimeError) as refused:
            param.untyped_storage().data_ptr()
        assert storage_guard.is_refusal(refused.value)
    give_storage(param)
    assert param.untyped_storage().nbytes() == 24 and param.stride() == (1, 2)
    param.detach().fill_(2)
    assert param.detach().clone().tolist() == [[2, 2, 2], [2, 2, 2]]


@pytest.mark.parametrize("numpy_has_it", [True, False])
def test_storage_that_numpy_has_is_replaced_and_other_storage_is_kept(numpy_has_it):
    param = nn.Parameter(torch.ones(3, 2).t())
    storage = storage_guard.identity(param)
    array = param.detach().numpy() if numpy_has_it else None
    take_storage(param)
    assert param.untyped_storage().nbytes() == 0 and param.stride() == (1, 2)
    assert (storage_guard.identity(param) != storage) == numpy_has_it
    assert array is None or (array == 1).all()
    give_storage(param)
    assert param.untyped_storage().nbytes() == 24


@pytest.mark.parametrize("shape", [(1,), (1, 1, 1), (3, 3)])
def test_numbers_of_bits_take_any_strides(shape):
    """Tensors whose elements are one, expanded: torch views no bytes of some. Twin: another value
    has other numbers."""
    for number in (checksum_of, fingerprint):
        one, other = (torch.tensor(value).expand(shape) for value in (1.0, 2.0))
        whole = torch.ones(shape)
        assert checksum_of(one) == checksum_of(whole) and number(one) != number(other)
