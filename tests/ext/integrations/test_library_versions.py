"""Versions of other libraries: the pages and pyproject.toml have those of the code, and an older
one is refused by its number."""

from __future__ import annotations

import importlib.metadata
import logging
import re
import tomllib
from pathlib import Path

import pytest
import torch

import infinity
from infinity import library_versions, torch_private
from infinity.errors import ConfigError
from infinity.ext.coded.gguf_file import library_of_gguf
from infinity.ext.packed.unpacked import library_of

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def asked_for(project: dict) -> dict[str, set[str]]:
    """What the package and each of its extras ask for: the least versions by name."""
    found: dict[str, set[str]] = {}
    for asked in [project["dependencies"], *project["optional-dependencies"].values()]:
        for name, least in (one.split(">=") for one in asked if ">=" in one):
            found.setdefault(name.partition("[")[0], set()).add(least)
    return found


def test_the_least_versions_are_those_of_the_packages_that_are_asked_for():
    """Twin: with another version in one extra, the two differ."""
    own = {name: {least} for name, least in library_versions.LEAST.items()}
    asked = asked_for(PROJECT)
    assert own == {name: asked[name] for name in own}
    extras = PROJECT["optional-dependencies"]
    twin = asked_for(PROJECT | {"optional-dependencies": extras | {"train": ["trl>=0.9"]}})
    assert own != {name: twin[name] for name in own}


def test_the_pages_have_the_versions_of_the_code():
    """Method: the table of libraries, and the ranges that README.md and compatibility.md give."""
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) \| ([\d.]+) \| \d", TEXT, flags=re.MULTILINE)
    told = {name: (least, tested) for name, least, tested in rows}
    assert told == {
        name: (library_versions.LEAST[name], last) for name, last in library_versions.TESTED.items()
    }
    pythons = [each.split()[-1] for each in PROJECT["classifiers"] if ":: 3." in each]
    least, newest = library_versions.LEAST["torch"], torch_private.NEWEST
    for page in ("README.md", "docs/compatibility.md"):
        words = " ".join((ROOT / page).read_text().split())
        assert re.findall(r"Python (3\.\d+) to (3\.\d+)", words)[0] == (pythons[0], pythons[-1])
        assert re.findall(r"torch (2\.\d+) to (2\.\d+)", words)[0] == (least, newest)
    assert PROJECT["requires-python"] == f">={pythons[0]}"


OLDER = {
    "trl 1.0.0": lambda: library_versions.require("trl"),
    "torch 2.9.1+cu128": lambda: infinity.__getattr__("wrap_model"),
    "accelerate 1.3.0": lambda: library_versions.require("accelerate"),
    "peft 0.14.0": lambda: library_versions.require("peft"),
    "bitsandbytes 0.48.2": lambda: library_of("bitsandbytes.nn"),
    "torchao 0.16.0": lambda: library_of("torchao.quantization"),
    "gguf 0.9.1": library_of_gguf,
}


@pytest.mark.parametrize("found", OLDER)
def test_an_older_version_is_refused_at_its_use(found, monkeypatch):
    """Method: the library says that it is another version; the error has that one, the least and
    the command. Twins: the least itself, and a pre-release of it."""
    name, version = found.split()
    least = library_versions.LEAST[name]
    for told in (version, least, f"{least}a0+git1"):
        monkeypatch.setattr(importlib.metadata, "version", lambda asked: told)
        library_versions.refuse_older.cache_clear()
        if told != version:
            library_versions.refuse_older(name)
            continue
        with pytest.raises(ConfigError) as caught:
            OLDER[found]()
        assert f"{name} {version} is installed" in str(caught.value)
        assert f"pip install '{name}>={least}'" in str(caught.value)
    library_versions.refuse_older.cache_clear()


def test_a_library_that_is_missing_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setitem(library_versions.LEAST, "no_such_library", "1.0")
    with pytest.raises(ImportError, match=r"pip install 'no_such_library>=1\.0'") as caught:
        library_versions.require("no_such_library")
    assert caught.value.name == "no_such_library"


def test_another_version_is_told_once(monkeypatch, caplog):
    """Method: torch, whose version is not the one that is put into the table, required twice; with
    its own version, nothing is said."""
    monkeypatch.setattr(library_versions, "_told", set())
    for tested, lines in ((".".join(torch.__version__.split(".")[:2]), 0), ("0.4", 1)):
        monkeypatch.setitem(library_versions.TESTED, "torch", tested)
        with caplog.at_level(logging.WARNING):
            library_versions.require("torch"), library_versions.require("torch")
        assert sum("tested with" in record.message for record in caplog.records) == lines
