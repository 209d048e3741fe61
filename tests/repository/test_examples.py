"""The examples run as they stand, each in a child, with a small model of transformers' own and a
tokenizer of bytes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy
import prepared
import pytest
import strikes
import torch
from ranks import end_session, run_torchrun
from safetensors.torch import save_file

transformers = pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[2] / "examples"
SEED = 6
PORT = 29577  # of no other test


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A folder with a model of 2 layers, and a tokenizer that makes a token of each character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("model")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(
            vocab={"<end>": 0} | {letter: at + 1 for at, letter in enumerate(letters)}, merges=[]
        )
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>"
    ).save_pretrained(folder)
    torch.manual_seed(SEED)
    config = transformers.GPT2Config(
        vocab_size=257,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        attn_pdrop=0.0,
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    (folder / "text.txt").write_text("To be, or not to be, that is the question. " * 100)
    return folder


def run(name: str, *words: object, cwd: Path) -> str:
    variables = {"INFINITY_CACHE": str(cwd / "cache")}
    done = prepared.run(
        EXAMPLES / name, *words, folder=cwd, variables=variables, imports=prepared.LANGUAGE_MODELS
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def losses(said: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", said)]


def test_full_finetune(model, tmp_path):
    """Its result is one that transformers loads, and its weights are others than the base's."""
    found = losses(
        run(
            "full_finetune.py",
            model,
            model / "text.txt",
            "out",
            "--steps",
            4,
            "--length",
            32,
            cwd=tmp_path,
        )
    )
    assert len(found) == 4
    base, tuned = (
        transformers.AutoModelForCausalLM.from_pretrained(folder)
        for folder in (model, tmp_path / "out")
    )
    assert not torch.equal(base.lm_head.weight, tuned.lm_head.weight)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("be").input_ids


@pytest.mark.slow
def test_lora(model, tmp_path):
    peft = pytest.importorskip("peft")
    run("lora.py", model, model / "text.txt", "out", "--steps", 2, "--length", 32, cwd=tmp_path)
    peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(model), tmp_path / "out"
    )


@pytest.fixture
def tokens(tmp_path) -> str:
    numpy.tile(numpy.arange(1, 200, dtype=numpy.uint32), 20).tofile(tmp_path / "tokens.bin")
    return "tokens.bin"


