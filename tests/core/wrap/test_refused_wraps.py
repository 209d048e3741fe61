"""What wrap_model refuses leaves model and optimizer as they were."""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import os
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from contract_cases import LR, MIB, SEED, hooks_of, step, wrapped
from deleted import needs
from models import (
    at_home,
    differing,
    leftovers,
    seeded,
    transformer,
)
from runs import adamw
from torch import nn

import infinity


def test_wrapping_twice_is_refused(tmp_path):
    """Method: wrap a wrapped model, a model that contains it, one inside it, and a plain model with
    its optimizer."""
    model, managed = wrapped("nvme", tmp_path)
    config = at_home("nvme", "nvme", tmp_path)
    for again in (model, nn.Sequential(model), model.blocks[0]):
        with pytest.raises(infinity.UsageError, match="unwrap_model"):
            infinity.wrap_model(again, None, config)
    with pytest.raises(infinity.InfinityError):
        infinity.wrap_model(transformer(SEED), managed, config)
    with pytest.raises(infinity.InfinityError):
        infinity.wrap_model(model, managed, config)
    step(model, managed)


class Muon(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None: ...


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], type, list[str]]] = {
    "unsupported": (
        lambda m: torch.optim.LBFGS(m.parameters()),
        infinity.ConfigError,
        ["LBFGS", "AdamW", "SGD", "Lion"],
    ),
    "of the user": (lambda m: Muon(m.parameters()), infinity.ConfigError, ["Muon", "AdamW"]),
    "SparseAdam": (
        lambda m: torch.optim.SparseAdam(m.parameters()),
        infinity.ConfigError,
        ["SparseAdam", "AdamW"],
    ),
    "capturable": (
        lambda m: torch.optim.AdamW(m.parameters(), capturable=True),
        infinity.ConfigError,
        ["capturable"],
    ),
    "differentiable": (
        lambda m: torch.optim.Adam(m.parameters(), differentiable=True),
        infinity.ConfigError,
        ["differ"],
    ),
    "of another model": (
        lambda m: torch.optim.AdamW(transformer(1).parameters()),
        infinity.ConfigError,
        ["parameter"],
    ),
    "no optimizer": (lambda m: "adam", infinity.ConfigError, ["str"]),
}


@needs("ext/class_step")
@pytest.mark.parametrize("refused", REFUSED)
def test_optimizers_that_are_refused(refused, tmp_path):
    """Method: an unsupported kind, unsupported settings, other parameters; the error lists what is
    supported or names the parameter, and the model was not touched."""
    make, kind, words = REFUSED[refused]
    model = transformer(SEED)
    with pytest.raises(kind) as raised:
        infinity.wrap_model(model, make(model), at_home("nvme", "nvme", tmp_path))
    assert all(word in str(raised.value) for word in words), str(raised.value)
    assert all(type(p) is nn.Parameter for p in model.parameters()) and leftovers(tmp_path) == []


@needs("ext/migrate")
@pytest.mark.parametrize(
    ("config", "kind", "words"),
    [
        ({"parms": "host"}, infinity.ConfigError, ["parms", "params"]),
        ({"nvme_path": "/tmp"}, infinity.ConfigError, ["nvme_path", "nvme_paths"]),
        ({"completely_wrong": 1}, infinity.ConfigError, ["completely_wrong"]),
        ({"params": "gpu"}, infinity.ConfigError, ["gpu", "device", "host", "nvme"]),
        ({"params": "nvme"}, infinity.ConfigError, ["nvme_paths"]),
        ({"optimizer": "nvme", "nvme_paths": []}, infinity.ConfigError, ["nvme_paths"]),
        ({"host_memory": "48 GiBs"}, infinity.ConfigError, ["host_memory", "48 GiBs"]),
        ({"host_memory": -1}, infinity.ConfigError, ["host_memory"]),
        ({"host_memory": 1.5}, infinity.ConfigError, ["host_memory"]),
        ({"param_dtype": "int8"}, infinity.ConfigError, ["param_dtype"]),
        ({"master": "half"}, infinity.ConfigError, ["master", "split"]),
        ({"units": ["NoSuchBlock"]}, infinity.ConfigError, ["NoSuchBlock", "Block"]),
        ({"max_grad_norm": -1}, infinity.ConfigError, ["max_grad_norm"]),
        ({"micro_batch": 0}, infinity.ConfigError, ["micro_batch"]),
        ({"checksums": "yes"}, infinity.ConfigError, ["checksums"]),
        ("/no/such/file.toml", infinity.ConfigError, ["/no/such/file.toml"]),
        (17, infinity.ConfigError, ["int"]),
        (
            {"params": "host", "host_memory": "1KiB"},
            infinity.CapacityError,
            ["host_memory", "bytes"],
        ),
        (
            {"device_memory": "1KiB", "params": "device"},
            infinity.CapacityError,
            ["device_memory", "bytes"],
        ),
    ],
    ids=str,
)
def test_configs_that_are_refused(config, kind, words):
    """Method: unknown keys, values out of range, budgets too small; the error is typed and names
    key and remedy, and the model was not touched."""
    model = transformer(SEED)
    optimizer = adamw(model, LR)
    with pytest.raises(kind) as raised:
        infinity.wrap_model(model, optimizer, config)
    assert all(word in str(raised.value) for word in words), str(raised.value)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    with contextlib.suppress(infinity.InfinityError, TypeError):
        infinity.Config(**config) if isinstance(config, dict) else None


