"""`infinity run`: scripts that know nothing of Infinity print what they print without it.

Words used here:

**script**: a file of tests/support/scripts, which runs in this process, as `runpy` runs it.
**told**: what the command says of wrapped models, with ``--json``.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from ranks import run_torchrun

from infinity.tools.cli import main

ROOT = Path(__file__).parents[3]
SCRIPTS = ROOT / "tests" / "support" / "scripts"
HOMES = ("device", "host", "nvme")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A folder to work in, and the state of the process that a script may change."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    with torch.random.fork_rng():
        yield tmp_path


def plain(script: str, *words: str) -> str:
    """What the script prints by itself."""
    path = str(SCRIPTS / script)
    sys.argv = [path, *words]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


def at_home(home: str, script: str, *words: str, options: Sequence[str] = ()) -> str:
    """What the script prints under the command."""
    line = ["run", "--params", home, "--optimizer", home, *options, str(SCRIPTS / script), *words]
    if home == "nvme":
        line[1:1] = ["--nvme-path", "."]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(line) == 0
    return printed.getvalue()


@pytest.mark.parametrize("home", HOMES)
def test_a_classifier_prints_the_same(home, capfd):
    """Method: options of its own, an optimizer without a fused kernel, dropout, a batch norm, a
    schedule from before, an evaluation."""
    words = ["--epochs", "2", "--lr", "0.5"]
    assert at_home(home, "classify.py", *words) == plain("classify.py", *words)
    assert "at home now: Net (418 parameters) and Adadelta" in capfd.readouterr().err


def test_the_saved_weights_have_the_same_bits():
    words = ["--optimizer", "SGD", "--lr", "0.1", "--epochs", "1", "--save-model", "net.pt"]
    assert at_home("nvme", "classify.py", *words) == plain("classify.py", *words)


@pytest.mark.parametrize(
    ("home", "words"),
    [
        ("device", ["--tied=False"]),
        ("host", []),
        ("nvme", ["--micro_steps=1", "--grad_clip=0.0"]),
        pytest.param("host", ["--compile_model=True"], marks=pytest.mark.slow),
        ("nvme", ["--fused=False", "--digits=4"]),
    ],
)
def test_a_gpt_prints_the_same(home, words):
    """Method: the loss with all its digits; tied weights, micro-steps, a scaler, clipping, and a
    model that was compiled before."""
    assert at_home(home, "gpt.py", *words) == plain("gpt.py", *words)


def test_a_checkpoint_of_either_run_is_resumed_by_the_other():
    """Method: four iterations at once, plain; and from a checkpoint after the second, which the
    other kind of run saved."""
    for save, resume in ((plain, at_home), (at_home, plain)):
        first, second = (["host"] if each is at_home else [] for each in (save, resume))
        whole = save(*first, "gpt.py")
        rest = resume(*second, "gpt.py", "--init_from=resume")
        assert rest.count("iter ") == 2 and "iter 3" in whole
        again = save(*first, "gpt.py", "--init_from=resume")
        assert rest == again


@pytest.mark.parametrize("home", HOMES)
def test_an_agent_that_is_never_called_is_wrapped_as_a_whole(home, capfd):
    assert at_home(home, "ppo.py") == plain("ppo.py")
    assert "at home now: Agent (211 parameters) and Adam" in capfd.readouterr().err


def script_of(place: Path, text: str) -> str:
    (place / "script.py").write_text(text)
    return str(place / "script.py")


MODEL = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
LOOP = """
for step in range(2):
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    print("step", step)
"""
REFUSED = {
    "torch.optim.LBFGS(model.parameters())": "LBFGS",
    "torch.optim.SGD(model.parameters(), lr=0.1, differentiable=True)": "differentiable",
    "[setattr(optimizer, 'step', lambda: None), optimizer][1]": "step",
}


@pytest.mark.parametrize("made", REFUSED)
def test_an_optimizer_that_cannot_be_taken_is_told_before_the_first_step(made, place, capsys):
    """Twin: the optimizer that was replaced steps."""
    script = script_of(place, f"{MODEL}\noptimizer = {made}\n{LOOP}")
    assert main(["run", "--params", "host", "--optimizer", "host", script]) == 2
    out, err = capsys.readouterr()
    assert not out and REFUSED[made] in err and "Traceback" not in err
    assert main(["run", "--params", "host", script_of(place, MODEL + LOOP)]) == 0
    assert capsys.readouterr().out == "step 0\nstep 1\n"


def test_a_model_none_of_whose_weights_moves_is_told(place, capsys):
    """Twin: the same model in fp32, of which LBFGS is refused."""
    script = f"""{MODEL}
