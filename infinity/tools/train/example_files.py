"""Example files: finds the files of a dataset of samples, and reads them with the datasets
library."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from .corpus import files_in
from .records import TABLES, look_at
from .wording import first_line

BESIDE = re.compile(r"(README|LICENSE|NOTICE|dataset_infos?\.json)|.*\.md$", re.I)  # of data
SAVED = ("dataset_info.json", "dataset_dict.json", "state.json")  # in a folder of `save_to_disk`


@dataclass(frozen=True, kw_only=True)
class ExampleFiles:
    """Files of one kind, in order. ``loader``: the name that `datasets.load_dataset` has for it, or
    "disk" for a folder of `save_to_disk`."""

    source: str
    loader: str
    paths: list[Path]
    left_out: list[str] = field(default_factory=list)  # names of files that are not data


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
    files = files_in(data) if data.is_dir() else [data]
    kind_of = {path: look_at(path) for path in files}
    loaders = {path: kind.loader for path, kind in kind_of.items() if kind and kind.loader}
    if data.is_file() and data.suffix.lower() in TABLES:
        loaders[data] = "csv"  # a table is not running text, whatever its columns
    if not loaders:
        return None
    if len(kinds := sorted(set(loaders.values()))) > 1:
        raise ConfigError(
            f"--data: {data} has files of several kinds ({', '.join(kinds)}). Give one of them, or"
            " a folder with files of one kind."
        )
    text = [path for path in files if path not in loaders and kind_of[path] is None]
    text = [path for path in text if not BESIDE.match(path.name)]
    if text:
        raise ConfigError(
            f"--data: {data} has both running text ({text[0].name}) and samples"
            f" ({next(iter(loaders)).name}: {kind_of[next(iter(loaders))].what}). Give one of them."
        )
    left_out = [path.name for path in files if path not in loaders]
    return ExampleFiles(source=str(data), loader=kinds[0], paths=list(loaders), left_out=left_out)


def load_examples(datasets: Any, files: ExampleFiles) -> Any:
    """Reads the files with the library ``datasets``. Raises ConfigError if it cannot, or if they
    have no samples."""
    data = _load(datasets, files)
    if not len(data):
        raise ConfigError(f"--data: {files.source} has no samples.")
    return data


def is_padded(datasets: Any, files: ExampleFiles) -> bool:
    """Tells whether what is read has None for each key of a message that others have. JSON is read
    as it is written since datasets 4.7."""
    return files.loader != "json" or not hasattr(datasets, "Json")


def _load(datasets: Any, files: ExampleFiles) -> Any:
    try:
        if files.loader == "csv":
            return _load_tables(datasets, files.paths)
        if files.loader != "disk":
            paths = [str(path) for path in files.paths]
            options = {"path": files.loader, "data_files": paths, "split": "train"}
            data = datasets.load_dataset(**options)
            if is_padded(datasets, files):
                return data
            # datasets guesses types: of values of several types in lists it takes a text for its
            # JSON ("2." is 2.0 then), and of dates alone it makes times. As JSON of the whole
            # column they stay texts.
            mixed = {
                name: datasets.Json()
                for name, feature in data.features.items()
                if "timestamp" in repr(feature)
                or ("Json(" in repr(feature) and not isinstance(feature, datasets.Json))
            }
            if mixed:
                options["features"] = datasets.Features({**data.features, **mixed})
            return datasets.load_dataset(**options) if mixed else data
        stored = datasets.load_from_disk(str(files.paths[0]))
    except Exception as error:  # noqa: BLE001 - every reader has errors of its own
        cause = error.__cause__ or error
        raise ConfigError(
            f"--data: datasets cannot read {files.source}: {first_line(cause)}{_hint(files)}"
        ) from None
    if not isinstance(stored, datasets.DatasetDict):
        return stored
    if "train" not in stored:
        raise ConfigError(
            f"--data: {files.source} has the splits {', '.join(stored)} and no split named train:"
            f" give the folder of one, as {Path(files.source) / next(iter(stored), 'test')}."
        )
    return stored["train"]


def _hint(files: ExampleFiles) -> str:
    """Returns what is usually wrong with files that cannot be read."""
    with open(next(path for path in files.paths if path.is_file()), "rb") as file:
        head = file.read(4096)
    if head.lstrip().startswith(b"{'"):
        return ". JSON needs double quotes: these are Python's"
    if re.match(rb"(\xef\xbb\xbf)?\s*\[\s*[\[{\"]", head):
        return '. Each sample must be an object, as {"messages": [...]}, and none is a list'
    try:
        head[:-4].decode()
    except UnicodeDecodeError:
        return ". It is not UTF-8 text. Convert it: iconv -f LATIN1 -t UTF-8"
    return ""


def _load_tables(datasets: Any, paths: list[Path]) -> Any:
    """Reads CSV and TSV. Text stays as it is written: "1." is not a number, and "NA" is not
    missing."""
    import pandas

    options = {"dtype": str, "keep_default_na": False, "index_col": False}
    with warnings.catch_warnings():
        # A row of more fields than the first line would move or lose them.
        warnings.simplefilter("error", pandas.errors.ParserWarning)
        try:
            read = [
                pandas.read_csv(path, sep=TABLES[path.suffix.lower()], **options) for path in paths
            ]
        except pandas.errors.ParserWarning:
            raise ValueError(
                "a row has more fields than the first line has columns. Put texts with a separator"
                ' in them into double quotes, as "a, b"'
            ) from None
    return datasets.Dataset.from_pandas(pandas.concat(read), preserve_index=False)
