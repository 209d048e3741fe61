"""Samples: each shape of chat data is read as its owner reads it, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("trl")
pytest.importorskip("datasets")

import datasets
import transformers
import trl
from chat_shapes import CALLED, CHAT, LONG, MARKED, PUBLIC, SHAPES, TOOL
from chatty import save_base

from infinity.errors import ConfigError
from infinity.tools.train.example_files import find_examples
from infinity.tools.train.examples import NOT_LEARNED, read_examples


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return save_base(tmp_path_factory.mktemp("chatty") / "base", template=MARKED)


@pytest.fixture
def tokenizer(base):
    return transformers.AutoTokenizer.from_pretrained(base)


@pytest.fixture(scope="module")
def model(base):
    return transformers.AutoModelForCausalLM.from_pretrained(base)


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path, tokenizer, **given):
    return read_examples(find_examples(path), tokenizer, **({"sequence_length": 999} | given))


def shown(found, tokenizer, at: int = 0) -> str:
    """A row's text, with what is learned in brackets."""
    text, learned = "", False
    row = found.rows[at]
    for token, label in zip(row["input_ids"], row["labels"]):
        if learned != (label != NOT_LEARNED):
            text, learned = text + ("]" if learned else "["), not learned
        text += tokenizer.decode([token])
    return text + "]" * learned


def of_trl(path: Path, tokenizer, model, folder: Path) -> list[tuple[list[int], list[int]]]:
    """The rows that TRL's trainer makes of the same file."""
    data = datasets.load_dataset("json", data_files=[str(path)], split="train")
    names = data.column_names
    args = trl.SFTConfig(
        output_dir=str(folder),
        max_length=999,
        assistant_only_loss="messages" in names or "conversations" in names,
        use_cpu=True,
        bf16=False,
        report_to=[],
    )
    made = trl.SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer)
    batches = [made.data_collator([row]) for row in made.train_dataset]
    return [(each["input_ids"][0].tolist(), each["labels"][0].tolist()) for each in batches]


@pytest.mark.parametrize("name", [*SHAPES, *PUBLIC])
def test_each_shape_has_its_owners_rows_or_is_refused_by_name(name, tokenizer, model, tmp_path):
    """Three samples of the shape, beside TRL's rows of the same file where TRL takes it, or the
    text with what is learned. A public file has the same rows as Parquet."""
    shape = (SHAPES | PUBLIC)[name]
    path = write(tmp_path / "data.jsonl", [shape.row] * 3)
    if shape.refused:
        with pytest.raises(ConfigError) as refusal:
            read(path, tokenizer)
        assert all(word in str(refusal.value) for word in shape.refused), refusal.value
        return
    found = read(path, tokenizer)
    if shape.said:
        assert shown(found, tokenizer) == shape.said
    else:
        rows = [(row["input_ids"], row["labels"]) for row in found.rows]
        assert rows == of_trl(path, tokenizer, model, tmp_path / "trl")
    assert any(shape.told in line for line in found.told), found.told
    assert found.sample_count == len(found.rows) == 3
    if name in PUBLIC:
        datasets.Dataset.from_list([shape.row] * 3).to_parquet(tmp_path / "data.parquet")
        again = read(tmp_path / "data.parquet", tokenizer)
        assert again.fingerprint == found.fingerprint and again.told == found.told


def test_a_format_that_fills_keys_has_the_rows_of_one_that_does_not(tokenizer, tmp_path):
    """Parquet has a column for each property of any tool, and for each key of any message: JSON
    lines of the same samples. Twin: TRL's file of tools has keys of the other tool."""
    other = {"type": "function", "function": {"name": "sub", "parameters": {"b": {"c": 1}}}}
    named = [{**CHAT[0], "name": "Ann"}, CHAT[1]]
    rows = [
        {"messages": CALLED, "tools": [TOOL]},
        {"messages": named, "tools": [other]},
        {"messages": CHAT, "tools": None},
    ]
    lines = read(write(tmp_path / "data.jsonl", rows), tokenizer)
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "data.parquet")
    filled = read(tmp_path / "data.parquet", tokenizer)
    assert filled.rows["input_ids"] == lines.rows["input_ids"]
    assert filled.rows["labels"] == lines.rows["labels"] and filled.told == lines.told
    assert "b" in table[0]["tools"][0]["function"]["parameters"]