@pytest.mark.slow
@pytest.mark.parametrize("start", [".", "config.json"], ids=["continued", "fresh"])
def test_pretraining_goes_on_with_the_same_bits(start, model, tokens, tmp_path):
    """Method: six steps at once, and as three and three: the printed losses are equal."""

    def train(checkpoint: str, steps: int) -> str:
        words = (model / start, tokens, checkpoint, "--steps", steps, "--length", 32)
        return run("pretraining.py", *words, cwd=tmp_path)

    whole = losses(train("whole", 6))
    first, second = train("parts", 3), train("parts", 6)
    assert "continuing from step 3" in second and len(whole) == 6
    assert losses(first) + losses(second) == whole


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_pretraining_on_two_machines(model, tokens, tmp_path):
    """Method: a torchrun for each machine, which meet at a port, in one folder; then one process
    goes on from what both saved."""
    script = [EXAMPLES / "pretraining.py", model, tokens, "saved", "--steps", 2, "--length", 32]
    meeting = ["--nnodes", 2, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{PORT}"]
    command = [sys.executable, "-m", "torch.distributed.run", *meeting, "--nproc-per-node", 1]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "INFINITY_CACHE": str(tmp_path / "cache")}
    machines = [
        subprocess.Popen(
            list(map(str, [*command, *script])),
            cwd=tmp_path,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for _ in range(2)
    ]
    try:
        told = [machine.communicate(timeout=200) for machine in machines]
    finally:
        for machine in machines:
            end_session(machine)
    assert [machine.returncode for machine in machines] == [0, 0], told
    assert sorted(len(losses(out)) for out, _ in told) == [0, 2]
    words = (model, tokens, "saved", "--steps", 3, "--length", 32)
    assert "continuing from step 2" in run("pretraining.py", *words, cwd=tmp_path)


def save_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow
def test_dpo(model, tmp_path):
    """Also: what is saved loads with its tokenizer, and is not the base any more."""
    for name in ("trl", "datasets"):
        pytest.importorskip(name)
    save_lines(
        tmp_path / "pairs.jsonl",
        [{"prompt": f"{at} or", "chosen": " not to be", "rejected": " so"} for at in range(8)],
    )
    run("dpo.py", model, "pairs.jsonl", "out", "--steps", 2, "--length", 32, cwd=tmp_path)
    check_trained(model, tmp_path / "out")


@pytest.mark.slow
def test_grpo(model, tmp_path):
    """The reward is whether a completion of two bytes has one that is no text: of fresh weights,
    some do."""
    for name in ("trl", "datasets"):
        pytest.importorskip(name)
    save_lines(
        tmp_path / "prompts.jsonl",
        [{"prompt": f"{at} or", "answer": "\ufffd"} for at in range(8)],
    )
    run("grpo.py", model, "prompts.jsonl", "out", "--steps", 4, "--length", 2, cwd=tmp_path)
    check_trained(model, tmp_path / "out")


def check_trained(base: Path, out: Path) -> None:
    before, after = map(transformers.AutoModelForCausalLM.from_pretrained, (base, out))
    assert not torch.equal(before.lm_head.weight, after.lm_head.weight)
    assert transformers.AutoTokenizer.from_pretrained(out)("be").input_ids


@pytest.mark.slow
def test_diffusion(tmp_path):
    diffusers = pytest.importorskip("diffusers")
    image = pytest.importorskip("PIL.Image")
    diffusers.UNet2DModel(
        sample_size=16,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    ).save_pretrained(tmp_path / "unet")
    (tmp_path / "pictures").mkdir()
    for at in range(3):
        image.new("RGB", (20, 12), (60 * at, 80, 200)).save(tmp_path / "pictures" / f"{at}.png")
    found = losses(run("diffusion.py", "unet", "pictures", "out", "--steps", 2, cwd=tmp_path))
    assert len(found) == 2
    before, after = (
        diffusers.UNet2DModel.from_pretrained(tmp_path / name) for name in ("unet", "out")
    )
    assert not torch.equal(before.conv_in.weight, after.conv_in.weight)


def flux(diffusers):
    model = diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    return model, {
        "hidden_states": torch.randn(1, 16, 4),
        "encoder_hidden_states": torch.randn(1, 6, 32),
        "pooled_projections": torch.randn(1, 32),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(6, 3),
    }


def wan(diffusers):
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    )
    return model, {
        "hidden_states": torch.randn(1, 4, 2, 8, 8),
        "encoder_hidden_states": torch.randn(1, 6, 16),
    }


