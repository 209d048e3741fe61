"""Reaches inside torch: all that the engine uses of torch and that torch does not promise.

reach      something inside torch that the engine works without, slower or stricter, with the same
           bits. It is tried once on a tiny tensor, at its first use. One that fails is off
required   a name without a safe way. If torch has it no more, `wrap_model` raises ConfigError

``INFINITY_TORCH_PRIVATE=off`` turns all reaches off, and a list of their names turns off those.

Three kinds of names stand elsewhere. Plain attributes and modules that most libraries use are in
:data:`ATTRIBUTES` and :data:`MODULES`. A feature's own names stand in its folder: without them it
is refused, and the engine trains. The ranks' names of ``torch.distributed`` stand in `ranks/`. A
test lists these two.

[Note: why flags in the C++ object of a storage] Some code bypasses ``__torch_function__``:
``torch.func``, ``torch.tensor(p)``, DLPack, a view kept from a forward, a C++ extension. It reaches
a parameter's storage directly, and torch's kernels do not check for bytes. A StorageImpl has a flag
that makes every access to its data pointer raise RuntimeError; CUDA graphs use it. Python can set
its two neighbours but not this one. So their offsets are found first, by setting them on a storage
of our own.

[Note: why keys in the C++ object of a tensor] Constructors (``torch.tensor(p)``,
``torch.Tensor(p)``, sparse ones) and scripted functions ask no ``__torch_function__``. They end in
operations, which torch dispatches by the keys of a TensorImpl. With the key of Python it calls
``__torch_dispatch__`` of the tensor's class. torch sets that key when it makes a tensor, and a
parameter's class changes later. So the place of the keys is found in tensors of our own.

[Note: why a count in the C++ object of a node] A parameter's ``AccumulateGrad`` node does not tell
which nodes lead to it. Each holds one reference to it, and so does each saved parameter. torch
gives that count to no Python, so its place is read from the size of the Python object: an intrusive
pointer, or a shared one in torches before. A trial with a graph of our own shows whether that is
right.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import operator
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from types import FunctionType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.utils.dlpack
from torch.multiprocessing.reductions import StorageWeakRef

from .errors import ConfigError, UsageError

F = TypeVar("F", bound=FunctionType)

logger = logging.getLogger(__name__)

VARIABLE = "INFINITY_TORCH_PRIVATE"
NEWEST = "2.15"  # that all of this was tried with

# Undocumented attributes, in every torch for years, that most libraries use. Nothing replaces them.
ATTRIBUTES = frozenset(
    # of tensors and storages
    "_version _base _is_view _cdata _backward_hooks _post_accumulate_grad_hooks"
    " _make_wrapper_subclass _new_with_weak_ptr"
    # of modules
    " _parameters _buffers _modules _non_persistent_buffers_set _apply _call_impl"
    " _compiled_call_impl _forward_hooks _forward_pre_hooks _backward_pre_hooks"
    " _global_forward_hooks _global_forward_pre_hooks _load_from_state_dict"
    " _register_state_dict_hook _flat_weights _flat_weight_refs _BatchNorm _ConvNd"
    # of optimizers and schedulers
    " _optimizer_step_pre_hooks _optimizer_step_post_hooks _optimizer_state_dict_pre_hooks"
    " _optimizer_state_dict_post_hooks _optimizer_load_state_dict_pre_hooks"
    " _optimizer_load_state_dict_post_hooks _opt_called _wrapped_by_lr_sched"
    " _step_supports_amp_scaling"
    # of autograd and operators
    " _execution_engine _sequence_nr _backward_cls _schema _torchdynamo_disable"
    # operators with such a name
    " _amp_foreach_non_finite_check_and_unscale_ _foreach_zero_ _to_copy _unsafe_view".split()
)

# Private modules of which the same is true.
MODULES = frozenset(["torch.utils._pytree", "torch.utils._python_dispatch"])

_missing: list[str] = []  # required names that this torch does not have


class _Missing:
    """Stands for a required name that this torch does not have."""

    def __init__(self, path: str):
        self._path = path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise ConfigError(_without([self._path]))

    def __getattr__(self, name: str) -> Any:
        return None if name.startswith("__") else _Missing(f"{self._path}.{name}")


def _without(paths: list[str]) -> str:
    return (
        f"torch {torch.__version__} has no {', '.join(paths)}, without which Infinity cannot train."
        f" The newest torch that it was tried with is {NEWEST}: pip install 'torch<={NEWEST}.*', or"
        " a newer Infinity"
    )


def _named(path: str) -> Any:
    """Returns what ``path`` names; what raises ConfigError when it is called if it is gone."""
    module, _, name = path.rpartition(".")
    parts = [name]
    while module:
        try:
            found = importlib.import_module(module)
            return functools.reduce(getattr, parts, found)
        except ModuleNotFoundError:  # an object inside a module
            module, _, name = module.rpartition(".")
            parts.insert(0, name)
        except AttributeError:
            break
    _missing.append(path)
    return _Missing(path)


# --- required names ---

# The running backward: -1 if none, and its running node.
current_task: Callable[[], int] = _named("torch._C._current_graph_task_id")
current_node: Callable[[], Any] = _named("torch._C._current_autograd_node")
# Runs a backward, whichever function of torch a thread has called.
run_backward: Any = _named("torch.autograd.graph._engine_run_backward")
# Blocks without the class of a tensor.
DisableTorchFunction: Any = _named("torch._C.DisableTorchFunctionSubclass")
DisableTorchDispatch: Any = _named("torch._C._DisableTorchDispatch")
# Lazy negatives, as autograd saves them.
neg_view: Callable[[torch.Tensor], torch.Tensor] = _named("torch._neg_view")
# Modes, and tensors without bytes.
FakeTensor: Any = _named("torch._subclasses.fake_tensor.FakeTensor")
FakeTensorMode: Any = _named("torch._subclasses.fake_tensor.FakeTensorMode")
UnsupportedFakeTensor: Any = _named("torch._subclasses.fake_tensor.UnsupportedFakeTensorException")
NOT_FAKED = (
    UnsupportedFakeTensor,
    _named("torch._subclasses.fake_tensor.DataDependentOutputException"),
    _named("torch._subclasses.fake_tensor.DynamicOutputShapeException"),
)
disable_modes: Any = _named("torch.utils._python_dispatch._disable_current_modes")
# Takes a dispatch key into, or out of, what operations pass: where writes are counted.
exclude_key: Any = _named("torch._C._SetExcludeDispatchKeyGuard")
WRITES_KEY: Any = _named("torch._C.DispatchKey.ADInplaceOrView")
ModeKey: Any = _named("torch._C._TorchDispatchModeKey")
mode_of: Callable[[Any], Any] = _named("torch._C._get_dispatch_mode")
count_function_modes: Callable[[], int] = _named("torch._C._len_torch_function_stack")
count_dispatch_modes: Callable[[], int] = _named("torch._C._len_torch_dispatch_stack")
tracing_state: Callable[[], Any] = _named("torch._C._get_tracing_state")
OpOverload: Any = _named("torch._ops.OpOverload")
# Transforms of torch.func.
TransformType: Any = _named("torch._C._functorch.TransformType")
innermost_transform: Callable[[], Any] = _named("torch._C._functorch.peek_interpreter_stack")
transform_stack: Callable[[], Any] = _named("torch._C._functorch.get_interpreter_stack")
is_of_transform: Callable[[torch.Tensor], bool] = _named(
    "torch._C._functorch.is_functorch_wrapped_tensor"
)
without_transforms: Any = _named("torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack")
# Where torch wraps a tensor for a transform.
WRAPPING = [
    (_named("torch._functorch.vmap"), "_add_batch_dim"),
    (_named("torch._functorch.eager_transforms"), "_wrap_for_grad"),
]
for _module, _name in WRAPPING:
    _named(f"{_module.__name__}.{_name}")


# --- reaches ---


@cache
def _turned_off() -> frozenset[str]:
    """Returns the names that :data:`VARIABLE` turns off."""
    text = os.environ.get(VARIABLE) or "auto"
    return frozenset(each.strip() for each in text.split(",")) - {"auto"}


@dataclass(eq=False)
class Reach:
    """Something inside torch that the engine works without. ``cost``: how it works then. ``find``
    tries it, and returns what it needs; None if this torch differs."""

    name: str
    cost: str
    find: Callable[[], Any]

    @property
    def is_turned_off(self) -> bool:
        """Whether the environment turns it off."""
        return not _turned_off().isdisjoint(("off", self.name))

    @cached_property
    def found(self) -> Any:
        """What it needs; None if it is off."""
        if self.is_turned_off:
            return None
        try:
            return self.find()
        except Exception:  # noqa: BLE001 - whatever differs
            return None


def check() -> None:
    """Checks every reach, and warns once of those that are off although they are not turned off.
    Raises ConfigError if torch has a required name no more, UsageError for a wrong
    :data:`VARIABLE`."""
    if _missing:
        raise ConfigError(_without(_missing))
    names = [reach.name for reach in REACHES]
    if unknown := sorted(_turned_off() - {"off", *names}):
        raise UsageError(
            f"{VARIABLE}={os.environ[VARIABLE]}: {unknown[0]} is not one of auto, off,"
            f" {', '.join(names)}"
        )
    _warn()


@cache
def _warn() -> None:
    off = [each for each in REACHES if each.found is None and not each.is_turned_off]
    if off:
        logger.warning(
            "torch %s differs inside from %s, the newest that Infinity was tried with. Without %s."
            " The numbers stay the same.",
            torch.__version__,
            NEWEST,
            "; without ".join(f"{each.name}: {each.cost}" for each in off),
        )


# --- flags of storages ---

_NBYTES = 80  # prefix of a StorageImpl with the flags, in all supported torches


def set_storage_flags(storage: torch.UntypedStorage, value: int) -> None:
    """Makes every access to the bytes of ``storage`` raise RuntimeError (1), or not (0)."""
    if (flags := STORAGE_FLAGS.found) is not None:
        for flag in flags:  # the flag for writing, between them, stays as it is
            ctypes.memset(storage._cdata + flag, value, 1)


def is_flagged(storage: torch.UntypedStorage) -> bool:
    """Tells whether access to ``storage`` raises."""
    return (flags := STORAGE_FLAGS.found) is not None and bool(_image(storage)[flags[1]])


def _image(storage: torch.UntypedStorage) -> ctypes.Array:
    """Returns the first bytes of the C++ object."""
    return (ctypes.c_ubyte * _NBYTES).from_address(storage._cdata)


def _find_flags() -> tuple[int, int] | None:
    """Returns the offsets of "there is something to check" and "reading raises".

    The object has, in this order: any check, throw when writing, throw when reading, warn when
    writing.
    """
    probe = torch.empty(1, device="cpu")
    image = _image(probe.untyped_storage())
    states = [bytes(image)]
    for set_flag in (
        torch._C._set_throw_on_mutable_data_ptr,
        torch._C._set_warn_deprecated_on_mutable_data_ptr,
    ):
        set_flag(probe)
        states.append(bytes(image))
    (*throws,), (*warns,) = (
        [i for i, (before, after) in enumerate(zip(old, new)) if (before, after) == (0, 1)]
        for old, new in zip(states, states[1:])
    )
    if len(throws) != 2 or throws[1] != throws[0] + 1 or warns != [throws[1] + 2]:
        return None
    flags = throws[0], throws[1] + 1
    return flags if _works(flags) else None


def _works(flags: tuple[int, int]) -> bool:
    probe = torch.ones(1, device="cpu")
    image = _image(probe.untyped_storage())
    if any(image[flag] for flag in flags):
        return False
    for flag in flags:
        image[flag] = 1
    try:
        probe.clone()
        refused = False
    except RuntimeError:
        refused = True
    for flag in flags:
        image[flag] = 0
    return refused and probe.item() == 1


STORAGE_FLAGS = Reach(
    "storage-flags",
    "exports of a weight at rest by to_dlpack are refused, and a view kept from a forward stays"
    " readable outside of it, like a copy",
    _find_flags,
)


# --- references to storages ---


def is_kept_alive(own: Sequence[torch.Tensor]) -> bool:
    """Tells without counts whether anything but the plain tensors ``own`` refers to their storage:
    they move to a copy, and back if the storage lives on."""
    if own[0].is_inference():  # torch does not move it
        return True
    storage = own[0].untyped_storage()
    copy, alive = storage.clone(), StorageWeakRef(storage)
    del storage
    _move(own, copy)
    if alive.expired():
        return False
    _move(own, torch.UntypedStorage._new_with_weak_ptr(alive.cdata))
    return True


def _move(tensors: Sequence[torch.Tensor], storage: torch.UntypedStorage) -> None:
    for each in tensors:  # not by set_(), which counts as a write
        bare = torch.empty(0, dtype=each.dtype, device=each.device)
        each.data = bare.set_(storage, each.storage_offset(), each.size(), each.stride())


def _find_use_count() -> Callable[[int], int] | None:
    count = torch._C._storage_Use_Count
    probe = torch.empty(2, device="cpu")
    identity = probe.untyped_storage()._cdata
    before = count(identity)
    view = probe[1:]
    works = (before, count(identity)) == (before, before + 1) and before in (1, 2)
    del view
    return count if works and count(identity) == before else None


STORAGE_COUNTS = Reach(
    "storage-counts",
    "each question whether a user holds memory costs a copy of it, or a comparison",
    _find_use_count,
)


_LETTING_GO = 1000  # turns that other threads get to let go of a storage


def storage_references(tensor: torch.Tensor, own: int | None = None) -> int | None:
    """Counts the tensors, exports and storage objects of users that refer to the storage of
    ``tensor``; None if this torch does not tell.

    ``own``: the caller's references. Of more it asks again, for a moment: a transport's thread
    (gloo) lets go of what it has moved just after its wait has returned.
    """
    if STORAGE_COUNTS.found is None:
        return None
    found = _count(tensor) - _counting()
    if own is not None and found > own and dist.is_available() and dist.is_initialized():
        for _ in range(_LETTING_GO):
            os.sched_yield()
            found = _count(tensor) - _counting()
            if found <= own:
                break
    return found


def _count(tensor: torch.Tensor) -> int:
    # Python has one object for a storage, and torch counts it as long as the storage lives.
    storage = torch.Tensor.untyped_storage(tensor)
    return STORAGE_COUNTS.found(storage._cdata) + sys.getrefcount(storage)


@cache
def _counting() -> int:
    """Counts the references to a storage that exist only to count them."""
    return _count(torch.empty(1, device="cpu")) - 1


# --- keys of tensors ---

_WORDS = 40  # prefix of a TensorImpl with the keys, in all supported torches


def set_python_key(*tensors: torch.Tensor) -> None:
    """Has operations on ``tensors`` call ``__torch_dispatch__`` of their classes, until
    :func:`clear_python_key`."""
    if (place := DISPATCH_KEYS.found) is not None:
        with DisableTorchFunction():
            for tensor in tensors:
                ctypes.c_uint64.from_address(tensor._cdata + place).value |= _python()


def clear_python_key(*tensors: torch.Tensor) -> None:
    """Has operations on ``tensors`` run as on plain ones. A wrapper (a DTensor) has the key of its
    own, and keeps it: without it torch would read memory that a wrapper does not have."""
    if (place := DISPATCH_KEYS.found) is not None:
        with DisableTorchFunction():
            for tensor in tensors:
                if not hasattr(type(tensor), "__tensor_flatten__"):
                    ctypes.c_uint64.from_address(tensor._cdata + place).value &= ~_python()


def has_python_key(tensor: torch.Tensor) -> bool:
    """Returns whether operations on ``tensor`` call its class, after :func:`set_python_key`."""
    return DISPATCH_KEYS.found is not None and torch._C._dispatch_keys(tensor).has(
        torch._C.DispatchKey.Python
    )


@cache
def _python() -> int:
    keys = torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot
    first, second = (torch._C.DispatchKeySet(key).raw_repr() for key in keys)
    return first | second


def _keys(tensor: torch.Tensor, place: int) -> ctypes.c_uint64:
    with DisableTorchFunction():
        return ctypes.c_uint64.from_address(tensor._cdata + place)


class _Asked(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return NotImplemented


def _find_keys() -> int | None:
    """Returns the offset of the keys in a TensorImpl."""
    made = torch.Tensor._make_wrapper_subclass(_Asked, (1,), device="cpu")
    plain = torch.empty(1, device="cpu")
    places = [
        8 * word
        for word in range(_WORDS)
        if all(
            _keys(tensor, 8 * word).value == torch._C._dispatch_keys(tensor).raw_repr()
            for tensor in (made, plain)
        )
    ]
    if len(places) != 1:
        return None
    (place,) = places
    before = _keys(plain, place).value

    def has_key() -> bool:
        return torch._C._dispatch_keys(plain).has(torch._C.DispatchKey.Python)

    _keys(plain, place).value |= _python()
    works = has_key()
    _keys(plain, place).value = before
    return place if works and not has_key() else None


DISPATCH_KEYS = Reach(
    "dispatch-keys",
    "constructors and scripted functions refuse a weight at rest",
    _find_keys,
)


# --- nodes of the graph ---

_HEAD = object.__basicsize__
_POINTER = ctypes.sizeof(ctypes.c_void_p)
_INTRUSIVE, _SHARED = _HEAD + _POINTER, _HEAD + 2 * _POINTER  # sizes of the Python object


def node_references(node: Any) -> int | None:
    """Counts what refers to ``node``, its Python object aside."""
    size = type(node).__basicsize__
    at = id(node) + _HEAD + (_POINTER if size == _SHARED else 0)
    counter = ctypes.c_uint64.from_address(at).value + _POINTER
    return ctypes.c_uint32.from_address(counter).value - 1


def _find_nodes() -> Callable[[Any], bool] | None:
    """Returns what tells whether the running backward accumulates at a node."""
    will_execute = torch._C._will_engine_execute_node
    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.ones(1, device="cpu", requires_grad=True)
        node = torch.autograd.graph.get_gradient_edge(leaf).node
        if type(node).__basicsize__ not in (_INTRUSIVE, _SHARED):
            return None
        uses, counts = [], [node_references(node)]
        for _ in range(2):
            uses.append(leaf.neg())
            counts.append(node_references(node))
        seen: list[bool] = []
        uses[0].register_hook(lambda grad: seen.append(will_execute(node)))
        uses[0].backward()
        uses.clear()
        works = [*counts, node_references(node)] == [0, 1, 2, 0] and seen == [True]
    return will_execute if works else None


GRAPH_NODES = Reach(
    "graph-nodes",
    "an embedding's gradient is whole for each of its uses, and autograd adds them",
    _find_nodes,
)


# --- copies on write ---


def arm(tensor: torch.Tensor) -> None:
    """Marks the storage of ``tensor``: a write or an export takes the mark away."""
    if COPY_ON_WRITE.found is not None:
        torch._lazy_clone(tensor)


def is_armed(tensor: torch.Tensor) -> bool:
    """Tells whether ``tensor`` has the mark: it was not written to."""
    return COPY_ON_WRITE.found is not None and torch._C._is_cow_tensor(tensor)


def _find_armed() -> bool | None:
    written, exported = torch.ones(1, device="cpu"), torch.ones(1, device="cpu")
    for tensor in (written, exported):
        torch._lazy_clone(tensor)
        if not torch._C._is_cow_tensor(tensor):
            return None
    written.data.zero_()
    exported.data_ptr()
    return not any(map(torch._C._is_cow_tensor, (written, exported))) or None


COPY_ON_WRITE = Reach(
    "copy-on-write",
    "tensors of state dicts are compared, bit by bit, at each use of the model",
    _find_armed,
)


# --- hooks for saved tensors ---

# The pairs of hooks that a thread has pushed, each with the node of a backward that ran then.
_thread = threading.local()


def running_node() -> tuple[int, int] | None:
    """Returns what tells the running node of a backward from others: the node itself would keep its
    graph after an exception."""
    return None if (node := current_node()) is None else (current_task(), node._sequence_nr())


def _top(ignore_is_tracing: bool = True) -> tuple[Callable, Callable] | None:
    """Returns the pair of hooks that was pushed last, as torch does."""
    pushed, here = _thread.__dict__.setdefault("pushed", []), running_node()
    if here is None:  # autograd restores the hooks at the end of each node
        pushed[:] = [each for each in pushed if each[0] is None]
    return next((pair for node, pair in reversed(pushed) if node in (None, here)), None)


def _push(pack: Callable, unpack: Callable) -> None:
    context = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
    _thread.__dict__.setdefault("contexts", []).append(context)
    context.__enter__()


def _pop() -> None:
    _thread.contexts.pop().__exit__(None, None, None)


@cache
def _note_pairs() -> None:
    """Has torch's blocks of hooks note what they push."""
    block = torch.autograd.graph.saved_tensors_hooks
    enter, leave = block.__enter__, block.__exit__

    @functools.wraps(enter)
    def noted(self: Any) -> Any:
        _top()
        result = enter(self)
        _thread.pushed.append((running_node(), (self.pack_hook, self.unpack_hook)))
        return result

    @functools.wraps(leave)
    def dropped(self: Any, *error: Any) -> Any:
        _thread.pushed.pop()
        return leave(self, *error)

    block.__enter__, block.__exit__ = noted, dropped