SPOILED = {  # a sample that cannot be used whole -> what is told
    "a number": ({"messages": [CHAT[0], {**CHAT[1], "content": 2}]}, "content '2', of type int"),
    "half a weight": ({"messages": [CHAT[0], {**CHAT[1], "weight": 0.5}]}, "weight 0.5: 0, 1"),
    "two marks": (
        {"messages": [CHAT[0], {**CHAT[1], "weight": 0, "train": True}]},
        "contradict each other",
    ),
    "two texts": ({"messages": [CHAT[0], {**CHAT[1], "text": "3."}]}, "both content and text"),
    "two systems": (
        {"messages": [{"role": "system", "content": "a"}, *CHAT], "system": "b"},
        "begins with another",
    ),
    "another system, in capitals": (
        {"messages": [{"role": "SYSTEM", "content": "a"}, *CHAT], "system": "b"},
        "begins with another",
    ),
    "tools in a message": (
        {"messages": [{"role": "system", "content": "a", "tools": [TOOL]}, *CHAT]},
        "does not render tools of a message",
    ),
    "functions in a question": (
        {"messages": [{**CHAT[0], "functions": [TOOL["function"]]}, CHAT[1]]},
        "does not render functions of a message",
    ),
    "names of tools": ({"messages": CHAT, "tools": ["add"]}, "tools is text, and no JSON"),
    "tools that are no JSON": ({"messages": CHAT, "tools": "add(a)"}, "tools is text, and no JSON"),
    "calls that are no JSON": (
        {"messages": [CHAT[0], {"role": "assistant", "tool_calls": "add(a)"}]},
        "tool_calls is text, and no JSON",
    ),
    "a call that is no list": (
        {"messages": [CHAT[0], {"role": "assistant", "tool_calls": {"name": "add"}}]},
        "tool_calls must be a list",
    ),
    "variables of the renderer": (
        {"messages": CHAT, "chat_template_kwargs": {"tools": []}},
        "it cannot be rendered (TypeError",
    ),
    "a history of texts": (
        {"instruction": "a", "output": "b", "history": ["c"]},
        "history must be a list of pairs",
    ),
    "a picture in a message": (
        {"messages": [{**CHAT[0], "images": ["a.png"]}, CHAT[1]]},
        "a message has images",
    ),
}


@pytest.mark.parametrize("what", SPOILED)
def test_a_sample_that_cannot_be_used_whole_is_refused_with_its_number(what, tokenizer, tmp_path):
    """It is the second. Twin: without it the others are read."""
    row, said = SPOILED[what]
    plain = {"messages": CHAT} if "messages" in row else {"instruction": "a", "output": "b"}
    rows = [plain, row, plain]
    with pytest.raises(ConfigError) as refusal:
        read(write(tmp_path / "data.jsonl", rows), tokenizer)
    assert "sample 2: " in str(refusal.value) and said in str(refusal.value), refusal.value
    assert len(read(write(tmp_path / "twin.jsonl", rows[::2]), tokenizer).rows) == 2


def test_a_history_of_messages_comes_after_the_system_message(tokenizer, tmp_path):
    """Beside a conversation that begins with one, as beside a pair. Twin: pairs say the same."""
    system = {"role": "system", "content": "Be brief."}
    for history in (CHAT, [["1+1?", "2."]]):
        for row in (
            {"messages": [system, *LONG[2:]], "history": history},
            {"prompt": "2+2?", "completion": "4.", "system": "Be brief.", "history": history},
        ):
            found = read(write(tmp_path / "data.jsonl", [row] * 2), tokenizer)
            assert shown(found, tokenizer) == (
                "<|system|>Be brief.<|end|><|user|>1+1?<|end|><|assistant|>[2.<|end|>]"
                "<|user|>2+2?<|end|><|assistant|>[4.<|end|>]"
            )


