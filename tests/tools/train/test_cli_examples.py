"""`infinity train --data` with samples: conversations, prompts with completions, texts, in every
form that people have them. TRL renders and masks them.

**learned**: what a model is trained to write, set apart from what it only reads.
"""

from __future__ import annotations

import io
import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from lazily import need

need("trl", "datasets")

import transformers
from chatty import PAIRS, ROWS, chat_of, save_base, save_rows
from ranks import run_torchrun

import infinity.tools.cli
from infinity.errors import ConfigError
from infinity.tools.train.example_files import find_examples
from infinity.tools.train.examples import NOT_LEARNED, PLAIN_TEMPLATE, ExampleBatches, read_examples

QUESTION, ANSWER = PAIRS[0]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return save_base(tmp_path_factory.mktemp("chatty") / "base")


@pytest.fixture
def tokenizer(base):
    return transformers.AutoTokenizer.from_pretrained(base)


def rows_of(kind: str, pairs=PAIRS) -> list[dict]:
    return [ROWS[kind](question, answer) for question, answer in pairs]


def read(path: Path, tokenizer, **given):
    return read_examples(find_examples(path), tokenizer, **({"sequence_length": 64} | given))


# --- what is learned ---

LEARNED = {  # kind of row -> its text, of which the part in brackets is learned
    "messages": f"<|user|>{QUESTION}<|end|><|assistant|>[{ANSWER}<|end|>]",
    "sharegpt": f"<|user|>{QUESTION}<|end|><|assistant|>[{ANSWER}<|end|>]",
    "chat prompt": f"<|user|>{QUESTION}<|end|><|assistant|>[{ANSWER}<|end|>]",
    "prompt": f"<|user|>{QUESTION}<|end|><|assistant|>[{ANSWER}<|end|>]",
    "alpaca": f"<|user|>{QUESTION}<|end|><|assistant|>[{ANSWER}<|end|>]",
    "question": f"<|user|>{QUESTION}<|end|><|assistant|>[{ANSWER}<|end|>]",
    "text": f"[{QUESTION} {ANSWER}<|end|>]",
}


@pytest.mark.parametrize("kind", LEARNED)
def test_the_answer_is_learned_and_what_is_asked_is_not(kind, tokenizer, tmp_path):
    """Of a text all is learned. The labels that are learned are the tokens themselves."""
    found = read(save_rows(tmp_path / "a.jsonl", rows_of(kind)), tokenizer)
    shown = "".join(f"[{text}]" if learned else text for text, learned in found.first(tokenizer))
    assert shown == LEARNED[kind]
    row = found.rows[0]
    assert all(
        label in (NOT_LEARNED, token) for token, label in zip(row["input_ids"], row["labels"])
    )
    assert found.train_count + found.held_out_count == len(PAIRS) and found.skipped == {}
    assert found.learned_ntokens <= found.train_ntokens
    assert (found.learned_ntokens == found.train_ntokens) == (kind == "text")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.csv", "a folder"])
def test_every_form_of_files_has_the_same_rows(name, tokenizer, tmp_path):
    """Alone, and in a folder beside a README."""
    one = read(save_rows(tmp_path / "twin.jsonl", rows_of("prompt")), tokenizer)
    folder = tmp_path / "many"
    folder.mkdir()
    path = save_rows(folder / name, rows_of("prompt"))
    (folder / "README.md").write_text("# What this is\n")
    for data in {path, path if name == "a folder" else folder}:
        assert read(data, tokenizer).rows["input_ids"] == one.rows["input_ids"]
    if name != "a folder":
        assert find_examples(folder).left_out == ["README.md"]


