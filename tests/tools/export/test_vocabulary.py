"""The tokenizer of a GGUF file: read back by transformers, and refused if llama.cpp's differs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from lazily import need

transformers = pytest.importorskip("transformers")
need("gguf")

import gguf
from served import TEXT, save_served, save_tokenizer, splits
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from infinity.errors import ConfigError
from infinity.tools.cli import main
from infinity.tools.export import vocabulary
from infinity.tools.export.vocabulary import PRES, read_tokenizer, write_vocabulary


def written(tokenizer, folder: Path, nrows: int = 500) -> tuple[dict, list[str]]:
    """The fields of a file with this vocabulary, and what differs."""
    writer = gguf.GGUFWriter(folder / "vocabulary.gguf", "llama")
    notes = write_vocabulary(writer, tokenizer, nrows, "REMEDY")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    fields = gguf.GGUFReader(folder / "vocabulary.gguf").fields
    return {name.removeprefix("tokenizer.ggml."): f.contents() for name, f in fields.items()}, notes


@pytest.mark.parametrize("name", ["qwen2", "llama of letters"])
def test_transformers_reads_the_same_tokens(name, tmp_path):
    """Encodes texts by the tokenizer of the folder and by that which transformers makes of the
    file."""
    folder = save_served(tmp_path / "folder", name)
    assert main(["export", str(folder), str(tmp_path / "out.gguf"), "--gguf", "q8_0"]) == 0
    own = transformers.AutoTokenizer.from_pretrained(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="out.gguf")
    for text in TEXT[:3]:
        got, wanted = (each(text, add_special_tokens=False)["input_ids"] for each in (theirs, own))
        assert got == wanted
    assert theirs.chat_template == own.chat_template
    assert theirs.eos_token_id == own.eos_token_id


@pytest.mark.parametrize(("key", "pre"), PRES.items(), ids=PRES.values())
def test_each_split_has_its_name(key, pre, tmp_path):
    """Trains a tokenizer that splits so: the name, the merges and the flags are in the file."""
    tokenizer = save_tokenizer(tmp_path, pre)
    told = json.loads(tokenizer.backend_tokenizer.to_str())
    told["model"]["ignore_merges"] = key[1]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(told)), bos_token=tokenizer.bos_token
    )
    fields, notes = written(tokenizer, tmp_path)
    assert (fields["model"], fields["pre"], notes) == ("gpt2", pre, [])
    assert fields["merges"] == [" ".join(pair) for pair in told["model"]["merges"]]
    assert fields["add_bos_token"] == (pre == "llama-bpe")


def test_scores_of_letters_are_in_the_order_of_merges(tmp_path):
    """Compares tokens by score: the one that is merged first has the highest."""
    tokenizer = save_tokenizer(tmp_path, "letters")
    fields, notes = written(tokenizer, tmp_path)
    score = dict(zip(fields["tokens"], fields["scores"]))
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    made = list(dict.fromkeys(first + second for first, second in merges))
    assert len(made) > 50
    assert made == sorted(made, key=lambda token: -score[token])
    assert fields["token_type"][tokenizer.get_vocab()["<0x0A>"]] == gguf.TokenType.BYTE
    assert fields["add_space_prefix"] and "behind a special token" in notes[0]


def with_normalizer(tokenizer) -> None:
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()


def with_split(tokenizer) -> None:
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), splits("gpt-2")]
    )


def with_two_starts(tokenizer) -> None:
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|start|> <|pad|> $A",
        special_tokens=[
            ("<|start|>", tokenizer.bos_token_id),
            ("<|pad|>", tokenizer.pad_token_id),
        ],
    )


CHANGES = {
    "lower case": (with_normalizer, r"normalizes text by \['Lowercase'\]"),
    "words of another kind": (with_split, "Whitespace.*qwen2"),
    "two tokens before a text": (with_two_starts, r"adds \[\d+, \d+\] before a text"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_tokenizer_that_llama_cpp_does_not_have_is_refused(change, tmp_path):
    """Changes a tokenizer that is written otherwise: ConfigError with the remedy."""
    tokenizer = save_tokenizer(tmp_path, "gpt-2")
    written(tokenizer, tmp_path)
    modify, cause = CHANGES[change]
    modify(tokenizer)
    with pytest.raises(ConfigError, match=f"(?s){cause}.*REMEDY"):
        written(tokenizer, tmp_path)


def test_what_llama_cpp_does_not_do_with_a_text_is_told(tmp_path):
    """Method: NFC, an added token that takes the spaces around it in, and neither."""
    tokenizer = save_tokenizer(tmp_path, "qwen2")
    told = json.loads(tokenizer.backend_tokenizer.to_str())
    token = {"id": len(tokenizer), "content": "<m>", "single_word": False, "lstrip": True}
    token |= {"rstrip": True, "normalized": False, "special": False}
    for changed, note in (
        ({"normalizer": {"type": "NFC"}}, "NFC"),
        ({"added_tokens": [*told["added_tokens"], token]}, "spaces around <m>"),
        ({"normalizer": None}, ""),
    ):
        changed = transformers.PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(json.dumps(told | changed))
        )
        _, notes = written(changed, tmp_path)
        assert [note in each for each in notes] == ([True] if note else [])


def test_pairs_that_sentencepiece_merges_besides_are_told(tmp_path):
    """By hand: "abc" is made of a and bc as well, for which there is no merge. Twin: with it."""
    vocabulary = {token: at for at, token in enumerate("<unk> ▁ a b c bc ab abc".split())}
    merges = [("b", "c"), ("a", "b"), ("ab", "c")]
    for more, count in (([], 1), ([("a", "bc")], 0)):
        model = models.BPE(vocabulary, [*merges, *more], byte_fallback=True, unk_token="<unk>")
        own = Tokenizer(model)
        own.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=own)
        fields, notes = written(tokenizer, tmp_path)
        assert len(notes) == count and all(
            "merges 1 pairs of tokens, as a and bc" in n for n in notes
        )
        score = dict(zip(fields["tokens"], fields["scores"]))
        assert score["b"] < score["abc"] < score["bc"]


@pytest.mark.parametrize("name", ["dropout", "continuing_subword_prefix", "end_of_word_suffix"])
def test_a_tokenizer_that_merges_by_other_settings_is_refused(name, tmp_path):
    """Twin: the same tokenizer without the setting, in other tests."""
    tokenizer = save_tokenizer(tmp_path, "qwen2")
    told = json.loads(tokenizer.backend_tokenizer.to_str())
    told["model"][name] = 0.1 if name == "dropout" else "@"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary.json, "loads", lambda text: told)
        with pytest.raises(ConfigError, match=f"merges with {name}"):
            written(tokenizer, tmp_path)


def test_a_vocabulary_of_words_or_of_another_model_is_refused(tmp_path):
    """Writes a tokenizer of whole words, and one with more tokens than the embedding has rows."""
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    whole = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    with pytest.raises(ConfigError, match="is a WordLevel.*REMEDY"):
        written(whole, tmp_path)
    tokenizer = save_tokenizer(tmp_path, "gpt-2")
    written(tokenizer, tmp_path, nrows=len(tokenizer))
    with pytest.raises(ConfigError, match="of another model"):
        written(tokenizer, tmp_path, nrows=len(tokenizer) - 1)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    """Reads the tokenizer of an empty folder, and of none: ConfigError names the remedy."""
    for folder in (tmp_path, None):
        with pytest.raises(ConfigError, match="(?s)includes the tokenizer.*--model DIR.*REMEDY"):
            read_tokenizer(folder, "REMEDY")
    save_tokenizer(tmp_path, "gpt-2")
    assert read_tokenizer(tmp_path, "REMEDY").is_fast
    assert re.fullmatch("[a-z0-9-]+", PRES[("ByteLevel",), False])
