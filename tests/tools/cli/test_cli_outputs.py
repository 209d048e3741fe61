"""Outputs of the command line: nothing is written where something is read, and what is there stays
unless --overwrite is said."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")
pytest.importorskip("rich")

import torch

from infinity.tools.cli import main
from infinity.tools.watch.timeline import BEGIN

TINY = {
    "model_type": "gpt2",
    "vocab_size": 257,
    "n_positions": 32,
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
}
TRAIN = (
    "train --steps 1 --batch-size 1 --sequence-length 8 --eval-batches 1 --sample-bytes 0 --dtype"
    " fp32"
)
OF = "--model base --data data"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model, another one in two files, a text, and a checkpoint of a job."""
    place = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("INFINITY_CACHE", str(place / "cache"))
        Path("model.json").write_text(json.dumps(TINY))
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained("model.json")
        )
        model.save_pretrained("base")
        model.save_pretrained("other", max_shard_size="20kB")
        Path("data", "inner").mkdir(parents=True)
        Path("data", "inner", "a.txt").write_text("To be, or not to be. " * 40)
        assert main(f"{TRAIN} {OF} --checkpoint saved".split()) == 0
    return place


@pytest.fixture
def place(made, tmp_path, monkeypatch):
    """A copy of these in the current folder."""
    shutil.copytree(made, tmp_path / "here", symlinks=True)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("INFINITY_CACHE", str(tmp_path / "here" / "cache"))
    Path("page.html").write_text("<html>mine</html>")
    Path("t.json").write_bytes(
        BEGIN + b',\n{"pid": 1, "ph": "X", "cat": "step", "name": "a", "ts": 0, "dur": 5}\n]'
    )
    os.symlink("base", "alias")
    os.symlink("data/inner", "deep")
    return tmp_path / "here"


def contents() -> dict[str, bytes | str]:
    """Every file and link below the current folder. The cache is the engine's own."""
    paths = (
        path for path in sorted(Path().rglob("*")) if path.parts[0] != "cache" and not path.is_dir()
    )
    return {
        str(path): os.readlink(path) if path.is_symlink() else path.read_bytes() for path in paths
    }


def refused(command: str, capsys) -> str:
    """Runs a command that is to be refused before it changes anything; returns its message."""
    before = contents()
    assert main(command.split()) == 2, command
    said = capsys.readouterr()
    assert contents() == before, command
    assert said.out == "" and "Traceback" not in said.err and said.err.count("\n") == 1, said
    return said.err


READ = (
    "export saved base --model base",
    "export saved base",
    "export saved base --model base --overwrite",
    "export saved alias --model base --overwrite",
    "export saved saved --overwrite",
    "export saved saved/new",
    "export base base/new",
    "export base/model.safetensors base --overwrite",
    "export other . --overwrite",
    "export saved new/../base --model base --overwrite",
    f"{TRAIN} {OF} --out base",
    f"{TRAIN} {OF} --out alias --overwrite",
    f"{TRAIN} {OF} --out base/new",
    f"{TRAIN} {OF} --out data/new",
    f"{TRAIN} {OF} --out .",
    f"{TRAIN} {OF} --checkpoint data",
    f"{TRAIN} {OF} --checkpoint base",
    f"{TRAIN} {OF} --checkpoint .",
    f"{TRAIN} {OF} --out deep/new",
    f"{TRAIN} {OF} --out cache/new",
    f"{TRAIN} {OF} --out new --checkpoint new",
    f"{TRAIN} {OF} --trace data/inner/a.txt --overwrite",
    f"{TRAIN} {OF} --trace data/t.json",
    f"{TRAIN} {OF} --tensorboard data/board",
    f"{TRAIN} --model model.json --data data --out . --overwrite",
    f"{TRAIN} --model model.json --data data --trace model.json --overwrite",
    "plan --model base --svg base/config.json --overwrite",
    "plan --model model.json --svg model.json --overwrite",
    "trace t.json --svg t.json --overwrite",
)


@pytest.mark.parametrize("command", READ)
def test_nothing_is_written_where_something_is_read(command, place, capsys):
    """Method: an output that is an input, lies in one or has one inside, by name or through a link,
    also with --overwrite: one message, and every file is as it was. Twin: the next test."""
    said = refused(command, capsys)
    assert any(
        words in said
        for words in ("reads", "holds files already", "Infinity's own cache", "are both")
    ), said


