"""Corpus: the training text. Files in a fixed order are read as one run of tokens, and sampled in
windows.

  corpus         the tokens of all files one after another, with a separator after each file
  window         `sequence_length` consecutive tokens: one sample of a batch
  train part     the corpus up to `train_ntokens`; training windows are wholly inside it
  held-out part  the last few percent, which only evaluation reads

The seed, step and micro-batch numbers alone determine the windows of a batch. So a resumed job
reads the same data as an uninterrupted one, with no state to save.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import ConfigError
from ...ext.checkpoint.interval import share_of
from .records import NotText, look_at

if TYPE_CHECKING:
    import torch

BYTE_VOCABULARY = 256  # byte-level: a token is a byte
SEPARATOR_BYTE = 0  # after each file of a folder; text has no NUL
HELD_OUT_SHARE = 0.03
PIECE_NCHARS = 1 << 18  # text tokenized at once: bounds the token list
NOT_SOURCE_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True, kw_only=True)
class TextFiles:
    """Files in training order. `names` are relative to the root, so a moved folder is the same
    data. `skipped`: files that are not text."""

    source: str
    paths: list[Path]
    names: list[str]
    skipped: list[str] = field(default_factory=list)

    def fingerprint(self, limit_nbytes: int) -> str:
        """Returns a hash of the files' names and sizes and of `limit_nbytes`, 16 hex digits. A
        resumed job compares it to find files added, removed, renamed or resized."""
        digest = hashlib.sha256(f"limit {limit_nbytes}\n".encode())
        for path, name in zip(self.paths, self.names, strict=True):
            digest.update(f"{name}\n{path.stat().st_size}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()[:16]


def held_out_share(args: argparse.Namespace) -> float:
    """Returns the share of ``--data`` that is held out: none with ``--eval-data``."""
    if getattr(args, "eval_data", None) is not None:
        return 0.0
    share = getattr(args, "eval_share", None)  # other commands have no such options
    return HELD_OUT_SHARE if share is None else share_of(share, "--eval-share", "the data")


def find_text_files(data: str | os.PathLike | None = None) -> TextFiles:
    """Finds the text files of a path, sorted by relative name; without a path, the sources of
    CPython's standard library. Raises ConfigError if there is no text, or a dataset."""
    if data is None:
        return standard_library_files()
    root = Path(data)
    if root.is_dir():
        return _text_files_in(root)
    if root.exists() and not root.is_file():
        raise ConfigError(f"--data: {root} is not a regular file: give a file or a folder.")
    if any(char in root.name for char in "*?,") and not root.exists():
        raise ConfigError(
            f"--data: {root} is a pattern or a list. Give one file, or the folder that has them."
        )
    if not root.is_file():
        near = difflib.get_close_matches(root.name, _names_in(root.parent), n=1)
        hint = f" Did you mean {root.parent / near[0]}?" if near else ""
        raise ConfigError(
            f"No such data: {root}.{hint} Give --data a file of samples (as chat.jsonl), a text"
            " file, or a folder of either."
        )
    if not root.stat().st_size:
        raise ConfigError(f"--data: {root} is empty. Give what is to be learned.")
    if (kind := look_at(root)) is not None:
        raise _not_text(root, kind)
    return TextFiles(source=str(root), paths=[root], names=[root.name])


def _names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _text_files_in(root: Path) -> TextFiles:
    paths, skipped = [], []
    for path in files_in(root):
        kind = look_at(path)
        if kind is not None and kind.of_dataset:
            raise _not_text(path, kind)
        (paths if kind is None else skipped).append(path)
    if not paths:
        raise ConfigError(
            f"No text files in {root}. Give --data a text file, or a folder that holds some."
        )
    return _sorted_files(root, paths, skipped)


def files_in(root: Path) -> list[Path]:
    """Lists the files of a folder, in order, but for hidden and empty ones."""
    return sorted(
        path for path in _walk(root, skip=_is_hidden) if path.is_file() and path.stat().st_size
    )


