"""The engine on a device that is late: the product's own device class, threads and allocator, on
streams whose jobs come late, on memory that the host cannot read and that is overwritten when it is
freed.

Words used here: **punctual**: a run whose launches wait for their jobs. **survey**: the answers of
all jobs of one subject, which one process runs (see `late_jobs`).
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import prepared
import pytest
from marks import every, few

JOBS = Path(__file__).parents[1] / "support" / "jobs" / "late_jobs.py"
SECONDS = 280
WAYS = [
    "plain",
    "clipped_micro_batches",
    "accumulated",
    "stepped_in_the_backward",
    "scaled",
    "evaluated_and_edited",
    "resumed",
    "gradients_edited",
    "two_backwards",
    "averaged",
    "parked",
    "on_a_side_stream",
    "on_side_streams",
]
HOMES = ["host", "nvme", "window", "activations"]
ALONE = [
    "plain:host-nvme",
    "plain:nvme-host",
    "plain:activations on disk",
    "plain:another device",
    "plain:blocks recomputed",
    "plain:views read after a use",
    "plain:checkpoints, reentrant",
    "plain:checkpoints, not reentrant",
]
KERNELS = [
    f"kernels:{homes} {moments}"
    for moments in ("fp32", "int8")
    for homes in ("device-device", "auto-auto", "device-host", "host-device")
]
FAULTS = [
    "gradients are freed while they are sent",
    "gradients are sent before they are computed",
    "weights are freed while they are used",
    "weights are used before they came",
    "gradients are freed to the stream that made them",
    "activations are freed to the stream that fetched them",
    "updates do not wait for gradients",
]


def answers(names: list[str]) -> dict[str, Any]:
    """What each job answered. One that is missing ended the process."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "answers"
        ended = prepared.run(JOBS, out, *names, seconds=SECONDS, folder=Path(folder))
        lines = out.read_text().splitlines() if out.exists() else []
        found = dict(json.loads(line) for line in lines)
    for name in names:
        found.setdefault(name, f"the process ended with {ended.returncode}: {ended.stderr[-2000:]}")
    return found


@pytest.fixture(scope="module")
def survey(request):
    """The answers of the jobs of this module's tests that are run, a process for each subject."""
    wanted: dict[str, list[str]] = {}
    for item in request.session.items:
        if item.module is request.module and (job := job_of(item)) is not None:
            wanted.setdefault(item.originalname, []).append(job)

    @functools.cache
    def of_subject(subject: str) -> dict[str, Any]:
        return answers(wanted[subject])

    return of_subject


def job_of(item: Any) -> str | None:
    return item.callspec.params.get("job") if hasattr(item, "callspec") else None


@pytest.fixture
def answer(request, survey):
    """The answer of the test's job."""
    return survey(request.node.originalname)[job_of(request.node)]


# Each way at one home, the homes in turn; then every other pair.
TURNS = [f"{way}:{HOMES[place % len(HOMES)]}" for place, way in enumerate(WAYS)]
REST = [job for home in HOMES for way in WAYS if (job := f"{way}:{home}") not in TURNS]


@pytest.mark.parametrize("job", few([*TURNS, *REST], len(TURNS)))
def test_a_late_run_has_the_bits_of_a_punctual_one(job, answer):
    """Method: every way of training at every home, twice, with other delays."""
    assert answer == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("job", few(ALONE, 3))
def test_other_forms_have_the_bits_of_a_punctual_run(job, answer):
    assert answer == [True, True]


@pytest.mark.parametrize(
    "job",
    [
        *few(KERNELS, 1),
        *(f"kernels:{way}" for way in ("a step that is split", "parked on the host")),
        "kernels:plain torch between steps",
    ],
)
def test_steps_on_the_device_have_the_bits_of_a_punctual_run(job, answer):
    """Method: the GPU's kernels, compiled for the processor, are jobs of the device's streams."""
    assert answer == [True, True]


QUOTAS = [
    f"quota:{share} of what is registered, {home}"
    for home in ("host", "activations", "nvme")
    for share in (0.5, 0.0)
]


@pytest.mark.parametrize("job", few(QUOTAS, 2))
def test_what_the_driver_does_not_register_trains_to_the_same_bits(job, answer):
    """Method: a driver with a quota, as under WSL2, or one that registers nothing. The device waits
    for copies from and to other memory, as CUDA does. It is asked until it refuses, and one warning
    tells that."""
    assert answer == [True, 1, 1]


@pytest.mark.parametrize("job", ["quota:1.0 of what is registered, host"])
def test_a_quota_that_suffices_refuses_nothing(job, answer):
    """The twin of the test above."""
    assert answer == [True, 0, 0]


@pytest.mark.parametrize("job", ["quota:state is registered as it passes"])
def test_state_is_registered_when_it_first_passes(job, answer):
    """Method: weights and gradients are registered at the wrap, a quarter of all. Twin: half of
    each update is the device's, and then most of the state is registered, too."""
    assert answer == [True, True]


@pytest.mark.parametrize("job", ["launches:punctual, and behind"])
def test_a_device_that_waits_for_launches_is_told_to(job, answer):
    """Method: jobs that end as they are launched. Twin: a job before a whole forward that ends only
    behind it, so that the device is never ahead."""
    assert answer == [True, True, True]


