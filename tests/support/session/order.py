"""In which order, and by which worker, `make test` runs the files of tests.

A file goes to one worker, which takes the next one when it is done: what takes long comes first, so
that no worker is left with it when the others have finished.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable

import pytest

# Files that share the standing ranks (see `ranks`): one worker has all of them, so that these ranks
# start once.
OF_STANDING_RANKS = (
    "distributed/test_ranks.py",
    "distributed/test_rank_checkpoints.py",
    "distributed/test_collective_trace.py",
    "distributed/test_shared_homes.py",
    "distributed/test_state_dict_writes.py",
    "parallel/test_divided_experts.py",
    "parallel/test_experts_apart_over_ranks.py",
    "parallel/test_families.py",
    "parallel/test_made_pipelines.py",
    "parallel/test_megatron_numbers.py",
    "parallel/test_pipeline.py",
    "parallel/test_sequence_parts.py",
    "parallel/test_tensor_parallel.py",
    "parallel/test_many_versions.py",
    "parallel/test_weight_versions.py",
    "parallel/test_without_flush.py",
    "parallel/test_agreement.py",
    "distributed/test_assigned_over_ranks.py",
    "distributed/test_several_over_ranks.py",
    "distributed/test_shares_over_ranks.py",
    "distributed/test_slow_axis.py",
    "parallel/test_user_edits.py",
    "runtime/test_containers.py",
    "state/test_module_settings.py",
)

# Then what takes longest, as it was measured; a file that is not here comes by its number of tests.
LONGEST = (
    "planning/test_speculation.py",
    "storage/test_failures.py",
    "checkpoint/test_pretrained.py",
    "cli/test_cli_train.py",
    "checkpoint/test_resume.py",
    "cli/test_cli_plan.py",
    "cli/test_cli_mesh.py",
    "parallel/test_mesh_plans.py",
    "storage/test_write_behind.py",
    "training/test_steps_and_gradients.py",
    "machine/test_device.py",
    "late/test_late_device.py",
    "late/test_late_ranks.py",
    "late/test_overlap.py",
    "late/test_gpu_tests.py",
    "late/test_late_campaign.py",
    "runtime/test_recovery.py",
    "bench/test_bench.py",
    "training/test_architectures.py",
    "api/test_left_behind.py",
    "runtime/test_activations.py",
    "forwards/test_recompute.py",
    "api/test_grad_stand_ins.py",
    "runtime/test_activation_budgets.py",
    "machine/test_limits.py",
    "training/test_ordinary_loops.py",
    "forwards/test_micro_batch.py",
    "forwards/test_micro_batch_limits.py",
    "planning/test_placement.py",
    "api/test_meta_init.py",
    "training/test_homes_change_no_bit.py",
    "training/test_soak.py",
    "planning/test_lookahead.py",
    "native/test_io_files.py",
    "api/test_round_trips.py",
    "runtime/test_compile.py",
    "cli/test_untrusted.py",
    "runtime/test_trace.py",
    "training/test_unusual_models.py",
    "cli/test_chaos.py",
    "checkpoint/test_checkpoint_folder.py",
    "distributed/test_rank_failures.py",
    "distributed/test_rank_campaign.py",
    "distributed/test_two_hosts.py",
    "machine/test_driver.py",
    "bench/test_gpu_tool.py",
)

PLACE = {name: number for number, name in enumerate((*OF_STANDING_RANKS, *LONGEST))}


def name_of(nodeid: str) -> str:
    """The file of a test, below the folder of all tests."""
    return nodeid.partition("::")[0].removeprefix("tests/")


def longest_first(items: list[pytest.Item]) -> None:
    """Sorts files, and leaves each one's tests as they are."""
    counts = collections.Counter(name_of(item.nodeid) for item in items)
    items.sort(
        key=lambda item: (PLACE.get(name := name_of(item.nodeid), len(PLACE)), -counts[name], name)
    )


def unknown(names: Iterable[str]) -> set[str]:
    """What the order names and is not among ``names``."""
    return set(PLACE) - set(names)