def _not_text(path: Path, found: NotText) -> ConfigError:
    return ConfigError(f"--data: {path} {found.what}. {found.way}")


def standard_library_files() -> TextFiles:
    root = Path(sysconfig.get_path("stdlib"))
    paths = [
        path for path in _walk(root, skip=NOT_SOURCE_FOLDERS.__contains__) if path.suffix == ".py"
    ]
    if not paths:
        raise ConfigError(
            f"No Python sources in {root}. Give --data a text file, or a folder of text files."
        )
    return _sorted_files(root, paths)


def _walk(root: Path, *, skip: Callable[[str], bool]) -> Iterator[Path]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if not skip(name)]
        yield from (Path(folder, name) for name in files if not skip(name))


def _is_hidden(name: str) -> bool:
    return name.startswith(".")


def _sorted_files(root: Path, paths: list[Path], skipped: Sequence[Path] = ()) -> TextFiles:
    # Sorted by path parts, independent of separator and locale: one order on every machine.
    paths = sorted(paths, key=lambda path: path.relative_to(root).parts)
    names, left = (
        [path.relative_to(root).as_posix() for path in each] for each in (paths, skipped)
    )
    return TextFiles(source=str(root), paths=paths, names=names, skipped=left)


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """`tokens`: 1-d, uint8 if byte-level, else int32; never copied as a whole."""

    source: str
    tokens: np.ndarray = field(repr=False)
    byte_level: bool
    fingerprint: str
    train_ntokens: int

    @property
    def mapped(self) -> list[np.memmap]:
        """The tokens, if they are read from a file as they are needed."""
        return [self.tokens] if isinstance(self.tokens, np.memmap) else []

    @property
    def held_out_ntokens(self) -> int:
        return len(self.tokens) - self.train_ntokens


def read_corpus(
    files: TextFiles,
    *,
    sequence_length: int,
    limit_nbytes: int,
    tokenizer: Any = None,
    share: float = HELD_OUT_SHARE,
) -> Corpus:
    """Reads at most `limit_nbytes` of the files and splits off the held-out part, a `share` of it:
    at least a window; 0: none, 1: all.

    Byte-level without a tokenizer; a single file is then mapped, not read. Raises `ConfigError` if
    there is not one window to train on and one to hold out, or a file to tokenize is not UTF-8.
    """
    tokens = (
        _encode(files, tokenizer, limit_nbytes) if tokenizer else _read_bytes(files, limit_nbytes)
    )
    parts = 2 if 0 < share < 1 else 1
    if len(tokens) < parts * sequence_length:
        windows = "one window" if parts == 1 else "one window to train on, one held out"
        raise ConfigError(
            f"{files.source} holds {len(tokens)} tokens, but a sequence length of {sequence_length}"
            f" needs {parts * sequence_length}: {windows}.\n"
            f"Give more data, or --sequence-length {max(2, len(tokens) // parts)} or less."
        )
    held_out_ntokens = int(len(tokens) * share)
    if parts == 2:
        held_out_ntokens = max(held_out_ntokens, sequence_length)
        held_out_ntokens = min(held_out_ntokens, len(tokens) - sequence_length)
    return Corpus(
        source=files.source,
        tokens=tokens,
        byte_level=tokenizer is None,
        fingerprint=files.fingerprint(limit_nbytes),
        train_ntokens=len(tokens) - held_out_ntokens,
    )


def _read_bytes(files: TextFiles, limit_nbytes: int) -> np.ndarray:
    if len(files.paths) == 1 and files.paths[0].stat().st_size > 0:
        return np.memmap(files.paths[0], dtype=np.uint8, mode="r")[:limit_nbytes]
    nbytes = min(sum(path.stat().st_size + 1 for path in files.paths), limit_nbytes)
    tokens = np.full(nbytes, SEPARATOR_BYTE, dtype=np.uint8)
    filled = 0
    for path in files.paths:
        if filled >= nbytes:
            break
        with open(path, "rb") as file:
            # The array is filled with separators already.
            filled += file.readinto(memoryview(tokens)[filled:]) + 1
    return tokens


