"""`infinity generate`: a saved model, or an adapter, continues and chats as transformers alone has
it, from any home of its weights."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")

from chatty import ROWS, save_base, save_rows

import infinity.tools.cli
from infinity.tools.generate import generate as generate_module

QUESTION = "What is 1+2?"
GREEDY = ("--temperature", "0", "--max-new-tokens", "12")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return save_base(tmp_path_factory.mktemp("chatty") / "base")


@pytest.fixture
def generate(base, tmp_path, monkeypatch, capsys):
    """Status, stdout and stderr of `infinity generate`, with these lines on stdin."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "swap").mkdir()

    def run(*words: str, model: Path | str = base, typed: str = "") -> tuple[int, str, str]:
        capsys.readouterr()
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        status = infinity.tools.cli.main(["generate", str(model), *map(str, words)])
        return status, *capsys.readouterr()

    return run


def expected(folder: Path, messages: list[dict] | str, model=None) -> str:
    """What transformers alone writes."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = model or transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    if isinstance(messages, str):
        tokens = tokenizer(messages, return_tensors="pt")["input_ids"]
    else:
        tokens = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
    with torch.no_grad():
        found = model.generate(tokens, do_sample=False, max_new_tokens=12)[0]
    return tokenizer.decode(found[tokens.shape[1] :], skip_special_tokens=True)


def asked(*texts: str) -> list[dict]:
    roles = ("user", "assistant")
    return [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]


@pytest.mark.parametrize("home", ["device", "host", "nvme"])
def test_a_prompt_is_answered_as_transformers_answers_it(home, base, generate):
    """As a message, and continued as it is."""
    words = [*GREEDY, "--params", home, "--json", *(["--nvme-path", "swap"] * (home == "nvme"))]
    for raw, messages in (((), asked(QUESTION)), (("--raw",), QUESTION)):
        status, out, err = generate("--prompt", QUESTION, *words, *raw)
        assert status == 0, err
        assert json.loads(out) == {
            "prompt": QUESTION,
            "answer": expected(base, messages),
        }


def test_a_prompt_may_come_from_a_pipe_and_is_answered_as_it_is_written(base, generate):
    """Twin: the answer as one object is the same."""
    status, out, err = generate("--prompt", "-", *GREEDY, typed=QUESTION)
    assert status == 0, err
    whole = json.loads(generate("--prompt", QUESTION, *GREEDY, "--json")[1])["answer"]
    assert out == f"{generate_module.printable(whole)}\n"


def test_a_folder_with_more_tensors_than_its_class_answers(base, generate, tmp_path):
    """Layers that the class leaves out change nothing. Twin: a folder with fewer is refused."""
    weights = load_file(base / "model.safetensors")
    made = {
        "more": weights | {"model.layers.2.extra.weight": torch.ones(2)},
        "less": {name: each for name, each in weights.items() if "layers.1.mlp.up" not in name},
    }
    for name, tensors in made.items():
        shutil.copytree(base, tmp_path / name)
        save_file(tensors, tmp_path / name / "model.safetensors", {"format": "pt"})
    words = ("--prompt", QUESTION, *GREEDY)
    assert generate(*words, model="more")[:2] == generate(*words)[:2]
    status, _, err = generate(*words, model="less")
    assert status == 2 and "That is not a trained model" in err


def test_a_chat_remembers_what_was_said(base, generate):
    """An empty line ends it. Twin: the second answer alone is another."""
    status, out, err = generate("--chat", *GREEDY, "--system", "be brief", typed="hello\nhow?\n\n")
    assert status == 0, err
    said = [{"role": "system", "content": "be brief"}, *asked("hello")]
    first = expected(base, said)
    second = expected(base, [*said, *asked("x", first)[1:], *asked("how?")])
    assert out == "".join(f"{generate_module.printable(text)}\n" for text in (first, second))


def test_an_interrupt_ends_an_answer_and_not_the_chat(base, generate, monkeypatch):
    """The question is taken back."""
    answers = iter([KeyboardInterrupt, "fine"])
    seen = []

    def answer(self, messages, **how):
        seen.append([message["content"] for message in messages])
        if (found := next(answers)) is KeyboardInterrupt:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(generate_module.Speaker, "answer", answer)
    status, _, err = generate("--chat", typed="one\ntwo\n")
    assert status == 0 and "(interrupted)" in err
    assert seen == [["one"], ["two"]]


def test_an_adapter_answers_over_its_base(base, generate, tmp_path):
    """Trained by the command line and saved as an adapter, which names its base."""
    peft = pytest.importorskip("peft")
    pytest.importorskip("trl")
    rows = [ROWS["messages"](QUESTION, "3.")] * 40
    save_rows(tmp_path / "chat.jsonl", rows)
    words = "--data chat.jsonl --lora-rank 4 --out adapter --dtype fp32 --lr 0.05".split()
    status = infinity.tools.cli.main(["train", "--model", str(base), *words, "--sample-bytes", "0"])
    assert status == 0
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()
    status, out, err = generate("--prompt", QUESTION, *GREEDY, "--json", model="adapter")
    assert status == 0, err
    plain = transformers.AutoModelForCausalLM.from_pretrained(base).eval()
    adapted = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    answer = json.loads(out)["answer"]
    assert answer == expected(base, asked(QUESTION), adapted)
    assert answer != json.loads(generate("--prompt", QUESTION, *GREEDY, "--json")[1])["answer"]


def test_a_checkpoint_becomes_a_model_that_can_be_talked_to(base, generate, tmp_path):
    """With its tokenizer and chat template. Twin: a checkpoint of a script has none, and
    ``--model`` brings it."""
    save_rows(tmp_path / "chat.jsonl", [ROWS["messages"](QUESTION, "3.")] * 20)
    words = f"train --model {base} --data chat.jsonl --steps 1 --batch-size 2 --checkpoint saved"
    assert infinity.tools.cli.main(words.split()) == 0
    assert infinity.tools.cli.main("export saved model".split()) == 0
    answer = expected(tmp_path / "model", asked(QUESTION))
    words = ("--prompt", QUESTION, *GREEDY, "--json")
    assert json.loads(generate(*words, model="model")[1])["answer"] == answer
    shutil.rmtree("saved/model")
    assert infinity.tools.cli.main("export saved bare".split()) == 0
    assert "has no tokenizer" in generate("--prompt", QUESTION, model="bare")[2]
    assert infinity.tools.cli.main(f"export saved whole --model {base}".split()) == 0
    assert json.loads(generate(*words, model="whole")[1])["answer"] == answer


def test_a_checkpoint_of_adapters_becomes_an_adapter(base, generate, tmp_path):
    """Which answers over its base as the one of ``--out`` does. Twin: one that a script saved has
    no configuration of adapters, and is refused."""
    pytest.importorskip("peft")
    save_rows(tmp_path / "chat.jsonl", [ROWS["messages"](QUESTION, "3.")] * 20)
    words = (
        f"train --model {base} --data chat.jsonl --steps 2 --batch-size 2 --lora-rank 2 --lr 0.1"
    )
    assert infinity.tools.cli.main(f"{words} --checkpoint saved --out whole".split()) == 0
    assert infinity.tools.cli.main("export saved adapter".split()) == 0
    ask = ("--prompt", QUESTION, *GREEDY, "--json")
    answers = [json.loads(generate(*ask, model=name)[1]) for name in ("whole", "adapter")]
    assert answers[0] == answers[1] != json.loads(generate(*ask)[1])
    shutil.rmtree("saved/model")
    assert infinity.tools.cli.main("export saved other".split()) == 2
    assert not Path("other").exists()


def test_a_checkpoint_is_no_model(generate, tmp_path):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "manifest.json").write_text("{}")
    status, _, told = generate("--prompt", "hi", model="saved")
    assert status == 2 and "infinity export saved OUT" in told


def test_a_model_without_its_weights_is_refused(base, generate, tmp_path):
    """Twin of a training, which starts the missing ones from its seed."""
    shutil.copytree(base, tmp_path / "half")
    save_file({"model.norm.weight": torch.ones(32)}, tmp_path / "half" / "model.safetensors")
    status, _, told = generate("--prompt", "hi", model="half")
    assert status == 2 and "not a trained model" in told


def test_a_long_chat_forgets_its_oldest_turns(generate):
    """Twin: one message that is too long alone is refused."""
    typed = "What is 1+2?\n" * 12
    status, out, told = generate("--chat", "--max-new-tokens", "2", typed=typed)
    assert status == 0 and out.count("\n") >= 12 and "the oldest turn is forgotten" in told
    status, _, told = generate("--chat", "--max-new-tokens", "2", typed="x" * 200 + "\n")
    assert status == 2 and "give a shorter prompt" in told


def test_what_is_drawn_follows_from_the_seed(generate):
    """Twin: another seed."""
    words = ("--prompt", QUESTION, "--temperature", "2", "--max-new-tokens", "24", "--json")
    one, same, other = (
        json.loads(generate(*words, "--seed", seed)[1])["answer"] for seed in (1, 1, 2)
    )
    assert one == same != other


REFUSED = {
    "neither": ((), "give --prompt TEXT or --chat"),
    "both": (("--chat", "--prompt", "x"), "give --prompt TEXT or --chat, not both"),
    "raw chat": (("--chat", "--raw"), "--raw and --json are for --prompt"),
    "chat as JSON": (("--chat", "--json"), "--raw and --json are for --prompt"),
    "nothing": (("--prompt", ""), "the prompt is empty"),
    "cold": (("--prompt", "x", "--temperature", "-1"), "0 or more needed"),
    "all": (("--prompt", "x", "--top-p", "1.5"), "more than 0 and at most 1"),
    "too long": (("--prompt", "x" * 200), "the model takes 96 with the answer"),
    "no swap folder": (("--prompt", "x", "--params", "nvme", "--nvme-path", "none"), "none"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_wrong_uses_are_refused_by_name(what, generate):
    words, said = REFUSED[what]
    status, out, err = generate(*words)
    assert status == 2 and out == "" and said in err and "Traceback" not in err, err
    assert err.count("infinity generate:") == 1


@pytest.mark.parametrize("content", ["{", "[]", '{"base_model_name_or_path": 7}', "{}", "BASE"])
def test_a_damaged_adapter_is_refused(content, base, generate, tmp_path):
    """The last one names its base, and has nothing else."""
    pytest.importorskip("peft")
    (tmp_path / "adapter").mkdir()
    content = json.dumps({"base_model_name_or_path": str(base)}) if content == "BASE" else content
    (tmp_path / "adapter" / "adapter_config.json").write_text(content)
    status, out, err = generate("--prompt", "x", model="adapter")
    assert status == 2 and out == "" and "adapter" in err and "Traceback" not in err, err


def test_models_that_cannot_be_talked_to_are_refused(generate, tmp_path, monkeypatch):
    """No such folder or name, no tokenizer, no chat template."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    status, _, err = generate("--prompt", "x", model="nobody/nothing")
    assert status == 2 and "No such folder: nobody/nothing" in err and "hf download" in err
    folder = save_base(tmp_path / "plain", template=None)
    status, _, err = generate("--chat", model=folder)
    assert status == 2 and "has no chat template" in err
    assert generate("--prompt", "x", *GREEDY, model=folder)[0] == 0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    status, _, err = generate("--prompt", "x", model=folder)
    assert status == 2 and "has no tokenizer" in err
