"""Prompts: checks that rows of preferred answers ask as the trained model will be asked. TRL lets
an answer begin at the first token that is not the prompt's, and leaves the prompt's rest out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..cli.amounts import format_count
from .columns import Form
from .rendering import LOST_THOUGHTS, Renderer
from .samples import Sample

AT_ONCE = 500  # rows whose texts the tokenizer gets in one call
ANSWERS = ("chosen", "rejected", "completion")


@dataclass
class Prompts:
    """Reads rows one by one. ``adds_special``: texts get the tokenizer's first and last tokens."""

    tokenizer: Any
    source: str
    adds_special: bool
    _notes: Counter[str] = field(default_factory=Counter)
    _texts: list[list[str]] = field(default_factory=list)  # of each row the prompt, then all of it
    _merged: int = 0
    _renderer: Renderer | None = None

    def read(self, row: dict[str, Any]) -> None:
        """Reads a row with a prompt. Raises ConfigError if the chat template fails, or renders the
        prompt otherwise before an answer."""
        answers = [row[name] for name in ANSWERS if name in row]
        self._chat = not isinstance(answers[0], str)
        if self._chat:
            texts, notes = self._rendered(row, answers)
            self._notes.update(notes)
        else:
            texts = [row["prompt"], *(f"{row['prompt']}{answer}" for answer in answers)]
        self._texts.append(texts)
        if len(self._texts) == AT_ONCE:
            self._merge()

    def told(self) -> Iterator[str]:
        """Yields what is told of the rows."""
        self._merge()
        for note, count in self._notes.most_common():
            yield f"{note}, in {count:,} of the samples"
        if self._merged:
            yield (
                f"{format_count(self._merged, 'prompt')} whose last token is another one once the"
                " answer follows: it is learned as a part of the answer"
            )

    def _rendered(
        self, row: dict[str, Any], answers: list[list[Any]]
    ) -> tuple[list[str], set[str]]:
        if self._renderer is None:
            self._renderer = Renderer.of(
                self.tokenizer,
                None,
                form=Form(),
                source=self.source,
                length=0,
                padded=False,
                code="",
            )
        prompt, texts, notes = row["prompt"], list[str](), set[str]()
        tools = json.loads(row.get("tools") or "null")
        for answer in answers:
            sample = Sample(
                messages=[*prompt, *answer],
                start=len(prompt),
                learned=[*[False] * len(prompt), *[True] * len(answer)],
                tools=tools,
                variables=row.get("chat_template_kwargs") or {},
            )
            if not texts:
                texts.append(self._renderer.written(sample, prompt, add_generation_prompt=True))
            texts.append(self._renderer.written(sample, sample.messages))
            if not texts[-1].startswith(texts[0]):
                notes.add(self._renderer.unlike(sample, prompt, sample.messages))
            if self._renderer.loses_thoughts(sample):
                notes.add(LOST_THOUGHTS)
        return texts, notes - {""}

    def _merge(self) -> None:
        """Counts prompts whose tokens are others once an answer follows."""
        if not self._texts:
            return
        flat = [text for texts in self._texts for text in texts]
        special = self.adds_special and not self._chat
        tokens = iter(self.tokenizer(flat, add_special_tokens=special)["input_ids"])
        for texts in self._texts:
            asked, *whole = (next(tokens) for _ in texts)
            self._merged += any(
                text.startswith(texts[0]) and each[: len(asked)] != asked
                for text, each in zip(texts[1:], whole)
            )
        self._texts.clear()
