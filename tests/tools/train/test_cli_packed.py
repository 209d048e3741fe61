"""`infinity train --lora --quantize`, and what follows it: export, generate, a folder that is
packed already. Through `infinity.tools.cli.main` in this process.

base      a folder of a model of 2 layers, 64 wide, whose linear layers are just large enough to be
          packed, with a tokenizer of bytes
packed    the same model as transformers packs it with bitsandbytes, with the statistics packed too
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lazily import Lazily
from marks import few
from safetensors.torch import load_file

transformers = pytest.importorskip("transformers")
pytest.importorskip("rich")

from chatty import save_base
from gguf_models import write
from packed_llamas import differing, in_form, pack_folder
from scaled import scale_fp8

import infinity
import infinity.tools.cli
from infinity.core.machine import limits
from infinity.ext.packed import quantize as quantize_module
from infinity.tools.train import compute

peft, bitsandbytes, torchao = Lazily("peft"), Lazily("bitsandbytes"), Lazily("torchao")

pytestmark = pytest.mark.filterwarnings("ignore")
SEED, STEPS = 3, 4
KINDS = ("nf4", "int8", "fp8")
LORA = ("--lora",)
QUESTION = "What is 1+2?"
GREEDY = ("--temperature", "0", "--max-new-tokens", "12", "--json")
ADAPTER = "adapter_model.safetensors"
OPTIONS = {
    "--model": "base",
    "--data": "text",
    "--params": "nvme",
    "--optimizer": "nvme",
    "--nvme-path": "nvme",
    "--steps": STEPS,
    "--batch-size": 4,
    "--sequence-length": 32,
    "--lr": 0.01,
    "--warmup-steps": 2,
    "--eval-batches": 2,
    "--sample-bytes": 8,
    "--seed": SEED,
}


def pack(base: Path, folder: Path, **changes: Any) -> Path:
    """Saves a folder as transformers packs it, with the tokenizer of ``base``."""
    pack_folder(base, folder, **changes)
    transformers.AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder with base and packed."""
    folder = tmp_path_factory.mktemp("models")
    base = save_base(folder / "base", width=64)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    model.save_pretrained(base)
    pack(base, folder / "packed")
    return folder