def _find_saving_hooks() -> tuple | None:
    autograd, pair = torch._C._autograd, (lambda x: x, lambda x: x)
    top, push, pop = (
        autograd._top_saved_tensors_default_hooks,
        autograd._push_saved_tensors_default_hooks,
        autograd._pop_saved_tensors_default_hooks,
    )
    before = top(True)
    push(*pair)
    works = top(True) == pair
    pop()
    return (top, push, pop) if works and top(True) == before else None


SAVING_HOOKS = Reach(
    "saving-hooks",
    "each block of hooks for saved tensors costs a call more",
    _find_saving_hooks,
)


# --- the compiler ---


def _find_compiler() -> tuple | None:
    frames = importlib.import_module("torch._C._dynamo.eval_frame")
    skip = frames._FrameExecStrategy(*[frames._FrameAction.SKIP] * 2)
    frames.set_code_exec_strategy((lambda: None).__code__, skip)
    before = frames.get_eval_frame_callback()
    if frames.set_eval_frame(before) is not before:
        return None
    context = importlib.import_module("torch._guards").TracingContext
    return (
        lambda code: frames.set_code_exec_strategy(code, skip),
        frames.get_eval_frame_callback,
        frames.set_eval_frame,
        context.try_get,
    )


def _by_the_compiler() -> tuple:
    return None, lambda: None, lambda callback: None, lambda: torch.compiler.is_compiling() or None


