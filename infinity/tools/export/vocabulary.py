"""Vocabulary: a tokenizer as the metadata of a GGUF file.

pre     llama.cpp's name for the way in which text is split before its bytes or letters are merged
score   of a token of SentencePiece: the pair of neighbours whose token has the highest is merged
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ..train.wording import first_line

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LOWER, _UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_OF_LLAMA3 = _WORDS % r"\p{N}{1,3}" + _SPACES
_OF_QWEN2 = _WORDS % r"\p{N}" + _SPACES
_OF_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_SPACES}"
)
# The steps before merging, and whether a word that is a token is taken without -> pre
PRES = {
    (("ByteLevel",), False): "gpt-2",
    (("Digits", "ByteLevel"), False): "smollm",
    ((_OF_QWEN2,), False): "qwen2",
    ((_OF_LLAMA3,), True): "llama-bpe",
    ((_OF_LLAMA3,), False): "smaug-bpe",
    ((_OF_TEKKEN,), True): "tekken",
}
SPACE = "▁"  # SentencePiece's
UNUSUAL = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")  # settings of a BPE
_SPLITS = {("Isolated", False), ("Removed", True)}  # the two spellings of: each match is a word


def read_tokenizer(folder: Path | None, remedy: str) -> Any:
    """Loads the tokenizer of ``folder`` by transformers, without code of the folder. Raises
    ConfigError, with ``remedy``, if there is none."""
    import transformers

    try:
        if folder is None:
            raise ValueError("no folder with one is known")
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        tokenizer.backend_tokenizer  # noqa: B018  only fast ones have it
    except (OSError, ValueError, AttributeError, ImportError, TypeError, KeyError) as error:
        raise ConfigError(
            f"a GGUF file includes the tokenizer, and {folder or 'the checkpoint'} has none that is"
            f" read ({first_line(error)}): save it there by"
            f" tokenizer.save_pretrained, or give --model DIR for the folder that has it. {remedy}"
        ) from error
    return tokenizer


def write_vocabulary(writer: Any, tokenizer: Any, nrows: int, remedy: str) -> list[str]:
    """Adds the vocabulary, its merges, special tokens and the chat template to a writer of gguf.

    nrows
        Rows of the embedding. Those without a token get one that is never used.

    Returns in words what llama.cpp does differently behind special tokens. Raises ConfigError, with
    ``remedy``, for a tokenizer that it would run differently elsewhere.
    """
    parsed = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = tokenizer.get_vocab()
    if parsed["model"]["type"] != "BPE":
        raise ConfigError(
            f"the tokenizer is a {parsed['model']['type']}: written are those of BPE (bytes, or"
            f" letters with byte fallback). {remedy}"
        )
    if max(vocabulary.values()) >= nrows:
        raise ConfigError(
            f"the tokenizer has a token {max(vocabulary.values())}, and the embedding {nrows} rows:"
            " it is the tokenizer of another model"
        )
    kinds = dict(_kinds(parsed))
    names = {at: token for token, at in vocabulary.items()}
    tokens = [names.get(at, f"[PAD{at}]") for at in range(nrows)]
    unused = {f"[PAD{at}]": 5 for at in range(nrows) if at not in names}  # gguf.TokenType
    notes = _notes_of(parsed)
    if more := [name for name in UNUSUAL if parsed["model"].get(name)]:
        raise ConfigError(
            f"the tokenizer merges with {', '.join(more)}, for which a GGUF file has no place."
            f" {remedy}"
        )
    merges = [
        pair if isinstance(pair, list) else pair.split(" ") for pair in parsed["model"]["merges"]
    ]
    if parsed["model"].get("byte_fallback"):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        scheme = _space_before(parsed, remedy)
        writer.add_add_space_prefix(scheme is not None)
        if scheme not in (None, "prepend"):
            notes.append("llama.cpp puts a space before a text behind a special token, too")
        ranks = {first + second: at for at, (first, second) in reversed(list(enumerate(merges)))}
        if parsed["model"].get("ignore_merges"):
            raise ConfigError(f"the tokenizer takes whole words before it merges. {remedy}")
        if other := _merged_otherwise(vocabulary, merges):
            notes.append(
                f"llama.cpp also merges {len(other):,} pairs of tokens, as"
                f" {' and '.join(other[0])}, for which the tokenizer has no merge"
            )
        writer.add_token_scores([-float(ranks.get(token, len(merges))) for token in tokens])
        kinds |= {f"<0x{byte:02X}>": 6 for byte in range(256)}
        kinds |= {parsed["model"]["unk_token"]: 2} if parsed["model"].get("unk_token") else {}
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_pre_of(parsed, remedy))
        writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_token_list(tokens)
    writer.add_token_types([(kinds | unused).get(token, 1) for token in tokens])
    _write_special(writer, tokenizer, remedy)
    return notes


def _notes_of(told: dict[str, Any]) -> list[str]:
    """Returns what llama.cpp does not do before it looks for tokens."""
    steps = [each["type"] for each in _steps(told["normalizer"], "normalizers")]
    notes = ["llama.cpp does not compose letters and accents (NFC)"] if "NFC" in steps else []
    names = [
        token["content"]
        for token in told["added_tokens"]
        if token.get("lstrip") or token.get("rstrip") or token.get("single_word")
    ]
    if names:
        notes.append(f"llama.cpp leaves the spaces around {', '.join(names[:3])}, or takes it in")
    return notes


def _merged_otherwise(vocabulary: dict[str, int], merges: list[list[str]]) -> list[tuple[str, str]]:
    """Returns pairs of tokens that make a token, and have no merge: SentencePiece merges them."""
    known = {(first, second) for first, second in merges}
    made = {first + second for first, second in known}
    return [
        (token[:at], token[at:])
        for token in made
        for at in range(1, len(token))
        if token[:at] in vocabulary
        and token[at:] in vocabulary
        and (token[:at], token[at:]) not in known
    ]


def _kinds(told: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yields the tokens that are not merged: 3 controls the model, 4 is the user's text."""
    for token in told["added_tokens"]:
        yield token["content"], 3 if token["special"] else 4


