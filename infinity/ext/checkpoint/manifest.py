"""Manifest: names a checkpoint's data folder and the checksum of every file, with a checksum of its
own.

Only files that the manifest names are read. It is written last, and replaced in one rename.
"""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ... import native
from ...core.homes.transfers import TransferQueue
from ...core.machine import processors
from ...errors import ConfigError, CorruptionError, UsageError
from ...untrusted import Format, is_regular, parse_json, read_text
from .file_reader import changed_file
from .folder import DATA_NAME

BEFORE = (
    "Check out commit {} of Infinity's repository, which reads it, and save the weights with"
    " `infinity export` there."
)
FORMAT = Format(
    "checkpoint",
    number=4,
    oldest=4,
    readers={
        1: BEFORE.format("fc2d5b85^"),
        2: BEFORE.format("fc2d5b85"),
        3: BEFORE.format("bdcd1f92^"),
    },
)
MANIFEST = "manifest.json"
FILE_NAME = re.compile(
    r"[a-z][a-z0-9_]{0,63}-\d{5}(-rank-\d{5})?(-\d{1,3})?\.safetensors|other\.safetensors"
)
MOST_STEPS = 1 << 53
# One thread reads this much in sequence, so that the system reads ahead.
STRETCH_NBYTES = 32 * 1024 * 1024
READ_NBYTES = 1024 * 1024
READS_AT_ONCE = 4  # at least: some threads read while others compute sums


def seal_manifest(content: dict[str, Any]) -> bytes:
    """Encodes the manifest: the content, and its checksum."""
    return json.dumps(content | {"crc32c": _content_checksum(content)}, allow_nan=False).encode()


def _content_checksum(content: dict[str, Any]) -> int:
    text = json.dumps(content, sort_keys=True)
    return native.crc32c(torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))


