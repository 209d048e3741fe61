"""The command line as a whole: one screen of help, presets, files of options, completion,
leftovers, and signals to a child."""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infinity import native
from infinity.config import Config
from infinity.errors import CapacityError, ConfigError, StorageError
from infinity.tools import cli
from infinity.tools.cli import SUBCOMMANDS, main, parse, presets
from infinity.tools.cli.completion import script, words
from infinity.tools.train import settings, wording
from infinity.tools.watch import run_files

TINY = {
    "model_type": "gpt2",
    "vocab_size": 257,
    "n_positions": 32,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
}
SMALL = [
    "--steps",
    "2",
    "--batch-size",
    "2",
    "--sequence-length",
    "16",
    "--eval-batches",
    "1",
    "--sample-bytes",
    "4",
    "--dtype",
    "fp32",
]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The current folder: a model, a text, a folder for swap files, a cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INFINITY_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model.json").write_text(json.dumps(TINY))
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question. " * 200)
    (tmp_path / "nvme").mkdir()
    return tmp_path


def test_the_help_is_one_screen(capsys):
    """24 lines of 100 characters, with every subcommand and the exit status."""
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 100 and "Exit status" in "\n".join(lines)
    assert all(any(line.split()[:1] == [name] for line in lines) for name in SUBCOMMANDS)


