"""Samples: reads the rows of a file of training data as conversations that a chat template takes,
whatever the tool that they were written for.

learned   an answer that the model is to write; all else is context
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from ...errors import ConfigError
from .columns import ROLES, Form, is_empty, known

NEEDED = 'must be a list of messages, as [{"role": "user", "content": "..."}].'
# Names of one key, which templates read by the first or the second
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
# Who speaks, by the keys of a turn that has a question and its answer
SPEAKERS = ("system", "user", "assistant")
TURNS = {name: role for name, role in ROLES.items() if role in SPEAKERS} | {
    "input": "user",
    "output": "assistant",
}
PARTS = (None, "text", "input_text", "output_text")  # types of parts that are said
PICTURES = ("image", "image_url", "input_image")  # types of parts that are pictures
PICTURE_KEYS = ("image", "image_url", "url", "path", "base64", "bytes")  # of such a part
# The place of a picture, video or sound in a question; closed again, it is HTML
MEDIA = re.compile(
    r"\s*<(image|video|audio)>(?!.*</\1>)|.*<(image|video|audio)>\s*$|.*?<(img)>[^<>]+</img>", re.S
)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A conversation, or a text. ``start``: the message at which the completion of a prompt begins;
    None if each answer is learned. ``learned``: for each message."""

    text: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    start: int | None = None
    learned: list[bool] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = field(default_factory=dict)

    def unread(self, template: str) -> set[str]:
        """Returns the keys of messages that the template does not read from them."""
        keys = {key for message in self.messages for key in message} - {"role", "content"}
        if any(name in template for name in THOUGHTS):
            keys -= set(THOUGHTS)
        # A bare name is a variable: `tools` of the sample, not of a message.
        return {key for key in keys if not re.search(rf"""(\.|['"]){re.escape(key)}\b""", template)}


def read_sample(
    row: dict[str, Any], form: Form, *, template: str, padded: bool, pictures: bool = False
) -> Sample | None:
    """Reads a row. Returns None if it is empty.

    ``template``: the chat template's text. ``padded``: the file's format fills keys that other
    rows have with None. ``pictures``: what is said may be a list of parts, text and pictures.
    Raises ConfigError if the row cannot be used whole."""
    if form.text:
        return Sample(text=_text(row, form.text)) if row[form.text] else None
    start: int | None = None
    if form.messages:
        turns = parsed(row, form.messages, list)
        if not turns:
            return None
        if not all(isinstance(one, dict) for one in turns):
            raise ConfigError(f"{form.messages} {NEEDED}")
        turns, bare_tools = spread(turns), "from" in turns[0]
    else:
        assert form.pair is not None
        question, answer = (
            _turn(row, name, role) for name, role in zip(form.pair, ("user", "assistant"))
        )
        if not question or not answer:
            return None
        for name in form.more:
            if added := row[name]:
                question[-1] = followed(question[-1], added, name)
        turns, start = [*question, *answer], len(question)
        bare_tools = isinstance(row[form.pair[0]], str)
    speaker = str(turns[0].get("role", turns[0].get("from")))
    said_first = 1 if ROLES.get(speaker.lower()) == "system" else 0
    if pairs := _history(row, form.history):
        turns, start = [*turns[:said_first], *pairs, *turns[said_first:]], None
    if system := system_of(row, form.system, turns[0] if said_first else None):
        turns, start = [system, *turns], None if start is None else start + 1
    read = [message_of(each, template, padded, pictures=pictures) for each in turns]
    messages = [message for message, _ in read]
    if thoughts := row.get(form.thoughts or ""):
        _think(messages, thoughts, str(form.thoughts))
    learned = [
        message["role"] == "assistant" and mark is not False and at >= (start or 0)
        for at, (message, mark) in enumerate(read)
    ]
    last = next((at for at in reversed(range(len(read))) if learned[at]), -1)
    if row.get(form.last or "") and last > (start or 0):
        learned, start = [at == last for at in range(len(read))], None
    if start is not None and all(mark is not False for _, mark in read[start:]):
        learned = [at >= start for at in range(len(read))]
    else:
        start = None
    tools = tools_of(row, form.tools, bare=bare_tools, padded=padded)
    sample = Sample(
        messages=messages,
        start=start,
        learned=learned,
        tools=tools,
        variables=unpadded(parsed(row, form.variables, dict) or {}),
    )
    unread = check_rendered(sample, template, form.tools)
    for key in known("column", "tools"):
        if key in unread and any(not is_empty(message.get(key)) for message in messages):
            not_rendered(f"{key} of a message (put them into a column)", "what the tools are")
    return sample


