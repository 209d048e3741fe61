"""Jobs of two ranks that are struck, and come back with the bits of one that was left alone."""

from __future__ import annotations

import local_slurm
import pytest
import strikes

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
