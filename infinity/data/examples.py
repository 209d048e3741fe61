"""Examples: training data of separate samples, as conversations, prompts with completions, or
texts. The datasets library reads them and TRL renders, masks and packs them.

example   one sample of the data; a row is what TRL makes of it: tokens, and labels for those that
          are learned
learned   a token that counts in the loss: of an answer or completion, or any token of a text
pack      to put several examples in one row of `sequence_length` tokens

The seed, step and micro-batch numbers alone determine the rows of a batch. Every row is in one
batch of an epoch.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ConfigError
from .corpus import HELD_OUT_SHARE
from .example_files import ExampleFiles, load_examples

if TYPE_CHECKING:
    import torch

NEEDED = "pip install trl datasets"
NOT_LEARNED = -100  # label
# Without a template of its own a tokenizer gets this one, which needs no token of its own.
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ '### ' + message['role'] + ':\\n' + message['content'] +"
    " eos_token + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '### assistant:\\n' }}"
    "{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Rows of tokens to train on and to hold out. ``skipped``: counts by reason."""

    source: str
    fingerprint: str  # of the rows' tokens and labels
    sample_count: int  # in the files, without empty ones
    rows: Any = field(repr=False)  # a datasets.Dataset with input_ids and labels
    held_out_count: int
    collate: Callable[[list[dict[str, Any]]], dict[str, Any]] = field(repr=False)
    train_ntokens: int
    held_out_ntokens: int
    learned_ntokens: int  # of those to train on
    skipped: dict[str, int]
    has_own_template: bool
    byte_level: bool = False

    @property
    def mapped(self) -> list[str]:
        """The rows' files, which are read as rows are needed."""
        return [each["filename"] for each in self.rows.cache_files]

    @property
    def train_count(self) -> int:
        return len(self.rows) - self.held_out_count

    def first(self, tokenizer: Any) -> list[tuple[str, bool]]:
        """Returns the first row's text in pieces, each with whether it is learned."""
        row = self.rows[0]
        pieces: list[tuple[list[int], bool]] = []
        for token, label in zip(row["input_ids"], row["labels"]):
            if not pieces or pieces[-1][1] != (label != NOT_LEARNED):
                pieces.append(([], label != NOT_LEARNED))
            pieces[-1][0].append(token)
        return [(tokenizer.decode(tokens), learned) for tokens, learned in pieces]


def read_examples(
    files: ExampleFiles, tokenizer: Any, *, sequence_length: int, pack: bool = False
) -> Examples:
    """Reads the files, and has TRL render them with the tokenizer's chat template, mask what is not
    learned, truncate to ``sequence_length`` and ``pack``.

    Gives a tokenizer without a chat template a plain one, if conversations need it. Raises
    ConfigError if a library is missing, columns are unknown, or less than two rows are left.
    """
    if tokenizer is None:
        raise ConfigError(
            f"--data: {files.source} has samples, which need a model with a tokenizer: give --model"
            " a folder that has one."
        )
    with _libraries() as (datasets, trl):
        examples, skipped = _without_empty(load_examples(datasets, files))
        if not len(examples):
            raise ConfigError(f"--data: all samples of {files.source} are empty.")
        has_template = bool(tokenizer.chat_template)
        if not has_template and _is_conversational(examples):
            tokenizer.chat_template = PLAIN_TEMPLATE
        sample_count = len(examples)
        given = _with_answers_apart(examples, tokenizer, skipped)
        rows, collate = _prepare(trl, given, tokenizer, sequence_length, pack)
    if not pack and (dropped := len(given.rows) - len(rows)):
        skipped[f"nothing to learn within {sequence_length} tokens"] = dropped
    sizes, learned, fingerprint = _counts(rows)
    if len(rows) < 2:
        told = "".join(f"; {count} {why}" for why, count in skipped.items())
        raise ConfigError(
            f"--data: 2 samples are needed, one to train on and one held out, and {files.source}"
            f" leaves {len(rows)}{told}. Give more data, or a larger --sequence-length."
        )
    held_out = max(1, int(len(rows) * HELD_OUT_SHARE))
    return Examples(
        source=files.source,
        fingerprint=fingerprint,
        sample_count=sample_count,
        rows=rows,
        held_out_count=held_out,
        collate=collate,
        train_ntokens=sum(sizes[:-held_out]),
        held_out_ntokens=sum(sizes[-held_out:]),
        learned_ntokens=sum(learned[:-held_out]),
        skipped=skipped,
        has_own_template=has_template,
    )


