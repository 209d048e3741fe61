"""Files that anybody may have written: no code of theirs runs, nothing outside their folder is
read, and every refusal is one line."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path

import prepared
import pytest
import torch
from marks import few
from models import differing
from safetensors.torch import load_file, save_file
from torch import nn

import infinity
from infinity.ext.checkpoint import manifest, publish
from infinity.ext.checkpoint.export import export
from infinity.ext.checkpoint.file_writer import make_slots
from infinity.files.weight_files import INDEX, WeightFiles
from infinity.tools.cli import main
from infinity.untrusted import parse_json, printable, read_text

# --- reading ---


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 50_000,
        "9" * 10_000,
        "[1e999, NaN]",
        "[Infinity]",
        "",
        "{",
        "\x00",
        '"\ud800',
    ],
)
def test_json_without_sense_is_a_value_error(text):
    with pytest.raises(ValueError):
        parse_json(text)


def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError):
            read_text(path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(OSError):
            read_text(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
    (tmp_path / "large").write_text("x" * 1000)
    with pytest.raises(ValueError, match="1000 bytes"):
        read_text(tmp_path / "large", most_nbytes=999)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError):
        read_text(tmp_path / "binary")


def test_control_characters_are_shown():
    assert printable("a\x1b[2Jb\x07\u202e\n") == "a\\x1b[2Jb\\x07\\u202e\n"


def test_a_trace_cannot_move_the_terminal(tmp_path, capsys):
    line = {"ph": "X", "cat": "stalled\x1b[31m", "name": "\x1b]0;owned\x07", "ts": 0, "dur": 1e6}
    (tmp_path / "trace.json").write_text(
        f"[\n{json.dumps(line)},\n{json.dumps(line | {'cat': 'stalled'})}\n]"
    )
    assert main(["trace", str(tmp_path / "trace.json")]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x07" not in out and "\\x1b]0;owned" in out


# --- models ---

CODE = (
    "from pathlib import Path\nPath('{mark}').touch()\nfrom transformers import"
    " PretrainedConfig\nclass Own(PretrainedConfig):\n    model_type = 'own'\n"
)
AS_A_COMMAND = """
import sys
from transformers import dynamic_module_utils
from transformers.utils import hub
hub.HF_MODULES_CACHE = dynamic_module_utils.HF_MODULES_CACHE = sys.argv[1]
from infinity.tools.cli import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("command", few([["plan"], ["train", "--steps", "1"]], 1))
@pytest.mark.parametrize("allowed", [False, True])
def test_code_in_a_models_folder_runs_only_where_that_is_said(command, allowed, tmp_path):
    """Method: a folder with a configuration class of its own, and "y" on stdin."""
    folder, mark = tmp_path / "model", tmp_path / "ran"
    folder.mkdir()
    (folder / "own.py").write_text(CODE.format(mark=mark))
    (folder / "config.json").write_text(
        json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}})
    )
    save_file({"x": torch.zeros(1)}, folder / "model.safetensors")
    command = [*command, "--model", str(folder), *(["--trust-remote-code"] if allowed else [])]
    words = ["-c", AS_A_COMMAND, tmp_path / "modules", *command]
    done = prepared.run(*words, stdin="y\ny\ny\n", imports=prepared.LANGUAGE_MODELS)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert mark.exists() == allowed, done.stderr
    assert allowed or "--trust-remote-code" in done.stderr


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"n_layer": 10**9}, "num_hidden_layers is 1000000000"),
        ({"n_layer": -1}, "num_hidden_layers is -1"),
        ({"n_embd": 10**12}, "hidden_size"),
        ({"vocab_size": 10**15}, "vocab_size"),
    ],
)
def test_models_that_no_machine_builds_are_refused(changes, said, tmp_path, capsys):
    config = {
        "model_type": "gpt2",
        "n_layer": 2,
        "n_embd": 32,
        "n_head": 2,
        "vocab_size": 256,
    } | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", "--model", str(tmp_path / "config.json")]) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err and (said in err or "transformers cannot read" in err), err