def test_the_help_does_not_wait_for_torch():
    code = (
        "import sys; from infinity.tools.cli import main; main(['train', '--help']);"
        " sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


@pytest.mark.parametrize("named", ["", "env", "clean"])
def test_a_command_imports_itself_alone(named):
    """Method: the help in an interpreter of its own. Twin: the command that is asked for is
    imported."""
    code = (
        "import sys; from infinity.tools import cli; cli.main(sys.argv[1:]);"
        " modules = {f'infinity.tools.{module}' for module, _ in cli.SUBCOMMANDS.values()};"
        " sys.exit(' '.join(sorted(modules & sys.modules.keys())) or 0)"
    )
    words = [sys.executable, "-c", code, *([named] if named else []), "--help"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.stderr.strip() == (f"infinity.tools.cli.{named}" if named else ""), done.stderr


def test_every_command_has_json():
    found = words()
    assert set(found) == set(SUBCOMMANDS) and all("--json" in options for options in found.values())


# --- presets and files ---


def parsed(*argv: str):
    return parse(presets.expanded(["train", *argv]))


@pytest.mark.parametrize("name", presets.PRESETS)
def test_a_preset_stands_before_the_command_line(name):
    assert (
        parsed("--preset", name).dtype == "auto"
        and parsed("--preset", name, "--dtype", "fp32").dtype == "fp32"
    )
    assert (parsed("--preset", name).lora_rank is not None) == (name == "lora")


def test_a_file_has_the_same_options_and_the_command_line_goes_over_it(place):
    """Method: text, numbers, switches and lists in the table `train`, in TOML and in JSON; each is
    what its option would give."""
    (place / "a.toml").write_text(
        'params = "host"\n[train]\nsteps = 7\nlr = 0.5\nresume = true\noverwrite = false\nnvme_path'
        ' = ["a", "b"]\npreset = "cpu-only"\n'
    )
    (place / "a.json").write_text(
        json.dumps(
            {
                "params": "host",
                "train": {
                    "steps": 7,
                    "lr": 0.5,
                    "resume": True,
                    "nvme-path": ["a", "b"],
                    "preset": "cpu-only",
                },
            }
        )
    )
    for name in ("a.toml", "a.json"):
        args = parsed("--config", name)
        assert (args.steps, args.lr, args.resume, args.overwrite, args.nvme_path) == (
            7,
            0.5,
            True,
            False,
            [Path("a"), Path("b")],
        )
        assert args.gradient_checkpointing and args.device == "cpu"
        args = parsed(f"--config={name}", "--steps", "3", "--nvme-path", "c")
        assert (args.steps, args.lr, args.nvme_path) == (3, 0.5, [Path("c")])


@pytest.mark.parametrize(
    ("in_file", "given", "stands"),
    [
        ("minutes = 5", "--steps 3", {"steps": 3, "minutes": None}),
        ("steps = 5", "--epochs=2", {"epochs": 2.0, "steps": None}),
        ("steps = [4, 5]", "--epochs=2", {"epochs": 2.0, "steps": None}),
        ("eval_share = '5%'", "--eval-data x", {"eval_data": Path("x"), "eval_share": None}),
        ("warmup_steps = 4", "--scheduler={}", {"scheduler": "{}", "warmup_steps": None}),
        ("lora_rank = 4", "--lora 8", {"lora": 8, "lora_rank": None}),
        ("preset = 'lora'", "--lora 8", {"lora": 8, "lora_rank": None, "lr": 2e-4}),
        ("checkpoint_overhead = '1%'", "--checkpoint-every 2", {"checkpoint_overhead": None}),
        ("overwrite = true", "--resume", {"resume": True, "overwrite": False}),
        ("mesh = 'pp=2'\npipeline_chunks = 2", "--mesh=dp=2", {"pipeline_chunks": None}),
        ("mesh = 'pp=2'", "--pipeline-chunks=2", {"mesh": "pp=2", "pipeline_chunks": 2}),
    ],
)
def test_an_option_replaces_its_alternatives_in_the_file(in_file, given, stands, place):
    """Twin: without it the file's counts, and two of one place stay two, which is refused."""
    (place / "a.toml").write_text(f"[train]\nseed = 3\n{in_file}\n")
    args = vars(parsed("--config", "a.toml", *given.split()))
    assert {name: args[name] for name in stands} == stands and args["seed"] == 3
    alone = vars(parsed("--config", "a.toml"))
    assert {name: alone[name] for name in stands} != stands
    both = vars(parsed("--minutes", "5", "--steps", "3"))
    assert both["minutes"] == 5 and both["steps"] == 3


def test_a_budget_of_disks_is_an_option_of_all_that_use_them(place, capsys):
    """Method: the engine's settings by the option, alone and with a folder, and by a file. Twins:
    without it, and a disk that is too small, which the message tells in the option's name."""
    from infinity.tools.train.settings import engine_settings, given_settings

    (place / "a.toml").write_text("nvme_capacity = '3GiB'")
    (place / "nvme").mkdir(exist_ok=True)
    for given, wanted in (
        (["--nvme-capacity=2GiB"], {"nvme_capacity": "2GiB", "nvme_paths": "auto"}),
        (["--config=a.toml"], {"nvme_capacity": "3GiB", "nvme_paths": "auto"}),
        (
            ["--config=a.toml", "--nvme-capacity=2GiB"],
            {"nvme_capacity": "2GiB", "nvme_paths": "auto"},
        ),
        (["--nvme-capacity=1", "--nvme-path=nvme"], {"nvme_capacity": "1", "nvme_paths": ["nvme"]}),
        ([], {"nvme_paths": "auto"}),
        (["--host-memory=1GiB"], {"host_memory": "1GiB"}),
    ):
        assert engine_settings(parsed(*given)) == wanted
    for command in ("eval a", "generate a"):
        args = parse([*command.split(), "--nvme-capacity", "2GiB"])
        assert given_settings(args)["nvme_capacity"] == "2GiB"
    homes = ["--params", "nvme", "--optimizer", "nvme", "--nvme-path", "nvme", "--steps", "1"]
    words = ["train", "--model", "model.json", "--data", "text.txt", *homes]
    assert main([*words, "--nvme-capacity", "8KiB"]) == 2
    told = capsys.readouterr().err
    assert "--nvme-capacity is 8.0 KiB" in told and "nvme_capacity" not in told
    assert main([*words, "--nvme-capacity", "1GiB"]) == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("train = 3", "not a table"),
        ("[train]\nsteps = {a = 1}", "train.steps is a dict"),
        ("x", "neither valid TOML"),
    ],
)
def test_a_file_that_is_none_is_refused(text, said, place, capsys):
    (place / "a.toml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        parsed("--config", "a.toml")
    assert main(["train", "--config", "a.toml"]) == 2 and said in capsys.readouterr().err


WRONG_KEYS = [
    (
        "[train]\nstepz = 3",
        "a.toml: train.stepz is not an option of `infinity train` in a file: did you mean steps?",
    ),
    ("[train]\nstep = 3", "train.step is not an option"),
    ("[train]\nhelp = true", "train.help is not an option"),
    ("[train]\nconfig = 'b.toml'", "train.config is not an option"),
    ("[train]\nsteps = 0", "a.toml: train.steps: 0 given, 1 or more needed"),
    ("[train]\nsteps = true", "train.steps is a bool: give text, a number"),
    ("[train]\nsteps = false", "train.steps is a bool"),
    ("[train]\nresume = 1", "train.resume is a int: give true or false"),
    ("[train]\nparams = 'tape'", "train.params: invalid choice: 'tape'"),
    (
        "[train]\nnvme_paths = ['a']",
        "train.nvme_paths is not an option of `infinity train` in a file: did you mean nvme_path?",
    ),
    ("steps = 3", "a.toml: unknown config key 'steps'"),
    ("parms = 'host'", "a.toml: unknown config key 'parms': did you mean 'params'?"),
    ("[trian]\nsteps = 3", "a.toml: unknown config key 'trian': did you mean 'train'?"),
]


@pytest.mark.parametrize(("text", "said"), WRONG_KEYS)
def test_a_key_of_a_file_that_is_none_is_refused_as_the_files_key(text, said, place, capsys):
    """Method: unknown keys and wrong values, in the table and beside it; the message has the file
    and its key, and no option that nobody typed. Twin: the same options, typed."""
    (place / "a.toml").write_text(text)
    assert main(["train", "--config", "a.toml", "--model", "model.json", "--data", "text.txt"]) == 2
    found = capsys.readouterr().err
    assert said in found and "--step" not in found and "unrecognized" not in found, found


@pytest.mark.parametrize(
    "line",
    [
        "train --step 3",
        "train --step=3",
        "train --over",
        "plan --nvme-cap 3",
        "export a b --mod c",
        "report --tr a",
        "top --on",
        "bench io --round 3",
        "clean --ye",
        "env --js",
        "--vers",
    ],
)
def test_an_abbreviation_is_not_completed(line, place, capsys):
    """Method: the beginning of an option of every command: refused. Twin: the whole name, below."""
    assert main(line.split()) == 2
    said = capsys.readouterr().err
    assert "unrecognized arguments" in said or "required" in said, said


def test_an_option_that_is_none_is_told_with_the_nearest(capsys):
    assert main(["train", "--step", "3"]) == 2
    assert (
        "infinity train: unrecognized arguments: --step 3 (did you mean --steps?)"
        in capsys.readouterr().err
    )


def test_no_parser_of_the_project_completes_abbreviations():
    """Method: reads every file for a parser that is made without saying so. Twin: one in a text of
    its own."""
    root = Path(__file__).parents[3]
    files = [
        path
        for part in ("infinity", "examples", "tools", "tests/support")
        for path in (root / part).rglob("*.py")
        if path.parent.name != "scripts"  # after those of others
    ]
    found = {
        path.name for path in files for line in path.read_text().splitlines() if completes(line)
    }
    assert completes("argparse.ArgumentParser(prog='a')") and not found, found


def completes(line: str) -> bool:
    return (
        "ArgumentParser(" in line
        and "allow_abbrev=False" not in line
        and not line.startswith(("class ", "def "))
    )


def test_the_lora_preset_saves_adapters_that_peft_loads(place, capsys):
    """Method: a folder of transformers' own, trained with the preset; the adapters load onto the
    same base, which is unchanged."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    base = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained("model.json")
    )
    base.save_pretrained("base")
    assert (
        main(
            [
                "train",
                "--preset",
                "lora",
                "--model",
                "base",
                "--data",
                "text.txt",
                "--out",
                "out",
                *SMALL,
            ]
        )
        == 0
    ), capsys.readouterr()
    assert (
        Path("out", "adapter_model.safetensors").exists()
        and not Path("out", "model.safetensors").exists()
    )
    loaded = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained("base"), "out"
    )
    assert any(
        name.endswith("lora_B.default.weight") and param.any()
        for name, param in loaded.named_parameters()
    )


def test_lora_without_weights_is_refused(place, capsys):
    assert (
        main(["train", "--preset", "lora", "--model", "model.json"]) == 2
        and "give --model a folder" in capsys.readouterr().err
    )


# --- completion ---


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("infinity pl", "plan"),
        ("infinity train --lora-", "--lora-rank"),
        ("infinity train --preset cp", "cpu-only"),
        ("infinity bench ad", "adam"),
        ("infinity completion z", "zsh"),
    ],
)
def test_the_shell_completes(line, completed, tmp_path):
    """Method: bash itself runs the script's function over a line that ends at the cursor."""
    (tmp_path / "script").write_text(script(words(), "bash"))
    typed = " ".join(f"'{word}'" for word in line.split())
    code = (
        f"source {tmp_path}/script; COMP_WORDS=({typed}); COMP_CWORD={len(line.split()) - 1};"
        " _infinity; echo ${COMPREPLY[@]}"
    )
    assert subprocess.run(
        ["bash", "-c", code], capture_output=True, text=True, check=True
    ).stdout.split() == [completed]


# --- leftovers ---


def data(root: Path, name: str, *files: str) -> Path:
    (root / name).mkdir(parents=True)
    for file in files:
        (root / name / file).write_text("x")
    return root / name


def test_clean_finds_what_is_ours_and_leaves_everything_else(place, capsys, monkeypatch):
    """Method: data of a save that was cut short, a run that is over and an old probe; beside each
    what looks like it and is not."""
    monkeypatch.setattr("tempfile.tempdir", str(place / "tmp"))
    (place / "tmp").mkdir()
    ours = [
        data(
            place / "saved", "infinity-0123456789ab", "unit-00000.safetensors", "other.safetensors"
        )
    ]
    theirs = [
        data(place / "saved", "infinity-0123456789ac", "diary.txt"),
        data(place / "saved", "infinity-mine", "other.safetensors"),
    ]
    runs = place / "cache" / "runs"
    run_files.write(
        runs / "over",
        run_files.STATUS,
        0,
        {"pid": os.getpid(), "started": 1, "host": os.uname().nodename},
    )
    process = run_files.this_process()
    run_files.write(
        runs / "alive",
        run_files.STATUS,
        0,
        {"pid": process.pid, "started": process.started, "host": os.uname().nodename},
    )
    ours.append(runs / "over")
    theirs.append(runs / "alive")
    ours.append(data(place / "tmp", "infinity-probe-abcdefgh", "probe"))
    theirs.append(data(place / "tmp", "infinity-probe-abcdefgi", "probe"))
    theirs.append(data(place / "tmp", "infinity-probe-abcdefgj", "probe", "other"))
    for old in (ours[-1], theirs[-1]):
        os.utime(old, (0, 0))
    assert main(["clean", "saved", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {Path(each["path"]).resolve() for each in found["leftovers"]} == {
        path.resolve() for path in ours
    } and not found["removed"]
    assert all(path.exists() for path in ours)
    assert main(["clean", "saved"]) == 0
    assert "removed " not in capsys.readouterr().out.replace("Nothing is removed. ", "")
    nbytes = sum(each["nbytes"] for each in found["leftovers"])
    assert main(["clean", "saved", "--yes"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[-1] == f"removed 3 of 3, {nbytes:,} bytes" and nbytes > 0
    assert len(told) == 4 and all(line.startswith("removed ") for line in told)
    assert not any(path.exists() for path in ours) and all(path.exists() for path in theirs)
    assert main(["clean", "nowhere"]) == 2


def test_clean_says_what_it_could_not_remove(place, capsys, monkeypatch):
    """Method: a probe that the system does not let go. Twin: the same one, let go."""
    monkeypatch.setattr("tempfile.tempdir", str(place / "tmp"))
    probe = data(place / "tmp", "infinity-probe-abcdefgh", "probe")
    os.utime(probe, (0, 0))
    with monkeypatch.context() as held:
        held.setattr("infinity.tools.cli.clean.shutil.rmtree", lambda *path, **options: None)
        assert main(["clean", "--yes"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("not removed ") and told[1] == "removed 0 of 1, 0 bytes"
    assert main(["clean", "--yes"]) == 0 and not probe.exists()
    assert capsys.readouterr().out.splitlines()[1] == "removed 1 of 1, 1 bytes"
    assert main(["clean", "--yes"]) == 0
    assert capsys.readouterr().out == "Nothing is left of any job here.\n"


def test_clean_asks_no_name_of_a_user(place, capsys, monkeypatch):
    """Method: probes of a user without an entry in the system's list, as containers have: this
    process's is found, another's is left."""
    monkeypatch.setattr("tempfile.tempdir", str(place / "tmp"))
    probes = [data(place / "tmp", f"infinity-probe-abcdefg{letter}", "probe") for letter in "ab"]
    lstat = Path.lstat

    def of_somebody(path: Path) -> os.stat_result:
        found = lstat(path)
        uid = {probes[0]: 54321, probes[1]: 54322}.get(path, found.st_uid)
        return os.stat_result((*found[:4], uid, *found[5:7], 0, 0, 0)) if path in probes else found

    monkeypatch.setattr(Path, "lstat", of_somebody)
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    assert main(["clean", "--json"]) == 0
    assert [each["path"] for each in json.loads(capsys.readouterr().out)["leftovers"]] == [
        str(probes[0])
    ]


# --- signals ---


def launch(*more: str) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "infinity",
        "train",
        "--model",
        "model.json",
        "--data",
        "text.txt",
        "--params",
        "nvme",
        "--optimizer",
        "nvme",
        "--nvme-path",
        "nvme",
        "--checkpoint",
        "saved",
        *SMALL,
        *more,
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_a_resumable_checkpoint_and_no_swap_files(signum, status, place):
    """Method: a child gets the signal when its status says that it has taken steps; its checkpoint
    is continued to the end."""
    child = launch("--steps", "100000")
    deadline = time.monotonic() + 200
    while not any(
        each["step"] >= 2
        for folder in run_files.runs(place / "cache" / "runs")
        for each in run_files.read(folder, run_files.STATUS)
    ):
        assert child.poll() is None and time.monotonic() < deadline, child.stdout.read()
        time.sleep(0.1)
    assert not list((place / "nvme").iterdir())
    child.send_signal(signum)
    said = child.communicate(timeout=280)[0]
    assert child.returncode == status and "--resume continues" in said, said
    step = int(said.split("Interrupted after step ")[1].split()[0])
    assert not list((place / "nvme").iterdir()) and sorted(
        path.name for path in (place / "saved").iterdir()
    )[1:] == ["manifest.json", "model"]
    # The schedule of the job is as long as it was said to be: it goes on from that step.
    again = launch("--resume", "--steps", "100000")
    while (line := again.stdout.readline()) and "Continuing from step" not in line:
        pass
    again.send_signal(signal.SIGTERM)
    again.communicate(timeout=280)
    assert f"Continuing from step {step} " in line


@pytest.mark.parametrize(
    ("given", "home"),
    [("cpu", "host"), ("RAM", "host"), ("gpu", "device"), ("cuda", "device"), ("disk", "nvme")],
)
def test_homes_have_the_names_that_people_use(given, home, place, capsys):
    """As options; in a Config they are hinted at."""
    args = parse(["train", "--params", given, "--optimizer", given])
    assert args.params == args.optimizer == home
    with pytest.raises(ConfigError, match=f"did you mean '{home}'"):
        Config(params=given)


DEEPSPEED = {
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
    "gradient_clipping": 0.5,
}


@pytest.mark.parametrize("option", ["--deepspeed", "--config"])
def test_a_deepspeed_json_says_where_the_state_lives(option, place, capsys):
    """Twin: an option goes over it."""
    Path("ds.json").write_text(json.dumps(DEEPSPEED))
    words = ["train", "--model", "model.json", "--data", "text.txt", *SMALL, "--json"]
    for more, home in (((), "host"), (("--params", "device"), "device")):
        assert main([*words, option, "ds.json", *more]) == 0
        told = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert told["homes"]["params"] == home and told["options"]["max_grad_norm"] == 0.5


LOOP = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.98], "eps": 1e-8}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    "gradient_accumulation_steps": 8,
    "train_micro_batch_size_per_gpu": 1,
    "train_batch_size": 8,
}
ACCELERATE = {
    "distributed_type": "DEEPSPEED",
    "deepspeed_config": {"zero_stage": 3, "gradient_accumulation_steps": 8},
}


@pytest.mark.parametrize("option", ["--deepspeed", "--config"])
def test_the_loop_of_a_deepspeed_json_is_taken(option, place):
    """Method: the parsed options. Twin: one of the command line goes over the file's."""
    Path("ds.json").write_text(json.dumps(DEEPSPEED | LOOP))
    for more, rate in ((), 1e-5), (("--lr", "0.5"), 0.5):
        words = presets.expanded(["train", option, "ds.json", *more])
        args = parse(words)
        assert (args.lr, args.weight_decay, args.betas) == (rate, 0.0, "0.9,0.98")
        assert (args.accumulate, args.batch_size, args.max_grad_norm) == (8, 1, None)
    Path("ds.json").write_text(json.dumps(DEEPSPEED | {"gradient_clipping": 0}))
    args = parse(presets.expanded(["train", option, "ds.json"]))
    assert (args.lr, args.betas, args.max_grad_norm) == (None, None, 1e9)
    Path("accelerate.yaml").write_text(json.dumps(ACCELERATE))
    args = parse(presets.expanded(["train", "--config", "accelerate.yaml"]))
    assert args.accumulate == 8


def test_a_job_trains_by_the_numbers_of_a_deepspeed_json(place, capsys):
    """Method: a job by its file, and one by the options that it stands for."""
    Path("ds.json").write_text(json.dumps(DEEPSPEED | LOOP))
    small = [*SMALL]
    at = small.index("--batch-size")
    del small[at : at + 2]
    words = ["train", "--model", "model.json", "--data", "text.txt", *small, "--json"]
    same = "--lr 1e-5 --weight-decay 0 --betas 0.9,0.98 --batch-size 1 --accumulate 8"
    found = []
    for more in (["--deepspeed", "ds.json"], ["--max-grad-norm", "0.5", *same.split()]):
        assert main([*words, *more, "--params", "host", "--optimizer", "host"]) == 0
        said = capsys.readouterr()
        found.append(json.loads(said.out.splitlines()[-1])["losses"])
        assert ("its loop becomes --lr 1e-05" in said.err) == (len(found) == 1)
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_a_scheduler_with_numbers_is_taken(place, capsys):
    """Method: jobs by a file, by the option that it stands for, and by a file whose scheduler is
    left to the loop. Twins: the last one's losses are others; it goes on with what it had."""
    params = {"warmup_num_steps": 3, "total_num_steps": 9, "warmup_max_lr": 1e-2}
    scheduler = {"type": "WarmupDecayLR", "params": params}
    Path("ds.json").write_text(json.dumps(DEEPSPEED | {"scheduler": scheduler}))
    words = ["train", "--model", "model.json", "--data", "text.txt", *SMALL, "--json"]
    words += ["--max-grad-norm", "0.5", "--params", "host", "--optimizer", "host"]
    found = []
    for more in (
        ["--deepspeed", "ds.json", "--checkpoint", "saved"],
        ["--lr", "1e-2", "--scheduler", json.dumps(scheduler)],
        ["--deepspeed", "ds.json", "--warmup-steps", "0"],
    ):
        assert main([*words, *more]) == 0
        said = capsys.readouterr()
        found.append(json.loads(said.out.splitlines()[-1])["losses"])
        assert ("--scheduler" in said.err) == (more[-1] == "saved")
    assert found[0] == found[1] != found[2]
    autos = {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}
    Path("auto.json").write_text(json.dumps(DEEPSPEED | {"scheduler": autos}))
    for more, is_told in (([], True), (["--scheduler", json.dumps(autos)], False)):
        assert main([*words, "--deepspeed", "auto.json", *more]) == 0
        said = capsys.readouterr().err
        assert (f"add --scheduler '{json.dumps(autos)}'" in said) == is_told
        assert "Trainer" not in said
    again = ["train", "--checkpoint", "saved", "--resume", "--steps", "20", "--json"]
    assert main(again) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "WarmupDecayLR" in told["options"]["scheduler"]
    other = scheduler | {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}
    assert main([*again, "--scheduler", json.dumps(other)]) == 2
    assert "--scheduler" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "words", "message"),
    [
        ({"optimizer": {"type": "SGD"}}, "--optim adamw", "is SGD, and .* add: --optim adamw"),
        (
            {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5}}},
            "--warmup-steps 10",
            "a cosine to a tenth.* add: --warmup-steps 10",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"eps": 1e-6, "lr": 0.1}}},
            "--optim adamw",
            "eps=1e-06.* --optim adamw --lr=0.1",
        ),
        (
            {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2},
            "--accumulate 3",
            "train_batch_size=7 is not 2 samples x 3 micro-batches x 1 data ranks",
        ),
    ],
)
def test_a_loop_that_train_has_not_is_refused_with_options_to_paste(given, words, message, place):
    """Twin: with the options, it is taken."""
    Path("ds.json").write_text(json.dumps(DEEPSPEED | given))
    with pytest.raises(ConfigError, match=message):
        presets.expanded(["train", "--deepspeed", "ds.json"])
    words = presets.expanded(["train", "--deepspeed", "ds.json", *words.split()])
    parse(words)


