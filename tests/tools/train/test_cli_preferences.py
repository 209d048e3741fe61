"""`infinity train --method`: preferred answers, learned by TRL's trainers.

Method: the command trains a model of two layers at home, and TRL's own trainer, given the same
folder, file, seed and settings by its own names, trains it in memory. Losses and the tensors of
the saved folders are equal to the bit.
"""

from __future__ import annotations

import importlib
import json
import math
import shutil
import signal
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lazily import Lazily, need

need("trl", "datasets")

import transformers
from chatty import PAIRS, TEMPLATE, chat_of, save_base, save_rows
from ranks import run_torchrun
from safetensors.torch import load_file

import infinity.tools.cli
from infinity.errors import ConfigError, UsageError
from infinity.tools.train import preferences, report
from infinity.tools.train.columns import known
from infinity.tools.train.example_files import find_examples
from infinity.tools.train.examples import PLAIN_TEMPLATE
from infinity.tools.train.preferred import read_preferred

trl = Lazily("trl")
datasets = Lazily("datasets")

pytestmark = pytest.mark.filterwarnings("ignore")

SEED = 3
PAIRED = [{"prompt": q, "chosen": a, "rejected": f"{a}0, I think"} for q, a in PAIRS[:6]]
JUDGED = [
    {"prompt": q, "completion": a if at % 2 else "No idea.", "label": bool(at % 2)}
    for at, (q, a) in enumerate(PAIRS[:6])
]
# method -> where TRL has its trainer, the settings of its own, the data
METHODS: dict[str, tuple[str, str, dict[str, Any], list]] = {
    "dpo": ("trl", "DPO", {"beta": 0.3}, PAIRED),
    "kto": ("trl", "KTO", {"beta": 0.3}, JUDGED),
    "orpo": ("trl.experimental.orpo", "ORPO", {"beta": 0.3}, PAIRED),
    "simpo": (
        "trl.experimental.cpo",
        "CPO",
        {"beta": 0.3, "loss_type": "simpo", "cpo_alpha": 0.0},
        PAIRED,
    ),
}
SAID = ["--lr", "0.01", "--steps", "3", "--batch-size", "2", "--accumulate", "2", "--seed", "3"]
SAID += ["--warmup-steps", "1", "--sequence-length", "64", "--beta", "0.3", "--dtype", "fp32"]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return save_base(tmp_path_factory.mktemp("chatty") / "base")


@pytest.fixture
def train(base, tmp_path, monkeypatch, capsys):
    """Status, stdout and stderr of `infinity train` with the base."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "swap").mkdir()

    def run(*words: str, home: str = "host") -> tuple[int, str, str]:
        capsys.readouterr()
        given = ["--model", str(base), "--params", home, "--optimizer", home]
        given += ["--nvme-path", "swap"] if home == "nvme" else []
        status = infinity.tools.cli.main(["train", *given, *map(str, words)])
        return status, *capsys.readouterr()

    return run


def theirs(base: Path, method: str, rows: list, folder: Path, **changes: Any) -> list[float]:
    """Trains with TRL alone on all rows but the held-out last one, saves to ``folder`` and returns
    the losses."""
    place, kind, own, _ = METHODS[method]
    module = importlib.import_module(place)
    given = {
        "learning_rate": 0.01,
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "seed": SEED,
        "warmup_steps": 1,
        "max_length": 64,
        "weight_decay": 0.1,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    peft = changes.pop("peft_config", None)
    held, evaluated = changes.pop("held", None), changes.pop("evaluated", [])
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    transformers.set_seed(SEED)  # TRL 1.1 draws adapters without doing so itself
    trainer = getattr(module, f"{kind}Trainer")(
        model=model,
        args=getattr(module, f"{kind}Config")(str(folder), **{**given, **own, **changes}),
        train_dataset=datasets.Dataset.from_list(rows[:-1]),
        processing_class=transformers.AutoTokenizer.from_pretrained(base),
        **({} if peft is None else {"peft_config": peft}),
        **({} if held is None else {"eval_dataset": datasets.Dataset.from_list(held)}),
    )
    if held is not None:
        evaluated.append(trainer.evaluate()["eval_loss"])
        transformers.set_seed(SEED)  # as without it
    trainer.train()
    evaluated += [] if held is None else [trainer.evaluate()["eval_loss"]]
    trainer.save_model(str(folder))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: value
        for file in folder.glob("*.safetensors")
        for name, value in load_file(file).items()
    }


def assert_equal(ours: Path, their: Path) -> None:
    mine, its = tensors(ours), tensors(their)
    assert mine.keys() == its.keys() and its
    assert all(torch.equal(mine[name], value) for name, value in its.items())


@pytest.mark.parametrize("home", ["host", "nvme"])
@pytest.mark.parametrize("method", METHODS)
def test_a_method_has_the_bits_of_trls_own_trainer(method, home, base, train, tmp_path):
    """Losses and saved weights. Twin: another beta has others."""
    rows = METHODS[method][3]
    save_rows(tmp_path / "data.jsonl", rows)
    words = ("--method", method, "--data", "data.jsonl", "--out", "tuned", "--json", *SAID)
    status, out, err = train(*words, home=home)
    assert status == 0, err
    losses = theirs(base, method, rows, tmp_path / "theirs")
    assert json.loads(out)["losses"] == losses and len(set(losses)) > 1
    assert_equal(tmp_path / "tuned", tmp_path / "theirs")
    if home == "host":
        other = theirs(base, method, rows, tmp_path / "twin", beta=0.31)
        assert other != losses


@pytest.mark.parametrize("method", METHODS)
def test_adapters_have_the_bits_of_trls_own_trainer_and_no_second_model(
    method, base, train, tmp_path, monkeypatch
):
    """The reference is the model with its adapters off. Twin: without them a second one is made."""
    peft = pytest.importorskip("peft")
    from infinity.tools.train import train as command

    made: list[str] = []
    build = command.build_model
    monkeypatch.setattr(command, "build_model", lambda *a, **k: made.append("") or build(*a, **k))
    rows = METHODS[method][3]
    save_rows(tmp_path / "data.jsonl", rows)
    words = ("--method", method, "--data", "data.jsonl", "--json", *SAID)
    status, out, err = train(*words, "--out", "tuned", "--lora-rank", "4", home="nvme")
    assert status == 0, err
    assert len(made) == 1
    adapters = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    losses = theirs(base, method, rows, tmp_path / "theirs", peft_config=adapters)
    assert json.loads(out)["losses"] == losses and len(set(losses)) > 1
    assert_equal(tmp_path / "tuned", tmp_path / "theirs")
    if method == "dpo":
        assert train(*words)[0] == 0 and len(made) == 3


def test_a_reference_that_is_asked_once_gives_the_same(base, train, tmp_path):
    """TRL's precompute_ref_log_probs. Twin: ORPO has no reference, which is told."""
    save_rows(tmp_path / "data.jsonl", PAIRED)
    words = ("--data", "data.jsonl", "--out", "tuned", "--precompute-reference", *SAID)
    status, out, err = train("--method", "dpo", "--json", *words)
    assert status == 0, err
    losses = theirs(base, "dpo", PAIRED, tmp_path / "theirs", precompute_ref_log_probs=True)
    assert json.loads(out)["losses"] == losses
    assert_equal(tmp_path / "tuned", tmp_path / "theirs")
    status, out, err = train("--method", "orpo", *words[:2], *words[4:])
    assert status == 2 and "orpo has none. Leave it out." in err