def test_config_in_all_its_forms(tmp_path):
    """Method: keywords, a dict, TOML and JSON paths give the same frozen config; sizes may be text;
    positional arguments and assignment raise."""
    expected = infinity.Config(
        params="nvme", nvme_paths=[str(tmp_path)], host_memory="1.5GiB", param_dtype="bf16"
    )
    assert expected.host_memory == 1536 * MIB and expected.param_dtype is torch.bfloat16
    (tmp_path / "c.toml").write_text(
        f'params = "nvme"\nnvme_paths = ["{tmp_path}"]\nhost_memory = "1.5GiB"\nparam_dtype ='
        ' "bf16"\n'
    )
    (tmp_path / "c.json").write_text(
        json.dumps(
            {
                "params": "nvme",
                "nvme_paths": [str(tmp_path)],
                "host_memory": "1.5GiB",
                "param_dtype": "bf16",
            }
        )
    )
    model = nn.Linear(2, 2)
    for form in (expected, tmp_path / "c.toml", str(tmp_path / "c.json")):
        infinity.wrap_model(model, None, form)
        infinity.unwrap_model(model)
    with pytest.raises(AttributeError):
        expected.params = "host"
    with pytest.raises(TypeError):
        infinity.Config("nvme")


def objects_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that a failed wrap could have changed."""
    return {
        "parameters": {
            n: (id(p), type(p), p.data_ptr(), p.requires_grad) for n, p in model.named_parameters()
        },
        "hooks": {n: hooks_of(m) for n, m in model.named_modules()},
        "attributes": {n: sorted(vars(m)) for n, m in model.named_modules()},
        "parameter attributes": {n: sorted(vars(p)) for n, p in model.named_parameters()},
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
        "group identities": [id(g) for g in optimizer.param_groups],
        "state keys": [sorted(optimizer.state[p]) for p in optimizer.state],
        "class": type(optimizer),
    }


def values_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    values = {name: t.detach().clone() for name, t in model.state_dict().items()}
    values |= {
        f"grad {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }
    for i, state in enumerate(optimizer.state.values()):
        values |= {
            f"{i} {key}": value.clone() for key, value in state.items() if torch.is_tensor(value)
        }
    return values


CAUSES = [
    "host budget",
    "device budget",
    "disk budget",
    "no folder",
    "a file",
    "second folder",
    "disk full",
    "disk fills up",
    "write fails at once",
    "write fails late",
    "write fails very late",
    "weights missing",
    "weights of another shape",
    "weights damaged",
    "interrupted",
    "bad environment",
]


@pytest.mark.parametrize("cause", CAUSES)
def test_a_failed_wrap_leaves_everything_as_it_was(cause, tmp_path, monkeypatch):
    """Method: let the wrap of a model in mid-training fail for many causes, early and late;
    parameters, gradients, optimizer state, hooks and attributes are what they were, to the bit and
    to the object, nothing is left on disk, and with the cause gone the same wrap works."""
    swap = tmp_path / "swap"
    swap.mkdir()
    model = transformer(SEED, blocks=6)
    optimizer = adamw(model, LR)
    step(model, optimizer)
    step(model)
    config: dict[str, Any] = at_home("nvme", "nvme", swap)
    kind: type[BaseException] = infinity.InfinityError
    with monkeypatch.context() as patch:
        bad = dict(config)
        if cause == "host budget":
            bad["host_memory"], kind = 1, infinity.CapacityError
        elif cause == "device budget":
            bad["device_memory"], kind = 1, infinity.CapacityError
        elif cause == "disk budget":
            bad["nvme_capacity"], kind = 1, infinity.CapacityError
        elif cause == "no folder":
            bad["nvme_paths"] = [str(tmp_path / "none")]
        elif cause == "a file":
            (tmp_path / "file").write_text("")
            bad["nvme_paths"] = [str(tmp_path / "file")]
        elif cause == "second folder":
            bad["nvme_paths"] = [str(swap), str(tmp_path / "none")]
        elif cause == "disk full":
            usage = shutil.disk_usage(swap)._replace(free=1000)
            patch.setattr(shutil, "disk_usage", lambda path: usage)
            kind = infinity.CapacityError
        elif cause == "disk fills up":
            patch.setenv("INFINITY_FAULTS", "seed=1,enospc=1.0")
        elif cause.startswith("write fails"):
            first = {"write fails at once": 0, "write fails late": 20, "write fails very late": 38}[
                cause
            ]
            patch.setenv("INFINITY_FAULTS", f"seed=1,eio=1.0,first_piece={first}")
            kind = infinity.StorageError
        elif cause == "weights missing":
            bad["weights"] = tmp_path / "none.safetensors"
        elif cause == "weights of another shape":
            from safetensors.torch import save_file

            save_file(
                {"norm.bias": torch.ones(3), "tokens.weight": torch.ones(67, 64)},
                tmp_path / "w.safetensors",
            )
            bad["weights"] = tmp_path / "w.safetensors"
        elif cause == "weights damaged":
            (tmp_path / "w.safetensors").write_bytes(b"nonsense" * 100)
            bad["weights"] = tmp_path / "w.safetensors"
        elif cause == "interrupted":
            from infinity.core.units.flat_param import FlatParam

            written = []

            def interrupted(self, *args, **kwargs):
                written.append(1)
                if len(written) == 20:
                    raise KeyboardInterrupt
                return original(self, *args, **kwargs)

            original = FlatParam.write_value
            patch.setattr(FlatParam, "write_value", interrupted)
            kind = KeyboardInterrupt
        elif cause == "bad environment":
            patch.setenv("INFINITY_FAULTS", "nonsense=1")
        objects, values = objects_of(model, optimizer), values_of(model, optimizer)
        with pytest.raises(kind):
            infinity.wrap_model(model, optimizer, bad)
    assert objects_of(model, optimizer) == objects
    assert differing(values_of(model, optimizer), values) == []
    assert leftovers(swap) == []
    model, optimizer = infinity.wrap_model(model, optimizer, config)
    optimizer.step()
    optimizer.zero_grad()
    step(model, optimizer, 1)


@pytest.mark.parametrize("folder", ["under a file", "read-only"])
def test_a_folder_that_cannot_be_written_is_a_typed_error(folder, tmp_path):
    """Method: a path under a regular file, and a folder on a read-only mount where one can be made;
    the error is typed and names the folder."""
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "swap"
    with contextlib.ExitStack() as stack:
        if folder == "read-only":
            place = tmp_path / "ro"
            place.mkdir()
            if os.system(f"mount -t tmpfs -o ro none {place} 2>/dev/null") != 0:
                pytest.skip("needs the right to mount")
            stack.callback(os.system, f"umount -l {place}")
        model = transformer(SEED)
        with pytest.raises(
            (infinity.StorageError, infinity.ConfigError), match=str(place)
        ) as raised:
            infinity.wrap_model(model, adamw(model, LR), at_home("nvme", "nvme", place))
        if isinstance(raised.value, infinity.StorageError):
            assert raised.value.errno in (errno.EROFS, errno.ENOTDIR, errno.EACCES) and isinstance(
                raised.value, OSError
            )
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_models_without_parameters_and_with_odd_ones(tmp_path):
    """Method: a model with no parameter at all, with an empty one only, with frozen integer and
    fp64 ones."""
    config = at_home("nvme", "nvme", tmp_path)
    nothing = nn.Sequential(nn.ReLU())
    assert infinity.wrap_model(nothing, None, config) == (nothing, None)
    assert torch.equal(nothing(torch.ones(2)), torch.ones(2))
    infinity.unwrap_model(nothing)

    empty = nn.ParameterList([nn.Parameter(torch.empty(0, 4))])
    model, optimizer = infinity.wrap_model(empty, torch.optim.AdamW(empty.parameters()), config)
    optimizer.step()
    assert model.state_dict()["0"].shape == (0, 4)

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.arange(12).view(3, 4), requires_grad=False)
            self.mask = nn.Parameter(torch.tensor([True, False, True, True]), requires_grad=False)
            self.wide = nn.Parameter(torch.ones(4, dtype=torch.float64), requires_grad=False)
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x * self.mask) + self.table.sum(0) * self.wide.float()

    plain = seeded(SEED, Mixed)
    model = copy.deepcopy(plain)
    model, optimizer = infinity.wrap_model(
        model, torch.optim.AdamW(model.linear.parameters()), config
    )
    assert torch.equal(model(torch.ones(4)), plain(torch.ones(4)))
    assert differing(model.state_dict(), plain.state_dict()) == []