def test_a_folder_for_swap_files_is_found(place, capsys):
    """With homes that are named, the report's rates are of the disk that was chosen."""
    words = ["train", "--model", "model.json", "--data", "text.txt", *SMALL, "--json"]
    homes = ["--params", "nvme", "--optimizer", "nvme", "--nvme-path", "auto"]
    assert main([*words, *homes]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["edges"]["nvme->host"]["nbytes"] > 0 and 0 < told["disk"]["share"]


@pytest.mark.parametrize("here, computes", [("cuda", "cuda"), (None, None)])
def test_a_gpu_that_is_here_computes(here, computes, monkeypatch):
    """Twin: without one, the processor. One that is named goes over it."""
    monkeypatch.setattr(settings, "_device_here", lambda: here)
    assert settings.engine_config({"params": "host"}).device == computes
    assert settings.engine_config({"device": "cpu"}).device == "cpu"


WORDED = {  # a message of the library -> what the command says
    "Use Config(params='nvme', optimizer='host').": "Use --params nvme --optimizer host.",
    "or Config(nvme_paths=[...])": "or --nvme-path FOLDER",
    "Config(nvme_paths=['/path/on/the/disk'])": "--nvme-path /path/on/the/disk",
    "others: Config(params=, nvme_paths=).": "others: --params, --nvme-path.",
    "Raise host_memory by 3 GiB": "Raise --host-memory by 3 GiB",
    "leave Config(tied=[...])": "leave Config(tied=[...])",  # it has no such option
    "host_memory='lots' is no size": "host_memory='lots' is no size",
}


@pytest.mark.parametrize("message", WORDED)
def test_messages_are_in_the_words_of_the_command(message):
    """Twin: of a command without options they stay as they are."""
    options = cli.parser_of("train").known
    assert wording.in_options(message, options) == WORDED[message]
    assert wording.in_options(message, ()) == message


def test_a_budget_that_is_too_small_is_told_in_options_that_work(place, capsys):
    """Adds the options of the message to the command, for state in memory and on disk."""
    words = ["train", "--model", "model.json", "--data", "text.txt", *SMALL]
    (place / "swap").mkdir()
    on_disk = ["--params", "nvme", "--optimizer", "nvme", "--nvme-path", "swap"]
    for homes in (["--params", "host", "--optimizer", "host"], on_disk):
        assert main([*words, *homes, "--host-memory", "8KiB"]) == 2
        told = capsys.readouterr().err
        assert "--host-memory is 8.0 KiB" in told and "--params" not in told
        (nbytes,) = re.findall(r"Raise --host-memory by .*: --host-memory (\d+)", told)
        assert main([*words, *homes, "--host-memory", nbytes]) == 0


def test_a_source_folder_beside_an_installed_one_is_told(tmp_path, monkeypatch):
    """Twin: where nothing is installed, it is to be built."""
    for name in ("clone/infinity", "env/infinity", "env/infinity_engine-0.1.0.dist-info"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "env/infinity/_C.so").touch()
    info = "Metadata-Version: 2.1\nName: infinity-engine\nVersion: 0.1.0\n"
    (tmp_path / "env/infinity_engine-0.1.0.dist-info/METADATA").write_text(info)
    package = tmp_path / "clone/infinity"
    monkeypatch.setattr(sys, "path", [str(tmp_path / "clone")])
    assert "is not built" in native.not_built(ImportError("no _C"), package)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "clone"), str(tmp_path / "env")])
    told = native.not_built(ImportError("no _C"), package)
    assert str(tmp_path / "env/infinity") in told and "Start Python in another folder" in told