def test_tools_are_read_however_their_json_is_nested(tokenizer, tmp_path):
    """A list, its text, and a list of texts. Twin: of no tools nothing is rendered, also where a
    message has an empty list of them."""
    empty = [{**CHAT[0], "tools": []}, CHAT[1]]
    for tools in ([TOOL], json.dumps([TOOL]), [json.dumps(TOOL)]):
        rows = [{"messages": CHAT, "tools": tools}] * 2
        found = read(write(tmp_path / "data.jsonl", rows), tokenizer)
        assert shown(found, tokenizer).startswith(f"<|tools|>{json.dumps([TOOL])}<|end|><|user|>")
    found = read(write(tmp_path / "twin.jsonl", [{"messages": empty}] * 2), tokenizer)
    assert shown(found, tokenizer).startswith("<|user|>")


def test_data_of_which_nothing_can_be_learned_says_why(tokenizer, tmp_path):
    """All answers without weight, lists in place of samples, in both kinds of JSON. Twin: no lists
    of texts are samples."""
    silent = [CHAT[0], {**CHAT[1], "weight": 0}]
    with pytest.raises(ConfigError, match="no answer of .* is to be learned: each has weight 0"):
        read(write(tmp_path / "data.jsonl", [{"messages": silent}] * 3), tokenizer)
    with pytest.raises(ConfigError, match="must be an object, as .*, and none is a list"):
        read(write(tmp_path / "lists.jsonl", [CHAT] * 3), tokenizer)
    (tmp_path / "lists.json").write_text(json.dumps([CHAT] * 3))
    with pytest.raises(ConfigError, match="the columns 0, 1. Needed is one of"):
        read(tmp_path / "lists.json", tokenizer)
    (tmp_path / "text.json").write_text(json.dumps([["a", "b"], [["c"]]]))
    assert find_examples(tmp_path / "text.json") is None


@pytest.mark.parametrize("key", ["weight", "trainable", "loss_weight"])
def test_an_answer_that_its_author_leaves_out_is_context(key, tokenizer, tmp_path):
    """The first of two. Twin: half a weight is refused."""
    turns = [LONG[0], {**LONG[1], key: 0}, *LONG[2:]]
    found = read(write(tmp_path / "data.jsonl", [{"messages": turns}] * 2), tokenizer)
    assert shown(found, tokenizer).count("[") == 1 and "[4." in shown(found, tokenizer)
    with pytest.raises(ConfigError, match=f"a message has {key} 0.5"):
        turns[1][key] = 0.5
        read(write(tmp_path / "twin.jsonl", [{"messages": turns}] * 2), tokenizer)


@pytest.mark.parametrize(
    "text",
    [
        "prompt,completion\nyes, or no?,yes\nyes, or no?,no\n",
        "prompt,completion\r\na,b,\r\na,b\r\n",
        "prompt\tcompletion\na\tb\na\tb\tc\n",
    ],
)
def test_a_table_with_more_fields_than_columns_is_refused(text, tokenizer, tmp_path):
    """All rows, the first, a later one: their fields would be of another column. Twin: in quotes
    they are fields of their own."""
    path = tmp_path / ("data.tsv" if "\t" in text else "data.csv")
    path.write_bytes(text.encode())
    with pytest.raises(ConfigError, match="more fields than the first line|Expected 2 fields"):
        read(path, tokenizer)
    sign = "\t" if path.suffix == ".tsv" else ","
    path.write_text(f"prompt{sign}completion\n" + f'"a{sign} b"{sign}c\n' * 2)
    assert len(read(path, tokenizer).rows) == 2
