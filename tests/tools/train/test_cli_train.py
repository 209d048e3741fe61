"""`infinity train`, through `infinity.tools.cli.main` in this process: a tiny model (2 layers, 32
wide) on a folder of text it can learn in a few steps, with parameters and optimizer at home on
NVMe."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import prepared
import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("rich")

import infinity.tools.cli
from infinity.core.machine.sizes import format_nbytes
from infinity.errors import ConfigError
from infinity.ext.checkpoint import interval
from infinity.tools.train import corpus as corpora
from infinity.tools.train import job, places, schedules, settings
from infinity.tools.train import model as model_module
from infinity.tools.train import train as train_module

TINY = {
    "model_type": "gpt2",
    "vocab_size": 256,
    "n_positions": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "embd_pdrop": 0.1,  # a resumed job must draw the same masks
    "resid_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
STEPS = 8
SEED = 3


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a model, text and a disk; also the current directory. One thread is enough for
    a tiny model."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    Path("model.json").write_text(json.dumps(TINY))
    Path("text").mkdir()
    for number in range(3):
        Path("text", f"{number}.txt").write_text(
            f"the quick brown fox {number} jumps over the lazy dog\n" * 200
        )
    Path("nvme").mkdir()
    yield tmp_path
    torch.set_num_threads(threads)


OPTIONS = {
    "--model": "model.json",
    "--data": "text",
    "--params": "nvme",
    "--optimizer": "nvme",
    "--nvme-path": "nvme",
    "--steps": STEPS,
    "--batch-size": 4,
    "--sequence-length": 32,
    "--lr": 0.01,
    "--warmup-steps": 2,
    "--eval-batches": 2,
    "--sample-bytes": 8,
    "--seed": SEED,
}


def run(*flags, **changes):
    """Exit status of the tiny job. A change `batch_size=2` is `--batch-size 2`; `None` leaves the
    option out."""
    options = OPTIONS | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    pairs = [
        str(word)
        for option, value in options.items()
        if value is not None
        for word in (option, value)
    ]
    print("seed", SEED)
    return infinity.tools.cli.main(["train", *flags, *pairs])


@pytest.fixture
def report(capsys):
    """Runs the tiny job to its end and returns its JSON report."""

    def run_for_report(*flags, **changes):
        capsys.readouterr()
        status = run("--json", *flags, **changes)
        captured = capsys.readouterr()
        assert status == 0, captured.err
        return json.loads(captured.out.splitlines()[-1])

    return run_for_report


def weights(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()


def assert_same_bits(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


# --- how long ---


@pytest.fixture
def step_takes(monkeypatch):
    """Sets what a step is predicted to take, in seconds."""
    return lambda seconds: monkeypatch.setattr(
        train_module, "predict_step", lambda job, compute: seconds
    )


@pytest.mark.parametrize("minutes, seconds, steps", [(1, 12.0, 5), (0.5, 4.0, 8), (0.01, 50.0, 1)])
def test_minutes_become_the_steps_of_this_machine(
    place, report, capsys, step_takes, minutes, seconds, steps
):
    """Method: predicted steps of so many seconds, as a clock that does not run. The bits are those
    of as many --steps; twin: a slower machine takes fewer."""
    step_takes(seconds)
    found = report(steps=None, minutes=minutes, warmup_steps=None, eval_batches=1)
    assert found["steps"] == steps
    plain = report(steps=steps, warmup_steps=None, eval_batches=1)
    assert found["losses"] == plain["losses"] and found["options"] == plain["options"]
    step_takes(seconds * steps)
    assert report(steps=None, minutes=minutes, warmup_steps=None, eval_batches=1)["steps"] == 1


def test_the_steps_are_told_before_the_first_one(place, capsys, step_takes):
    step_takes(20.0)
    assert run(steps=None, minutes=1, warmup_steps=None, eval_batches=1) == 0
    told = capsys.readouterr().out
    assert told.index("--minutes 1: 3 steps, which should take about") < told.index("step 1/3")


def test_a_resumed_job_has_the_steps_that_were_chosen_at_its_start(place, report, step_takes):
    """Method: the machine is ten times faster when the job goes on. Twin: without --resume."""
    step_takes(20.0)
    whole = report(steps=None, minutes=1, warmup_steps=None, checkpoint="saved", eval_batches=1)
    step_takes(2.0)
    more = {"steps": None, "minutes": 1, "warmup_steps": None, "eval_batches": 1}
    found = report("--resume", checkpoint="saved", **more)
    assert (found["first_step"], found["steps"]) == (3, 3) and whole["steps"] == 3
    assert report(**more)["steps"] == 30


def test_minutes_and_steps_are_one_too_many(place, capsys):
    assert run(minutes=1) == 2
    assert "--steps and --minutes both say how long to train" in capsys.readouterr().err
    assert run(steps=None, epochs=1, minutes=1) == 2
    assert "--epochs and --minutes both say" in capsys.readouterr().err


# --- the whole job ---


def test_report_has_every_number_and_the_loss_falls(place, report):
    """One run; the fields are those the documentation names."""
    result = report(out="trained", steps=30)
    assert result["held_out_loss_after"] < 0.8 * result["held_out_loss_before"]
    assert result["bits_per_byte_after"] == pytest.approx(
        result["held_out_loss_after"] / 0.6931471805599453
    )
    assert len(result["losses"]) == result["steps"] == 30 and result["first_step"] == 0
    assert (
        result["tokens_per_second"] > 0
        and result["step_seconds"] > 0
        and 0 <= result["stall_share"] <= 1
    )
    edges = {"nvme->host", "host->nvme", "host->device", "device->host", "data"}
    assert set(result["edges"]) == edges
    assert sum(result["shares"].values()) == pytest.approx(1.0)
    for moved in result["edges"].values():
        assert set(moved) == {"nbytes", "busy_seconds", "stall_seconds"}
    assert (
        result["edges"]["nvme->host"]["nbytes"] > 0 and result["edges"]["host->nvme"]["nbytes"] > 0
    )
    assert set(result["tiers"]) == {"device", "host", "nvme"}
    for tier in result["tiers"].values():
        assert tier["peak_nbytes"] <= tier["planned_nbytes"]
    assert result["process_peak_nbytes"] > result["tiers"]["host"]["peak_nbytes"]
    assert result["disk"]["read"]["measured_bytes_per_second"] > 0 and result["disk"]["share"] > 0
    assert result["bottleneck"] and result["out"] == "trained" and isinstance(result["sample"], str)


def test_the_human_report_goes_to_stdout_and_names_the_same_things(place, capsys):
    assert run(out="trained") == 0
    shown = capsys.readouterr().out
    for words in (
        "held-out loss",
        "bits per byte",
        "tokens/s",
        "stalled",
        "nvme->host",
        "budget",
        "disk",
        "A sample",
        "process: ",
    ):
        assert words in shown
    assert f"step {STEPS}/{STEPS}" in shown


def test_saved_folder_gives_the_reported_loss_in_plain_transformers(place, report):
    """The folder is loaded without the engine and evaluated on the same held-out windows."""
    result = report(out="trained", dtype="bf16")
    model_module = transformers.AutoModelForCausalLM.from_pretrained("trained").eval()
    assert model_module.dtype == torch.bfloat16 and model_module.config.use_cache
    corpus = corpora.read_corpus(
        corpora.find_text_files("text"), sequence_length=32, limit_nbytes=1 << 20
    )
    batches = corpora.Batches(corpus=corpus, batch_size=4, sequence_length=32, seed=SEED)
    assert job.held_out_loss(model_module, batches.held_out(2)) == result["held_out_loss_after"]


def test_homes_budgets_and_recomputation_never_change_a_bit(place, report):
    """The same job with its state on the host, and with activations recomputed in the backward."""
    reference = report(out="nvme-home")
    assert (
        report(out="host-home", params="host", optimizer="host", nvme_path=None)["losses"]
        == reference["losses"]
    )
    assert report("--gradient-checkpointing", out="recomputed")["losses"] == reference["losses"]
    assert_same_bits(weights("host-home"), weights("nvme-home"))
    assert_same_bits(weights("recomputed"), weights("nvme-home"))


def test_a_saved_folder_with_a_tokenizer_is_fine_tuned_with_it(place, report):
    """A word-level tokenizer of the text's own words, saved beside the weights of a first run."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    report(out="trained")
    words = sorted(set("the quick brown fox jumps over the lazy dog 0 1 2".split()))
    tokenizer = Tokenizer(
        models.WordLevel({word: at for at, word in enumerate(["?", "end", *words])}, unk_token="?")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="end", unk_token="?"
    )
    fast.save_pretrained("trained")
    result = report(model="trained", out="tuned", prompt="the quick")
    assert result["data"]["byte_level"] is False and result["bits_per_byte_after"] is None
    # 10 words a line, 200 lines a file, 3 files, and one "end" after each
    assert result["data"]["train_tokens"] + result["data"]["held_out_tokens"] == 3 * (10 * 200 + 1)
    assert result["held_out_loss_after"] < result["held_out_loss_before"]
    assert transformers.AutoTokenizer.from_pretrained("tuned").get_vocab() == fast.get_vocab()


