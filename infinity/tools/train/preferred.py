"""Preferred: samples whose answers are told good from bad, as the rows that TRL's trainers take.

pair    a question with an answer that is preferred, and one that is rejected
judged  a question with one answer, which a label tells to be good or bad
chat    rows of messages, which the chat template renders; the other kind of rows is text, which
        stays as it is written
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

from ...errors import ConfigError
from . import samples
from .columns import KNOWN, PAIRS, first_filled, is_empty, known
from .corpus import HELD_OUT_SHARE
from .example_files import ExampleFiles, is_padded, load_examples
from .examples import PLAIN_TEMPLATE, held_out_count, libraries
from .methods import METHODS, Method
from .prompts import Prompts

PROMPTS = tuple(dict.fromkeys(question for question, _ in PAIRS))
UNREAD = ""  # in a row that is being made: keys that the template does not read
TRUTHS = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}
NEEDED = {
    True: "chosen and rejected, with prompt or messages",
    False: "a label, with prompt and completion or with messages; or chosen and rejected",
}


@dataclass(frozen=True, kw_only=True)
class Preferred:
    """Rows for a trainer of TRL. ``told``: how the data was read, and what of it is not used."""

    source: str
    rows: Any = field(repr=False)  # a datasets.Dataset
    train_count: int  # the first rows, which are learned
    told: list[str]
    has_own_template: bool
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class PreferredForm:
    """Columns that rows are made of, as the file spells them. ``bad``: the label tells the bad
    answers, not the good ones."""

    messages: str | None = None
    prompt: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    answer: str | None = None
    label: str | None = None
    bad: bool = False
    more: tuple[str, ...] = ()  # follow the prompt
    system: str | None = None
    tools: str | None = None
    variables: str | None = None
    chat: bool = False  # texts are turns of a chat, since something beside them is of one

    @property
    def said(self) -> list[str]:
        main = (self.messages, self.prompt, self.chosen, self.rejected, self.answer)
        return [name for name in main if name]

    @property
    def used(self) -> list[str]:
        beside = (self.label, self.system, self.tools, self.variables)
        return [*self.said, *self.more, *(name for name in beside if name)]


def read_preferred(
    files: ExampleFiles, tokenizer: Any, method: str, *, share: float = HELD_OUT_SHARE
) -> Preferred:
    """Reads the files as rows for the ``method``, of which a ``share`` is held out, as by
    :func:`read_examples`. Gives a tokenizer without a chat template a plain one, if messages need
    it.

    Raises ConfigError if a library is missing, columns are unknown or cannot be used, or a sample
    has no use: with its number, and the way out."""
    if tokenizer is None:
        raise ConfigError(
            f"--method {method}: {files.source} has samples, which need a model with a tokenizer:"
            " give --model a folder that has one."
        )
    with libraries() as (datasets, trl):
        data = load_examples(datasets, files)
        form = choose_preferred(data, files.source, METHODS[method])
        has_template = bool(tokenizer.chat_template)
        template = str(tokenizer.chat_template or PLAIN_TEMPLATE)
        made, empty, same, unread = [], 0, 0, set[str]()
        digest = hashlib.sha256(template.encode())
        digest.update(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
        prompts = Prompts(
            tokenizer=tokenizer,
            source=files.source,
            adds_special=METHODS[method].refers,  # as TRL's trainers have it
        )
        for at, row in enumerate(data.select_columns(form.used), 1):
            if all(is_empty(row[name]) for name in form.used if name != form.label):
                empty += 1
                continue
            try:
                row_made = _row(row, form, template, padded=is_padded(datasets, files))
                _check_kind(made, row_made)
                if _is_chat(row_made):
                    unread |= row_made.pop(UNREAD)
                    tokenizer.chat_template = tokenizer.chat_template or PLAIN_TEMPLATE
                asked = row_made if "prompt" in row_made else trl.extract_prompt(row_made)
                if not asked["prompt"]:
                    raise ConfigError(
                        "no question comes before the answers, which begin with no word that both"
                        " have. Add a prompt."
                    )
                prompts.read(asked)
            except ConfigError as error:
                raise ConfigError(f"--data: {files.source}, sample {at}: {error}") from None
            made.append(row_made)
            same += row_made.get("chosen") == row_made.get("rejected") and "chosen" in row_made
            digest.update(json.dumps(row_made, sort_keys=True, default=str).encode())
        if not made:
            raise ConfigError(f"--data: all samples of {files.source} are empty.")
        if not _is_chat(made[0]) and tokenizer.eos_token is None:
            raise ConfigError(
                f"--data: the answers of {files.source} are texts, and the tokenizer has no token"
                " that ends one. Write them as messages, or give it an eos_token."
            )
        held_out = held_out_count(len(made), share)
        if len(made) < 1 + (0 < share < 1):
            raise ConfigError(
                f"--data: 2 samples are needed, one to train on and one held out, and"
                f" {files.source} has 1. Give more data."
            )
        if share < 1:
            _check_labels(made[: len(made) - held_out], files.source, method)
        chat = _is_chat(made[0])
        rows = datasets.Dataset.from_list(made, features=_features(datasets, made, files.source))
        notes = _told(form, data.column_names, unread, chat=chat, empty=empty, same=same)
    return Preferred(
        source=files.source,
        rows=rows,
        train_count=len(made) - held_out,
        told=[*notes, *prompts.told()],
        has_own_template=has_template or not chat,
        fingerprint=digest.hexdigest()[:16],
    )


def _features(datasets: Any, made: list[dict[str, Any]], source: str) -> Any:
    """Returns the types of rows whose messages have calls of tools, or whose templates have
    variables: JSON, since Arrow gives each the keys of all others. None: Arrow finds them."""
    keys = {key for row in made for key in row}
    said = [each for row in made for value in row.values() for each in _messages(value)]
    if "tools" in keys:  # the first row has the names of all columns
        for row in made:
            row.setdefault("tools", None)
    if "chat_template_kwargs" in keys:
        for row in made:
            row.setdefault("chat_template_kwargs", {})
    elif all(each.keys() == {"role", "content"} for each in said):
        return None
    if not hasattr(datasets, "Json"):
        raise ConfigError(
            f"--data: {source} has calls of tools, or variables of the chat template, which"
            f" datasets {datasets.__version__} does not keep as they are. python -m pip install"
            " --upgrade datasets"
        )
    whole = {
        "label": datasets.Value("bool"),
        "tools": datasets.Value("string"),
        "chat_template_kwargs": datasets.Json(),
    }
    turns = datasets.List(datasets.Json())
    return datasets.Features({key: whole.get(key, turns) for key in sorted(keys)})


def _messages(value: Any) -> list[dict[str, Any]]:
    return value if isinstance(value, list) else []


def _told(
    form: PreferredForm,
    names: list[str],
    unread: set[str],
    *,
    chat: bool,
    empty: int,
    same: int,
) -> list[str]:
    kind = "pairs of answers" if form.chosen or form.rejected else "answers with a label"
    how = "messages, by the chat template" if chat else "text, without a chat template"
    lines = [f"Read as {kind} ({how}): {', '.join(form.used)}"]
    if left := [name for name in names if name not in form.used]:
        lines.append(f"Columns left out: {', '.join(left)}")
    if unread:
        lines.append(f"Keys that the chat template does not read: {', '.join(sorted(unread))}")
    if empty:
        lines.append(f"{empty:,} samples left out (empty)")
    if same:
        lines.append(f"{same:,} samples have the same answer twice, of which nothing is learned")
    return lines


def choose_preferred(data: Any, source: str, method: Method) -> PreferredForm:
    """Chooses the columns that rows for a method are made of. ``data``: a `datasets.Dataset`.

    Raises ConfigError if the method cannot learn of them, or a column has what cannot be used."""
    names = {name.strip().lower(): name for name in data.column_names}
    option = f"--method {method.name}"

    def first(found: tuple[str, ...]) -> str | None:
        there = [names[name] for name in found if name in names]
        there = [name for name in there if first_filled(data, name)] if len(there) > 1 else there
        if len(there) > 1:
            raise ConfigError(
                f"--data: {source} has the columns {' and '.join(there)}, which are one thing by"
                " two names. Remove one of them."
            )
        return there[0] if there else None

    def refuse(name: str, why: str) -> None:
        if at := first_filled(data, name):
            raise ConfigError(f"--data: {source}: the column {name} (first in sample {at}) {why}")

    for each in KNOWN:
        if each.refused and each.use not in ("preferences", "label", "tree"):
            for name in (names[name] for name in each.names if name in names):
                refuse(name, each.refused)
    answers = known("column", "preferences")
    chosen, rejected = first(answers[:2]), first(answers[2:])
    label = first(known("column", "label"))
    messages = first(known("column", "messages"))
    if label and not any(name and first_filled(data, name) for name in (chosen, rejected)):
        chosen = rejected = None  # of a library that writes both forms into one
    paired = rejected is not None and bool(chosen or messages)
    if not paired and (method.paired or label is None):
        raise ConfigError(
            f"--data: {option} learns from {'pairs of answers' if method.paired else method.data},"
            f" and {source} has the columns {', '.join(data.column_names)}. Needed is"
            f" {NEEDED[method.paired]}. {_other_way(label, method)}"
        )
    if paired and label:
        refuse(
            label,
            "tells good answers from bad ones, and pairs tell them already. Remove the column.",
        )
        label = None
    beside = {use: first(known("column", use)) for use in ("system", "tools", "variables")}
    if not method.takes_tools and beside["tools"]:
        refuse(
            beside["tools"],
            f"is for the chat template, which TRL's {method.trainer} gives no tools. Remove the"
            " column, or train with --method dpo",
        )
        beside["tools"] = None
    prompt = answer = None
    if not messages:
        pairs = [pair for pair in PAIRS if set(pair) <= names.keys()]
        if paired:
            prompt = next((names[name] for name in PROMPTS if name in names), None)
        elif pairs:
            prompt, answer = (names[name] for name in pairs[0])
        else:
            raise ConfigError(
                f"--data: {source} has the columns {', '.join(data.column_names)}. Needed is"
                f" {NEEDED[False]}."
            )
    more: tuple[str, ...] = ()
    for use in ("more", "history", "thoughts", "last"):
        for name in (names[name] for name in known("column", use) if name in names):
            if use == "more" and prompt and name not in (prompt, answer):
                more += (name,)
            elif name not in (prompt, answer):
                refuse(
                    name,
                    f"is not read with {option}. Write it into the prompt or the answers, or remove"
                    " the column.",
                )
    return PreferredForm(
        messages=messages,
        prompt=prompt,
        chosen=chosen if paired else None,
        rejected=rejected if paired else None,
        answer=answer,
        more=more,
        label=label,
        bad=label is not None and label.strip().lower() == "is_rejected",
        chat=any(name and first_filled(data, name) for name in beside.values()),
        **beside,
    )


def _other_way(label: str | None, method: Method) -> str:
    if method.paired and label:
        return "For answers with a label give --method kto"
    return "Leave out --method to learn every answer."


def _row(
    row: dict[str, Any], form: PreferredForm, template: str, *, padded: bool
) -> dict[str, Any]:
    """Makes the row of TRL's of one sample."""
    read = functools.partial(_turns, template=template, padded=padded)
    names = {"chosen": form.chosen, "rejected": form.rejected, "completion": form.answer}
    values = {key: _given(row, name) for key, name in names.items() if name}
    if form.messages:
        before = read(row, form.messages, None)
        if not isinstance(before, list):
            raise ConfigError(f"{form.messages} {samples.NEEDED}")
        if len(values) < 1 + bool(form.rejected):  # the answer ends the conversation
            before, answer = _split(before, form.messages)
            values["chosen" if form.rejected else "completion"] = answer
    else:
        before = read(row, form.prompt, "user") if form.prompt else None
    for name in form.more:
        if before and (added := row[name]):
            asked = {"content": before} if isinstance(before, str) else before[-1]
            asked = samples.followed(asked, added, name)
            before = asked["content"] if isinstance(before, str) else [*before[:-1], asked]
    columns_of = {"completion": form.answer, "chosen": form.chosen, "rejected": form.rejected}
    for key, value in values.items():
        if is_empty(value) or (isinstance(value, str) and not value.strip()):
            other = "Give both answers" if form.rejected else "Give the answer"
            raise ConfigError(
                f"{columns_of[key] or form.messages} is empty. {other}, or remove the sample."
            )
    chat = any(not isinstance(each, str) for each in (*values.values(), before or ""))
    if form.prompt and isinstance(before, str) and not before.strip() and not chat:
        raise ConfigError(f"{form.prompt} is empty. Give the question, or remove the sample.")
    if chat or form.chat:
        answers = {
            key: value
            if key in ("chosen", "completion") and columns_of[key] is None
            else read({key: value}, key, "assistant", chat=True)
            for key, value in values.items()
        }
        if isinstance(before, str):
            before = [{"role": "user", "content": before}] if before.strip() else []
        made: dict[str, Any] = _without_prompt(before, answers)
        said = samples.system_of(row, form.system, _first_system(made["prompt"]))
        made["prompt"] = [*([said] if said else []), *made["prompt"]]
        if not made["prompt"] or made["prompt"][-1]["role"] == "system":
            raise ConfigError("no question comes before the answers. Add a prompt.")
        bare = any(map(_is_bare, (row[name] for name in form.said)))
        if tools := samples.tools_of(row, form.tools, bare=bare, padded=padded):
            made["tools"] = json.dumps(tools)
        if variables := samples.parsed(row, form.variables, dict):
            made["chat_template_kwargs"] = samples.unpadded(variables)
        turns = [each for value in made.values() for each in _messages(value)]
        whole = samples.Sample(messages=turns, tools=tools)
        made[UNREAD] = samples.check_rendered(whole, template, form.tools)
    else:
        made = ({"prompt": before} if form.prompt else {}) | values
    if form.label:
        made["label"] = _truth(row[form.label], form.label) != form.bad
    return made