def write_synced(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def sync_file(path: Path) -> None:
    _sync(path, os.O_RDWR)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Files by which folders of other programs are known -> what they are, and what to do.
OTHERS = {
    ".metadata": "torch.distributed.checkpoint's: `infinity export` takes its weights",
    "latest": "DeepSpeed's: `infinity export` takes its weights",
    "zero_to_fp32.py": "DeepSpeed's: `infinity export` takes its weights",
    "trainer_state.json": "the Trainer's: resume it with resume_from_checkpoint",
    "adapter_config.json": "an adapter's: load it with peft",
    "config.json": "a model's weights alone: load them with from_pretrained",
}


def what_it_is(root: Path) -> str:
    """Returns what a folder without our manifest is, as far as its files tell."""
    if not root.exists():
        return f"there is no {root}: give the folder that save_checkpoint wrote"
    if not root.is_dir():
        return (
            f"{root} is a file, not a checkpoint's folder. Load weights of torch.save by"
            " model.load_state_dict(torch.load(...)); `infinity export FOLDER OUT` writes those of"
            " a checkpoint as safetensors"
        )
    known = next((OTHERS[name] for name in OTHERS if (root / name).exists()), None)
    if known is not None:
        return f"{root} is not a checkpoint of Infinity; it is {known}"
    return f"{root} holds no complete checkpoint: there is no {MANIFEST} in it"


def read_manifest(root: Path) -> dict[str, Any]:
    path = root / MANIFEST
    try:
        text = read_text(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(what_it_is(root)) from error
    except (OSError, ValueError) as error:
        raise CorruptionError(f"{path} cannot be read: {error}") from error
    try:
        content = parse_json(text)
        if "crc32c" not in content:
            raise ValueError("it has no checksum")
        intact = content.pop("crc32c") == _content_checksum(content)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptionError(
            f"{path} is not a checkpoint's manifest, or damaged ({error}): take an older save"
        ) from error
    if not intact:
        raise CorruptionError(
            f"{path} was changed: its checksum is not the one it was written with"
        )
    FORMAT.check(path, content)
    if not isinstance(content.get("data"), str) or not DATA_NAME.fullmatch(content["data"]):
        raise CorruptionError(
            f"{path} names data that is not beside it: {str(content.get('data'))[:80]!r}"
        )
    files = content.get("files")
    odd = (
        [name for name in files if not FILE_NAME.fullmatch(name)]
        if isinstance(files, dict) and files
        else files
    )
    if odd or not files:
        raise CorruptionError(f"{path} names files that no save writes: {str(odd)[:80]}")
    return content


def check_same_model(root: Path, parameters: dict[str, dict[str, Any]]) -> None:
    """Raises ConfigError if ``root`` has a manifest that is not of a checkpoint of a model with
    ``parameters``, or has a format that this version does not read. A damaged checkpoint of this
    model may be replaced."""
    path = root / MANIFEST
    if not os.path.lexists(path):
        return
    remedy = "Give another folder, or overwrite=True to replace it."
    try:
        content = parse_json(read_text(path))
        saved = {name: tuple(entry["shape"]) for name, entry in content["parameters"].items()}
        FORMAT.check(path, content)
    except UsageError as error:
        raise ConfigError(f"{error}\n{remedy}") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ConfigError(
            f"{path} is not a checkpoint's manifest, and would be replaced. {remedy}"
        ) from None
    own = {name: tuple(entry["shape"]) for name, entry in parameters.items()}
    if other := sorted(
        name for name in saved.keys() | own.keys() if saved.get(name) != own.get(name)
    ):
        raise ConfigError(
            f"{root} holds a checkpoint of another model: {other[0]} is"
            f" {saved.get(other[0], 'not there')} in it and {own.get(other[0], 'not there')} in"
            f" this one. {remedy}"
        )


def check_sizes(data: Path, files: dict[str, dict[str, Any]]) -> None:
    """Raises CorruptionError for the first file of a checkpoint that is missing, or has another
    size than was written."""
    for name, entry in files.items():
        _check_size(data / name, entry)


def check_files(
    data: Path, files: dict[str, dict[str, Any]], *, turn: tuple[int, int] = (0, 1)
) -> None:
    """Verifies files of a checkpoint, with several threads; blocks on the disk. Raises
    CorruptionError for the first that is not as it was written.

    turn
        (index, count) of the readers that divide the files. Each checks that all exist.
    """
    check_sizes(data, files)
    largest_first = sorted(files.items(), key=lambda item: -item[1]["nbytes"])
    files = dict(largest_first[turn[0] :: turn[1]])
    threads = max(READS_AT_ONCE, processors.for_checksums())
    with ThreadPoolExecutor(threads, "infinity-check") as pool:
        sums = dict.fromkeys(files, 0)

        def join(stretch: tuple[str, int, Future[int]]) -> None:
            name, behind, part = stretch
            sums[name] ^= native.crc32c_before(part.result(), behind)
            if not behind and sums[name] != (written := files[name]["crc32c"]):
                raise changed_file(data / name, sums[name], written)

        with TransferQueue(2 * threads, join, lambda stretch: stretch[2].cancel()) as stretches:
            for name, entry in files.items():
                for begin in range(0, max(1, entry["nbytes"]), STRETCH_NBYTES):
                    stretches.make_room()
                    end = min(entry["nbytes"], begin + STRETCH_NBYTES)
                    part = pool.submit(_sum_of_stretch, data / name, begin, end)
                    stretches.add((name, entry["nbytes"] - end, part))


def _check_size(path: Path, entry: dict[str, Any]) -> None:
    if path.exists() and not is_regular(path, links=False):
        raise CorruptionError(f"{path} is not a regular file, which a save writes")
    try:
        nbytes = path.stat().st_size
    except OSError as error:
        raise CorruptionError(f"{path} is missing from the checkpoint") from error
    if nbytes != entry["nbytes"]:
        raise CorruptionError(
            f"{path} has {nbytes} bytes, but {entry['nbytes']} were written: it was truncated or"
            " grew"
        )


def _sum_of_stretch(path: Path, begin: int, end: int) -> int:
    """Returns the CRC-32C of bytes ``begin`` to ``end`` of a file. Missing bytes at its end are
    left out, which changes the sum."""
    slot = torch.empty(max(1, min(READ_NBYTES, end - begin)), dtype=torch.uint8, device="cpu")
    memory, checksum, at = memoryview(slot.numpy()), 0, begin
    with open(path, "rb", buffering=0) as file:
        while at < end and (count := os.preadv(file.fileno(), [memory[: end - at]], at)):
            checksum, at = native.crc32c(slot[:count], checksum), at + count
    return checksum
