"""The core names few features, and fewer with each change: imports upward, files that know a
feature, tokens, walks over a model's modules. `pytest -rP` prints them by folder.

Words used here:

**core**: `core/`, `ranks/` and `files/` of infinity/. Its ceilings may only fall.
**pair**: a file of the core and a feature that it knows by an import or a word of features.toml.
**walk**: a call that goes over all modules or parameters of a model.
"""

from __future__ import annotations

import ast
import collections
import functools
import io
import re
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

from test_import_order import PACKAGE, imports_of, modules_of, sources, upward

CORE = ("core", "ranks", "files")
WORDS = {
    feature: re.compile("|".join(table["words"]))
    for feature, table in tomllib.loads(
        Path(__file__).with_name("features.toml").read_text()
    ).items()
}
# What was reached. A change may lower a number, and raises none.
MOST_IMPORTS, MOST_PAIRS, MOST_WALKS = 0, 25, 29
MOST_TOKENS = {"core": 165_943, "ranks": 18_038, "files": 7_214}
MOST_ASKED = 14
ASKED = re.compile(r"collectives(?:\.of_experts)?\.([a-z]\w*)")
WALKS = re.compile(
    r"\b(?:named_)?(?:modules|parameters|children|buffers)\((?:remove_duplicate=\w+)?\)"
)
# What scripts, data of preferences, scores, servers and trackers come from and go to
DOORS = re.compile(
    r"\b(?:trl|lm[-_]eval|vllm|sglang|ollama|llama[._]cpp|wandb|mlflow|trackio|tensorboard|prometheus"
    r"|dpo|kto|orpo|simpo|nanogpt|cleanrl)\b",
    re.I,
)
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}
OPENS = {tokenize.INDENT, tokenize.NEWLINE, tokenize.NL, tokenize.ENCODING, tokenize.DEDENT}


@functools.cache
def code_tokens(source: str) -> tuple[tokenize.TokenInfo, ...]:
    """The tokens of a file without comments and docstrings."""
    found, before = [], tokenize.ENCODING
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        docstring = token.type == tokenize.STRING and before in OPENS
        if token.type not in NO_CODE and not docstring:
            found.append(token)
        before = token.type
    return tuple(found)


def folder_of(path: str) -> str:
    """The first folder of a file below the package, or the file itself."""
    return path.partition("/")[0]


def pairs(texts: dict[str, str]) -> Iterator[tuple[str, str]]:
    """The pairs of ``texts`` (path below the package -> text)."""
    modules = modules_of(texts)
    for path, text in sorted(texts.items()):
        if folder_of(path) not in CORE:
            continue
        names = {token.string for token in code_tokens(text) if token.type == tokenize.NAME}
        targets = [target.split(".") for _, target, _ in imports_of(text, path, modules)]
        imported = {parts[1] for parts in targets if parts[0] == "ext" and len(parts) > 1}
        known = {feature for feature, words in WORDS.items() if any(map(words.fullmatch, names))}
        yield from ((path, feature) for feature in sorted(known | imported))


def test_few_files_of_the_core_know_a_feature():
    """Reads all names in the code of the core. Twins: a file that imports one, one that names one,
    one that has the word in a comment and a docstring, and an extension."""
    made = {
        "core/run/a.py": "from ...ext.park.parking import x",
        "core/run/b.py": "def f(unit):\n    return unit.stale",
        "core/run/c.py": '"""Knows no LocalSteps."""\nx = 1  # stale\n',
        "ext/park/parking.py": "x = stale = 1",
    }
    assert list(pairs(made)) == [("core/run/a.py", "park"), ("core/run/b.py", "versions_2bw")]
    found = list(pairs(sources()))
    print(collections.Counter(feature for _, feature in found).most_common())
    print(collections.Counter(path for path, _ in found).most_common(15))
    assert len(found) <= MOST_PAIRS, found


def named(texts: dict[str, str]) -> list[tuple[str, str]]:
    """The files of ``texts`` that name a door, with its word, in code, docstring or comment."""
    told = {"library_versions.py", "integrations.py"}  # least versions, and public names
    return sorted(
        {
            (path, word)
            for path, text in texts.items()
            if folder_of(path) not in ("ext", "tools") and path not in told
            for word in DOORS.findall(text)
        }
    )


def test_no_file_outside_of_extensions_and_tools_names_a_door():
    """Twins: the name of one in code, in a string and in a comment; and longer words."""
    made = {
        "core/run/a.py": "import trl",
        "files/b.py": 'x = "lm-eval"',
        "config.py": "x = 1  # of vLLM",
        "core/run/c.py": "control = ollamas = 1",
        "tools/eval/d.py": "import lm_eval",
    }
    assert named(made) == [
        ("config.py", "vLLM"),
        ("core/run/a.py", "trl"),
        ("files/b.py", "lm-eval"),
    ]
    assert named(sources()) == []


def test_few_imports_lead_from_the_core_into_extensions_and_tools():
    """Counts the import lines of the core that name one."""
    found = {
        where.partition(" imports")[0]
        for low, high, where in upward(sources())
        if low in CORE and high in ("ext", "tools")
    }
    print(len(found), *sorted(found), sep="\n")
    assert len(found) <= MOST_IMPORTS


def test_the_core_does_not_grow():
    """Counts tokens without comments and docstrings, of each folder. Twin: a docstring and a
    comment count nothing."""
    assert len(code_tokens('"""Doc."""\n\n\ndef f():\n    """Doc."""\n    return 1  # why\n')) == 7
    found: collections.Counter[str] = collections.Counter()
    for path, text in sources().items():
        parts = Path(path).parts
        for depth in range(1, min(len(parts), 3)):
            found["/".join(parts[:depth])] += len(code_tokens(text))
        found["all"] += len(code_tokens(text))
    print(*(f"{number:8,}  {folder}" for folder, number in sorted(found.items())), sep="\n")
    assert all(found[folder] <= most for folder, most in MOST_TOKENS.items()), found


def test_the_core_asks_few_things_of_other_ranks():
    """Counts the functions that the core calls of `Collectives`, and compares them with the page
    that lists them. Twin: two are found in a line that has two."""
    assert ASKED.findall("a._collectives.reduce(collectives.same)") == ["reduce", "same"]
    found = {
        name
        for path, text in sources().items()
        if folder_of(path) in CORE and not path.endswith("traffic.py")  # counts by name
        for name in ASKED.findall(ast.unparse(ast.parse(text)))
    } - {"of_experts", "ranks", "steps", "traffic"}
    print(*sorted(found), sep="\n")
    page = (PACKAGE.parent / "docs" / "how-it-works.md").read_text()
    page = page.partition("## What the core asks of other ranks")[2].partition("\n## ")[0]
    assert len(found) <= MOST_ASKED and found == {*re.findall(r"(?m)^\| `(\w+)` \|", page)}, found


def test_the_core_rarely_walks_over_a_model():
    """Counts calls of `modules()`, `named_parameters()` and their like in the core. Twin: one is
    found, with an argument as well."""
    assert len(WALKS.findall("m.modules(); m.named_parameters(remove_duplicate=False)")) == 2
    found = {
        path: len(WALKS.findall(ast.unparse(ast.parse(text))))
        for path, text in sources().items()
        if folder_of(path) in CORE
    }
    print(*(f"{number:4}  {path}" for path, number in sorted(found.items()) if number), sep="\n")
    assert sum(found.values()) <= MOST_WALKS, found
