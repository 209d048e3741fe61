"""Names of torch that are not public, and that the engine uses for want of others: a release that
takes one away fails here, by its name.

Each stands beside the file that uses it. What a name is used for is said there.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import infinity

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
    ("torch", "_C._storage_Use_Count", "core/machine/storage_guard.py"),
    ("torch", "_C._current_graph_task_id", "core/run/passes.py"),
    ("torch", "_C._current_graph_task_id", "core/run/tasks.py"),
    ("torch", "_C._autograd._top_saved_tensors_default_hooks", "core/run/passes.py"),
    ("torch", "_C._will_engine_execute_node", "core/grads/tables.py"),
    ("torch", "_C.DisableTorchFunctionSubclass", "core/units/handle.py"),
    ("torch", "Tensor._make_wrapper_subclass", "core/grads/at_home.py"),
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
