"""The documents say what is so: their Python runs as printed, their commands run, their links lead
somewhere, their fields exist.

Words used here:

**script**: the Python blocks of one document, one after the other. **command**: a line of a
document that calls `infinity`; what it leaves open (`<dir>`, `...`) is filled in here.

What runs is `slow`: `make docs` runs it, in CI too, and a sample of the long tables.
"""

from __future__ import annotations

import ast
import dataclasses
import datetime
import errno
import json
import os
import re
import shlex
import sys
from pathlib import Path

import prepared
import pytest
from chatty import PAIRS, ROWS, save_base, save_rows
from pictured import picture, save_pictured
from ranks import run_torchrun

from infinity import Config, ConfigError
from infinity.tools.cli import parse
from infinity.tools.plan.machine_file import Machine

ROOT = Path(__file__).parents[2]
DOCUMENTS = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT, ROOT / "docs")
    for path in path.glob("*.md")
}
README = DOCUMENTS["README.md"]
WEEK = datetime.date.today().toordinal() // 7  # which cells of long tables are in the sample
SCRIPTS = {
    name: [
        block
        for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
        if not block.startswith("# job.py")
    ]
    for name, text in DOCUMENTS.items()
}
JOBS = [
    block
    for name in ("docs/many-ranks.md", "docs/slow-links.md")
    for block in re.findall(r"```python\n(.*?)```", DOCUMENTS[name], flags=re.DOTALL)
    if block.startswith("# job.py")
]

TRAIN = "--steps 2 --sequence-length 32 --batch-size 2 --dtype fp32"
FILLED = {  # what a document leaves open -> what is meant
    "<folder|config.json>": "model.json",
    "<file|folder>": "text.txt",
    "infinity train --model <folder> --data <chat.jsonl> --out <tuned>": (
        "infinity train --model base --data chat.jsonl --out tuned"
    ),
    "infinity train --model <folder> --data <chat.jsonl> --lora": (
        "infinity train --model base --data chat.jsonl --lora"
    ),
    "<folder> --data <pictures.jsonl> --out <tuned> --sequence-length 4096": (
        "pictured --data pictures.jsonl --out tuned --sequence-length 128"
    ),
    "<folder> --data <pairs.jsonl> --out <tuned>": "base --data pairs.jsonl --out tuned",
    "--steps 2 --checkpoint <checkpoint>": "--steps 2 --checkpoint saved",
    "infinity export <checkpoint> <tuned>": (
        f"infinity train --model base --data chat.jsonl --checkpoint saved {TRAIN}"
        " && infinity export saved tuned"
    ),
    "<tuned>": "answers",
    "infinity export <base>": (
        f"infinity train --model base --data chat.jsonl --lora --out adapter {TRAIN}"
        " && infinity export base"
    ),
    "<merged>": "merged",
    "<adapter>": "adapter",
    "<chat.jsonl>": "chat.jsonl",
    "infinity train ...": f"infinity train --model model.json --data text.txt {TRAIN}",
    "--nvme-path <dir> --host-memory 256MiB --checkpoint <dir> --out <dir>": (
        f"--nvme-path . --host-memory 256MiB --checkpoint saved --out out {TRAIN}"
    ),
}
DEEPSPEED = {
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme"},
    }
}
MODEL = {
    "model_type": "gpt2",
    "vocab_size": 257,
    "n_positions": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
}


def commands() -> list[str]:
    """Every command of every document that calls ``infinity``, on one line; benchmarks and jobs on
    several hosts are elsewhere."""
    found = []
    for text in DOCUMENTS.values():
        joined = re.sub(r"\\\n\s+", "", text)
        found += [
            line.split("  #")[0].strip()
            for line in joined.splitlines()
            if line.startswith("    infinity ")
        ]
    return sorted({line for line in found if not line.startswith("infinity bench")})


EXAMPLES = {  # files of docs/cost.md that its commands read
    f"{name}.{kind}": text
    for name, kind in (("run", "json"), ("prices", "csv"), ("jobs", "toml"))
    for text in re.findall(rf"```{kind}\n(.*?)```", DOCUMENTS["docs/cost.md"], flags=re.DOTALL)
}

LOOP = """
import torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for step in range(2):
    model(torch.ones(3, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""  # a script that `infinity run` is given

ELSEWHERE = (  # tests/ext/integrations/test_recipes.py runs it, where the libraries are
    "docs/integrations.md"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, blocks in SCRIPTS.items() if blocks and name != ELSEWHERE]
)
def test_the_blocks_run_one_after_the_other_as_printed(name, tmp_path):
    """Method: a document's blocks form one script, run in an empty folder."""
    script = tmp_path / "blocks.py"
    script.write_text("\n".join(SCRIPTS[name]))
    done = prepared.run(script, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.glob(".infinity-*")), "swap files were left behind"