def test_engine_options_of_a_file_hold_and_the_command_line_goes_over_them(place, report):
    Path("engine.toml").write_text(
        'params = "nvme"\noptimizer = "nvme"\nmoments = "bf16"\nmax_grad_norm = 0.5\n'
    )
    if_left_out = {"params": None, "optimizer": "host"}
    result = report("--config", "engine.toml", **if_left_out, moments="fp32")
    assert result["homes"] == {"params": "nvme", "optimizer": "host"}
    assert result["options"]["moments"] == "fp32" and result["options"]["max_grad_norm"] == 0.5


# --- interrupted and resumed ---


def interrupt_at(step, monkeypatch, signum=signal.SIGINT):
    """The signal arrives while `step` is being computed."""
    train_step = job.train_step

    def with_signal(work, at):
        if at == step:
            os.kill(os.getpid(), signum)
        return train_step(work, at)

    monkeypatch.setattr(job, "train_step", with_signal)


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_job_resumes_to_the_same_bits(place, report, capsys, signum, status):
    """SIGINT in the middle of step 3 of 8; the resumed job must end where one that was left alone
    ends."""
    whole = report(out="whole")
    handler = signal.getsignal(signum)
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at(3, patch, signum)
        assert run("--json", checkpoint="saved", out="broken") == status
    assert (
        json.loads(capsys.readouterr().out.splitlines()[-1])["steps"] == 4
    )  # the step it was in is finished
    assert signal.getsignal(signum) == handler and not Path("broken").exists()
    resumed = report("--resume", checkpoint="saved", out="resumed")
    assert resumed["first_step"] == 4 and resumed["losses"] == whole["losses"][4:]
    for name in ("held_out_loss_before", "held_out_loss_after"):
        assert resumed[name] == whole[name]
    assert_same_bits(weights("resumed"), weights("whole"))


