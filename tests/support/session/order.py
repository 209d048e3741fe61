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
    "ranks/test_ranks.py",
    "ext/checkpoint/test_rank_checkpoints.py",
    "ranks/test_collective_trace.py",
    "ext/shared_homes/test_shared_homes.py",
    "ranks/test_state_dict_writes.py",
    "ext/experts_parallel/test_divided_experts.py",
    "ext/rows/test_experts_apart_over_ranks.py",
    "ext/dtensor/test_families.py",
    "ext/pipeline/test_made_pipelines.py",
    "tools/plan/test_megatron_numbers.py",
    "ext/pipeline/test_pipeline.py",
    "ext/sequence/test_sequence_parts.py",
    "ext/dtensor/test_tensor_parallel.py",
    "ext/versions_2bw/test_many_versions.py",
    "ext/versions_2bw/test_weight_versions.py",
    "ext/versions_2bw/test_without_flush.py",
    "ext/dtensor/test_agreement.py",
    "ranks/test_assigned_over_ranks.py",
    "ranks/test_several_over_ranks.py",
    "ext/shares/test_shares_over_ranks.py",
    "ext/local_steps/test_slow_axis.py",
    "ext/dtensor/test_user_edits.py",
    "core/run/test_containers.py",
    "core/wrap/test_module_settings.py",
)

# Then what takes longest, as it was measured; a file that is not here comes by its number of tests.
LONGEST = (
    "ext/speculation/test_speculation.py",
    "core/homes/test_failures.py",
    "ext/checkpoint/test_pretrained.py",
    "tools/train/test_cli_train.py",
    "ext/checkpoint/test_resume.py",
    "tools/plan/test_cli_plan.py",
    "tools/plan/test_cli_mesh.py",
    "tools/plan/test_mesh_plans.py",
    "core/homes/test_write_behind.py",
    "core/training/test_steps_and_gradients.py",
    "core/machine/test_device.py",
    "late/test_late_device.py",
    "late/test_late_ranks.py",
    "late/test_overlap.py",
    "late/test_gpu_tests.py",
    "late/test_late_campaign.py",
    "core/run/test_recovery.py",
    "tools/bench/test_bench.py",
    "core/training/test_architectures.py",
    "core/wrap/test_left_behind.py",
    "core/run/test_activations.py",
    "ext/blocks/test_recompute.py",
    "core/grads/test_grad_stand_ins.py",
    "core/run/test_activation_budgets.py",
    "core/machine/test_limits.py",
    "core/training/test_ordinary_loops.py",
    "ext/blocks/test_micro_batch.py",
    "ext/blocks/test_micro_batch_limits.py",
    "core/plan/test_placement.py",
    "ext/checkpoint/test_meta_init.py",
    "core/training/test_homes_change_no_bit.py",
    "core/training/test_soak.py",
    "core/run/test_lookahead.py",
    "native/test_io_files.py",
    "core/wrap/test_round_trips.py",
    "core/run/test_compile.py",
    "tools/cli/test_untrusted.py",
    "tools/watch/test_trace.py",
    "core/training/test_unusual_models.py",
    "tools/train/test_chaos.py",
    "ext/checkpoint/test_checkpoint_folder.py",
    "ranks/test_rank_failures.py",
    "ranks/test_rank_campaign.py",
    "ranks/test_two_hosts.py",
    "core/machine/test_driver.py",
    "repository/test_gpu_tool.py",
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
