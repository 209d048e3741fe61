"""A checkpoint has one format. A folder of another version gets an error that says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from infinity.ext.checkpoint.export import export
from infinity.ext.checkpoint.manifest import FORMAT, MANIFEST, read_manifest, seal_manifest

REFUSED = {
    2: "this version reads 4. Check out commit fc2d5b85 .* `infinity export`",
    3: "this version reads 4. Check out commit bdcd1f92\\^ .* `infinity export`",
    5: "this version reads 4: a newer version wrote it. .* pip install --upgrade",
    None: "this version reads 4: no version of Infinity wrote it",
}


@pytest.fixture
def saved(tmp_path):
    """A wrapped model with its optimizer, and the folder of its checkpoint."""
    torch.manual_seed(3)
    model = nn.Linear(4, 3)
    model, optimizer = infinity.wrap_model(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), {}
    )
    infinity.save_checkpoint(tmp_path / "checkpoint", model, optimizer)
    yield model, optimizer, tmp_path / "checkpoint"
    infinity.unwrap_model(model, optimizer)


def rewrite_format(folder: Path, number: object) -> None:
    """Seals the manifest again, with another number of its format."""
    (folder / MANIFEST).write_bytes(seal_manifest(read_manifest(folder) | {"format": number}))


KEYS = """format data parameters optimizers plain random data_ranks parts step_index average extra
persistent_buffers config""".split()


def test_the_names_in_a_manifest_are_those_of_its_format(saved):
    """Other names would be another format: checkpoints that exist must be read. Twin: a name that
    is not there makes a manifest that is refused."""
    model, optimizer, folder = saved
    manifest = read_manifest(folder)
    assert set(KEYS) <= set(manifest) <= {*KEYS, "files"}
    for key in ("data_ranks", "parts"):
        (folder / MANIFEST).write_bytes(seal_manifest(manifest | {key: "many"}))
        with pytest.raises(infinity.CorruptionError):
            infinity.load_checkpoint(folder, model, optimizer)


@pytest.mark.parametrize("number", REFUSED)
def test_another_format_is_refused_and_changes_nothing(saved, tmp_path, number):
    """Method: a load and an export of a manifest with an older format, a later one and none."""
    model, optimizer, folder = saved
    rewrite_format(folder, number)
    with infinity.full_params(model, writeback=True) as params:
        params["weight"].fill_(7.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(infinity.UsageError, match=f"of format {number}, {REFUSED[number]}"):
        infinity.load_checkpoint(folder, model, optimizer)
    with pytest.raises(infinity.UsageError, match=f"of format {number}, {REFUSED[number]}"):
        export(folder, tmp_path / "out")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not (tmp_path / "out").exists()


def test_the_own_format_is_read(saved):
    """The twin: the manifest is sealed again with the number that it has."""
    model, optimizer, folder = saved
    rewrite_format(folder, FORMAT.number)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    with infinity.full_params(model, writeback=True) as params:
        params["weight"].fill_(7.0)
    infinity.load_checkpoint(folder, model, optimizer)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("number", [3, 5])
def test_a_save_does_not_replace_a_checkpoint_that_it_cannot_read(saved, number):
    """Method: a save over a manifest of another format. Twin: overwrite=True replaces it."""
    model, optimizer, folder = saved
    rewrite_format(folder, number)
    before = (folder / MANIFEST).read_bytes()
    with pytest.raises(infinity.ConfigError, match=f"of format {number}.*\n.*overwrite=True"):
        infinity.save_checkpoint(folder, model, optimizer)
    assert (folder / MANIFEST).read_bytes() == before
    infinity.save_checkpoint(folder, model, optimizer, overwrite=True)
    assert read_manifest(folder)["format"] == FORMAT.number
