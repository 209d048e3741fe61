"""The sample of `infinity train`: generated from the homes that trained, within a time."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import train_memory
from chatty import save_base

transformers = pytest.importorskip("transformers")
pytest.importorskip("rich")

import infinity.tools.cli
from infinity.tools.train import sample

NTOKENS, SEED = 6, 3
JOB_OF_ITS_OWN = str(Path(train_memory.__file__))
JOB = (
    "train --model base --data text.txt --nvme-path nvme --steps 1 --batch-size 1 --lr 0.01"
    f" --sequence-length 16 --eval-batches 1 --sample-bytes {NTOKENS} --seed {SEED} --dtype fp32"
    " --threads 1 --prompt fox --out out --json"
)


@pytest.fixture
def report(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    Path("nvme").mkdir()
    save_base(Path("base"))

    def run(words: str) -> dict:
        assert infinity.tools.cli.main(shlex.split(f"{JOB} {words}")) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


@pytest.mark.parametrize(
    "words", ["--params nvme --optimizer nvme", "--params host", "--lora 2 --params nvme"]
)
def test_the_sample_is_what_transformers_alone_would_write(words, report, monkeypatch):
    """Draws the same tokens with what was saved, after a job in which nothing may be loaded."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    with monkeypatch.context() as patch:
        patch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", None)
        found = report(words)
    tokenizer = transformers.AutoTokenizer.from_pretrained("base")
    model = load("out").eval()
    tokens = tokenizer("fox", return_tensors="pt")["input_ids"]
    torch.manual_seed(SEED)
    with torch.no_grad():
        drawn = model.generate(
            tokens, do_sample=True, temperature=sample.TEMPERATURE, max_new_tokens=NTOKENS
        )[0]
    assert found["prompt"] == tokenizer.decode(tokens[0])
    assert found["sample"] == tokenizer.decode(drawn[tokens.shape[1] :])


def test_the_sample_ends_with_its_time(report, monkeypatch):
    """Leaves no time: one token is written, and with a minute all of them."""
    whole = report("--params nvme --overwrite")["sample"]
    monkeypatch.setattr(sample, "MOST_SECONDS", -1.0)
    cut = report("--params nvme --overwrite")["sample"]
    assert len(cut) < len(whole) and whole.startswith(cut)


def taken_by(kind: str, tmp_path: Path) -> tuple[list[int], int]:
    """What the steps of `train_memory` take in a process of its own, with budgets of a quarter of
    the weights; and the bytes of these."""
    config = transformers.LlamaConfig(
        vocab_size=400, hidden_size=512, intermediate_size=1024, num_hidden_layers=16
    )
    config.num_attention_heads = config.num_key_value_heads = 8
    model = transformers.LlamaForCausalLM(config)
    weights = sum(param.nbytes for param in model.parameters())
    model.save_pretrained(tmp_path / "large")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    (tmp_path / "nvme").mkdir()
    words = [sys.executable, JOB_OF_ITS_OWN, kind, str(tmp_path), str(weights // 4)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    taken = [int(word) for word in done.stdout.splitlines()[-1].split()]
    print(f"{[nbytes >> 20 for nbytes in taken]} MiB, {weights >> 20} MiB of weights")
    return taken, weights


@pytest.mark.slow
def test_steps_outside_of_the_training_take_no_model_of_memory(tmp_path):
    """A job in a process of its own, with budgets of a quarter of its weights: what the measurement
    of the compute, the first loss, and the save with its sample take is at most half of the
    weights. Twin: loading the saved model takes more than them."""
    (steps, loaded), weights = taken_by("train", tmp_path)
    assert steps <= weights // 2 and loaded > weights


@pytest.mark.slow
def test_exports_take_no_model_of_memory(tmp_path):
    """Exports the checkpoint of such a job, and merges an adapter into its base: each takes at most
    half of the weights. Twin: loading the merged model takes more than them."""
    (*exports, loaded), weights = taken_by("export", tmp_path)
    assert len(exports) == 2 and max(exports) <= weights // 2 and loaded > weights
