"""What users do beside a training loop, on a device that is late: the bits of a device that is
punctual. One process runs all programs that are asked for."""

from __future__ import annotations

import json
from pathlib import Path

import prepared
import pytest
from marks import few

JOBS = Path(__file__).parents[1] / "support" / "jobs" / "late_programs.py"
PROGRAMS = [
    "branches_by_values",
    "own_double_buffers",
    "exceptions",
    "generation_between_steps",
    "two_models",
    "teacher_on_another_device",
    "two_forwards_one_backward",
    "a_busy_thread",
    "a_sort_on_the_processor",
    "frozen_and_thawed",
    "hooks_everywhere",
    "compiled_blocks",
]
HOMES = ["host", "activations", "kernels"]
# Each program at one home, the homes in turn; then every other pair
TURNS = [f"{name}:{HOMES[place % len(HOMES)]}" for place, name in enumerate(PROGRAMS)]
REST = [job for home in HOMES for name in PROGRAMS if (job := f"{name}:{home}") not in TURNS]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def answers(request, tmp_path_factory) -> dict[str, object]:
    """What each job of this run answered. One that is missing ended the process."""
    items = [item for item in request.session.items if item.module is request.module]
    folder, names = tmp_path_factory.mktemp("programs"), [i.callspec.params["job"] for i in items]
    ended = prepared.run(JOBS, folder / "answers", *names, seconds=550, folder=folder)
    found = dict(map(json.loads, (folder / "answers").read_text().splitlines()))
    why = f"the process ended with {ended.returncode}: {ended.stderr[-2000:]}"
    return {name: found.get(name, why) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("job", few([*TURNS, *REST], len(TURNS)))
def test_a_users_program_has_the_bits_of_a_punctual_device(job, answers):
    """Method: twice, with other delays; gradients, weights, moments and what the program read. That
    unordered work is found so, `test_late_device.py` shows with planted faults."""
    assert answers[job] == [True, True]