COMPILER = Reach(
    "compiler",
    "torch.compile takes the model, not a loop body with its backward(), and leaves blocks that"
    " are replaced or recomputed uncompiled",
    _find_compiler,
)

REACHES = (
    STORAGE_FLAGS,
    STORAGE_COUNTS,
    DISPATCH_KEYS,
    GRAPH_NODES,
    COPY_ON_WRITE,
    SAVING_HOOKS,
    COMPILER,
)

# Chosen at import, before any block of hooks begins and any function is compiled.
if SAVING_HOOKS.found is None:
    _note_pairs()
# The thread's pair of hooks for saved tensors, or None (called with True); set one; remove it.
top_hooks, push_hooks, pop_hooks = SAVING_HOOKS.found or (_top, _push, _pop)
# Keeps the compiler from a code object (None: off). The thread's compiler; sets it, returns the one
# before. What is being traced, or None.
skip_code, compiler, set_compiler, graph_in_making = COMPILER.found or _by_the_compiler()


def uncompiled(function: F, reason: str | None = None) -> F:
    """Leaves a call of ``function``, and all that it calls, out of the graphs of torch.compile.
    ``reason``: what torch says where a graph may not break.

    torch.compiler.disable costs two frames at each call; the reach costs none.
    """
    if skip_code is None:
        return torch.compiler.disable(function, reason=reason)
    function._torchdynamo_disable, function._torchdynamo_disable_msg = True, reason
    skip_code(function.__code__)
    return function


