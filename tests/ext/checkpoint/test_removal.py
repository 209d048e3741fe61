"""Removal: names go at once, the space follows, and nobody keeps it."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest

from infinity.ext.checkpoint import removal


def folder_of(path: Path, files: int) -> Path:
    path.mkdir()
    for number in range(files):
        (path / f"{number}.safetensors").write_bytes(b"x" * 4096)
    return path


def descriptors(folder: Path) -> set[str]:
    """Those that lead into ``folder``: of others this process may close some meanwhile."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith(f"{folder}/"):
                found.add(name)
    return found


@pytest.fixture
def held_back(monkeypatch):
    """Has the thread that frees the space wait until it is let go."""
    go, close = threading.Event(), removal._close

    def later(held: list[int], folder: Path) -> None:
        assert go.wait(60)
        close(held, folder)

    monkeypatch.setattr(removal, "_close", later)
    yield go
    go.set()
    removal.wait_for_space()


@pytest.mark.parametrize("most", [0, 3, 256])
def test_names_are_gone_on_return_and_descriptors_when_the_space_is_waited_for(
    most, held_back, monkeypatch, tmp_path
):
    """More files than are held are removed as well. The twin: before it is waited for, the space is
    still taken."""
    monkeypatch.setattr(removal, "FILES_HELD", most)
    before = descriptors(tmp_path)
    removal.remove_folder(folder_of(tmp_path / "data", 5))
    assert os.listdir(tmp_path) == []
    assert len(descriptors(tmp_path) - before) == min(most, 5)
    held_back.set()
    removal.wait_for_space()
    assert descriptors(tmp_path) == before


def test_a_folder_that_keeps_a_name_while_a_file_is_open_goes_when_it_is_closed(
    held_back, monkeypatch, tmp_path
):
    """Method: the first removal leaves a file, as a network's file system does for one that is
    open."""
    folder, real = folder_of(tmp_path / "data", 2), removal.shutil.rmtree
    with monkeypatch.context() as patch:
        patch.setattr(
            removal.shutil, "rmtree", lambda path, **options: os.unlink(path / "0.safetensors")
        )
        removal.remove_folder(folder)
    assert removal.shutil.rmtree is real and folder.exists()
    held_back.set()
    removal.wait_for_space()
    assert not folder.exists()


def test_a_child_has_none_of_the_descriptors(monkeypatch, tmp_path):
    """A fork waits for them to be closed: the child would keep the space as long as it lives."""
    started, close = threading.Event(), removal._close

    def slowly(held: list[int], folder: Path) -> None:
        started.set()
        threading.Event().wait(0.3)
        close(held, folder)

    monkeypatch.setattr(removal, "_close", slowly)
    before = descriptors(tmp_path)
    removal.remove_folder(folder_of(tmp_path / "data", 3))
    assert started.wait(60)
    if (child := os.fork()) == 0:
        os._exit(int(descriptors(tmp_path) != before))
    assert os.waitpid(child, 0)[1] == 0


def test_a_folder_that_is_not_there_is_none(tmp_path):
    removal.remove_folder(tmp_path / "none")
    removal.wait_for_space()


def test_without_a_thread_the_space_is_free_on_return(monkeypatch, tmp_path):
    """Method: the system refuses one, as a limit on processes does, or an interpreter that is about
    to end."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = descriptors(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        removal.remove_folder(folder_of(tmp_path / "data", 3))
    assert descriptors(tmp_path) == before and os.listdir(tmp_path) == []
    removal.wait_for_space()


def test_a_start_that_is_interrupted_leaves_no_descriptor_open(monkeypatch, tmp_path):
    """Whoever waits for the space closes what no thread will."""

    def interrupted(thread):
        raise KeyboardInterrupt

    before = descriptors(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            removal.remove_folder(folder_of(tmp_path / "data", 3))
    assert os.listdir(tmp_path) == [] and len(descriptors(tmp_path) - before) == 3
    removal.wait_for_space()
    assert descriptors(tmp_path) == before


def test_a_close_that_fails_keeps_no_other_descriptor_open(tmp_path):
    """Method: one of three is no descriptor; and all are closed once, whoever comes again."""
    folder, before = folder_of(tmp_path / "data", 2), descriptors(tmp_path)
    held = [
        os.open(folder / "0.safetensors", os.O_RDONLY),
        1_000_000,
        os.open(folder / "1.safetensors", os.O_RDONLY),
    ]
    removal._close(held, folder)
    removal._close(held, folder)
    assert descriptors(tmp_path) == before and not folder.exists()
