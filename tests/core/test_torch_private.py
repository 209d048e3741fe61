"""Reaches inside torch: each is tried, each can be off, and no bit changes."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import private_jobs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import infinity
from infinity import ConfigError, UsageError, torch_private
from infinity.core.machine import storage_guard
from infinity.torch_private import (
    DISPATCH_KEYS,
    GRAPH_NODES,
    REACHES,
    STORAGE_COUNTS,
    STORAGE_FLAGS,
    clear_python_key,
    has_python_key,
    is_kept_alive,
    node_references,
    set_python_key,
    storage_references,
)

IN_PROCESS = [each for each in REACHES if each.name not in ("saving-hooks", "compiler")]


@pytest.fixture
def told(caplog) -> Iterator[pytest.LogCaptureFixture]:
    """The warnings of a check, which is made anew."""
    torch_private._warn.cache_clear()
    with caplog.at_level(logging.WARNING, "infinity"):
        yield caplog
    torch_private._warn.cache_clear()


# --- the check ---


def test_all_that_is_reached_works_in_this_torch(told):
    """Tries everything. Twins: the next two tests."""
    torch_private.check()
    assert [each.name for each in REACHES if each.found is None] == [] and not told.messages


BROKEN = {
    "storage-flags": ("_works", lambda flags: False),
    "dispatch-keys": ("_WORDS", 4),
    "graph-nodes": ("node_references", lambda node: 1),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_differs_is_off_and_told_once(name, told, monkeypatch):
    """Changes the layout that a check finds, and an exception in one. Twin: what is found before
    stays."""
    reach = next(each for each in REACHES if each.name == name)
    assert reach.found is not None
    monkeypatch.setattr(torch_private, *BROKEN[name])
    broken = torch_private.Reach(reach.name, reach.cost, reach.find)
    raising = torch_private.Reach("raising", "it is slow", lambda: 1 // 0)
    monkeypatch.setattr(torch_private, "REACHES", (broken, raising))
    assert broken.found is None and raising.found is None
    for _ in range(2):
        torch_private.check()
    (said,) = told.messages
    assert torch.__version__ in said and reach.cost in said and "it is slow" in said


def test_a_required_name_that_is_gone_is_refused_with_the_versions(monkeypatch):
    """Takes three kinds of names away. Twin: the names that are there are the objects."""
    monkeypatch.setattr(torch_private, "_missing", [])
    gone = ["torch._C._no_such_function", "torch._no_such_module.name", "torch.utils._pytree.Gone"]
    for path in gone:
        found = torch_private._named(path)
        with pytest.raises(ConfigError, match=path):
            found.attribute()
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=torch_private.NEWEST) as refused:
        infinity.wrap_model(model)
    assert torch.__version__ in str(refused.value) and all(
        path in str(refused.value) for path in gone
    )
    assert type(model.weight) is nn.Parameter
    assert torch_private._named("torch._C._current_graph_task_id") is torch_private.current_task


@pytest.mark.parametrize(
    ("text", "off"),
    [
        ("auto", set()),
        ("", set()),
        ("copy-on-write", {"copy-on-write"}),
        ("storage-counts, graph-nodes", {"storage-counts", "graph-nodes"}),
        ("off", {each.name for each in REACHES}),
    ],
)
def test_the_environment_turns_off_what_it_names(text, off, told, monkeypatch):
    """Twin: another name is refused with those that there are."""
    monkeypatch.setenv(torch_private.VARIABLE, text)
    torch_private._turned_off.cache_clear()
    try:
        assert {each.name for each in REACHES if each.is_turned_off} == off
        torch_private.check()
        assert not told.messages
        monkeypatch.setenv(torch_private.VARIABLE, "storage")
        torch_private._turned_off.cache_clear()
        with pytest.raises(UsageError, match="storage is not one of auto, off, storage-flags"):
            infinity.wrap_model(nn.Linear(2, 2))
    finally:
        torch_private._turned_off.cache_clear()


# --- the same bits without ---


@pytest.fixture(scope="module")
def plain() -> list[torch.Tensor]:
    return private_jobs.trained(None)


@pytest.mark.parametrize("reach", IN_PROCESS, ids=lambda reach: reach.name)
def test_no_bit_changes_without_one_of_them(reach, plain, monkeypatch):
    """Trains with each turned off alone. Twin: plain torch."""
    monkeypatch.setitem(reach.__dict__, "found", None)
    assert all(map(torch.equal, private_jobs.trained(private_jobs.HOMES["host"]), plain))


ASKED = {"clone", "rows", "numbers", "vmap"}  # which ask the class of a weight
REFUSED = {  # in every torch
    *("numpy", "set_", "data", "nested", "to_dlpack", "_to_dlpack", "a gradient")
}


def test_no_bit_changes_without_all_of_them(tmp_path):
    """A process without any trains at each home, on two ranks, compiled, and over a checkpoint.
    What would read memory past a weight's class is refused, before it does. Twin: here most of it
    is right."""
    ran = subprocess.run(
        [sys.executable, private_jobs.__file__, str(tmp_path)],
        env=os.environ | {torch_private.VARIABLE: "off"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    reads = told.pop("reads")
    assert told.pop("on") == [] and all(told.values()), told
    assert {name for name, end in reads.items() if end == "right"} == ASKED
    assert {end for name, end in reads.items() if name not in ASKED} == {"UsageError"}
    here = private_jobs.reads()
    assert {name for name, end in here.items() if end != "right"} == REFUSED
    assert "wrong" not in here.values()


def test_what_stands_for_a_legacy_constructor_does_as_it(monkeypatch):
    """Closes torch's constructors, and uses one in the ways that there are. Twin: with a tensor of
    the class that is at rest it is refused."""
    for module in (torch, torch.sparse, torch.cuda, torch.cuda.sparse):
        for name, value in list(vars(module).items()):
            if isinstance(value, type(torch.FloatTensor)):
                monkeypatch.setattr(module, name, value)  # restored at the end
    torch_private._close_constructors()
    closed, tensor = torch.DoubleTensor, torch.tensor([1.0, 2.0])
    assert closed([1.0]).dtype == closed.dtype == tensor.type(closed).dtype == torch.float64
    assert isinstance(closed([1.0]), closed) and not isinstance(tensor, closed)
    assert closed.__name__ == "DoubleTensor" and closed.is_sparse is False
    monkeypatch.setattr(torch_private, "_closed", [(Told, False, lambda _, name: UsageError(name))])
    with pytest.raises(UsageError, match="FloatTensor"):
        torch.FloatTensor(tensor.as_subclass(Told))
    assert torch.equal(torch.FloatTensor(tensor), tensor)


# --- each of them ---


class Told(torch.Tensor):
    """Notes the operations on it, and runs them as on a plain tensor."""

    told: list[str] = []

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.told.append(func.__name__)
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


@torch.jit.script
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


WAYS = {
    "tensor": torch.tensor,
    "Tensor": lambda x: torch.Tensor(x).clone(),
    "sparse": lambda x: torch.sparse_coo_tensor(torch.tensor([[0, 2]]), x).to_dense(),
    "scripted": doubled,
}


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("way", WAYS)
def test_what_asks_no_function_asks_the_class(way):
    """Method: a tensor whose class is changed. Twin: before it is told to, and after it is told not
    to any more, torch asks no class."""
    tensor, go = torch.tensor([1.0, 2.0]), WAYS[way]
    expected, counts = go(tensor), []
    tensor.__class__ = Told
    for change in (clear_python_key, set_python_key, clear_python_key):
        change(tensor)
        assert has_python_key(tensor) == (change is set_python_key)
        Told.told.clear()
        with torch._C.DisableTorchFunctionSubclass():
            assert torch.equal(go(tensor), expected)
        counts.append(len(Told.told))
    assert counts[0] == counts[2] == 0 < counts[1]


def test_another_data_leaves_the_keys():
    """As a parameter's memory is replaced while it is at rest. Twin: one that is not asked."""
    for asks in (True, False):
        tensor = torch.ones(2)
        tensor.__class__ = Told
        if asks:
            set_python_key(tensor)
        tensor.data = torch.zeros(2)
        assert has_python_key(tensor) == asks
        clear_python_key(tensor)


