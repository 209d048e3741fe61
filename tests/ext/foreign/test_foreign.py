"""Checkpoints of other libraries become a folder of safetensors with the same bits; a pickle that
names anything else is not run.

Words used here:

**ZeRO**: files in DeepSpeed's layout, made here from a state dict by its documented rules:
DeepSpeed itself is not installed.
"""

from __future__ import annotations

import math
import os
import pickle
import sys
import types
from collections import OrderedDict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import metadata

import infinity
from infinity.errors import ConfigError, CorruptionError, InfinityError
from infinity.ext.checkpoint.export import export
from infinity.ext.foreign.dcp_files import _Unpickler
from infinity.tools.cli import main

SEED = 5


def make_model() -> nn.Module:
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3, bias=False))


def written(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


# --- ZeRO ---


@pytest.fixture
def deepspeed(monkeypatch):
    """Modules with the classes that DeepSpeed's files name, for as long as they are written."""

    def make() -> type:
        module = types.ModuleType("deepspeed.runtime.fp16.loss_scaler")
        module.LossScaler = type("LossScaler", (), {"__module__": module.__name__})
        for name in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.fp16"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return module.LossScaler

    scaler = make()()
    scaler.cur_scale = 1.0
    return scaler


def write_zero(
    folder: Path,
    model: nn.Module,
    scaler: object,
    *,
    stage: int,
    ranks: int,
    frozen: str | None = None,
) -> None:
    """Writes the model as ``ranks`` ranks of DeepSpeed would: two groups of parameters, weights and
    the rest."""
    tag = folder / "global_step3"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("global_step3")
    trained = {name: param.detach() for name, param in model.named_parameters() if name != frozen}
    groups = [
        [n for n in trained if trained[n].dim() > 1],
        [n for n in trained if trained[n].dim() <= 1],
    ]
    shapes = [OrderedDict((name, trained[name].shape) for name in group) for group in groups]
    buffers = dict(model.named_buffers())
    for rank in range(ranks):

        def part(tensor: torch.Tensor) -> torch.Tensor:
            each = math.ceil(tensor.numel() / ranks)
            padded = torch.cat([tensor.reshape(-1), torch.zeros(each * ranks - tensor.numel())])
            return padded[rank * each : (rank + 1) * each].clone()

        optimizer = {
            "loss_scaler": scaler,
            "zero_stage": stage,
            "partition_count": ranks if stage == 3 else [ranks, ranks],
            "optimizer_state_dict": {"state": {}, "param_groups": []},
        }
        if stage == 3:
            optimizer["fp32_flat_groups"] = [
                torch.cat([part(trained[name]) for name in group]) for group in groups
            ]
        else:
            flat = [torch.cat([trained[name].reshape(-1) for name in group]) for group in groups]
            flat = [torch.cat([f, torch.zeros(-f.numel() % (2 * ranks))]) for f in flat]
            optimizer["single_partition_of_fp32_groups"] = [
                f.view(ranks, -1)[rank].clone() for f in flat
            ]
        torch.save(
            {"optimizer_state_dict": optimizer, "ds_version": "0.19"},
            tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
        value = dict(model.named_parameters())[frozen].detach() if frozen else None
        states = {
            "module": buffers,
            "buffer_names": list(buffers),
            "param_shapes": shapes,
            "shared_params": {},
            "ds_version": "0.19",
            "frozen_param_shapes": OrderedDict({frozen: value.shape}) if frozen else None,
            "frozen_param_fragments": (
                {frozen: part(value) if stage == 3 else value} if frozen else None
            ),
        }
        if stage == 3 or rank == 0:
            name = (
                f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
                if stage == 3
                else "mp_rank_00_model_states.pt"
            )
            torch.save(states, tag / name)


@pytest.mark.parametrize(
    ("stage", "ranks", "frozen"),
    [(1, 1, None), (2, 3, "0.weight"), (3, 1, None), (3, 3, None), (3, 4, "2.weight")],
)
def test_a_zero_checkpoint_becomes_the_model_it_was_of(stage, ranks, frozen, deepspeed, tmp_path):
    """Method: a model is written in DeepSpeed's layout by some ranks, exported by the command, and
    compared bit for bit."""
    model = make_model()
    write_zero(tmp_path / "zero", model, deepspeed, stage=stage, ranks=ranks, frozen=frozen)
    assert main(["export", str(tmp_path / "zero"), str(tmp_path / "out")]) == 0
    assert same(written(tmp_path / "out"), model.state_dict())


def test_a_rank_that_is_missing_is_told(deepspeed, tmp_path):
    write_zero(tmp_path, make_model(), deepspeed, stage=3, ranks=3)
    next((tmp_path / "global_step3").glob("*rank_1_*optim*")).unlink()
    with pytest.raises(CorruptionError, match="3 ranks.*2"):
        export(tmp_path, tmp_path / "out")


def test_a_checkpoint_that_is_cut_over_tensor_ranks_is_refused(deepspeed, tmp_path):
    write_zero(tmp_path, make_model(), deepspeed, stage=3, ranks=1)
    path = next((tmp_path / "global_step3").glob("*optim*"))
    path.with_name("zero_pp_rank_0_mp_rank_01_optim_states.pt").write_bytes(path.read_bytes())
    with pytest.raises(ConfigError, match="tensor or expert ranks"):
        export(tmp_path, tmp_path / "out")


# --- torch.distributed.checkpoint ---


@pytest.mark.parametrize("under", [None, "model", "state_dict"])
def test_a_dcp_checkpoint_becomes_the_model_it_was_of(under, tmp_path):
    """Method: a state dict, alone or beside an optimizer's, is saved by torch, exported, and
    compared bit for bit."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 7)).sum().backward()
    optimizer.step()
    state = (
        model.state_dict()
        if under is None
        else {under: model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    )
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    export(tmp_path / "dcp", tmp_path / "out")
    assert same(written(tmp_path / "out"), model.state_dict())


def test_metadata_that_names_a_file_elsewhere_is_refused(tmp_path):
    dcp.save(make_model().state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    (tmp_path / "dcp" / "__0_0.distcp").rename(tmp_path / "elsewhere")
    raw = (tmp_path / "dcp" / ".metadata").read_bytes()
    (tmp_path / "dcp" / ".metadata").write_bytes(raw.replace(b"__0_0.distcp", b"../elsewhere"))
    with pytest.raises(CorruptionError, match="not a file of the folder"):
        export(tmp_path / "dcp", tmp_path / "out")


# --- torch.save ---


@pytest.mark.parametrize("layout", ["pytorch_model.bin", "parts", "model.pt", "old format"])
def test_pickled_weights_become_the_model_they_were_of(layout, tmp_path):
    model, folder = make_model(), tmp_path / "in"
    folder.mkdir()
    state = model.state_dict()
    if layout == "parts":
        names = list(state)
        for number, part in enumerate((names[:3], names[3:])):
            torch.save({name: state[name] for name in part}, folder / f"pytorch_model-{number}.bin")
        index = {name: f"pytorch_model-{int(at >= 3)}.bin" for at, name in enumerate(names)}
        (folder / "pytorch_model.bin.index.json").write_text(
            __import__("json").dumps({"weight_map": index})
        )
    elif layout == "model.pt":
        torch.save(
            {
                "model": {f"module._orig_mod.{name}": tensor for name, tensor in state.items()},
                "step": 3,
            },
            folder / "model.pt",
        )
    else:
        torch.save(
            state,
            folder / "pytorch_model.bin",
            _use_new_zipfile_serialization=layout != "old format",
        )
    export(folder, tmp_path / "out")
    assert same(written(tmp_path / "out"), state)


def test_tensors_that_share_bytes_but_not_elements_are_all_written(tmp_path):
    """Method: a square matrix and its transpose, which have storage, offset and shape in common;
    the twin, a tied one, is written once."""
    weight = torch.randn(3, 3)
    torch.save({"a": weight, "b": weight.t(), "tied": weight}, tmp_path / "model.pt")
    export(tmp_path / "model.pt", tmp_path / "out")
    assert same(written(tmp_path / "out"), {"a": weight, "b": weight.t().contiguous()})


@pytest.mark.parametrize("writer", ["torch.save", "dcp"])
@pytest.mark.parametrize(
    ("names", "own"),
    [
        (("net.module.weight", "net.weight"), None),
        (("module.weight", "module.net.bias", "head.weight"), None),
        (("module.a", "module.b._orig_mod.c"), ("a", "b.c")),
        (("module.module.a", "module.b"), ("module.a", "b")),
        (("n_averaged", "module.a.b"), ("n_averaged", "a.b")),
        (("a._fsdp_wrapped_module.module.b", "c"), ("a.b", "c")),
    ],
)
def test_only_what_wrappers_put_into_names_is_taken_out(names, own, writer, tmp_path):
    """Method: a module that the model itself calls `module` has others beside it, a wrapper's has
    not; each tensor is written."""
    state = {name: torch.full((2,), float(number)) for number, name in enumerate(names)}
    if writer == "dcp":
        dcp.save(state, checkpoint_id=tmp_path / "in", no_dist=True)
    else:
        torch.save(state, tmp_path / "in.pt")
    export(tmp_path / ("in" if writer == "dcp" else "in.pt"), tmp_path / "out")
    assert same(written(tmp_path / "out"), dict(zip(own or names, state.values())))


def test_files_that_others_have_put_beside_the_weights_stay(tmp_path):
    """Method: exported into a folder with another model's file, and one of an earlier export in
    parts, which goes."""
    torch.save({"a": torch.randn(3)}, tmp_path / "model.pt")
    (tmp_path / "out").mkdir()
    for name in ("model_ema.safetensors", "model-00001-of-00002.safetensors"):
        (tmp_path / "out" / name).write_text("")
    export(tmp_path / "model.pt", tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "model.safetensors",
        "model_ema.safetensors",
    ]


def test_a_dtype_can_be_chosen_and_a_model_starts_from_it(tmp_path):
    """Method: exported in bf16, the folder fills a model on meta; integers stay what they are."""
    model = make_model()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    assert (
        main(["export", str(tmp_path / "model.pt"), str(tmp_path / "out"), "--dtype", "bf16"]) == 0
    )
    found = written(tmp_path / "out")
    assert (
        found["0.weight"].dtype == torch.bfloat16
        and found["1.num_batches_tracked"].dtype == torch.int64
    )
    with torch.device("meta"):
        other = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3, bias=False)).to(
            torch.bfloat16
        )
    wrapped, _ = infinity.wrap_model(other, None, {"weights": str(tmp_path / "out")})
    assert torch.equal(wrapped.state_dict()["0.weight"], model.state_dict()["0.weight"].bfloat16())


# --- harm ---


class Harm:
    """A pickle of it would make a folder."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["torch.save", "zero", "dcp"])
def test_a_pickle_with_code_is_refused_and_not_run(kind, deepspeed, tmp_path):
    """Method: each kind of file is made to call os.mkdir when it is unpickled; the twin of all of
    the above."""
    mark = tmp_path / "harmed"
    if kind == "torch.save":
        torch.save({"a": Harm(mark)}, tmp_path / "model.pt")
        path = tmp_path / "model.pt"
    elif kind == "zero":
        write_zero(tmp_path / "zero", make_model(), Harm(mark), stage=3, ranks=1)
        path = tmp_path / "zero"
    else:
        dcp.save(make_model().state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
        (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Harm(mark)))
        path = tmp_path / "dcp"
    with pytest.raises(ConfigError, match="more than"):
        export(path, tmp_path / "out")
    assert not mark.exists()
    if kind == "dcp":  # it would have run
        pickle.loads((tmp_path / "dcp" / ".metadata").read_bytes())
        assert mark.exists()


@pytest.mark.parametrize("kind", ["torch.save", "zero", "dcp"])
def test_damage_is_a_typed_error(kind, deepspeed, tmp_path):
    """Method: every file of each kind is cut in half in turn, and has a byte changed in turn: an
    error of ours, or the right bits."""
    model = make_model()
    if kind == "torch.save":
        torch.save(model.state_dict(), tmp_path / "model.pt")
        path, files = tmp_path / "model.pt", [tmp_path / "model.pt"]
    elif kind == "zero":
        write_zero(tmp_path / "zero", model, deepspeed, stage=3, ranks=2)
        path, files = tmp_path / "zero", list((tmp_path / "zero" / "global_step3").iterdir())
    else:
        dcp.save(model.state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
        path, files = tmp_path / "dcp", list((tmp_path / "dcp").iterdir())
    for file in files:
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(InfinityError):
            export(path, tmp_path / "out")
        file.write_bytes(whole)


def test_members_of_an_enum_are_read_as_any_python_pickles_them(tmp_path):
    """Python 3.11.0 to 3.11.3 calls `getattr`. Twin: of another object it is refused."""
    kind = metadata._MEM_FORMAT_ENCODING
    for given, is_read in ((kind, True), (metadata.Metadata, False)):
        name = kind.TORCH_PRESERVE_FORMAT.name
        (tmp_path / "file").write_bytes(pickle.dumps(Fetched(given, name)))
        with (
            (tmp_path / "file").open("rb") as file,
            nullcontext() if is_read else pytest.raises(pickle.UnpicklingError, match="getattr of"),
        ):
            assert _Unpickler(file).load() is kind.TORCH_PRESERVE_FORMAT


class Fetched:
    """Is pickled as an attribute of an object."""

    def __init__(self, of: Any, name: str):
        self.of, self.name = of, name

    def __reduce__(self) -> tuple:
        return getattr, (self.of, self.name)