def _write_special(writer: Any, tokenizer: Any, remedy: str) -> None:
    ids = {
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "unk": tokenizer.unk_token_id,
        "pad": tokenizer.pad_token_id,
    }
    for name, at in ids.items():
        if at is not None:
            getattr(writer, f"add_{name}_token_id")(at)
    # What it adds depends on its class, its settings and its post-processor: seen in a text
    bare, whole = (tokenizer("a", add_special_tokens=adds)["input_ids"] for adds in (False, True))
    starts = next(at for at in range(len(whole) + 1) if whole[at : at + len(bare)] == bare)
    before, after = whole[:starts], whole[starts + len(bare) :]
    if before not in ([], [ids["bos"]]) or after not in ([], [ids["eos"]]):
        raise ConfigError(
            f"the tokenizer adds {before} before a text and {after} behind it: a GGUF file can say"
            f" only that it adds its bos_token ({ids['bos']}) or eos_token ({ids['eos']}). {remedy}"
        )
    writer.add_add_bos_token(bool(before))
    writer.add_add_eos_token(bool(after))
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = [{"name": name, "template": text} for name, text in template.items()]
    if template:
        writer.add_chat_template(template)


def _steps(told: dict[str, Any] | None, parts: str) -> list[dict[str, Any]]:
    if told is None:
        return []
    return told[parts] if told["type"] == "Sequence" else [told]


def _pre_of(told: dict[str, Any], remedy: str) -> str:
    """Returns the pre of a tokenizer of bytes. Raises ConfigError for one without."""
    steps = [_step_of(each) for each in _steps(told["pre_tokenizer"], "pretokenizers")]
    normal = [each["type"] for each in _steps(told["normalizer"], "normalizers")]
    key = tuple(step for step in steps if step), bool(told["model"].get("ignore_merges"))
    if key not in PRES or normal not in ([], ["NFC"]):
        raise ConfigError(
            f"the tokenizer normalizes text by {normal} and splits it by {list(key[0])}"
            f"{', words first' if key[1] else ''}, for which there is no name here: there is for"
            f" the splits of {', '.join(PRES.values())}. {remedy}"
        )
    return PRES[key]


def _step_of(step: dict[str, Any]) -> str:
    """Returns a step's regex, its name if it has its usual settings, or "" if it splits nothing."""
    kind = step["type"]
    if kind == "Split" and (step["behavior"], step["invert"]) in _SPLITS:
        return step["pattern"].get("Regex", repr(step["pattern"]))
    if kind == "ByteLevel" and not step["add_prefix_space"]:
        return kind if step["use_regex"] else ""
    if kind == "Digits" and step["individual_digits"]:
        return kind
    return repr(step)


def _space_before(told: dict[str, Any], remedy: str) -> str | None:
    """Returns how a tokenizer of letters puts a space before a text: "prepend" as llama.cpp,
    another name, or None for not at all. Raises ConfigError if it changes or splits a text
    otherwise."""
    steps = [
        *_steps(told["normalizer"], "normalizers"),
        *_steps(told["pre_tokenizer"], "pretokenizers"),
    ]
    scheme = None
    for step in steps:
        kind = step["type"]
        if kind == "Prepend" and step["prepend"] == SPACE:
            scheme = "prepend"
        elif kind == "Metaspace" and step["replacement"] == SPACE and not step.get("split", True):
            scheme = scheme or {"never": None}.get(step["prepend_scheme"], step["prepend_scheme"])
        elif not (
            kind == "Replace" and step["content"] == SPACE and step["pattern"] == {"String": " "}
        ):
            raise ConfigError(
                f"the tokenizer changes or splits a text by {kind}, for which a GGUF file has no"
                f" place. {remedy}"
            )
    return scheme