model.double()
optimizer = torch.optim.LBFGS(model.parameters())
def closure():
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4, dtype=model.weight.dtype)).square().mean()
    loss.backward()
    return loss
print(optimizer.step(closure).item())
"""
    assert main(["run", "--params", "host", script_of(place, script)]) == 0
    out, err = capsys.readouterr()
    assert float(out) > 0 and "no weight moves" in err and "at home now" not in err
    assert main(["run", "--params", "host", script_of(place, script.replace("double", "float"))])
    assert "LBFGS" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit", None, ""),
        ("import sys; sys.exit(0)", 0, ""),
        ("", 0, ""),
        ("import sys; sys.exit('no data')", "no data", ""),
        ("def f():\n    return {}['lr']\nf()", 1, "KeyError: 'lr'"),
        ("open('nothing')", 1, "FileNotFoundError"),
        ("import no_such_library", 1, "ModuleNotFoundError"),
    ],
)
def test_a_script_ends_as_it_ends_without_the_command(text, status, said, place, capsys):
    """Method: its exit status, and a traceback that begins with its own lines. That nothing was
    trained is told of a script that did not fail."""
    script = script_of(place, text)
    try:
        ended = main(["run", script])
    except SystemExit as stop:
        ended = stop.code
    err = capsys.readouterr().err
    assert ended == status and said in err and "infinity/tools" not in err
    assert ("no model was trained" in err) == (not status)
    assert not said or f'File "{script}", line' in err


def test_a_script_that_trains_nothing_is_told_with_json(place, capfd):
    """Twin: one that trains has its model in the list. What it prints goes to stderr."""
    for text, wrapped in (("print('hi')", []), (MODEL + LOOP, ["Linear (20 parameters) and SGD"])):
        assert main(["run", "--json", "--params", "host", script_of(place, text)]) == 0
        assert json.loads(capfd.readouterr().out) == {"wrapped": wrapped}


def test_a_module_runs_as_with_python_m(place, capsys):
    (place / "package").mkdir()
    (place / "package" / "train.py").write_text(
        "import sys\n" + MODEL + LOOP + "print(__name__, __package__, sys.argv[1:])"
    )
    assert main(["run", "--params", "host", "-m", "package.train", "-x", "--json"]) == 0
    assert capsys.readouterr().out == "step 0\nstep 1\n__main__ package ['-x', '--json']\n"


@pytest.mark.parametrize("home", HOMES)
def test_two_models_with_an_optimizer_each_print_the_same(home, capfd):
    """Method: a generator and a discriminator, and losses that reach both."""
    assert at_home(home, "gan.py") == plain("gan.py")
    err = capfd.readouterr().err
    assert "home now: Discriminator (" in err and "home now: Generator (" in err


def test_one_optimizer_of_two_models_prints_the_same(capfd):
    """Method: critics that no module contains, an actor, target copies, and an optimizer of a plain
    tensor, which steps as it is."""
    assert at_home("nvme", "two_critics.py") == plain("two_critics.py")
    err = capfd.readouterr().err
    assert "home now: Critic and Critic (258 parameters)" in err and err.count("home now") == 2


def test_a_loop_of_accelerate_prints_the_same():
    pytest.importorskip("accelerate")
    assert at_home("nvme", "accelerate_loop.py") == plain("accelerate_loop.py")


@pytest.mark.slow  # its import
def test_a_fit_of_lightning_prints_the_same(capfd):
    """Method: the first forward runs inside of `optimizer.step(closure)`."""
    pytest.importorskip("lightning")
    assert at_home("host", "lightning_fit.py") == plain("lightning_fit.py")
    assert "home now: Classifier (216 parameters)" in capfd.readouterr().err


def test_a_masked_autoencoder_prints_the_same_and_resumes():
    """Method: the second run continues from the first one's checkpoint, each way."""
    texts = []
    for run in (plain, lambda *line: at_home("nvme", *line)):
        texts.append(run("mae.py", "--epochs", "1"))
        texts.append(run("mae.py", "--epochs", "2", "--resume", "checkpoint-0.pth"))
    assert texts[:2] == texts[2:] and "Epoch: [1]  [3/4]" in texts[1]