def _given(row: dict[str, Any], name: str) -> Any:
    value = row[name]
    if isinstance(value, str) and value.lstrip().startswith("[{"):  # a list as text, as in CSV
        with contextlib.suppress(ValueError):
            messages = json.loads(value)
            if all(isinstance(each, dict) and {"role", "from"} & each.keys() for each in messages):
                value = messages
    if isinstance(value, dict):
        return [value]
    if value is not None and not isinstance(value, (str, list)):
        raise ConfigError(
            f"{name} is {str(value)[:40]!r}, of type {type(value).__name__}: it must be a text, or"
            " a list of messages."
        )
    return value


def _turns(
    row: dict[str, Any],
    name: str,
    role: str | None,
    *,
    template: str,
    padded: bool,
    chat: bool = False,
) -> Any:
    """Reads a column as messages; a text stays one, unless it is a part of a ``chat``."""
    value = samples.parsed(row, name, list) if role is None else _given(row, name)
    if isinstance(value, str):
        return [{"role": role, "content": value}] if chat else value
    if not all(isinstance(each, dict) for each in value or ()):
        raise ConfigError(f"{name} {samples.NEEDED}")
    read = [samples.message_of(each, template, padded) for each in samples.spread(value or ())]
    is_answer = [message["role"] == "assistant" for message, _ in read]
    if role == "assistant" and any(mark is False for _, mark in compress(read, is_answer)):
        raise ConfigError(
            f"a message of {name} has a weight of 0, and answers are learned whole. Remove the"
            " weight, or write the message into the prompt."
        )
    return [message for message, _ in read]