@pytest.mark.parametrize(
    "given",
    [
        {"update_threads": 10**6},
        {"host_memory": "9" * 400 + "GiB"},
        {"host_memory": 10**40},
        {"micro_batch": 10**40, "update_threads": 0},
        {"nvme_paths": ["/tmp/a\0b"]},
    ],
)
def test_numbers_that_take_the_machine_are_refused(given):
    with pytest.raises(infinity.ConfigError) as error:
        infinity.Config(**given)
    assert len(str(error.value)) < 500


# --- weights ---


def folder_of(
    path: Path, files: dict[str, dict[str, torch.Tensor]], index: dict[str, str] | None = None
) -> Path:
    path.mkdir()
    for name, tensors in files.items():
        save_file(tensors, path / name)
    if index is not None:
        (path / INDEX).write_text(json.dumps({"weight_map": index}))
    return path


def test_a_tensor_in_two_files_needs_an_index(tmp_path):
    ones, twos = {"w": torch.ones(2)}, {"w": torch.full((2,), 2.0)}
    with pytest.raises(infinity.ConfigError, match="w is in a.safetensors and in b.safetensors"):
        WeightFiles(folder_of(tmp_path / "none", {"a.safetensors": ones, "b.safetensors": twos}))
    for file, value in (("a.safetensors", 1.0), ("b.safetensors", 2.0)):
        place = folder_of(
            tmp_path / file,
            {"a.safetensors": ones, "b.safetensors": twos | {"v": torch.zeros(1)}},
            {"w": file, "v": "b.safetensors"},
        )
        (piece,) = WeightFiles(place).stream(["w"])
        assert piece.values.tolist() == [value, value]


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ({"w": "../outside.safetensors"}, "outside the folder"),
        ({"w": "/etc/passwd"}, "outside the folder"),
        ({"w": 3}, "not of names"),
        ({"w": "a.safetensors", "gone": "a.safetensors"}, "has no such tensor"),
        (["w"], "not an index"),
    ],
)
def test_an_index_that_lies_is_refused(index, said, tmp_path):
    save_file({"w": torch.ones(1)}, tmp_path / "outside.safetensors")
    place = folder_of(tmp_path / "folder", {"a.safetensors": {"w": torch.ones(2)}}, index)
    with pytest.raises(infinity.CorruptionError, match=said):
        WeightFiles(place)


# --- checkpoints whose seal is right ---


