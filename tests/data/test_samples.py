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
from chat_shapes import MARKED, SHAPES
from chatty import save_base

from infinity.data.example_files import find_examples
from infinity.data.examples import NOT_LEARNED, read_examples
from infinity.errors import ConfigError


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


@pytest.mark.parametrize("name", SHAPES)
def test_each_shape_has_its_owners_rows_or_is_refused_by_name(name, tokenizer, model, tmp_path):
    """Three samples of the shape, beside TRL's rows of the same file where TRL takes it, or the
    text with what is learned."""
    shape = SHAPES[name]
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
