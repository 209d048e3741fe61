"""Functions of torch that need no bytes: which they are, and what those answer that convert."""

from __future__ import annotations

import pytest
import torch

from infinity.core.params.torch_functions import (
    DETACH,
    EQUAL,
    LIKE,
    METADATA,
    TO,
    converts_to_itself,
    type_name,
)

T = torch.Tensor
DTYPES = "float32 float64 bfloat16 float16 int8 uint8 int16 int32 int64 bool complex64 complex128"


def without_bytes() -> torch.nn.Parameter:
    """A parameter of two rows by columns, whose storage is empty."""
    param = torch.nn.Parameter(torch.ones(3, 2).t())
    param.untyped_storage().resize_(0)
    return param


# --- which they are ---


def test_metadata_is_read_and_written_without_bytes():
    """Method: accessors and methods as __torch_function__ gets them, called on a tensor without
    bytes. Twins: functions that read elements, or set them, are not among them."""
    param = without_bytes()
    for name, answer in (
        ("shape", (2, 3)),
        ("dtype", torch.float32),
        ("requires_grad", True),
        ("is_leaf", True),
        ("ndim", 2),
        ("grad_fn", None),
        ("nbytes", 24),
        ("is_cpu", True),
        ("_base", None),
    ):
        getter = getattr(T, name).__get__
        found = getter in METADATA, getter(param)
        assert found == (True, answer)
    assert T.requires_grad.__set__ in METADATA
    for func, answer in (
        (T.size, (2, 3)),
        (T.stride, (1, 2)),
        (T.numel, 6),
        (T.__len__, 2),
        (T.is_contiguous, False),
        (T.storage_offset, 0),
        (T.element_size, 4),
        (torch.is_floating_point, True),
        (torch.numel, 6),
        (T.is_signed, True),
    ):
        found = func in METADATA, func(param)
        assert found == (True, answer)
    for func in (T.register_hook, T.requires_grad_, T.untyped_storage, T.__hash__, T.is_set_to):
        assert func in METADATA
    for func in (T.item, T.tolist, T.sum, torch.add, T.copy_, T.data_ptr, T.numpy, torch.equal):
        assert func not in METADATA
    for name in ("data", "grad", "T", "real"):
        assert getattr(T, name).__get__ not in METADATA
    assert None not in METADATA


def test_tensors_like_another_are_made_of_its_form_alone():
    """Twins: a clone has its elements, and other constructors take no tensor."""
    param, sizes = without_bytes(), ((2,),)
    for func, args in (
        (torch.empty_like, ()),
        (torch.zeros_like, ()),
        (torch.ones_like, ()),
        (torch.full_like, (3,)),
        (torch.rand_like, ()),
        (torch.randn_like, ()),
        (torch.randint_like, (5,)),
        (T.new_empty, sizes),
        (T.new_empty_strided, ((2,), (1,))),
        (T.new_zeros, sizes),
        (T.new_ones, sizes),
        (T.new_full, ((2,), 3)),
        (T.new_tensor, ([1, 2],)),
    ):
        found = func in LIKE, func(param, *args).dtype
        assert found == (True, torch.float32)
    assert len(LIKE) == 13
    assert torch.clone not in LIKE and torch.zeros not in LIKE


def test_what_detaches_compares_and_converts_is_known():
    """Twin: no function is of two kinds."""
    assert DETACH == {T.detach, torch.detach, T.data.__get__}
    assert EQUAL == {torch.equal, T.equal}
    assert TO == {T.to, T.contiguous, T.cpu, T.cuda, T.float, T.bfloat16, T.half, T.type}
    kinds = [METADATA, LIKE, DETACH, EQUAL, TO]
    assert sum(map(len, kinds)) == len(set().union(*kinds))


@pytest.mark.parametrize("name", DTYPES.split())
def test_a_type_has_torchs_own_name(name):
    tensor = torch.empty(2, dtype=getattr(torch, name))
    assert type_name(tensor) == tensor.type()


def test_a_type_names_the_device_that_is_no_processor():
    assert type_name(torch.empty(2, device="meta")) == "torch.meta.FloatTensor"


# --- conversions ---

