"""Examples: training data of separate samples, as conversations, prompts with completions, or
texts. The datasets library reads them, the tokenizer's chat template renders them, and TRL packs
and collates them.

example   one sample of the data; a row is what is made of it: tokens, and labels for those that
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
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import ConfigError
from ...library_versions import refuse_older
from . import columns, rendering, samples
from .columns import choose_form
from .corpus import HELD_OUT_SHARE
from .example_files import ExampleFiles, is_padded, load_examples
from .rendering import EMPTY, MARK, NOT_LEARNED, UNANSWERED, UNLEARNED, Renderer

if TYPE_CHECKING:
    import torch

NEEDED = "pip install trl datasets"
# Without a template of its own a tokenizer gets this one, which needs no token of its own.
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ '### ' + message['role'] + ':\\n' + message['content'] +"
    " eos_token + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '### assistant:\\n' }}"
    "{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Rows of tokens to train on and to hold out. ``skipped``: counts of samples by reason.
    ``told``: how the data was read, and what of it is not used."""

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
    told: list[str]
    has_own_template: bool
    byte_level: bool = False

    @property
    def mapped(self) -> list[str]:
        """The rows' files, which are read as rows are needed."""
        return [each["filename"] for each in self.rows.cache_files]

    @property
    def train_count(self) -> int:
        return len(self.rows) - self.held_out_count

    def batch(self, places: list[int]) -> dict[str, Any]:
        """Returns rows as the tensors that a model takes."""
        return dict(self.collate([self.rows[place] for place in places]))

    def tokens(self, place: int) -> dict[str, list[int]]:
        """Returns a row's input_ids and labels."""
        return self.rows[place]

    def prompt(self, place: int, ntokens: int) -> dict[str, Any]:
        """Returns what a row has before its first learned token, or else its first ``ntokens``
        tokens, as a model takes it: input_ids int64 [1, tokens]."""
        import torch

        row = self.rows[place]
        learned = [label != NOT_LEARNED for label in row["labels"]]
        return {"input_ids": torch.tensor([row["input_ids"][: learned.index(True) or ntokens]])}

    def first(self, tokenizer: Any) -> list[tuple[str, bool]]:
        """Returns the first row's text in pieces, each with whether it is learned."""
        row = self.tokens(0)
        pairs = zip(row["input_ids"], row["labels"])
        return [
            (tokenizer.decode([token for token, _ in piece]), learned)
            for learned, piece in groupby(pairs, lambda pair: pair[1] != NOT_LEARNED)
        ]


def read_examples(
    files: ExampleFiles,
    tokenizer: Any,
    *,
    sequence_length: int,
    pack: bool = False,
    share: float = HELD_OUT_SHARE,
) -> Examples:
    """Reads the files, renders them with the tokenizer's chat template, masks what is not learned,
    truncates to ``sequence_length``, and has TRL ``pack`` them. ``share``: of the rows, is held
    out: at least one; 0: none, 1: all.

    Gives a tokenizer without a chat template a plain one, if conversations need it. Raises
    ConfigError if a library is missing, columns are unknown or cannot be used, a sample cannot be
    rendered, or less than two rows are left (one, if all or none are held out).
    """
    if tokenizer is None:
        raise ConfigError(
            f"--data: {files.source} has samples, which need a model with a tokenizer: give a"
            " folder that has one."
        )
    with libraries() as (datasets, trl):
        data = load_examples(datasets, files)
        form = choose_form(data, files.source)
        notes_of_form = form.told(data.column_names)
        has_template = bool(tokenizer.chat_template)
        if not has_template and not form.text:
            tokenizer.chat_template = PLAIN_TEMPLATE
        renderer = Renderer.of(
            tokenizer,
            None if form.text else training_template(tokenizer),
            form=form,
            source=files.source,
            length=sequence_length,
            padded=is_padded(datasets, files),
            code=_code(),
        )
        made = _map(datasets, data.select_columns(form.used), renderer)
        notes_of_form += [] if form.text else renderer.told()
        skipped, notes, kept = _looked_at(made, files.source)
        rows = made if len(kept) == len(made) else made.select(kept)
        rows = rows.select_columns(["input_ids", "labels"])
        if pack and len(rows):
            from trl.data_utils import pack_dataset

            rows = pack_dataset(rows, sequence_length, "bfd")
        collate = _collator(tokenizer, pack)
    sizes, learned, fingerprint = _counts(rows)
    divided = 0 < share < 1
    if len(rows) < 1 + divided:
        lost = "".join(f"; {count} {why}" for why, count in skipped.items())
        needed = "2 samples are" if divided else "a sample is"
        why = " one to train on and one held out," if divided else ""
        raise ConfigError(
            f"--data: {needed} needed,{why} and {files.source} leaves {len(rows)}{lost}. Give more"
            " data, or a larger --sequence-length"
        )
    held_out = held_out_count(len(rows), share)
    train_count = len(rows) - held_out
    return Examples(
        source=files.source,
        fingerprint=fingerprint,
        sample_count=len(data) - skipped.get(EMPTY, 0),
        rows=rows,
        held_out_count=held_out,
        collate=collate,
        train_ntokens=sum(sizes[:train_count]),
        held_out_ntokens=sum(sizes[train_count:]),
        learned_ntokens=sum(learned[:train_count]),
        skipped=skipped,
        told=notes_of_form + notes,
        has_own_template=has_template,
    )


def held_out_count(count: int, share: float) -> int:
    """Returns how many of ``count`` rows are held out: of a part at least one, and not all."""
    return min(max(1, int(count * share)), count - 1) if 0 < share < 1 else int(count * share)