@pytest.fixture
def place(models, tmp_path, monkeypatch) -> Path:
    """A folder with the models, text and a disk; also the current directory. Models train in bf16,
    whatever this processor multiplies fast."""
    monkeypatch.setattr("infinity.tools.train.train.multiplies_bf16", lambda device: True)
    monkeypatch.chdir(tmp_path)
    for name in ("base", "packed"):
        Path(name).symlink_to(models / name)
    Path("text").mkdir()
    Path("text", "0.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    Path("nvme").mkdir()
    return tmp_path


def train(*flags: str, **changes: Any) -> int:
    """Exit status of the tiny job. A change `batch_size=2` is `--batch-size 2`; `None` leaves the
    option out."""
    options = OPTIONS | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    pairs = [
        str(word)
        for option, value in options.items()
        if value is not None
        for word in (option, value)
    ]
    return infinity.tools.cli.main(["train", *flags, *pairs])


@pytest.fixture
def report(place, capsys) -> Callable[..., dict]:
    """Runs the job to its end and returns its JSON report."""

    def run(*flags: str, **changes: Any) -> dict:
        capsys.readouterr()
        status = train("--json", *flags, **changes)
        captured = capsys.readouterr()
        assert status == 0, captured.err
        return json.loads(captured.out.splitlines()[-1])

    return run


@pytest.fixture
def refused(place, capsys) -> Callable[..., str]:
    """Runs a command that is refused, and returns the one message. Nothing has been written, and no
    step made."""

    def run(command: Callable[[], int]) -> str:
        capsys.readouterr()
        before = sorted(place.rglob("*"))
        assert command() == 2
        captured = capsys.readouterr()
        assert captured.out == "" and "Traceback" not in captured.err
        assert sorted(place.rglob("*")) == before and "held-out" not in captured.err
        return captured.err.strip()

    return run


def exported(checkpoint: str, out: str, *words: str) -> dict[str, torch.Tensor]:
    """Exports, and returns the tensors written."""
    assert infinity.tools.cli.main(["export", checkpoint, out, *words]) == 0
    return load_file(next(Path(out).glob("*.safetensors")))


# --- trained ---


@pytest.mark.parametrize("kind", few(KINDS, 1))
def test_adapters_over_a_quantized_base_train_and_resume_to_the_same_bits(kind, report):
    """Claim: four steps at once, and two and two of a resumed job, have the same losses and the
    same adapters. Twin: the base that is not packed has other losses."""
    whole = report(*LORA, quantize=kind, checkpoint="whole")
    first = report(*LORA, quantize=kind, checkpoint="parts", steps=2)
    # In the warm-up, which jobs of any length begin with.
    assert first["losses"] == whole["losses"][:2]
    rest = report(*LORA, "--resume", quantize=kind, checkpoint="parts")
    assert rest["first_step"] == 2 and rest["losses"] == whole["losses"][2:]
    assert rest["held_out_loss_after"] == whole["held_out_loss_after"]
    assert whole["losses"][-1] < whole["losses"][0]
    assert whole["homes"] == {"params": "nvme", "optimizer": "nvme"}
    assert differing(exported("whole", "a"), exported("parts", "b")) == []
    assert report(*LORA)["losses"] != whole["losses"]


def test_homes_change_no_bit(report):
    """Method: losses and adapters on the host, on the device, and with activations recomputed."""
    expected = report(*LORA, quantize="nf4", out="adapter")
    tensors = load_file(Path("adapter", ADAPTER))
    for number, (flags, changes) in enumerate(
        (
            ((), {"params": "host", "optimizer": "host", "nvme_path": None}),
            ((), {"params": "device", "optimizer": "device", "nvme_path": None}),
            (("--gradient-checkpointing",), {}),
        )
    ):
        out = f"adapter-{number}"
        found = report(*LORA, *flags, quantize="nf4", out=out, **changes)
        assert found["losses"] == expected["losses"]
        assert differing(load_file(Path(out, ADAPTER)), tensors) == []


def test_the_base_is_streamed_and_packed_as_it_is_read(report, monkeypatch):
    """Method: transformers loads no weight, and each layer is packed once of values. Twin: a folder
    that lacks a weight is loaded by transformers."""
    loads, packs = [], []
    load = transformers.AutoModelForCausalLM.from_pretrained
    pack_one = quantize_module.PACKERS["nf4"]
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM,
        "from_pretrained",
        lambda *args, **kwargs: loads.append(args) or load(*args, **kwargs),
    )

    def counted(dtype: torch.dtype, dense: torch.Tensor) -> torch.nn.Module:
        packs.append(dense.is_meta)
        return pack_one(dtype, dense)

    monkeypatch.setitem(quantize_module.PACKERS, "nf4", counted)
    monkeypatch.setattr(compute, "LARGEST_PROBE_NBYTES", 0)  # measured blocks are packed, too
    report(*LORA, quantize="nf4", steps=2)
    assert loads == [] and packs.count(False) == packs.count(True) == 2 * 7
    base = transformers.AutoModelForCausalLM.from_pretrained("base")
    tensors = dict(base.state_dict())
    del tensors["model.layers.0.input_layernorm.weight"]
    loads.clear()
    base.save_pretrained("lacking", state_dict=tensors)
    report(*LORA, quantize="nf4", steps=2, model="lacking")
    assert len(loads) == 1


def test_an_exported_adapter_is_one_of_peft(report):
    """Claim: PeftModel.from_pretrained loads it onto the base, with the bits that --out saves, and
    it changes the logits. It names the base."""
    report(*LORA, quantize="nf4", checkpoint="saved", out="out")
    tensors = exported("saved", "adapter")
    assert sorted(each.name for each in Path("adapter").iterdir())[:2] == [
        "adapter_config.json",
        ADAPTER,
    ]
    assert differing(tensors, load_file(Path("out", ADAPTER))) == []
    named = json.loads(Path("adapter", "adapter_config.json").read_text())
    assert Path(named["base_model_name_or_path"]) == Path("base").resolve()
    base = transformers.AutoModelForCausalLM.from_pretrained("base").eval()
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        before = base(input_ids=tokens).logits
        model = peft.PeftModel.from_pretrained(base, "adapter")
        assert not torch.equal(model(input_ids=tokens).logits, before)
    loaded = peft.get_peft_model_state_dict(model)
    assert differing({name: value.float() for name, value in loaded.items()}, tensors) == []


