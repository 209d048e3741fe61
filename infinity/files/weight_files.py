"""WeightFiles: streams the tensors of a safetensors file or folder, in their order on the disk.

piece   consecutive elements of one tensor, at most those of a block
block   the bytes of one read; a few reads are in flight while the previous block is in use
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from .. import native
from ..errors import ConfigError, CorruptionError, StorageError
from ..progress import progress
from ..untrusted import is_regular, parse_json, read_text
from .source import Source

READ_NBYTES = 4 * 1024 * 1024
BLOCKS_AHEAD = 7
MOST_HEADER_NBYTES = 100_000_000  # the library's limit
INDEX = "model.safetensors.index.json"
LFS = b"version https://git-lfs"
FILE_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a file: bytes ``begin`` to ``end`` of it."""

    file: Path
    dtype: torch.dtype | None  # None: unsupported
    shape: torch.Size
    begin: int
    end: int
    first: int = 0  # index of the element at ``begin``


@dataclass(frozen=True)
class FilePiece:
    """Elements of tensor ``name``, from ``begin`` on. ``values`` is flat, and valid until the next
    piece is requested."""

    name: str
    begin: int
    values: torch.Tensor


class WeightFiles:
    """Reads a safetensors file, or a folder of them. Raises ConfigError, CorruptionError or
    StorageError."""

    def __init__(self, path: str | os.PathLike):
        path = Path(path)
        index = _index_of(path) if path.is_dir() else None
        files = [path] if not path.is_dir() else sorted(path.glob("*.safetensors"))
        if index is not None:
            files = sorted({path / name for name in index.values()})
        if not files or not os.path.exists(files[0]):
            raise ConfigError(f"weights={str(path)!r}: no safetensors file there")
        self.tensors: dict[str, StoredTensor] = {}
        for file in files:
            for name, stored in tensors_of(file).items():
                if index is not None and index.get(name, file.name) != file.name:
                    continue  # the index names another file for it
                if name in self.tensors:
                    raise ConfigError(
                        f"weights={str(path)!r}: {name} is in {self.tensors[name].file.name} and in"
                        f" {file.name}, and no {INDEX} says which counts. Give one of the files, or"
                        " a folder that one save wrote."
                    )
                self.tensors[name] = stored
        if index is not None and (missing := [name for name in index if name not in self.tensors]):
            raise CorruptionError(
                f"{path / INDEX} says that {missing[0]} is in {index[missing[0]]}, which has no"
                " such tensor"
            )

    def read(self, name: str) -> torch.Tensor:
        """Reads one tensor. Opens only its file: a mixture of experts has thousands of tensors."""
        stored = self.tensors[name]
        if stored.dtype is None:
            raise ConfigError(
                f"{name} in {stored.file} has a dtype that this version does not read"
            )
        value = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        raw = memoryview(value.view(-1).view(torch.uint8).numpy())
        try:
            with open(stored.file, "rb", buffering=0) as file:
                file.seek(stored.begin)
                while raw.nbytes and (count := file.readinto(raw)):
                    raw = raw[count:]
        except OSError as error:
            raise StorageError(
                error.errno or 0, f"cannot read {stored.file}: {error}", str(stored.file)
            ) from error
        if raw.nbytes:
            raise CorruptionError(f"{stored.file} ends before {name} does: it was truncated")
        return value

    def sources(self) -> dict[str, Source]:
        """Returns the source of every tensor. Reading one of an unsupported dtype raises
        ConfigError."""
        return {
            name: Source(
                stored.shape, stored.dtype or torch.uint8, lambda name=name: self.read(name)
            )
            for name, stored in self.tensors.items()
        }

    def stream(
        self, names: Iterable[str], spans: Mapping[str, tuple[int, int]] | None = None
    ) -> Iterator[FilePiece]:
        """Yields the pieces of the tensors ``names``, file by file, each tensor's in order.
        ``spans``: name -> (begin, end) of the elements to read, if not all."""
        by_file: dict[Path, dict[str, StoredTensor]] = {}
        for name in names:
            stored, span = self.tensors[name], (spans or {}).get(name)
            if stored.dtype is None:
                raise ConfigError(
                    f"{name} in {stored.file} has a dtype that this version does not read"
                )
            if span is not None:
                first = stored.begin + span[0] * stored.dtype.itemsize
                last = stored.begin + span[1] * stored.dtype.itemsize
                stored = replace(stored, begin=first, end=last, first=span[0])
            if stored.begin < stored.end:
                by_file.setdefault(stored.file, {})[name] = stored
        total = sum(
            stored.end - stored.begin for tensors in by_file.values() for stored in tensors.values()
        )
        with progress("reading weights", total) as advance:
            for file in sorted(by_file):
                for piece in _stream_file(file, by_file[file]):
                    yield piece
                    advance(piece.values.nbytes)


def keep_header(file: Path) -> bytes:
    """Reads the header of ``file``, with its length before it. Only the header enters the page
    cache: without this advice a mapping would read megabytes around each missing page. Raises
    OSError."""
    with open(file, "rb", buffering=0) as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        length = opened.read(8)
        return length + opened.read(min(MOST_HEADER_NBYTES, int.from_bytes(length, "little")))