@contextmanager
def libraries() -> Iterator[tuple[Any, Any]]:
    """Imports what reads and renders, and keeps it from drawing bars, and from telling its users
    what we should change."""
    refuse_older("trl"), refuse_older("datasets")
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


def training_template(tokenizer: Any) -> str | None:
    """Returns TRL's variant of a known chat template, which marks answers; None if the tokenizer's
    own does so, or if TRL has none for it."""
    own = tokenizer.chat_template
    if MARK.search(own if isinstance(own, str) else own.get("default", "")):
        return None
    from trl.chat_template_utils import get_training_chat_template

    try:
        template = get_training_chat_template(tokenizer)
    except Exception:  # noqa: BLE001 - it tries the template, which is judged by the data's samples
        return None
    return template if template and MARK.search(template) else None


@functools.cache
def _code() -> str:
    """Returns a hash of what makes the rows: `datasets` keeps them, and knows functions of modules
    by name alone."""
    files = [Path(str(module.__file__)) for module in (columns, samples, rendering)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _map(datasets: Any, data: Any, renderer: Renderer) -> Any:
    whole, text = datasets.Value("int64"), datasets.Value("string")
    lists = {name: datasets.Sequence(whole) for name in ("input_ids", "labels")}
    texts = {name: datasets.Sequence(text) for name in ("notes", "roles")}
    features = datasets.Features({**lists, "sample": whole, "why": text, **texts})
    return data.map(
        renderer.batch,
        batched=True,
        batch_size=100,
        with_indices=True,
        remove_columns=data.column_names,
        features=features,
    )


def _looked_at(made: Any, source: str) -> tuple[dict[str, int], list[str], list[int]]:
    """Counts the samples without a row by reason. Also returns what is told of the others, and the
    places of the rows. Raises ConfigError if there are none."""
    skipped: Counter[str] = Counter()
    notes: Counter[str] = Counter()
    roles: set[str] = set()
    kept, last = [], -1
    at = 0
    for batch in made.select_columns(["sample", "why", "notes", "roles"]).iter(1000):
        for sample, why, noted, said in zip(*batch.values()):
            if why:
                skipped[why] += 1
                roles.update(said)
            else:
                kept.append(at)
            if sample != last:
                notes.update(set(noted))
            last, at = sample, at + 1
    if set(skipped) == {EMPTY} and not kept:
        raise ConfigError(f"--data: all samples of {source} are empty.")
    if not kept and UNLEARNED in skipped and set(skipped) <= {EMPTY, UNLEARNED}:
        raise ConfigError(
            f"--data: no answer of {source} is to be learned: each has weight 0, or another mark"
            " that leaves it out."
        )
    if not kept and set(skipped) <= {EMPTY, UNANSWERED, UNLEARNED}:
        raise ConfigError(
            f"--data: no conversation has an answer that is to be learned, which is a message of"
            f" the role assistant that follows another one. The roles are"
            f" {', '.join(sorted(roles))}."
        )
    order = [why for why in (EMPTY, UNANSWERED, UNLEARNED) if why in skipped]
    order += [why for why in skipped if why not in order]
    several = [f"{note}, in {count:,} of the samples" for note, count in notes.most_common(8)]
    return {why: skipped[why] for why in order}, several, kept


def _collator(tokenizer: Any, pack: bool) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
    """Returns TRL's function that makes batches. A tokenizer without a token that fills rows gets
    the one that ends texts."""
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ConfigError(
                "--data: the tokenizer has no pad_token and no eos_token: give it one."
            )
        tokenizer.pad_token = tokenizer.eos_token
    return DataCollatorForLanguageModeling(pad_token_id=tokenizer.pad_token_id, padding_free=pack)


@dataclass(frozen=True, kw_only=True)
class ExampleBatches:
    """Rows of examples, in an order of each epoch's own, as the tensors that a model takes."""

    corpus: Examples
    batch_size: int
    sequence_length: int
    seed: int
    per_step: int  # batches of one step, on all ranks
    evaluated: ExampleBatches | None = None  # of --eval-data

    @property
    def held_out_corpus(self) -> Examples:
        """The rows of which some are held out."""
        return (self.evaluated or self).corpus

    @property
    def tokens_per_batch(self) -> int:
        """Mean tokens of a batch."""
        return max(1, self.batch_size * self.corpus.train_ntokens // self.corpus.train_count)

    def train(self, step: int, micro_batch: int = 0) -> dict[str, torch.Tensor]:
        """Returns a micro-batch, determined by (seed, step, micro_batch)."""
        first = (step * self.per_step + micro_batch) * self.batch_size
        return self.corpus.batch([self._place(at) for at in range(first, first + self.batch_size)])

    def held_out(self, batch_count: int) -> list[dict[str, torch.Tensor]]:
        """Returns at most ``batch_count`` batches of the held-out rows."""
        if self.evaluated is not None:
            return self.evaluated.held_out(batch_count)
        first, last = self.corpus.train_count, len(self.corpus.rows)
        rows = list(range(first, last))[: batch_count * self.batch_size]
        return [
            self.corpus.batch(rows[at : at + self.batch_size])
            for at in range(0, len(rows), self.batch_size)
        ]

    def prompt(self, ntokens: int) -> dict[str, torch.Tensor]:
        """Returns what the first held-out row has before its first learned token, or else its first
        ``ntokens`` tokens, as a model takes it: input_ids int64 [1, tokens]."""
        corpus = self.held_out_corpus
        return corpus.prompt(corpus.train_count, ntokens)

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


@functools.lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    # Sorted raw words: an order that numpy's versions do not change
    words = np.random.Philox(key=seed, counter=[0, 0, epoch, 1]).random_raw(count)
    return np.argsort(words, kind="stable")
