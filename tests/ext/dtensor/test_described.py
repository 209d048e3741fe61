"""Descriptions of a forward's inputs and mode: what they tell apart, and what they leave out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from infinity.core.machine.device import Device
from infinity.core.machine.traffic import Traffic
from infinity.ext.dtensor.described import mode_of, number_of, shape_of, tensors_in

ONE = torch.ones(1)


def names(*args: object, **kwargs: object) -> list[str]:
    return [name for name, _ in tensors_in([*enumerate(args), *kwargs.items()], "")]


def test_the_mode_tells_training_gradients_and_autocast():
    model, device = nn.Linear(1, 1), Device(torch.device("cpu"), Traffic())
    assert mode_of(model, device) == "training, with gradients"
    with torch.no_grad():
        assert mode_of(model, device) == "training, without gradients"
        assert mode_of(model.eval(), device) == "evaluation, without gradients"
        with torch.autocast("cpu", dtype=torch.float16):
            assert mode_of(model, device) == (
                "evaluation, without gradients, in autocast to torch.float16"
            )
    assert mode_of(model, device) == "evaluation, with gradients"


def test_the_autocast_of_another_device_is_not_the_mode():
    elsewhere = Device(torch.device("cuda"), Traffic())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert mode_of(nn.Linear(1, 1), elsewhere) == "training, with gradients"


def test_a_shape_has_the_dtype_and_every_size():
    assert shape_of(torch.zeros(2, 3, dtype=torch.bfloat16)) == "bfloat16 of (2, 3)"
    assert shape_of(torch.tensor(1)) == "int64 of ()"


def test_tensors_are_named_by_the_way_to_them():
    """Method: positional and named arguments, mappings and sequences in each other."""
    batch = {"ids": ONE, "more": [ONE, (ONE, {"deep": ONE})]}
    assert names(ONE, batch, labels=ONE) == [
        "argument 0",
        "argument 1.ids",
        "argument 1.more.0",
        "argument 1.more.1.0",
        "argument 1.more.1.1.deep",
        "labels",
    ]


def test_the_tensors_themselves_are_given():
    first, second = torch.ones(1), torch.zeros(1)
    given = dict(tensors_in([("x", {"a": first, "b": [second]})], ""))
    assert given["x.a"] is first and given["x.b.0"] is second


def test_what_is_no_container_and_no_tensor_is_left_out():
    assert names(3, None, "text", {1, 2}, object(), mask=None) == []


@pytest.mark.parametrize(
    ("name", "found"), [("past_key_values", False), ("cache", False), ("states", True)]
)
def test_caches_are_left_out(name, found):
    """Claim: their heads differ between ranks. Twins: a container of another name is looked into,
    and a tensor that has a cache's name is one of the inputs."""
    assert names(**{name: [ONE]}) == ([f"{name}.0"] if found else [])
    assert names(outer={name: {"k": ONE}}) == ([f"outer.{name}.k"] if found else [])
    assert names(**{name: ONE}) == [name]


def crc32c(raw: bytes) -> int:
    """By its definition: the reflected Castagnoli polynomial, bit after bit."""
    sum_ = 0xFFFFFFFF
    for byte in raw:
        sum_ ^= byte
        for _ in range(8):
            sum_ = sum_ >> 1 ^ (0x82F63B78 if sum_ & 1 else 0)
    return sum_ ^ 0xFFFFFFFF


def test_a_value_is_numbered_by_how_it_is_written():
    value = {"labels": "int64 of (2, 3)"}
    assert number_of(value) == crc32c(b"{'labels': 'int64 of (2, 3)'}")
    assert number_of({"labels": "int64 of (3, 2)"}) != number_of(value)


@pytest.mark.parametrize("empty", [{}, [], 0, ""])
def test_an_empty_value_has_the_number_zero(empty):
    assert number_of(empty) == 0