def _index_of(folder: Path) -> dict[str, str] | None:
    """Returns tensor -> file name, from the folder's index; None if there is none. Raises
    CorruptionError."""
    index = folder / INDEX
    if not index.exists():
        return None
    try:
        named = parse_json(read_text(index)).get("weight_map")
        if named is None:
            return None
        if not all(isinstance(name, str) and isinstance(file, str) for name, file in named.items()):
            raise ValueError("weight_map is not of names")
        if outside := [file for file in named.values() if file != os.path.basename(file)]:
            raise ValueError(f"it names a file outside the folder: {outside[0][:80]!r}")
        return named
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise CorruptionError(f"{index} is not an index of safetensors files: {error!r}") from error


def tensors_of(file: Path) -> dict[str, StoredTensor]:
    """Reads the tensors of a safetensors file, and their offsets. Raises CorruptionError if it is
    not one, StorageError."""
    if not is_regular(file):
        raise CorruptionError(f"{file} is not a regular file")
    try:
        header = keep_header(file)
        with safe_open(file, framework="pt"):  # checks every offset against the file
            pass
    except SafetensorError as error:
        with open(file, "rb") as opened:
            if opened.read(len(LFS)) == LFS:
                raise ConfigError(
                    f"{file} is git-lfs's pointer to the file, not the file: fetch it with `git lfs"
                    " pull`"
                ) from None
        raise CorruptionError(f"{file} is not a readable safetensors file: {error}") from error
    except OSError as error:
        raise StorageError(error.errno or 0, f"cannot read {file}: {error}", str(file)) from error
    return tensors_told(file, header)


def tensors_told(file: Path, header: bytes) -> dict[str, StoredTensor]:
    """Parses the tensors in the header of ``file``, without comparing it with the file."""
    told = parse_json(header[8:].decode())
    told.pop("__metadata__", None)
    found = {}
    for name, entry in told.items():
        begin, end = (len(header) + offset for offset in entry["data_offsets"])
        found[name] = StoredTensor(
            file, FILE_DTYPES.get(entry["dtype"]), torch.Size(entry["shape"]), begin, end
        )
    return found


def _stream_file(file: Path, tensors: dict[str, StoredTensor]) -> Iterator[FilePiece]:
    in_order = sorted(tensors.items(), key=lambda entry: entry[1].begin)
    carried: dict[str, bytes] = {}  # the first bytes of an element that two blocks share
    for offset, block in _blocks(file, [(stored.begin, stored.end) for _, stored in in_order]):
        for name, stored in in_order:
            begin, end = max(stored.begin, offset), min(stored.end, offset + block.numel())
            if begin >= end:
                continue
            values = block[begin - offset : end - offset]
            yield from _pieces(name, stored, begin - stored.begin, values, carried)


def _pieces(
    name: str, stored: StoredTensor, at: int, raw: torch.Tensor, carried: dict[str, bytes]
) -> Iterator[FilePiece]:
    """Yields the whole elements of ``raw``, the bytes of a tensor from its byte ``at``, joined with
    the bytes carried over."""
    size = stored.dtype.itemsize
    if missing := -at % size:
        shared = carried.pop(name) + bytes(raw[:missing].tolist())
        yield FilePiece(
            name, stored.first + at // size, torch.frombuffer(bytearray(shared), dtype=stored.dtype)
        )
        raw, at = raw[missing:], at + missing
    if rest := raw.numel() % size:
        carried[name] = bytes(raw[-rest:].tolist())
        raw = raw[:-rest]
    if raw.numel():
        aligned = raw if raw.data_ptr() % size == 0 else raw.clone()
        yield FilePiece(name, stored.first + at // size, aligned.view(stored.dtype))


def _blocks(file: Path, spans: list[tuple[int, int]]) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields (offset, bytes) of the blocks of ``file`` that ``spans`` touch, in order, read ahead
    past the page cache."""
    nbytes = os.path.getsize(file)
    # Direct I/O moves whole disk blocks.
    whole = nbytes // native.BLOCK_NBYTES * native.BLOCK_NBYTES
    wanted = sorted(
        {at for begin, end in spans for at in range(begin // READ_NBYTES, -(-end // READ_NBYTES))}
    )
    direct = [
        (at * READ_NBYTES, min(READ_NBYTES, whole - at * READ_NBYTES))
        for at in wanted
        if at * READ_NBYTES < whole
    ]
    io = native.make_io_engine()
    region = native.Region((BLOCKS_AHEAD + 1) * READ_NBYTES, True, 1)
    if direct:
        extent = native.Extent.in_file(io.open_file(str(file)), 0, whole)
    reads: dict[int, native.Ticket] = {}
    for turn, (offset, length) in enumerate(direct):
        for ahead in range(turn, min(len(direct), turn + BLOCKS_AHEAD)):
            if ahead not in reads:
                address = region.address + ahead % (BLOCKS_AHEAD + 1) * READ_NBYTES
                reads[ahead] = io.read(
                    extent, direct[ahead][0], address, direct[ahead][1], checksum=False
                )
        reads.pop(turn).wait()
        address = region.address + turn % (BLOCKS_AHEAD + 1) * READ_NBYTES
        yield offset, native.tensor_at(region, address, length, torch.uint8)
    if any(end > whole for _, end in spans):
        with open(file, "rb") as opened:
            opened.seek(whole)
            yield whole, torch.frombuffer(bytearray(opened.read()), dtype=torch.uint8)