def _encode(files: TextFiles, tokenizer: Any, limit_nbytes: int) -> np.ndarray:
    separator = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    pieces, left_nbytes = [], limit_nbytes
    for path in files.paths:
        if left_nbytes <= 0:
            break
        for text in _pieces(path, left_nbytes):
            left_nbytes -= len(text.encode())
            pieces.append(
                np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
            )
        pieces.append(np.array(separator, dtype=np.int32))
    return np.concatenate(pieces)


def _pieces(path: Path, limit_nbytes: int) -> Iterator[str]:
    """Yields the file in bounded pieces, cut at ends of lines so that no word is cut."""
    with open(path, encoding="utf-8", newline="") as file:
        while limit_nbytes > 0:
            try:
                text = file.read(min(PIECE_NCHARS, limit_nbytes)) + file.readline(PIECE_NCHARS)
                if len(raw := text.encode()) > limit_nbytes:
                    text = raw[:limit_nbytes].decode(errors="ignore")
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"--data: {path} is not UTF-8 text: {error.reason}"
                    f" 0x{error.object[error.start]:02x}"
                ) from None
            if not text:
                return
            limit_nbytes -= len(text.encode())
            yield text


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Windows of a corpus as the tensors that a model takes: tokens and labels, both int64
    [batch_size, sequence_length], and the same."""

    corpus: Corpus
    batch_size: int
    sequence_length: int
    seed: int
    evaluated: Batches | None = None  # of --eval-data

    @property
    def held_out_corpus(self) -> Corpus:
        return (self.evaluated or self).corpus

    @property
    def tokens_per_batch(self) -> int:
        return self.batch_size * self.sequence_length

    def train(self, step: int, micro_batch: int = 0) -> dict[str, torch.Tensor]:
        """Draws a micro-batch: windows at random positions of the train part, determined by (seed,
        step, micro_batch)."""
        starts_count = self.corpus.train_ntokens - self.sequence_length + 1
        draws = _random_words(self.seed, step, micro_batch, self.batch_size)
        return self._windows([int(word) % starts_count for word in draws])

    def held_out(self, batch_count: int) -> list[dict[str, torch.Tensor]]:
        """Returns at most `batch_count` batches of windows that do not overlap, spread evenly over
        the held-out part."""
        if self.evaluated is not None:
            return self.evaluated.held_out(batch_count)
        windows_count = self.corpus.held_out_ntokens // self.sequence_length
        wanted_count = min(batch_count * self.batch_size, windows_count)
        starts = [
            self.corpus.train_ntokens
            + (index * windows_count // wanted_count) * self.sequence_length
            for index in range(wanted_count)
        ]
        return [
            self._windows(starts[at : at + self.batch_size])
            for at in range(0, wanted_count, self.batch_size)
        ]

    def prompt(self, ntokens: int) -> dict[str, torch.Tensor]:
        """Returns the start of the held-out part, as a model takes it: input_ids int64 [1,
        ntokens]."""
        return {"input_ids": self.held_out(1)[0]["input_ids"][:1, :ntokens]}

    def _windows(self, starts: list[int]) -> dict[str, torch.Tensor]:
        import torch  # here, so that `infinity --help` starts fast

        rows = [self.corpus.tokens[start : start + self.sequence_length] for start in starts]
        tokens = torch.from_numpy(np.stack(rows).astype(np.int64))
        return {"input_ids": tokens, "labels": tokens}


def _random_words(seed: int, step: int, micro_batch: int, count: int) -> np.ndarray:
    # Counter-based: (seed, step, micro-batch) determines the numbers, without drawing earlier ones.
    # Raw words, because numpy keeps them the same between versions, but not those of `integers`.
    philox = np.random.Philox(key=seed, counter=[0, micro_batch, step, 0])
    return philox.random_raw(count)
