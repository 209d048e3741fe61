"""`infinity plan --script`: what it prints is what `infinity train` takes, and starts.

Words used here:

**file**: the options that the script writes, read as `infinity train` reads them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("rich")

from ranks import end_session

from infinity.tools.cli import main, parse
from infinity.tools.cli.presets import expanded
from infinity.tools.train.mesh import mesh_sizes
from infinity.tools.train.options import check_options

MACHINE = """
name = "two"
sources = ["made up"]
devices = {count = 2, memory = "16GB", flops = 71e12, efficiency = 0.7, bandwidth = 850e9}
host = {memory = "64GB", bandwidth = 45e9, checksum = 29e9}
disks = {count = 1, capacity = "2TB", read = 6e9, write = 4e9}
links = {device = 12e9, host = 12e9, network = 1.25e9, latency = 30e-6}
"""
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The current folder, with a machine of two devices, a model with weights, and one without."""
    monkeypatch.chdir(tmp_path)
    Path("two.toml").write_text(MACHINE)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES)
    transformers.LlamaForCausalLM(config).save_pretrained("llama")
    config.save_pretrained("fresh")
    return tmp_path


def script(capsys, *words: object) -> str:
    """The script of a plan of the machine."""
    given = ["plan", "--machine", "two.toml", "--sequence-length", "32", *map(str, words)]
    assert main([*given, "--script"]) == 0
    return capsys.readouterr().out


def options_of(text: str):
    """Runs all of a script but its last line, and parses the options that this starts."""
    *before, last = text.strip().splitlines()
    subprocess.run(["bash", "-c", "\n".join(before)], check=True)
    words = shlex.split(last)
    args = parse(expanded(words[words.index("infinity") + 1 : -1]))
    check_options(args)
    return last, args


def test_folders_of_another_machine_are_neither_looked_for_nor_made(place, capsys):
    """Method: a folder that is not here, as an option and in a DeepSpeed JSON, whose report is
    told once. Twin: this machine's folder is looked for."""
    small = ("--model", "llama", "--batch-size", 8, "--nvme-path")
    assert 'nvme_paths = ["gone"]' in script(capsys, *small, "gone", "--mesh", "dp=2")
    assert main(["plan", "--model", "llama", "--nvme-path", "gone"]) == 2
    assert "No such folder" in capsys.readouterr().err
    offload = {"device": "nvme", "nvme_path": str(place / "theirs")}
    given = {"zero_optimization": {"stage": 3, "offload_optimizer": offload}}
    Path("ds.json").write_text(json.dumps(given))
    for words in (("--machine", "two.toml", "--batch-size", "8"), ()):
        assert main(["plan", "--model", "llama", "--deepspeed", "ds.json", *words]) == 0
        assert capsys.readouterr().err.count("DeepSpeed config read") <= 1
    assert not (place / "theirs").exists() and not (place / "gone").exists()


def test_a_script_says_what_its_numbers_are_and_how_slurm_starts_it(place, capsys):
    said = script(capsys, "--model", "llama", "--batch-size", 8, "--mesh", "dp=2")
    assert re.search(r"^device_memory = \d+  # of each GPU: what saved activations", said, re.M)
    wanted = "sbatch --nodes 1 --gpus-per-node 2 examples/slurm.sh -m infinity train --config job"
    assert wanted in said


PLANS = {  # the words -> the options of the job
    "--batch-size 8 --mesh tp=2": {"mesh": "tp=2", "dtype": "bf16", "pipeline_schedule": None},
    "--batch-size 8 --mesh pp=2 --gradient-checkpointing": {
        "mesh": "pp=2",
        "gradient_checkpointing": True,
        "pipeline_chunks": 1,
    },
    "--batch-size 8 --params host --moments int8": {
        "mesh": "dp=2",
        "batch_size": 4,
        "accumulate": 1,
    },
    "--batch-size 16 --nodes 2 --mesh pp=2 --optim adafactor": {
        "mesh": "pp=2,dp=2",
        "optim": "adafactor",
    },
}


