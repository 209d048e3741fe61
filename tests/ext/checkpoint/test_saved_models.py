"""Folders of models: whatever ends a save, no folder ever gives tensors of two saves.

**cut**: a save in which the n-th call of the operating system that names, removes or flushes a file
fails, for every n.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import infinity
from infinity.ext.checkpoint.model_files import write_sources
from infinity.files.source import Source

CALLS = ("replace", "unlink", "fsync")
NAMES = [f"layer{n}" for n in range(3)]


def save(folder: Path, value: float, files: int) -> None:
    """Three tensors of one ``value``, in ``files`` files."""
    sources = {name: Source.of(torch.full((4,), value)) for name in NAMES}
    write_sources(folder, sources, max_shard_size=16 if files == 3 else 48)


def found(folder: Path) -> set[float] | None:
    """The values that a reader finds, as transformers looks for them; None: no model, or less than
    one."""
    if (alone := folder / "model.safetensors").exists():
        tensors = load_file(alone)
    elif (index := folder / "model.safetensors.index.json").exists():
        names = json.loads(index.read_text())["weight_map"]
        if not all((folder / name).exists() for name in names.values()):
            return None
        tensors = {key: load_file(folder / name)[key] for key, name in names.items()}
    else:
        return None
    return (
        {value for tensor in tensors.values() for value in tensor.tolist()}
        if tensors.keys() == set(NAMES)
        else None
    )


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
def test_a_cut_save_gives_the_old_model_the_new_one_or_none(before, after, fails_at, tmp_path):
    """And a save after it is whole, beside nothing else."""
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
def test_a_disk_that_refuses_everything_from_a_call_on_is_the_same_error(files, fails_at, tmp_path):
    """What tidies up after the error is refused as well, and raises none of its own; the twin is
    the save that ends."""
    for at in range(20):
        done = fails_at(at, on=True)
        try:
            save(tmp_path / str(at), 1.0, files)
        except infinity.StorageError as error:
            assert "injected" in str(error)
        if len(done) <= at:
            break
    assert at == len(done) > 1 and found(tmp_path / str(at)) == {1.0}


def test_the_index_tells_the_bytes_that_were_written(tmp_path):
    """Method: sources that convert read twice as much as is written. Twin: one that gives another
    dtype than it said is refused."""
    sources = {name: Source.of(torch.ones(4)).to(torch.bfloat16) for name in NAMES}
    write_sources(tmp_path, sources, max_shard_size=8)
    assert (
        json.loads((tmp_path / "model.safetensors.index.json").read_text())["metadata"][
            "total_size"
        ]
        == 3 * 8
    )
    wrong = Source(torch.Size([4]), torch.float32, lambda: torch.ones(4, dtype=torch.bfloat16))
    with pytest.raises(infinity.CorruptionError, match="layer0"):
        write_sources(tmp_path / "other", {"layer0": wrong})
    assert not list((tmp_path / "other").iterdir())


@pytest.mark.parametrize("size", [40, 16, 15, "1KB"])
def test_files_are_split_and_written_as_the_libraries_do(size, tmp_path):
    """Method: tensors of several dtypes, one of them larger than a file, one empty, one a scalar;
    huggingface_hub splits the same tensors, and safetensors writes each file: equal bytes."""
    hub = pytest.importorskip("huggingface_hub")
    tensors = {
        "b": torch.ones(4),
        "a": torch.ones(9).bfloat16(),
        "large": torch.arange(30.0),
        "c": torch.ones(3, dtype=torch.int64),
    }
    tensors |= {
        "none": torch.empty(0, 4),
        "ü.n": torch.tensor(2.5),
        "flags": torch.tensor([True, False, True]),
    }
    split = hub.split_torch_state_dict_into_shards(
        tensors, max_shard_size=size, filename_pattern="model{suffix}.safetensors"
    )
    write_sources(
        tmp_path / "ours",
        {name: Source.of(tensor) for name, tensor in tensors.items()},
        max_shard_size=size,
    )
    (tmp_path / "theirs").mkdir()
    for file, names in split.filename_to_tensors.items():
        save_file(
            {name: tensors[name] for name in names},
            tmp_path / "theirs" / file,
            metadata={"format": "pt"},
        )
        assert (tmp_path / "ours" / file).read_bytes() == (
            tmp_path / "theirs" / file
        ).read_bytes(), file
    assert {
        path.name for path in (tmp_path / "ours").glob("*.safetensors")
    } == split.filename_to_tensors.keys()


def test_a_dtype_that_no_file_can_hold_is_refused_before_anything_is_written(tmp_path):
    """Method: a complex tensor of 16 bytes an element among others. Twin: without it they are
    written."""
    sources = {"a": Source.of(torch.ones(4)), "b": Source.of(torch.ones(4, dtype=torch.complex128))}
    with pytest.raises(infinity.ConfigError, match="complex128"):
        write_sources(tmp_path / "out", sources)
    assert not (tmp_path / "out").exists()
    write_sources(tmp_path / "out", {"a": sources["a"]})
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["a"], torch.ones(4))


def test_a_save_that_fails_leaves_no_half_model(tmp_path):
    """Method: the second of three files cannot be made; the first one was whole."""

    def fails() -> torch.Tensor:
        assert list(tmp_path.glob("*.partial"))
        raise KeyboardInterrupt

    one = Source.of(torch.ones(4))
    with pytest.raises(KeyboardInterrupt):
        write_sources(
            tmp_path,
            {"a": one, "b": Source(one.shape, one.dtype, fails), "c": one},
            max_shard_size=16,
        )
    assert os.listdir(tmp_path) == []