def test_each_answer_of_a_conversation_is_learned_once(tokenizer, tmp_path):
    """By a tokenizer whose template does not tell answers apart: a row each. A system message is
    kept, and tools' empty columns are not."""
    said = [
        {"role": "system", "content": "Be brief."},
        *chat_of("1+1?", "2."),
        *chat_of("2+2?", "4."),
    ]
    found = read(save_rows(tmp_path / "a.jsonl", [{"messages": said}] * 3), tokenizer)
    assert len(found.rows) == 6
    learned = [
        tokenizer.decode([label for label in labels if label != NOT_LEARNED])
        for labels in found.rows["labels"]
    ]
    assert sorted(learned) == ["2.<|end|>"] * 3 + ["4.<|end|>"] * 3


def test_a_tokenizer_without_a_template_gets_a_plain_one(tmp_path):
    """Twin: for plain text none is needed."""
    base = save_base(tmp_path / "base", template=None)
    for kind, expected in (
        ("text", None),
        ("prompt", PLAIN_TEMPLATE),
        ("messages", PLAIN_TEMPLATE),
    ):
        tokenizer = transformers.AutoTokenizer.from_pretrained(base)
        found = read(save_rows(tmp_path / f"{kind}.jsonl", rows_of(kind)), tokenizer)
        assert tokenizer.chat_template == expected and not found.has_own_template
    text = "".join(text for text, _ in found.first(tokenizer))
    assert text == f"### user:\n{QUESTION}<|end|>\n### assistant:\n{ANSWER}<|end|>\n"


def test_conversations_without_an_answer_are_counted(tokenizer, tmp_path):
    """Twin: none has one, which is refused."""
    alone = [{"messages": chat_of("1+1?", "2.")[:1]}] * 3
    rows = [*rows_of("messages"), *alone]
    found = read(save_rows(tmp_path / "a.jsonl", rows), tokenizer)
    assert found.skipped == {"no answer in it": 3} and found.sample_count == len(rows)
    with pytest.raises(ConfigError, match="no conversation has an answer"):
        read(save_rows(tmp_path / "b.jsonl", alone), tokenizer)


def test_another_tokenizer_makes_other_data(tokenizer, tmp_path):
    """By its template: the fingerprint is of the rows. Twin: the same one makes the same."""
    path = save_rows(tmp_path / "a.jsonl", rows_of("messages"))
    one, again = (read(path, tokenizer).fingerprint for _ in range(2))
    tokenizer.chat_template = PLAIN_TEMPLATE
    assert one == again != read(path, tokenizer).fingerprint


def test_packed_rows_have_the_same_learned_tokens(tokenizer, tmp_path):
    """In fewer rows, none longer than asked."""
    path = save_rows(tmp_path / "a.jsonl", rows_of("prompt"))
    apart, packed = (read(path, tokenizer, pack=pack) for pack in (False, True))
    assert len(packed.rows) < len(apart.rows) / 2
    assert all(len(tokens) <= 64 for tokens in packed.rows["input_ids"])

    def learned(found):
        return sorted(
            label for labels in found.rows["labels"] for label in labels if label != NOT_LEARNED
        )

    assert learned(packed) == learned(apart)
    assert packed.fingerprint != apart.fingerprint


def test_what_cannot_be_learned_is_counted(tokenizer, tmp_path):
    """Empty ones, and those whose answer begins beyond the length."""
    rows = [*rows_of("prompt"), {"prompt": "", "completion": ""}]
    rows += [{"prompt": "x" * 80, "completion": "y"}] * 2
    found = read(save_rows(tmp_path / "a.jsonl", rows), tokenizer)
    assert list(found.skipped.values()) == [1, 2] and len(found.rows) == len(PAIRS)


# --- the order ---


@pytest.fixture
def batches(tokenizer, tmp_path):
    found = read(save_rows(tmp_path / "a.jsonl", rows_of("prompt")), tokenizer)

    def make(seed: int = 1, batch_size: int = 5, per_step: int = 1) -> ExampleBatches:
        return ExampleBatches(
            corpus=found, batch_size=batch_size, sequence_length=64, seed=seed, per_step=per_step
        )

    return make