def test_a_reader_that_ends_first_is_no_error():
    """As `infinity completion bash | head -1`: status as of SIGPIPE, nothing on stderr."""
    command = [sys.executable, "-m", "infinity", "completion", "bash"]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=280)
    os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


NEAR = {  # what was typed -> what is meant
    "train --model modle.json": "model.json",
    "train --model ./modle.json": "model.json",
    "generate bse --chat": "base",
    "plan --model llama-8B": "llama-8b",
    "plan --model model.jso": "model.json",
}


@pytest.mark.parametrize("typed", NEAR)
def test_a_model_that_is_not_here_is_answered_with_what_is_near(typed, place, capsys):
    """Twin: where nothing is near, with what a model may be. The hub is not asked."""
    (place / "base").mkdir()
    (place / "base" / "config.json").write_text(json.dumps(TINY))
    assert main(typed.split()) == 2
    told = capsys.readouterr().err
    assert f"did you mean {NEAR[typed]}?" in told and len(told.splitlines()) == 1
    assert main("train --model nothing-like-it".split()) == 2
    told = capsys.readouterr().err
    assert "did you mean" not in told and "a name on the Hugging Face hub" in told


HINTS = {  # what was typed -> what is meant
    "trian --model x": "train",
    "plan --parms nvme": "--params",
    "train --params hots": "host",
    "train --dtype bf61": "bf16",
    "bench al": "all",
    "train --preset loar": "lora",
    "generate x --prompt y --temprature 0": "--temperature",
    "export saved out --modle x": "--model",
    "report --stpes 3": "--steps",
}


