"""Jobs of two ranks that are struck, and come back with the bits of one that was left alone."""

from __future__ import annotations

import argparse

import local_slurm
import pytest
import strikes
from marks import few
from ranks import JOBS, run_ranks, run_torchrun

from infinity import UsageError
from infinity.tools.train import train as of_train

pytest.importorskip("transformers")
pytest.importorskip("rich")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_job_of_torchrun_survives_ten_strikes(tmp_path):
    """Method: `strikes`, in each way twice but for some: the same bytes in the end, and the same
    loss at every step."""
    found = strikes.strike(tmp_path, launcher="torchrun", strikes=10, seed=3)
    assert sum(map(len, found["seconds"].values())) == 10


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif(bool(local_slurm.missing()), reason=f"no {local_slurm.missing()}")
def test_two_jobs_of_slurm_survive_ten_strikes(tmp_path):
    """Method: the same on a local Slurm of two machines, where two jobs share them."""
    found = strikes.strike(tmp_path, launcher="slurm", strikes=10, seed=4, jobs=2)
    assert sum(map(len, found["seconds"].values())) == 10


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_job_of_ray_survives_three_strikes_with_the_bits_of_torchrun(tmp_path):
    """Method: `ray_train.py` on a cluster of two workers on this machine; the job that is left
    alone runs under torchrun."""
    pytest.importorskip("ray", reason="ray is not installed")
    found = strikes.strike(tmp_path, launcher="ray", strikes=3, seed=5, steps=100)
    assert sum(map(len, found["seconds"].values())) == 3


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("kind", "count"), [("SIGKILL to a rank", 10), ("the disk is full", 2)])
def test_a_job_of_ray_survives_kills_of_workers_and_a_full_disk(tmp_path, kind, count):
    """Method: the same with one kind of strike alone: each worker that is killed has Ray start all
    of them again."""
    pytest.importorskip("ray", reason="ray is not installed")
    found = strikes.strike(tmp_path, launcher="ray", strikes=count, seed=6, only=kind)
    assert len(found["seconds"][kind]) == count


@pytest.mark.parametrize("how", few(["late", "early", "plain"], 1))
def test_ranks_that_torchrun_restarts_do_not_look_for_one_that_died(how):
    """Method: a rank is killed, and the other one comes back late, beside torchrun's own store,
    which outlives them. The twin is torch's own group, which finds the address of the dead one."""
    command = ["--max-restarts", "1", str(JOBS / "returning_ranks.py"), how]
    shared = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0"}
    done = run_torchrun(2, command, environment=shared)
    assert ("start 0: 0.5" in done.stdout) == (how != "early")
    assert done.stdout.count("start 1: 0.5") == (0 if how == "plain" else 2), done.stderr[-3000:]
    assert (done.returncode == 0) == (how != "plain")


def run(job: strikes.Job, ranks: int, *options: str, ends_after: str = "") -> int:
    """Runs a job on so many ranks, with the options that an elastic torchrun repeats."""
    places = {name: str(job.folder / name) for name in ("model.json", "text.txt", "out")}
    words = [places.get(each, each).replace("disk/", f"{job.folder}/disk/") for each in job.command]
    words += ["--dtype", "fp32", "--max-grad-norm", "1e9", *options]
    done = run_ranks(ranks, words, environment={"ENDS_AFTER": ends_after})
    (job.folder / "said").write_text(done.stdout + done.stderr)
    return done.returncode


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after", "total"), [(2, 1, 2), (1, 2, 2), (2, 4, 4)])
def test_a_job_goes_on_with_another_number_of_ranks(tmp_path, before, after, total):
    """Method: a job with the options of one that was left alone on two ranks, but other ranks after
    its third step. The same samples and masks: of two micro-batches the sum and its bits are the
    same, of four the losses within fp32 rounding."""
    alone, elastic = (strikes.Job(tmp_path / name, 6) for name in ("alone", "elastic"))
    assert run(alone, 2, "--accumulate", str(total // 2)) == 0
    options = ("--accumulate", str(total // before))
    assert run(elastic, before, *options, ends_after="2") == 143
    assert run(elastic, after, *options) == 0
    said = (elastic.folder / "said").read_text()
    assert f"in place of {before}: --accumulate {total // after}" in said
    assert (elastic.saved() == alone.saved()) == (total == 2)
    found, wanted = elastic.losses(), alone.losses()
    assert {step for step, _ in found} == {step for step, _ in wanted} == {*range(6)}
    for (step, _), losses in found.items():
        near = pytest.approx(float.fromhex(*wanted[step, 0]), rel=1e-5)
        assert [float.fromhex(loss) for loss in losses] == [near]


@pytest.mark.parametrize(
    ("saved", "count", "options", "becomes"),
    [
        ((2, 4), 1, 2, 4),
        ((1, 2), 2, 2, 1),
        ((3, 6), 2, 2, 3),
        ((2, 4), 2, 3, 3),  # the same ranks: another option is refused later
        (None, 2, 3, 3),  # a checkpoint of a script
        ((2, 4), 3, 2, None),  # twins: no whole number for each rank
        ((8, 8), 6, 1, None),
    ],
)
def test_other_ranks_divide_the_micro_batches_of_a_step(
    monkeypatch, saved, count, options, becomes
):
    """Method: what the checkpoint tells is put in its place."""
    told = (
        {} if saved is None else {"data_ranks": saved[0], "fixed_values": {"accumulate": saved[1]}}
    )
    monkeypatch.setattr(of_train, "saved_extra", lambda folder: told)
    args = argparse.Namespace(checkpoint="saved", accumulate=options)
    ranks = argparse.Namespace(data_count=count)
    console = argparse.Namespace(print=lambda line: None)
    if becomes is None:
        with pytest.raises(UsageError, match=f"which {count} ranks do not divide. Start it on"):
            of_train._divide_steps(args, ranks, console)
    else:
        of_train._divide_steps(args, ranks, console)
    assert args.accumulate == (becomes or options)


def test_a_job_with_another_bit_is_found(tmp_path):
    """Method: the twin: one byte of a saved file, and one loss, are changed."""
    alone, struck = (strikes.Job(tmp_path / name, 3) for name in ("alone", "struck"))
    for job in (alone, struck):
        (job.folder / "out").mkdir()
        (job.folder / "out" / "model.safetensors").write_bytes(b"weights")
        job.notes.write_text('{"step": 0, "rank": 0, "loss": "0x1p+1"}\n')
    strikes.compare(alone, struck)
    struck.notes.write_text('{"step": 0, "rank": 0, "loss": "0x1p+2"}\n')
    with pytest.raises(AssertionError, match="other losses"):
        strikes.compare(alone, struck)
    (struck.folder / "out" / "model.safetensors").write_bytes(b"Weights")
    with pytest.raises(AssertionError, match="other bytes"):
        strikes.compare(alone, struck)
