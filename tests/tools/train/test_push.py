"""`infinity train --push`: the saved folder on the hub, by a double of huggingface_hub's HfApi."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from lazily import need

need("transformers", "rich")

import huggingface_hub
import transformers.utils.hub  # noqa: F401 - binds HfApi, before it is a double

from infinity.errors import ConfigError, StorageError
from infinity.tools.cli import main
from infinity.tools.train.push import check_push, make_repository, push

TINY = {"model_type": "gpt2", "vocab_size": 256, "n_positions": 32, "n_embd": 16, "n_layer": 1}
WORDS = (
    "train --model model.json --data text.txt --steps 1 --batch-size 2 --dtype fp32 --device cpu"
    " --sequence-length 16 --eval-batches 1 --sample-bytes 0 --out tuned --push small"
)


NO_OUTPUTS = {"checkpoint": None, "tensorboard": None, "trace": None}


class Hub:
    """A double of HfApi. ``fails``: the method that raises."""

    def __init__(self):
        self.repositories: dict[str, bool] = {}  # name -> whether it is private
        self.files: dict[str, bytes] = {}
        self.calls: list[str] = []
        self.fails = ""

    def _called(self, what: str) -> None:
        self.calls.append(what)
        if what == self.fails:
            raise OSError(f"403 at {what}.\nRequest ID: 1")

    def whoami(self):
        self._called("whoami")
        return {"name": "me"}

    def repo_exists(self, name):
        self._called("repo_exists")
        return name in self.repositories

    def create_repo(self, name, *, private, exist_ok):
        self._called("create_repo")
        self.repositories.setdefault(name, private)

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        self._called("upload_folder")
        assert repo_id in self.repositories and commit_message
        self.files = {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}
        return f"https://hub/{repo_id}"


@pytest.fixture
def hub(monkeypatch):
    made = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: made)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "a token")
    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: False)
    return made


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a model and text; also the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INFINITY_CACHE", str(tmp_path / "cache"))
    Path("model.json").write_text(json.dumps(TINY | {"n_head": 2, "eos_token_id": 0}))
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    return tmp_path


def options(**given) -> argparse.Namespace:
    defaults = dict.fromkeys(("checkpoint", "tensorboard", "trace"))
    defaults |= {"push": "me/small", "out": Path("tuned"), "overwrite": False, "resume": False}
    return argparse.Namespace(**defaults | given)


def test_the_saved_folder_is_sent_to_a_private_repository(place, hub, capsys):
    """Method: what the double got is compared with the folder. Twin: the same name again is
    refused before the training, and with --overwrite is not."""
    assert main(WORDS.split()) == 0
    assert "Sent to https://hub/me/small" in capsys.readouterr().out
    assert hub.repositories == {"me/small": True}
    assert hub.files == {path.name: path.read_bytes() for path in Path("tuned").iterdir()}
    assert {"config.json", "model.safetensors"} <= set(hub.files)
    assert hub.calls == ["whoami", "repo_exists", "create_repo", "upload_folder"]
    with pytest.raises(ConfigError, match="is on the hub already. Give another name, or --over"):
        check_push(options())
    check_push(options(overwrite=True)), check_push(options(resume=True))


def test_a_folder_that_cannot_be_sent_is_kept(place, hub, capsys):
    """Method: the double refuses the upload, after the training; its report is printed."""
    hub.fails = "upload_folder"
    assert main([*WORDS.split(), "--json"]) == 2
    said = capsys.readouterr()
    assert "tuned is saved, and was not sent to me/small: 403 at upload_folder" in said.err
    assert "hf upload me/small tuned" in said.err and Path("tuned/model.safetensors").is_file()
    assert json.loads(said.out)["steps"] == 1


def test_a_login_that_may_not_write_is_found_before_the_first_step(place, hub, capsys):
    hub.fails = "create_repo"
    assert main(WORDS.split()) == 2
    said = capsys.readouterr()
    assert "token that may write: hf auth login" in said.err and "step 1" not in said.out
    assert not Path("tuned/model.safetensors").exists() and hub.files == {}


@pytest.mark.parametrize(
    ("patched", "given", "words"),
    [
        ({"get_token": lambda: None}, {}, "needs a login on .*: hf auth login"),
        ({"is_offline_mode": lambda: True}, {}, "HF_HUB_OFFLINE is set: unset it"),
        ({}, {"out": None}, "add --out FOLDER"),
        ({}, {"push": "a b"}, "no name on the Hugging Face hub. Give it as NAME or USER/NAME"),
        ({}, {"push": "a/b/c"}, "no name on the Hugging Face hub"),
        ({}, {"checkpoint": Path("tuned/saved")}, "--checkpoint tuned/saved lies in --out tuned"),
    ],
)
def test_what_would_prevent_it_is_told_first(patched, given, words, hub, monkeypatch):
    """Twin: without it, the same options pass."""
    check_push(options())
    hub.calls.clear()
    for name, double in patched.items():
        monkeypatch.setattr(huggingface_hub, name, double)
    with pytest.raises(ConfigError, match=words):
        check_push(options(**given))
    assert hub.calls == []  # no request is made for what cannot be


@pytest.mark.parametrize("name", [".env", "data/private.jsonl"])
def test_files_of_others_in_the_folder_are_not_sent(name, hub, tmp_path):
    """Method: a hidden file and a folder in `--out`; refused before anything else. Twin: a folder
    that holds a model's files alone."""
    given = argparse.Namespace(
        push="small", out=tmp_path, overwrite=True, resume=False, **NO_OUTPUTS
    )
    (tmp_path / "model.safetensors").touch()
    check_push(given)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    with pytest.raises(ConfigError, match="which would be sent along"):
        check_push(given)


@pytest.mark.parametrize("fails", ["whoami", "repo_exists"])
def test_a_login_that_is_no_more_valid_is_told(fails, hub):
    hub.fails = fails
    with pytest.raises(ConfigError, match=f"403 at {fails}. Log in again: hf auth login"):
        check_push(options(push="small"))


def test_without_the_option_the_hub_is_not_asked(hub):
    check_push(options(push=None))
    assert hub.calls == []


def test_a_repository_is_made_before_it_is_sent_to(hub, tmp_path):
    """Twin: the double refuses files for a repository that is not there."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(StorageError):
        push("me/other", tmp_path)
    make_repository("me/other")
    assert push("me/other", tmp_path) == "https://hub/me/other"
