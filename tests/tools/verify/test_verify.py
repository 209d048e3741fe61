"""`infinity verify`, `infinity train --receipt` and `infinity.receipt`: a stretch of a job that is
repeated has the bits of the receipt, and what has not is named."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from lazily import need

need("transformers", "rich")

import infinity
from infinity.errors import UsageError
from infinity.tools.cli import main
from infinity.tools.train import job as jobs
from infinity.tools.verify.reading import read_receipt
from infinity.tools.verify.receipts import digests

TINY = {"model_type": "gpt2", "vocab_size": 256, "n_positions": 32}
TINY |= {"n_embd": 16, "n_layer": 1, "n_head": 2}
WORDS = (
    "train --model model.json --data text.txt --steps 4 --batch-size 2 --dtype fp32 --device cpu"
    " --sequence-length 16 --eval-batches 1 --sample-bytes 0 --checkpoint saved"
    " --checkpoint-every 2 --receipt job.json"
)


@pytest.fixture
def finished(tmp_path, monkeypatch):
    """A job that was interrupted after its second step, and has gone on to its fourth."""
    monkeypatch.chdir(tmp_path)
    Path("model.json").write_text(json.dumps(TINY))
    Path("text.txt").write_text("The same words, again and again. " * 60)
    step = jobs.train_step

    def interrupted(job, number):
        loss = step(job, number)
        if number == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss

    with monkeypatch.context() as patch:
        patch.setattr(jobs, "train_step", interrupted)
        assert main(WORDS.split()) == 128 + signal.SIGTERM
    shutil.copytree("saved", "kept")
    assert main([*WORDS.split(), "--resume"]) == 0
    return tmp_path


def flipped(monkeypatch, number, bit=0):
    """Has step ``number`` change one bit of a weight."""
    step = jobs.train_step

    def other(job, at):
        loss = step(job, at)
        if at == number:
            with infinity.full_params(job.model, writeback=True), torch.no_grad():
                param = job.model.transformer.ln_f.weight
                param.view(torch.int32)[3] ^= 1 << bit
        return loss

    monkeypatch.setattr(jobs, "train_step", other)


def test_a_repeated_stretch_has_the_bits_of_the_receipt(finished, monkeypatch, capsys):
    """Method: from the first step and from a kept checkpoint, to each save, at other homes; the
    receipt is read and counted. Twin: one flipped bit of one weight is found and named."""
    found = read_receipt(Path("job.json"))
    assert [save["step"] for save in found["saves"]] == [2, 4]
    assert [len(save["losses"]) for save in found["saves"]] == [2, 2]
    before = {path: path.stat().st_mtime_ns for path in Path("kept").rglob("*")}
    at_disks = "--params nvme --optimizer nvme --nvme-path ."
    assert main(["verify", "job.json"]) == 0
    assert main(["verify", "job.json", "--to", "4", "--options", at_disks]) == 0
    assert main(["verify", "job.json", "--checkpoint", "kept"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "same bits" in line]
    count = len(found["saves"][0]["weights"])
    assert lines == [
        f"The same bits from step 0 to 2: 2 steps, {count} weights",
        f"The same bits from step 0 to 4: 4 steps, {count} weights",
        f"The same bits from step 2 to 4: 2 steps, {count} weights",
    ]
    assert before == {path: path.stat().st_mtime_ns for path in Path("kept").rglob("*")}
    flipped(monkeypatch, 1)
    assert main(["verify", "job.json", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["other_weights"] == ["transformer.ln_f.weight"] and not told["other_losses"]
    flipped(monkeypatch, 1, bit=22)
    assert main(["verify", "job.json", "--to", "4"]) == 1
    assert "step 2: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--options=--seed=1", "--seed 0 (now 1)"),
        ("--options=--batch-size=1", "--batch-size 2 (now 1)"),
        ("--to 3", "--to one of [2, 4]"),
        ("--checkpoint saved", "no save after step 4"),
        ("--options=--threads='", "No closing quotation"),
        ("--checkpoint nowhere", "has no checkpoint"),
        ("--options=--out=model", "leave these options out"),
    ],
)
def test_another_job_is_refused(finished, words, said, capsys):
    """Method: each unlike option, place or step is named, with status 2."""
    assert main(["verify", "job.json", *words.split()]) == 2
    assert said in capsys.readouterr().err


def test_a_checkpoint_of_another_job_is_refused(finished, monkeypatch, capsys):
    """Method: a job of the same options one of whose weights was changed."""
    shutil.rmtree("saved")
    flipped(monkeypatch, 1)
    other = [*WORDS.replace("job.json", "other.json").split(), "--overwrite"]
    assert main(other) == 0
    receipt = read_receipt(Path("job.json"))
    receipt["saves"].append(receipt["saves"][-1] | {"step": 5, "losses": [1.0]})
    Path("one.json").write_text(json.dumps(receipt))
    assert main(["verify", "one.json", "--checkpoint", "saved"]) == 2
    assert "have other bits than in the receipt" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"receipt": "1"}', b"\xff\xfe"])
def test_a_file_that_is_no_receipt_is_refused(content, tmp_path, capsys):
    """Method: empty, of other content and broken files. Twin: one of a later version is told so."""
    path = tmp_path / "file.json"
    path.write_bytes(content)
    assert main(["verify", str(path)]) == 2
    assert "is no receipt" in capsys.readouterr().err
    path.write_text('{"receipt": 99}')
    assert main(["verify", str(path)]) == 2
    assert "upgrade" in capsys.readouterr().err
    for rest in ('"saves": []', '"fixed_values": {}', '"fixed_values": {}, "saves": [{"step": 2}]'):
        path.write_text(f'{{"receipt": 1, {rest}}}')
        assert main(["verify", str(path)]) == 2 and "is no receipt" in capsys.readouterr().err


def test_a_receipt_is_not_replaced_without_being_asked_for(finished, capsys):
    """Method: the same job again, fresh, and with --method. Twin: --overwrite begins anew."""
    before = Path("job.json").read_bytes()
    fresh = WORDS.replace("--checkpoint saved --checkpoint-every 2", "").split()
    assert main(fresh) == 2 and "job.json" in capsys.readouterr().err
    assert Path("job.json").read_bytes() == before
    assert main([*fresh, "--overwrite"]) == 0
    assert [save["step"] for save in read_receipt(Path("job.json"))["saves"]] == [4]
    Path("notes.txt").write_text("mine")
    words = [*WORDS.replace("saved", "new").replace("job.json", "notes.txt").split(), "--resume"]
    assert main(words) == 2 and Path("notes.txt").read_text() == "mine"


def test_a_job_that_went_on_with_other_steps_is_repeated_by_its_stretches(finished, capsys):
    """Method: --steps changes the learning rates, so a stretch over the change is refused."""
    assert main([*WORDS.replace("--steps 4", "--steps 6").split(), "--resume"]) == 0
    assert main(["verify", "job.json"]) == 0
    assert main(["verify", "job.json", "--to", "6"]) == 2
    assert "give --to 4 at most" in capsys.readouterr().err


def test_a_checkpoint_between_saves_is_refused(finished, capsys):
    """Method: a job of the same options that was saved at another step."""
    words = WORDS.replace("saved", "third").replace("--checkpoint-every 2", "--checkpoint-every 3")
    assert main(words.replace("job.json", "other.json").split()) == 0
    receipt = read_receipt(Path("job.json"))
    receipt["saves"] = receipt["saves"][:1]
    Path("job.json").write_text(json.dumps(receipt))
    assert main(["verify", "job.json", "--checkpoint", "third"]) == 2
    assert "the checkpoint is at step 4" in capsys.readouterr().err


@pytest.mark.parametrize("home", ["device", "host", "nvme"])
def test_a_receipt_of_a_model_has_the_digests_of_its_weights(home, tmp_path):
    """Method: a model at each home beside its plain twin. Twin: after a step all are others."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    config = {"params": home, "optimizer": home}
    folders = {"nvme_paths": [str(tmp_path)]} if home == "nvme" else {}
    model, optimizer = infinity.wrap_model(model, optimizer, config | folders)
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    other, _ = infinity.wrap_model(plain, torch.optim.AdamW(plain.parameters()), {})
    found = infinity.receipt(model)
    assert found["weights"] == digests(other) and found["step"] == 0
    assert found["config"]["params"] == home and found["versions"]["torch"] == torch.__version__
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    after = infinity.receipt(model)
    assert after["step"] == 1 and not set(after["weights"].values()) & set(
        found["weights"].values()
    )
    infinity.unwrap_model(model, optimizer)
    with pytest.raises(UsageError):
        infinity.receipt(model)
