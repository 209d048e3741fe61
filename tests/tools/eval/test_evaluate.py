"""`infinity eval --data`: held-out loss and perplexity, of any home of the weights, as a plain loop
and `infinity train` have them."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lazily import need
from safetensors.torch import load_file, save_file

need("transformers", "trl", "peft", "datasets")

import transformers
from chatty import PAIRS, ROWS, save_base, save_rows

from infinity.tools.cli import main

NOT_LEARNED = -100
HOMES = {"device": (), "host": (), "nvme": ("--nvme-path", "swap")}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A model, and data: conversations, pairs with a text each, and running text."""
    place = tmp_path_factory.mktemp("eval")
    save_base(place / "base")
    for name in ("messages", "text"):
        save_rows(place / f"{name}.jsonl", [ROWS[name](q, a) for q, a in PAIRS * 3])
    (place / "text.txt").write_text("".join(f"{q} {a}\n" for q, a in PAIRS))
    return place


@pytest.fixture
def evaluate(made, tmp_path, monkeypatch, capsys):
    """What `infinity eval --json` prints, and stderr. ``status``: the exit status that is due."""
    monkeypatch.chdir(tmp_path)
    for path in made.iterdir():
        Path(path.name).symlink_to(path)
    (tmp_path / "swap").mkdir()

    def run(*words: str, model: str = "base", status: int = 0) -> tuple[dict, str]:
        capsys.readouterr()
        found = main(["eval", model, *map(str, words), "--json"])
        out, err = capsys.readouterr()
        assert found == status, err
        return json.loads(out) if out else {}, err

    return run


def of_messages(tokenizer, at: int) -> tuple[list[int], list[int]]:
    """A conversation's tokens and labels, written by hand: the answer is learned."""
    question, answer = (PAIRS * 3)[at]
    asked = tokenizer(f"<|user|>{question}<|end|><|assistant|>")["input_ids"]
    said = tokenizer(f"{answer}<|end|>")["input_ids"]
    return asked + said, [NOT_LEARNED] * len(asked) + said


def of_text(tokenizer, at: int) -> tuple[list[int], list[int]]:
    question, answer = (PAIRS * 3)[at]
    tokens = tokenizer(f"{question} {answer}<|end|>")["input_ids"]
    return tokens, tokens


def rows_by_hand(kind: str, tokenizer) -> list[tuple[list[int], list[int]]]:
    if kind == "text.txt":
        whole = tokenizer("".join(f"{q} {a}\n" for q, a in PAIRS) + "<|end|>")["input_ids"]
        return [(whole[at : at + 32],) * 2 for at in range(0, len(whole) - 31, 32)]
    make = {"messages.jsonl": of_messages, "text.jsonl": of_text}[kind]
    return [make(tokenizer, at) for at in range(3 * len(PAIRS))]


