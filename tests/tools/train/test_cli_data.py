"""What `infinity train --data` takes for text: records of a dataset are refused by name, and
nothing is left out without a word."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from infinity.errors import ConfigError
from infinity.tools.cli import main
from infinity.tools.train.corpus import find_text_files, read_corpus

TURNS = [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "A model."}]
CHAT, PAIR = {"messages": TURNS}, {"prompt": "1 + 1 =", "completion": "2"}


def lines(*values: object) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


RECORDS = {  # name of a file -> its content, and a part of the message
    "chat.jsonl": (lines(CHAT, CHAT), "records in JSON lines (messages)"),
    "one.jsonl": (lines(CHAT), "records in JSON lines"),
    "chat.txt": (lines(CHAT, CHAT), "records in JSON lines"),
    "chat": (lines(CHAT), "records in JSON lines"),
    "odd.ndjson": (lines({"a": 1}, {"b": 2}), "records in JSON lines (a)"),
    "spaced.jsonl": (
        "\n\ufeff"[1:] + "\n\n" + lines(PAIR, PAIR),
        "records in JSON lines (prompt, completion)",
    ),
    "pairs.jsonl": (lines(["user", "hi"], ["assistant", "ho"]), "JSON lines"),
    "broken.jsonl": ('{"messages": [\n', "JSON lines"),
    "list.json": (json.dumps([CHAT, CHAT]), "records in JSON (messages)"),
    "pretty.json": (json.dumps([PAIR, PAIR], indent=2), "records in JSON (prompt, completion)"),
    "one.json": (json.dumps(CHAT, indent=2), "records in JSON (messages)"),
    "inside.json": (
        json.dumps({"version": 1, "data": [{"question": "?", "answer": "!"}]}),
        "records in JSON (question, answer)",
    ),
    "columns.json": (json.dumps({"prompt": ["a"], "completion": ["b"]}), "records in JSON"),
    "table.json": (
        json.dumps([{"question": "a", "response_j": "b"}] * 2),
        "records in JSON (question, response_j)",
    ),
    "cut_off.json": ('[\n{"question": "a", "response_j": "b"},', "records in JSON"),
    "sharegpt.json": (
        json.dumps([{"id": 1, "conversations": [{"from": "human", "value": "hi"}]}]),
        "records in JSON",
    ),
    "alpaca.json": (
        json.dumps([{"instruction": "add", "input": "1 1", "output": "2"}]),
        "records in JSON",
    ),
    "two_pretty.json": (
        json.dumps(CHAT, indent=1) + "\n" + json.dumps(CHAT, indent=1),
        "records in JSON",
    ),
    "table.csv": ('prompt,completion\n"a, b",c\n', "a table with the columns prompt, completion"),
    "table.tsv": ("text\tlabel\nhi\t1\n", "a table with the columns text, label"),
    "x.parquet": (b"PAR1\x15\x04\x15\x00", "a Parquet file"),
    "renamed.txt": (b"PAR1" + b"text only, so far", "a Parquet file"),
    "data-00000-of-00001.arrow": (b"\xff\xff\xff\xff\x80\x02\0\0", "an Arrow stream"),
    "x.arrow": (b"ARROW1\0\0", "an Arrow file"),
    "tokens.npy": (b"\x93NUMPY\x01\0", "a NumPy array"),
    "chat.jsonl.gz": (gzip.compress(lines(CHAT).encode()), "compressed"),
    "book.txt.zst": (b"\x28\xb5\x2f\xfd\0", "compressed"),
}
TEXTS = {
    "a.md": '# A title\n\nAs JSON: {"messages": []}\n',
    "b.py": "{\n}\n",
    "package.json": json.dumps({"name": "x", "scripts": {}}, indent=2),
    "one_line.json": '{"compilerOptions": {"strict": true}}',
    "rules.json": json.dumps([{"name": "x"}, {"test": "y"}]),
    "lyrics.txt": "[Verse 1]\nla la\n[Verse 2]\nla\n",
    "numbers.json": "[1, 2, 3]",
    "table.csv": "year,rain\n1999,3\n",
    "braces.txt": "{ not json }\n{ nor this }\n",
    "bom.txt": "\ufeffplain",
    "PARTY.txt": "PART 1: PAR",
}


def write(path: Path, content: str | bytes) -> None:
    path.write_bytes(content.encode() if isinstance(content, str) else content)


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("inside", [False, True], ids=["file", "folder"])
def test_records_are_refused_by_name(name, inside, tmp_path):
    """Method: every kind, alone and in a folder that has text too: the file, what it is, and the
    way. Twin: the text alone."""
    content, what = RECORDS[name]
    (tmp_path / "deep").mkdir()
    write(tmp_path / "deep" / name, content)
    write(tmp_path / "a.txt", "plain text\n" * 9)
    with pytest.raises(ConfigError) as caught:
        find_text_files(tmp_path if inside else tmp_path / "deep" / name)
    said = str(caught.value)
    assert name in said and what in said, said
    assert "Unpack it first" in said or "Give what is to be learned" in said, said
    (tmp_path / "deep" / name).unlink()
    assert find_text_files(tmp_path).names == ["a.txt"]


def test_text_is_text_whatever_it_looks_like(tmp_path):
    """Method: texts with braces, brackets, tables and settings in JSON, alone and in a folder."""
    for name, content in TEXTS.items():
        write(tmp_path / name, content)
        assert find_text_files(tmp_path / name).names == [name]
    assert (
        find_text_files(tmp_path).names == sorted(TEXTS) and not find_text_files(tmp_path).skipped
    )


def test_parquet_as_the_library_writes_it_is_refused(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["a", "b"]}), tmp_path / "train.parquet")
    for data in (tmp_path, tmp_path / "train.parquet"):
        with pytest.raises(ConfigError, match="train.parquet is a Parquet file"):
            find_text_files(data)


@pytest.mark.parametrize(
    "content, what",
    [
        (b"un caf\xe9", "not UTF-8 text. Convert it: iconv -f LATIN1"),
        ("text".encode("utf-16"), "not UTF-8 text. Convert it: iconv -f UTF-16"),
        (b"\x89PNG\0\0", "a picture"),
        (b"%PDF-1.4\xe9", "a PDF: extract its text first"),
        (b"a\0b", "not UTF-8 text"),
    ],
)
def test_what_is_no_text_is_refused_alone_and_told_in_a_folder(content, what, tmp_path):
    write(tmp_path / "a.txt", "plain")
    write(tmp_path / "other", content)
    with pytest.raises(ConfigError, match=f"other is {what}"):
        find_text_files(tmp_path / "other")
    found = find_text_files(tmp_path)
    assert found.names == ["a.txt"] and found.skipped == ["other"]


def test_a_tokenizer_gets_no_replaced_characters(tmp_path):
    """Method: a byte that is no UTF-8, behind what is looked at first: refused, where it became
    another character. Twin: a whole text."""

    class Letters:
        eos_token_id = None

        def __call__(self, text, add_special_tokens):
            return {"input_ids": [ord(letter) for letter in text]}

    write(tmp_path / "late.txt", b"a" * 20_000 + b"caf\xe9" + b"b" * 100)
    write(tmp_path / "right.txt", ("a" * 20_000 + "café").encode())
    with pytest.raises(ConfigError, match="late.txt is not UTF-8 text"):
        read_corpus(
            find_text_files(tmp_path / "late.txt"),
            sequence_length=4,
            limit_nbytes=1 << 20,
            tokenizer=Letters(),
        )
    corpus = read_corpus(
        find_text_files(tmp_path / "right.txt"),
        sequence_length=4,
        limit_nbytes=1 << 20,
        tokenizer=Letters(),
    )
    assert corpus.tokens[-1] == ord("é")


def test_the_command_says_what_it_leaves_out(tmp_path, monkeypatch, capsys):
    """Method: a folder with a picture, and one with records: told, and one message."""
    pytest.importorskip("transformers"), pytest.importorskip("rich")
    monkeypatch.chdir(tmp_path)
    Path("model.json").write_text(
        json.dumps(
            {
                "model_type": "gpt2",
                "vocab_size": 257,
                "n_positions": 32,
                "n_embd": 16,
                "n_layer": 1,
                "n_head": 2,
            }
        )
    )
    Path("data").mkdir()
    write(Path("data", "a.txt"), "To be, or not to be. " * 40)
    write(Path("data", "b.png"), b"\x89PNG\0\0")
    command = (
        "train --model model.json --data data --steps 1 --batch-size 1 --sequence-length 8"
        " --eval-batches 1 --dtype fp32".split()
    )
    assert main(command) == 0
    assert "data: 1 file left out (not UTF-8 text): b.png" in capsys.readouterr().out
    write(Path("data", "chat.jsonl"), lines(CHAT))
    assert main(command) == 2
    said = capsys.readouterr()
    assert said.out == "" and "chat.jsonl: holds records in JSON lines (messages)" in said.err
