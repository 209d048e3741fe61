"""Functions of torch: those that need no bytes of a tensor, or may not; what others write to."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten


def _metadata_functions() -> set:
    """Returns functions that read or write a tensor's metadata, never its bytes."""
    attributes = (
        "shape dtype device requires_grad grad_fn is_leaf layout ndim names is_cuda is_cpu is_meta"
        " is_sparse is_sparse_csr is_quantized is_mkldnn is_nested is_mps is_xpu is_mtia is_vulkan"
        " is_ipu is_maia _version output_nr _backward_hooks _post_accumulate_grad_hooks"
        " retains_grad itemsize nbytes _base volatile"
    ).split()
    methods = (
        "size dim numel nelement stride storage_offset element_size is_contiguous is_floating_point"
        " is_complex is_signed requires_grad_ register_hook register_post_accumulate_grad_hook"
        " retain_grad __hash__ __len__ untyped_storage is_shared get_device ndimension is_same_size"
        " is_inference is_conj is_neg has_names dim_order is_set_to"
    ).split()
    functions = set()
    for name in attributes:
        if (attribute := getattr(torch.Tensor, name, None)) is not None:
            functions |= {
                getattr(attribute, accessor, None)
                for accessor in ("__get__", "__set__", "__delete__")
            }
    functions |= {getattr(torch.Tensor, name, None) for name in methods}
    functions |= {
        getattr(torch, name, None)
        for name in (
            "is_floating_point",
            "is_complex",
            "numel",
            "is_signed",
            "_has_compatible_shallow_copy_type",
            "is_same_size",
            "result_type",
            "is_inference",
        )
    }
    return functions - {None}


METADATA = _metadata_functions()
# Their results have the shape, dtype and device of a tensor, and none of its bytes.
LIKE = {
    getattr(torch, f"{kind}_like")
    for kind in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
} | {
    getattr(torch.Tensor, f"new_{kind}")
    for kind in ("empty", "empty_strided", "zeros", "ones", "full", "tensor")
}
DETACH = {torch.Tensor.detach, torch.detach, torch.Tensor.data.__get__}
TO = {
    torch.Tensor.to,
    torch.Tensor.contiguous,
    torch.Tensor.cpu,
    torch.Tensor.cuda,
    torch.Tensor.float,
    torch.Tensor.bfloat16,
    torch.Tensor.half,
    torch.Tensor.type,
}
EQUAL = {torch.equal, torch.Tensor.equal}
AS_ITSELF = {torch.Tensor.view_as, torch.Tensor.expand_as}

_TYPE_NAMES = {
    dtype: torch.empty(0, dtype=dtype).type().removeprefix("torch.")
    for dtype in (
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bool,
        torch.complex64,
        torch.complex128,
    )
}


def type_name(tensor: torch.Tensor) -> str:
    """Returns what ``tensor.type()`` does."""
    module = "" if tensor.device.type == "cpu" else f"{tensor.device.type}."
    return f"torch.{module}{_TYPE_NAMES[tensor.dtype]}"


def converts_to_itself(func, subject: torch.Tensor, args: tuple, kwargs: dict) -> bool:
    """Returns whether a conversion would return the tensor unchanged."""
    wanted = args[1] if len(args) > 1 else kwargs.get("dtype")
    if func is torch.Tensor.type and isinstance(wanted, (str, type)):
        name = wanted if isinstance(wanted, str) else f"{wanted.__module__}.{wanted.__name__}"
        name = torch.empty(0).type() if name == "torch.Tensor" else name  # torch's alias
        return name == type_name(subject)
    with torch.device("meta"):
        probe = torch.empty_strided(
            tuple(subject.shape), subject.stride(), dtype=subject.dtype, device="meta"
        )
    if kwargs.get("copy"):
        return False
    tail = [_META if _is_own_device(value, subject) else value for value in args[1:]]
    named = {k: _META if _is_own_device(v, subject) else v for k, v in kwargs.items()}
    if func is torch.Tensor.cpu:
        return subject.device.type == "cpu"
    if func is torch.Tensor.cuda:
        wanted = args[1] if len(args) > 1 else kwargs.get("device")
        wanted = torch.device("cuda", wanted) if isinstance(wanted, int) else wanted
        return subject.device.type == "cuda" and (wanted is None or _is_own_device(wanted, subject))
    if any(isinstance(value, torch.Tensor) for value in (*tail, *named.values())):
        return False
    if any(value is not _META and _device(value) is not None for value in (*tail, *named.values())):
        return False  # another device, or meta itself
    return func(probe, *tail, **named) is probe


_META = torch.device("meta")  # stands for the tensor's own device in the probe of a conversion


def _device(value: Any) -> torch.device | None:
    """Returns the device that an argument names, or None."""
    if isinstance(value, (str, int)) and not isinstance(value, bool):
        try:
            return torch.device(value)
        except RuntimeError:
            return None
    return value if isinstance(value, torch.device) else None


def _is_own_device(value: Any, subject: torch.Tensor) -> bool:
    value = _device(value)
    if value is None or value.type != subject.device.type:
        return False
    # "cpu:0" is the processor, too, though torch would copy: model.to("cpu:0") must not be refused.
    return (
        value.index is None or subject.device.index is None or value.index == subject.device.index
    )


def mutated_arguments(func, args: tuple, kwargs: dict) -> list:
    """Returns the tensors among the arguments that ``func`` writes to, by its schema."""
    mutated: list = []
    # Whose schemas do not tell
    if func.namespace == "c10d" and func is not torch.ops.c10d.send.default and args:
        return tree_flatten(args[0])[0]
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            mutated += list(value) if isinstance(value, (list, tuple)) else [value]
    return mutated