def qwen(diffusers):
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 4, 8),
    )
    return model, {
        "hidden_states": torch.randn(1, 16, 16),
        "encoder_hidden_states": torch.randn(1, 6, 16),
        "encoder_hidden_states_mask": torch.ones(1, 6, dtype=torch.int64),
    }


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
@pytest.mark.parametrize(
    "make, times", [(flux, 1), (qwen, 1), (wan, 1000)], ids=["flux", "qwen", "wan"]
)
def test_diffusion_transformers(make, times, optimizer, tmp_path):
    """Method: a class of diffusers, built small, by a script that names none; its result is one
    that diffusers loads, and its weights are others."""
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(SEED)
    model, inputs = make(diffusers)
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "samples").mkdir()
    save_file(inputs, tmp_path / "samples" / "0.safetensors")
    if make is qwen:
        arguments = {"img_shapes": [[[1, 4, 4]]]}
        (tmp_path / "samples" / "arguments.json").write_text(json.dumps(arguments))
    words = ("model", "samples", "out", "--steps", 3, "--times", times, "--optimizer", optimizer)
    found = losses(run("diffusion_transformer.py", *words, cwd=tmp_path))
    assert len(found) == 3
    before, after = (
        diffusers.AutoModel.from_pretrained(str(tmp_path / name)).state_dict()
        for name in ("model", "out")
    )
    assert any(not torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.slow
@pytest.mark.parametrize("window", [(), ("--window", 16)], ids=["all", "window"])
def test_long_context(window, model, tmp_path):
    """Method: as many tokens as the small model takes. The twin: a window has another loss."""
    words = (model, model / "text.txt", "out", "--steps", 2, "--length", 64, *window)
    found = losses(run("long_context.py", *words, cwd=tmp_path))
    assert len(found) == 2
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_long_context_over_two_ranks(model, tmp_path, monkeypatch):
    """Method: the losses are those of one process, whose sequences are whole."""
    more = ["--steps", "2", "--length", "64", "--window", "16"]
    words = [str(model), str(model / "text.txt")]
    alone = losses(run("long_context.py", *words, "alone", *more, cwd=tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INFINITY_CACHE", str(tmp_path / "cache"))
    shutil.copy(EXAMPLES / "long_context.py", tmp_path / "job.py")
    done = run_torchrun(2, ["job.py", *words, "out", *more])
    assert done.returncode == 0, done.stderr[-2000:]
    assert losses(done.stdout) == pytest.approx(alone, abs=2e-4)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.slow
def test_streaming_inference_writes_what_the_plain_model_writes(model, tmp_path):
    """Method: two prompts of one length, so that nothing is padded, against `generate` of
    transformers alone."""
    prompts = ["To be, or", "the quest"]
    (tmp_path / "scratch").mkdir()
    said = run(
        "streaming_inference.py",
        model,
        *prompts,
        "--tokens",
        5,
        "--scratch",
        "scratch",
        cwd=tmp_path,
    )
    tokenizer, plain = (
        transformers.AutoTokenizer.from_pretrained(model),
        transformers.AutoModelForCausalLM.from_pretrained(model),
    )
    written = plain.generate(
        **tokenizer(prompts, return_tensors="pt"), max_new_tokens=5, do_sample=False, pad_token_id=0
    )
    expected = "\n".join(tokenizer.batch_decode(written, skip_special_tokens=True))
    assert said.startswith(expected) and not list((tmp_path / "scratch").iterdir())
    assert int(re.search(r"(\d+) bytes read", said)[1]) > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(EXAMPLES / "ranks.py", tmp_path / "job.py")
    done = run_torchrun(2, ["job.py", "saved", "--steps", "2"])
    assert done.returncode == 0 and (tmp_path / "saved" / "manifest.json").exists(), done.stderr[
        -2000:
    ]


@pytest.mark.slow
def test_the_notebook_runs_and_its_pictures_are_drawn(tmp_path):
    """Method: its cells one after the other, in one child; what a cell ends with is shown as a
    notebook would. No notebook is installed."""
    cells = [
        cell
        for cell in json.loads((EXAMPLES / "tour.ipynb").read_text())["cells"]
        if cell["cell_type"] == "code"
    ]
    program = """
import ast, json, sys
names = {}
for source in json.load(open(sys.argv[1])):
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "cell", "exec"), names)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
        print(value._repr_svg_() if hasattr(value, "_repr_svg_") else repr(value))
"""
    (tmp_path / "cells.json").write_text(json.dumps(["".join(cell["source"]) for cell in cells]))
    command = [sys.executable, "-c", program, "cells.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert (
        done.returncode == 0 and done.stdout.count("</svg>") == 3 and "nvme->host" in done.stdout
    ), done.stderr[-2000:]


# Stand-ins of Slurm's commands. srun ends when it gets a signal, as a step does.
SLURM = {
    "scontrol": '[ "$1" = requeue ] && echo "$@" || { echo first; echo second; }',
    "scancel": 'echo scancel "$@"',
    "srun": 'trap "kill \\$!; echo saved; exit 1" TERM; echo "$@"\n'
    "sleep $LASTS > /dev/null & wait\n"
    '[ -z "$REFUSES" ] || { mkdir -p "$INFINITY_CACHE"; echo no >> "$INFINITY_REFUSED"; }\n'
    "exit $ENDS",
}


def slurm_script(folder: Path, **more: str) -> subprocess.Popen:
    """Starts `slurm.sh` between stand-ins of Slurm's commands, which say what they were asked."""
    for name, text in SLURM.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    variables = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "x",
        "LASTS": "30",
        "ENDS": "0",
        "SLURM_SUBMIT_DIR": str(folder),
        "REFUSES": "",
    }
    return subprocess.Popen(
        ["bash", EXAMPLES / "slurm.sh", "train.py", "saved"],
        env=variables | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def test_the_slurm_script_starts_torchrun_on_every_machine(tmp_path):
    """Method: bash runs it with stand-ins for Slurm's commands: the ranks of all machines meet at
    the first, in a container if one is named. A job that is cancelled ends, and is not queued."""
    job = slurm_script(tmp_path, IMAGE="tuned.sqsh")
    while (line := job.stdout.readline()) and "torchrun" not in line:
        pass
    assert (
        "--nnodes 2 --nproc-per-node 8" in line
        and "first:29500" in line
        and "--container-image tuned.sqsh" in line
        and line.split()[-2:] == ["train.py", "saved"]
    )
    job.terminate()
    subprocess.run(
        ["pkill", "-TERM", "--parent", str(job.pid), "srun"], check=True
    )  # as Slurm does
    said = job.communicate(timeout=20)[0]
    assert "saved" in said and "requeue" not in said


def test_the_slurm_script_saves_before_its_time_is_over_and_is_queued_again(tmp_path):
    """Method: the script gets Slurm's signal. It has the ranks save, which torchrun does not hear
    of, and then queues the job again; it ends when the step has ended."""
    job = slurm_script(tmp_path, SAVE_SECONDS="0.1", LASTS="1")
    while (line := job.stdout.readline()) and "torchrun" not in line:
        pass
    assert 'trap "" USR1; exec torchrun' in line
    job.send_signal(signal.SIGUSR1)
    said = job.communicate(timeout=20)[0].splitlines()
    assert said == ["scancel --signal=USR1 7", "requeue 7"] and job.returncode == 0


@pytest.mark.parametrize(
    ("ends", "least", "restarts", "is_queued"),
    [
        ("1", "-1", "0", True),
        ("137", "-1", "3", True),
        ("1", "60", "0", False),  # within a minute, as a wrong option
        ("1", "-1", "100", False),
        ("0", "-1", "0", False),
    ],
)
def test_the_slurm_script_queues_a_job_that_failed_after_a_while(
    tmp_path, ends, least, restarts, is_queued
):
    """Method: the step ends with a status. The last three cases are twins."""
    more = {"LASTS": "0", "ENDS": ends, "LEAST_SECONDS": least, "SLURM_RESTART_COUNT": restarts}
    job = slurm_script(tmp_path, **more)
    assert ("requeue 7" in job.communicate(timeout=20)[0]) == is_queued
    assert job.returncode == int(ends)


def test_the_slurm_script_queues_no_job_that_was_refused(tmp_path):
    """Method: the step says that it was refused, after a while, as by a wrong option that torchrun
    has tried four times. Twin: the same failure of a job that says nothing is queued again."""
    more = {"LASTS": "0", "ENDS": "1", "LEAST_SECONDS": "-1"}
    for refuses in ("yes", ""):
        job = slurm_script(tmp_path, **more, REFUSES=refuses)
        said = job.communicate(timeout=20)[0]
        assert ("requeue 7" in said) != bool(refuses) and job.returncode == 1


def test_stopping_waits_as_long_as_the_page_says():
    """Method: the seconds of the page's table, in the files. Twin: Docker's own ten are less."""
    page = (EXAMPLES.parent / "docs" / "returns.md").read_text()
    told = {
        "Dockerfile": ("--stop-timeout 300", 300),
        "compose.yaml": ("stop_grace_period: 5m", 5 * 60),
        "kubernetes.yaml": ("terminationGracePeriodSeconds: 300", 300),
    }
    for name, (line, seconds) in told.items():
        assert line in (EXAMPLES / name).read_text() and line in page
        assert seconds == 300 and f"`{name}`: " in page
    assert "| `docker stop` | 10 s |" in page


@pytest.mark.slow
def test_ray_train_gives_the_bits_of_torchrun(tmp_path):
    """Method: `ray_train.py` with two workers on this machine, and torchrun with two ranks: the
    same files. The twin has another seed. What happens to killed workers: `test_strikes.py`."""
    pytest.importorskip("ray", reason="ray is not installed")
    job = strikes.Job(tmp_path / "job", 6)
    places = {"disk/saved": tmp_path / "saved"}
    places |= {name: job.folder / name for name in ("model.json", "text.txt", "out")}
    options = [str(places.get(each, each)) for each in job.options]
    by_ray = [sys.executable, str(EXAMPLES / "ray_train.py"), "2", *options]
    done = subprocess.run(by_ray, cwd=job.folder, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    found = job.saved()
    shutil.rmtree(tmp_path / "saved")
    for seed, is_same in (("0", True), ("1", False)):
        out = ["--overwrite", "--out", str(tmp_path / f"out-{seed}"), "--seed", seed]
        words = [each for each in options if each != "--resume"]
        by_torchrun = run_torchrun(2, ["-m", "infinity", "train", *words, *out])
        assert by_torchrun.returncode == 0, by_torchrun.stderr[-3000:]
        model = tmp_path / f"out-{seed}" / "model.safetensors"
        assert (model.read_bytes() == found["model.safetensors"]) == is_same


def test_every_example_is_listed_and_tested():
    listed = (EXAMPLES / "README.md").read_text()
    tests = Path(__file__).read_text()
    for path in EXAMPLES.iterdir():
        if path.suffix in (".py", ".sh", ".ipynb"):
            assert f"`{path.name}" in listed and path.name in tests
