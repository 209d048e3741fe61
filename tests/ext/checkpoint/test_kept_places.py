"""Functions that write: what another model, or the user, has in a place stays unless overwrite=True
is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import infinity
from infinity.errors import ConfigError, UsageError


def wrapped(width: int = 4, **config):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4))
    return infinity.wrap_model(model, torch.optim.AdamW(model.parameters()), config or None)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_save_pretrained_keeps_another_model(tmp_path):
    """Method: a folder with weights that the model has not saved: they stay, and the model is in a
    new one beside it, which the error names, twice; the model goes on. Twins: the model's own
    folder, saved twice, and overwrite=True."""
    model, optimizer = wrapped()
    other, _ = wrapped(8)
    infinity.save_pretrained(other, tmp_path / "other")
    before = contents(tmp_path)
    for number in (1, 2):
        with pytest.raises(
            ConfigError, match=f"model.safetensors.*overwrite=True.*written to .*other-{number}"
        ):
            infinity.save_pretrained(model, tmp_path / "other")
        saved = load_file(tmp_path / f"other-{number}" / "model.safetensors")
        assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())
    assert {
        path: content for path, content in contents(tmp_path).items() if path in before
    } == before
    for _ in range(2):
        step(model, optimizer)
        infinity.save_pretrained(model, tmp_path / "own")
    infinity.save_pretrained(
        wrapped()[0], tmp_path / "own"
    )  # of the same shape, by the same process
    infinity.save_pretrained(model, tmp_path / "other", overwrite=True)
    infinity.save_pretrained(model, tmp_path / "other")  # its own by now
    with pytest.raises(ConfigError, match="overwrite=True"):
        infinity.save_pretrained(other, tmp_path / "other")
    assert contents(tmp_path / "other") != before


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model-00001-of-00002.safetensors", "adapter_model.safetensors"]
)
def test_save_pretrained_keeps_whatever_is_of_a_model(name, tmp_path):
    """Method: one file of each kind. Twin: a tokenizer's file and a page, which a model's save
    leaves alone."""
    (tmp_path / name).write_text("mine")
    model, _ = wrapped()
    with pytest.raises(ConfigError, match=name):
        infinity.save_pretrained(model, tmp_path)
    assert (tmp_path / name).read_text() == "mine"
    (tmp_path / name).unlink()
    (tmp_path / "tokenizer.json").write_text("mine")
    (tmp_path / "README.md").write_text("mine")
    infinity.save_pretrained(model, tmp_path)
    assert (
        (tmp_path / "tokenizer.json").read_text() == (tmp_path / "README.md").read_text() == "mine"
    )


def test_save_checkpoint_keeps_the_checkpoint_of_another_model(tmp_path):
    """Method: the folder of a model of other shapes: refused, and it loads as before. Twins: the
    same model of another job, and overwrite=True."""
    other, of_other = wrapped(8)
    infinity.save_checkpoint(tmp_path, other, of_other)
    before = contents(tmp_path)
    model, optimizer = wrapped()
    with pytest.raises(
        ConfigError, match=r"another model: 0.bias is \(8,\) in it and \(4,\).*overwrite=True"
    ):
        infinity.save_checkpoint(tmp_path, model, optimizer)
    assert contents(tmp_path) == before
    infinity.load_checkpoint(tmp_path, other, of_other)
    infinity.save_checkpoint(tmp_path, *wrapped(8))
    infinity.save_checkpoint(tmp_path, model, optimizer, overwrite=True)
    infinity.load_checkpoint(tmp_path, model, optimizer)


@pytest.mark.parametrize(
    "text", ["{}", "[]", "mine", json.dumps({"name": "an extension", "parameters": 3})]
)
def test_save_checkpoint_keeps_a_manifest_of_something_else(text, tmp_path):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ConfigError, match="not a checkpoint's manifest"):
        infinity.save_checkpoint(tmp_path, *wrapped())
    assert (tmp_path / "manifest.json").read_text() == text and len(contents(tmp_path)) == 1


def test_save_checkpoint_keeps_a_lock_of_something_else(tmp_path):
    """Method: a file of the lock's name with something in it. Twin: an empty one, as a killed save
    leaves it."""
    (tmp_path / ".lock").write_text("mine")
    model, optimizer = wrapped()
    with pytest.raises(UsageError, match="another folder"):
        infinity.save_checkpoint(tmp_path, model, optimizer)
    assert contents(tmp_path) == {str(tmp_path / ".lock"): b"mine"}
    (tmp_path / ".lock").write_text("")
    infinity.save_checkpoint(tmp_path, model, optimizer)
    assert not (tmp_path / ".lock").exists()


def test_a_timeline_replaces_a_timeline_only(tmp_path):
    """Method: Config(trace=...) of a file of the user's: refused at the wrap, which leaves model
    and file. Twin: a timeline."""
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="notes.txt"):
        wrapped(trace=str(path))
    assert path.read_text() == "mine"
    for _ in range(2):
        wrapped(trace=str(tmp_path / "t.json"))