def check_rendered(found: Sample, template: str, tools: str | None) -> set[str]:
    """Returns the keys of messages that the template does not read. Raises ConfigError if tools, of
    the column ``tools``, or their calls are among what it does not."""
    if found.tools and "tools" not in template:
        not_rendered(f"the column {tools}", "what the tools are")
    unread = found.unread(template)
    if "tool_calls" in unread:
        not_rendered("tool_calls of a message", "the calls of tools")
    return unread


def not_rendered(what: str, lost: str) -> None:
    raise ConfigError(
        f"the chat template does not render {what}, so that the model would not see {lost}. Give"
        " the tokenizer a chat template that does, or remove them."
    )


def parsed(row: dict[str, Any], column: str | None, kind: type) -> Any:
    """Returns a list or dict of a column, which may be its JSON text. None if it is empty."""
    value = row.get(column or "")
    if isinstance(value, str):
        if not value.strip():
            return None
        try:
            value = json.loads(value)
        except ValueError as error:
            is_chat = column and column.lower() in known("column", "messages")
            wanted = f": it {NEEDED}" if is_chat else ""
            raise ConfigError(f"{column} is text, and no JSON ({error}){wanted}") from None
    if value is not None and not isinstance(value, kind):
        if column and column.strip().lower() in known("column", "messages"):
            raise ConfigError(f"{column} {NEEDED}")
        what = "a list" if kind is list else "an object"
        raise ConfigError(f"{column} must be {what}, or its JSON text.")
    return value


def _text(row: dict[str, Any], column: str) -> str:
    if not isinstance(row[column], str):
        raise ConfigError(
            f"{column} is {str(row[column])[:40]!r}, of type {type(row[column]).__name__}: prompt,"
            " completion and text are texts, and prompt and completion may be lists of messages."
        )
    return row[column]


def _turn(row: dict[str, Any], column: str, role: str) -> list[dict[str, Any]]:
    """Makes a turn of a conversation of a text, with its blanks, so that the model answers in a
    chat; none of an empty one."""
    value = row[column]
    if column.strip().lower() == "answers":
        return [] if is_empty(value) else [{"role": "function_call", "content": value}]
    if isinstance(value, list):
        if not all(isinstance(one, dict) for one in value):
            raise ConfigError(f"{column} {NEEDED}")
        return list(value)
    said = "" if value is None else _text(row, column)
    return [{"role": role, "content": said}] if said.strip() else []


def followed(message: dict[str, Any], added: Any, column: str) -> dict[str, Any]:
    """Returns a message with the text of a column on its next line."""
    if not isinstance(added, str) or not isinstance(message.get("content"), str):
        raise ConfigError(f"{column} must be a text, to follow the question.")
    return {**message, "content": f"{message['content']}\n{added}"}


def _history(row: dict[str, Any], column: str | None) -> list[dict[str, Any]]:
    pairs = parsed(row, column, list) or []
    if all(isinstance(one, dict) for one in pairs):
        return pairs
    turns = []
    for pair in pairs:
        if not (
            isinstance(pair, list) and len(pair) == 2 and all(isinstance(x, str) for x in pair)
        ):
            raise ConfigError(f'{column} must be a list of pairs, as [["question", "answer"]].')
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return turns