# --- doors ---

# What reads a tensor's memory without asking its class.
DOORS: list[tuple[Any, str]] = [
    (torch, "tensor"),
    (torch, "as_tensor"),
    (torch, "asarray"),
    (torch, "sparse_coo_tensor"),
    (torch, "_to_functional_tensor"),
    (torch.nested, "nested_tensor"),
    (torch.nested, "as_nested_tensor"),
    (torch.autograd.Variable, "__new__"),
    (torch.Tensor, "__new__"),
    (torch.Tensor, "new"),
    (torch.Tensor, "new_tensor"),
    (torch.Tensor, "set_"),
    (torch.Tensor, "as_subclass"),
    (torch.Tensor, "_make_subclass"),
    (torch.jit.ScriptFunction, "__call__"),
]
EXPORTS: list[tuple[Any, str]] = [
    (torch.utils.dlpack, "to_dlpack"),
    (torch, "to_dlpack"),
    (torch._C, "_to_dlpack"),
    (torch._C, "_to_dlpack_versioned"),
]

# What may not be read past its class, whether its operations ask that, and what makes the error.
_closed: list[tuple[type, bool, Callable[[Any, str], Exception]]] = []


def close_doors(
    kind: type, refusal: Callable[[Any, str], Exception], *, is_asked: bool = False
) -> None:
    """Has the functions that would read a tensor of ``kind`` past its class raise ``refusal(tensor,
    name)``, if this torch has no other guard against them. ``is_asked``: operations ask its class
    in every torch, so that only an export would read it."""
    _closed.append((kind, is_asked, refusal))