def drawn(batches: ExampleBatches, count: int) -> list[bytes]:
    return [
        row.numpy().tobytes().rstrip(b"\0")
        for step in range(count)
        for turn in range(batches.per_step)
        for row in batches.train(step, turn)["labels"]
    ]


def test_every_row_is_in_an_epoch_once(batches):
    """Twin: the next epoch has another order. The held-out rows are in none."""
    count = batches().corpus.train_count
    assert count == 35
    found = [batches()._place(number) for number in range(2 * count)]
    assert sorted(found[:count]) == sorted(found[count:]) == list(range(count))
    assert found[:count] != found[count:]
    assert batches().steps_of(1.0) == 7 and batches(batch_size=4, per_step=2).steps_of(2.0) == 9


def test_the_seed_and_the_numbers_alone_determine_a_batch(batches):
    """However a step is divided into batches. Twin: another seed."""
    wide, narrow = batches(batch_size=4), batches(batch_size=2, per_step=2)
    for step in (3, 0):
        whole = wide.train(step)["input_ids"]
        halves = [narrow.train(step, turn)["input_ids"] for turn in (0, 1)]
        for row, part in zip(whole, [each for half in halves for each in half]):
            assert torch.equal(row[: len(part)], part[: len(row)])
    assert drawn(wide, 2) != drawn(batches(seed=2, batch_size=4), 2)


# --- the command ---