@contextmanager
def _libraries() -> Iterator[tuple[Any, Any]]:
    """Imports what reads and renders, and keeps it from drawing bars, and from telling its users
    what we should change."""
    try:
        import datasets
        import trl
    except ImportError as error:
        raise ConfigError(f"--data: samples need trl and datasets ({error}): {NEEDED}") from None
    datasets.disable_progress_bars()
    level = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(logging.CRITICAL)  # what cannot be read is told by an error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield datasets, trl
    finally:
        datasets.logging.set_verbosity(level)
        datasets.enable_progress_bars()


def _without_empty(data: Any) -> tuple[Any, dict[str, int]]:
    kept = data.filter(lambda row: all(row.values()))
    empty = len(data) - len(kept)
    why = "empty, or with other columns than the first"
    return kept, {why: empty} if empty else {}


def _counts(rows: Any) -> tuple[list[int], list[int], str]:
    """Counts each row's tokens, and those that are learned. Also returns a hash of all of them, 16
    hex digits: another tokenizer or template makes other rows."""
    sizes, learned, digest = [], [], hashlib.sha256()
    for batch in rows.iter(1000):
        for tokens, labels in zip(batch["input_ids"], batch["labels"]):
            sizes.append(len(labels))
            learned.append(sum(label != NOT_LEARNED for label in labels))
            digest.update(np.asarray([tokens, labels], np.int64).tobytes())
    return sizes, learned, digest.hexdigest()[:16]


def _is_conversational(data: Any) -> bool:
    return any(name in data.column_names for name in ("messages", "conversations")) or (
        "prompt" in data.column_names and len(data) > 0 and not isinstance(data[0]["prompt"], str)
    )


@dataclass(frozen=True)
class _Given:
    """Examples for TRL. ``masks_answers``: they are conversations, whose template tells answers
    apart."""

    rows: Any
    masks_answers: bool