def test_a_packed_folder_trains_as_the_dense_one_that_is_quantized(report):
    """Claim: the same format of the same weights gives the same losses and adapters, of whatever
    folder. Twin: packed without the statistics it does not."""
    expected = report(*LORA, quantize="nf4", out="quantized")
    found = report(*LORA, model="packed", out="packed-out")
    assert found["losses"] == expected["losses"]
    assert found["held_out_loss_after"] == expected["held_out_loss_after"]
    tensors = [load_file(Path(name, ADAPTER)) for name in ("quantized", "packed-out")]
    assert differing(*tensors) == []
    pack(Path("base"), Path("other"), bnb_4bit_use_double_quant=False)
    assert report(*LORA, model="other")["losses"] != expected["losses"]


def test_an_adapter_is_merged_into_a_packed_folder(report):
    """Claim: `infinity export PACKED OUT --merge ADAPTER` gives a plain model: PEFT's merge into
    what `infinity export PACKED` gives."""
    report(*LORA, model="packed", out="adapter")
    exported("packed", "plain")
    found = exported("packed", "merged", "--merge", "adapter")
    for name in ("plain", "merged"):
        assert "quantization_config" not in json.loads(Path(name, "config.json").read_text())
    plain = transformers.AutoModelForCausalLM.from_pretrained("plain")
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    expected = peft.PeftModel.from_pretrained(plain, "adapter").merge_and_unload().state_dict()
    assert differing(found, expected) == []
    assert len(differing(before, expected)) == 2 * 7


def test_a_folder_of_eight_bits_trains_under_adapters(report, capsys):
    """Claim: what the engine does not stream, transformers loads. It is not exported, and told
    so."""
    folder = pack(Path("base"), Path("eight"), load_in_4bit=False, load_in_8bit=True)
    assert (
        report(*LORA, model=folder)["losses"]
        == (report(*LORA, model=folder, params="host", optimizer="host", nvme_path=None)["losses"])
    )
    capsys.readouterr()
    assert infinity.tools.cli.main(["export", "eight", "plain"]) == 2
    said = capsys.readouterr().err
    assert "give the model that it was made of" in said and len(said.strip().splitlines()) == 1
    assert not Path("plain").exists()


# --- refused ---


@pytest.mark.parametrize(
    ("flags", "changes", "said"),
    [
        ((), {"quantize": "nf4"}, "adapters are: add --lora"),
        (LORA, {"quantize": "nf4", "model": "packed"}, "leave out --quantize nf4"),
        ((), {"model": "packed"}, "but their adapters are: add --lora"),
        (LORA, {"quantize": "nf4", "model": "base/config.json"}, "give --model a folder"),
        (LORA, {"quantize": "nf5"}, "invalid choice: 'nf5' (choose from 'nf4', 'int8', 'fp8')"),
        (("--lora", "--load-in-4bit"), {}, "--quantize nf4"),
    ],
)
def test_what_cannot_be_quantized_is_refused_with_what_to_do(flags, changes, said, refused):
    """Claim: one message, status 2, and nothing written. Twin: the jobs above, which run."""
    message = refused(lambda: train(*flags, checkpoint="saved", **changes))
    assert said in message and len(message.splitlines()) <= 2, message


@pytest.mark.parametrize("other", ["int8", None])
def test_a_job_is_not_resumed_in_another_format(other, report, refused):
    """Claim: refused before data is read, with both formats and what to do. Twin: the same format
    goes on."""
    report(*LORA, quantize="nf4", checkpoint="saved", steps=2)
    command = lambda: train(*LORA, "--resume", quantize=other, checkpoint="saved")
    message = refused(command)
    assert "saved was made with --quantize nf4" in message
    assert f"(now {other or 'without'})" in message and "Give the same options" in message
    assert report(*LORA, "--resume", quantize="nf4", checkpoint="saved")["first_step"] == 2