@pytest.mark.parametrize("at", ["read_inputs", "make_job", "held_out"])
def test_an_interrupt_before_the_first_step_says_what_it_leaves(at, place, capsys, monkeypatch):
    """Method: at three places before it, without a checkpoint and beside one. What is told is done.
    Twins: an interrupt behind the last step; one with nothing to resume from."""

    def interrupts(*args, **options):
        raise KeyboardInterrupt

    began = "interrupted before the first step: "
    with monkeypatch.context() as patch:
        patch.setattr(train_module, at, interrupts)
        assert run(checkpoint="saved") == 130
        told = "nothing was saved; start with the same command, without --resume"
        assert f"infinity train: {began}{told}" in capsys.readouterr().err
        assert run() == 130 and capsys.readouterr().err.rstrip().endswith("the same command")
    assert infinity.tools.cli.main(["train", "--resume", "--checkpoint", "saved"]) == 2
    assert "start it with its first command, without --resume" in capsys.readouterr().err
    assert run(checkpoint="saved", steps=2) == 0
    with monkeypatch.context() as patch:
        patch.setattr(train_module, "read_inputs", interrupts)
        assert run("--resume", checkpoint="saved") == 130
        assert f"{began}saved is as it was; start with the same" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(train_module, "make_report", interrupts)
        assert run("--resume", checkpoint="saved", steps=2) == 130
        assert "infinity train: interrupted\n" in capsys.readouterr().err


def test_a_job_that_died_repeats_the_steps_after_its_checkpoint(place, report):
    """Dies in step 5 with the last checkpoint after step 3: nothing of steps 3 and 4 may be left in
    the weights."""
    whole = report(out="whole")

    def die(work, at):
        if at == 5:
            job.finish_save(work)  # on a busy machine it takes longer than two steps
            raise ZeroDivisionError("power cut")
        return train_step(work, at)

    train_step = job.train_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "train_step", die)
        with pytest.raises(ZeroDivisionError):
            run(checkpoint="saved", checkpoint_every=3)
    resumed = report("--resume", checkpoint="saved", out="resumed")
    assert resumed["first_step"] == 3 and resumed["losses"] == whole["losses"][3:]
    assert_same_bits(weights("resumed"), weights("whole"))


def test_the_report_has_what_infinity_cost_reads(place, report, capsys):
    """Method: a job with a checkpoint, and one that goes on from it: seconds of a save and of a
    load, bytes of the folder, tokens a second by GPU; `infinity cost` takes the file. Twin: without
    a checkpoint the seconds are not known, and cost says so where it needs them."""
    first = report(checkpoint="saved")
    assert first["load_seconds"] is None and first["save_seconds"] > 0
    files = [each for each in Path("saved").rglob("*") if each.is_file()]
    assert first["checkpoint_nbytes"] == sum(each.stat().st_size for each in files) > 0
    found = report("--resume", checkpoint="saved", steps=STEPS + 2)
    assert found["load_seconds"] > 0
    assert found["gpus"] == {"cpu:1": found["tokens_per_second"]}
    Path("run.json").write_text(json.dumps(found))
    Path("prices.csv").write_text(
        "cloud,zone,instance,gpu,count,market,time,dollars_per_hour\nbox,a,m,CPU,1,spot,,1\n"
    )
    cost = ["cost", "--profile", "run.json", "--prices", "prices.csv", "--tokens", "1M", "--json"]
    assert (
        infinity.tools.cli.main([*cost, "--between-failures", "6h", "--move", "seconds=auto"]) == 0
    )
    (offer,) = json.loads(capsys.readouterr().out)["offers"]
    assert 0 < offer["tokens_per_second"] < found["tokens_per_second"]
    Path("run.json").write_text(json.dumps(report()))
    assert infinity.tools.cli.main([*cost, "--between-failures", "6h"]) == 2
    assert "train with --checkpoint" in capsys.readouterr().err


