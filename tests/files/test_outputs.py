"""The rule for outputs, at its edges: what it takes for a place that can be written, and how files
get their names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infinity.errors import ConfigError
from infinity.files.outputs import (
    MODEL_NAMES,
    PICTURE,
    Output,
    check_free,
    check_outputs,
    replacing,
)


def folder(path: Path) -> Output:
    return Output("OUT", path, replaces=MODEL_NAMES)


def test_a_place_is_what_its_path_leads_to(tmp_path):
    """Method: one folder by five names, as input and as output. Twin: its neighbour."""
    (tmp_path / "one" / "deep").mkdir(parents=True)
    (tmp_path / "two").mkdir()
    (tmp_path / "link").symlink_to("one")
    (tmp_path / "deeper").symlink_to("one/deep")
    names = [tmp_path / name for name in ("one", "link", "two/../one", "link/.", "deeper/..")]
    for read in names:
        for written in (
            *names,
            *(name / "new" for name in names),
            tmp_path / "deeper" / "new",
            tmp_path,
        ):
            with pytest.raises(ConfigError, match="reads"):
                check_outputs([folder(written)], [("IN", read)], overwrite=True)
        check_outputs([folder(tmp_path / "two"), folder(tmp_path / "two" / "new")], [("IN", read)])


def test_a_file_that_is_read_may_lie_in_a_folder_that_leaves_it_alone(tmp_path):
    """Method: a settings file beside what is written. Twin: where a file of its name may be
    replaced."""
    import re

    (tmp_path / "a.toml").touch()
    check_outputs(
        [Output("OUT", tmp_path, replaces=re.compile("manifest.json"))],
        [("IN", tmp_path / "a.toml")],
    )
    with pytest.raises(ConfigError, match="inside"):
        check_outputs([folder(tmp_path)], [("IN", tmp_path / "a.toml")])


def test_hidden_files_and_folders_are_not_replaced(tmp_path):
    (tmp_path / ".gitattributes").touch()
    (tmp_path / "runs").mkdir()
    check_free(folder(tmp_path))
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match="notes.txt"):
        check_free(folder(tmp_path))


def test_a_file_is_told_from_what_was_made_here(tmp_path):
    path = tmp_path / "a.svg"
    output = Output("--svg", path, made=PICTURE)
    for text, kept in (
        (b"", False),
        (PICTURE + b" width='3'>", False),
        (b'<svg xmlns="http', True),
        (PICTURE[:-1], True),
    ):
        path.write_bytes(text)
        assert bool(output.taken()) is kept, text


def test_files_get_their_names_when_all_are_there(tmp_path):
    """Method: a block that fails leaves everything; one that ends replaces names, links among them,
    and keeps the mode of files."""
    (tmp_path / "other").write_text("other")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "a").symlink_to("../other")
    with pytest.raises(KeyError), replacing(tmp_path / "new") as made:
        (made / "a").write_text("mine")
        raise KeyError
    assert (tmp_path / "new" / "a").is_symlink() and os.listdir(tmp_path / "new") == ["a"]
    with replacing(tmp_path / "new") as made:
        (made / "a").write_text("mine")
        (made / "inner").mkdir()
        (made / "inner" / "b").write_text("b")
    assert (tmp_path / "other").read_text() == "other" and (
        tmp_path / "new" / "a"
    ).read_text() == "mine"
    (tmp_path / "plain").write_text("")
    assert (tmp_path / "new" / "a").stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert (
        sorted(os.listdir(tmp_path / "new")) == ["a", "inner"]
        and (tmp_path / "new" / "inner" / "b").read_text() == "b"
    )