# Commands that need the hub, a server of somebody's, or run until they are ended
OUTSIDE = [each for each in commands() if re.search("--prometheus|--push|--log wandb", each)]


@pytest.mark.parametrize("command", OUTSIDE)
def test_the_commands_that_need_others_are_read(command):
    """Method: the command's own parser. Twin: an option that it does not have."""
    for open_, meant in FILLED.items():
        command = command.replace(open_, meant)
    words = shlex.split(command)[1:]
    assert parse(words).subcommand == words[0]
    with pytest.raises(SystemExit):
        parse([*words, "--pusch"])


@pytest.mark.slow
@pytest.mark.parametrize("command", [each for each in commands() if each not in OUTSIDE])
def test_the_commands_run(command, tmp_path):
    """Method: each command in an empty folder with a small model and a text, with what it leaves
    open filled in."""
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED))
    for name, text in EXAMPLES.items():
        (tmp_path / name).write_text(text)
    for name in ("train.py", "package/module.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(LOOP)
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question. " * 200)
    if any(name in command for name in ("<tuned>", "<chat.jsonl>", "<base>")):
        save_base(tmp_path / "base", width=64)  # large enough to be packed
        save_base(tmp_path / "answers")
        save_rows(tmp_path / "chat.jsonl", [ROWS["messages"](*pair) for pair in PAIRS])
        pairs = [{"prompt": q, "chosen": a, "rejected": f"{a}0"} for q, a in PAIRS]
        save_rows(tmp_path / "pairs.jsonl", pairs)
    if "<pictures.jsonl>" in command:
        pytest.importorskip("PIL")
        save_pictured("llava", tmp_path / "pictured")
        picture().save(tmp_path / "1.png")
        save_rows(
            tmp_path / "pictures.jsonl", [ROWS["messages"](*PAIRS[0]) | {"image": "1.png"}] * 4
        )
    for open_, meant in FILLED.items():
        command = command.replace(open_, meant)
    assert "<" not in command and "..." not in command, "a command that this test cannot fill in"
    for one in command.split(" && "):
        one, _, file = one.partition(" > ")
        words = "-m", *shlex.split(one)
        done = prepared.run(*words, folder=tmp_path, imports=prepared.LANGUAGE_MODELS)
        assert done.returncode == 0, f"{one}\n{done.stdout}\n{done.stderr}"
        if file:
            (tmp_path / file.strip()).write_text(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sample_of_what_fits_is_what_is_planned():
    """Method: plans a cell of each machine anew, another one each week; test_doc_tables.py plans
    all. Twin: the cell of another machine."""
    sys.path.insert(0, str(ROOT / "tools"))
    import what_fits

    text = DOCUMENTS["docs/what-fits.md"]
    for title, machines, sample in (
        ("| | laptop |", what_fits.MACHINES, what_fits.sample(WEEK)),
        ("| | two-rtx3090 |", what_fits.NODES, what_fits.sample_of_meshes(WEEK)),
    ):
        tables = tables_of(text, title)
        assert [machine for _, _, machine, _ in sample] == list(machines)
        for table, row, machine, cell in sample:
            assert tables[table][row][machine] == cell
        printed = [tables[table][row][machine] for table, row, machine, _ in sample]
        assert len(set(printed)) > 1


def tables_of(text: str, title: str) -> list[dict[str, dict[str, str]]]:
    """The tables of a document whose first line begins with ``title``: row -> column -> cell."""
    found = []
    for block in text.split("\n\n"):
        if block.strip().startswith(title):
            (_, *columns), _, *rows = (
                [cell.strip() for cell in line.strip("|").split("|")]
                for line in block.strip().splitlines()
            )
            found.append({name: dict(zip(columns, cells)) for name, *cells in rows})
    return found


def test_the_machine_of_your_own_is_one(tmp_path):
    """Method: reads the file as printed. Twin: without a line of it."""
    (block,) = re.findall(r"```toml\n(.*?)```", DOCUMENTS["docs/what-fits.md"], flags=re.DOTALL)
    (tmp_path / "mine.toml").write_text(block)
    machine = Machine.read(str(tmp_path / "mine.toml"))
    assert machine.devices == 2 and machine.drive_rating == 1200e12 and machine.sources
    (tmp_path / "mine.toml").write_text(block.replace("host = {memory", "guest = {memory"))
    with pytest.raises(ConfigError, match=r"\[host\] memory = None must be"):
        Machine.read(str(tmp_path / "mine.toml"))


def test_the_page_of_models_names_what_is_tested():
    """Method: every architecture of the tests is on the page, in its family's row."""
    from zoo import ZOO

    for entry in ZOO.values():
        (row,) = re.findall(rf"^\| {entry.family} \|.*$", DOCUMENTS["docs/models.md"], re.M)
        assert entry.name in row.rsplit("|", 2)[1].replace(" ", "").split(",")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sample_of_the_table_of_models_is_what_they_do():
    """Method: trains a model of each family anew, another one each week; test_doc_tables.py trains
    all. Twin: a run with other bits is not the same."""
    sys.path.insert(0, str(ROOT / "tools"))
    import tested_models

    (ROOT / "build").mkdir(exist_ok=True)
    (table,) = tables_of(DOCUMENTS["docs/models.md"], "| family | device |")
    families = tested_models.families()
    assert table.keys() == families.keys()
    first, *others = tested_models.HOMES.items()
    for family, entries in families.items():
        every = f"{len(entries)} of {len(entries)}"
        names = ", ".join(entry.name for entry in entries)
        assert table[family] == dict.fromkeys(tested_models.HOMES, every) | {"models": names}
        entry = entries[WEEK % len(entries)]
        run = tested_models.trained(entry, first[1])
        assert all(tested_models.has_same_bits(entry, run, home) for _, home in others)
    run.losses[0] = run.losses[0] + 1
    assert not tested_models.has_same_bits(entry, run, others[0][1])


def messages() -> str:
    """The text of every message of the package, and of torch's and the system's that users see;
    "..." stands for values."""
    found = ["CorruptionError", os.strerror(errno.EROFS), "CUDA out of memory"]
    for path in (ROOT / "infinity").rglob("*.py"):
        tree = ast.parse(path.read_text())
        found += [text_of(node) for node in ast.walk(tree)]
    for path in (ROOT / "csrc").rglob("*.cpp"):
        found += re.findall(r'"([^"\n]*)"', path.read_text())
    return "\n".join(found)


def text_of(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value) if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(each) or "..." for each in node.values)
    return ""


def test_troubleshooting_has_the_words_of_the_messages():
    """Twin: words that no message has are found out."""
    text, all_of_them = DOCUMENTS["docs/troubleshooting.md"], messages()
    rows = re.findall(r"^\| `([^|]+)` \|", text.partition("## Without a message")[0], re.M)
    assert len(rows) > 40

    def is_there(words: str) -> bool:
        pattern = ".*".join(map(re.escape, words.split("...")))
        return re.search(pattern, all_of_them) is not None

    assert not [words for words in rows if not is_there(words)]
    assert not is_there("the moon is full")


def test_there_are_commands():
    """The twin of the search: it finds what the README shows."""
    assert (
        any(command.startswith("infinity train") for command in commands()) and len(commands()) >= 4
    )


def test_every_field_has_its_row_and_default():
    """Reads the table of docs/configuration.md and compares it with Config's fields."""
    rows = dict(
        re.findall(
            r"^\| `(\w+)` \| `([^`]+)` \|",
            DOCUMENTS["docs/configuration.md"].split("## The optimizer")[0],
            flags=re.MULTILINE,
        )
    )
    assert rows == {
        field.name: (
            json.dumps(field.default) if isinstance(field.default, str) else repr(field.default)
        )
        for field in dataclasses.fields(Config)
    }


def test_links_lead_somewhere():
    """Follows every relative link and picture of every document."""
    broken = []
    for name, text in DOCUMENTS.items():
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
            if not target.startswith("http") and not ((ROOT / name).parent / target).exists():
                broken.append(f"{name}: {target}")
    assert not broken


def test_files_that_are_named_exist():
    """Looks for every path of the code that a document names."""
    missing = []
    for name, text in DOCUMENTS.items():
        for path in re.findall(r"`((?:csrc|infinity|tests|docs|bench|tools)/[\w/.]+\.\w+)`", text):
            missing += [f"{name}: {path}"] if not (ROOT / path).exists() else []
    for path in re.findall(
        r"`((?:core|ext|files|ranks)/[\w/]+\.py)`",
        DOCUMENTS["docs/how-it-works.md"] + DOCUMENTS["docs/glossary.md"],
    ):
        missing += [path] if not (ROOT / "infinity" / path).exists() else []
    assert not missing


def test_every_system_of_the_papers_has_its_test():
    """Method: the last column of the page's table names one function of the tests each. The twin:
    a name that is none is not found."""
    defined = [
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(), flags=re.MULTILINE)
    ]
    table = DOCUMENTS["docs/papers.md"].partition("## Their tables")[0]
    named = re.findall(r"\| `(test_\w+)` \|$", table, flags=re.MULTILINE)
    assert len(named) == table.count("\n| ") - 1 > 20 and len(set(named)) == len(named)
    assert [name for name in named if defined.count(name) != 1] == []
    assert "test_zero_passes_no_volume" not in defined