def _split(said: list[dict[str, Any]], name: str) -> tuple[list[dict[str, Any]], Any]:
    """Splits the answer off a conversation."""
    if len(said) < 2 or said[-1]["role"] != "assistant":
        raise ConfigError(
            f"{name} must end with the answer, a message of the role assistant that follows another"
            " one."
        )
    return said[:-1], said[-1:]


def _without_prompt(before: Any, answers: dict[str, Any]) -> dict[str, Any]:
    """Takes what both answers begin with off them: it is the prompt."""
    shared = 0
    if "chosen" in answers and len(answers["chosen"]) > 1:
        shared = next(
            (
                at
                for at, (one, other) in enumerate(zip(answers["chosen"], answers["rejected"]))
                if one != other
            ),
            min(map(len, answers.values())) - 1,
        )
    asked = answers.get("chosen", [])[:shared]
    answers = {key: value[shared:] for key, value in answers.items()}
    for key, value in answers.items():
        if not value or any(each["role"] not in ("assistant", "tool") for each in value):
            raise ConfigError(
                f"{key} has messages that are no answer to the same question. Begin chosen and"
                " rejected with the same messages, or write these into prompt."
            )
        if not any(set(each) - {"role"} and _says(each) for each in value):
            raise ConfigError(f"{key} is empty. Give the answer, or remove the sample.")
    return {"prompt": _joined(list(before or []), asked, answers), **answers}


