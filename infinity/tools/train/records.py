"""Records: detects files that are a dataset's samples, not running text, so that no model is
trained on their syntax or raw bytes.

record     a JSON object that is one sample: a conversation, a prompt with its completion
container  a binary file of a dataset: Parquet, Arrow, compressed text
"""

from __future__ import annotations

import csv
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SNIFF_NBYTES = 8192  # read to distinguish text from binary
LINE_NCHARS = 1 << 20  # read of each of the first lines
WHOLE_NBYTES = 1 << 24  # the largest JSON document that is parsed
MAGIC = {
    b"PAR1": "a Parquet file",
    b"PARE": "an encrypted Parquet file",
    b"ARROW1": "an Arrow file",
    b"\xff\xff\xff\xff": "an Arrow stream",
    b"\x93NUMPY": "a NumPy array",
    b"\x89HDF": "an HDF5 file",
    b"SQLite format 3": "an SQLite database",
    b"Obj\x01": "an Avro file",
    b"ORC": "an ORC file",
    b"LANC": "a Lance file",
}
LOADERS = {
    "a Parquet file": "parquet",
    "an Arrow file": "arrow",
    "an Arrow stream": "arrow",
    "parquet": "parquet",
    "arrow": "arrow",
}
CONTAINERS = re.compile(
    r"\.(parquet|arrow|feather|avro|orc|lance|tfrecords?|h5|hdf5|npy|npz|mds)$", re.I
)
COMPRESSED = re.compile(
    r"\.(txt|text|md|jsonl?|ndjson|csv|tsv|warc|tar|parquet|arrow)\.(gz|bz2|xz|zst|lz4|zip)$|\.tgz$",
    re.I,
)
LINES = re.compile(r"\.(jsonl|ndjson|jsonlines)$", re.I)
TABLES = {".csv": ",", ".tsv": "\t"}
SHAPES = tuple(
    frozenset(keys.split())
    for keys in (
        "messages",
        "conversations",
        "conversation",
        "dialog",
        "dialogue",
        "interactions",
        "chosen rejected",
        "prompt completion",
        "prompt completions",
        "prompt response",
        "prompt chosen",
        "prompt output",
        "instruction output",
        "instruction response",
        "instruction input",
        "question answer",
        "question answers",
        "query answers",
        "question response",
        "query response",
        "problem solution",
        "role content",
        "from value",
        "text",
        "inputs targets",
        "input output",
    )
)
KEYS = re.compile(
    r'\A\[\s*\{\s*"|'
    r'"(messages|conversations?|dialog(?:ue)?|chosen|completions?|instruction)"\s*:\s*["\[{]'
)
READ = "It is not read here."
TRAIN = "Give what is to be learned as text, JSON lines, Parquet or CSV."
PICTURES = {
    b"\x89PNG": "a picture (PNG)",
    b"\xff\xd8\xff": "a picture (JPEG)",
    b"GIF8": "a picture (GIF)",
    b"%PDF": "a PDF: extract its text first",
    b"\x1f\x8b": "compressed: unpack it first, with gunzip",
    b"PK\x03\x04": "an archive: unpack it first",
    b"GGUF": "a model (GGUF)",
}
UTF16 = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True)
class NotText:
    """Why a file is not running text. ``what``: what it is or holds. ``way``: the remedy.
    ``of_dataset``: it holds training data, so it is an error rather than skipped. ``loader``: what
    `datasets.load_dataset` calls its kind, if it reads it."""

    what: str
    way: str
    of_dataset: bool
    loader: str | None = None


