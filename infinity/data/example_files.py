"""Example files: finds the files of a dataset of samples, and reads them with the datasets library
into columns that TRL knows: messages; prompt and completion; or text."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .records import TABLES, look_at

# Columns of question and answer by other names; the first may have more in the third.
PAIRS = (
    ("prompt", "completion", None),
    ("prompt", "response", None),
    ("prompt", "output", None),
    ("instruction", "output", "input"),
    ("instruction", "response", "context"),
    ("question", "answer", None),
    ("query", "response", None),
    ("input", "output", None),
    ("inputs", "targets", None),
)
CHATS = ("messages", "conversations", "conversation", "dialog", "dialogue")
BESIDE = re.compile(r"(README|LICENSE|NOTICE|dataset_infos?\.json)|.*\.md$", re.I)  # of data
SAVED = ("dataset_info.json", "dataset_dict.json", "state.json")  # in a folder of `save_to_disk`


@dataclass(frozen=True, kw_only=True)
class ExampleFiles:
    """Files of one kind, in order. ``loader``: the name that `datasets.load_dataset` has for it, or
    "disk" for a folder of `save_to_disk`."""

    source: str
    loader: str
    paths: list[Path]
    left_out: list[str] = field(default_factory=list)  # names of files that are no data

    def fingerprint(self) -> str:
        """Returns a hash of the files' names and sizes, 16 hex digits."""
        digest = hashlib.sha256(self.loader.encode())
        for path in self.paths:
            files = sorted(path.rglob("*")) if path.is_dir() else [path]
            for file in files:
                digest.update(f"{file.name}\n{file.stat().st_size}\n".encode(errors="replace"))
        return digest.hexdigest()[:16]


def find_examples(data: Path | None) -> ExampleFiles | None:
    """Finds the examples at a path: a file, or a folder with files of one kind. None if it has
    none: text, or nothing. Raises ConfigError for files of several kinds, or text beside them."""
    if data is None or not (data.is_dir() or data.is_file()):
        return None
    folder = data if data.is_dir() else data.parent
    if (data.is_dir() or data.name == "config.json") and (folder / "config.json").is_file():
        if any(folder.glob("*.safetensors")):
            raise ConfigError(
                f"--data: {data} is the folder of a model, or in it: give the data it is to learn."
            )
    if data.is_dir() and any((data / name).is_file() for name in SAVED):
        return ExampleFiles(source=str(data), loader="disk", paths=[data])
    files = [data]
    if data.is_dir():
        files = sorted(
            path
            for path in data.rglob("*")
            if path.is_file()
            and path.stat().st_size
            and not any(part.startswith(".") for part in path.relative_to(data).parts)
        )
    found = {path: look_at(path) for path in files}
    loaders = {path: kind.loader for path, kind in found.items() if kind and kind.loader}
    if data.is_file() and data.suffix.lower() in TABLES:
        loaders[data] = "csv"  # a table is no running text, whatever its columns
    if not loaders:
        return None
    if len(kinds := sorted(set(loaders.values()))) > 1:
        raise ConfigError(
            f"--data: {data} has files of several kinds ({', '.join(kinds)}). Give one of them, or"
            " a folder with files of one kind."
        )
    text = [path for path in files if path not in loaders and found[path] is None]
    text = [path for path in text if not BESIDE.match(path.name)]
    if text:
        raise ConfigError(
            f"--data: {data} has both running text ({text[0].name}) and samples"
            f" ({next(iter(loaders)).name}: {found[next(iter(loaders))].what}). Give one of them."
        )
    left_out = [path.name for path in files if path not in loaders]
    return ExampleFiles(source=str(data), loader=kinds[0], paths=list(loaders), left_out=left_out)


def load_examples(datasets: Any, files: ExampleFiles) -> Any:
    """Reads the files with the library ``datasets``. Raises ConfigError if it cannot, or columns
    are unknown."""
    data = _load(datasets, files)
    if not len(data):
        raise ConfigError(f"--data: {files.source} has no samples.")
    return _in_known_columns(data, files.source)


def _load(datasets: Any, files: ExampleFiles) -> Any:
    try:
        if files.loader == "csv":
            return _load_tables(datasets, files.paths)
        if files.loader != "disk":
            paths = [str(path) for path in files.paths]
            return datasets.load_dataset(files.loader, data_files=paths, split="train")
        found = datasets.load_from_disk(str(files.paths[0]))
    except Exception as error:  # noqa: BLE001 - every reader has errors of its own
        cause = error.__cause__ or error
        line = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
        raise ConfigError(
            f"--data: datasets cannot read {files.source}: {line}{_hint(files)}"
        ) from None
    if not isinstance(found, datasets.DatasetDict):
        return found
    if "train" not in found:
        raise ConfigError(
            f"--data: {files.source} has the splits {', '.join(found)} and no split named train:"
            f" give the folder of one, as {Path(files.source) / next(iter(found), 'test')}."
        )
    return found["train"]