HF = "--output_dir out --max_steps 3 --per_device_train_batch_size 2 --logging_steps 1 --use_cpu"
HF += " --report_to none --disable_tqdm true"
TRAINERS = [
    ("run_lm.py", "--do_train --do_eval --save_steps 2 --gradient_accumulation_steps 2"),
    (
        "run_classifier.py",
        "--eval_strategy steps --save_strategy steps --save_steps 1 --eval_steps 1"
        " --load_best_model_at_end true --label_smoothing_factor 0.1",
    ),
    ("preference.py", "sft --bf16 false --max_length 16"),
    ("preference.py", "dpo --bf16 false --max_length 16"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("script", "words"), TRAINERS)
def test_a_trainer_prints_the_same(script, words, place, capfd):
    """Method: all that it prints but the times; a run_lm is started twice, and resumes the second
    time."""
    pytest.importorskip("trl" if script == "preference.py" else "transformers")
    words = [*words.split(), *HF.split()]
    found = []
    for run in (plain, lambda *line: at_home("nvme", *line)):
        texts = [run(script, *words)]
        if script == "run_lm.py":
            texts.append(run(script, *words, "--max_steps", "5"))
        found.append([re.sub(r"'\w*(runtime|per_second)': '?[\d.e-]+'?", "", t) for t in texts])
        shutil.rmtree(place / "out")
    assert found[0] == found[1] and "loss" in found[0][-1]
    assert "at home now: " in capfd.readouterr().err


@pytest.mark.slow  # a process with the late device
def test_a_model_is_not_moved_whose_home_is_elsewhere(place):
    """Method: a device whose memory the host cannot read; a frozen teacher, a copy for an average
    and an evaluation before any optimizer use it. Twins: a home on the device, and no engine."""
    job = ROOT / "tests" / "support" / "jobs" / "script_late.py"
    done = subprocess.run(
        [sys.executable, str(job), str(SCRIPTS / "on_device.py"), str(place)],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["moved"] == [0, 1 << 20, 1 << 20]
    for alone, with_engine in found["texts"]:
        assert alone == with_engine and "weights at late:0" in alone and "late late" in alone


@pytest.mark.slow  # launches of ranks
@pytest.mark.timeout(600)
def test_ranks_print_the_same(place):
    """Method: torchrun, and processes that the script spawns; another seed on each rank, buffers,
    micro-batches under no_sync, and a state dict of the model and the optimizer on the first rank
    alone."""
    ours = ["-m", "infinity", "run", "--params", "nvme", "--optimizer", "host", "--nvme-path", "."]
    script = [str(SCRIPTS / "ddp.py"), "2"]
    found = []
    for command in (script, ["--no-python", sys.executable, *ours, *script]):
        done = run_torchrun(2, command, seconds=280)
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(said(done.stdout))
    done = subprocess.run(
        [sys.executable, *ours, *script],
        env=os.environ | {"MASTER_PORT": str(free_port())},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert found[0] == found[1] == said(done.stdout) and len(found[0]) == 17
    assert done.stderr.count("at home now") == 2 and "no model" not in done.stderr


@pytest.mark.slow  # launches of ranks
@pytest.mark.timeout(600)
def test_a_gpt_over_ranks_prints_the_same(place):
    """Method: the script plain under torchrun, and at two homes; its first rank alone estimates the
    loss, saves and generates. Twin: with its shard alone, it is told so before its first step, and
    ends by name when the first rank estimates."""
    ours = ["--no-python", sys.executable, "-m", "infinity", "run"]
    script = [str(SCRIPTS / "gpt.py"), "--micro_steps=4", "--digits=5"]
    found = []
    for command in (
        script,
        [*ours, "--params", "host", "--optimizer", "host", *script],
        [*ours, "--params", "nvme", "--optimizer", "nvme", "--nvme-path", ".", *script],
    ):
        done = run_torchrun(2, command, seconds=180)
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(sorted(done.stdout.splitlines()))
    assert found[0] == found[1] == found[2]
    assert len([line for line in found[0] if line.startswith(("iter", "step", "saving"))]) == 7
    sharded = ["--params", "host", "--optimizer", "host", "--shard", "parameters"]
    done = run_torchrun(2, [*ours, *sharded, *script], seconds=180)
    assert done.returncode != 0 and "all ranks must run the same modules" in done.stderr
    assert "each rank has its shard: all of them have to evaluate and save" in done.stderr


def said(text: str) -> list[str]:
    """What the ranks print, whose lines may run together."""
    return sorted(re.findall(r"\[\d\] epoch \d step \d: \d\.\d{6}|\{'0\.weight'[^}]*\}", text))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


GROUP = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from torch.nn.parallel import DistributedDataParallel as DDP
"""
OVER_RANKS = {
    "model = DDP(model, process_group=dist.new_group([0]))": "process_group",
    "model = DDP(model).register_comm_hook(None, print)": "register_comm_hook",
    "optimizer = None; model = DDP(model)": "Make the optimizer first",
    "from torch.distributed.fsdp import fully_shard; fully_shard(model)\n"
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)": "FSDP has divided",
}


@pytest.mark.parametrize("change", OVER_RANKS)
def test_what_averages_otherwise_is_told_before_the_first_step(change, place, capsys):
    """Twin: DistributedDataParallel as it is trains."""
    import torch.distributed as dist

    for text, status in ((change, 2), ("model = DDP(model)", 0)):
        try:
            made = script_of(place, MODEL + GROUP + text + LOOP)
            assert main(["run", "--params", "host", "--optimizer", "host", made]) == status
        finally:
            dist.destroy_process_group()
        out, err = capsys.readouterr()
        assert out == ("" if status else "step 0\nstep 1\n")
        assert OVER_RANKS[change] in err or not status


@pytest.mark.slow  # a process
def test_what_is_refused_in_a_spawned_process_is_told_once(place, capfd):
    """Twin: an error of the script's own there has a traceback and exit status 1."""
    for optimizer, status, said in (
        ("torch.optim.LBFGS(model.parameters())", 2, "infinity run: optimizer"),
        ("torch.optim.None_", 1, "AttributeError"),
    ):
        body = (MODEL + LOOP).replace("torch.optim.SGD(model.parameters(), lr=0.1)", optimizer)
        lines = "\n".join(f"    {line}" for line in body.splitlines())
        text = "import torch.multiprocessing as mp\ndef work(rank):\n" + lines
        text += "\nif __name__ == '__main__':\n    mp.spawn(work, nprocs=1)\n"
        assert main(["run", "--params", "host", script_of(place, text)]) == status
        out, err = capfd.readouterr()
        assert said in err and not out and ("Traceback" in err) == (status == 1)


ASKS = """
import sys
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
given = {"deepspeed": "conf/zero.json"} if "asks" in sys.argv else {}
args = TrainingArguments("out", max_steps=1, report_to=[], use_cpu=True, **given)
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
sizes |= {"num_attention_heads": 2, "vocab_size": 64}
data = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 8
Trainer(LlamaForCausalLM(LlamaConfig(**sizes)), args, train_dataset=data).train()
"""
ZERO = '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}'


@pytest.mark.parametrize("script", [ASKS, "import deepspeed", "import no_such_package"])
def test_a_script_that_asks_for_deepspeed_is_told_how_it_runs(script, place, capfd):
    """Method: what is told is done, and trains. Twin: another package that is missing is an error
    of the script."""
    pytest.importorskip("transformers")
    (place / "conf").mkdir()
    (place / "conf" / "zero.json").write_text(ZERO)
    (place / "train.py").write_text(script)
    status = main(["run", "--params", "host", "train.py", "asks"])
    err = capfd.readouterr().err
    if "no_such" in script:
        assert status == 1 and "No module named 'no_such_package'" in err
        return
    assert status == 2 and "Leave deepspeed= out" in err and "Traceback" not in err
    assert "no model was trained" not in err
    told = re.search(r"infinity (run --config \S+ train\.py)\b", err)[1]
    if script is ASKS:
        assert told == "run --config conf/zero.json train.py"
        assert main(told.split()) == 0
        assert "at home now: LlamaForCausalLM" in capfd.readouterr().err


def test_a_scheduler_of_the_json_is_told_to_be_the_scripts(place, capfd):
    """Twin: a JSON without one."""
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}
    for more in ({"scheduler": scheduler}, {}):
        (place / "ds.json").write_text(json.dumps(json.loads(ZERO) | more))
        assert main(["run", "--config", "ds.json", script_of(place, MODEL)]) == 0
        told = "WarmupLR stays constant after the warm-up. In transformers' Trainer set lr_sch"
        assert (told in capfd.readouterr().err) == bool(more)