def _says(message: dict[str, Any]) -> bool:
    return any(not is_empty(value) for key, value in message.items() if key != "role")


def _joined(
    before: list[dict[str, Any]], asked: list[dict[str, Any]], answers: dict[str, Any]
) -> list[dict[str, Any]]:
    """Joins the prompt beside the answers with what both answers begin with. One may repeat the
    other, in whole or in its first or last turns, and end with one of the answers, as the columns
    of UltraFeedback do. Raises ConfigError if they are two questions."""
    for answer in answers.values():
        if _are_same(before[-len(answer) :], answer):
            before = before[: -len(answer)]
            break
    if not before or not asked:
        joined = before or asked
    elif _are_same(asked[-len(before) :], before) or _are_same(asked[: len(before)], before):
        joined = asked
    elif _are_same(before[-len(asked) :], asked):
        joined = [*before[: -len(asked)], *asked]
    elif before[-1]["role"] != "user" and asked[0]["role"] == "user":  # what came before it
        joined = [*before, *asked]
    else:
        raise ConfigError(
            "the prompt and what both answers begin with are two questions. Write all of it into"
            " one of them."
        )
    if joined and joined[-1]["role"] == "assistant":
        raise ConfigError(
            "the prompt ends with an answer. Remove it from the prompt, or write the question that"
            " follows."
        )
    return joined