@pytest.mark.parametrize("job", ["threads:a forward beside a backward"])
def test_a_backward_waits_for_another_threads_forward(job, answer):
    """Method: autograd runs the backward in its own thread for the device, while a thread that
    evaluates is in the middle of the model. No gradient lands before it has left."""
    assert answer is False


@pytest.mark.parametrize("job", ["threads:nobody waits"])
def test_a_backward_that_does_not_wait_lands_inside_another_threads_forward(job, answer):
    """The twin of the test above. It may meet memory that is gone, too."""
    assert answer is True or "RuntimeError" in answer


@pytest.mark.parametrize("job", [f"fault:{fault}" for fault in FAULTS])
def test_what_is_not_ordered_is_found(job, answer):
    """Method: one order that the engine keeps is taken away. Runs differ, raise, or end."""
    assert not isinstance(answer, list) or not all(answer)


@pytest.mark.parametrize("job", ["fault:none"])
def test_without_a_fault_nothing_is_found(job, answer):
    """The twin of the tests above."""
    assert answer == [True] * 4


@pytest.mark.parametrize(
    "job", few([f"room:{host}" for host in ("a small host", "inputs that grow", "no host")], 2)
)
def test_blocks_are_recomputed_from_the_first_step_where_torchs_checkpoint_fits(job, answer):
    """Method: a card with room for 76 of the 192 tensors that a model saves. Its losses are those
    of torch's checkpoint, and blocks were recomputed."""
    assert answer == [True, True]


@pytest.mark.parametrize(
    "job",
    [
        "tight:attention, compiled",
        "tight:wide, inputs that grow",
        pytest.param("tight:waves", marks=pytest.mark.slow),
        pytest.param("tight:waves, two batches a step", marks=pytest.mark.slow),
        pytest.param("tight:wide, more room", marks=pytest.mark.slow),
        "tight:wide, in parts",
        pytest.param("tight:wide, in parts, more room", marks=pytest.mark.slow),
    ],
)
def test_no_step_takes_more_of_the_card_than_torchs_checkpoint_and_three_percent(job, answer):
    """Method: the peak of a run whose blocks are inside torch's checkpoint is measured. With 3 %
    more on the card, the losses are the same, nothing more is taken, and blocks are recomputed."""
    assert answer == [True, True, True]


@pytest.mark.parametrize("job", ["tight:kept at first"])
def test_passes_that_are_measured_have_to_recompute(job, answer):
    """The twin of the test above: blocks are kept until they are measured."""
    assert answer.startswith("OutOfMemoryError")


@pytest.mark.parametrize("job", few(["tables:host", "tables:window", "tables:nvme"], 1))
def test_a_tied_tables_gradients_have_the_bits_of_autograds_sum(job, answer):
    """Clipped micro-batches whose tied table's gradients land use by use, late, beside a run in
    which autograd adds them. Twin: `fault:none` and the faults."""
    assert answer == [True, True]


PLANNED = [
    f"planned:{homes} {kind}"
    for kind in ("tied", "untied")
    for homes in ("host", "nvme", "window", "tiles")
]


@pytest.mark.parametrize("job", every(PLANNED, 2))
def test_a_model_that_is_mostly_its_table_finds_room_in_what_is_planned(job, answer):
    """Method: micro-batches in a room of the planned bytes and the user's logits. The allocator
    gave no more. Twin: below, a plan without gradients."""
    assert isinstance(answer, int) and answer <= 0, answer


@pytest.mark.parametrize("job", ["planned:without gradients"])
def test_a_plan_without_gradients_leaves_no_room_for_them(job, answer):
    """The twin of the test above."""
    assert isinstance(answer, str) and "late: out of memory" in answer


@pytest.mark.parametrize(
    "job",
    few(
        [
            f"products:products_{place}{batches}"
            for batches in (", two batches", "")
            for place in ("kept", "sent")
        ],
        2,
    ),
)
def test_products_that_are_kept_or_sent_give_the_bits_of_torchs_checkpoint(job, answer):
    """Method: matrix products of every block are kept, or sent, by jobs that come late. Losses are
    those of torch's checkpoint."""
    assert answer == [True, True]


@pytest.mark.parametrize("job", ["room:a full host"])
def test_without_a_budget_no_more_is_sent_than_the_host_had_left(job, answer):
    """Method: 4 MiB are left to the engine, 3 of which are planned."""
    assert answer == [True, True, True]


@pytest.mark.parametrize("job", ["room:nothing is dropped"])
def test_a_block_that_finds_no_room_has_to_be_dropped(job, answer):
    """The twin of the tests above."""
    assert answer.startswith("OutOfMemoryError")


@pytest.mark.slow
@pytest.mark.parametrize("job", few(["memory:host", "memory:nvme"], 1))
def test_a_step_that_finds_no_memory_can_be_repeated(job, answer):
    """Method: another allocation of the step fails each time. The step that follows with the same
    batch has the bits of a run without a failure."""
    assert list(answer) == ["the same bits"]
