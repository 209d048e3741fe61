"""`infinity train` of folders whose model is more than text: the class and the tensors that were
brought come out, or the class is refused by its name."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import multimodal
import pytest
import torch
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")
pytest.importorskip("rich")

import infinity.tools.cli
from infinity.errors import ConfigError
from infinity.tools.train import classes

JOB = (
    "train --model base --data text.txt --nvme-path nvme --steps 1 --batch-size 1"
    " --sequence-length 8 --lr 0.01 --eval-batches 1 --sample-bytes 1 --dtype fp32 --threads 1"
)


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    Path("nvme").mkdir()
    return tmp_path


def run(words: str) -> int:
    return infinity.tools.cli.main(shlex.split(words))


def tensors(folder: str) -> dict[str, torch.Tensor]:
    return load_file(Path(folder, "model.safetensors"))


def class_in(folder: str) -> str:
    return json.loads(Path(folder, "config.json").read_text())["architectures"][0]


@pytest.mark.parametrize(
    ("kind", "home", "stays"),
    [
        ("qwen3_5", "nvme", ["visual"]),
        ("mllama", "host", ["vision_model", "layers.1.", "multi_modal_projector"]),
        ("gemma3", "device", ["vision_tower", "multi_modal_projector"]),
    ],
)
def test_a_folder_of_images_and_text_keeps_its_class_and_tensors(kind, home, stays, place, capsys):
    """Trains a step at each home, and compares class, names and values of both folders. Without the
    class that the folder names, transformers builds a model of fewer tensors."""
    multimodal.save(kind, Path("base"))
    extra = torch.ones(3, 2)  # as layers that predict further tokens, which the class leaves out
    save_file(
        tensors("base") | {"mtp.fc.weight": extra}, "base/model.safetensors", {"format": "pt"}
    )
    saved = " --checkpoint saved" if kind == "qwen3_5" else ""
    assert run(f"{JOB} --params {home} --optimizer {home} --out out{saved}") == 0
    told, before, after = capsys.readouterr().out, tensors("base"), tensors("out")
    assert before.keys() == after.keys() and class_in("out") == class_in("base")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    frozen = {name for name in before if any(part in name for part in (*stays, "mtp."))}
    assert frozen and changed == before.keys() - frozen
    assert all(part.rstrip(".") in told for part in stays) and "mtp.fc.weight" in told
    assert Path("out/preprocessor_config.json").read_text() == '{"size": 28}'
    loaded, info = transformers.AutoModelForImageTextToText.from_pretrained(
        "out", output_loading_info=True
    )
    assert not info["missing_keys"] and type(loaded).__name__ == class_in("base")
    if kind == "qwen3_5":
        for given in ("", " --model base"):  # by default they come from where they were
            assert run(f"export saved exported{given} --overwrite") == 0
            assert tensors("exported").keys() == before.keys()
            assert class_in("exported") == class_in("base")
        half = transformers.AutoModelForCausalLM.from_config(loaded.config)
        assert type(half) is not type(loaded) and len(half.state_dict()) < len(loaded.state_dict())


def test_tensors_without_a_place_are_exported_or_their_folder_is_asked_for(place, capsys):
    """Of a model of text, after its folder has moved, and with the folder of a model that lacks
    them: nothing is written. Twin: its own folder, at the new place."""
    multimodal.save("qwen3_5", Path("base"))
    extra = {f"mtp.{name}.weight": torch.ones(3, 2) for name in ("fc", "norm", "a", "b")}
    shutil.copytree("base", "other")
    save_file(tensors("base") | extra, "base/model.safetensors", {"format": "pt"})
    assert run(f"{JOB} --checkpoint saved") == 0
    Path("base").rename("moved")
    for given in ("", " --model other"):
        assert run(f"export saved exported{given}") == 2
        told = capsys.readouterr().err
        assert "4 tensors" in told and "mtp.fc.weight" in told and "--model DIR" in told
        assert not Path("exported").exists()
    assert run("export saved exported --model moved") == 0
    assert extra.keys() <= tensors("exported").keys() == tensors("moved").keys()


def test_adapters_are_added_to_what_text_touches(place, capsys):
    """Trains adapters of a model whose layers for images lie between those for text, and merges
    them: no tensor of images changes, and all that text touches does."""
    multimodal.save("mllama", Path("base"))
    assert run(f"{JOB} --lora 2 --lr 0.1 --params host --out out") == 0
    names = list(load_file("out/adapter_model.safetensors"))
    assert any(".layers.0." in name for name in names)
    assert not any("vision_model" in name or ".layers.1." in name for name in names)
    assert run("export base merged --merge out") == 0
    before, after = tensors("base"), tensors("merged")
    assert before.keys() == after.keys() and class_in("merged") == class_in("base")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all("layers.0." in name or "layers.2." in name for name in changed)
    assert Path("merged/preprocessor_config.json").is_file()


@pytest.mark.parametrize("kind", ["idefics3", "paligemma", "qwen2_vl"])
def test_what_text_touches_is_what_a_step_gives_gradients(kind, tmp_path):
    """Compares the names found without values with the gradients of a real step."""
    found = classes.touched(multimodal.config_of(kind), tmp_path, trust=False)
    model, tokens = multimodal.build(kind).train(), torch.ones(1, 8, dtype=torch.long)
    model(input_ids=tokens, labels=tokens).loss.backward()
    given = {name for name, param in model.named_parameters() if param.grad is not None}
    assert found == given and len(given) < sum(1 for _ in model.parameters())
    classes.freeze_untouched(model, found, print)
    assert {name for name, param in model.named_parameters() if param.requires_grad} == given


def test_a_model_of_text_alone_trains_whole(tmp_path):
    """Asks for what text touches of a model that has nothing else."""
    config = transformers.LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    assert classes.touched(config, tmp_path, trust=False) is None


REFUSED = {
    "T5ForConditionalGeneration": ({"model_type": "t5"}, "an encoder with a decoder"),
    "LlamaForSequenceClassification": ({"model_type": "llama"}, "no head for that"),
    "Qwen3Model": ({"model_type": "qwen3"}, "no head for that"),
    "WhisperForConditionalGeneration": ({"model_type": "whisper"}, "an encoder with a decoder"),
    "Wav2Vec2ForCTC": ({"model_type": "wav2vec2"}, "no head for that"),
    "BertForMaskedLM": ({"model_type": "bert"}, "no head for that"),
    "Florence2ForConditionalGeneration": ({"model_type": "florence2"}, "an encoder with a decoder"),
}


@pytest.mark.parametrize("command", ["train", "plan", "generate"])
def test_what_does_not_continue_text_is_refused_by_its_name(command, place, capsys):
    """Gives the configurations of seven classes, and of one that is taken."""
    Path("other").mkdir()
    Path("other/model.safetensors").touch()
    for name, (fields, why) in REFUSED.items():
        Path("other/config.json").write_text(json.dumps(fields | {"architectures": [name]}))
        words = {
            "train": JOB.replace("base", "other") + " --out out",
            "plan": "plan --model other",
            "generate": "generate other --prompt hi",
        }[command]
        assert run(words) == 2
        told = capsys.readouterr().err
        assert name in told and why in told and "infinity.wrap_model" in told
        assert not Path("out").exists()
    for taken in ("LlamaForCausalLM", None, "LLaMAForCausalLM"):  # the last as of the first files
        config = transformers.LlamaConfig(architectures=taken and [taken])
        assert classes.auto_class(config, place) is transformers.AutoModelForCausalLM


def test_a_model_that_needs_an_image_is_refused(tmp_path):
    """Asks what text touches of a class whose forward has no default for its image."""
    config = transformers.Blip2Config(
        vision_config=multimodal.VISION,
        qformer_config={"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4},
        text_config={"model_type": "opt", "hidden_size": 32, "num_hidden_layers": 1}
        | {"ffn_dim": 32, "num_attention_heads": 4, "word_embed_proj_dim": 32},
        architectures=["Blip2ForConditionalGeneration"],
    )
    with pytest.raises(
        ConfigError, match="Blip2ForConditionalGeneration cannot be trained on text"
    ):
        classes.touched(config, tmp_path, trust=False)
