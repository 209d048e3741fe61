"""`infinity eval --tasks`: lm-eval's scores of a model that is streamed are those of the plain one,
with tasks of one's own and without a network."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from lazily import need
from safetensors.torch import load_file, save_file

need("transformers", "datasets", "lm_eval")

import transformers
from chatty import PAIRS, save_base, save_rows

from infinity.tools.cli import main

SETTINGS = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
"""
CHOICES = """\
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_choice: ["{{good}}", "no."]
doc_to_target: 0
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
ROLLING = """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{q}} {{good}}"
metric_list: [{metric: byte_perplexity}, {metric: word_perplexity}]
"""
WRITTEN = """\
output_type: generate_until
doc_to_text: !function own.asked
doc_to_target: "{{good}}"
generation_kwargs: {until: ["<|end|>"], max_gen_toks: 4, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
TASKS = "sums.yaml,mine/rolling.yaml,written"
FILES = {
    "sums.yaml": CHOICES,
    "mine/rolling.yaml": ROLLING,
    "mine/written.yaml": WRITTEN,
    "mine/gone.yaml": CHOICES,
    "mine/unsafe.yaml": f"{WRITTEN}unsafe_code: true\n",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model and three unlike tasks: of choices, of whole texts, of what the model writes. Others
    have no data, or run code."""
    place = tmp_path_factory.mktemp("tasks")
    save_base(place / "base")
    rows = [{"q": question, "good": answer} for question, answer in PAIRS[:8]]
    save_rows(place / "sums.jsonl", rows)
    (place / "mine").mkdir()
    (place / "swap").mkdir()
    (place / "mine" / "own.py").write_text("def asked(doc):\n    return doc['q'] + '='\n")
    for name, text in FILES.items():
        data = place / ("gone.jsonl" if "gone" in name else "sums.jsonl")
        head = SETTINGS.format(name=Path(name).stem, data=data)
        (place / name).write_text(head + text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("HF_DATASETS_CACHE", str(place / "cache"))
        yield place


@pytest.fixture
def evaluate(place, capsys):
    """Status, stdout and stderr of `infinity eval` of the model."""

    def run(*words: str, model: str = "base") -> tuple[int, str, str]:
        capsys.readouterr()
        status = main(["eval", model, *words])
        return status, *capsys.readouterr()

    return run


def plain_scores(place: Path, names: list[str], **how) -> dict:
    """lm-eval's own, of the model as transformers alone loads it."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model = transformers.AutoModelForCausalLM.from_pretrained(place / "base").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(place / "base")
    asked = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4)
    manager = TaskManager(include_path=str(place / "mine"), include_defaults=False)
    found = lm_eval.simple_evaluate(
        asked, tasks=names, task_manager=manager, log_samples=False, **how
    )
    return json.loads(json.dumps(found["results"]))


def test_scores_of_a_streamed_model_are_those_of_the_plain_one(place, evaluate):
    """Method: three unlike tasks, by path and by name, over lm-eval's own model of the same folder.
    Twin: a model whose weights differ has other scores."""
    expected = plain_scores(place, TASKS.split(","))
    assert set(expected) == {"sums", "rolling", "written"}
    words = ["--tasks", TASKS, "--include", "mine", "--json"]
    for home in (["--params", "nvme", "--nvme-path", "swap"], ["--params", "host"]):
        status, out, err = evaluate(*words, *home)
        assert status == 0, err
        assert json.loads(out)["tasks"] == expected
    shutil.copytree("base", "other")
    weights = load_file("other/model.safetensors")
    weights["model.norm.weight"] = torch.linspace(-3, 3, 32)
    save_file(weights, "other/model.safetensors", {"format": "pt"})
    found = json.loads(evaluate(*words, model="other")[1])["tasks"]
    assert found["rolling"] != expected["rolling"]


def test_options_of_lm_eval_are_passed_on(place, evaluate):
    """Examples before each question, fewer questions, and the chat template; also the table. Twin:
    without them the object is another."""
    how = {"num_fewshot": 2, "limit": 3, "apply_chat_template": True}
    words = ["--num-fewshot", "2", "--limit", "3", "--apply-chat-template"]
    status, out, err = evaluate("--tasks", "sums.yaml", *words, "--json")
    assert status == 0, err
    found = json.loads(out)
    assert found["tasks"] == plain_scores(place, ["sums.yaml"], **how)
    assert found["fewshot"] == {"sums": 2} and found["samples"]["sums"]["effective"] == 3
    status, out, err = evaluate("--tasks", "sums.yaml")
    assert status == 0, err
    assert [line.split()[:3] for line in out.splitlines()] == [
        ["task", "examples", "metric"],
        ["sums", "0", "acc"],
    ]


def test_an_unknown_task_is_told_with_near_names(place, evaluate, monkeypatch):
    """Twin: a pattern that finds some. lm-eval's own thousands are left out, which take seconds."""
    from lm_eval import tasks

    class Own(tasks.TaskManager):
        def __init__(self, include_path=None, include_defaults=False):
            super().__init__(include_path=include_path, include_defaults=False)

    monkeypatch.setattr(tasks, "TaskManager", Own)
    status, out, err = evaluate("--tasks", "writen", "--include", "mine")
    assert (status, out) == (2, "")
    assert "knows no task writen: did you mean written" in err and "lm-eval ls tasks" in err
    status, out, err = evaluate("--tasks", "roll*", "--include", "mine", "--limit", "1", "--json")
    assert status == 0 and set(json.loads(out)["tasks"]) == {"rolling"}, err


@pytest.mark.parametrize(
    ("words", "cause", "remedy"),
    [
        ("mine/gone.yaml", "cannot load mine/gone.yaml: ", "downloaded once, with a network"),
        ("unsafe --include mine", "unsafe runs code that", "--confirm-run-unsafe-code"),
        ("own.yaml", "cannot load own.yaml", "downloaded once"),
    ],
)
def test_a_task_that_cannot_run_is_told_before_the_model_is_read(
    words, cause, remedy, evaluate, monkeypatch
):
    """Twin: with what is missing, weights are read."""
    from infinity.tools.eval import evaluate as module

    def opened(*given, **how):
        raise RuntimeError("the weights are read")

    monkeypatch.setattr(module, "opened", opened)
    Path("own.yaml").write_text("output_type: multiple_choice\n")
    status, out, err = evaluate("--tasks", *words.split())
    assert (status, out) == (2, "") and cause in err and remedy in err, err
    with pytest.raises(RuntimeError, match="weights are read"):
        evaluate("--tasks", "unsafe", "--include", "mine", "--confirm-run-unsafe-code")


def test_a_model_without_a_tokenizer_cannot_be_asked(evaluate):
    """Twin: with it, the same folder can."""
    shutil.copytree("base", "mute")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        Path("mute", name).rename(Path(name))
    status, _, err = evaluate("--tasks", "sums.yaml", model="mute")
    assert status == 2 and "mute has no tokenizer" in err
    for name in ("tokenizer.json", "tokenizer_config.json"):
        Path(name).rename(Path("mute", name))
    assert evaluate("--tasks", "sums.yaml", "--limit", "1", model="mute")[0] == 0


def test_without_lm_eval_the_command_says_what_to_install(evaluate, monkeypatch):
    """Twin: loss and perplexity need no lm-eval."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    status, _, err = evaluate("--tasks", "sums.yaml")
    assert status == 2 and "pip install lm-eval" in err
    Path("text.txt").write_text("To be, or not to be. " * 20)
    assert evaluate("--data", "text.txt")[0] == 0


def test_an_adapter_is_asked_over_its_base(evaluate, place):
    """Method: an adapter whose product is 0 scores as its base. Twin: one of other weights."""
    peft = pytest.importorskip("peft")
    model = transformers.AutoModelForCausalLM.from_pretrained("base")
    model.config._name_or_path = str(place / "base")
    tuned = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "down_proj"]))
    tuned.peft_config["default"].base_model_name_or_path = str(place / "base")
    tuned.save_pretrained("zero")
    for name, param in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param)
    tuned.save_pretrained("one")
    words = ["--tasks", "mine/rolling.yaml", "--json"]
    base, zero, one = (
        json.loads(evaluate(*words, model=model)[1])["tasks"] for model in ("base", "zero", "one")
    )
    assert base == zero != one
