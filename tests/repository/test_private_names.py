"""Names of torch that are not public, and that the engine uses for want of others: a release that
takes one away fails here, by its name.

Each stands beside the file that uses it. What a name is used for is said there.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import infinity
from infinity import torch_private

PACKAGE = Path(infinity.__file__).parent

NAMES = [
    ("torch.distributed.tensor._dtensor_spec", "DTensorSpec", "ext/dtensor/dtensors.py"),
    ("torch.distributed.tensor._dtensor_spec", "TensorMeta", "ext/dtensor/dtensors.py"),
    (
        "torch.distributed.tensor._utils",
        "compute_local_shape_and_global_offset",
        "ext/dtensor/dtensors.py",
    ),
    ("torch.distributed.tensor", "DTensor._local_tensor", "ext/dtensor/dtensors.py"),
    ("torch.distributed.tensor", "DTensor._spec", "ext/dtensor/dtensors.py"),
    (
        "torch.distributed.tensor",
        "DTensor._op_dispatcher._custom_op_handlers",
        "ext/dtensor/dtensors.py",
    ),
    (
        "torch.distributed.tensor.parallel",
        "ColwiseParallel._prepare_input_fn",
        "ext/dtensor/tensors.py",
    ),
    (
        "torch.distributed.tensor.parallel",
        "ColwiseParallel._prepare_output_fn",
        "ext/dtensor/tensors.py",
    ),
    (
        "torch.distributed.tensor.parallel",
        "RowwiseParallel._prepare_input_fn",
        "ext/dtensor/tensors.py",
    ),
    ("torch.distributed.device_mesh", "DeviceMesh._get_root_mesh", "ranks/axes.py"),
    ("torch.distributed.distributed_c10d", "_process_group_name", "ranks/mesh.py"),
    ("torch.distributed.distributed_c10d", "_get_default_store", "ranks/mesh.py"),
    ("torch.distributed.distributed_c10d", "_get_default_group", "ranks/mesh.py"),
    ("torch.distributed.pipelining.schedules", "_batch_p2p", "ext/versions_2bw/continuous.py"),
    ("torch.distributed.pipelining.schedules", "_wait_batch_p2p", "ext/versions_2bw/continuous.py"),
    (
        "torch.distributed.pipelining.schedules",
        "Schedule1F1B._initialize_stage",
        "ext/versions_2bw/continuous.py",
    ),
    (
        "torch.distributed.pipelining.schedules",
        "Schedule1F1B._split_inputs",
        "ext/versions_2bw/continuous.py",
    ),
    (
        "torch.distributed.pipelining.schedules",
        "Schedule1F1B._compute_loss",
        "ext/versions_2bw/continuous.py",
    ),
    (
        "torch.distributed.pipelining.schedules",
        "ScheduleInterleaved1F1B._prepare_schedule_with_comms",
        "tools/plan/orders.py",
    ),
    ("torch.distributed.distributed_c10d", "_World", "tools/plan/on_paper.py"),
    ("torch.testing._internal.distributed.fake_pg", "FakeStore", "tools/plan/on_paper.py"),
    ("torch.distributed.distributed_c10d", "_world.pg_map", "ext/blocks/unaided.py"),
    ("torch", "Tensor._make_wrapper_subclass", "core/grads/at_home.py"),
    ("torch", "_foreach_copy_", "ext/aside/aside.py"),
    ("torch", "UntypedStorage._new_with_weak_ptr", "core/run/saved_tensor.py"),
    ("torch._subclasses.fake_tensor", "FakeTensorMode", "tools/train/classes.py"),
    ("torch.multiprocessing.reductions", "StorageWeakRef", "core/run/saved_tensor.py"),
]


def is_there(module: str, name: str) -> bool:
    found = importlib.import_module(module)
    for part in name.split("."):
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


@pytest.mark.parametrize(("module", "name", "file"), NAMES, ids=lambda value: value.split("/")[-1])
def test_torch_has_the_name_and_the_file_uses_it(module, name, file):
    assert is_there(module, name), f"{module}.{name} is gone from torch: {file} needs another way"
    assert name.split(".")[-1] in (PACKAGE / file).read_text(), (
        f"{file} does not use {name} any more"
    )


def test_the_scalers_operation_has_a_handler_to_stand_before():
    import torch
    from torch.distributed.tensor import DTensor

    assert (
        torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
        in DTensor._op_dispatcher._custom_op_handlers
    )


def test_a_name_that_is_gone_is_told():
    """The twin."""
    assert not is_there("torch.distributed.tensor", "DTensor._local_tensors")


# --- no name of torch stands elsewhere ---

# Other names of the ranks, without which they cannot meet, and of features, which are refused.
ELSEWHERE = {
    "ext/dtensor/tensors.py": {"_device_mesh"},
    "ext/local_steps/slow_axis.py": {"_get_default_store"},
    "ext/pipeline/schedules.py": {
        "_post_metadata_inference_cleanup",
        "_stage_backward_input",
        "_stage_backward_weight",
    },
    "ext/versions_2bw/batch_shapes.py": {"_n_microbatches"},
    "ext/versions_2bw/continuous.py": {
        "_has_backward",
        "_n_microbatches",
        "_stage_backward_initialized",
        "_stage_forward_initialized",
    },
    "ranks/attempt.py": {"_get_default_store"},
    "ext/blocks/unaided.py": {
        "_device_types",
        "_get_backend",
        "_get_sequence_number_for_group",
        "_world",
    },
    "ranks/kinds.py": {"_get_backend", "_get_sequence_number_for_group"},
    "ranks/transfer.py": {
        "_allgather_base",
        "_device_types",
        "_get_backend",
        "_get_default_group",
        "_timeout",
    },
    "tools/plan/on_paper.py": {"_world"},
}
# Of Python and of libraries other than torch.
OF_OTHERS = {
    "_DummyThread",
    "_actions",
    "_attn_implementation",
    "_current_frames",
    "_exit",
    "_forward_redirection",
    "_get_default_process_group_backend_for_device",
    "_get_positional_actions",
    "_getframe",
    "_hf_device_mesh",
    "_hf_tp_plan",
    "_init_dist_connection",
    "_init_weights",
    "_mmap",
    "_n_gpu",
    "_quantize",
    "_sync_ddp_if_available",
    "_weight_conversions",
}


# What the files call an object of torch on which they set a private attribute of it.
OF_TORCH = {"schedule", "stage", "model", "distributed_c10d"}


def is_private(name: str) -> bool:
    return name[:1] == "_" and name != "_" and not name.startswith("__")


def names_in(text: str) -> tuple[set[str], set[str]]:
    """Returns the private names that a file imports from torch, with the private attributes that it
    reads; and the names that it gives to functions, classes, variables and attributes."""
    found, given = set(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            given.add(node.name)
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                given.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
            if isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
                if node.value.id not in OF_TORCH:
                    given.add(node.attr)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None)
            for each in node.names:
                parts = [*(module or "").split("."), *each.name.split(".")]
                of_torch = "torch" in parts[:2] and module not in torch_private.MODULES
                if of_torch and any(map(is_private, parts)):
                    found.add("_" + parts[-1].lstrip("_"))
    return set(filter(is_private, found)), given


def not_listed(names: dict[str, tuple[set[str], set[str]]]) -> dict[str, set[str]]:
    """Finds the private names of files, as of :func:`names_in`, that stand in no list."""
    own = set().union(*(given for _, given in names.values()))
    known = torch_private.ATTRIBUTES | OF_OTHERS | own
    left = {}
    for file, (found, _) in names.items():
        listed = set(ELSEWHERE.get(file, ()))
        for _, name, other in NAMES:
            if other == file:
                listed |= {*name.split("."), "_" + name.split(".")[-1].lstrip("_")}
        if found - known - listed:
            left[file] = found - known - listed
    return left


def test_what_the_engine_reaches_inside_torch_stands_in_one_module():
    """Reads every file but that one. Twin: the next test."""
    names = {
        str(path.relative_to(PACKAGE)): names_in(path.read_text())
        for path in PACKAGE.rglob("*.py")
        if path.name != "torch_private.py"
    }
    assert not_listed(names) == {}
    assert [file for file in ELSEWHERE if not ELSEWHERE[file] <= names[file][0]] == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import torch\ntorch._C._no_grad()", "_no_grad"),
        ("from torch._C._functorch import TransformType", "_TransformType"),
        ("import torch.distributed as dist\ndist.distributed_c10d._get_default_store()", None),
        ("def f(tensor):\n    return tensor._grad_fn", "_grad_fn"),
        ("from torch.utils._pytree import tree_map\nprint(x._version)", ""),
    ],
)
def test_a_name_of_torch_elsewhere_is_found(text, name):
    """Reads a made file of the engine. Twin: the last one has only names that are listed."""
    found = not_listed({"core/run/made.py": names_in(text)}).get("core/run/made.py", set())
    assert found == set() if name == "" else (name or "_get_default_store") in found
