"""One folder and several processes: two that save do not destroy each other's checkpoint, and one
that reads gets a whole one."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import prepared
import pytest
import torch
from torch import nn

import infinity
from infinity.errors import UsageError
from infinity.ext.checkpoint import folder as folders
from infinity.ext.checkpoint.folder import (
    DATA_NAME,
    OF_READERS,
    hold,
    reading,
    remove_data,
    writing,
)
from infinity.ext.checkpoint.manifest import read_manifest

JOBS = """
import os, sys, time, torch
from torch import nn
import infinity
from infinity.ext.checkpoint.export import export
from pathlib import Path

def run(what, folder, seconds, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    for param in model.parameters():
        nn.init.constant_(param, float(seed))
    model, optimizer = infinity.wrap_model(model, torch.optim.AdamW(model.parameters()), {"params": "host", "optimizer": "host"})
    done, refused, ends = 0, 0, time.monotonic() + seconds
    while time.monotonic() < ends or not done:  # one that saves may be refused as long as the other goes on
        try:
            if what == "save":
                infinity.save_checkpoint(folder, model, optimizer, extra=seed)
            elif what == "load":
                found = infinity.load_checkpoint(folder, model, optimizer)
                values = torch.cat([value.flatten() for value in model.state_dict().values()])
                assert bool((values == found).all()), (found, values.unique())
            else:
                export(folder, folder.parent / f"exported-{seed}")
            done += 1
        except infinity.UsageError as error:
            assert "another process is saving" in str(error), error
            refused += 1
    print(seed, done, refused, flush=True)

def start(*job):
    if child := os.fork():
        return child
    try:
        run(*job)
        sys.stderr.flush()
        os._exit(0)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stderr.flush()
        os._exit(1)

folder = Path(sys.argv[1])
assert os.waitpid(start("save", folder, 0.2, 0), 0)[1] == 0
children = [start(what, folder, float(sys.argv[2]), seed) for seed, what in enumerate(sys.argv[3:], start=1)]
sys.exit(max([os.waitpid(child, 0)[1] != 0 for child in children]))
"""  # noqa: E501


def one(seed: int = 0):
    torch.manual_seed(seed)
    model = nn.Linear(8, 8)
    return infinity.wrap_model(
        model, torch.optim.AdamW(model.parameters()), {"params": "host", "optimizer": "host"}
    )


def test_jobs_that_save_load_and_export_at_one_time_all_get_whole_checkpoints(tmp_path):
    """Method: two jobs save to one folder as fast as they can, a third loads, a fourth exports.
    Each save is done or refused by name, each load has the values of one of the savers, whole, and
    the folder holds one whole checkpoint in the end.
    """
    folder = tmp_path / "checkpoint"
    found = prepared.run("-c", JOBS, folder, "1", "save", "save", "load", "export")
    assert found.returncode == 0, found.stderr
    counts = [tuple(map(int, line.split()[1:])) for line in sorted(found.stdout.splitlines())[1:]]
    assert len(counts) == 4
    assert all(done > 0 for done, _ in counts) and all(refused == 0 for _, refused in counts[2:]), (
        counts
    )
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    model, optimizer = infinity.wrap_model(
        model, torch.optim.AdamW(model.parameters()), {"params": "host", "optimizer": "host"}
    )
    assert infinity.load_checkpoint(folder, model, optimizer) in (1, 2)
    infinity.save_checkpoint(folder, model, optimizer)  # takes what readers kept
    names = sorted(os.listdir(folder))
    assert len(names) == 2 and names[1] == "manifest.json", names


def test_a_save_is_refused_while_another_process_saves(tmp_path):
    """Method: somebody holds the lock; the refusal names the folder, nothing changes, and
    afterwards it goes on."""
    model, optimizer = one()
    infinity.save_checkpoint(tmp_path / "saved", model, optimizer, extra=1)
    before = read_manifest(tmp_path / "saved")
    with writing(tmp_path / "saved"):
        with pytest.raises(
            infinity.UsageError, match=f"saving a checkpoint to {tmp_path / 'saved'}"
        ):
            infinity.save_checkpoint(tmp_path / "saved", model, optimizer, extra=2)
        assert infinity.load_checkpoint(tmp_path / "saved", model, optimizer) == 1
    assert read_manifest(tmp_path / "saved") == before
    infinity.save_checkpoint(tmp_path / "saved", model, optimizer, extra=3)
    assert infinity.load_checkpoint(tmp_path / "saved", model, optimizer) == 3


def test_what_is_read_is_kept_until_the_next_save(tmp_path):
    model, optimizer = one()
    folder = tmp_path / "saved"
    infinity.save_checkpoint(folder, model, optimizer)
    with reading(folder, lambda: read_manifest(folder)["data"]) as data:
        infinity.save_checkpoint(folder, model, optimizer)
        infinity.save_checkpoint(folder, model, optimizer)
        assert (data / OF_READERS).exists() and read_manifest(folder)["data"] != data.name
    infinity.save_checkpoint(folder, model, optimizer)
    assert (
        not data.exists()
        and sum(bool(DATA_NAME.fullmatch(name)) for name in os.listdir(folder)) == 1
    )


def test_a_reader_that_comes_as_its_data_goes_reads_the_next(tmp_path):
    """Method: the manifest is read, and then replaced and its data removed, before the reader has
    its lock."""
    model, optimizer = one()
    folder, names = tmp_path / "saved", []
    infinity.save_checkpoint(folder, model, optimizer, extra=1)

    def read_name() -> str:
        names.append(read_manifest(folder)["data"])
        if len(names) == 1:
            infinity.save_checkpoint(folder, model, optimizer, extra=2)
        return names[-1]

    with reading(folder, read_name) as data:
        assert data.name != names[0] and (data / OF_READERS).exists()


def test_the_users_own_folders_and_links_are_not_removed(tmp_path):
    """Method: names like a save's, but not quite, and a link that is called as one."""
    model, optimizer = one()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file").write_text("mine")
    folder = tmp_path / "saved"
    for name in ("infinity-experiments", "infinity-0123456789ab.old", "infinity-0123456789AB"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_text("mine")
    (folder / "infinity-00000000000a").symlink_to(tmp_path / "theirs")
    for _ in range(2):
        infinity.save_checkpoint(folder, model, optimizer)
    assert sum(path.read_text() == "mine" for path in folder.rglob("file")) == 3
    assert (tmp_path / "theirs" / "file").read_text() == "mine" and (
        folder / "infinity-00000000000a"
    ).is_symlink()


def test_a_lock_that_a_killed_job_left_stops_nobody(tmp_path):
    model, optimizer = one()
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / ".lock").touch()
    infinity.save_checkpoint(folder, model, optimizer)
    assert not (folder / ".lock").exists()


def test_a_file_system_without_locks_is_used_without(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "no locks")

    model, optimizer = one()
    monkeypatch.setattr(folders.fcntl, "flock", no_locks)
    infinity.save_checkpoint(tmp_path / "saved", model, optimizer, extra=1)
    infinity.save_checkpoint(tmp_path / "saved", model, optimizer, extra=2)
    assert infinity.load_checkpoint(tmp_path / "saved", model, optimizer) == 2


def test_what_is_held_is_not_removed_and_what_is_not_is(tmp_path):
    for name in ("infinity-00000000000a", "infinity-00000000000b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / OF_READERS).touch()
    held = hold(tmp_path / "infinity-00000000000a")
    remove_data(tmp_path)
    assert os.listdir(tmp_path) == ["infinity-00000000000a"]
    held.close()
    remove_data(tmp_path)
    assert os.listdir(tmp_path) == [] and hold(tmp_path / "infinity-00000000000a") is None


def test_a_manifest_that_names_data_elsewhere_is_refused(tmp_path):
    """Method: sealed as it should be, but its data is a path out of the folder, a fifo, or no
    text."""
    from infinity.ext.checkpoint.manifest import seal_manifest

    model, optimizer = one()
    infinity.save_checkpoint(tmp_path / "saved", model, optimizer)
    content = read_manifest(tmp_path / "saved")
    for data in ("../elsewhere", "/etc", "infinity-0123456789ab/..", 7, None, ["x"]):
        (tmp_path / "saved" / "manifest.json").write_bytes(seal_manifest(content | {"data": data}))
        with pytest.raises(infinity.CorruptionError, match="names data"):
            infinity.load_checkpoint(tmp_path / "saved", model, optimizer)


def test_locks_are_those_of_this_test(tmp_path):
    """The twin: the lock that the tests take is one that another process sees."""
    with writing(tmp_path):
        code = (
            "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDWR), fcntl.LOCK_EX |"
            " fcntl.LOCK_NB)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / ".lock")], capture_output=True, text=True
        )
    assert "BlockingIOError" in done.stderr


def test_a_lock_that_cannot_be_removed_is_free_all_the_same(tmp_path, monkeypatch):
    def refuse(self, **_):
        raise OSError(errno.EIO, "Input/output error", str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        with writing(tmp_path):
            pass
    with writing(tmp_path):
        pass


def test_data_that_cannot_be_opened_is_not_taken_for_gone(tmp_path, monkeypatch):
    (tmp_path / "infinity-00000000000a").mkdir()
    (tmp_path / "infinity-00000000000a" / OF_READERS).touch()

    def no_descriptors(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(folders.os, "open", no_descriptors)
        remove_data(tmp_path)
        with pytest.raises(infinity.StorageError):
            hold(tmp_path / "infinity-00000000000a")
    assert (tmp_path / "infinity-00000000000a" / OF_READERS).exists()


KINDS = {  # a file in it -> a part of what is said
    ".metadata": "torch.distributed.checkpoint's: `infinity export`",
    "latest": "DeepSpeed's: `infinity export`",
    "trainer_state.json": "the Trainer's: resume it with resume_from_checkpoint",
    "adapter_config.json": "an adapter's: load it with peft",
    "config.json": "a model's weights alone",
    "notes.txt": "holds no complete checkpoint",
}


@pytest.mark.parametrize("name", KINDS)
def test_another_programs_folder_is_named_by_what_it_is(name, tmp_path):
    """Twins: a folder that is not there, and a file."""
    (tmp_path / name).touch()
    with pytest.raises(UsageError) as caught:
        read_manifest(tmp_path)
    assert KINDS[name] in str(caught.value) and str(tmp_path) in str(caught.value)
    with pytest.raises(UsageError, match="there is no .*none"):
        read_manifest(tmp_path / "none")
    with pytest.raises(UsageError, match="is a file"):
        read_manifest(tmp_path / name)


def test_an_interrupt_at_any_line_leaves_no_lock(tmp_path):
    """Claim: the next save of this process has the folder. Twin: inside the block it has not."""
    lines, point = 0, 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != folders.__file__:
            return None
        lines += event == "line"
        if lines == point and event == "line":
            raise KeyboardInterrupt
        return trace

    before, interrupted = os.listdir("/proc/self/fd"), 0
    for point in range(1, 60):
        lines = 0
        sys.settrace(trace)
        try:
            with writing(tmp_path):
                sys.settrace(None)
                with pytest.raises(UsageError, match="another process is saving"):
                    with writing(tmp_path):
                        pass
                sys.settrace(trace)
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(None)
        with writing(tmp_path):
            pass
        assert os.listdir("/proc/self/fd") == before
    assert 10 < interrupted < 59
