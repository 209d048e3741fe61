"""``infinity env`` says what was found and chosen, and what to do where it is worse than it could
be."""

from __future__ import annotations

import json

import pytest

from infinity import cli, native

NAMES = {
    "storage guard",
    "python",
    "simd",
    "io",
    "fixed buffers",
    "huge pages",
    "huge pages, shared",
    "cuda",
    "cuda driver",
    "cuda kernels",
    "gpudirect storage",
    "memory",
}


def findings(capsys, *more: str) -> dict:
    assert cli.main(["env", "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_choice_is_named(capsys, tmp_path):
    # Method: the JSON has an entry for everything that the engine chooses, and one per folder.
    found = findings(capsys, "--nvme-path", str(tmp_path))
    assert set(found) == NAMES | {f"disk {tmp_path}"}
    assert native.simd_unit() in found["simd"]["value"]


def test_a_lesser_choice_comes_with_its_remedy(capsys, monkeypatch, tmp_path):
    # Method: choose the scalar unit and the thread engine by environment; the report says how to
    # get the better ones.
    monkeypatch.setenv("INFINITY_SIMD", "scalar")
    monkeypatch.setenv("INFINITY_IO", "threads")
    found = findings(capsys, "--nvme-path", str(tmp_path))
    assert found["simd"]["value"].startswith("scalar") and found["io"]["value"].startswith(
        "threads"
    )
    if len(native.simd_units()) > 1:
        assert "INFINITY_SIMD" in found["simd"]["remedy"]
    if not native.uring_refusal():
        assert "INFINITY_IO" in found["io"]["remedy"]


@pytest.mark.parametrize("folder", ["missing", "file"])
def test_a_folder_that_cannot_be_used_is_a_finding_and_not_an_error(folder, capsys, tmp_path):
    # Method: ask about a folder that is not there and about a file.
    (tmp_path / "file").write_text("")
    found = findings(capsys, "--nvme-path", str(tmp_path / folder))[f"disk {tmp_path / folder}"]
    assert "cannot be used" in found["value"] and found["remedy"]
    assert not list(tmp_path.glob("infinity-probe-*"))