@pytest.mark.parametrize(
    ("kind", "module", "model"),
    [
        ("nf4", "bitsandbytes", "base"),
        ("int8", "torchao", "base"),
        (None, "bitsandbytes", "packed"),
    ],
)
def test_a_library_that_is_not_installed_is_one_line(kind, module, model, refused, monkeypatch):
    for name in (module, f"{module}.nn", f"{module}.functional", f"{module}.quantization"):
        monkeypatch.setitem(sys.modules, name, None)
    message = refused(lambda: train(*LORA, "--json", quantize=kind, model=model))
    assert message.splitlines()[-1].endswith(f"{module}: pip install 'infinity-engine[packed]'"), (
        message
    )


# --- generated ---


@pytest.fixture
def generate(place, capsys) -> Callable[..., str]:
    """The answer of `infinity generate`."""

    def run(model: str, *words: str) -> str:
        capsys.readouterr()
        status = infinity.tools.cli.main(["generate", model, "--prompt", QUESTION, *GREEDY, *words])
        captured = capsys.readouterr()
        assert status == 0, captured.err
        return json.loads(captured.out)["answer"]

    return run


def answer_of(model: torch.nn.Module) -> str:
    """What transformers alone writes, in the dtype of the model."""
    tokenizer = transformers.AutoTokenizer.from_pretrained("base")
    tokens = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )["input_ids"]
    with torch.no_grad():
        found = in_form(model).eval().generate(tokens, do_sample=False, max_new_tokens=12)[0]
    return tokenizer.decode(found[tokens.shape[1] :], skip_special_tokens=True)


def in_memory(folder: str = "base") -> torch.nn.Module:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return model.requires_grad_(False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_model_answers_as_the_librarys_layers_do(kind, generate):
    """Method: greedy answers, from memory, the host and NVMe. Twin: the model that is not packed
    answers another way."""
    expected = answer_of(infinity.quantize(in_memory(), kind))
    for home in ("device", "host", "nvme"):
        words = ["--params", home, *(["--nvme-path", "nvme"] * (home == "nvme"))]
        assert generate("base", *words, "--quantize", kind) == expected
    assert generate("base") == answer_of(in_memory())
    if kind == "nf4":
        assert generate("base") != expected


def test_a_packed_folder_answers_as_transformers_has_it(generate):
    expected = answer_of(in_memory("packed"))
    assert generate("packed") == expected == generate("base", "--quantize", "nf4")
    assert generate("packed", "--params", "nvme", "--nvme-path", "nvme") == expected


def test_an_adapter_answers_over_a_quantized_base(report, generate):
    """Claim: from any home as in memory, and the base of an adapter may be a packed folder. Twin:
    without the adapter it answers another way."""
    report(*LORA, quantize="nf4", out="adapter", steps=2)
    words = ("--quantize", "nf4")
    found = generate("adapter", *words)
    model = infinity.quantize(in_memory(), "nf4")
    assert found == answer_of(peft.PeftModel.from_pretrained(model, "adapter"))
    assert generate("adapter", *words, "--params", "nvme", "--nvme-path", "nvme") == found
    assert generate("base", *words) != found
    report(*LORA, model="packed", out="over-packed", steps=2)
    assert generate("over-packed") == found


@pytest.mark.parametrize("model", ["packed", "adapter"])
def test_a_packed_folder_is_not_packed_again(model, report, refused):
    """Claim: refused as `infinity train` refuses it."""
    report(*LORA, model="packed", out="adapter", steps=2)
    words = ["generate", model, "--prompt", QUESTION, *GREEDY, "--quantize", "nf4"]
    message = refused(lambda: infinity.tools.cli.main(words))
    assert "packed already: leave out --quantize nf4" in message


@pytest.mark.parametrize("words", [(), LORA, (*LORA, "--quantize", "nf4")], ids=" ".join)
def test_a_scaled_folder_trains_as_the_dense_one(words, report, models):
    """Claim: a folder in FP8 trains with the losses of its dense weights, whole or by adapters, and
    is packed by --quantize. Twin: the model before it was scaled has others."""
    shutil.copytree(models / "base", "scaled")
    scale_fp8(Path("scaled"))
    assert infinity.tools.cli.main(["export", "scaled", "dense"]) == 0
    found = report(*words, model="scaled")["losses"]
    assert found == report(*words, model="dense")["losses"] != report(*words)["losses"]


@pytest.mark.parametrize("words", [(), LORA, (*LORA, "--quantize", "nf4")], ids=" ".join)
def test_a_gguf_file_trains_as_its_dense_weights(words, report):
    """Claim: a folder with a GGUF file and its configuration, whole or by adapters. Twin: another
    type of codes has other losses."""
    found = {}
    for kind in ("Q8_0", "Q4_0"):
        Path(kind).mkdir()
        write(Path(kind, "model.gguf"), "llama", kind)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            kind, gguf_file="model.gguf", dtype=torch.bfloat16
        )
        model.config.save_pretrained(kind)  # which says that it is packed
        del model.config.quantization_config
        dense = transformers.AutoModelForCausalLM.from_config(model.config).to(torch.bfloat16)
        dense.load_state_dict(model.state_dict())
        found[kind] = report(*words, model=kind)["losses"]
    dense.save_pretrained("dense")
    assert found["Q4_0"] == report(*words, model="dense")["losses"] != found["Q8_0"]