@pytest.mark.parametrize("typed", HINTS)
def test_a_typo_is_answered_with_what_is_near(typed, capsys):
    """The message comes before where the options are listed."""
    assert main(typed.split()) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert f"did you mean {HINTS[typed]}?" in first and second.endswith("lists all options.")
    assert first.startswith("infinity")


def test_a_folder_that_is_a_file_is_told_as_one(place, capsys):
    """Twin: one that is not there is to be created."""
    words = "train --model model.json --data text.txt --params nvme --nvme-path".split()
    assert main([*words, "text.txt"]) == 2
    assert "text.txt is a file" in capsys.readouterr().err
    assert main([*words, "none"]) == 2
    assert "mkdir -p none" in capsys.readouterr().err


def test_what_is_refused_is_noted_for_who_starts_jobs_again(tmp_path, monkeypatch, capsys):
    """Method: an unknown option, a wrong value, a wrong combination. Twins: a disk or a memory that
    is full may be free the next time, a command that is done, and no place to note it."""
    note = tmp_path / "cache" / "refused"
    words = ["plan", "--quantize", "nf4"]
    assert main(words) == 2 and not note.exists()
    monkeypatch.setenv("INFINITY_REFUSED", str(note))
    for wrong in (["plan", "--no-such"], ["plan", "--batch-size", "0"], words):
        assert main(wrong) == 2
        assert note.read_text().strip()
        note.unlink()
    assert main(words) == 2 and "add --lora" in note.read_text()
    note.unlink()

    for error in (StorageError(errno.ENOSPC, "no space left"), CapacityError("no room")):

        def full(args, error=error):
            raise error

        assert cli.answer("infinity train", full, argparse.Namespace()) == 2
    assert main(["--help"]) == 0 and not note.exists()