def job():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).to(torch.bfloat16)
    model, optimizer = infinity.wrap_model(
        model, torch.optim.AdamW(model.parameters()), {"params": "host", "optimizer": "host"}
    )
    model(torch.ones(2, 6, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    return model, optimizer


def change(content: dict, path: list, value) -> None:
    for key in path[:-1]:
        content = content[key]
    content[path[-1]] = value


HOSTILE = [
    (["files"], {}),
    (["files"], {"../../outside": {"nbytes": 1, "crc32c": 0}}),
    (["files"], ["unit"]),
    (["files", "unit-00000.safetensors"], 3),
    (["parameters"], []),
    (["parameters", "0.weight", "shape"], [10**9, 10**9]),
    (["parameters", "0.weight", "shape"], "x"),
    (["parameters", "0.weight", "stride"], [10**12, 1]),
    (["parameters", "0.weight", "dtype"], "nonsense"),
    (["parameters", "0.weight", "dtype"], "__class__"),
    (["parameters", "0.weight", "step"], -1),
    (["parameters", "0.weight", "step"], 1.5),
    (["parameters", "0.weight"], None),
    (["optimizers", 0, "groups"], 7),
    (["optimizers", 0], None),
    (["step_index"], "1"),
    (["random"], None),
    (["random"], [{"python": [], "numpy": []}]),
    (["extra"], {"$dict": [[[], 1]]}),
    (["extra"], {"$tensor": "nowhere"}),
    (["persistent_buffers"], 3),
    (["optimizers"], 5),
    (["optimizers", 0, "rule"], 5),
]


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_a_manifest_that_lies_is_refused_before_anything_changes(number, tmp_path, capsys):
    path, value = HOSTILE[number]
    model, optimizer = job()
    infinity.save_checkpoint(tmp_path / "saved", model, optimizer)
    content = manifest.read_manifest(tmp_path / "saved")
    change(content, path, value)
    (tmp_path / "saved" / "manifest.json").write_bytes(manifest.seal_manifest(content))
    before = copy.deepcopy({name: tensor.clone() for name, tensor in model.state_dict().items()})
    keys = [set(group) for group in optimizer.param_groups]
    try:
        infinity.load_checkpoint(tmp_path / "saved", model, optimizer)
    except infinity.InfinityError:
        assert (
            differing(dict(model.state_dict()), before) == []
            and [set(group) for group in optimizer.param_groups] == keys
        )
    else:
        assert path in (["persistent_buffers"],) or path[2:3] == [
            "stride"
        ]  # of which a load needs nothing
    status = main(["export", str(tmp_path / "saved"), str(tmp_path / "out")])
    assert status in (0, 2) and "Traceback" not in capsys.readouterr().err
    model(torch.ones(2, 6, dtype=torch.bfloat16))  # goes on


@pytest.mark.parametrize("what", ["a pipe", "a link", "another dtype", "another tensor"])
def test_files_that_lie_are_refused_before_anything_changes(what, tmp_path):
    model, optimizer = job()
    infinity.save_checkpoint(tmp_path / "saved", model, optimizer)
    content = manifest.read_manifest(tmp_path / "saved")
    name = next(name for name in content["files"] if name.startswith("unit"))
    path = tmp_path / "saved" / content["data"] / name
    if what in ("a pipe", "a link"):
        path.rename(tmp_path / "elsewhere")
        os.mkfifo(path) if what == "a pipe" else path.symlink_to(tmp_path / "elsewhere")
    else:
        tensors = load_file(path)
        key = next(key for key in tensors if key.startswith("weight/"))
        if what == "another dtype":
            tensors[key] = tensors[key].to(torch.float32)
        else:
            tensors["weight/stranger"] = torch.zeros(1)
        content["files"][name] = publish.write_tensors(path, tensors, make_slots(2**20))
        (tmp_path / "saved" / "manifest.json").write_bytes(manifest.seal_manifest(content))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(infinity.CorruptionError):
        infinity.load_checkpoint(tmp_path / "saved", model, optimizer)
    assert differing(dict(model.state_dict()), before) == []
    if what in ("a pipe", "a link"):
        with pytest.raises(infinity.CorruptionError):
            export(tmp_path / "saved", tmp_path / "out")


# --- adapters ---


def test_adapters_are_saved_as_peft_saves_them(tmp_path):
    """Method: a LoRA model, trained for a step and saved; PEFT puts it onto the same base, with the
    same output."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")

    def base() -> nn.Module:
        torch.manual_seed(0)
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2)
        ).eval()

    lora = peft.LoraConfig(
        r=4, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False
    )
    model = peft.get_peft_model(base(), lora)
    trained = [param for param in model.parameters() if param.requires_grad]
    model, optimizer = infinity.wrap_model(
        model, torch.optim.SGD(trained, lr=0.1), {"params": "host", "optimizer": "host"}
    )
    ids = torch.arange(8).unsqueeze(0)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    with torch.no_grad():
        expected = model(input_ids=ids).logits.clone()
    infinity.save_pretrained(model, tmp_path / "adapters")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(
        os.listdir(tmp_path / "adapters")
    )
    assert not (tmp_path / "adapters" / "model.safetensors").exists()
    loaded = peft.PeftModel.from_pretrained(base(), tmp_path / "adapters").eval()
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, expected)