def _check(name: str, given: Sequence[Any], *, exports: bool = False) -> None:
    for kind, is_asked, refusal in _closed:
        for each in given if exports or not is_asked else ():
            for one in each if isinstance(each, (list, tuple)) else (each,):
                # One of a list of numbers is asked for its number.
                if isinstance(one, kind) and (one is each or one.dim()):
                    raise refusal(one, name)


def _door(func: Callable, name: str, *, exports: bool) -> Callable:
    @functools.wraps(func)
    def door(*args: Any, **kwargs: Any) -> Any:
        _check(name, (*args, *kwargs.values()), exports=exports)
        return func(*args, **kwargs)

    return door


class _Legacy(type):
    """The class of what stands for ``torch.FloatTensor`` and its like, which are immutable."""

    legacy: Any
    __name__ = property(lambda cls: cls.legacy.__name__)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        _check(cls.__name__, (*args, *kwargs.values()))
        return cls.legacy(*args, **kwargs)

    def __instancecheck__(cls, given: Any) -> bool:
        return isinstance(given, cls.legacy)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.legacy, name)


def _close_constructors() -> None:
    kind = type(torch.FloatTensor)
    for module in (torch, torch.sparse, torch.cuda, torch.cuda.sparse):
        where = module.__name__
        for name, legacy in list(vars(module).items()):
            if isinstance(legacy, kind):
                members = {"legacy": legacy, "__module__": where}
                # torch reads the dtype from that name.
                setattr(module, name, _Legacy(f"{where}.{name}", (), members))