# --- forms of samples ---

ASKED = chat_of("What is 1+2?", "3.")[:1]
GOOD, BAD = ({"role": "assistant", "content": said} for said in ("3.", "4."))
BRIEF = {"role": "system", "content": "Be brief."}
TALK = [*chat_of("Q1", "a1"), {"role": "user", "content": "Q2"}]
AS_CHAT = {"prompt": ASKED, "chosen": [GOOD], "rejected": [BAD]}
FORMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # method, sample, TRL's row
    "text": ("dpo", PAIRED[0], PAIRED[0]),
    "text of other names": (
        "simpo",
        {"question": "1+1?", "chosen": "2.", "rejected_response": "3.", "id": 7},
        {"prompt": "1+1?", "chosen": "2.", "rejected": "3."},
    ),
    "text with its input": (
        "dpo",
        {"instruction": "Add.", "input": "1+1", "context": "", "chosen": "2.", "rejected": "3."},
        {"prompt": "Add.\n1+1", "chosen": "2.", "rejected": "3."},
    ),
    "messages with their input": (
        "dpo",
        AS_CHAT | {"input": "Be brief."},
        AS_CHAT | {"prompt": [{"role": "user", "content": "What is 1+2?\nBe brief."}]},
    ),
    "text without a prompt": (
        "orpo",
        {"chosen": "Q: 1+1? A: 2.", "rejected": "Q: 1+1? A: 3."},
        {"chosen": "Q: 1+1? A: 2.", "rejected": "Q: 1+1? A: 3."},
    ),
    "messages": ("dpo", AS_CHAT, AS_CHAT),
    "messages before texts": (
        "dpo",
        {"messages": ASKED, "chosen": "3.", "rejected": "4."},
        AS_CHAT,
    ),
    "a conversation with a rejected response": (
        "orpo",
        {"messages": [*ASKED, GOOD], "rejected_response": "4."},
        AS_CHAT,
    ),
    "sharegpt": (
        "dpo",
        {
            "conversations": [{"from": "human", "value": "What is 1+2?"}],
            "chosen": {"from": "gpt", "value": "3."},
            "rejected": {"from": "gpt", "value": "4."},
        },
        AS_CHAT,
    ),
    "whole conversations": (
        "kto",
        {"prompt": "What is 1+2?", "chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]},
        AS_CHAT,
    ),
    "json text in cells": (
        "dpo",
        {key: json.dumps(value) if key != "prompt" else value for key, value in AS_CHAT.items()}
        | {"prompt": "What is 1+2?"},
        AS_CHAT,
    ),
    "the columns of ultrafeedback": (
        "dpo",
        {"prompt": "What is 1+2?", "messages": [*ASKED, GOOD]}
        | {"chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]},
        AS_CHAT,
    ),
    "a conversation that ends with its answer, and answers": (
        "orpo",
        {"messages": [*ASKED, GOOD], "chosen": "3.", "rejected": "4."},
        AS_CHAT,
    ),
    "a prompt with blanks around it": (
        "dpo",
        {"prompt": "What is 1+2? ", "chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]},
        AS_CHAT,
    ),
    "a first question as text": (
        "dpo",
        {"prompt": "Q1", "chosen": [*TALK, GOOD], "rejected": [*TALK, BAD]},
        {"prompt": TALK, "chosen": [GOOD], "rejected": [BAD]},
    ),
    "a system message in the prompt alone": (
        "dpo",
        {"prompt": [BRIEF, *ASKED], "chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]},
        AS_CHAT | {"prompt": [BRIEF, *ASKED]},
    ),
    "what was said before in the prompt alone": (
        "dpo",
        {"prompt": TALK, "chosen": [TALK[-1], GOOD], "rejected": [TALK[-1], BAD]},
        {"prompt": TALK, "chosen": [GOOD], "rejected": [BAD]},
    ),
    "a prompt that comes before both": (
        "dpo",
        {"prompt": TALK[:2], "chosen": [TALK[-1], GOOD], "rejected": [TALK[-1], BAD]},
        {"prompt": TALK, "chosen": [GOOD], "rejected": [BAD]},
    ),
    "a system message": (
        "dpo",
        AS_CHAT | {"system": "Be brief."},
        AS_CHAT | {"prompt": [{"role": "system", "content": "Be brief."}, *ASKED]},
    ),
}

BOTH = {"chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]}
TOLD = [
    {"from": {"user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]} for m in TALK
]
HUMAN = "\n\nHuman: 1+1?\n\nAssistant: 2.\n\nHuman: 1+2?\n\nAssistant:"
PREFERENCES = known("column", "preferences")
# The columns of data on the hub, by its documentation
PUBLIC: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Intel/orca_dpo_pairs": (
        "dpo",
        {"system": "Be brief.", "question": "What is 1+2?", "chosen": "3.", "rejected": "4."},
        AS_CHAT | {"prompt": [BRIEF, *ASKED]},
    ),
    "Intel/orca_dpo_pairs without a system message": (
        "dpo",
        {"system": "", "question": "What is 1+2?", "chosen": "3.", "rejected": "4."},
        PAIRED[0] | {"prompt": "What is 1+2?", "chosen": "3.", "rejected": "4."},
    ),
    "hiyouga/LLaMA-Factory, v1": (
        "dpo",
        {
            f"{kind}_messages": [
                {
                    "role": each["role"],
                    "content": [{"type": "text", "value": each["content"]}],
                    "loss_weight": float(each["role"] == "assistant"),
                }
                for each in (BRIEF, *ASKED, answer)
            ]
            for kind, answer in (("chosen", GOOD), ("rejected", BAD))
        },
        AS_CHAT | {"prompt": [BRIEF, *ASKED]},
    ),
    "jondurbin/truthy-dpo-v0.1": (
        "orpo",
        {"id": "a", "source": "b", "system": "Be brief.", "prompt": "What is 1+2?"}
        | {"chosen": "3.", "rejected": "4."},
        AS_CHAT | {"prompt": [BRIEF, *ASKED]},
    ),
    "Anthropic/hh-rlhf": (
        "dpo",
        {"chosen": f"{HUMAN} 3.", "rejected": f"{HUMAN} 4."},
        {"chosen": f"{HUMAN} 3.", "rejected": f"{HUMAN} 4."},
    ),
    "argilla/dpo-mix-7k": (
        "simpo",
        {"dataset": "a", "chosen_rating": 5.0, "rejected_rating": 3.0, **BOTH},
        AS_CHAT,
    ),
    "HuggingFaceH4/ultrafeedback_binarized": (
        "dpo",
        {"prompt": "What is 1+2?", "prompt_id": "a", "messages": BOTH["chosen"], **BOTH}
        | {"score_chosen": 8.0, "score_rejected": 5.0},
        AS_CHAT,
    ),
    "openbmb/UltraInteract_pair": (
        "dpo",
        {"task": "Math", "dataset": "a", "trajectory": TOLD, "id": "b", "parent_id": "c"}
        | {"chosen": "3.", "rejected": "4."},
        {"prompt": TALK, "chosen": [GOOD], "rejected": [BAD]},
    ),
    "argilla/distilabel-capybara-dpo-7k-binarized": (
        "dpo",
        {"source": "a", "conversation": [{"input": "What is 1+2?", "output": "3."}]}
        | {"prompt": "What is 1+2?", "original_response": "3.", **BOTH},
        AS_CHAT,
    ),
    "trl-lib/kto-mix-14k": (
        "kto",
        {"prompt": ASKED, "completion": [GOOD], "label": True},
        {"prompt": ASKED, "completion": [GOOD], "label": True},
    ),
    "answers with a label beside empty pairs": (
        "kto",
        {"prompt": ASKED, "completion": [GOOD], "label": True, "chosen": None, "rejected": None},
        {"prompt": ASKED, "completion": [GOOD], "label": True},
    ),
    "lvwerra/stack-exchange-paired, renamed": (
        "dpo",
        {"qid": 1, "question": "What is 1+2?", "date": "d", "metadata": ["m"]}
        | {"chosen": "3.", "rejected": "4."},
        {"prompt": "What is 1+2?", "chosen": "3.", "rejected": "4."},
    ),
    "NousResearch/hermes tools beside texts": (
        "dpo",
        {"tools": '[{"name": "f"}]', "prompt": "What is 1+2?", "chosen": "3."} | {"rejected": "4."},
        AS_CHAT | {"tools": json.dumps([{"type": "function", "function": {"name": "f"}}])},
    ),
}


@pytest.mark.parametrize("source", PUBLIC)
def test_pairs_of_public_data_make_the_rows_that_trl_takes(source, base, tmp_path):
    """Method: a sample with the documented columns of the data, beside the row that TRL's trainer
    takes; TRL renders both to the same tokens. Twin: with another question they differ."""
    method, sample, row = PUBLIC[source]
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = f"{{{{ tools | tojson if tools }}}}{TEMPLATE}"
    samples = [sample, sample | ({"label": False} if "label" in sample else {})] * 2
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in samples))
    found = read_preferred(find_examples(path), tokenizer, method)
    assert dict(found.rows[0]) == row
    used = {"system", "question", "trajectory", "conversation"} | set(PREFERENCES)
    unused = set(sample) - set(row) - used
    left = next((line for line in found.told if line.startswith("Columns left out")), "")
    assert all(name in left for name in unused - {"messages"}), found.told
    altered = json.loads(json.dumps(samples).replace("1+2", "1+5").replace("Q2", "Q5"))
    path.write_text("".join(json.dumps(each) + "\n" for each in altered))
    assert dict(read_preferred(find_examples(path), tokenizer, method).rows[0]) != row


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_pairs_makes_the_rows_that_trl_takes(form, base, tmp_path):
    """Twin: the answers the other way round make other rows."""
    method, sample, row = FORMS[form]
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    files = find_examples(save_rows(tmp_path / "a.jsonl", [sample] * 2))
    found = read_preferred(files, tokenizer, method)
    assert [dict(each) for each in found.rows] == [row] * 2
    assert ("Columns left out: id" in found.told) == ("id" in sample)
    names = {"chosen": row["rejected"], "rejected": row["chosen"]}
    assert dict(found.rows[0]) != row | names


def test_calls_of_tools_and_variables_reach_the_template_as_they_are(base, tmp_path):
    """Two samples with other arguments and variables: neither gets the other's keys, with None.
    Twin: the tokens of TRL's row have both."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = (
        "{{ tools | tojson }}{{ mood }}{% for m in messages %}<|{{ m.role }}|>"
        "{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}<|end|>{% endfor %}"
    )
    rows = []
    for name in "ab":
        call = {"type": "function", "function": {"name": "f", "arguments": {name: 1}}}
        chosen = {"role": "assistant", "content": "", "tool_calls": [call]}
        beside = {"tools": [{"type": "function", "function": {"name": name}}]}
        beside |= {"chat_template_kwargs": {"mood": "calm"}} if name == "b" else {}
        rows.append(AS_CHAT | {"chosen": [chosen]} | beside)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_preferred(find_examples(tmp_path / "a.jsonl"), tokenizer, "dpo")
    trainer = trl.DPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(base),
        args=trl.DPOConfig(str(tmp_path / "out"), use_cpu=True, bf16=False, report_to=[]),
        train_dataset=found.rows,
        processing_class=tokenizer,
    )
    texts = [
        tokenizer.decode([*row["prompt_ids"], *row["chosen_ids"]]) for row in trainer.train_dataset
    ]
    for name, other, text in zip("ab", "ba", texts):
        assert f'"arguments": {{"{name}": 1}}' in text and f'"{other}"' not in text
        assert ("calm" in text) == (name == "b") and "null" not in text and "None" not in text


def test_tools_of_some_samples_are_not_lost(base, tmp_path):
    """Method: a sample without tools before one with them, as lists and as text of functions alone;
    each row has its own. Twin: a file without tools has no column of them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = (
        "{{ tools }}{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
    )
    tool = {"type": "function", "function": {"name": "f"}}
    for asked, tools in ((ASKED, [tool]), ("What is 1+2?", json.dumps([tool["function"]]))):
        none = AS_CHAT | {"prompt": asked, "tools": None}
        save_rows(tmp_path / "a.jsonl", [none, none | {"tools": tools}])
        found = read_preferred(find_examples(tmp_path / "a.jsonl"), tokenizer, "dpo")
        assert [row["tools"] for row in found.rows] == [None, json.dumps([tool])]
    save_rows(tmp_path / "a.jsonl", [AS_CHAT] * 2)
    found = read_preferred(find_examples(tmp_path / "a.jsonl"), tokenizer, "dpo")
    assert found.rows.column_names == ["prompt", "chosen", "rejected"]


def test_a_fingerprint_is_of_the_rows_as_the_template_renders_them(base, tmp_path):
    """Method: the same file by two templates and two vocabularies. Twin: read twice."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    files = find_examples(save_rows(tmp_path / "a.jsonl", [AS_CHAT] * 2))
    first, again = (read_preferred(files, tokenizer, "dpo").fingerprint for _ in range(2))
    template = tokenizer.chat_template
    tokenizer.chat_template = f"Hello. {template or PLAIN_TEMPLATE}"
    other = read_preferred(files, tokenizer, "dpo").fingerprint
    tokenizer.chat_template = template
    tokenizer.add_tokens(["<new>"])
    assert (
        first == again
        and len({first, other, read_preferred(files, tokenizer, "dpo").fingerprint}) == 3
    )


@pytest.mark.parametrize("name", ["label", "kto_tag", "is_rejected"])
def test_a_label_tells_good_answers_from_bad_ones(name, base, tmp_path):
    """As a truth, a number or its text, after a pair or a conversation. Twin: of rejected ones it
    is turned."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    values = ((True, False), (1, 0), ("True", "false"), (1.0, 0.0))
    for at, (said, turned) in enumerate(values):
        rows = [{"prompt": "1+1?", "completion": "2."}, {"messages": chat_of("1+1?", "2.")}]
        both = [rows[at % 2] | {name: value} for value in (said, turned)] * 2  # one is held out
        files = find_examples(save_rows(tmp_path / f"{at}.jsonl", both))
        labels = read_preferred(files, tokenizer, "kto").rows["label"]
        assert list(labels) == ([False, True] if name == "is_rejected" else [True, False]) * 2


# --- bad input ---

PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
JUDGE = {"prompt": "a", "completion": "b", "label": True}
REFUSED: dict[str, tuple[str, list[dict], str, str]] = {  # method, rows, what is told, the way out
    "one answer is missing": (
        "dpo",
        [PAIR, PAIR | {"rejected": ""}],
        "sample 2: rejected is empty",
        "Give both answers, or remove the sample",
    ),
    "texts that begin with nothing alike": (
        "dpo",
        [{"chosen": "Yes.", "rejected": "No.", "trace": "1+1?"}],
        "sample 1: no question comes before the answers, which begin with no word that both",
        "Add a prompt",
    ),
    "a system message alone": (
        "orpo",
        [AS_CHAT | {"prompt": [BRIEF]}],
        "sample 1: no question comes before the answers",
        "Add a prompt",
    ),
    "an empty question beside a system message": (
        "dpo",
        [PAIR | {"system": "Be brief.", "prompt": " "}],
        "sample 1: prompt is empty",
        "Give the question",
    ),
    "PKU-Alignment/PKU-SafeRLHF": (
        "dpo",
        [{"prompt": "a", "response_0": "b", "response_1": "c", "better_response_id": 1}],
        "has the columns prompt, response_0, response_1, better_response_id",
        "Needed is chosen and rejected",
    ),
    "berkeley-nest/Nectar": (
        "dpo",
        [{"prompt": "a", "answers": [{"answer": "b", "rank": 1.0}], "turns": 1}],
        "has the columns prompt, answers, turns",
        "Needed is chosen and rejected",
    ),
    "stanfordnlp/SHP": (
        "dpo",
        [{"history": "a", "human_ref_A": "b", "human_ref_B": "c", "labels": 1}],
        "has the columns history, human_ref_A, human_ref_B, labels",
        "Needed is chosen and rejected",
    ),
    "no question": ("orpo", [PAIR, PAIR | {"prompt": ""}], "sample 2: prompt is empty", "Give"),
    "numbers": ("dpo", [PAIR | {"chosen": 3}], "sample 1: chosen is '3'", "must be a text, or a"),
    "two kinds": (
        "simpo",
        [PAIR, {"prompt": ASKED, "chosen": [GOOD], "rejected": [BAD]}],
        "sample 2: its answers are messages",
        "Write all of them alike",
    ),
    "answers to two questions": (
        "dpo",
        [{"chosen": chat_of("a", "b"), "rejected": chat_of("c", "d")}],
        "sample 1: chosen has messages that are no answer to the same question",
        "Begin chosen and rejected with the same messages",
    ),
    "no answer at the end": (
        "kto",
        [{"messages": ASKED, "label": True}],
        "sample 1: messages must end with the answer",
        "of the role assistant",
    ),
    "a label of words": (
        "kto",
        [JUDGE, JUDGE | {"label": "good"}],
        "sample 2: label is 'good'",
        "1",
    ),
    "good answers alone": ("kto", [JUDGE] * 3, "are good", "or leave out --method"),
    "a chat file": (
        "dpo",
        [{"messages": chat_of("a", "b")}],
        "has the columns messages",
        "Leave out --method to learn every answer",
    ),
    "labels for pairs": ("orpo", [JUDGE], "has the columns", "give --method kto"),
    "both": ("kto", [PAIR | {"label": True}], "column label (first in sample 1)", "Remove the col"),
    "pictures": ("dpo", [PAIR | {"images": ["a.png"]}], "the column images", "and the column"),
    "a context beside messages": (
        "dpo",
        [{"messages": ASKED, "chosen": "3.", "rejected": "4.", "context": "d"}],
        "column context",
        "Write it into the prompt",
    ),
    "a context of messages": (
        "dpo",
        [PAIR | {"context": ASKED}],
        "context must be a text",
        "sample 1",
    ),
    "two questions": (
        "dpo",
        [{"prompt": "Q3", "chosen": [*TALK, GOOD], "rejected": [*TALK, BAD]}],
        "sample 1: the prompt and what both answers begin with are two questions",
        "into one of them",
    ),
    "a prompt that ends with an answer": (
        "dpo",
        [{"prompt": TALK[:2], "chosen": [GOOD], "rejected": [BAD]}],
        "sample 1: the prompt ends with an answer",
        "Remove it from the prompt",
    ),
    "a message without content": (
        "dpo",
        [AS_CHAT | {"rejected": [BAD | {"content": ""}]}],
        "sample 1: rejected is empty",
        "remove the sample",
    ),
    "a system message as an answer": (
        "dpo",
        [AS_CHAT | {"chosen": [BRIEF]}],
        "sample 1: chosen has messages that are no answer",
        "into prompt",
    ),
    "an empty question before messages": (
        "dpo",
        [AS_CHAT | {"prompt": " "}],
        "sample 1: no question comes before",
        "Add a prompt",
    ),
    "an answer of no weight": (
        "dpo",
        [AS_CHAT | {"chosen": [GOOD | {"weight": 0}]}],
        "sample 1: a message of chosen has a weight of 0",
        "Remove the weight",
    ),
    "unseen tools": (
        "dpo",
        [AS_CHAT | {"tools": [{"name": "f"}]}],
        "does not render the column tools",
        "Give the tokenizer a chat template that does",
    ),
    "tools": ("orpo", [AS_CHAT | {"tools": [{"name": "f"}]}], "column tools", "--method dpo"),
    "no room": (
        "dpo",
        [PAIR | {"prompt": "long " * 20}] * 2,
        "no prompt of data.jsonl",
        "Give a larger",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_file_that_a_method_cannot_learn_of_is_refused(what, train):
    """By the sample's number, with the way out, and nothing is written. Twins: each method's own
    file above."""
    method, rows, said, way_out = REFUSED[what]
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, _, err = train(
        "--method", method, "--data", "data.jsonl", "--out", "tuned", "--sequence-length", "64"
    )
    assert status == 2 and said in err and way_out in err, err
    assert "Traceback" not in err and not Path("tuned").exists()


def test_models_of_one_shape_are_told_apart_by_their_weights(base, tmp_path):
    """Twin: a copy of the folder is the same model."""
    for name in ("copy", "other"):
        shutil.copytree(base, tmp_path / name)
    (file,) = (tmp_path / "other").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    told = [preferences._fingerprint_of(str(each)) for each in (base, tmp_path / "copy")]
    assert told[0] == told[1] != preferences._fingerprint_of(str(tmp_path / "other"))


@pytest.mark.parametrize("method", ["orpo", "simpo"])
def test_rows_of_which_nothing_is_learned_make_no_nan(method, train):
    """Method: a prompt that is longer than a row, beside others; its row is left out and counted.
    Twin: without it nothing is told."""
    save_rows(Path("data.jsonl"), [PAIRED[0] | {"prompt": "long " * 80}, *PAIRED])
    words = ("--method", method, "--data", "data.jsonl", *SAID, "--steps", "4", "--json")
    status, out, err = train(*words)
    assert status == 0 and "Of 1 answer nothing is learned" in err, err
    assert all(math.isfinite(each) for each in json.loads(out)["losses"])


def test_half_of_the_prompts_may_be_too_long(train):
    """Method: three of seven pairs leave no room; the others are learned. Twin: all, refused."""
    long = [row | {"prompt": "long " * 20} for row in PAIRED]
    save_rows(Path("data.jsonl"), [*PAIRED[:3], *long[3:], PAIRED[0]])
    words = ("--method", "dpo", "--data", "data.jsonl", *SAID, "--steps", "1")
    status, out, err = train(*words)
    assert status == 0 and "Of 3 answers nothing is learned" in out, err
    save_rows(Path("data.jsonl"), long)
    status, _, err = train(*words)
    assert status == 2 and "no prompt of data.jsonl leaves room" in err


@pytest.mark.parametrize("method", ["dpo", "orpo"])
def test_a_row_that_the_template_refuses_is_named(method, base, train, tmp_path):
    """Method: a template that knows no system message, and one in the third sample, the first of
    which is empty. Twin: without it, the job runs."""
    folder = shutil.copytree(base, tmp_path / "other")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}"
        "{% endif %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    )
    tokenizer.save_pretrained(folder)
    words = ("--model", folder, "--method", method, "--data", "data.jsonl", *SAID, "--steps", "1")
    empty = dict.fromkeys(AS_CHAT)
    save_rows(Path("data.jsonl"), [empty, AS_CHAT, AS_CHAT | {"prompt": [BRIEF, *ASKED]}])
    status, _, err = train(*words)
    assert status == 2 and "sample 3: the chat template ends at line 1 (" in err, err
    assert "in TemplateError: no system here" in err
    save_rows(Path("data.jsonl"), [AS_CHAT] * 4)
    assert train(*words)[0] == 0


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_prompts_that_leave_no_room_are_counted(method, train):
    """Of pairs KTO learns each answer. Twin: with room, nothing is told."""
    if method == "kto" and trl.__version__.startswith("1.1."):
        pytest.skip("KTO of TRL 1.1 shortens prompts")
    save_rows(Path("data.jsonl"), [PAIRED[0] | {"prompt": "long " * 20}, *PAIRED])
    words = ("--method", method, "--data", "data.jsonl", *SAID, "--steps", "1")
    status, out, err = train(*words)
    count = "2 answers" if method == "kto" else "1 answer"
    assert status == 0 and f"Of {count} nothing is learned" in out, err
    save_rows(Path("data.jsonl"), PAIRED)
    assert "nothing is learned" not in train(*words)[1]


# --- what a row has of its prompt and answers ---

MOVED = (  # the system message stands in the last turn, if a user's
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>{% if loop.last and messages[0].role"
    " == 'system' %}{{ messages[0].content }} {% endif %}{{ m.content }}<|end|>"
    "{% elif m.role == 'assistant' %}<|assistant|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
UNLIKE: dict[str, tuple[str, str]] = {  # template -> what is told, or the refusal
    "a thought is opened": (
        TEMPLATE.replace("<|assistant|>{% endif", "<|assistant|><think>{% endif"),
        "asks for an answer with '<think>', which is not in these rows, in 2 of the samples",
    ),
    "a system message moves into the last turn": (MOVED, "renders what comes before an answer"),
    "messages are counted": (
        "({{ messages | length }})" + TEMPLATE,
        "sample 1: the chat template renders what comes before an answer otherwise",
    ),
    "thoughts are dropped": (
        TEMPLATE.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}"),
        "what answers think is left out, or some of it, by the chat template",
    ),
}


@pytest.mark.parametrize("method", ["dpo", "orpo"])
@pytest.mark.parametrize("what", UNLIKE)
def test_a_prompt_that_is_not_in_the_row_is_told_or_refused(what, method, base, tmp_path):
    """Method: templates that render a prompt otherwise alone than before an answer. TRL warns once
    of it, or not at all. Twin: the plain template, of which nothing is told."""
    template, said = UNLIKE[what]
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    thought = {"role": "assistant", "content": "<think>1+2</think>3."}
    rows = [AS_CHAT | {"prompt": [BRIEF, *ASKED], "chosen": [thought]}] * 2
    files = find_examples(save_rows(tmp_path / "a.jsonl", rows))
    assert len(read_preferred(files, tokenizer, method).told) == 1
    tokenizer.chat_template = template
    if "renders" in said:
        with pytest.raises(ConfigError, match="sample 1: the chat template renders what comes"):
            read_preferred(files, tokenizer, method)
    else:
        told = read_preferred(files, tokenizer, method).told
        assert len(told) == 2 and said in told[1], told


def test_tokens_that_merge_over_the_end_of_a_prompt_are_counted(base, tmp_path):
    """Method: a tokenizer that makes one token of "?!"; TRL warns of the same rows. Twin: the
    answer without it."""
    from tokenizers import Tokenizer, models

    words = {each: at for at, each in enumerate(["?", "!", "a", "?!", "<|end|>"])}
    made = Tokenizer(models.BPE(words, [("?", "!")]))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")
    rows = [{"prompt": "a?", "chosen": "!", "rejected": "a"}] * 3
    files = find_examples(save_rows(tmp_path / "a.jsonl", rows))
    assert any(
        each.startswith("3 prompts whose last token is another one once the answer follows")
        for each in read_preferred(files, tokenizer, "dpo").told
    )
    save_rows(tmp_path / "a.jsonl", [row | {"chosen": "aa"} for row in rows])
    assert len(read_preferred(files, tokenizer, "dpo").told) == 1


@pytest.mark.parametrize("method", METHODS)
def test_answers_that_are_cut_are_counted(method, base, train, tmp_path):
    """Method: two answers of a pair, or one of KTO's, are longer than a row, others end with it.
    Twin: two more tokens hold them all, and nothing is told."""
    if method == "kto" and trl.__version__.startswith("1.1."):
        pytest.skip("KTO of TRL 1.1 shortens prompts")
    long = {"dpo": {"chosen": "x" * 60, "rejected": "x" * 61}, "kto": {"completion": "x" * 60}}
    rows = [row | long["kto" if method == "kto" else "dpo"] for row in METHODS[method][3][:1]]
    save_rows(Path("data.jsonl"), [*rows, *METHODS[method][3]])
    whole = len(f"{rows[0]['prompt']}{'x' * 61}") + 1  # a token for each byte, and the last one
    words = ("--method", method, "--data", "data.jsonl", *SAID, "--steps", "1", "--json")
    for length, count in ((64, 1 if method == "kto" else 2), (whole - 1, int(method != "kto"))):
        status, out, err = train(*words, "--sequence-length", str(length))
        assert status == 0, err
        said = f"Answers beyond {length} tokens are not learned: {count} answer"
        assert json.loads(out)["data"]["cut_answers"] == count
        assert (said in err) == (count > 0), err
    status, out, err = train(*words, "--sequence-length", str(whole))
    assert json.loads(out)["data"]["cut_answers"] == 0 and "are not learned" not in err


OPTIONS = {  # words -> what is told
    "--method dpo": "add --data FILE",
    "--method dpo --data text.txt": "text.txt is running text. Leave out --method",
    "--data pairs.jsonl": "has preferred answers: add --method dpo",
    "--data pairs.jsonl --beta 0.2": "add --method dpo",
    "--method dpo --data pairs.jsonl --pack": "--pack is not for the method dpo. Leave it out",
    "--method dpo --data pairs.jsonl --minutes 1": "Give --steps or --epochs",
    "--method dpo --data pairs.jsonl --optim muon": "Give adamw or adafactor",
    "--method kto --data pairs.jsonl --batch-size 1": "give --batch-size 2 or more",
    "--method simpo --data pairs.jsonl --precompute-reference": "simpo has none. Leave it out",
    "--method dpo --data pairs.jsonl --precompute-reference --lora": "its adapters off. Leave",
}


@pytest.mark.parametrize("words", OPTIONS)
def test_options_that_do_not_go_together_are_refused_by_name(words, train):
    """Before anything is written."""
    save_rows(Path("pairs.jsonl"), PAIRED)
    Path("text.txt").write_text("To be, or not to be, that is the question. " * 200)
    before = set(Path().iterdir())
    status, _, err = train(*words.split(), "--out", "tuned")
    assert status == 2 and OPTIONS[words] in err, err
    assert set(Path().iterdir()) == before


def test_a_trainer_that_this_trl_lacks_is_named(monkeypatch):
    """Twin: one that it has."""
    from infinity.ext.integrations.trl import trainer_over_home

    assert trainer_over_home("ORPO")[0].__name__ == "InfinityORPOTrainer"
    with pytest.raises(ConfigError, match=r"has no NoneTrainer\. .*pip install --upgrade trl"):
        trainer_over_home("None")


# --- held-out rows, and who watches ---


@pytest.mark.parametrize("method", METHODS)
def test_held_out_losses_are_those_of_trls_own_trainer(method, base, train, tmp_path):
    """Method: the last row is measured before the first step and after the last, as TRL does in
    memory; bits compared. Twin: TRL's loss of the first row is another."""
    rows = METHODS[method][3]
    save_rows(tmp_path / "data.jsonl", rows)
    status, out, err = train("--method", method, "--data", "data.jsonl", "--json", *SAID)
    assert status == 0, err
    told = json.loads(out)
    measured: dict[str, list[float]] = {}
    for name, held in (("last", rows[-1:]), ("first", rows[:1])):
        evaluated: list[float] = []
        theirs(base, method, rows, tmp_path / "theirs", held=held, evaluated=evaluated)
        measured[name] = evaluated
    ours = [told["held_out_loss_before"], told["held_out_loss_after"]]
    assert ours == measured["last"] != measured["first"]
    assert told["data"]["held_out_rows"] == 1 and f"held-out loss {ours[0]:.4f}" in err
    assert told["tokens_per_second"] > 0 and len(told["edges"]) and told["gpus"]
    assert f"{ours[0]:.4f} -> {ours[1]:.4f}" in err and "tokens/s" in err


def test_pairs_are_counted_where_the_mean_of_batches_is_theirs():
    """Twin: batches of several sizes, whose mean is no count of pairs."""
    told = {"held_out_loss_before": 1.0, "held_out_loss_after": 0.5, "method": "dpo"}
    told |= {"held_out": {"eval_rewards/accuracies": 0.75}, "step_seconds": None}
    for even, said in ((True, "3 of 4 pairs told apart"), (False, "75% of its 4 pairs told apart")):
        told["data"] = {"held_out_rows": 4, "held_out_evenly": even}
        assert ("", said) in islice(report._summary_rows(told), 2)


def test_pairs_of_the_users_own_are_measured(train):
    """Method: as many rows as the part held out, and the same; measured after each step. Twins: the
    learned bits are those of a job that measures no step; another file has another loss."""
    for name, part in (("all", PAIRED), ("learned", PAIRED[:-1]), ("last", PAIRED[-1:])):
        save_rows(Path(f"{name}.jsonl"), part)
    save_rows(Path("a.jsonl"), PAIRED[:1])
    found = []
    for words in (
        ("--data", "all.jsonl"),
        ("--data", "learned.jsonl", "--eval-data", "last.jsonl", "--eval-every", "1"),
        ("--data", "learned.jsonl", "--eval-data", "a.jsonl"),
    ):
        status, out, err = train("--method", "dpo", *words, "--json", *SAID)
        assert status == 0, err
        found.append(json.loads(out))
        apart = int(found[-1]["held_out"]["eval_rewards/accuracies"])
        assert f"{apart} of 1 pairs told apart" in err
    names = ("losses", "held_out_loss_before", "held_out_loss_after")
    told = [[each[name] for name in names] for each in found]
    assert told[0] == told[1]
    assert found[2]["held_out_loss_after"] != found[0]["held_out_loss_after"]
    assert list(found[1]["held_out_losses"]) == ["1", "2"]


def test_a_job_that_goes_on_knows_its_first_held_out_loss(train):
    """Method: the whole job, and one that its checkpoint continues. Twin: one that starts later
    has another."""
    save_rows(Path("data.jsonl"), PAIRED)
    words = ["--method", "dpo", "--data", "data.jsonl", *SAID, "--json", "--accumulate", "1"]
    saved = [*words, "--checkpoint", "saved", "--steps", "2"]
    first = json.loads(train(*saved)[1])
    again = json.loads(train(*saved, "--resume")[1])
    for name in ("held_out_loss_before", "held_out_loss_after"):
        assert first[name] == again[name]
    assert first["held_out_loss_before"] != first["held_out_loss_after"]


def test_top_and_trackers_see_the_steps(train, monkeypatch):
    """Method: TensorBoard's file has each step's figures and both held-out losses; a status has the
    last step. Twin: a job without --log writes no file."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("INFINITY_CACHE", str(Path("cache").resolve()))
    save_rows(Path("data.jsonl"), PAIRED)
    words = ("--method", "dpo", "--data", "data.jsonl", *SAID, "--json")
    assert train(*words)[0] == 0 and not Path("board").exists()
    status, out, err = train(*words, "--tensorboard", "board")
    assert status == 0, err
    found = EventAccumulator("board").Reload()
    losses = [each.value for each in found.Scalars("train/loss")]
    told = json.loads(out)
    assert losses == pytest.approx(told["losses"]) and len(losses) == 3
    held = [each.value for each in found.Scalars("eval/loss")]
    assert held == pytest.approx([told["held_out_loss_before"], told["held_out_loss_after"]])
    assert len(found.Scalars("train/rewards/margins")) == len(found.Scalars("train/lr")) == 3
    states = [json.loads(path.read_text()) for path in Path("cache/runs").glob("*/status*.json")]
    assert [(each["step"], each["loss"]) for each in states] == [(3, told["losses"][-1])]


# --- checkpoints ---


@pytest.mark.parametrize("method", ["dpo", "orpo"])
def test_a_job_that_goes_on_has_the_bits_of_one_that_did_not_stop(method, train, tmp_path):
    """Interrupted after its second step, by the loop's own signal. Twins: a folder without a
    checkpoint, other options, another kind of job, each told by name."""
    rows = METHODS[method][3]
    save_rows(tmp_path / "data.jsonl", rows)
    words = ["--method", method, "--data", "data.jsonl", "--json", *SAID, "--steps", "4"]
    status, out, err = train(*words, "--out", "whole")
    assert status == 0, err
    losses = json.loads(out)["losses"]
    saving = [*words, "--checkpoint", "saved", "--out", "tuned"]
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 2)
        status, out, err = train(*saving, "--resume")
    assert status == 128 + signal.SIGTERM and "No checkpoint in saved: starting fresh" in err
    assert json.loads(out)["losses"] == losses[:2] and not Path("tuned").exists()
    assert [each.name for each in Path("saved").glob("checkpoint-*")] == ["checkpoint-2"]

    status, _, err = train(*saving)
    assert status == 2 and "saved holds a checkpoint already" in err
    status, _, err = train(*saving, "--resume", "--beta", "0.2")
    assert status == 2 and "made with --beta 0.3 (now 0.2)" in err
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preferences, "_fingerprint_of", lambda model: "another")
        status, _, err = train(*saving, "--resume")
    assert status == 2 and "made with a --model of other weights" in err
    status, _, err = train("--data", "data.jsonl", "--checkpoint", "saved", "--overwrite")
    assert status == 2 and "saved is of a job with a --method that this one lacks" in err

    status, out, err = train(*saving, "--resume")
    assert status == 0, err
    assert json.loads(out)["losses"] == losses[2:] and json.loads(out)["first_step"] == 2
    assert_equal(tmp_path / "tuned", tmp_path / "whole")
    status, _, err = train(*saving, "--resume", "--steps", "3", "--warmup-steps", "1")
    assert status == 2 and "is at step 4, past --steps 3" in err and "Give more" in err


@pytest.mark.parametrize("method", ["dpo", "kto", "simpo"])
@pytest.mark.parametrize("rank", [None, "4"], ids=["whole", "adapters"])
def test_a_job_that_ended_is_saved_without_another_step(method, rank, train, tmp_path):
    """Method: a job of a checkpoint alone, whose last step is inside an epoch, goes on with --out
    and writes what a job with --out wrote. Twin: another learning rate writes other tensors."""
    if rank and method != "dpo":
        pytest.skip("one kind of trainer shows it")
    save_rows(tmp_path / "data.jsonl", METHODS[method][3])
    words = ["--method", method, "--data", "data.jsonl", *SAID, "--steps", "2", "--accumulate", "1"]
    words += ["--lora-rank", rank] if rank else []
    assert train(*words, "--out", "whole")[0] == 0
    assert train(*words, "--out", "other", "--lr", "0.02")[0] == 0
    assert train(*words, "--checkpoint", "saved")[0] == 0
    status, out, err = train(*words, "--checkpoint", "saved", "--resume", "--out", "out", "--json")
    assert status == 0 and "Nothing is left to do" in err, err
    assert (told := json.loads(out))["losses"] == [] and told["steps"] == told["first_step"] == 2
    assert_equal(tmp_path / "out", tmp_path / "whole")
    with pytest.raises(AssertionError):
        assert_equal(tmp_path / "out", tmp_path / "other")


def stop_after(patch: pytest.MonkeyPatch, steps: int) -> None:
    """Has a job find a SIGTERM after so many steps."""
    from infinity.tools.train.interrupt import Interrupt
    from infinity.tools.train.preferences import PreferenceJob

    train = PreferenceJob.train

    def stopped(job: PreferenceJob, interrupt: Interrupt, *more: Any) -> None:
        class Stop(transformers.TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, *rest: Any, **more: Any) -> None:
                if state.global_step == steps - 1:
                    interrupt.signum = int(signal.SIGTERM)

        job.trainer.add_callback(Stop())
        train(job, interrupt, *more)

    patch.setattr(PreferenceJob, "train", stopped)


def test_checkpoints_of_others_are_left_alone(train):
    """A trainer keeps the last of its checkpoints alone. Twin: a new folder."""
    save_rows(Path("data.jsonl"), PAIRED)
    theirs = Path("run/checkpoint-500")
    theirs.mkdir(parents=True)
    words = ["--method", "dpo", "--data", "data.jsonl", *SAID, "--steps", "1", "--checkpoint"]
    for way in ((), ("--overwrite",), ("--resume",)):
        status, _, err = train(*words, "run", *way)
        assert (
            status == 2
            and "has checkpoints of another kind" in err
            and "Give another folder" in err
        )
    assert theirs.is_dir() and [*Path("run").iterdir()] == [theirs]
    status, out, err = train(*words, "new", "--checkpoint-every", "1")
    assert status == 0 and "The trained model is in new/checkpoint-1" in out, err
    assert tensors(Path("new/checkpoint-1"))
    assert {each.name for each in Path("new").iterdir()} == {"checkpoint-1", "infinity-train.json"}


# --- several ranks ---


@pytest.mark.slow
def test_two_ranks_learn_what_one_learns_of_the_same_samples(base, tmp_path, monkeypatch):
    """One rank with two micro-batches in a step, beside two ranks with one each. Twin: one alone
    with one."""
    monkeypatch.chdir(tmp_path)
    save_rows(tmp_path / "data.jsonl", PAIRED + PAIRED[:3])  # the last one is held out
    words = ["train", "--model", str(base), "--method", "dpo", "--data", "data.jsonl", *SAID]
    words += ["--params", "host", "--optimizer", "host", "--steps", "2"]
    done = run_torchrun(2, ["-m", "infinity", *words, "--accumulate", "1", "--out", "two"])
    assert done.returncode == 0, done.stderr
    assert infinity.tools.cli.main([*words, "--out", "one"]) == 0
    assert infinity.tools.cli.main([*words, "--accumulate", "1", "--out", "half"]) == 0
    one, two, half = (tensors(Path(name)) for name in ("one", "two", "half"))
    assert all(torch.allclose(one[name], value, atol=1e-6) for name, value in two.items())
    assert not all(torch.allclose(half[name], value, atol=1e-6) for name, value in two.items())


@pytest.mark.slow
def test_a_job_goes_on_with_another_number_of_ranks(base, train, tmp_path, monkeypatch):
    """Method: interrupted on one rank after two of four steps, and continued on two with the same
    options: the samples of each step stay. Twin: the weights that were saved are not those of the
    end."""
    monkeypatch.chdir(tmp_path)
    save_rows(tmp_path / "data.jsonl", PAIRED + PAIRED[:3])
    words = ["--method", "dpo", "--data", "data.jsonl", *SAID, "--steps", "4"]
    words += ["--params", "host", "--optimizer", "host"]
    assert train(*words, "--out", "whole")[0] == 0
    saving = [*words, "--checkpoint", "saved", "--out", "tuned", "--resume"]
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 2)
        assert train(*saving)[0] == 128 + signal.SIGTERM
    half = tensors(Path("saved/checkpoint-2"))
    done = run_torchrun(2, ["-m", "infinity", "train", "--model", str(base), *saving])
    assert done.returncode == 0, done.stderr
    assert "2 ranks in place of 1: --accumulate 1 keeps" in done.stdout
    whole, tuned = tensors(Path("whole")), tensors(Path("tuned"))
    assert all(torch.allclose(whole[name], value, atol=1e-6) for name, value in tuned.items())
    assert not all(torch.allclose(half[name], value, atol=1e-6) for name, value in tuned.items())


def test_ranks_that_do_not_divide_a_step_are_refused_with_both_numbers(monkeypatch):
    """Method: a checkpoint of four ranks with six micro-batches a step. Twin: ranks that do."""
    from infinity.tools.train import train as command

    saved = {"data_ranks": 4, "fixed_values": {"accumulate": 6}}
    monkeypatch.setattr(command, "saved_extra", lambda checkpoint: saved)
    args = SimpleNamespace(checkpoint=Path("saved"), accumulate=1)
    lines: list[str] = []
    console = SimpleNamespace(print=lines.append)
    with pytest.raises(UsageError, match="6 micro-batches, which 5 ranks .* on 4 ranks"):
        command._divide_steps(args, SimpleNamespace(data_count=5), console)
    command._divide_steps(args, SimpleNamespace(data_count=3), console)
    assert args.accumulate == 2 and lines == [
        "3 ranks in place of 4: --accumulate 2 keeps the samples of a step"
    ]
