"""The command that `infinity train` names at its end."""

from __future__ import annotations

import json
import shlex

import pytest
from lazily import need

need("transformers", "peft", "gguf")

from chatty import save_base

from infinity.tools.cli import main
from infinity.tools.export.serving import next_command


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (
            "qwen3",
            "vllm serve 'a b', or for llama.cpp: infinity export 'a b' 'a b.gguf' --gguf q8_0",
        ),
        ("gpt_neox", "vllm serve 'a b'"),
    ],
)
def test_a_whole_model_is_served_from_its_folder(kind, named, tmp_path, monkeypatch):
    """Names the command for a family that is written as GGUF, and for one that is not."""
    from pathlib import Path

    monkeypatch.chdir(tmp_path)
    Path("a b").mkdir()
    Path("a b/config.json").write_text(json.dumps({"model_type": kind}))
    assert next_command(Path("a b"), None) == named


@pytest.mark.parametrize("adapted", [False, True], ids=["whole", "adapter"])
def test_the_named_command_runs(adapted, tmp_path, monkeypatch, capsys):
    """Trains a step, and runs the `infinity export` that its last lines name."""
    monkeypatch.chdir(tmp_path)
    save_base(tmp_path / "base")
    (tmp_path / "text.txt").write_text("one and two and three\n" * 60)
    words = (
        "train --model base --data text.txt --steps 1 --batch-size 2 --sequence-length 16"
        " --eval-batches 1 --sample-bytes 0 --dtype fp32 --device cpu --out tuned"
    )
    assert main([*words.split(), *(["--lora", "2"] if adapted else [])]) == 0
    line = next(each for each in capsys.readouterr().out.splitlines() if "Serve it: " in each)
    command = line[line.index("infinity export") :].partition(" &&")[0]
    assert main(shlex.split(command)[1:]) == 0
    made = tmp_path / ("tuned-merged/model.safetensors" if adapted else "tuned.gguf")
    assert made.stat().st_size > 10_000
    assert ("vllm serve tuned-merged" if adapted else "vllm serve tuned,") in line