def test_a_job_saves_as_often_as_a_share_of_its_time_allows(place, report, monkeypatch):
    """Claim: with nothing said, too. The twin: after so many steps if that is said."""
    monkeypatch.setattr(interval, "FIRST_STEPS", 2)
    monkeypatch.setattr(interval, "FIRST_SECONDS", 0.0)
    saved = []
    save = job.save_checkpoint

    def noted(work, **options) -> None:
        saved.append(work.next_step)
        save(work, **options)

    monkeypatch.setattr(job, "save_checkpoint", noted)
    report(checkpoint="share", checkpoint_overhead="1%")
    assert saved[0] == 2 and saved[-1] == STEPS and len(saved) < 6
    saved.clear()
    report(checkpoint="every", checkpoint_every=2)
    assert saved[:3] == [2, 4, 6]


@pytest.mark.parametrize("optim", ["adafactor", "muon"])
def test_a_job_of_another_optimizer_learns_and_resumes_to_the_same_bits(place, report, optim):
    """The twin: AdamW has other losses, and does not go on from such a checkpoint."""
    whole = report(out="whole", optim=optim)
    assert whole["losses"][-1] < whole["losses"][0] and whole["losses"] != report()["losses"]
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at(3, patch, signal.SIGINT)
        assert run(checkpoint="saved", optim=optim) == 130
    assert run("--resume", checkpoint="saved", optim="adamw") == 2
    resumed = report("--resume", checkpoint="saved", out="resumed", optim=optim)
    assert resumed["losses"] == whole["losses"][4:]
    assert_same_bits(weights("resumed"), weights("whole"))


def test_data_of_the_users_own_is_measured_and_all_of_the_other_is_learned(place, report, capsys):
    """Method: --eval-data and --eval-every 2, stopped after four steps and resumed: the losses and
    the weights are those of a whole job, whose bits the measuring leaves alone. Twins: without
    --eval-data, the part held out is measured; a resumed job may not learn it."""
    Path("other.txt").write_text("a lazy dog sleeps under the brown fox\n" * 40)
    own = {"eval_data": "other.txt", "eval_every": 2}
    whole = report(out="whole", **own)
    capsys.readouterr()
    plain = report(out="plain", eval_data="other.txt")
    assert whole["losses"] == plain["losses"] and plain["held_out_losses"] == {}
    assert_same_bits(weights("whole"), weights("plain"))
    assert list(whole["held_out_losses"]) == ["2", "4", "6"]
    assert whole["data"]["held_out_source"] == "other.txt"
    assert whole["data"]["held_out_tokens"] == Path("other.txt").stat().st_size
    sizes = [path.stat().st_size + 1 for path in Path("text").iterdir()]
    assert whole["data"]["train_tokens"] == sum(sizes)
    assert run("--overwrite", checkpoint="saved", steps=4, **own) == 0
    out = capsys.readouterr().out
    assert "of other.txt held out" in out and "after step 2" in out
    assert run("--resume", checkpoint="saved", eval_share="3%") == 2
    assert "--eval-data (now --eval-share 0.03)" in capsys.readouterr().err
    again = report("--resume", checkpoint="saved", out="again", **own)
    tested = report(eval_share=None)
    assert again["held_out_losses"].keys() == {"6"} and tested["losses"] != whole["losses"]
    assert tested["data"]["held_out_source"] == "text"


def test_a_share_of_the_text_is_held_out(place, report, capsys):
    """Twins: 3 % without the option; a share beside a file, too much, and samples are refused."""
    for share, given in ((0.25, "25%"), (0.03, None)):
        told = report(steps=1, warmup_steps=0, eval_share=given)["data"]
        whole = told["train_tokens"] + told["held_out_tokens"]
        assert told["held_out_tokens"] == int(share * whole)
    Path("pairs.jsonl").write_text(json.dumps({"prompt": "1+1?", "completion": "2."}))
    Path("empty.txt").write_text("")
    for words, said in (
        ({"eval_share": "25%", "eval_data": "text"}, "give one of them"),
        ({"eval_share": "130%"}, "is not a share of the data"),
        ({"eval_data": "pairs.jsonl"}, "has samples, and --data running text"),
        ({"eval_data": "empty.txt"}, "--eval-data: empty.txt is empty"),
        ({"eval_data": "none.txt"}, "Give --eval-data a file"),
    ):
        assert run(**words) == 2
        assert said in capsys.readouterr().err


def test_resume_with_nothing_to_resume_from_starts_fresh_and_says_so(place, capsys):
    assert run("--resume", checkpoint="saved", steps=2) == 0
    assert "No checkpoint in saved: starting fresh" in capsys.readouterr().out
    assert run("--resume", checkpoint="saved", steps=2) == 0
    assert "Continuing from step 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": SEED + 1}, f"seed {SEED} (now {SEED + 1})"),
        ({"batch_size": 2}, "--batch-size 4 (now 2)"),
        ({"optim": "muon"}, "--optim adamw (now muon)"),
        ({"data": "text/0.txt"}, "data "),
        ({"steps": 1}, "is at step 2, past --steps 1"),
    ],
)
def test_resume_refuses_to_continue_another_job(place, capsys, changes, message):
    assert run(checkpoint="saved", steps=2) == 0
    assert run("--resume", checkpoint="saved", **({"steps": 2} | changes)) == 2
    assert message in capsys.readouterr().err


