"""The jobs of a GPU: their order, what is left out, and what their rows and notes say."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from inside import parts_of

from bench import gpu_train
from bench.gpu_jobs import START_SECONDS, Journal
from infinity.tools.bench.settings import Settings

FIRST, SECOND = 520, 250  # seconds of the two calls on a borrowed GPU
BEFORE, AGAIN = 100, 15  # the build, tests of kernels and engine; a build that is there


def seconds(jobs: list) -> float:
    """Of ``jobs`` in their order, with the starts of their processes."""
    starts = 1 + sum(a.worker != b.worker for a, b in zip(jobs, jobs[1:]))
    return sum(job.seconds for job in jobs) + START_SECONDS * starts


def test_two_calls_reach_what_tells_most():
    """Method: the planned seconds of the jobs up to our losses, and of those up to the small card,
    are within a call of 520 s and one of 250 s."""
    jobs = gpu_train.plan("folder", tiny=False)
    names = [job.name for job in jobs]
    assert names[0] == "a.8B.32k.auto"
    for each in (jobs, gpu_train.plan("folder", tiny=True)):
        assert len({job.name for job in each}) == len(each)
    assert all(name.startswith("a.8B.") for name in names[:4])
    first, second = names.index("e.1.3B.half") + 1, names.index("a.8B.8k.card24") + 1
    assert seconds(jobs[:first]) < FIRST - BEFORE
    assert seconds(jobs[first:second]) < SECOND - AGAIN
    in_second = set(names[first:second])
    assert {"ranks.sums", "ranks.raises", "ranks.killed", "a.8B.32k.chosen"} <= in_second


def test_a_machine_leaves_out_what_it_lacks_by_name(monkeypatch):
    """Twin: a machine with drives, cards and rivals leaves out nothing."""
    found: dict[str, object] = {"drives": [], "rival": None, "cards": 1}
    monkeypatch.setattr(Path, "glob", lambda path, _: found["drives"])
    monkeypatch.setattr(gpu_train.importlib.util, "find_spec", lambda _: found["rival"])
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: found["cards"])

    def lacking(**more) -> dict[str, str]:
        jobs = gpu_train.plan("folder", tiny=False, **more)
        return {job.name: job.lacks for job in jobs if job.lacks}

    poor = lacking()
    assert poor["a.1.3B.8k.nvme"] == poor["e.1.3B.nvme"] == poor["b.34B.int8"]
    assert "NVMe" in poor["a.1.3B.8k.nvme"] and "card" in poor["ranks.cards.sums"]
    assert "DeepSpeed" in poor["a.1.3B.8k.deepspeed"] and "a.1.3B.8k.fsdp2" not in poor
    assert lacking(rivals=False)["a.1.3B.8k.fsdp2"] == "--no-rivals"
    found |= {"drives": ["nvme0n1"], "rival": "deepspeed", "cards": 2}
    assert lacking() == {}


def test_notes_tell_whether_losses_are_those_of_plain_torch():
    """Method: three homes beside plain torch, one with another number in its third step."""
    same, other = [3.0, 2.5, 2.25], [3.0, 2.5, 2.0]
    found = {
        "e.1.3B.plain": {"losses": same},
        "e.1.3B.host": {"losses": list(same)},
        "e.1.3B.half": {"losses": other},
        "a.1.3B.8k.host": {"losses": [1.0]},
    }
    host, half = gpu_train._compared_losses(found)
    assert "host has the losses of plain, the same numbers" in host
    assert "half has other losses than plain from step 2 on, by at most 0.25" in half


def test_results_are_kept_after_each_job(tmp_path, monkeypatch):
    """Method: jobs that only tell figures; what is kept after each has those so far, and the notes
    name every other job. INFINITY_BENCH_JOURNAL has them for the next call."""
    told = {"tokens_per_second": 8.0, "parameters": 8, "losses": [2.0], "flops": 1e12, "mfu": 0.5}

    def run(jobs, journal, seconds, *, ended):
        for job in jobs[:3]:
            journal.note(job.name, "measured", told=told)
            ended(job)

    kept: list = []
    monkeypatch.setattr(gpu_train.gpu_jobs, "run", run)
    monkeypatch.setenv("INFINITY_BENCH_JOURNAL", str(tmp_path / "train.jobs.json"))
    settings = Settings(folder=str(tmp_path), scale=0.01, keep=kept.append)
    found = gpu_train.measure(settings)
    assert [len(each.rows) for each in kept] == [1, 2, 3]
    count = len(gpu_train.plan("folder", tiny=True))
    assert sum("not reached" in note for note in found.notes) == count - 3
    assert (
        "1.0 TFLOPS (6 x parameters without the embedding + causal attention), MFU 50.0 %"
        in (found.notes[0])
    )
    assert len(Journal(tmp_path / "train.jobs.json").measured()) == 3


BATCH = ["--size", "tiny", "--device", "cpu", "--batch", "2", "--length", "32"]
STEPS = ["--warm-up", "1", "--steps", "2"]


@pytest.mark.parametrize("halves", [[], ["--micro-batches", "2"]], ids=["whole", "halves"])
@pytest.mark.parametrize(
    "more",
    [
        ["--products", "1", "--config", '{"params": "host"}'],
        ["--products", "2"],
        ["--compile", "eager"],
    ],
    ids=["one", "all", "compiled"],
)
def test_a_step_that_keeps_products_has_the_losses_of_plain_torch(more, halves):
    """Method: three steps by the worker's own function, with the products of one block or all kept,
    whole and in two micro-batches of one accumulation, beside plain torch with fp32 masters. Twin:
    another batch has other losses."""
    plain = gpu_train._run("plain", [*BATCH, *STEPS, *halves])
    found = gpu_train._run("infinity", [*BATCH, *STEPS, *halves, *more])
    assert found["losses"] == plain["losses"] and len(set(plain["losses"])) == 3
    other = gpu_train._run("plain", [*BATCH, "--batch", "4", "--warm-up", "0", "--steps", "1"])
    assert other["losses"] != plain["losses"][:1]


def test_a_worker_drops_each_model_before_the_next(monkeypatch):
    """Method: three configurations in one process, with a look at the engines of those before.
    Twin: one that something else holds is seen."""
    ours, engines, alive, held = gpu_train.SYSTEMS["infinity"], [], [], []

    def made(args):
        alive.append(sum(engine() is not None for engine in engines))
        step, more = ours(args)
        engines.append(weakref.ref(parts_of(more["model"]).engine))
        if len(engines) == 3:
            held.append(more)
        return step, more

    monkeypatch.setitem(gpu_train.SYSTEMS, "infinity", made)
    for more in ([], ["--compile", "eager"], ["--products", "2"], []):
        gpu_train._run("infinity", [*BATCH, *more, "--warm-up", "0", "--steps", "1"])
    assert alive == [0, 0, 0, 1]