def test_every_promise_of_what_is_kept_has_its_tests():
    """Method: each section of the page has reports with their threads, and names functions in the
    files that it links. Twin: a name that is in none of them is not found."""
    link = re.compile(r"\[`(test_\w+)`\]\(\.\./(tests/[\w/]+\.py)\)")
    thread = re.compile(r"\(https://github\.com/[\w-]+/[\w-]+/(?:pull|issues)/\d+\)")
    page = DOCUMENTS["docs/kept.md"]
    sections = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    assert len(sections) == 6
    assert all(len(thread.findall(each)) >= 2 <= len(link.findall(each)) for each in sections)

    def is_there(name: str, path: str) -> bool:
        text = (ROOT / path).read_text()
        return re.search(rf"^def {name}\(", text, flags=re.MULTILINE) is not None

    named = link.findall(page)
    assert len(named) == page.count("`test_")
    assert [each for each in named if not is_there(*each)] == []
    assert not is_there("test_nothing_is_lost", named[0][1])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("job", JOBS)
def test_the_jobs_of_many_ranks_run_as_printed(job, tmp_path, monkeypatch):
    """Method: the command in its first line, in an empty folder."""
    (tmp_path / "job.py").write_text(job)
    words = job.splitlines()[0].split()
    assert words[2:5] == ["torchrun", "--standalone", "--nproc-per-node"] and words[-1] == "job.py"
    monkeypatch.chdir(tmp_path)
    done = run_torchrun(int(words[5]), ["job.py"])
    assert done.returncode == 0, done.stderr
    assert ("save_checkpoint" in job) == any(tmp_path.glob("checkpoint/**/manifest.json"))
    assert not list(tmp_path.glob(".infinity-*")), "swap files were left behind"