def test_a_disk_is_found_if_none_is_named(report, place):
    """Claim: `--params nvme` alone trains from a scratch folder, as from one that is named, and
    leaves nothing there."""
    named = report("--lora", quantize="nf4")
    assert report("--lora", quantize="nf4", nvme_path=None)["losses"] == named["losses"]
    assert not list(place.rglob(".infinity-*"))


def test_adapters_over_a_packed_base_train_in_tiles_if_that_alone_fits(
    report, place, monkeypatch, capsys, caplog
):
    """Leaves memory for tiles of the head, and not for the head, without a budget. Twins: with
    memory for it, none; with too little for tiles, an error with what was tried."""
    config = transformers.AutoConfig.from_pretrained("base")
    config.vocab_size = 40_000  # the tokenizer needs the first few
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained("wide")
    transformers.AutoTokenizer.from_pretrained("base").save_pretrained("wide")
    monkeypatch.setattr(limits, "for_the_engine", lambda nbytes: nbytes)

    def train(left: int) -> str:
        monkeypatch.setattr(limits, "memory_left", lambda: left)
        caplog.clear()
        report("--lora", quantize="nf4", model="wide", steps=1, warmup_steps=0, sample_bytes=0)
        return caplog.text

    assert "run in tiles" not in train(1 << 30)
    assert "run in tiles" in train(14 << 20)
    with pytest.raises(AssertionError, match="Make so much free"):
        train(1 << 20)


def test_the_experts_of_a_mixture_are_packed_and_train_as_from_memory(report, place):
    """Claim: from NVMe, with a quarter of the bytes, and with the losses of the base on the device;
    the adapter is one that PEFT loads. Twin: the dense base has others."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=384, hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=64, moe_intermediate_size=384, num_experts=8,
        num_experts_per_tok=2, tie_word_embeddings=False,
    )  # fmt: skip
    mixture = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    mixture.save_pretrained("mixture")
    transformers.AutoTokenizer.from_pretrained("base").save_pretrained("mixture")
    words = (*LORA, "--overwrite")
    found = {
        way: report(*words, model="mixture", out=f"out {way}", quantize=format, **homes)
        for way, format, homes in (
            ("nvme", "nf4", {}),
            ("device", "nf4", {"params": "device", "optimizer": "device"}),
            ("dense", None, {}),
        )
    }
    assert found["nvme"]["losses"] == found["device"]["losses"] != found["dense"]["losses"]
    packed, dense = (found[way]["tiers"]["nvme"]["peak_nbytes"] for way in ("nvme", "dense"))
    experts = 2 * 8 * 3 * 128 * 384 * 2  # bytes
    assert dense - packed > 0.7 * experts
    model = transformers.AutoModelForCausalLM.from_pretrained("mixture")
    assert peft.PeftModel.from_pretrained(model, "out nvme")
