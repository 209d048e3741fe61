"""Rendering: makes rows of tokens and labels of samples with a tokenizer's chat template.

marked   said of a template whose answers are in `{% generation %}`: a conversation is one row
row      tokens, and labels for those that are learned; of a template that is not marked, each
         answer is the end of a row of its own
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import ConfigError
from .columns import Form
from .samples import THOUGHTS, Sample, read_sample

NOT_LEARNED = -100  # label
MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
EMPTY = "empty, or with other columns than the first"
UNANSWERED = "no answer in it"
UNLEARNED = "no answer in it is to be learned"
UNMARKED = "no answer in it that the chat template marks"
LOST_THOUGHTS = (
    "what answers think is left out, or some of it, by the chat template"
    " (reasoning_content, thinking, or </think> in the text)"
)
# What a template may lack when it ends in an error of Python.
LACKED = ("tools", "documents")
PLACES = re.compile(r"<(?:image|video|audio)>")
# Tokens of tokenizers that stand for a picture, video or sound
MEDIA = re.compile(r"image|img|vision|video|audio", re.I)
WITHIN_MESSAGE = ("content", "name", "tool_calls", "tool_call_id", "reasoning_content", "thinking")


TRIED = Sample(
    messages=[{"role": role, "content": f"#{role}#"} for role in ("user", "assistant")],
    learned=[False, True],
)


@dataclass(frozen=True, kw_only=True)
class Renderer:
    """Makes rows of samples. ``template``: the one that TRL trains with, if it is not the
    tokenizer's own. ``code``: names this code in the cache of `datasets`."""

    tokenizer: Any
    template: str | None
    text: str  # of the template, with all its variants
    marked: bool
    in_parts: bool  # the template reads what is said as a list of parts alone
    media: tuple[str, ...]  # tokens for pictures, videos and sounds
    form: Form
    source: str
    length: int
    padded: bool
    code: str

    @classmethod
    def of(cls, tokenizer: Any, template: str | None, **given: Any) -> Renderer:
        """Makes the renderer of a tokenizer."""
        fast = getattr(tokenizer, "is_fast", False)
        if not fast:
            template = None  # it cannot tell which tokens are marked
        own = tokenizer.chat_template or ""
        texts = own if isinstance(own, dict) else {"default": own}
        text = template or "\n".join(texts.values())
        marked = fast and bool(MARK.search(template or texts.get("default", "")))
        made = cls(
            tokenizer=tokenizer,
            template=template,
            text=text,
            marked=marked,
            in_parts=False,
            media=tuple(filter(MEDIA.search, sorted(tokenizer.get_added_vocab()))),
            **given,
        )
        parted = replace(made, in_parts=True)
        return parted if not made._shows_text() and parted._shows_text() else made

    def _shows_text(self) -> bool:
        """Tries whether the template renders what is said."""
        try:
            written = self.written(TRIED, TRIED.messages)
        except ConfigError:
            return False
        return all(each["content"] in written for each in TRIED.messages)

    def told(self) -> list[str]:
        """Says if the model will not learn to end its answers, as an answer tried shows."""
        try:
            rows = (
                self._of_marks(TRIED, [])
                if self.marked and self.form.messages
                else [self._of_answer(TRIED, 1, 2, [])]
            )
        except ConfigError:
            return []  # told of the sample that it concerns
        learned = self.tokenizer.decode([token for token in rows[0][1] if token != NOT_LEARNED])
        if not learned.strip().endswith(TRIED.messages[1]["content"]):
            return []
        return [
            "No token that ends an answer is learned, by the chat template: the model may not"
            " learn to stop"
        ]

    def batch(self, columns: dict[str, list], numbers: list[int]) -> dict[str, list]:
        """Makes rows of samples with these numbers, counted from 0: input_ids and labels, lists of
        int. ``why`` says why a sample has no row, and ``notes`` what of it is not learned."""
        names = ("input_ids", "labels", "sample", "why", "notes", "roles")
        by_name: dict[str, list] = {name: [] for name in names}
        for at, number in enumerate(numbers):
            row = {name: values[at] for name, values in columns.items()}
            roles: list[str] = []
            try:
                rows, why, notes = self._rows(row, roles)
            except ConfigError as error:
                raise ConfigError(f"--data: {self.source}: sample {number + 1}: {error}") from None
            for tokens, labels in rows or [([], [])]:
                made = (tokens, labels, number, why, notes, roles)
                for name, value in zip(names, made):
                    by_name[name].append(value)
        return by_name

    def _rows(
        self, row: dict[str, Any], roles: list[str]
    ) -> tuple[list[tuple[list[int], list[int]]], str, list[str]]:
        sample = read_sample(row, self.form, template=self.text, padded=self.padded)
        if sample is None:
            return [], EMPTY, []
        roles += [message["role"] for message in sample.messages]
        said = [sample.text or "", *(message.get("content") or "" for message in sample.messages)]
        for token in self.media:
            if any(token in text for text in said):
                raise ConfigError(
                    f"it has {token}, the tokenizer's token for a picture, video or sound, and"
                    " `infinity train` gives a model text alone. Remove the sample, or the word."
                )
        notes = []
        if unread := sample.unread(self.text):
            notes.append(
                f"keys of messages left out: {', '.join(sorted(unread))} (the chat template does"
                " not read them)"
            )
        if row.get(self.form.thoughts or "") and not any(name in self.text for name in THOUGHTS):
            notes.append(
                f"the column {self.form.thoughts} left out (the chat template does not read"
                " reasoning_content)"
            )
        if words := sorted({word for text in said for word in PLACES.findall(text)}):
            notes.append(f"{', '.join(words)} read as text, with no picture, video or sound")
        if sample.text is not None:
            rows = [self._of_text(sample.text)]
        elif sample.start is not None:
            rows = [self._of_answer(sample, sample.start, len(sample.messages), notes)]
        elif "assistant" not in roles:
            return [], UNANSWERED, notes
        elif not any(sample.learned):
            return [], UNLEARNED, notes
        elif self.marked:
            rows = self._of_marks(sample, notes)
        else:
            if sample.learned[0]:
                notes.append("an answer that nothing comes before is not learned")
            ends = [at for at, learned in enumerate(sample.learned) if learned and at]
            rows = [self._of_answer(sample, at, at + 1, notes) for at in ends]
        if not any(_any_learned(labels) for _, labels in rows):
            return [], UNMARKED if self.marked and rows else UNANSWERED, notes
        if self.loses_thoughts(sample):
            notes.append(LOST_THOUGHTS)
        cut = [(tokens[: self.length], labels[: self.length]) for tokens, labels in rows]
        kept = [each for each in cut if _any_learned(each[1])]
        if not kept:
            return [], f"nothing to learn within {self.length} tokens", notes
        if any(_any_learned(labels[self.length :]) for _, labels in rows):
            beyond = f"beyond {self.length} tokens"
            notes.append(
                f"answers {beyond} are not learned"
                if sample.text is None
                else f"text {beyond} is not learned"
            )
        return kept, "", notes

    def loses_thoughts(self, sample: Sample) -> bool:
        """Tells whether the template leaves out what learned answers think, as templates do that
        forget it in earlier turns."""
        for at, message in enumerate(sample.messages):
            if not sample.learned[at] or message["role"] != "assistant":
                continue
            said = [str(message[key]) for key in THOUGHTS if message.get(key)]
            if "</think>" in (message.get("content") or ""):
                said.append(message["content"])
            if said:
                last = len(sample.messages) if self.marked or sample.start else at + 1
                written = self.written(sample, sample.messages[:last])
                if any(each.strip() not in written for each in said):
                    return True
        return False

    def _of_text(self, text: str) -> tuple[list[int], list[int]]:
        end = self.tokenizer.eos_token or ""
        tokens = self.tokenizer(text=text if text.endswith(end) else text + end)["input_ids"]
        return tokens, tokens

    def _of_marks(self, sample: Sample, notes: list[str]) -> list[tuple[list[int], list[int]]]:
        """Returns the row of a conversation whose template marks its answers. If answers are not
        all learned, and cannot be told apart in it, each learned one gets a row."""
        tokens, marks = self._tokens(sample, sample.messages, marked=True)
        said = [at for at, message in enumerate(sample.messages) if message["role"] == "assistant"]
        if not all(sample.learned[at] for at in said):
            changes = [at for at in range(len(marks)) if marks[at] != (marks[at - 1] if at else 0)]
            ends = [*changes, len(marks)]
            spans = list(zip(ends[::2], ends[1::2]))
            if len(spans) != len(said):
                ats = [at for at in said if sample.learned[at] and at]
                return [self._of_answer(sample, at, at + 1, notes) for at in ats]
            for at, (first, last) in zip(said, spans):
                if not sample.learned[at]:
                    marks[first:last] = [0] * (last - first)
        return [(tokens, _labels(tokens, marks))]

    def _of_answer(
        self, sample: Sample, first: int, last: int, notes: list[str]
    ) -> tuple[list[int], list[int]]:
        """Returns the row whose learned part are the messages from ``first`` to ``last``."""
        before, whole = sample.messages[:first], sample.messages[:last]
        tokens, _ = self._tokens(sample, whole)
        asked, _ = self._tokens(sample, before, add_generation_prompt=True)
        start = _first_difference(asked, tokens)
        if start < len(asked) and (lost := self.unlike(sample, before, whole)):
            notes.append(lost)
        return tokens, _labels(tokens, [at >= start for at in range(len(tokens))])

    def unlike(
        self, sample: Sample, before: list[dict[str, Any]], whole: list[dict[str, Any]]
    ) -> str:
        """Returns what is told of an answer that is asked for by words which do not come before it
        in the ``whole``; "" if it is not so. Raises ConfigError if the question is another one."""
        asked = self.written(sample, before, add_generation_prompt=True)
        full = self.written(sample, whole)
        start = _first_difference(asked, full)
        if start == len(asked):
            return ""
        # What it adds to ask for an answer may differ, but not what comes before.
        known = self.written(sample, before)
        if not full.startswith(known.rstrip()):
            at = _first_difference(known, full)
            raise ConfigError(
                "the chat template renders what comes before an answer otherwise once the"
                f" answer follows ({known[at : at + 40]!r} becomes {full[at : at + 40]!r}), so"
                " that the question would be learned. Give the tokenizer a chat template"
                " with {% generation %} around answers, or remove what it moves, as a system"
                " message."
            )
        return (
            f"the chat template asks for an answer with {asked[start:]!r}, which is not in these"
            " rows"
        )

    def _tokens(
        self,
        sample: Sample,
        messages: list[dict[str, Any]],
        *,
        marked: bool = False,
        add_generation_prompt: bool = False,
    ) -> tuple[list[int], list[int]]:
        rendered = self._rendered(
            sample,
            messages,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=marked,
            add_generation_prompt=add_generation_prompt,
        )
        return list(rendered["input_ids"]), list(rendered["assistant_masks"]) if marked else []

    def written(self, sample: Sample, messages: list[dict[str, Any]], **how: Any) -> str:
        return self._rendered(sample, messages, tokenize=False, **how)

    def _rendered(self, sample: Sample, messages: list[dict[str, Any]], **how: Any) -> Any:
        # A completion is rendered by the tokenizer's own template, as TRL does.
        template = self.template if sample.start is None else None
        messages = [_thinking(message) for message in messages]
        if self.in_parts:
            messages = as_parts(messages)
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tools=sample.tools,
                chat_template=template,
                **{**sample.variables, **how},
            )
        except Exception as error:  # noqa: BLE001 - templates may be wrong in every way
            raise ConfigError(self._template_error(error, template, sample, messages)) from None

    def _template_error(
        self,
        error: Exception,
        template: str | None,
        sample: Sample,
        messages: list[dict[str, Any]],
    ) -> str:
        """Says at which line the template ended, and what it lacks."""
        number = getattr(error, "lineno", None)
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == "<template>":
                number = trace.tb_lineno
            trace = trace.tb_next
        own = self.tokenizer.chat_template
        text = template or (own if isinstance(own, str) else (own or {}).get("default", ""))
        lines = text.splitlines()
        line = lines[number - 1] if number and number <= len(lines) else ""
        said = (str(error).strip().splitlines() or ["no message"])[0]
        # Of a line of many statements, those that can end so.
        pieces = re.findall(r"\{[%{].*?[%}]\}", line) or [line]
        kind = type(error).__name__
        quoted = re.findall(r"'(\w+)'", said) if kind == "UndefinedError" else []
        if kind == "UndefinedError":
            pieces = [piece for piece in pieces if any(word in piece for word in quoted)]
        elif kind == "TypeError":
            sign = r" in |\|" if "iterable" in said else r"[+~|%/*-]"
            pieces = [piece for piece in pieces if re.search(sign, piece[2:-2])]
        elif kind == "TemplateError":
            pieces = [piece for piece in pieces if said in piece] or pieces
        words = set(quoted or re.findall(r"\w+", " ".join(pieces)))
        lacks: list[str] = []
        if kind in ("TypeError", "UndefinedError"):
            values = {"tools": sample.tools, **sample.variables}
            lacks = [name for name in LACKED if name in words and values.get(name) is None]
            lacks += [
                f"{key} of message {count} ({message['role']})"
                for key in WITHIN_MESSAGE
                if key in words
                for count, message in enumerate(messages, 1)
                if message.get(key) is None
            ][:3]
        named = [lack.split()[0] for lack in lacks]
        likely = [piece for piece in pieces if any(name in piece for name in named)] + pieces
        shown = likely[0] if likely and len(line) > 120 else line
        if not number:
            return f"it cannot be rendered ({kind}: {said})."
        at = f" at line {number} ({shown.strip()[:120]})"
        missing = f" The sample has no {', and no '.join(lacks)}." if lacks else ""
        return f"the chat template ends{at} in {kind}: {said}.{missing}"


def as_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Makes what messages say lists of parts, where it is text."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


def _thinking(message: dict[str, Any]) -> dict[str, Any]:
    """Gives the thoughts of a message the names that templates read, as transformers 5 does."""
    said = next((message[key] for key in THOUGHTS if message.get(key)), None)
    return message if said is None else {"thinking": said, **message, "reasoning_content": said}


def _first_difference(one: Sequence[Any], other: Sequence[Any]) -> int:
    shorter = min(len(one), len(other))
    return next((at for at in range(shorter) if one[at] != other[at]), shorter)


def _any_learned(labels: list[int]) -> bool:
    return any(label != NOT_LEARNED for label in labels)


def _labels(tokens: list[int], learned: list[Any]) -> list[int]:
    return [token if mark else NOT_LEARNED for token, mark in zip(tokens, learned)]