BARE = dict.fromkeys((name[2:].replace("-", "_") for name in OPTIONS), None)


@pytest.mark.parametrize("given", [{}, {"steps": STEPS + 2}, {"seed": SEED}], ids=str)
def test_what_is_not_given_comes_from_the_checkpoint(place, report, monkeypatch, given):
    """Method: a job is resumed by --resume and --checkpoint alone, in another folder; it ends where
    one with all options does. An option that is given counts, also in place of another one."""
    assert run(checkpoint="saved", steps=2, out="trained", optim="muon") == 0
    (place / "other").mkdir()
    shutil.copytree("saved", "again")
    expected = report("--resume", checkpoint="again", optim="muon", **({"steps": 2} | given))
    monkeypatch.chdir(place / "other")
    found = report("--resume", checkpoint="../saved", **(BARE | given))
    for name in ("first_step", "steps", "losses", "options", "held_out_loss_after"):
        assert found[name] == expected[name], name
    assert found["out"] == str(place / "trained")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"seed": SEED + 1}, "seed"),
        ({"batch_size": 2}, "--batch-size 4 (now 2)"),
        ({"optim": "muon"}, "--optim adamw (now muon)"),
        ({"lr": 0.5}, "(now 0.5)"),
        ({"weight_decay": 0.25}, "(now 0.25)"),
    ],
)
def test_a_job_of_other_options_is_refused_before_anything_is_built(
    place, capsys, monkeypatch, changes, message
):
    """Twin: with the checkpoint's own it is built."""
    from infinity.tools.train import train

    assert run(checkpoint="saved", steps=2) == 0
    built, make = [], train._make_model

    def making(*given, **how):
        built.append(1)
        return make(*given, **how)

    monkeypatch.setattr(train_module, "_make_model", making)
    assert run("--resume", checkpoint="saved", **(BARE | changes)) == 2
    assert message in capsys.readouterr().err and not built
    assert run("--resume", checkpoint="saved", **(BARE | {"steps": 3})) == 0 and built