def spread(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Makes messages of each turn that has a question and its answer, and maybe a system message:
    as its keys say."""
    made = []
    for turn in turns:
        roles = {key: TURNS.get(key) for key in turn}
        if None in roles.values() or not {"user", "assistant"} <= set(roles.values()):
            made.append(turn)
            continue
        said = {role: turn[key] for key, role in roles.items() if not is_empty(turn[key])}
        made += [{"role": role, "content": said[role]} for role in SPEAKERS if role in said]
    return made


def _think(messages: list[dict[str, Any]], thoughts: Any, column: str) -> None:
    """Gives the answer its thoughts, unless they are in it."""
    if not isinstance(thoughts, str):
        raise ConfigError(f"{column} must be a text: what the answer thinks.")
    answers = [message for message in messages if message["role"] == "assistant"]
    for message in answers:
        if any(thoughts.strip() in str(message.get(key) or "") for key in ("content", *THOUGHTS)):
            return
    if len(answers) != 1 or any(key in answers[0] for key in THOUGHTS):
        raise ConfigError(
            f"the column {column} does not say which answer thinks it. Write it into that message"
            " as reasoning_content, or remove the column."
        )
    answers[0]["reasoning_content"] = thoughts


def system_of(
    row: dict[str, Any], column: str | None, first: dict[str, Any] | None
) -> dict[str, Any] | None:
    said = _joined_parts(row.get(column or ""))
    if not said:
        return None
    if not isinstance(said, str):
        raise ConfigError(f"{column} must be a text.")
    if first is not None and _joined_parts(first.get("content", first.get("value"))) != said:
        raise ConfigError(
            f"the column {column} is one system message, and the conversation begins with"
            " another. Remove one of them."
        )
    return None if first else {"role": "system", "content": said}


def message_of(
    given: dict[str, Any], template: str, padded: bool, *, pictures: bool = False
) -> tuple[dict[str, Any], bool | None]:
    """Reads a message as chat templates take it, and whether its author wants it learned: None if
    that is not said. All keys of other meaning are kept for the template. ``pictures``: of a
    question with pictures the content is a list of parts."""
    message = {key: value for key, value in given.items() if value is not None}
    by = "from" if "from" in message else "role"
    speaker = message.pop(by, None)
    needs = "from and value" if by == "from" else "role and content"
    if not isinstance(speaker, str):
        raise ConfigError(f"a message needs {needs}, and one has no {by}.")
    for key in known("key", "refused"):
        if not is_empty(value := message.pop(key, None)) and value is not False:
            raise ConfigError(f"a message has {key}, which cannot be used here. Remove it.")
    role = ROLES.get(speaker.lower().replace("-", "_"))
    if f"'{speaker}'" in template or f'"{speaker}"' in template:
        role = role if role in ("assistant", "call", "user") else speaker
    if role is None:
        raise ConfigError(
            f"the role {speaker} is unknown, here and in the chat template. Roles are"
            f" {', '.join(ROLES)}."
        )
    mark = _mark(message, role, speaker)
    texts = [key for key in known("key", "content") if key in message]
    if len(texts) > 1:
        raise ConfigError(f"a message has both {' and '.join(texts)}. Remove one of them.")
    said = message.pop(texts[0]) if texts else None
    if called := parsed(message, "tool_calls", list):
        message["tool_calls"] = called
    if (old := message.get("function_call")) and called and "function_call" not in template:
        raise ConfigError("a message has both tool_calls and function_call. Remove one of them.")
    if old and not called:
        message.pop("function_call")
        message["tool_calls"] = called = [{"type": "function", "function": old}]
    if not called:
        message.pop("tool_calls", None)
    if padded:
        message = unpadded(message)
    if role == "call":
        role = "assistant"
        if "tool_calls" in template and (calls := _calls(said)):
            said, message["tool_calls"] = "", calls
        elif not isinstance(said, str):
            said = json.dumps(said, ensure_ascii=False)
    said = _with_pictures(said, speaker, role) if pictures else _joined_parts(said)
    if said is not None and not isinstance(said, (str, list) if pictures else str):
        raise ConfigError(
            f"a message has {texts[0]} {str(said)[:40]!r}, of type {type(said).__name__}: it must"
            " be a text, or a list of parts of text."
        )
    if not pictures:
        check_places(said, role, speaker)
    if said is None and not message.get("tool_calls"):
        raise ConfigError(f"a message needs {needs}, and one has no {needs.split()[-1]}.")
    made = {"role": role}
    if said is not None or "content" in given:
        made["content"] = said
    return made | message, mark


def check_places(said: Any, role: str, speaker: str) -> None:
    """Raises ConfigError for a question that begins or ends with the place of what is not there."""
    if isinstance(said, str) and role != "assistant" and (place := MEDIA.match(said)):
        raise ConfigError(
            f"a message of the role {speaker} has <{place[place.lastindex or 0]}>, the place of a"
            " picture, video or sound, and the model is given none. Remove the sample, or the word."
        )


def is_picture(part: Any) -> bool:
    """Tells whether a part of a message is a picture."""
    return isinstance(part, dict) and part.get("type") in PICTURES


def _with_pictures(said: Any, speaker: str, role: str) -> Any:
    """Returns what is said: a text, or if pictures are in it, its parts in their order."""
    if not isinstance(said, list) or not any(map(is_picture, said)):
        return _joined_parts(said)
    if role not in ("user", "system"):
        raise ConfigError(
            f"a message of the role {speaker} has a picture, and pictures are in questions alone."
            " Write it into the question, or remove the sample."
        )
    parts: list[dict[str, Any]] = []
    for part in said:
        if is_picture(part):
            there = [part[key] for key in PICTURE_KEYS if not is_empty(part.get(key))]
            parts.append({"type": "image", "image": there[0]} if there else {"type": "image"})
        elif text := _joined_parts([part]):
            parts.append({"type": "text", "text": text})
    return parts


def _joined_parts(said: Any) -> Any:
    """Joins what is said in parts of text."""
    if not isinstance(said, list):
        return said
    for part in (part for part in said if isinstance(part, dict)):
        if part.get("type") not in PARTS:
            raise ConfigError(
                f"a message has a part of type {part['type']}, which is not text that is said: a"
                " picture, a call or a thought. Give calls as tool_calls and thoughts as"
                " reasoning_content of the message, and pictures to a model of images and text."
            )
        if marks := [key for key in known("key", "mark") if part.get(key) is not None]:
            raise ConfigError(
                f"a part of a message has {marks[0]}. Messages are learned whole: give it to the"
                " message, or remove it."
            )
    parts = [
        part.get("text", part.get("value")) if isinstance(part, dict) else part for part in said
    ]
    if not all(isinstance(part, str) for part in parts):
        raise ConfigError("a message has a part that is not text, as a picture.")
    return "".join(parts)


def _mark(message: dict[str, Any], role: str, speaker: str) -> bool | None:
    """Takes the keys out that say whether a message is learned. Returns what they say."""
    marks = {key: message.pop(key) for key in known("key", "mark") if key in message}
    for key, value in marks.items():
        if value not in (0, 1):
            raise ConfigError(f"a message has {key} {value!r}: 0, 1, false and true are known.")
        if value and key != "weight" and role not in ("assistant", "call"):
            raise ConfigError(
                f"a message of the role {speaker} has {key} {value!r}: only answers of the"
                " assistant can be learned."
            )
    if len({bool(value) for value in marks.values()}) > 1:
        raise ConfigError(f"a message has {marks}, which contradict each other.")
    return bool(next(iter(marks.values()))) if marks else None


def _calls(said: Any) -> list[dict[str, Any]] | None:
    """Reads calls of tools from their JSON; None if it is something else."""
    try:
        said = json.loads(said) if isinstance(said, str) else said
    except ValueError:
        return None
    calls = said if isinstance(said, list) else [said]
    if not calls or not all(isinstance(call, dict) and "name" in call for call in calls):
        return None
    return [{"type": "function", "function": call} for call in calls]


def tools_of(row: dict[str, Any], column: str | None, *, bare: bool, padded: bool) -> Any:
    """Returns the tools of a row as templates want them. ``bare``: its format has functions alone,
    not what they are wrapped in."""
    tools = parsed(row, column, list)
    if tools is not None:
        tools = [parsed({column: tool}, column, dict) for tool in tools]
    if padded:
        tools = unpadded(tools)
    if tools is not None and (bare or str(column).strip().lower() == "functions"):
        tools = [_wrapped(tool) for tool in tools]
    return tools


def _wrapped(tool: Any) -> Any:
    """Returns a function as chat templates take it."""
    bare = isinstance(tool, dict) and "function" not in tool and "name" in tool
    return {"type": "function", "function": tool} if bare else tool


def unpadded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: unpadded(each) for key, each in value.items() if each is not None}
    return [unpadded(each) for each in value] if isinstance(value, list) else value
