"""Experts in the codes of their file are apart: of the codes, those that the router chose move.

Method: small mixtures in FP8, MXFP4 and GGUF whose experts have 64 KiB and more of codes, a few
tokens a step, once with their experts apart and once whole. Twins: whole ones move more; rows that
are told wrongly show.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import test_scaled_folders as scaled_folders
import torch
from gguf_models import write
from inside import parts_of
from lazily import need
from models import at_home
from test_coded_folders import adapted, coded, losses

import infinity
from infinity.core.units.arrival import Arrival
from infinity.ext.rows.chosen_experts import ChosenExperts

transformers = pytest.importorskip("transformers")
need("peft")
pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = scaled_folders.SIZES | {"hidden_size": 256}
CONFIGS = {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, intermediate_size=64, moe_intermediate_size=128, num_experts=12,
        num_experts_per_tok=2,
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, intermediate_size=256, num_local_experts=12, num_experts_per_tok=2, head_dim=16,
        layer_types=["sliding_attention", "full_attention"],
    ),
}  # fmt: skip
FORMATS = {"fp8": "qwen3_moe", "mxfp4": "gpt_oss", "gguf": "qwen3moe"}
IMPLEMENTATIONS = ["eager", "grouped_mm", "batched_mm"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder or file of each format, and its configuration; made once."""
    found = {}

    def of(format: str) -> tuple[Path, object]:
        if format not in found:
            kind, folder = FORMATS[format], tmp_path_factory.mktemp(format) / "model"
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(scaled_folders, "CONFIGS", CONFIGS)
                if format == "gguf":
                    pytest.importorskip("diffusers.quantizers.gguf.utils")
                    folder.mkdir()
                    weights = write(folder / "model.gguf", kind, "Q8_0")
                    config = transformers.AutoConfig.from_pretrained(folder, gguf_file=weights.name)
                else:
                    weights = scaled_folders.FOLDERS[kind](folder)
                    config = CONFIGS[kind]()
            found[format] = weights, config
        return found[format]

    return of


def whole(monkeypatch) -> None:
    monkeypatch.setattr(Arrival, "bring_rows", lambda self, choose: None)


class Run:
    """Three steps of an adapter on experts in codes, and the bytes of experts that they moved."""

    def __init__(self, given: tuple, implementation: str, home: str, folder: Path, *, recompute):
        weights, config = given
        config._experts_implementation = implementation
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model = adapted(model)
        trained = [param for param in model.parameters() if param.requires_grad]
        self.model, optimizer = infinity.wrap_model(
            model,
            torch.optim.AdamW(trained, lr=1e-2),
            at_home(home, home, folder, weights=weights) | {"recompute": recompute},
        )
        self.units = [
            unit
            for unit in parts_of(self.model.__dict__["_infinity"]).units
            if unit.name.endswith("experts")
        ]
        self.hit: list[int] = []
        for module in self.experts():
            module.register_forward_pre_hook(self._note, with_kwargs=True)
        self.nbytes = 0
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Arrival, "_nbytes", self._counting(Arrival._nbytes))
            self.losses = losses(self.model, optimizer, shape=(1, 2))

    def experts(self) -> list[torch.nn.Module]:
        return [each for each in self.model.modules() if hasattr(each, "gate_up_proj")]

    def _note(self, _module, args, kwargs) -> None:
        named = (kwargs[name] for name in ("top_k_index", "router_indices") if name in kwargs)
        self.hit.append(len(torch.unique(next(named, (*args, None)[1]))))

    def _counting(self, seen):
        def count(arrival, spans):
            nbytes = seen(arrival, spans)
            self.nbytes += nbytes if any(unit.arrival is arrival for unit in self.units) else 0
            return nbytes

        return count


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("format", FORMATS)
def test_chosen_codes_move_and_compute_as_all_do(
    format, implementation, folders, tmp_path, monkeypatch
):
    """Claim: the losses of whole experts. The bytes are at most those of the experts that were hit,
    twice a step: some stay from a forward to its backward."""
    given = folders(format)
    apart = Run(given, implementation, "hostile", tmp_path, recompute=False)
    first = apart.experts()[0]
    of_one = sum(
        sum(part[0].nbytes for part in (weight.codes, weight.scales) if part is not None)
        for weight in (first.gate_up_proj, first.down_proj)
    )
    of_one += sum(p[0].nbytes for n, p in first.named_parameters() if n.endswith("_bias"))
    assert len(coded(apart.model)) >= 4 and all(unit.arrival.rows for unit in apart.units)
    assert 0.4 < apart.nbytes / (2 * sum(apart.hit) * of_one) <= 1.05
    whole(monkeypatch)
    twin = Run(given, implementation, "hostile", tmp_path, recompute=False)
    assert apart.losses == twin.losses and twin.nbytes > 1.4 * apart.nbytes


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("format", FORMATS)
def test_recomputed_blocks_bring_what_they_read(
    format, implementation, folders, tmp_path, monkeypatch
):
    given = folders(format)
    apart = Run(given, implementation, "nvme", tmp_path, recompute=True)
    whole(monkeypatch)
    twin = Run(given, implementation, "nvme", tmp_path, recompute=True)
    assert apart.losses == twin.losses and twin.nbytes > apart.nbytes


def test_others_find_all_experts(folders, tmp_path):
    """Claim: hooks of a forward read every expert, also one without a token."""
    run = Run(folders("fp8"), "eager", "nvme", tmp_path, recompute=False)
    module, read = run.experts()[0], []
    expected = module.gate_up_proj.dequantize()
    module.register_forward_pre_hook(lambda *_: read.append(module.gate_up_proj.dequantize()))
    module.register_forward_hook(lambda *_: read.append(module.gate_up_proj[11]))
    with torch.no_grad():
        run.model(input_ids=torch.tensor([[1]]), use_cache=False)
    assert torch.equal(read[0], expected) and torch.equal(read[1], expected[11])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_that_are_not_there_show(implementation, folders, tmp_path, monkeypatch):
    """Failing twin: if only the first expert is brought, the losses are others."""
    given = folders("fp8")
    expected = Run(given, implementation, "nvme", tmp_path, recompute=False).losses
    monkeypatch.setattr(
        ChosenExperts, "want", lambda self, rows: setattr(self, "_demand", (frozenset({0}),))
    )
    assert Run(given, implementation, "nvme", tmp_path, recompute=False).losses != expected