def test_a_checkpoint_gives_no_options_that_run_code_or_send_data(place):
    """Method: words of a manifest that somebody wrote. Twin: the others are taken."""
    from infinity.tools.cli import presets
    from infinity.tools.train import places

    words = ["--trust-remote-code", "--push=mine", "--log=wandb", "--overwrite", "--seed=4", 3]
    words += ["-x", "--steps=6"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(places, "saved_extra", lambda folder: {"words": words})
        found = presets.expanded(["train", "--resume", "--checkpoint", "saved"])
        assert found == ["train", "--seed=4", "--steps=6", "--resume", "--checkpoint", "saved"]
        found = presets.expanded(["train", "--resume", "--checkpoint=a", "--epochs", "1"])
        assert "--steps=6" not in found and "--seed=4" in found  # one in place of the other
        patch.setattr(places, "saved_extra", lambda folder: {"words": "--seed=4"})
        assert presets.expanded(["train", "--resume", "--checkpoint", "a"])[1] == "--resume"


# --- the data ---


def batches_of(path, *, sequence_length=16, batch_size=4, seed=SEED):
    corpus = corpora.read_corpus(
        corpora.find_text_files(path), sequence_length=sequence_length, limit_nbytes=1 << 20
    )
    return corpora.Batches(
        corpus=corpus, batch_size=batch_size, sequence_length=sequence_length, seed=seed
    )


def test_batches_follow_from_seed_and_step_alone(place):
    """In order and out of order, from two objects; another seed, step or micro-batch is another
    batch."""
    one, other = batches_of("text"), batches_of("text")
    in_order = [one.train(step)["input_ids"] for step in range(5)]
    for step in (4, 0, 2):
        assert torch.equal(other.train(step)["input_ids"], in_order[step])
    assert in_order[0].shape == (4, 16) and in_order[0].dtype == torch.int64
    assert not torch.equal(in_order[0], in_order[1])
    assert not torch.equal(one.train(0, micro_batch=1)["input_ids"], in_order[0])
    assert not torch.equal(batches_of("text", seed=SEED + 1).train(0)["input_ids"], in_order[0])


def test_training_never_sees_the_held_out_part(place):
    """The last 3 % of the file are Z, which nothing else is."""
    Path("marked.txt").write_bytes(b"a" * 9700 + b"Z" * 300)
    batches = batches_of("marked.txt")
    trained_on = torch.cat([batches.train(step)["input_ids"] for step in range(400)])
    assert set(trained_on.unique().tolist()) == {ord("a")}
    held_out = torch.cat([batch["input_ids"] for batch in batches.held_out(100)])
    assert set(held_out.unique().tolist()) == {ord("Z")} and len(held_out) == 300 // 16
    # The twin: windows one byte beyond the part would have been seen.
    assert ord("Z") in batches.corpus.tokens[: batches.corpus.train_ntokens + 1]


def test_a_folder_is_read_in_sorted_order_without_what_is_not_text(place):
    Path("mixed", "b").mkdir(parents=True)
    Path("mixed", "b", "2.md").write_text("two")
    Path("mixed", "b.txt").write_text("three")
    Path("mixed", "a.txt").write_text("one é")
    Path("mixed", "image.png").write_bytes(b"\x89PNG\0\0")
    Path("mixed", "latin.txt").write_bytes(b"un caf\xe9")
    Path("mixed", ".git").mkdir()
    Path("mixed", ".git", "config").write_text("hidden")
    files = corpora.find_text_files("mixed")
    assert files.names == ["a.txt", "b/2.md", "b.txt"]
    corpus = corpora.read_corpus(files, sequence_length=2, limit_nbytes=1000)
    assert bytes(corpus.tokens) == "one é\0two\0three\0".encode()
    assert (
        bytes(corpora.read_corpus(files, sequence_length=2, limit_nbytes=8).tokens)
        == "one é\0t".encode()
    )


def test_default_data_is_the_standard_library_without_its_tests():
    files = corpora.find_text_files()
    assert files.names == sorted(files.names, key=lambda name: tuple(name.split("/")))
    assert "argparse.py" in files.names and "json/decoder.py" in files.names
    assert not [
        name for name in files.names if {"test", "tests", "site-packages"} & set(name.split("/"))
    ]


# --- the model and its memory ---


def test_the_built_in_model_has_about_50_million_parameters():
    with torch.device("meta"):
        built_in = transformers.AutoModelForCausalLM.from_config(
            model_module.built_in_model_config()
        )
    assert 48e6 < sum(parameter.numel() for parameter in built_in.parameters()) < 52e6


@pytest.mark.parametrize(
    ("dtype", "changes", "nbytes"),
    [
        (torch.bfloat16, {}, 2 + 2 + 8),
        (torch.bfloat16, {"master": "fp32"}, 2 + 4 + 8),
        (torch.bfloat16, {"master": "none", "moments": "bf16"}, 2 + 4),
        (torch.float32, {}, 4 + 8),
    ],
)
def test_a_budget_in_percent_is_a_share_of_the_training_state(dtype, changes, nbytes):
    model_module = torch.nn.Linear(100, 100, bias=False, dtype=dtype)
    config = settings.engine_config({"host_memory": "25%", **changes}, model_module)
    assert config.host_memory == nbytes * 100 * 100 // 4
    model_module.weight.requires_grad_(False)
    assert settings.training_state_nbytes(model_module, config) == model_module.weight.nbytes


def test_learning_rate_warms_up_and_ends_at_a_tenth():
    shares = [schedules.lr_share(step, steps=100, warmup_steps=9) for step in range(101)]
    assert (
        shares[0] == pytest.approx(0.1) and shares[9] == 1.0 and shares[100] == pytest.approx(0.1)
    )
    assert shares[:10] == sorted(shares[:10]) and shares[9:] == sorted(shares[9:], reverse=True)


# --- bad input ---


def no_change():
    pass


def a_folder_without_weights():
    Path("hollow").mkdir()
    Path("hollow", "config.json").write_text(json.dumps(TINY))


def a_small_vocabulary():
    Path("small.json").write_text(json.dumps(TINY | {"vocab_size": 100}))


def an_encoder_decoder():
    Path("t5.json").write_text(json.dumps({"model_type": "t5"}))


def an_empty_folder():
    Path("empty").mkdir()


def a_wrong_key():
    Path("wrong.json").write_text('{"parms": "nvme"}')


def no_toml():
    Path("broken.toml").write_text("params = ")


BAD_INPUT = [
    (no_change, {"model": "nowhere"}, "No such model: nowhere"),
    (no_change, {"model": "text/0.txt"}, "text/0.txt is not a model"),
    (
        a_folder_without_weights,
        {"model": "hollow"},
        "No safetensors in hollow. For fresh weights give --model hollow/",
    ),
    (
        a_small_vocabulary,
        {"model": "small.json"},
        "vocabulary has 100 entries but byte-level text needs 256",
    ),
    (
        an_encoder_decoder,
        {"model": "t5.json"},
        "t5.json is of T5Config, which has an encoder with a decoder",
    ),
    (no_change, {"data": "nowhere"}, "No such data: nowhere"),
    (an_empty_folder, {"data": "empty"}, "No text files in empty"),
    (
        no_change,
        {"data_limit": 40},
        "holds 40 tokens, but a sequence length of 32 needs 64",
    ),
    (no_change, {"data_limit": "much"}, "--data-limit='much' is not a size"),
    (no_change, {"sequence_length": 65}, "--sequence-length 65 exceeds the model's 64 positions"),
    (no_change, {"sequence_length": 1}, "2 or more (a token and the one to predict)"),
    (
        no_change,
        {"nvme_path": "nowhere"},
        "No such folder for swap files: 'nowhere'. Create it first",
    ),
    (no_change, {"params": "tape"}, "invalid choice: 'tape'"),
    (no_change, {"host_memory": "0%"}, "--host-memory 0% is not a share"),
    (no_change, {"host_memory": "lots"}, "host_memory='lots' is not a size"),
    (no_change, {"host_memory": "1KiB"}, "--host-memory is"),
    (no_change, {"steps": 0}, "0 given, 1 or more needed"),
    (no_change, {"lr": "nan"}, "nan given, more than 0 needed"),
    (a_wrong_key, {"config": "wrong.json"}, "unknown config key 'parms': did you mean 'params'?"),
    (no_toml, {"config": "broken.toml"}, "broken.toml is neither valid TOML (*.toml), YAML"),
    (no_change, {"config": "nowhere.toml"}, "No such configuration: nowhere.toml"),
    (no_change, {"out": "model.json"}, "--out model.json is a file"),
    (no_change, {"checkpoint": "model.json"}, "infinity export model.json OUT --model"),
]


@pytest.mark.parametrize(("prepare", "changes", "message"), BAD_INPUT)
def test_bad_input_is_one_message_and_status_2(place, capsys, prepare, changes, message):
    """Nothing on stdout, no traceback, and nothing left where results would have gone."""
    prepare()
    before = sorted(Path().rglob("*"))
    assert run("--json", **({"checkpoint": "saved"} | changes)) == 2
    captured = capsys.readouterr()
    assert message in captured.err and "Traceback" not in captured.err
    assert captured.out == f"seed {SEED}\n"
    assert sorted(Path().rglob("*")) == before


def test_resume_without_a_checkpoint_folder_is_refused(place, capsys):
    assert run("--resume") == 2
    assert "--resume has nowhere to look. Add --checkpoint FOLDER\n" in capsys.readouterr().err


def test_a_model_folder_is_not_overwritten_by_its_own_result(place, report, capsys):
    report(out="trained")
    assert run(model="trained", out="trained") == 2
    assert "would overwrite it" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_ends_the_job_before_the_weights_take_it(place, capsys):
    assert run(lr=1e38, max_grad_norm=1e30, warmup_steps=0) == 2
    assert "Lower --lr" in capsys.readouterr().err


def test_traceback_is_shown_on_request(place, monkeypatch):
    monkeypatch.setenv("INFINITY_TRACEBACK", "1")
    with pytest.raises(ConfigError):
        run(model="nowhere")


def test_help_does_not_wait_for_torch():
    """In a fresh process: building the parser and printing its help imports nothing heavy."""
    program = "import sys, infinity.tools.cli; infinity.tools.cli.main(['train', '--help'])"
    check = "assert not {'torch', 'transformers', 'rich'} & set(sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", f"{program}; {check}"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "--host-memory" in result.stdout


def test_scalars_for_tensorboard_are_written(place, capsys):
    """Method: every step's loss and speed are in the event file, read by the library itself. Twin:
    without the option there is no such folder."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert run() == 0 and not Path("scalars").exists()
    assert run(tensorboard="scalars") == 0
    found = reader.EventAccumulator("scalars").Reload()
    names = found.Tags()["scalars"]
    assert any("loss" in name for name in names) and any("tokens" in name for name in names), names
    for name in names:
        assert [event.step for event in found.Scalars(name)] == sorted(
            {event.step for event in found.Scalars(name)}
        )
    assert max(event.step for name in names for event in found.Scalars(name)) == STEPS


def test_scalars_that_cannot_be_written_are_refused(place, capsys, monkeypatch):
    """Method: a file in the folder's place, and a system without the library: errors that name the
    option."""
    pytest.importorskip("tensorboard"), pytest.importorskip("accelerate")
    Path("scalars").write_text("a file")
    assert run(tensorboard="scalars") == 2
    assert "--tensorboard scalars is a file" in capsys.readouterr().err
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", lambda: [])
    assert run(tensorboard="elsewhere") == 2
    assert "pip install tensorboard" in capsys.readouterr().err


# --- where results go ---


def test_a_checkpoint_that_is_there_is_not_replaced_unless_told(place, report, capsys):
    """Method: a job, the same again (refused, with the checkpoint as it was), with --overwrite, and
    with --resume."""
    report(checkpoint="saved")
    before = (Path("saved") / "manifest.json").read_bytes()
    assert run(checkpoint="saved") == 2
    said = capsys.readouterr().err
    assert (
        "saved holds a checkpoint already" in said and "--overwrite" in said and "--resume" in said
    )
    assert (Path("saved") / "manifest.json").read_bytes() == before
    assert run("--overwrite", "--resume", checkpoint="saved") == 2
    assert "give one of them" in capsys.readouterr().err
    assert run("--overwrite", checkpoint="saved") == 0
    assert (Path("saved") / "manifest.json").read_bytes() != before
    assert run("--resume", checkpoint="saved") == 0


@pytest.mark.parametrize("option", ["out", "checkpoint"])
def test_a_place_that_cannot_be_written_is_found_before_the_training(place, capsys, option):
    """Method: a folder of a file system that takes no files, below a file, and a file."""
    Path("file").write_text("mine")
    for folder in ("/proc/infinity/results", "file/below", "file"):
        assert run(**{option: folder}) == 2
        said = capsys.readouterr().err
        assert (
            f"--{option} {folder}" in said and "held-out" not in said and "Traceback" not in said
        ), said
    assert Path("file").read_text() == "mine"


@pytest.mark.parametrize("option", ["out", "checkpoint"])
def test_a_place_that_is_too_small_is_found_before_the_training(place, capsys, monkeypatch, option):
    """Method: the disk says that 10 kB are free; the refusal has both numbers, and no step was
    made."""
    monkeypatch.setattr(
        places.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=10_000, total=10**12)
    )
    assert run(**{option: "results"}) == 2
    said = capsys.readouterr().err
    assert f"--{option} results" in said and "9.8 KiB is free" in said and "held-out" not in said, (
        said
    )
    assert not Path("results").exists()


def test_room_for_two_saves_is_asked_for_where_two_will_come(place, capsys, monkeypatch):
    """Method: the disk has room for one save and a half. Twins: a job that saves once, and one that
    is there already, whose old save has its place."""
    state = []
    count = train_module.training_state_nbytes
    monkeypatch.setattr(
        train_module,
        "training_state_nbytes",
        lambda *given: state.append(count(*given)) or state[-1],
    )

    def free(path):
        return types.SimpleNamespace(free=state[-1] * 3 // 2, total=10**12)

    monkeypatch.setattr(places, "shutil", types.SimpleNamespace(disk_usage=free))
    assert run(checkpoint="saved", checkpoint_every=STEPS - 1) == 2
    said = capsys.readouterr().err
    needed = format_nbytes(2 * state[-1])
    told = f"a checkpoint needs {needed}: the old one stands until the new one is whole, and"
    assert f"--checkpoint saved: {told}" in said and not Path("saved").exists()
    assert run(checkpoint="saved", checkpoint_every=STEPS) == 0
    assert run("--resume", checkpoint="saved", checkpoint_every=2, steps=STEPS + 2) == 0


@pytest.mark.parametrize(
    ("options", "step_seconds", "again"),
    [
        ({"steps": 8, "checkpoint_every": 7}, 1.0, True),
        ({"steps": 8, "checkpoint_every": 8}, 1.0, False),
        ({"steps": None, "minutes": 5, "checkpoint_every": 299}, 1.0, True),
        ({"steps": None, "minutes": 5, "checkpoint_every": 300}, 1.0, False),
        ({"steps": 61}, 1.0, True),
        ({"steps": 60}, 1.0, False),  # the first save comes after a minute
        ({"steps": 10}, 100.0, False),  # and ten steps
        ({"steps": None, "minutes": 2}, 1.0, True),
        ({"steps": None, "minutes": 1}, 1.0, False),
        ({"steps": 11}, None, True),  # of how long it takes nothing is known
        ({"steps": 10}, None, False),
        ({"steps": None}, None, True),
    ],
)
def test_a_job_that_saves_again_is_known(options, step_seconds, again):
    given = {"minutes": None, "checkpoint_every": None} | options
    assert train_module._saves_again(argparse.Namespace(**given), step_seconds) == again


# --- what is not installed ---

BLOCKED = """
import sys
for name in list(sys.modules):
    if name.startswith("infinity.tools.cli") or name.partition(".")[0] in {blocked!r}:
        del sys.modules[name]
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
from infinity.tools.cli import main
sys.exit(main({argv!r}))
"""


@pytest.mark.parametrize(
    ("argv", "blocked", "said"),
    [
        (["plan", "--model", "model.json"], ["transformers"], "pip install transformers rich"),
        (["train"], ["transformers"], "pip install transformers rich"),
        (["train"], ["rich"], "pip install transformers rich"),
        (["plan", "--model", "model.json"], ["torch"], "pip install 'torch>=2.10'"),
        (["env"], ["torch"], "pip install 'torch>=2.10'"),
        (["bench", "io"], ["torch"], "pip install 'torch>=2.10'"),
        (["train"], ["torch"], "pip install 'torch>=2.10'"),
    ],
)
def test_what_is_not_installed_is_one_line(tmp_path, argv, blocked, said):
    (tmp_path / "model.json").write_text(
        '{"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1}'
    )
    code = BLOCKED.format(blocked=blocked, argv=argv)
    if "torch" in blocked:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
        )
    else:
        done = prepared.run("-c", code, folder=tmp_path)
    assert done.returncode == 2, done.stderr
    assert (
        said in done.stderr
        and "Traceback" not in done.stderr
        and len(done.stderr.strip().splitlines()) == 1
    ), done.stderr


def test_the_version_is_told(capsys):
    assert infinity.tools.cli.main(["--version"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"infinity {infinity.__version__}"


@pytest.mark.parametrize("fast", [True, False])
def test_auto_is_the_dtype_that_the_processor_multiplies(place, report, monkeypatch, fast):
    monkeypatch.setattr(train_module, "multiplies_bf16", lambda device: fast)
    for dtype in ("auto", None):
        report("--overwrite", dtype=dtype, out="trained")
    assert {value.dtype for value in weights("trained").values()} == {
        torch.bfloat16 if fast else torch.float32
    }