def by_hand(folder: str, kind: str, batch_size: int = 4) -> tuple[float, int]:
    """The mean loss per predicted token, and their count, by transformers and torch alone."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    rows = rows_by_hand(kind, tokenizer)
    total, count = 0.0, 0
    for first in range(0, len(rows), batch_size):
        batch = rows[first : first + batch_size]
        width = max(len(tokens) for tokens, _ in batch)
        pad = tokenizer.pad_token_id
        tokens = torch.tensor([t + [pad] * (width - len(t)) for t, _ in batch])
        mask = torch.tensor([[1] * len(t) + [0] * (width - len(t)) for t, _ in batch])
        labels = torch.tensor([y + [NOT_LEARNED] * (width - len(y)) for _, y in batch])
        with torch.no_grad():
            logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits.float()
        due = F.pad(labels, (0, 1), value=NOT_LEARNED)[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), due.flatten(), ignore_index=NOT_LEARNED)
        learned = int((labels[:, 1:] != NOT_LEARNED).sum())
        total, count = total + loss.item() * learned, count + learned
    return total / count, count


@pytest.mark.parametrize(
    ("home", "data"),
    [("device", "messages.jsonl"), ("host", "text.jsonl"), ("nvme", "text.txt")],
)
def test_loss_and_perplexity_are_those_of_a_plain_loop(home, data, evaluate):
    """Method: rows written by hand, batched and scored by torch alone, bits compared. Twin: without
    the last batch the loss is another."""
    words = ["--data", data, "--params", home, *HOMES[home]]
    words += ["--sequence-length", "32"] if data == "text.txt" else []
    found, _ = evaluate(*words)
    loss, count = by_hand("base", data)
    assert (found["held_out_loss"], found["predicted_tokens"]) == (loss, count)
    assert found["perplexity"] == math.exp(loss) and found["bits_per_byte"] is None
    twin, _ = evaluate(*words, "--eval-batches", "3")
    assert twin["held_out_loss"] != loss


def test_every_home_has_the_same_bits(evaluate):
    """Twin: a model whose weights differ has others."""
    found = [
        evaluate("--data", "messages.jsonl", "--params", home, *words)[0]
        for home, words in HOMES.items()
    ]
    assert found[0] == found[1] == found[2]
    shutil.copytree("base", "other")
    weights = load_file("other/model.safetensors")
    name = "model.norm.weight"
    save_file(weights | {name: weights[name] * 2}, "other/model.safetensors", {"format": "pt"})
    twin, _ = evaluate("--data", "messages.jsonl", model="other")
    assert twin["held_out_loss"] != found[0]["held_out_loss"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("messages.jsonl", ""),
        ("text.txt", "--sequence-length 16"),
        ("text.txt", "--sequence-length 16 --eval-share 20%"),
        ("text.jsonl", "--lora-rank 4"),
        ("text.jsonl", "--pack"),
    ],
)
def test_the_loss_is_what_train_reports_of_the_same_data(data, words, evaluate, capsys):
    """Method: before and after a step, in the folders that it starts from and saves. Twin: all of
    the data, of which most was trained on, has another loss."""
    both = f"--data {data} --batch-size 2 --eval-batches 4 --dtype fp32 {words}".split()
    job = "train --model base --out tuned --steps 1 --lr 0.01 --sample-bytes 0 --json"
    assert main([*job.split(), *both]) == 0
    told = json.loads(capsys.readouterr().out)
    if "--lora-rank" in both:
        del both[-2:]
    for model, when in (("base", "before"), ("tuned", "after")):
        found, _ = evaluate(*both, "--held-out", model=model)
        assert found["held_out_loss"] == told[f"held_out_loss_{when}"]
        assert found["held_out_tokens"] == told["data"]["held_out_tokens"]
    assert told["held_out_loss_before"] != told["held_out_loss_after"]
    both = [word for word in both if word not in ("--eval-share", "20%")]
    assert evaluate(*both)[0]["held_out_loss"] != told["held_out_loss_before"]


def test_answers_that_are_cut_are_counted(evaluate):
    """Method: every answer ends beyond the length. Twin: the length that holds them all."""
    for length, told in ((17, True), (40, False)):
        _, err = evaluate("--data", "messages.jsonl", "--sequence-length", str(length))
        said = f"answers beyond {length} tokens are not learned, in {3 * len(PAIRS)} of the samples"
        assert (said in err) == told, err


@pytest.mark.parametrize("column", ["rejected", "label"])
def test_preferred_answers_are_refused_with_what_can_be_measured(column, evaluate):
    """The way out is one that this command takes. Twin: the file without the column is measured."""
    row = {"prompt": "1+1?", "completion": "2."}
    save_rows(Path("pairs.jsonl"), [row | {column: "3." if column == "rejected" else True}] * 2)
    _, err = evaluate("--data", "pairs.jsonl", status=2)
    assert f"the column {column} (first in sample 1)" in err and "or measure" in err, err
    save_rows(Path("pairs.jsonl"), [row] * 2)
    assert evaluate("--data", "pairs.jsonl")[0]["predicted_tokens"] == 6


ONE_PROCESS = {
    "eval": ("--data", "text.txt", "--sequence-length", "32"),
    "generate": ("--prompt", "1+1?", "--max-new-tokens", "2"),
    "export": ("out",),
}


@pytest.mark.parametrize("command", ONE_PROCESS)
def test_a_command_that_is_one_process_refuses_ranks_before_it_reads_a_weight(
    command, evaluate, monkeypatch, capsys
):
    """Method: what torchrun sets, for each rank of two; a folder without weights. Twin: one rank of
    one, with the weights."""
    words = [command, "bare", *ONE_PROCESS[command]]
    shutil.copytree("base", "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        assert main(words) == 2
        error = capsys.readouterr().err
        assert f"`infinity {command}` is one process, and 2 ranks were started" in error
        assert "Start it without torchrun" in error and not Path("out").exists()
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    assert main([command, "base", *ONE_PROCESS[command]]) == 0


def test_bytes_have_bits_each(evaluate):
    """A folder without a tokenizer. Twin: the same folder with it has tokens, and none."""
    shutil.copytree("base", "mute")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        Path("mute", name).unlink()
    found, _ = evaluate("--data", "text.txt", "--sequence-length", "32", model="mute")
    assert found["bits_per_byte"] == found["held_out_loss"] / math.log(2)
    twin, _ = evaluate("--data", "text.txt", "--sequence-length", "32")
    assert twin["bits_per_byte"] is None and twin["held_out_loss"] != found["held_out_loss"]


def test_the_table_has_the_numbers_of_the_object(evaluate, capsys):
    """On stdout; what is left out of the data is told on stderr."""
    found, _ = evaluate("--data", "messages.jsonl")
    assert main("eval base --data messages.jsonl".split()) == 0
    out, err = capsys.readouterr()
    assert [line.split()[:3] for line in out.splitlines()] == [
        ["held-out", "loss", f"{found['held_out_loss']:.4f}"],
        ["perplexity", f"{found['perplexity']:.4f}"],
    ]
    assert "Columns left out: id" in err


def test_a_folder_that_lacks_weights_is_refused_and_one_with_more_is_not(evaluate):
    """Twins of each other, and a weight that is no number."""
    plain, _ = evaluate("--data", "messages.jsonl")
    weights = load_file("base/model.safetensors")
    made = {
        "more": weights | {"model.layers.2.extra.weight": torch.ones(2)},
        "less": {name: each for name, each in weights.items() if "layers.1.mlp.up" not in name},
        "nan": weights | {"model.norm.weight": weights["model.norm.weight"] * math.nan},
    }
    for name, tensors in made.items():
        shutil.copytree("base", name)
        save_file(tensors, f"{name}/model.safetensors", {"format": "pt"})
    found, _ = evaluate("--data", "messages.jsonl", model="more")
    assert found | {"model": "base"} == plain
    _, err = evaluate("--data", "messages.jsonl", model="less", status=2)
    assert "1 weights are not in less" in err and "give a folder that has all weights" in err
    _, err = evaluate("--data", "messages.jsonl", model="nan", status=2)
    assert "The loss is nan: weights of nan are not finite" in err


def test_data_without_a_token_to_predict_is_refused(evaluate):
    """Twin: a text of two tokens has one."""
    Path("one.jsonl").write_text('{"text": ""}\n{"text": "a"}\n')
    shutil.copytree("base", "endless")
    settings = json.loads(Path("base/tokenizer_config.json").read_text())
    Path("endless/tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": None}))
    _, err = evaluate("--data", "one.jsonl", model="endless", status=2)
    assert "no token that is predicted" in err
    Path("one.jsonl").write_text('{"text": "ab"}\n')
    assert evaluate("--data", "one.jsonl", model="endless")[0]["predicted_tokens"] == 1
