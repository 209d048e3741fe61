"""Columns, keys and roles of training samples: what the docs say is done with each is what the code
does, and every other one is listed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from lazily import Lazily

datasets = Lazily("datasets")

from infinity.errors import ConfigError
from infinity.tools.train.columns import KNOWN, PAIRS, Form, choose_form

DOCS = Path(__file__).parents[3] / "docs" / "command-line.md"


def form_of(row: dict) -> Form:
    return choose_form(datasets.Dataset.from_list([row]), "data.jsonl")


def test_the_docs_list_every_known_name_and_what_is_done_with_it():
    """The table of docs/command-line.md is read, and compared with KNOWN. Twin: another word."""
    text = DOCS.read_text().split("## Training data")[1].split("\n## ")[0]
    table = text.split("| in samples | name | what is done |")[1].split("\n\n")[0]
    rows = [re.split(r" *\| *", line)[1:4] for line in table.splitlines()[2:]]
    made = [
        [each.place, ", ".join(f"`{name}`" for name in each.names), each.done] for each in KNOWN
    ]
    assert rows == made != [["column", "`x`", "used"]]
    pairs = re.findall(r"`(\w+)`\s\+\s`(\w+)`", text)
    assert pairs == list(PAIRS)


def test_no_name_has_two_uses_at_a_place():
    for place in ("column", "key", "role"):
        names = [name for each in KNOWN if each.place == place for name in each.names]
        assert len(names) == len(set(names))


ANSWER = {"prompt": "1+1?", "completion": "2."}
REFUSED = {
    "label": (ANSWER | {"label": False}, "KTO"),
    "rejected_response": (ANSWER | {"rejected_response": "3."}, "DPO"),
    "images": (ANSWER | {"images": ["a.png"]}, "text alone"),
    "documents": (ANSWER | {"documents": [{"title": "a"}]}, "documents to answer from"),
    "sample_weight": (ANSWER | {"sample_weight": 0.5}, "same here"),
    "weights": (ANSWER | {"weights": [0, 1]}, "same here"),
    "options": (ANSWER | {"options": ["1", "2"]}, "choose from"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_column_that_cannot_be_used_is_refused_by_name(name):
    """With the first sample that has it, and the way out. Twin: empty, it has no effect."""
    row, said = REFUSED[name]
    with pytest.raises(ConfigError) as refusal:
        form_of(row)
    assert f"column {name} (first in sample 1)" in str(refusal.value)
    assert said in str(refusal.value) and "emove the column" in str(refusal.value).replace(
        "and the column", "emove the column"
    )
    for empty in (None, "", [], [None, {"path": ""}]):
        assert form_of(row | {name: empty}).pair == ("prompt", "completion")


def test_a_label_beside_a_text_is_listed():
    """A class of texts tells nothing of answers. Twin: beside an answer it is refused."""
    form = form_of({"text": "Good film.", "label": 1})
    assert form.told(["text", "label"]) == ["Read as text: text", "Columns left out: label"]
    with pytest.raises(ConfigError, match="label"):
        form_of(ANSWER | {"label": 1})


FORMS = {  # two forms in one row -> how it is read
    "Read as conversations: messages": ANSWER | {"messages": [{"role": "user", "content": "a"}]},
    "Read as questions and answers: prompt, completion": ANSWER | {"text": "1+1? 2."},
    "Read as questions and answers: Instruction, Output; with Input": {
        "Instruction": "Add.",
        "Input": "1+1",
        "Output": "2.",
    },
}


@pytest.mark.parametrize("told", FORMS)
def test_a_file_of_two_forms_is_told_how_it_is_read(told):
    """The columns of the other form are listed as left out."""
    row = FORMS[told]
    form = form_of(row)
    lines = form.told(list(row))
    assert lines[0] == told
    left = set(row) - set(form.used)
    assert (len(lines) == 2) == bool(left) and all(name in lines[-1] for name in left)


def test_one_thing_by_two_names_is_refused():
    """Neither is dropped. Twin: one of them is used."""
    row = ANSWER | {"system": "a", "system_prompt": "b"}
    with pytest.raises(ConfigError, match="system and system_prompt, which are one thing"):
        form_of(row)
    assert form_of(ANSWER | {"system_prompt": "b"}).system == "system_prompt"


def test_an_empty_column_of_pictures_is_not_in_the_way_of_another():
    """Beside one that has pictures. Twin: both have some."""
    data = [ANSWER | {"image": None, "images": ["a.png"]}, ANSWER | {"image": "b.png"}]
    for rows, said in ((data[:1], "images"), (data[1:], "image")):
        read = datasets.Dataset.from_list(rows)
        assert choose_form(read, "data.jsonl", pictures=True).pictures == said
    with pytest.raises(ConfigError, match="image and images, which are one thing"):
        choose_form(datasets.Dataset.from_list(data), "data.jsonl", pictures=True)


def test_text_for_a_question_is_refused_beside_a_conversation():
    """The question is in the conversation. Twins: empty; of another form, which is listed."""
    chat = {"messages": [{"role": "user", "content": "a"}]}
    with pytest.raises(ConfigError, match=r"column context \(first in sample 1\) is text for a q"):
        form_of(chat | {"context": "One is 1."})
    assert form_of(chat | {"context": ""}).used == ["messages"]
    row = chat | {"instruction": "a", "input": "b", "output": "c"}
    assert form_of(row).told(list(row))[1] == "Columns left out: instruction, input, output"
