"""Pictures: samples with pictures, as batches that TRL's collator makes with the processor of a
model of images and text.

picture   an image of a sample: a file, bytes, or base64
place     the part of a question that is a picture; without places, all of them come first
row       what TRL's collator is given: a whole conversation, an answer with what comes before it,
          or a text. Its pictures are decoded when it is read
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from ...errors import ConfigError, InfinityError
from ...library_versions import is_at_least
from ..cli.amounts import format_count
from .classes import auto_class
from .columns import PAIRS, Form, choose_form, first_filled, is_empty, known, values_of
from .corpus import HELD_OUT_SHARE
from .example_files import ExampleFiles, is_padded, load_examples
from .examples import Examples, held_out_count, libraries, training_template
from .rendering import EMPTY, MARK, MEDIA, NOT_LEARNED, UNANSWERED, UNLEARNED, as_parts
from .sample import without_repeats
from .samples import THOUGHTS, Sample, check_places, is_picture, read_sample
from .wording import first_line

DEEP = ("I", "F")  # modes of pictures with 16 or 32 bits for each color
WORD = re.compile(r"<image>(?!.*</image>)", re.S)  # closed again, it is HTML
BASE64 = re.compile(r"[A-Za-z0-9+/\s]{32,}={0,2}\s*")
NEEDED = "pip install 'infinity-engine[pictures]'"
TRIED = 64  # pixels of the edge of a picture that is tried


@dataclass(frozen=True, kw_only=True)
class PictureExamples(Examples):
    """Rows of text and pictures, which are made when they are read."""

    image_tokens: frozenset[int]

    def batch(self, places: list[int]) -> dict[str, Any]:
        """Raises ConfigError for a picture that has changed since it was looked at."""
        try:
            return super().batch(places)
        except Exception as error:
            numbers = ", ".join(f"{self.rows.places[place][0] + 1}" for place in places)
            raise ConfigError(
                f"--data: {self.source}: the samples {numbers} cannot be made a batch"
                f" ({type(error).__name__}: {first_line(error)}). Give samples that all have"
                " pictures, or --batch-size 1"
            ) from error

    def tokens(self, place: int) -> dict[str, list[int]]:
        """Leaves out the repeated tokens of a picture."""
        whole = super().batch([place])
        tokens, labels = (whole[name][0].tolist() for name in ("input_ids", "labels"))
        kept = without_repeats(tokens, self.image_tokens)
        return {"input_ids": [tokens[at] for at in kept], "labels": [labels[at] for at in kept]}

    def prompt(self, place: int, ntokens: int) -> dict[str, Any]:
        whole = super().batch([place])
        learned = (whole.pop("labels")[0] != NOT_LEARNED).tolist()
        count = (learned.index(True) if True in learned else 0) or len(learned)
        size = whole["input_ids"].shape
        return {
            name: value[:, :count] if getattr(value, "shape", ()) == size else value
            for name, value in whole.items()
        }


@dataclass(frozen=True, kw_only=True)
class PictureRows:
    """Rows for TRL's collator. ``places``: of each row the sample, and of an answer its first
    message and the one behind it."""

    data: Any  # a datasets.Dataset, whose pictures are not decoded
    form: Form
    template: str
    padded: bool
    folders: tuple[Path, ...]
    media: tuple[str, ...]  # tokens for pictures, videos and sounds
    decode: Callable[[dict[str, Any]], Any]
    places: tuple[tuple[int, int | None, int | None], ...] = ()

    def has_pictures(self, at: int) -> bool:
        """Tells whether a row has pictures, without decoding them."""
        number, first, _ = self.places[at]
        sample, placed = self.sample(number)
        assert sample is not None
        messages, _ = _placed(sample, placed, self.form.pictures)
        shown = any(is_picture(part) for each in messages[:first] for part in _parts(each))
        return shown or bool(sample.text is not None and placed)

    @property
    def cache_files(self) -> list[dict[str, Any]]:
        return list(self.data.cache_files)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, at: int) -> dict[str, Any]:
        number, first, last = self.places[at]
        sample, listed = self.sample(number)
        assert sample is not None
        messages, pictures = _placed(sample, listed, self.form.pictures)
        shown = {"images": [self._opened(each) for each in pictures]}
        if sample.text is not None:
            return {"text": sample.text} | shown
        if first is None:
            return {"messages": messages} | shown
        before = messages[:first]
        count = sum(is_picture(part) for each in before for part in _parts(each))
        shown["images"] = shown["images"][:count]  # the others are of later questions
        return {"prompt": before, "completion": messages[first:last]} | shown

    def sample(self, number: int) -> tuple[Sample | None, list[Any]]:
        """Reads a sample, and its pictures as they were given."""
        row = self.data[number]
        text_sample = read_sample(
            row, self.form, template=self.template, padded=self.padded, pictures=True
        )
        return text_sample, _listed(row.get(self.form.pictures or ""))

    def _opened(self, given: Any) -> Any:
        """Returns a picture as `datasets` decodes it."""
        if isinstance(given, dict):
            keys = [
                key for key in ("bytes", "path", "url", "base64") if not is_empty(given.get(key))
            ]
            if not keys:
                raise ConfigError("a picture has no bytes, path, url or base64.")
            if keys[0] != "bytes" or isinstance(given["bytes"], str):
                return self._opened(given[keys[0]])
            given = given["bytes"]
        if isinstance(given, str):
            given = self._found(given)
        if not isinstance(given, (bytes, bytearray, Path)):
            raise ConfigError(
                f"a picture is {str(given)[:40]!r}, of type {type(given).__name__}: give a path,"
                " base64, bytes, or an object with one of them."
            )
        is_file = isinstance(given, Path)
        try:
            picture = self.decode(
                {
                    "path": str(given) if is_file else None,
                    "bytes": None if is_file else bytes(given),
                }
            )
        except Exception as error:  # noqa: BLE001 - decoders have errors of their own
            what = str(given) if is_file else f"of {len(given)} bytes"
            why = first_line(error) if is_file else type(error).__name__
            raise ConfigError(
                f"the picture {what} cannot be read ({why}): it is damaged, or of another kind."
                " Replace it, or remove the sample."
            ) from None
        if picture.mode.startswith(DEEP):
            raise ConfigError(
                f"a picture of mode {picture.mode} has more than 8 bits for each color, which a"
                " processor would clip. Convert it to 8 bits, or remove the sample."
            )
        return picture

    def _found(self, given: str) -> Path | bytes:
        """Returns the file or the bytes that a text names."""
        if given.startswith("data:"):
            return _decoded(given.partition(",")[2])
        if re.match(r"https?:", given):
            raise ConfigError(
                f"the picture {given[:80]!r} is on the network: download it, and give its path."
            )
        name = unquote(urlparse(given).path) if given.startswith("file://") else given
        tried = [folder / name for folder in self.folders] if len(name) < 4096 else []
        there = list(dict.fromkeys(path.resolve() for path in tried if path.is_file()))
        if len(there) > 1:
            raise ConfigError(
                f"the picture {name} is in several folders ({', '.join(map(str, there))}): give"
                " whole paths, or the files of one folder."
            )
        if there:
            return there[0]
        if BASE64.fullmatch(given):
            return _decoded(given)
        where = ", ".join(str(folder.resolve()) for folder in self.folders)
        raise ConfigError(
            f"no picture {name[:80]!r} in {where}: paths are relative to the file of samples, or to"
            " --data if its files are in several folders. Give the file, or remove the sample."
        )


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except ValueError as error:
        raise ConfigError(
            f"the picture {text[:40]!r} is no base64 ({error}). Replace it, or remove the sample."
        ) from None


def _listed(given: Any) -> list[Any]:
    """Returns the pictures of a column: one, a list of them, or its JSON text."""
    if isinstance(given, str) and given.lstrip().startswith("["):
        try:
            given = json.loads(given)
        except ValueError:
            pass  # the name of a file
    return [each for each in (given if isinstance(given, list) else [given]) if not is_empty(each)]


def _parts(message: dict[str, Any]) -> list[Any]:
    said = message.get("content")
    return said if isinstance(said, list) else []


def _placed(
    sample: Sample, given: list[Any], column: str | None
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Returns the messages with places for pictures, and the pictures in that order. Without a
    place, TRL has them before the first question. Raises ConfigError for a place without a picture,
    or a picture without one."""
    messages = sample.messages
    if sample.text is not None:
        return [], given
    asked = [each for each in messages if each["role"] == "user"]
    if not any(map(_parts, messages)):
        words = sum(len(WORD.findall(each.get("content") or "")) for each in asked)
        if not given:
            for each in messages:
                check_places(each.get("content"), each["role"], each["role"])
            return messages, []
        if not words:
            if not asked:
                raise ConfigError(
                    "it has pictures, and no question that they belong to. Write one, or remove it."
                )
            first = messages.index(asked[0])
            places = [{"type": "image"} for _ in given]
            said = [*places, {"type": "text", "text": asked[0].get("content") or ""}]
            messages = [*messages[:first], {**asked[0], "content": said}, *messages[first + 1 :]]
        else:
            messages = [
                {**each, "content": _split(each["content"])} if each["role"] == "user" else each
                for each in messages
            ]
    messages = as_parts(messages)
    places = [part for each in messages for part in _parts(each) if is_picture(part)]
    unfilled = sum("image" not in part for part in places)
    if unfilled != len(given):
        raise ConfigError(
            f"it has {format_count(len(given), 'picture')} in {column or 'no column'} and"
            f" {format_count(unfilled, 'place')} for them (parts of type image, or <image>). Give"
            " as many of both, or no place: then they come before the first question."
        )
    rest = iter(given)
    pictures = [part["image"] if "image" in part else next(rest) for part in places]
    bare = [
        {**each, "content": [{"type": "image"} if is_picture(p) else p for p in _parts(each)]}
        if _parts(each)
        else each
        for each in messages
    ]
    return bare, pictures