OTHER = torch.ones(2)
CASES = [
    (T.to, ("cpu",), {}),
    (T.to, (torch.float32,), {}),
    (T.to, (torch.float64,), {}),
    (T.to, ("cpu", torch.float32), {}),
    (T.to, ("cpu", torch.float64), {}),
    (T.to, (torch.device("cpu"),), {}),
    (T.to, (), {"dtype": torch.float32}),
    (T.to, (), {"dtype": torch.bfloat16}),
    (T.to, (), {"device": "cpu", "dtype": torch.float32}),
    (T.to, (torch.float32,), {"copy": True}),
    (T.to, (torch.float32,), {"copy": False}),
    (T.to, (torch.float32, True), {}),
    (T.to, (), {"memory_format": torch.preserve_format}),
    (T.to, (), {"memory_format": torch.contiguous_format}),
    (T.contiguous, (), {}),
    (T.cpu, (), {}),
    (T.float, (), {}),
    (T.bfloat16, (), {}),
    (T.half, (), {}),
    (T.type, (torch.float32,), {}),
    (T.type, (torch.float16,), {}),
    (T.type, ("torch.FloatTensor",), {}),
    (T.type, ("torch.HalfTensor",), {}),
    (T.type, (torch.FloatTensor,), {}),
    (T.type, (torch.DoubleTensor,), {}),
    (T.type, (torch.Tensor,), {}),
    (T.type, ("torch.Tensor",), {}),
    (T.type, (), {"dtype": "torch.FloatTensor"}),
]


@pytest.mark.parametrize(
    "func, args, kwargs, is_row_major",
    [(*case, is_row_major) for case in CASES for is_row_major in (True, False)],
)
def test_a_conversion_returns_the_tensor_itself_where_torch_does(func, args, kwargs, is_row_major):
    """Method: torch's own answer for a tensor with bytes."""
    tensor = torch.ones(2, 3) if is_row_major else torch.ones(3, 2).t()
    expected = func(tensor, *args, **kwargs) is tensor
    tensor.untyped_storage().resize_(0)
    answer = converts_to_itself(func, tensor, (tensor, *args), kwargs)
    del tensor  # which a failed assertion would print
    assert answer is expected


def test_a_conversion_to_another_device_does_not_return_the_tensor():
    """Twin: one to that of another tensor is left to torch, even if it is the same."""
    tensor = torch.ones(2)
    for args in (("meta",), (torch.device("meta"),), ("cuda",), ("cuda:1",), (OTHER,)):
        assert not converts_to_itself(T.to, tensor, (tensor, *args), {})
    assert not converts_to_itself(T.to, tensor, (tensor,), {"device": "meta"})
    assert not converts_to_itself(T.to, tensor, (tensor,), {"other": OTHER})
    assert not converts_to_itself(T.cuda, tensor, (tensor,), {})
    on_meta = torch.ones(2, device="meta")
    assert converts_to_itself(T.to, on_meta, (on_meta, "meta"), {})
    assert not converts_to_itself(T.cpu, on_meta, (on_meta,), {})


class OnGpu:
    """Stands for a tensor of the second GPU: only its form is asked for."""

    shape, dtype, device = (2, 3), torch.float32, torch.device("cuda", 1)

    def stride(self) -> tuple[int, int]:
        return 3, 1


@pytest.mark.parametrize(
    "args, kwargs, itself",
    [
        ((), {}, True),
        ((1,), {}, True),
        ((0,), {}, False),
        (("cuda:1",), {}, True),
        (("cuda",), {}, True),
        (("cuda:0",), {}, False),
        ((), {"device": 1}, True),
        ((), {"device": 0}, False),
        ((torch.device("cuda", 1),), {}, True),
    ],
)
def test_a_tensor_on_a_gpu_is_there_if_no_other_gpu_is_named(args, kwargs, itself):
    """Claim: as ``cuda`` does. Twins: it is not on the processor, nor converted by it."""
    tensor = OnGpu()
    assert converts_to_itself(T.cuda, tensor, (tensor, *args), kwargs) is itself
    assert not converts_to_itself(T.cpu, tensor, (tensor,), {})
    if args and isinstance(args[0], str):
        assert converts_to_itself(T.to, tensor, (tensor, *args), kwargs) is itself
        assert not converts_to_itself(T.to, tensor, (tensor, *args, torch.float64), kwargs)