def test_the_readme_is_short():
    """The loop has about ten lines, and the whole about a hundred."""
    loop = [line for line in SCRIPTS["README.md"][0].splitlines() if line.strip()]
    assert len(loop) <= 12 and len(README.splitlines()) <= 110


def test_the_two_commands_stand_where_it_is_installed_and_exist():
    makefile = (ROOT / "Makefile").read_text()
    for command in ("train", "test"):
        assert f"make {command}" in README.partition("## From a chat")[0]
        assert re.search(rf"^{command}:", makefile, flags=re.MULTILINE)


WORDS = {"home": r"homes?", "unit": r"units?", "stall": r"stall(?:s|ed)?", "lane": r"lanes?"}
OF_OTHERS = {"CONTRIBUTING.md": ["unit"], "publishing.md": ["unit"]}  # of measure, of compilation
TOLD = re.compile(
    r"between (?:its )?uses|what is moved together|is what moves|the loop waits|a block, say"
    r"|waited for it"
)


def untold(page: Path) -> list[str]:
    """The words of the engine's own whose first use in a page's prose neither links to the glossary
    nor stands beside what it means."""
    found = []
    text = re.sub(r"(?ms)^```.*?^```|^    .*?$|^#.*?$", "", page.read_text())
    text = re.sub(r"`[^`]*`|\]\((?![^)]*glossary\.md)[^)]*\)|SIMD unit|vector unit", " ", text)
    for word, forms in WORDS.items():
        first = re.search(rf"(?<![\w-])(?:{forms})(?![\w-])", text)
        if first is None or word in OF_OTHERS.get(page.name, ()):
            continue
        around = " ".join(text[max(0, first.start() - 200) : first.end() + 200].split())
        linked = re.match(r"[^\[\]]*\]\([^)]*glossary\.md", text[first.end() :])
        if not (linked or TOLD.search(around) or text[: first.start()].endswith("**")):
            found.append(f"{page.name}: {word}")
    return found


def test_each_page_says_what_our_words_mean_where_it_uses_them_first(tmp_path):
    """Twins: a word without a link, one with it after its first use, and one in code alone."""
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md", ROOT / "examples/README.md"]
    pages = [page for page in pages if page.name not in ("glossary.md", "extensions.md")]
    assert [each for page in pages for each in untold(page)] == []
    page = tmp_path / "page.md"
    for text, expected in (
        ("Weights at home.", ["page.md: home"]),
        ("Weights at home, their [home](glossary.md).", ["page.md: home"]),
        ("Weights at [home](glossary.md), and `a unit`.", []),
    ):
        page.write_text(text)
        assert untold(page) == expected