def _split(said: str | None) -> list[dict[str, str]]:
    """Splits a text at its places."""
    pieces = WORD.split(said or "")
    parts: list[dict[str, str]] = []
    for at, piece in enumerate(pieces):
        if at:
            parts.append({"type": "image"})
        if piece:
            parts.append({"type": "text", "text": piece})
    return parts


@contextmanager
def naming_batches(corpus: Any) -> Iterator[None]:
    """Raises ConfigError if the model does not take the batches of pictures that the libraries make
    for it, before anything is trained."""
    import torch

    try:
        yield
    except (ValueError, IndexError, RuntimeError, TypeError) as error:
        is_ours = isinstance(error, (InfinityError, torch.OutOfMemoryError))
        if is_ours or not isinstance(corpus, PictureExamples):
            raise
        raise ConfigError(
            f"--data: {corpus.source}: the model cannot take what its processor and TRL's collator"
            f" make of these samples ({type(error).__name__}: {first_line(error)}). Write them as"
            " text, or give the folder of --model a chat_template.jinja with {% generation %}"
            " around answers."
        ) from error


def takes_pictures(model_config: Any, path: Path | None) -> bool:
    """Tells whether the class of a configuration takes pictures beside text."""
    import transformers

    own = auto_class(model_config, path) is not transformers.AutoModelForCausalLM
    return own and hasattr(model_config, "vision_config")