@pytest.mark.parametrize("words", PLANS)
def test_a_script_has_the_planned_mesh_and_batch(place, capsys, words):
    """Reads the file as `infinity train` does: the ranks are the plan's, and so are the samples of
    a step. Twin: the same options in other words, without the file."""
    given = [*words.split(), "--model", "llama"]
    plan = json.loads(_json(capsys, given))
    last, args = options_of(script(capsys, *given))
    sizes = mesh_sizes(args, plan["ranks"])
    data = sizes["dp"] * sizes["ep"]
    total = int(words.split()[1])
    assert data * args.batch_size * args.accumulate == plan["samples_per_step"] == total
    assert args.sequence_length == 32 and args.model == (place / "llama").resolve()
    assert {name: getattr(args, name) for name in PLANS[words]} == PLANS[words]
    nodes = plan["nodes"]
    assert re.search(r"--nproc-per-node 2 ", last) and ("--nnodes 2 " in last) == (nodes == 2)
    text = Path("job.toml").read_text()
    assert ('params = "host"' in text) == ("--params" in words)
    assert "device_memory = " in text  # beside what forwards save


def _json(capsys, words: list[str]) -> str:
    given = ["plan", "--machine", "two.toml", "--sequence-length", "32", *words]
    assert main([*given, "--json"]) == 0
    return capsys.readouterr().out


def test_a_model_without_weights_starts_from_fresh_ones(place, capsys):
    """A folder without weights gives its config.json, a known model's name a file of its own.
    Twins: one machine of no name, and --json beside it."""
    _, args = options_of(script(capsys, "--batch-size", 8, "--model", "fresh"))
    assert args.model == (place / "fresh" / "config.json").resolve()
    words = ("--batch-size", 8, "--model", "llama-1b", "--gradient-checkpointing")
    _, args = options_of(script(capsys, *words))
    assert args.model == Path("model.json")
    assert json.loads(Path("model.json").read_text())["model_type"] == "llama"
    for wrong, said in ((["--script"], "add --machine"), (["--script", "--json"], "one of them")):
        machine = ["--machine", "two.toml"] if "--json" in wrong else []
        assert main(["plan", "--model", "llama", *machine, *wrong]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["pp=2", "tp=2"])
def test_a_script_starts_the_planned_job(place, capsys, mesh):
    """Runs it by bash: torchrun trains, saves, and transformers loads the folder."""
    words = ("--batch-size", 8, "--model", "llama", "--mesh", mesh, "--dtype", "fp32")
    Path("start.sh").write_text(script(capsys, *words))
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    more = "--data text.txt --steps 2 --eval-batches 1 --sample-bytes 0 --out tuned --json"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    job = subprocess.Popen(
        ["bash", "start.sh", *more.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        out, err = job.communicate(timeout=200)
    finally:
        end_session(job)
    assert job.returncode == 0, err[-3000:]
    assert len(json.loads(out.splitlines()[-1])["losses"]) == 2
    _, found = transformers.LlamaForCausalLM.from_pretrained("tuned", output_loading_info=True)
    assert not found["missing_keys"]


def test_a_schedule_that_train_does_not_run_has_no_script(place, capsys):
    """A pipeline without flush is another training. Twin: a schedule that runs."""
    words = ("--batch-size", 8, "--model", "llama", "--mesh", "pp=2", "--schedule")
    given = ["plan", "--machine", "two.toml", "--sequence-length", "32", *map(str, words)]
    assert main([*given, "without_flush", "--script"]) == 2
    assert "infinity train does not run the schedule" in capsys.readouterr().err
    assert main([*given, "1F1B", "--optim", "muon", "--script"]) == 2
    assert "--optim muon does not go with --mesh pp=2" in capsys.readouterr().err
    assert 'pipeline_schedule = "GPipe"' in script(capsys, *words, "GPipe")
