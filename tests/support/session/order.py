"""In which order, and by which worker, `make test` runs the files of tests.

A file goes to one worker, which takes the next one when it is done: what takes long comes first, so
that no worker is left with it when the others have finished.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Iterable
from pathlib import Path

import pytest

# Files that share the standing ranks (see `ranks`): one worker has all of them, so that these ranks
# start once.
OF_STANDING_RANKS = (
    "ranks/test_ranks.py",
    "ext/checkpoint/test_rank_checkpoints.py",
    "ext/checkpoint/test_written_before.py",
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

# Then the others by the seconds that they took (see tools/durations.py); a file that is not there
# comes last, by its number of tests.
SECONDS: dict[str, int] = json.loads(Path(__file__).with_name("seconds.json").read_text())
LONG = 15  # seconds from which a file is long


def name_of(nodeid: str) -> str:
    """The file of a test, below the folder of all tests."""
    return nodeid.partition("::")[0].removeprefix("tests/")


def is_long(name: str) -> bool:
    return name in OF_STANDING_RANKS or SECONDS.get(name, 0) >= LONG


def longest_first(items: list[pytest.Item]) -> None:
    """Sorts files, and leaves each one's tests as they are."""
    counts = collections.Counter(name_of(item.nodeid) for item in items)
    first = {name: place for place, name in enumerate(OF_STANDING_RANKS)}

    def place(item: pytest.Item) -> tuple[int, int, int, str]:
        name = name_of(item.nodeid)
        return first.get(name, len(first)), -SECONDS.get(name, 0), -counts[name], name

    items.sort(key=place)


def unknown(names: Iterable[str]) -> set[str]:
    """What the order names and is not among ``names``."""
    return {*OF_STANDING_RANKS, *SECONDS} - set(names)