def read_processor(path: Path | None, *, trust: bool = False) -> Any:
    """Reads a folder's processor of pictures. Raises ConfigError with what it needs."""
    import transformers

    if path is None or not any(path.glob("*processor*.json")):
        raise ConfigError(
            f"--data has pictures, and {path} has no processor for them: give --model a folder with"
            " processor_config.json or preprocessor_config.json, as the model was published."
        )
    try:
        return transformers.AutoProcessor.from_pretrained(
            path, local_files_only=True, trust_remote_code=trust
        )
    except ImportError as error:
        raise ConfigError(
            f"the processor of {path} needs a library that is not there"
            f" ({first_line(error)}): {NEEDED}, and torchvision of the version for your torch"
        ) from None
    except Exception as error:  # noqa: BLE001 - its files may be wrong in every way
        raise ConfigError(
            f"transformers cannot read the processor in {path}: its files are damaged, or of a kind"
            f" that is not installed ({type(error).__name__}: {first_line(error)})"
        ) from None


def read_pictures(
    files: ExampleFiles,
    model_config: Any,
    read_processor: Callable[[], Any],
    *,
    sequence_length: int,
    batch_size: int,
    pack: bool = False,
    share: float = HELD_OUT_SHARE,
    say: Callable[[str], None] = lambda _: None,
) -> PictureExamples | None:
    """Reads the files as rows of text and pictures. None if they have no picture. Each row is made
    once, with its pictures.

    ``read_processor``: returns the model's processor. ``share``: as for :func:`read_examples`.
    Raises ConfigError if a library is missing, columns cannot be used, a picture is missing,
    damaged or cut, or has no place, or less than two rows are left (one, if all or none are held
    out)."""
    with libraries() as (datasets, _):
        data = load_examples(datasets, files)
        if not _has_pictures(data):
            return None
        if pack:
            raise ConfigError("--pack is for text, and --data has pictures. Leave it out.")
        try:
            import PIL  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"--data: pictures need Pillow ({error}): {NEEDED}") from None
        form = choose_form(data, files.source, pictures=True)
        notes = form.told(data.column_names)
        for name in (form.tools, form.variables):
            if name and (at := first_filled(data, name)):
                raise ConfigError(
                    f"--data: {files.source}: the column {name} (first in sample {at}) is not"
                    " rendered beside pictures, by TRL's collator. Remove it."
                )
        processor = read_processor()
        own = processor.chat_template
        if not own and not form.text:
            raise ConfigError(
                f"--data: {type(processor).__name__} has no chat template, which says how a"
                " question with pictures is written. Give the folder of --model a"
                " chat_template.jinja, or write the samples as text."
            )
        tokenizer = processor.tokenizer
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        for name, feature in data.features.items():
            if (stored := _undecoded(datasets, feature)) != feature:
                data = data.cast_column(name, stored)
        say(f"Looking at {format_count(len(data), 'sample')}, with their pictures")
        looked = _Looked(
            rows=PictureRows(
                data=data.select_columns(form.used),
                form=form,
                template=own if isinstance(own, str) else json.dumps(own or ""),
                padded=is_padded(datasets, files),
                folders=_folders(files),
                media=tuple(filter(MEDIA.search, sorted(tokenizer.get_added_vocab()))),
                decode=datasets.Image().decode_example,
            ),
            source=files.source,
            processor=processor,
            image_tokens=_image_tokens(processor, model_config),
            length=sequence_length,
        )
        looked.choose_rows()
        looked.make_rows(1 + (0 < share < 1))
        if batch_size > 1:
            looked.try_both()
    count = len(looked.rows)
    held_out = held_out_count(count, share)
    samples = [number for number, *_ in looked.rows.places]
    # All rows of a sample, whose picture training would see else, unless there is no other.
    if 0 < share < 1 and samples[0] != samples[-1]:
        held_out = count - (samples.index(samples[-held_out]) or samples.count(samples[0]))
    train_count = count - held_out
    return PictureExamples(
        source=files.source,
        fingerprint=looked.digest.hexdigest()[:16],
        sample_count=len(data) - looked.skipped.get(EMPTY, 0),
        rows=looked.rows,
        held_out_count=held_out,
        collate=looked.collator(sequence_length),
        train_ntokens=sum(looked.sizes[:train_count]),
        held_out_ntokens=sum(looked.sizes[train_count:]),
        learned_ntokens=sum(looked.learned[:train_count]),
        skipped=dict(looked.skipped),
        told=notes + looked.told(),
        has_own_template=True,
        image_tokens=looked.image_tokens,
    )