def look_at(path: Path) -> NotText | None:
    """Classifies a regular file by its content and name. Returns None for running text or an empty
    file."""
    with open(path, "rb") as file:
        head = file.read(SNIFF_NBYTES)
    if not head:
        return None
    if COMPRESSED.search(path.name):
        how = "gunzip" if path.suffix == ".gz" else "its own program"
        return NotText("is compressed", f"Unpack it first, with {how}.", True)
    kind = next((kind for magic, kind in MAGIC.items() if head.startswith(magic)), None)
    if kind is not None or (CONTAINERS.search(path.name) and not _is_utf8(head)):
        loader = LOADERS.get(kind or path.suffix.lower()[1:])
        return NotText(f"is {kind or path.suffix[1:]}", f"{READ} {TRAIN}", True, loader)
    if not _is_utf8(head):
        what = next((what for magic, what in PICTURES.items() if head.startswith(magic)), None)
        if what is not None:
            return NotText(f"is {what}", TRAIN, False)
        coding = "UTF-16" if head.startswith(UTF16) else "LATIN1"
        return NotText("is not UTF-8 text", f"Convert it: iconv -f {coding} -t UTF-8.", False)
    if (what := _records_in(path, head)) is not None:
        loader = "csv" if path.suffix.lower() in TABLES else "json"
        return NotText(what, TRAIN, True, loader)
    return None


def _is_utf8(head: bytes) -> bool:
    if b"\0" in head:
        return False
    try:
        head.decode()
    except UnicodeDecodeError as error:
        # The last character may be cut off at SNIFF_NBYTES.
        return len(head) == SNIFF_NBYTES and error.start > len(head) - 4
    return True


def _records_in(path: Path, head: bytes) -> str | None:
    """Describes the records of a text file; None if it has none."""
    begin = head.decode("utf-8-sig", errors="replace").lstrip()
    if (separator := TABLES.get(path.suffix.lower())) is not None:
        columns = next(csv.reader([begin.partition("\n")[0]], delimiter=separator), [])
        return (
            f"is a table with the columns {', '.join(columns)}"
            if _is_record(dict.fromkeys(columns))
            else None
        )
    if begin[:1] not in ("{", "[") and not LINES.search(path.name):
        return None
    lines = _first_lines(path)
    values = [_parsed(line) for line in lines]
    if all(isinstance(value, dict) for value in values) and (
        len(values) > 1 or LINES.search(path.name) or _is_record(values[0])
    ):
        return _described("holds records in JSON lines", values[0])
    if LINES.search(path.name):
        return "holds JSON lines"
    value = values[0] if len(values) == 1 else None
    if value is None and path.stat().st_size <= WHOLE_NBYTES:
        value = _parsed(path.read_text(encoding="utf-8-sig", errors="replace"))
    sample = _sample_of(value) or _row_of(value)
    if sample is None and value is None and begin[:1] in ("{", "[") and KEYS.search(begin):
        return "holds records in JSON"  # too long to parse, or cut off
    return None if sample is None else _described("holds records in JSON", sample)


def _first_lines(path: Path) -> list[str]:
    lines: list[str] = []
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        while len(lines) < 2 and (line := file.readline(LINE_NCHARS)):
            lines += [line] if line.strip() else []
    return lines


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _sample_of(value: Any) -> dict[str, Any] | None:
    """Finds the first record in a JSON document: the document itself, an item of it, or an item of
    a list in it, at any depth."""
    if isinstance(value, dict):
        if _is_record(value):
            return value
        lists = (each for each in value.values() if isinstance(each, list))
        return next((sample for each in lists if (sample := _sample_of(each)) is not None), None)
    for each in value[:3] if isinstance(value, list) else ():
        if isinstance(each, list) and (sample := _sample_of(each)) is not None:
            return sample
        if isinstance(each, dict) and _is_record(each):
            return each
    return None


def _row_of(value: Any) -> dict[str, Any] | None:
    """Returns the first of a list of objects with the same keys: rows of a table, not text."""
    rows = value if isinstance(value, list) and len(value) > 1 else [None]
    is_table = all(isinstance(row, dict) and row and row.keys() == rows[0].keys() for row in rows)
    return rows[0] if is_table else None


def _is_record(value: dict[str, Any]) -> bool:
    names = {name.strip().lower() for name in value if isinstance(name, str)}
    return any(shape <= names for shape in SHAPES)


def _described(what: str, record: dict[str, Any]) -> str:
    names = ", ".join(str(name)[:40] for name in list(record)[:6])
    return f"{what} ({names})"
