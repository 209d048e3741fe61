"""write_sources: writes tensors as the safetensors files of a model's folder, with their index, one
tensor in memory at a time."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ...amounts import parse_nbytes
from ...errors import StorageError
from ...files.source import Source, Storage
from ...progress import progress
from .hub_names import SHARD_SIZE
from .tensor_file import check_dtypes, write_file

NAME = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")  # files written here
# And their temporary names.
PARTIAL = re.compile(r"model(-\d{5}-of-\d{5}|\.safetensors\.index)?\.partial")


def write_sources(
    folder: Path,
    sources: dict[str, Source],
    *,
    writes: bool = True,
    max_shard_size: int | str = SHARD_SIZE,
    numel: int | None = None,
) -> None:
    """Reads the tensors one after the other and writes them, with an index if there are several
    files. Without ``writes`` only reads them, because other ranks need this one for it.

    max_shard_size
        As in :func:`save_pretrained`.
    numel
        The elements of the model's parameters, for the index.

    Raises StorageError, and ConfigError for a dtype that a file cannot hold.
    """
    files = split(sources, max_shard_size)
    names = name_files([len(files)])[0]
    with written(folder, files, names, writes=writes):
        pass
    if writes:
        with storing(folder):
            name_written(folder, dict(zip(names, describe_files(files))), numel=numel)


def split(sources: dict[str, Source], max_shard_size: int | str) -> list[dict[str, Source]]:
    """Splits ``sources`` into files of at most ``max_shard_size`` as huggingface_hub does: in
    order, views of one storage together. A larger storage gets a file of its own, before the
    current one. Raises ConfigError for a dtype that no file can hold."""
    check_dtypes(sources)
    most = parse_nbytes(max_shard_size, "max_shard_size")
    of_storage: dict[Storage, dict[str, Source]] = {}
    for name, source in sources.items():
        of_storage.setdefault(source.storage or Storage(source.nbytes), {})[name] = source
    files: list[dict[str, Source]] = []
    current: dict[str, Source] = {}
    nbytes = 0
    for storage, views in of_storage.items():
        if storage.nbytes > most:
            files.append(views)
            continue
        if nbytes + storage.nbytes > most:
            files.append(current)
            current, nbytes = {}, 0
        current |= views
        nbytes += storage.nbytes
    return [*files, current] if current or not files else files


def describe_files(files: list[dict[str, Source]]) -> list[dict[str, int]]:
    """Returns the names in each file, and their bytes; the bytes of a shared storage count for its
    first view."""
    seen: set[Storage] = set()
    described: list[dict[str, int]] = [{} for _ in files]
    for entries, sources in zip(described, files):
        for name, source in sources.items():
            entries[name] = 0 if source.storage in seen else (source.storage or source).nbytes
            seen |= {source.storage} - {None}
    return described


def name_files(counts: Sequence[int]) -> list[list[str]]:
    """Names the files of every stage: numbered consecutively; a single one has no number."""
    count, number, names = sum(counts), 0, []
    for of_one in counts:
        numbers = range(number + 1, number + of_one + 1)
        names.append(
            [
                "model.safetensors" if count == 1 else f"model-{n:05d}-of-{count:05d}.safetensors"
                for n in numbers
            ]
        )
        number += of_one
    return names


@contextmanager
def written(
    folder: Path, files: list[dict[str, Source]], names: list[str], *, writes: bool
) -> Iterator[None]:
    """Writes the files completely, under temporary names, before the block. Removes them if that or
    the block raises: half a model wastes disk space. Raises StorageError."""
    try:
        with storing(folder):
            _write(folder, files, names, writes=writes)
        yield
    except BaseException:
        for name in names if writes else ():
            with suppress(OSError):
                _partial(folder / name).unlink()
        raise


def _write(folder: Path, files: list[dict[str, Source]], names: list[str], *, writes: bool) -> None:
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
    nbytes = sum(source.nbytes for sources in files for source in sources.values())
    with progress("writing weights", nbytes) as advance:
        for name, sources in zip(names, files):
            if writes:
                # Replaces a link instead of writing through it.
                _partial(folder / name).unlink(missing_ok=True)
                write_file(_partial(folder / name), sources, advance=advance)
                continue
            for source in sources.values():
                source.read()


@contextmanager
def storing(folder: Path) -> Iterator[None]:
    """Turns errors of the file system into a StorageError that names the model's folder."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(
            error.errno or 0, f"cannot write the model to {folder}: {error}", str(folder)
        ) from error


def name_written(folder: Path, files: dict[str, dict[str, int]], *, numel: int | None) -> None:
    """Gives all written files their names, and several an index of their tensors' names and bytes,
    which never names files of two saves. Removes files of an earlier, differently split save."""
    index = folder / "model.safetensors.index.json"
    if len(files) > 1:
        index.unlink(missing_ok=True)  # it would name both old and new files
    for name in files:
        os.replace(_partial(folder / name), folder / name)
    if len(files) > 1:
        metadata = {} if numel is None else {"total_parameters": numel}
        metadata["total_size"] = sum(
            nbytes for entries in files.values() for nbytes in entries.values()
        )
        names = {key: name for name, entries in files.items() for key in entries}
        text = (
            json.dumps({"metadata": metadata, "weight_map": names}, indent=2, sort_keys=True) + "\n"
        )
        _partial(index).write_text(text)
        _flush(_partial(index))
        os.replace(_partial(index), index)
    else:
        index.unlink(missing_ok=True)
    for old in folder.glob("model*"):
        if old.name not in files and (NAME.fullmatch(old.name) or PARTIAL.fullmatch(old.name)):
            old.unlink()


def _partial(path: Path) -> Path:
    return path.with_suffix(".partial")


def _flush(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