def _close_data() -> None:
    """Closes ``tensor.data = weight``, which gives the weight's memory to a tensor of no class."""
    data = torch._C.TensorBase.data

    def put(tensor: torch.Tensor, value: torch.Tensor) -> None:
        if not isinstance(tensor, tuple(kind for kind, _, _ in _closed)):  # which are asked
            _check("data", [value], exports=True)
        data.__set__(tensor, value)

    torch.Tensor.data = property(data.__get__, put, data.__delete__)


def _close(doors: Sequence[tuple[Any, str]], *, exports: bool) -> None:
    for owner, name in doors:
        if hasattr(owner, name):
            setattr(owner, name, _door(getattr(owner, name), name, exports=exports))


# Before anything that is closed is taken from torch.
if STORAGE_FLAGS.found is None:
    _close(EXPORTS, exports=True)
    _close_data()
if DISPATCH_KEYS.found is None:
    _close(DOORS, exports=False)
    _close_constructors()


def keeps_next_functions(kind: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """Has the nodes of ``kind`` keep what lies behind them in the graph. ``view.grad_fn.
    next_functions`` lets the view go first: torch 2.10 then has it no more of a node of Python."""
    theirs, forward = torch._C._FunctionBase.next_functions, kind.forward

    def keep(ctx: Any, *args: Any) -> Any:
        ctx.behind = theirs.__get__(ctx)
        return forward(ctx, *args)

    kind.forward = staticmethod(keep)
    kind._backward_cls.next_functions = property(operator.attrgetter("behind"))
    return kind