def test_in_a_torch_that_differs_nothing_is_changed(monkeypatch):
    """Sets keys and flags without a place for them. Twin: with one they are set."""
    tensor = torch.ones(2)
    for reach, is_set in (
        (DISPATCH_KEYS, has_python_key),
        (STORAGE_FLAGS, torch_private.is_flagged),
    ):
        subject = tensor if reach is DISPATCH_KEYS else tensor.untyped_storage()
        change = set_python_key if reach is DISPATCH_KEYS else storage_guard.close
        with monkeypatch.context() as without:
            without.setitem(reach.__dict__, "found", None)
            change(subject)
            assert not is_set(subject)
        assert not is_set(subject)
        change(subject)
        assert is_set(subject)
        (clear_python_key if reach is DISPATCH_KEYS else storage_guard.open)(subject)


def test_a_wrapper_keeps_its_own_key():
    """Leaves its key to a tensor of a wrapper's class, which has no memory. Twin: a plain tensor
    that had the key runs as before."""
    inner = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    clear_python_key(inner)
    assert has_python_key(inner) and inner.sum().item() == 5.0
    plain = torch.ones(2)
    set_python_key(plain)
    clear_python_key(plain)
    assert not has_python_key(plain)


USES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a sum": torch.Tensor.sum,
    "rows by their ids": lambda param: F.embedding(torch.tensor([1]), param),
    "a view": lambda param: param[1:].t(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_each_use_of_a_parameter_that_is_alive_is_counted(use):
    """Uses a parameter twice, and frees one graph. Twin: without a graph nothing is counted."""
    assert GRAPH_NODES.found is not None
    param = torch.nn.Parameter(torch.ones(3, 3))
    node = torch.autograd.graph.get_gradient_edge(param).node
    first, second = use(param), use(param)
    assert node_references(node) == 2
    del first
    assert node_references(node) == 1
    del second
    with torch.no_grad():
        use(param)
    assert node_references(node) == 0


HOLDERS: dict[str, Callable[[torch.Tensor], object]] = {
    "a view": lambda tensor: tensor[1:],
    "an array": lambda tensor: tensor.numpy(),
    "an export": lambda tensor: torch.utils.dlpack.to_dlpack(tensor.detach()),
    "the storage": lambda tensor: tensor.untyped_storage(),
}


@pytest.mark.parametrize(
    "turns, has_ranks, held", [(3, True, False), (10**9, True, True), (3, False, True)]
)
def test_a_transport_lets_go_of_what_it_has_moved(turns, has_ranks, held, monkeypatch):
    """Method: another user that lets go at the third turn that it gets. Twins: one that never does,
    and a process without ranks, which does not wait."""
    users = [torch.arange(4.0)]
    tensor, given = users[0].detach(), []

    def give_way() -> None:
        given.append(1)
        if len(given) == turns:
            users.clear()

    monkeypatch.setattr(torch_private.os, "sched_yield", give_way)
    monkeypatch.setattr(torch_private.dist, "is_initialized", lambda: has_ranks)
    assert (storage_references(tensor, 1) > 1) == held
    assert len(given) == (0 if not has_ranks else min(turns, torch_private._LETTING_GO))


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("holder", HOLDERS)
def test_memory_is_held_by_others_alone(holder, counts, monkeypatch):
    """Asks with and without counts. Twin: before and after, only our own tensors refer to it. They
    keep their values and their versions."""
    if not counts:
        monkeypatch.setitem(STORAGE_COUNTS.__dict__, "found", None)
    tensor = torch.arange(4.0)
    own = [tensor, tensor[2:].detach()]
    versions = [each._version for each in own]

    def is_held() -> bool:
        if counts:
            return storage_references(own[0]) > len(own)
        return is_kept_alive(own)

    assert storage_references(tensor) == (2 if counts else None) and not is_held()
    outside = HOLDERS[holder](own[0])
    assert is_held()
    assert torch.equal(torch.as_tensor(own[1]), torch.tensor([2.0, 3.0]))
    del outside
    assert not is_held()
    assert own[0].tolist() == [0, 1, 2, 3] and own[0].data_ptr() + 8 == own[1].data_ptr()
    assert [each._version for each in own] == versions


def test_the_hooks_on_top_are_known_without_torchs_stack(monkeypatch):
    """Nests torch's blocks, a checkpoint's and our own pushes, and compares with torch's stack at
    each depth. Twin: a pair that a node of a backward has left is not on top after it."""
    block = torch.autograd.graph.saved_tensors_hooks
    monkeypatch.setattr(block, "__enter__", block.__enter__)
    monkeypatch.setattr(block, "__exit__", block.__exit__)
    torch_private._note_pairs.__wrapped__()
    torch_private._thread.__dict__.clear()
    pairs = [(lambda x, n=n: x, lambda x, n=n: x) for n in range(4)]

    def agrees(expected: object) -> bool:
        real = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return torch_private._top(True) == real == expected

    assert agrees(None)
    with block(*pairs[0]):
        assert agrees(pairs[0])
        torch_private._push(*pairs[1])
        with block(*pairs[2]):
            assert agrees(pairs[2])
        assert agrees(pairs[1])
        torch_private._pop()
        assert agrees(pairs[0])
        leaf, seen = torch.ones(1, requires_grad=True), []

        def in_a_node(grad: torch.Tensor) -> None:
            seen.append(agrees(pairs[0]))
            torch_private._push(*pairs[3])  # autograd takes it off
            seen.append(agrees(pairs[3]))

        value = leaf * 2
        value.register_hook(in_a_node)
        value.backward()
        assert seen == [True, True] and agrees(pairs[0])
    assert agrees(None)
