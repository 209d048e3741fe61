"""Columns: what is done with each column of training samples, key of a message and role that is
known. A name that changes what is learned is used, or refused by name. All others are listed.

form   the columns that samples are read from: a conversation, a question with its answer, or a text
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigError


@dataclass(frozen=True)
class Known:
    """Names with one use. ``place``: "column", "key" of a message, or "role". ``done``: what is
    done with them, as docs/command-line.md says it. ``refused``: how to train with them."""

    place: str
    use: str
    names: tuple[str, ...]
    done: str
    refused: str = ""


KNOWN = (
    Known(
        "column",
        "messages",
        (
            "messages",
            "conversations",
            "conversation",
            "dialog",
            "dialogue",
            "interactions",
            "trajectory",
        ),
        "a conversation, as a list or JSON text; every answer is learned",
    ),
    Known(
        "column",
        "tools",
        ("tools", "available_tools", "functions"),
        "given to the chat template, as a list or JSON text",
    ),
    Known(
        "column",
        "system",
        ("system", "system_prompt", "system_message", "system_instruction"),
        "the system message",
    ),
    Known(
        "column",
        "history",
        ("history",),
        "earlier pairs of question and answer, or messages; their answers are learned too",
    ),
    Known(
        "column",
        "more",
        ("input", "inputs", "context", "passage"),
        "text that follows the question of a pair, on a line of its own; refused beside a"
        " conversation alone",
    ),
    Known(
        "column",
        "thoughts",
        ("reasoning_content", "reasoning", "thinking", "thoughts", "cot", "complex_cot"),
        "text: what the answer thinks, `reasoning_content` for the chat template. A switch, as"
        " on or off, is not used",
    ),
    Known("column", "variables", ("chat_template_kwargs",), "given to the chat template"),
    Known("column", "last", ("only_last",), "true: of the answers, the last one is learned"),
    Known(
        "column",
        "preferences",
        ("chosen", "chosen_messages", "rejected", "rejected_response", "rejected_messages"),
        "a pair of answers for `--method dpo`, `orpo`, `simpo` or `kto`; refused without",
        "has preferred answers: add --method dpo to `infinity train` to learn of them by DPO. To"
        " learn or measure one of two answers alone, name its column completion (messages, if the"
        " question is in it) and remove the column of the other.",
    ),
    Known(
        "column",
        "label",
        ("label", "kto_tag", "desirable", "is_chosen", "is_rejected"),
        "tells a good answer from a bad one for `--method kto`; refused beside answers without."
        " Beside a text it is not used",
        "tells good answers from bad ones: add --method kto to `infinity train` to learn of both by"
        " KTO. To learn or measure the good ones alone, remove the others. Then remove the column.",
    ),
    Known(
        "column",
        "pictures",
        ("image", "images"),
        "pictures of the sample, for a model of images and text; refused for others, unless empty",
        "has pictures, and the model is given text alone. Give --model a folder of a model of"
        " images and text, for no --method takes pictures. Or remove the samples that need them,"
        " and the column.",
    ),
    Known(
        "column",
        "pictures of another name",
        tuple(
            f"{name}{end}"
            for name in ("image_path", "image_file", "image_url", "picture", "photo", "img")
            for end in ("", "s")
        ),
        "refused, unless empty: pictures are in `images`",
        "has pictures, and `infinity train` reads those in the column images or image. Rename the"
        " column; or remove it, if the answers do not need the pictures.",
    ),
    Known(
        "column",
        "media",
        ("video", "videos", "audio", "audios"),
        "refused, unless empty",
        "has videos or sounds, and `infinity train` gives a model text and pictures alone. Remove"
        " the samples that need them, and the column.",
    ),
    Known(
        "column",
        "weights",
        (
            "weight",
            "weights",
            "sample_weight",
            "loss_weight",
            "loss_mask",
            "loss_scale",
            "mask",
            "train_on_turn",
        ),
        "refused: samples have no weights",
        "gives samples weights, and each learned token counts the same here. Put weight, 0 or 1,"
        " in the messages of the assistant, or remove the column.",
    ),
    Known(
        "column",
        "choices",
        ("choices", "options"),
        "refused beside answers",
        "has answers to choose from. Write them into the question, or remove the column.",
    ),
    Known(
        "column",
        "documents",
        ("documents",),
        "refused",
        "has documents to answer from. Write them into the messages, or remove the column.",
    ),
    Known(
        "column",
        "tokens",
        ("input_ids", "assistant_masks", "completion_mask"),
        "refused: rows are made here",
        "has rows that are made already, and rows are made of the samples here. Remove the column,"
        " or train these rows with TRL's SFTTrainer.",
    ),
    Known(
        "column",
        "template",
        ("chat_template", "enable_thinking", "add_generation_prompt"),
        "refused: variables of the template are in `chat_template_kwargs`",
        "is for the chat template, whose variables are the column chat_template_kwargs. Write it"
        " there (a template goes into the tokenizer), or remove the column.",
    ),
    Known(
        "column",
        "suffix",
        ("suffix",),
        "refused beside answers",
        "has text that comes after the answer, which a chat has no place for. Train on texts that"
        " have the tokens for it, or remove the column.",
    ),
    Known(
        "column",
        "tree",
        ("parent_id", "parent_message_id", "replies"),
        "refused unless beside a conversation",
        "makes a tree of messages that are rows of their own. Write each conversation into one"
        " row, as messages, or remove the column.",
    ),
    Known("key", "role", ("role", "from"), "who speaks"),
    Known(
        "key",
        "content",
        ("content", "value", "text"),
        "what is said; parts of text are joined, and pictures keep their places",
    ),
    Known(
        "key",
        "mark",
        (
            "weight",
            "train",
            "training",
            "trainable",
            "train_on_turn",
            "loss",
            "loss_weight",
            "loss_mask",
            "loss_scale",
        ),
        "0 or false in an answer: it is context, and not learned",
    ),
    Known("key", "calls", ("tool_calls", "function_call"), "calls of tools, for the chat template"),
    Known(
        "key",
        "refused",
        (
            "train_detail",
            "mask",
            "prefix",
            "partial",
            "image",
            "images",
            "video",
            "videos",
            "audio",
            "audios",
        ),
        "refused, unless empty or false",
    ),
    Known("role", "system", ("system",), "the system message"),
    Known("role", "developer", ("developer",), "for the chat template, as it is"),
    Known("role", "user", ("user", "human"), "a question"),
    Known(
        "role",
        "assistant",
        ("assistant", "gpt", "chatgpt", "chatbot", "bing", "bard", "bot", "model"),
        "an answer, which is learned",
    ),
    Known(
        "role",
        "call",
        ("function_call", "tool_call"),
        "an answer, which is learned: calls of tools, as JSON",
    ),
    Known(
        "role",
        "tool",
        ("tool", "observation", "function", "function_response", "tool_response", "ipython"),
        "what a tool returns",
    ),
)
# Columns of question and answer. The first pair that a file has is read.
PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("prompt", "output"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("question", "response"),
    ("query", "response"),
    ("query", "answers"),  # calls of tools, as xLAM has them
    ("problem", "solution"),
    ("input", "output"),
    ("inputs", "targets"),
)


def known(place: str, use: str) -> tuple[str, ...]:
    """Returns the names of a use at a place: "column", "key" or "role"."""
    return next(each.names for each in KNOWN if (each.place, each.use) == (place, use))


ROLES = {name: each.use for each in KNOWN if each.place == "role" for name in each.names}


@dataclass(frozen=True, kw_only=True)
class Form:
    """Columns that samples are read from, as the file spells them. One of ``messages``, ``pair``
    and ``text`` is set."""

    messages: str | None = None
    pair: tuple[str, str] | None = None
    text: str | None = None
    more: tuple[str, ...] = ()  # follow the question of a pair
    tools: str | None = None
    system: str | None = None
    history: str | None = None
    thoughts: str | None = None
    variables: str | None = None
    last: str | None = None
    pictures: str | None = None

    @property
    def main(self) -> list[str]:
        return [name for name in (self.messages, *(self.pair or ()), self.text) if name]

    @property
    def used(self) -> list[str]:
        beside = (
            self.tools,
            self.system,
            self.history,
            self.thoughts,
            self.variables,
            self.last,
            self.pictures,
        )
        return [*self.main, *self.more, *(name for name in beside if name)]

    def told(self, columns: list[str]) -> list[str]:
        """Says how samples with these columns are read, and which columns are not."""
        kind = (
            "conversations" if self.messages else "questions and answers" if self.pair else "text"
        )
        beside = ", ".join(self.used[len(self.main) :])
        lines = [f"Read as {kind}: {', '.join(self.main)}{f'; with {beside}' if beside else ''}"]
        if left := [name for name in columns if name not in self.used]:
            lines.append(f"Columns left out: {', '.join(left)}")
        return lines


def choose_form(data: Any, source: str, *, pictures: bool = False) -> Form:
    """Chooses the columns that samples are read from. ``data``: a `datasets.Dataset`.
    ``pictures``: the model takes them.

    Raises ConfigError if none are known, or if a column has what cannot be used."""
    names = {name.strip().lower(): name for name in data.column_names}

    def first(use: str) -> str | None:
        columns = [names[name] for name in known("column", use) if name in names]
        if len(columns) > 1 and use == "pictures":
            columns = [name for name in columns if first_filled(data, name)]
        if len(columns) > 1 and use != "messages":
            raise ConfigError(
                f"--data: {source} has the columns {' and '.join(columns)}, which are one thing by"
                " two names. Remove one of them."
            )
        return columns[0] if columns else None

    messages = first("messages")
    pairs = [pair for pair in PAIRS if set(pair) <= names.keys()]
    if ("query", "answers") in pairs and not first("tools"):
        pairs.remove(("query", "answers"))
    text = names.get("text")
    shown = first("pictures") if pictures else None
    refused = {name: own for name, own in names.items() if own != shown}
    _refuse(data, refused, source, chat=bool(messages), beside_answers=bool(messages or pairs))
    if not (messages or pairs or text):
        only = data.column_names[0] if len(data.column_names) == 1 else ""
        hint = " Is ; its separator? Columns are separated by commas, or tabs in .tsv."
        raise ConfigError(
            f"--data: {source} has the columns {', '.join(data.column_names)}. Needed is one of:"
            " messages or conversations; prompt and completion; instruction and output; question"
            f" and answer; text.{hint * (';' in only)}"
        )
    if not (messages or pairs):
        return Form(text=text, pictures=shown)
    for name in known("column", "thoughts"):
        if name in names and not any(map(_is_written, values_of(data, names[name]))):
            names.pop(name)
    uses = ("tools", "system", "history", "thoughts", "variables", "last")
    beside = {use: first(use) for use in uses} | {"pictures": shown}
    if messages:
        for name in (names[name] for name in known("column", "more") if name in names):
            if not pairs and (at := first_filled(data, name)):
                raise ConfigError(
                    f"--data: {source}: the column {name} (first in sample {at}) is text for a"
                    f" question, and {messages} has the questions. Write it into them, or remove"
                    " the column."
                )
        return Form(messages=messages, **beside)
    question, answer = pairs[0]
    more = [name for name in known("column", "more") if name in names and name not in pairs[0]]
    return Form(
        pair=(names[question], names[answer]),
        more=tuple(names[name] for name in more),
        **beside,
    )


def is_empty(value: Any) -> bool:
    """Tells whether a value, or its JSON text, says nothing, nor does anything in it."""
    if isinstance(value, (list, dict)):
        return all(map(is_empty, value.values() if isinstance(value, dict) else value))
    return value is None or value in ("", "null", '""', "[]", "{}")


def _is_written(value: Any) -> bool:
    """Tells whether a value is text of several words, or a list of texts: no switch."""
    return len(value.split()) > 1 if isinstance(value, str) else bool(value) and value is not True


def _refuse(
    data: Any, names: dict[str, str], source: str, *, chat: bool, beside_answers: bool
) -> None:
    for each in KNOWN:
        if not each.refused or (each.use == "tree" and chat):
            continue
        if each.use in ("label", "choices", "suffix") and not beside_answers:
            continue
        if each.use == "tokens" and not (beside_answers or "text" in names):
            continue  # all columns are named
        for name in (names[name] for name in each.names if name in names):
            if at := first_filled(data, name):
                raise ConfigError(
                    f"--data: {source}: the column {name} (first in sample {at}) {each.refused}"
                )


def first_filled(data: Any, name: str) -> int | None:
    """Returns the number of the first sample, from 1, that has something in a column."""
    values = values_of(data, name)
    return next((at for at, value in enumerate(values, 1) if not is_empty(value)), None)


def values_of(data: Any, name: str) -> Iterator[Any]:
    """Yields the values of a column as they are stored: a picture is a path or bytes."""
    for part in data.select_columns([name]).with_format("arrow").iter(100):
        yield from part.column(0).to_pylist()