def _with_answers_apart(data: Any, tokenizer: Any, skipped: dict[str, int]) -> _Given:
    """Makes an example of every answer of conversations if their template does not tell answers
    apart. Counts conversations without one in ``skipped``."""
    from trl.chat_template_utils import get_training_chat_template

    if not any(name in data.column_names for name in ("messages", "conversations")):
        return _Given(data, False)
    try:
        get_training_chat_template(tokenizer)
        return _Given(data, True)
    except ValueError:  # its template does not tell answers apart
        pass
    (column,) = data.column_names
    try:
        unanswered = sum(not _answers(messages) for messages in data[column])
        apart = data.map(
            _answers_apart,
            batched=True,
            remove_columns=data.column_names,
            fn_kwargs={"column": column},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _refusal(error) from None
    if unanswered:
        skipped["no answer in it"] = unanswered
    if not len(apart):
        raise ConfigError(
            "--data: no conversation has an answer, which is a message of the role assistant that"
            f" follows another one. The roles are {', '.join(sorted(_roles(data[column])))}."
        )
    return _Given(apart, False)


def _prepare(
    trl: Any, given: _Given, tokenizer: Any, sequence_length: int, pack: bool
) -> tuple[Any, Callable]:
    """Has TRL make rows of the examples. Returns them, and the function that makes batches. TRL
    drops examples without a learned token."""
    with tempfile.TemporaryDirectory() as folder:
        args = trl.SFTConfig(
            output_dir=folder,
            max_length=sequence_length,
            packing=pack,
            assistant_only_loss=given.masks_answers,
            use_cpu=True,
            report_to=[],
            bf16=False,
            disable_tqdm=True,
        )
        try:
            made = trl.SFTTrainer(
                _smallest_model(), args, train_dataset=given.rows, processing_class=tokenizer
            )
        except Exception as error:  # noqa: BLE001 - data and templates may be wrong in every way
            raise _refusal(error) from None
    rows, collate = made.train_dataset, made.data_collator
    if "labels" not in rows.column_names:
        rows = rows.map(lambda row: {"labels": row["input_ids"]})
    return rows, collate


def _refusal(error: Exception) -> ConfigError:
    """Makes the error for samples that cannot be prepared."""
    line = (str(error).strip().splitlines() or ["no message"])[0]
    return ConfigError(
        f"--data: the samples cannot be prepared ({type(error).__name__}: {line}). A message needs"
        " role and content; prompt, completion and text are texts."
    )


def _answers_apart(batch: dict[str, list], column: str) -> dict[str, list]:
    """Makes an example of every answer of conversations, with what was said before it."""
    found: dict[str, list] = {"prompt": [], "completion": []}
    for messages in batch[column]:
        said = [_as_message(message) for message in messages]
        for at in _answers(said):
            found["prompt"].append(said[:at])
            found["completion"].append([said[at]])
    return found


def _roles(conversations: Any) -> set[str]:
    return {str(_as_message(each)["role"]) for messages in conversations for each in messages}


def _answers(messages: list[dict[str, Any]]) -> list[int]:
    """Returns the places of the assistant's messages after another."""
    said = [_as_message(message) for message in messages]
    return [at for at, message in enumerate(said) if at and message["role"] == "assistant"]


def _as_message(message: dict[str, Any]) -> dict[str, Any]:
    if "from" not in message:
        return {name: value for name, value in message.items() if value is not None}
    roles = {"human": "user", "gpt": "assistant"}
    return {"role": roles.get(message["from"], message["from"]), "content": message["value"]}


def _smallest_model() -> Any:
    """Makes a model for TRL's trainer, which wants one and does not use it here."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 8)
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=1))


@dataclass(frozen=True, kw_only=True)
class ExampleBatches:
    """Rows of examples, in an order of each epoch's own, as the tensors that a model takes."""

    corpus: Examples
    batch_size: int
    sequence_length: int
    seed: int
    per_step: int  # batches of one step, on all ranks

    @property
    def tokens_per_batch(self) -> int:
        """Mean tokens of a batch."""
        return max(1, self.batch_size * self.corpus.train_ntokens // self.corpus.train_count)

    def train(self, step: int, micro_batch: int = 0) -> dict[str, torch.Tensor]:
        """Returns a micro-batch, determined by (seed, step, micro_batch)."""
        first = (step * self.per_step + micro_batch) * self.batch_size
        return self._collated([self._place(at) for at in range(first, first + self.batch_size)])

    def held_out(self, batch_count: int) -> list[dict[str, torch.Tensor]]:
        """Returns at most ``batch_count`` batches of the held-out rows."""
        first, last = self.corpus.train_count, len(self.corpus.rows)
        rows = list(range(first, last))[: batch_count * self.batch_size]
        return [
            self._collated(rows[at : at + self.batch_size])
            for at in range(0, len(rows), self.batch_size)
        ]

    def prompt(self, ntokens: int) -> torch.Tensor:
        """Returns what the first held-out row has before its first learned token, or else its first
        ``ntokens`` tokens: int64 [1, tokens]."""
        import torch

        row = self.corpus.rows[self.corpus.train_count]
        learned = [label != NOT_LEARNED for label in row["labels"]]
        count = learned.index(True) or ntokens
        return torch.tensor([row["input_ids"][:count]])

    def steps_of(self, epochs: float) -> int:
        """Counts the steps of so many epochs, the last one whole."""
        return max(
            1, -(-int(epochs * self.corpus.train_count) // (self.batch_size * self.per_step))
        )

    def _place(self, number: int) -> int:
        """Returns the row of sample ``number`` since the start."""
        count = self.corpus.train_count
        epoch, at = divmod(number, count)
        return int(_order(self.seed, epoch, count)[at])

    def _collated(self, places: list[int]) -> dict[str, torch.Tensor]:
        batch = self.corpus.collate([self.corpus.rows[place] for place in places])
        return dict(batch)


@functools.lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    # Sorted raw words: an order that numpy's versions do not change
    words = np.random.Philox(key=seed, counter=[0, 0, epoch, 1]).random_raw(count)
    return np.argsort(words, kind="stable")