def _are_same(some: list[dict[str, Any]], others: list[dict[str, Any]]) -> bool:
    """Tells whether two lists say the same, but for blanks around it."""

    def said(message: dict[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        return message | {"content": content.strip() if isinstance(content, str) else content}

    return bool(others) and list(map(said, some)) == list(map(said, others))


def _is_bare(value: Any) -> bool:
    """Tells whether a column is of a format that has functions without what they are wrapped in."""
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(value, str) or (isinstance(first, dict) and first.get("from") is not None)


def _first_system(prompt: list[dict[str, Any]]) -> dict[str, Any] | None:
    return prompt[0] if prompt and prompt[0]["role"] == "system" else None


def _truth(value: Any, name: str) -> bool:
    truth = TRUTHS.get(str(value).strip().lower())
    if truth is None:
        raise ConfigError(
            f"{name} is {str(value)[:40]!r}: true and false, or 1 and 0, are known. Give one of"
            " them, or remove the sample."
        )
    return truth


def _is_chat(row: dict[str, Any]) -> bool:
    return not isinstance(row.get("chosen", row.get("completion")), str)


def _check_kind(made: list[dict[str, Any]], found: dict[str, Any]) -> None:
    if made and _is_chat(made[0]) != _is_chat(found):
        kinds = ("messages", "text")
        this, others = kinds if _is_chat(found) else kinds[::-1]
        raise ConfigError(
            f"its answers are {this}, and those of the samples before it are {others}. Write all of"
            " them alike."
        )


def _check_labels(made: list[dict[str, Any]], source: str, method: str) -> None:
    labels = {row["label"] for row in made if "label" in row}
    if len(labels) == 1:
        raise ConfigError(
            f"--data: all answers of {source} are {'good' if True in labels else 'bad'}, and"
            f" --method {method} learns from both. Add some of the other kind"
            + (", or leave out --method to learn them." if True in labels else ".")
        )
