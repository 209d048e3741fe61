"""Manifest: names a checkpoint's data folder and the checksum of every file, under a seal of its own.

Only files that the manifest names are read. It is written last, and replaced in one rename.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import torch

from .. import native
from ..errors import CorruptionError, UsageError
from ..untrusted import is_regular, parse_json, read_text
from .folder import DATA_NAME

FORMAT = 3
READ_FORMATS = (2, 3)
MANIFEST = "manifest.json"
FILE_NAME = re.compile(r"(unit|average)-\d{5}(-rank-\d{5})?(-\d{1,3})?\.safetensors|other\.safetensors")
MOST_STEPS = 1 << 53


def seal_manifest(content: dict[str, Any]) -> bytes:
    """Encodes the manifest: the content, and the checksum of it."""
    return json.dumps(content | {"crc32c": _content_checksum(content)}, allow_nan=False).encode()


def _content_checksum(content: dict[str, Any]) -> int:
    text = json.dumps(content, sort_keys=True)
    return native.crc32c(torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))


def file_checksum(path: Path) -> int:
    checksum = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            checksum = native.crc32c(torch.frombuffer(bytearray(chunk), dtype=torch.uint8), checksum)
    return checksum


def write_synced(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(root: Path) -> dict[str, Any]:
    path = root / MANIFEST
    try:
        text = read_text(path)
    except FileNotFoundError as error:
        raise UsageError(f"{root} holds no complete checkpoint: there is no {MANIFEST} in it") from error
    except (OSError, ValueError) as error:
        raise CorruptionError(f"{path} cannot be read: {error}") from error
    try:
        content = parse_json(text)
        intact = content.pop("crc32c") == _content_checksum(content)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptionError(f"{path} is not a checkpoint's manifest: {error!r}") from error
    if not intact:
        raise CorruptionError(f"{path} was changed: its checksum is not the one it was written with")
    if content.get("format") not in READ_FORMATS:
        raise UsageError(f"{path} has format {content.get('format')}, this version reads {' and '.join(map(str, READ_FORMATS))}")
    if not isinstance(content.get("data"), str) or not DATA_NAME.fullmatch(content["data"]):
        raise CorruptionError(f"{path} names data that is not beside it: {str(content.get('data'))[:80]!r}")
    files = content.get("files")
    odd = [name for name in files if not FILE_NAME.fullmatch(name)] if isinstance(files, dict) and files else files
    if odd or not files:
        raise CorruptionError(f"{path} names files that no save writes: {str(odd)[:80]}")
    return content


def check_file(path: Path, entry: dict[str, Any]) -> None:
    if path.exists() and not is_regular(path, links=False):
        raise CorruptionError(f"{path} is not a regular file, which a save writes")
    try:
        nbytes = path.stat().st_size
    except OSError as error:
        raise CorruptionError(f"{path} is missing from the checkpoint") from error
    if nbytes != entry["nbytes"]:
        raise CorruptionError(f"{path} has {nbytes} bytes, but {entry['nbytes']} were written: it was truncated or grew")
    if (checksum := file_checksum(path)) != entry["crc32c"]:
        raise CorruptionError(f"{path} was changed: its CRC-32C is {checksum:08x}, {entry['crc32c']:08x} was written")
