"""Folders of models: whatever ends a save, no folder ever gives tensors of two saves.

**cut**: a save in which the n-th call of the operating system that names, removes or flushes a file fails, for every n.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import infinity
from infinity.checkpoint import pretrained

CALLS = ("replace", "unlink", "fsync")
NAMES = [f"layer{n}" for n in range(3)]


def save(folder: Path, value: float, files: int) -> None:
    """Three tensors of one ``value``, in ``files`` files."""
    pretrained.write_sources(folder, {name: (48 if files == 3 else 16, lambda: torch.full((4,), value)) for name in NAMES})


def found(folder: Path) -> set[float] | None:
    """The values that a reader finds, as transformers looks for them; None: no model, or less than one."""
    if (alone := folder / "model.safetensors").exists():
        tensors = load_file(alone)
    elif (index := folder / "model.safetensors.index.json").exists():
        names = json.loads(index.read_text())["weight_map"]
        if not all((folder / name).exists() for name in names.values()):
            return None
        tensors = {key: load_file(folder / name)[key] for key, name in names.items()}
    else:
        return None
    return {value for tensor in tensors.values() for value in tensor.tolist()} if tensors.keys() == set(NAMES) else None


@pytest.fixture
def fails_at(monkeypatch):
    """Has the n-th call of CALLS fail, or all from it on; returns how many there were."""
    done = []

    def arrange(at: int, *, on: bool = False) -> list[str]:
        done.clear()
        for name in CALLS:
            real = vars(arrange).setdefault(name, getattr(os, name))

            def call(*arguments, name=name, real=real, **more):
                done.append(name)
                if at >= 0 and (len(done) > at if on else len(done) == at + 1):
                    raise OSError(errno.EIO, "injected")
                return real(*arguments, **more)

            monkeypatch.setattr(os, name, call)
        return done

    return arrange


@pytest.mark.parametrize("before", [1, 3])
@pytest.mark.parametrize("after", [1, 3])
def test_a_cut_save_gives_the_old_model_the_new_one_or_none(before, after, fails_at, monkeypatch, tmp_path):
    """And a save after it is whole, beside nothing else."""
    monkeypatch.setattr(pretrained, "FILE_NBYTES", 64)
    kinds, at = set(), 0
    while True:
        folder = tmp_path / str(at)
        fails_at(-1)
        save(folder, 1.0, before)
        done = fails_at(at)
        try:
            save(folder, 2.0, after)
        except infinity.StorageError as error:
            assert "injected" in str(error)
        values = found(folder)
        assert values in ({1.0}, {2.0}, None), (at, done, values)
        kinds.add(None if values is None else min(values))
        ended, at = len(done) <= at, at + 1
        fails_at(-1)
        save(folder, 3.0, after)
        assert found(folder) == {3.0} and len(os.listdir(folder)) == (1 if after == 1 else 4)
        if ended:
            break
    assert kinds >= {1.0, 2.0} and at > 3


@pytest.mark.parametrize("files", [1, 3])
def test_a_disk_that_refuses_everything_from_a_call_on_is_the_same_error(files, fails_at, monkeypatch, tmp_path):
    """What tidies up after the error is refused as well, and raises none of its own; the twin is the save that ends."""
    monkeypatch.setattr(pretrained, "FILE_NBYTES", 64)
    for at in range(20):
        done = fails_at(at, on=True)
        try:
            save(tmp_path / str(at), 1.0, files)
        except infinity.StorageError as error:
            assert "injected" in str(error)
        if len(done) <= at:
            break
    assert at == len(done) > 1 and found(tmp_path / str(at)) == {1.0}


def test_the_index_tells_the_bytes_that_were_written(monkeypatch, tmp_path):
    """Sources that convert say what they read, which is twice as much."""
    monkeypatch.setattr(pretrained, "FILE_NBYTES", 16)
    pretrained.write_sources(tmp_path, {name: (16, lambda: torch.ones(4, dtype=torch.bfloat16)) for name in NAMES})
    assert json.loads((tmp_path / "model.safetensors.index.json").read_text())["metadata"]["total_size"] == 3 * 8


def test_a_save_that_fails_leaves_no_half_model(monkeypatch, tmp_path):
    """Method: the second of three files cannot be made; the first one was whole."""
    monkeypatch.setattr(pretrained, "FILE_NBYTES", 16)

    def fails() -> torch.Tensor:
        assert list(tmp_path.glob("*.partial"))
        raise KeyboardInterrupt

    sources = {"a": (16, lambda: torch.ones(4)), "b": (16, fails), "c": (16, lambda: torch.ones(4))}
    with pytest.raises(KeyboardInterrupt):
        pretrained.write_sources(tmp_path, sources)
    assert os.listdir(tmp_path) == []