@pytest.fixture
def train(base, tmp_path, monkeypatch, capsys):
    """Status, stdout and stderr of `infinity train` with the base."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str, model: Path | str = base) -> tuple[int, str, str]:
        capsys.readouterr()
        given = ["--model", str(model), "--dtype", "fp32", "--batch-size", "6", "--params", "host"]
        status = infinity.tools.cli.main(["train", *given, "--optimizer", "host", *map(str, words)])
        return status, *capsys.readouterr()

    return run


def test_a_job_shows_what_it_learns_and_saves_what_can_be_talked_to(train, tmp_path):
    """An epoch by default; the folder has its tokenizer with the chat template."""
    save_rows(tmp_path / "chat.jsonl", rows_of("messages"))
    status, out, err = train("--data", "chat.jsonl", "--out", "tuned", "--lr", "0.01")
    assert status == 0, err
    assert f"\u00ab{ANSWER}<|end|>\u00bb" in out and "35 rows to train on, 1 held out" in out
    assert "tokens per step, 6 steps" in out
    tokenizer = transformers.AutoTokenizer.from_pretrained("tuned")
    assert tokenizer.chat_template
    assert transformers.AutoModelForCausalLM.from_pretrained("tuned").generation_config.eos_token_id


def test_samples_of_the_users_own_are_measured(train, tmp_path):
    """Method: the loss on a file equals that of the part held out with the same rows, of a job that
    learns the same rows. Twin: another file has another loss."""
    rows = rows_of("messages")
    for name, part in (("all", rows), ("learned", rows[:-1]), ("last", rows[-1:]), ("a", rows[:1])):
        save_rows(tmp_path / f"{name}.jsonl", part)
    found = []
    for words in (
        ("--data", "all.jsonl"),
        ("--data", "learned.jsonl", "--eval-data", "last.jsonl", "--eval-every", "1"),
        ("--data", "learned.jsonl", "--eval-data", "a.jsonl"),
    ):
        status, out, err = train(*words, "--steps", "2", "--json", "--sample-bytes", "0")
        assert status == 0, err
        found.append(json.loads(out.splitlines()[-1]))
    names = ("losses", "held_out_loss_before", "held_out_loss_after")
    assert all(found[0][name] == found[1][name] for name in names)
    assert found[2]["losses"] == found[0]["losses"]
    assert found[2]["held_out_loss_after"] != found[0]["held_out_loss_after"]
    assert list(found[1]["held_out_losses"]) == ["1"] and found[0]["held_out_losses"] == {}


def test_what_is_left_out_is_told_once(tokenizer, tmp_path):
    """Columns, keys that the template does not read, and samples. Twin: nothing is, and the way
    that the file is read is told alone."""
    from rich.console import Console

    from infinity.tools.train.progress import show_examples

    rows = [row | {"source": "book"} for row in rows_of("messages")]
    rows[0]["messages"][0]["name"] = "Ann"
    rows.append({"messages": chat_of("1+1?", "2.")[:1], "id": 8, "source": "web"})
    lines = []
    for data in (rows, rows_of("prompt")):
        console = Console(width=200, record=True, quiet=False, file=io.StringIO())
        show_examples(console, read(save_rows(tmp_path / "a.jsonl", data), tokenizer), tokenizer)
        lines.append(console.export_text().splitlines()[3:])
    assert lines[0] == [
        "Read as conversations: messages",
        "Columns left out: id, source",
        "keys of messages left out: name (the chat template does not read them), in 1 of the"
        " samples",
        "1 sample left out (no answer in it)",
    ]
    assert lines[1] == ["Read as questions and answers: prompt, completion"]


def test_a_resumed_job_has_the_bits_of_an_uninterrupted_one(train, tmp_path):
    """With micro-batches of other counts of learned tokens."""
    save_rows(tmp_path / "chat.jsonl", rows_of("messages"))
    words = ("--data", "chat.jsonl", "--accumulate", 2, "--sample-bytes", 0, "--warmup-steps", 0)
    whole = json.loads(train(*words, "--epochs", 2, "--json")[1].splitlines()[-1])
    for more in (("--steps", 3), ("--epochs", 2, "--resume", "--out", "again")):
        status, out, err = train(*words, *more, "--checkpoint", "kept", "--json")
        assert status == 0, err
    # The curve of the learning rate depends on the steps, and step 3 of 3 is another than of 6
    assert whole["steps"] == json.loads(out.splitlines()[-1])["steps"] == 6


def test_learned_tokens_count_the_same_in_every_micro_batch(base, tokenizer, tmp_path):
    """One step of two micro-batches has the gradient of one batch of both, though their answers
    have other lengths. Twin: the mean of the micro-batches' losses is another."""
    from types import SimpleNamespace

    from infinity.tools.train.job import _loss, learned_count, train_step
    from infinity.tools.train.ranks import Ranks

    pairs = [("a", "b"), ("a", "b" * 9), ("c", "d" * 30), ("e", "f")] * 2
    data = read(save_rows(tmp_path / "a.jsonl", rows_of("prompt", pairs)), tokenizer)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    grads, losses = [], []
    for size, accumulate in ((4, 1), (2, 2)):
        batches = ExampleBatches(
            corpus=data, batch_size=size, sequence_length=64, seed=3, per_step=accumulate
        )
        optimizer = SimpleNamespace(step=lambda: None, zero_grad=lambda: None)
        job = SimpleNamespace(
            model=model,
            batches=batches,
            waiting_for_data=nullcontext,
            args=SimpleNamespace(accumulate=accumulate, seed=0),
            ranks=Ranks(None),
            pipe=None,
            max_grad_norm=None,
            optimizers=[optimizer],
            schedulers=[optimizer],
        )
        model.zero_grad()
        losses.append(train_step(job, 0))
        grads.append(torch.cat([param.grad.view(-1) for param in model.parameters()]))
        parts = [batches.train(0, turn) for turn in range(accumulate)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert torch.allclose(grads[0], grads[1], atol=1e-6)
    plain = sum(_loss(model, part).item() for part in parts) / 2
    assert len({learned_count(part) for part in parts}) == 2 and abs(plain - losses[0]) > 1e-3


# --- bad input ---

REFUSED = {
    "preferences": ([{"prompt": "a", "chosen": "b", "rejected": "c"}] * 3, "add --method dpo"),
    "other columns": ([{"review": "a", "stars": 3}] * 3, "columns review, stars"),
    "one sample": ([{"prompt": "a", "completion": "b"}], "and data.jsonl leaves 1."),
    "empty samples": ([{"text": ""}] * 3, "all samples of data.jsonl are empty"),
    "messages of text": ([{"messages": ["a", "b"]}] * 3, "sample 1: messages must be a list"),
    "no roles": ([{"messages": [{"content": "a"}] * 2}] * 3, "a message needs role and content"),
    "numbers": ([{"prompt": "a", "completion": 3}] * 3, "completion and text are texts"),
    "no answers": ([{"messages": chat_of("a", "b")[:1]}] * 3, "no conversation has an answer"),
    "bad answers": ([{"messages": chat_of("a", "b"), "label": False}] * 3, "by KTO"),
    "pictures": ([{"messages": chat_of("a", "b"), "images": ["a.png"]}] * 3, "column images"),
    "tools for no one": (
        [{"messages": chat_of("a", "b"), "tools": [{"n": 1}]}] * 3,
        "column tools",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_data_without_a_use_is_refused_by_name(what, train, tmp_path):
    rows, said = REFUSED[what]
    save_rows(tmp_path / "data.jsonl", rows)
    status, out, err = train("--data", "data.jsonl", "--out", "tuned")
    assert status == 2 and said in err and "--data" in err, err
    assert "Traceback" not in err and not Path("tuned").exists()


def test_a_damaged_file_is_refused_with_the_readers_reason(train, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": \n')
    status, _, err = train("--data", "data.jsonl")
    assert status == 2 and "datasets cannot read data.jsonl" in err


def test_files_of_several_kinds_are_refused(train, tmp_path):
    (tmp_path / "data").mkdir()
    for name in ("a.jsonl", "b.parquet"):
        save_rows(tmp_path / "data" / name, rows_of("prompt"))
    status, _, err = train("--data", "data")
    assert status == 2 and "several kinds (json, parquet)" in err


def test_text_beside_samples_is_refused(train, tmp_path):
    """Twin: a README may be there."""
    (tmp_path / "data").mkdir()
    save_rows(tmp_path / "data" / "a.jsonl", rows_of("prompt"))
    (tmp_path / "data" / "README.md").write_text("# Data\n")
    assert find_examples(tmp_path / "data").left_out == ["README.md"]
    (tmp_path / "data" / "book.txt").write_text("Once upon a time\n")
    status, _, err = train("--data", "data")
    assert status == 2 and "running text (book.txt) and samples (a.jsonl: holds records" in err


def test_samples_need_a_tokenizer(train, tmp_path):
    config = transformers.AutoConfig.from_pretrained(save_base(tmp_path / "base"))
    config.to_json_file(tmp_path / "model.json")
    save_rows(tmp_path / "data.jsonl", rows_of("prompt"))
    status, _, err = train("--data", "data.jsonl", model="model.json")
    assert status == 2 and "a model with a tokenizer" in err


def test_missing_libraries_are_named(tokenizer, tmp_path, monkeypatch):
    path = save_rows(tmp_path / "a.jsonl", rows_of("prompt"))
    monkeypatch.setitem(__import__("sys").modules, "trl", None)
    with pytest.raises(ConfigError, match="pip install trl datasets"):
        read(path, tokenizer)


@pytest.mark.parametrize(
    "words", [("--pack",), ("--epochs", "2"), ("--epochs", "2", "--steps", "2")]
)
def test_options_of_samples_are_refused_for_text(words, train, tmp_path):
    (tmp_path / "text.txt").write_text("running text " * 99)
    status, _, err = train("--data", "text.txt", *words)
    assert status == 2 and words[0] in err


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_learn_what_one_learns_from_two_micro_batches(
    base, tmp_path, monkeypatch, capsys
):
    """Of samples with answers of other lengths: the same losses, but for the order of sums."""
    pairs = [(f"{at}?", "x" * (1 + 7 * at % 31)) for at in range(33)]
    save_rows(tmp_path / "a.jsonl", rows_of("prompt", pairs))
    monkeypatch.chdir(tmp_path)
    words = f"train --model {base} --data a.jsonl --batch-size 4 --dtype fp32 --params host".split()
    words += "--optimizer host --steps 4 --lr 0.01 --warmup-steps 0 --sample-bytes 0 --json".split()
    assert infinity.tools.cli.main([*words, "--accumulate", "2"]) == 0
    alone = json.loads(capsys.readouterr().out.splitlines()[-1])["losses"]
    done = run_torchrun(2, ["-m", "infinity", *words])
    assert done.returncode == 0, done.stderr
    together = json.loads(done.stdout.splitlines()[-1])["losses"]
    assert together == pytest.approx(alone, rel=1e-4) and len(set(together)) == 4


# --- what a cold reader ran into ---


def test_a_table_is_never_running_text(train, tmp_path):
    """As a file. Twin: in a folder of text it is text as others."""
    (tmp_path / "a.csv").write_text("input;target\n1;2\n3;4\n")
    (tmp_path / "b.csv").write_text("year,rain\n1999,3\n2000,4\n")
    status, _, err = train("--data", "a.csv")
    assert status == 2 and "columns input;target" in err and "Is ; its separator?" in err
    status, _, err = train("--data", "b.csv")
    assert status == 2 and "columns year, rain" in err and "separator" not in err


MISTAKES = {  # the words -> a part of the message
    "--data chta.jsonl": "Did you mean chat.jsonl?",
    "--data empty.jsonl": "empty.jsonl is empty",
    "--data BASE": "is the folder of a model",
    "--data chat.jsonl --device cuda": "finds no GPU here",
    "--data chat.jsonl --checkpoint ds --resume": "it is DeepSpeed's",
    "--data chat.jsonl --checkpoint trainer": "it is the Trainer's",
    "--data chat.jsonl --params nvme --nvme-path chat.jsonl": "is a file: give a folder",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_told_before_the_data_is_rendered(words, train, base, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    save_rows(tmp_path / "chat.jsonl", rows_of("messages"))
    (tmp_path / "empty.jsonl").touch()
    for folder, name in (("ds", "latest"), ("trainer", "trainer_state.json")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).touch()
    status, out, err = train(*words.replace("BASE", str(base)).split())
    assert status == 2 and MISTAKES[words] in err, err
    assert "The first sample" not in out


def test_an_adapter_or_a_checkpoint_is_no_model(train, tmp_path):
    for folder, name, said in (
        ("adapter", "adapter_config.json", "is an adapter"),
        ("kept", "manifest.json", "infinity export kept OUT"),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).touch()
        status, _, err = train("--data", "chat.jsonl", model=folder)
        assert status == 2 and said in err


def test_the_rate_and_the_warm_up_suit_what_is_trained(base):
    """Weights that are trained already, adapters, fresh weights; few steps and many."""
    from argparse import Namespace

    from infinity.tools.train.options import set_defaults

    for model, rank, steps, expected in (
        (base, None, 80, (2e-5, 10)),
        (base, 8, 20, (2e-4, 4)),
        (None, None, 3, (2e-4, 0)),
        (base / "config.json", None, 50, (2e-4, 10)),
    ):
        job = dict(model=model, lora_rank=rank, steps=steps, resume=False, checkpoint=None)
        job |= {"method": None}
        args = Namespace(**job, lr=None, warmup_steps=None)
        set_defaults(args)
        assert (args.lr, args.warmup_steps) == expected
        given = Namespace(**job, lr=0.5, warmup_steps=7)
        set_defaults(given)
        assert (given.lr, given.warmup_steps) == (0.5, 7)