def _hint(files: ExampleFiles) -> str:
    """Returns what is usually wrong with files that cannot be read."""
    with open(next(path for path in files.paths if path.is_file()), "rb") as file:
        head = file.read(4096)
    if head.lstrip().startswith(b"{'"):
        return ". JSON needs double quotes: these are Python's"
    try:
        head[:-4].decode()
    except UnicodeDecodeError:
        return ". It is not UTF-8 text. Convert it: iconv -f LATIN1 -t UTF-8"
    return ""


def _load_tables(datasets: Any, paths: list[Path]) -> Any:
    """Reads CSV and TSV. Text stays as it is written: "1." is no number, and "NA" is not
    missing."""
    import pandas

    read = [
        pandas.read_csv(path, sep=TABLES[path.suffix.lower()], dtype=str, keep_default_na=False)
        for path in paths
    ]
    return datasets.Dataset.from_pandas(pandas.concat(read), preserve_index=False)


def _in_known_columns(data: Any, source: str) -> Any:
    """Returns the data with the columns messages, prompt and completion, or text alone."""
    names = {name.strip().lower(): name for name in data.column_names}
    if chat := next((name for name in CHATS if name in names), None):
        kept = data.select_columns([names[chat]])
        wanted = "conversations" if _has_from(kept[0][names[chat]]) else "messages"
        kept = kept if names[chat] == wanted else kept.rename_column(names[chat], wanted)
        return _checked_chats(kept, source, wanted)
    if {"chosen", "rejected"} <= names.keys():
        raise ConfigError(
            f"--data: {source} has pairs of preferred answers (chosen, rejected), for DPO: train it"
            " with TRL's DPOTrainer (docs/integrations.md)."
        )
    for prompt, completion, more in PAIRS:
        if prompt in names and completion in names:
            given = names[prompt], names[completion], names.get(more or "")
            return data.map(
                lambda row, given=given: {
                    "prompt": _turn("user", _joined(row, given[0], given[2])),
                    "completion": _turn("assistant", row[given[1]]),
                },
                remove_columns=data.column_names,
            )
    if "text" in names:
        kept = data.select_columns([names["text"]])
        return kept if names["text"] == "text" else kept.rename_column(names["text"], "text")
    only = data.column_names[0] if len(data.column_names) == 1 else ""
    hint = " Is ; its separator? Columns are separated by commas, or tabs in .tsv." * (";" in only)
    raise ConfigError(
        f"--data: {source} has the columns {', '.join(data.column_names)}. Needed is one of:"
        " messages or conversations; prompt and completion; instruction and output; question and"
        " answer; text."
        f"{hint}"
    )


def _checked_chats(data: Any, source: str, column: str) -> Any:
    """Returns conversations whose messages are role and text, those of several parts joined. Raises
    ConfigError, with the row, for any other."""
    changed = []
    for number, messages in enumerate(data[column], start=1):
        if messages is None:
            changed.append([])  # of another column: it is counted as empty
            continue
        where = f"--data: {source}: sample {number}"
        if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
            raise ConfigError(
                f"{where}: {column} must be a list of messages, as"
                ' [{"role": "user", "content": "..."}].'
            )
        changed.append([_checked_message(message, where) for message in messages])
    if changed == data[column]:
        return data
    return type(data).from_dict({column: changed})


def _checked_message(message: dict[str, Any], where: str) -> dict[str, Any]:
    role, said = ("from", "value") if "from" in message else ("role", "content")
    if not isinstance(message.get(role), str):
        raise ConfigError(f"{where}: a message needs {role} and {said}, and one has no {role}.")
    content = message.get(said)
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise ConfigError(f"{where}: a message has a part that is no text, as a picture.")
        return {role: message[role], said: "".join(parts)}
    if not isinstance(content, str) and not message.get("tool_calls"):
        raise ConfigError(f"{where}: a message needs {role} and {said}, and one has no {said}.")
    return message


def _has_from(messages: Any) -> bool:
    first = messages[0] if isinstance(messages, list) and messages else None
    return isinstance(first, dict) and "from" in first


def _joined(row: dict[str, Any], prompt: str, more: str | None) -> Any:
    added = row[more] if more else None
    if not isinstance(row[prompt], str):
        return row[prompt]
    return f"{row[prompt]}\n\n{added}" if added else row[prompt]


def _turn(role: str, said: Any) -> Any:
    """Makes a turn of a conversation of a text, so that the model answers in a chat; none of an
    empty one. Spaces around it, which older formats have, are no part of a turn."""
    if not isinstance(said, str):
        return said or []
    return [{"role": role, "content": said.strip()}] if said.strip() else []
