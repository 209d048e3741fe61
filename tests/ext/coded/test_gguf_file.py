"""GGUF files: frozen weights keep their codes, others become dense, with the bits of transformers.

Method: small models written as llama.cpp writes them, with random codes; `from_pretrained` reads
them for the comparison. Twins: a changed code shows; a file that is cut short is refused.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf_models import write
from lazily import need
from models import at_home
from test_coded_folders import adapted, coded, losses
from torch import nn

import infinity
from infinity.errors import ConfigError, CorruptionError
from infinity.ext.coded.coded import Coded
from infinity.ext.coded.gguf_file import GgufFile

transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")
need("diffusers")  # whose reader transformers uses
pytestmark = pytest.mark.filterwarnings("ignore")

CASES = [("llama", "Q8_0"), ("llama", "Q4_K"), ("qwen3moe", "Q4_0")]
CASES += [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in (("llama", "Q6_K"), ("qwen3moe", "Q8_0"), ("qwen3moe", "Q2_K"))
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The file of every case, and its model as transformers loads it; made once."""
    found: dict[tuple[str, str], tuple[Path, nn.Module]] = {}

    def of(arch: str, kind: str) -> tuple[Path, nn.Module]:
        if (arch, kind) not in found:
            path = write(tmp_path_factory.mktemp("gguf") / "model.gguf", arch, kind)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, dtype=torch.float32
            )
            found[arch, kind] = path, model
        return found[arch, kind]

    return of


def on_meta(plain: nn.Module) -> nn.Module:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(plain.config)


def bits(model: nn.Module) -> dict[str, bytes]:
    return {
        name: (value.dequantize() if hasattr(value, "dequantize") else value).numpy().tobytes()
        for name, value in model.state_dict().items()
    }


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("arch, kind", CASES)
def test_weights_have_the_bits_of_transformers(arch, kind, frozen, files, tmp_path):
    """Claim: in codes, if frozen, and dense."""
    path, plain = files(arch, kind)
    model = on_meta(plain).requires_grad_(not frozen)
    config = at_home("hostile", "hostile", tmp_path, weights=path)
    model, _ = infinity.wrap_model(model, None, config)
    assert bits(model) == bits(plain)
    matrices = 2 * (7 if arch == "llama" else 6) + 1
    assert len(coded(model)) == (matrices if frozen else 0)


@pytest.mark.parametrize("arch, kind", CASES)
def test_an_adapter_trains_on_the_codes_of_a_file(arch, kind, files, tmp_path):
    """Claim: the losses of the dense model, from every home. Twin: another file has others."""
    path, plain = files(arch, kind)

    def run(path: Path | None, home: str) -> list[float]:
        if path is None:
            model = on_meta(plain).to_empty(device="cpu")
            model.load_state_dict(plain.state_dict())
            model.model.rotary_emb = plain.model.rotary_emb
        else:
            model = on_meta(plain)
        model = adapted(model)
        trained = [param for param in model.parameters() if param.requires_grad]
        config = at_home(home, home, tmp_path, weights=path)
        return losses(*infinity.wrap_model(model, torch.optim.AdamW(trained, lr=1e-2), config))

    expected = run(None, "device")
    assert run(path, "host") == expected == run(path, "nvme")
    changed, data = tmp_path / "changed.gguf", bytearray(path.read_bytes())
    (weight,) = (
        each for each in gguf.GGUFReader(path).tensors if each.name == "blk.0.attn_output.weight"
    )
    for at in range(weight.data_offset, weight.data_offset + weight.n_bytes, 32):
        data[at] ^= 2
    changed.write_bytes(data)
    assert run(changed, "host") != expected


def test_a_file_is_parsed_once_for_a_wrap(files, tmp_path, monkeypatch):
    path, plain = files("llama", "Q8_0")
    read, reader = [], gguf.GGUFReader
    monkeypatch.setattr(gguf, "GGUFReader", lambda *of: read.append(of) or reader(*of))
    for count in (2, 4):  # transformers parses it, too; and again for the next wrap
        model = on_meta(plain).requires_grad_(requires_grad=False)
        infinity.wrap_model(model, None, {"params": "host", "weights": path})
        assert len(read) == count


def test_what_is_no_whole_file_is_refused(files, tmp_path):
    path, plain = files("llama", "Q8_0")
    short = tmp_path / "short.gguf"
    short.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(CorruptionError, match=r"short\.gguf is not read as a GGUF file"):
        infinity.wrap_model(on_meta(plain), None, {"weights": short})
    two = tmp_path / "two"
    two.mkdir()
    for name in ("a.gguf", "b.gguf"):
        (two / name).write_bytes(path.read_bytes())
    with pytest.raises(ConfigError, match="2 GGUF files: give one of them"):
        infinity.wrap_model(on_meta(plain), None, {"weights": two})
    with torch.device("meta"):
        other = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="no GGUF file there"):
        infinity.wrap_model(on_meta(plain), None, {"weights": tmp_path / "none.gguf"})
    with pytest.raises(ConfigError, match="Linear is not a model of transformers"):
        infinity.wrap_model(other, None, {"weights": path})


def test_a_table_that_is_the_output_layer_too_is_one_weight(tmp_path):
    """Claim: it is in codes once, and the losses are those of the dense model. Twin: a table alone
    is dense, for a forward brings only its rows."""
    path = write(tmp_path / "model.gguf", "llama", "Q8_0", tied=True)
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    model = adapted(on_meta(plain))
    trained = [param for param in model.parameters() if param.requires_grad]
    config = at_home("hostile", "hostile", tmp_path, weights=path)
    model, optimizer = infinity.wrap_model(model, torch.optim.AdamW(trained, lr=1e-2), config)
    base = model.base_model.model
    assert base.lm_head.weight is base.model.embed_tokens.weight
    assert isinstance(base.lm_head.weight, Coded)
    rotary, plain.generation_config = plain.model.rotary_emb, None
    dense = on_meta(plain).to_empty(device="cpu")
    dense.load_state_dict(plain.state_dict())
    dense.model.rotary_emb = rotary
    dense = adapted(dense)
    trained = [param for param in dense.parameters() if param.requires_grad]
    given = dense, torch.optim.AdamW(trained, lr=1e-2), {"params": "device"}
    assert losses(model, optimizer) == losses(*infinity.wrap_model(*given))
    alone = on_meta(plain)
    alone.lm_head = nn.Identity()
    found = GgufFile(path, alone).coded()
    assert "model.embed_tokens.weight" in found
    alone, _ = infinity.wrap_model(alone.requires_grad_(False), None, {"weights": path})
    assert not isinstance(alone.model.embed_tokens.weight, Coded)


def test_codes_as_large_as_the_weight_are_not_kept(tmp_path):
    """Claim: BF16 for a model in bf16. Twin: for one in fp32 it is half as large."""
    path = write(tmp_path / "model.gguf", "llama", "BF16")
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    for dtype, kept in ((torch.bfloat16, False), (torch.float32, True)):
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        model, _ = infinity.wrap_model(model.requires_grad_(False), None, {"weights": path})
        assert bool(coded(model)) == kept