@dataclass(kw_only=True)
class _Looked:
    """Rows that were looked at: each is made once, without keeping its pictures."""

    rows: PictureRows
    source: str
    processor: Any
    image_tokens: frozenset[int]
    length: int
    kind: str = "text"  # of the rows: messages, prompt or text
    marking: str | None = None  # the template that marks answers, if it is not the processor's own
    sizes: list[int] = field(default_factory=list)
    learned: list[int] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    digest: Any = field(default_factory=hashlib.sha256)

    def collator(self, length: int | None) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
        """Returns TRL's function that makes batches, which cuts rows to a ``length``."""
        from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

        how: dict[str, Any] = {
            "messages": {"assistant_only_loss": True, "chat_template": self.marking},
            "prompt": {"completion_only_loss": True},
            "text": {},
        }[self.kind]
        return DataCollatorForVisionLanguageModeling(self.processor, max_length=length, **how)

    def choose_rows(self) -> None:
        """Reads all samples without their pictures. A conversation is a row if all its answers are
        learned, and the template marks them; else each answer is one."""
        form, answers = self.rows.form, []
        conversations: list[tuple[int, int | None, int | None]] = []
        is_marked = bool(form.messages) and self._finds_marks()
        for number in range(len(self.rows.data)):
            with self._naming(number):
                sample, listed = self.rows.sample(number)
                if sample is None:
                    self.skipped[EMPTY] += 1
                    continue
                messages, pictures = _placed(sample, listed, form.pictures)
                self._check_words(sample, messages, len(pictures))
            self._note(sample)
            conversations.append((number, None, None))
            if sample.text is not None:
                continue
            said = [at for at, each in enumerate(messages) if each["role"] == "assistant"]
            ends = [(at, at + 1) for at in said if sample.learned[at] and at]
            if sample.start is not None:
                ends = [(sample.start, len(messages))]
            is_marked = is_marked and all(sample.learned[at] for at in said)
            answers += [(number, first, last) for first, last in ends]
            if not ends:
                conversations.pop()
                self.skipped[UNLEARNED if said else UNANSWERED] += 1
        if form.text or is_marked:
            self.kind = "text" if form.text else "messages"
            self.rows = replace(self.rows, places=tuple(conversations))
        else:
            self.kind, self.marking = "prompt", None
            self.rows = replace(self.rows, places=tuple(answers))

    def make_rows(self, least: int) -> None:
        """Makes each row, and keeps those of which something is learned. Raises ConfigError for one
        that cannot be made, for pictures that are cut, and for less than ``least`` rows."""
        import torch

        collate, kept, cut, needed = self.collator(None), [], [], 0
        for at, place in enumerate(self.rows.places):
            with self._naming(place[0]):
                row = self.rows[at]
                shown = len(row["images"])
                made = collate([row])
                tokens, labels = (made[name][0].tolist() for name in ("input_ids", "labels"))
                seen = [index for index, token in enumerate(tokens) if token in self.image_tokens]
                if shown and not seen and self.image_tokens:
                    raise ConfigError(
                        "its pictures have no token in the row: the chat template does not render"
                        " them, or the text has no place for them."
                    )
            if seen and seen[-1] >= self.length:
                cut.append(place[0] + 1)
                first = next((at for at, label in enumerate(labels) if label != NOT_LEARNED), 0)
                needed = max(needed, seen[-1] + 1, first + 1)
            learned = sum(label != NOT_LEARNED for label in labels[1 : self.length])
            if not learned:
                self.skipped[f"nothing to learn within {self.length} tokens"] += 1
                continue
            kept.append(place)
            self.sizes.append(min(len(tokens), self.length))
            self.learned.append(learned)
            for name in sorted(made):
                if isinstance(value := made[name], torch.Tensor):
                    self.digest.update(value.numpy().tobytes())
        if cut:
            more = f", and those of {format_count(len(cut) - 1, 'further row')}" * (len(cut) > 1)
            raise ConfigError(
                f"--data: {self.source}: sample {cut[0]}: --sequence-length {self.length} cuts its"
                f" pictures{more}. Give"
                f" --sequence-length {needed} or more, or smaller pictures."
            )
        self.rows = replace(self.rows, places=tuple(kept))
        if len(kept) < least:
            lost = "".join(f"; {count} {why}" for why, count in self.skipped.items())
            raise ConfigError(
                f"--data: {format_count(least, 'row')} needed, and {self.source} leaves"
                f" {len(kept)}{lost}. Give more data, or a larger --sequence-length"
            )

    def try_both(self) -> None:
        """Makes a batch of a row with pictures and one without, if there are both. Raises
        ConfigError for a processor that takes no such batch."""
        one_of_each: dict[bool, int] = {}
        for at in range(len(self.rows)):
            one_of_each.setdefault(self.rows.has_pictures(at), at)
            if len(one_of_each) == 2:
                break
        else:
            return
        numbers = sorted(self.rows.places[at][0] + 1 for at in one_of_each.values())
        try:
            self.collator(self.length)([self.rows[at] for at in one_of_each.values()])
        except Exception as error:  # noqa: BLE001 - a processor is any code
            raise ConfigError(
                f"--data: {self.source}: {type(self.processor).__name__} makes no batch of samples"
                f" {numbers[0]} and {numbers[1]}, of which one has no picture"
                f" ({type(error).__name__}: {first_line(error)}). Give samples that all have"
                " pictures, or --batch-size 1"
            ) from None

    def told(self) -> list[str]:
        several = [f"{note}, in {count:,} of the samples" for note, count in self.notes.items()]
        what = {
            "messages": "each conversation is a row",
            "prompt": "each answer is a row",
            "text": "each text is a row, and all of it is learned",
        }[self.kind]
        name = type(self.processor).__name__
        return [f"Pictures are made tensors by {name}, in TRL's collator: {what}", *several]

    def _finds_marks(self) -> bool:
        """Finds a template that marks answers, if these libraries can tell them beside pictures."""
        from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

        fields = DataCollatorForVisionLanguageModeling.__dataclass_fields__
        if "chat_template" not in fields or not is_at_least("transformers", "5.18"):
            return False
        own = self.processor.chat_template
        if MARK.search(own if isinstance(own, str) else own.get("default", "")):
            return True
        self.marking = training_template(self.processor)
        return self.marking is not None

    def _check_words(self, sample: Sample, messages: list[dict[str, Any]], shown: int) -> None:
        """Raises ConfigError for tokens of pictures, videos or sounds that have none."""
        token = getattr(self.processor, "image_token", None)
        if sample.text is not None and token and sample.text.count(token) not in (0, shown):
            raise ConfigError(
                f"it has {format_count(shown, 'picture')} and {sample.text.count(token)} of"
                f" {token}, their place in a text. Give as many of both."
            )
        said = [sample.text.replace(token, "")] if sample.text and token else []
        for each in messages:
            said += [part.get("text", "") for part in _parts(each)] or [each.get("content") or ""]
        for word in self.rows.media:
            if any(word in text for text in said):
                raise ConfigError(
                    f"it has {word}, the tokenizer's token for a picture, video or sound, in its"
                    " text. Write <image> at the place of a picture, or remove the sample."
                )

    def _note(self, sample: Sample) -> None:
        if unread := sample.unread(self.rows.template):
            self.notes[
                f"keys of messages left out: {', '.join(sorted(unread))} (the chat template does"
                " not read them)"
            ] += 1
        if self.rows.form.thoughts and not any(name in self.rows.template for name in THOUGHTS):
            self.notes[
                f"the column {self.rows.form.thoughts} left out (the chat template does not read"
                " reasoning_content)"
            ] += 1

    @contextmanager
    def _naming(self, number: int) -> Iterator[None]:
        """Raises ConfigError with the number of the sample, counted from 0 here."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError(f"--data: {self.source}: sample {number + 1}: {error}") from None
        except Exception as error:  # noqa: BLE001 - a processor and a template are any code
            raise ConfigError(
                f"--data: {self.source}: sample {number + 1}: {type(self.processor).__name__}"
                f" cannot take it ({type(error).__name__}: {first_line(error)}). Compare its"
                " pictures and their places with what the processor takes, or remove the sample."
            ) from None


def _image_tokens(processor: Any, model_config: Any) -> frozenset[int]:
    """Returns the tokens that pictures become."""
    numbers = list(getattr(processor, "image_token_ids", None) or ())
    for owner in (processor, processor.tokenizer, model_config):
        numbers += [getattr(owner, name, None) for name in ("image_token_id", "image_token_index")]
    return frozenset(each for each in numbers if isinstance(each, int))


def _folders(files: ExampleFiles) -> tuple[Path, ...]:
    """Returns the folders that paths of pictures may be relative to. Of files in several folders
    it is that of --data: the same name may stand for another picture in each."""
    folders = {path if path.is_dir() else path.parent for path in files.paths}
    source = Path(files.source)
    whole = [source] if source.is_dir() else []
    return tuple(dict.fromkeys([*(folders if len(folders) == 1 else ()), *whole]))


def _undecoded(datasets: Any, feature: Any) -> Any:
    """Returns a feature whose pictures are left as they are stored."""
    if isinstance(feature, datasets.Image):
        return datasets.Image(decode=False)
    if isinstance(feature, dict):
        return {name: _undecoded(datasets, each) for name, each in feature.items()}
    if isinstance(feature, list):
        return [_undecoded(datasets, each) for each in feature]
    if hasattr(feature, "feature"):
        return replace(feature, feature=_undecoded(datasets, feature.feature))
    return feature


def _has_pictures(data: Any) -> bool:
    """Tells whether samples have pictures: in a column, or as parts of messages."""
    names = {name.strip().lower(): name for name in data.column_names}
    if any(
        first_filled(data, names[each]) for each in known("column", "pictures") if each in names
    ):
        return True
    said = [*known("column", "messages"), *(name for pair in PAIRS for name in pair)]
    return any(
        _shows(value)
        for name in dict.fromkeys(said)
        if name in names
        for value in values_of(data, names[name])
    )


def _shows(value: Any) -> bool:
    """Tells whether a value, or its JSON text, has a part that is a picture."""
    if isinstance(value, str):
        if not value.lstrip().startswith("[") or "image" not in value:
            return False
        try:
            value = json.loads(value)
        except ValueError:
            return False
    if isinstance(value, list):
        return any(map(_shows, value))
    if isinstance(value, dict):
        return is_picture(value) or any(_shows(each) for each in value.values())
    return False
