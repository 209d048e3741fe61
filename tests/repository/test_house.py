"""The inside of the package keeps the form that docs/how-it-works.md draws: a job, a pass and one
table.

Words used here:

**hub**: the engine, as other files read it: an attribute of something called engine.
**stack**: a class with the bases that stand in the package, all of which a reader has to read.

Numbers here are the ones of today. They may go down; what goes up needs another design.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from test_import_order import PACKAGE, imports_of, modules_of

HUB_READS, PROTOCOLS, PROTOCOL_NLINES, REBUILDS = 145, 8, 120, 8
# Folders of the package of whose modules each has a test file of its own.
TESTED = (
    *("core/grads", "core/params", "core/run", "core/step", "core/units"),
    *("ext/averages", "ext/class_step", "ext/local_steps", "ext/park", "ext/rows", "ext/sequence"),
)
# Modules of theirs that are tested through others. They may become fewer.
THROUGH_OTHERS = {
    *("core/run/context.py", "core/run/replaced_forward.py"),
    *("core/step/device_slots.py", "core/step/slots.py"),
}
HUB = re.compile(r"(?<![\w.])(?:self\.)?_?engine\.(?!py\b)\w+")
SEAMS = ("core/seams.py", "core/units/forms.py", "core/units/rows.py")
BY_HAND = re.compile(
    r"\b(?:refuse_between|refuse_unflushed|refuse_averaged|refuse_another_step|check_alive|check_open)\b"
)


def sources() -> dict[str, str]:
    return {
        str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))
    }


def code_of(source: str) -> str:
    """The source without docstrings and comments."""
    return ast.unparse(ast.parse(re.sub(r"^\s*#.*$", "", source, flags=re.M)))


def classes(texts: dict[str, str]) -> Iterator[ast.ClassDef]:
    for text in texts.values():
        yield from (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef))


def test_few_files_read_through_the_hub():
    """Counts reads of the engine's attributes. Twin: a read is found, in an attribute and in a
    name."""
    assert (
        len(HUB.findall("self._engine.job.store; engine.job.units; my_engine.x; other.engine.y"))
        == 2
    )
    assert sum(len(HUB.findall(text)) for text in sources().values()) <= HUB_READS


def test_parts_are_concrete():
    """Counts protocols: what has one implementation is known by its class. Of a seam, extensions
    have the implementations."""
    found = [
        node
        for node in classes({p: text for p, text in sources().items() if p not in SEAMS})
        if any(ast.unparse(base) == "Protocol" for base in node.bases)
    ]
    assert len(found) <= PROTOCOLS, [node.name for node in found]
    assert sum(node.end_lineno - node.lineno + 1 for node in found) <= PROTOCOL_NLINES


def test_few_files_know_of_stale_weights():
    """Counts the files of the core that keep two versions apart. Twin: handed-out tensors, which
    may be stale in another sense, are not counted."""
    words = re.compile(r"\b(?:StaleWeights|runs_without_flush|\w+s_stale)\b|\.stale\b|\bstale: ")
    other = ("assigned", "lent", "tensor.py")
    found = [
        path
        for path, text in sources().items()
        if path.startswith("core/") and words.search(code_of(text))
    ]
    assert len([path for path in found if not any(name in path for name in other)]) <= 10, found


def test_recovery_drops_one_object():
    """Counts what has to be rebuilt beside it: real resources only."""
    assert sum(text.count("def rebuild(") for text in sources().values()) <= REBUILDS


def test_reductions_start_at_a_fixed_place():
    """Ranks do not negotiate how many reductions they could start."""
    assert not [
        path
        for path, text in sources().items()
        if re.search(r"\b(least_offered|start_offered|MOST_OFFERED)\b", code_of(text))
    ]


def test_what_is_refused_when_stands_in_one_table():
    assert not [path for path, text in sources().items() if BY_HAND.search(text)]


def cycles(texts: dict[str, str]) -> list[tuple[str, str]]:
    """Pairs of files that lead to each other by imports, inside functions too."""
    modules = modules_of(texts)
    reach: dict[str, set[str]] = {}
    for path, text in texts.items():
        name = ".".join(Path(path).with_suffix("").parts)
        reach[name] = {
            target for _, target, _ in imports_of(text, path, modules) if target in modules
        } - {name}
    for middle in reach:  # Warshall's closure
        for found in reach.values():
            if middle in found:
                found |= reach[middle]
    return sorted(
        (one, other) for one in reach for other in reach[one] if one < other and one in reach[other]
    )


def test_no_file_leads_back_to_itself():
    """Twin: two files that import each other, one of them inside a function."""
    assert cycles({"a.py": "from .b import c", "b.py": "def f():\n    from .a import d"}) == [
        ("a", "b")
    ]
    assert not cycles(sources())


def untested(package: Path, tests: Path) -> list[str]:
    """Modules of TESTED folders of ``package`` that have no test file in that folder of
    ``tests``."""
    return [
        f"{folder}/{module.name}"
        for folder in TESTED
        for module in sorted((package / folder).glob("*.py"))
        if module.name != "__init__.py" and not (tests / folder / f"test_{module.name}").is_file()
    ]


def test_every_module_of_the_engine_has_a_test_file_of_its_own(tmp_path):
    """Twin: a tree with one module that has a test file, one whose file is in another folder, and
    one without any."""
    assert set(untested(PACKAGE, Path(__file__).parents[1])) == THROUGH_OTHERS
    made = ["package/core/run/a.py", "package/core/run/__init__.py", "tests/core/run/test_a.py"]
    made += ["package/core/step/b.py", "tests/core/run/test_b.py", "package/ext/rows/c.py"]
    for name in made:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert untested(tmp_path / "package", tmp_path / "tests") == ["core/step/b.py", "ext/rows/c.py"]


def test_files_of_tests_have_names_of_their_own():
    """pytest imports them by these names."""
    names = [path.name for path in Path(__file__).parents[1].rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