@pytest.mark.parametrize(
    "command",
    [
        "export saved new --model base",
        f"{TRAIN} {OF} --out new --checkpoint new/saved --trace new.json",
    ],
)
def test_another_place_is_written_and_what_is_read_stays(command, place):
    before = contents()
    assert main(command.split()) == 0
    after = contents()
    assert "new/model.safetensors" in after and {path: after[path] for path in before} == before


@pytest.mark.parametrize("read", ["base/model.safetensors", "base/config.json", "data/inner/a.txt"])
@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_a_link_of_what_is_read_is_found(read, link, place, capsys):
    """Method: a folder to write that holds a link of one file that is read, under a name of a
    model's. Twin: a copy of it, which --overwrite replaces."""
    Path("new").mkdir()
    name = Path("new", "model.safetensors" if "model" in read else "config.json")
    link(os.path.abspath(read), name)
    command = f"{TRAIN} {OF} --out new --overwrite"
    assert "is a link of" in refused(command, capsys)
    name.unlink()
    shutil.copy("base/config.json", name)
    assert main(command.split()) == 0 and Path("new/model.safetensors").exists()


KEPT = (
    ("export saved other", "holds files already"),
    ("export saved other --model base", "holds files already"),
    (f"{TRAIN} {OF} --out other", "holds files already"),
    (f"{TRAIN} {OF} --checkpoint saved", "holds a checkpoint already"),
    (f"{TRAIN} {OF} --trace page.html", "not made by Infinity"),
    ("plan --model base --svg page.html", "not made by Infinity"),
    ("trace t.json --svg page.html", "not made by Infinity"),
    ("bench io --scale 0.001 --save page.html", "not made by Infinity"),
)


@pytest.mark.parametrize(("command", "words"), KEPT)
def test_what_is_there_stays_unless_told(command, words, place, capsys):
    """Method: an output that holds another model, a checkpoint or a file of the user's: refused
    with the way. Twin: the same with --overwrite."""
    said = refused(command, capsys)
    assert words in said and "--overwrite" in said, said
    before = contents()
    if not command.startswith("bench"):  # takes long
        assert main([*command.split(), "--overwrite"]) == 0 and contents() != before


def test_a_file_that_infinity_made_is_replaced_by_the_next(place):
    """Method: pictures and timelines, written twice."""
    for command in (
        f"{TRAIN} {OF} --trace new.json",
        "trace t.json --svg new.svg",
        "plan --model base --svg new.svg",
    ):
        assert main(command.split()) == 0 and main(command.split()) == 0


def test_links_in_a_folder_that_is_replaced_are_not_written_through(place):
    """Method: every file of a folder is a link of another model's; a result with --overwrite takes
    the names, and the other model stays."""
    before = {path: data for path, data in contents().items() if path.startswith("other/")}
    Path("new").mkdir()
    for number, path in enumerate(sorted(Path("other").iterdir())):
        (os.link if number % 2 else os.symlink)(os.path.abspath(path), Path("new", path.name))
    assert main(f"{TRAIN} {OF} --out new --overwrite".split()) == 0
    assert {path: data for path, data in contents().items() if path.startswith("other/")} == before
    assert not any(path.is_symlink() for path in Path("new").glob("*.json"))
    assert transformers.AutoModelForCausalLM.from_pretrained("new").num_parameters()


def test_a_job_that_is_restarted_after_its_end_replaces_its_own_result(place, capsys):
    """Method: a job with --resume, run twice. Twins: another job's result in --out, and a result
    without a checkpoint that names it."""
    command = f"{TRAIN} {OF} --resume --checkpoint mine --out new"
    assert main(command.split()) == 0 and main(command.split()) == 0
    capsys.readouterr()
    assert "holds files already" in refused(
        f"{TRAIN} {OF} --resume --checkpoint mine --out other", capsys
    )
    assert "holds files already" in refused(
        f"{TRAIN} {OF} --resume --checkpoint fresh --out new", capsys
    )


def test_a_device_is_written_and_never_removed(place):
    assert (
        main(f"{TRAIN} {OF} --trace /dev/null --overwrite".split()) == 0
        and not Path("/dev/null").is_file()
    )


def test_adapters_are_kept_apart_too(place, capsys):
    """Method: an adapter's folder as OUT of its own merge, and a folder in it."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained("base")
    peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    ).save_pretrained("adapter")
    for out in ("adapter", "adapter/new"):
        assert "--merge" in refused(f"export base {out} --merge adapter --overwrite", capsys)
    assert main("export base new --merge adapter".split()) == 0
