"""A model that something else moves, shards or fills is refused by the name of that something, and
stays as it was."""

from __future__ import annotations

import logging
from pathlib import Path

import prepared
import pytest
import torch
from torch import nn

import infinity
from infinity.errors import ConfigError, InfinityError

HOST = {"params": "host", "optimizer": "host"}


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def with_cpu_offload(folder: Path) -> nn.Module:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.cpu_offload(make(), execution_device=torch.device("cpu"))


def with_disk_offload(folder: Path) -> nn.Module:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.disk_offload(
        make(), str(folder / "offload"), execution_device=torch.device("cpu")
    )


def with_device_map(folder: Path) -> nn.Module:
    accelerate = pytest.importorskip("accelerate")
    places = {"0": "cpu", "2": "disk"}
    return accelerate.dispatch_model(
        make(), places, main_device="cpu", offload_dir=str(folder / "offload"), force_hooks=True
    )


def in_data_parallel(folder: Path) -> nn.Module:
    return nn.DataParallel(make())


def filled_by_deepspeed(folder: Path) -> nn.Module:
    model = make()
    model[0].weight.ds_id = 0
    return model


class Renews(nn.Linear):
    """A layer whose weight is another Parameter whenever its modules are listed."""

    def named_modules(self, *args, **kwargs):
        self.weight = nn.Parameter(self.weight.data, requires_grad=False)
        return super().named_modules(*args, **kwargs)


def under_inference_mode(folder: Path) -> nn.Module:
    with torch.inference_mode():
        return make()


def with_renewed_weights(folder: Path) -> nn.Module:
    return nn.Sequential(make(), Renews(8, 8))


REFUSED = {
    "cpu_offload": (with_cpu_offload, "AlignDevicesHook"),
    "disk_offload": (with_disk_offload, "AlignDevicesHook"),
    "device_map": (with_device_map, "AlignDevicesHook"),
    "DataParallel": (in_data_parallel, "DataParallel"),
    "a placeholder": (filled_by_deepspeed, "zero.Init"),
    "made under inference_mode": (
        under_inference_mode,
        "0.weight was made under torch.inference_mode",
    ),
    "weights made anew": (
        with_renewed_weights,
        (
            "1 of the model's 6 parameters .1.weight. are other Parameters each"
            " time.*test_checks.Renews"
        ),
    ),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("trained", [True, False])
def test_models_that_something_else_moves_are_refused(what, trained, tmp_path):
    build, said = REFUSED[what]
    model = build(tmp_path)
    kinds = [type(param) for param in model.parameters()]
    trainable = [param for param in model.parameters() if not param.is_meta]
    optimizer = torch.optim.SGD(trainable, lr=0.1) if trained and trainable else None
    with pytest.raises(ConfigError, match=said):
        infinity.wrap_model(model, optimizer, HOST)
    assert kinds == [type(param) for param in model.parameters()]


OF_RANKS = """
import os, sys, torch, torch.distributed as dist
from torch import nn
import infinity

from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
of_ddp = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
of_fsdp = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), mesh=init_device_mesh("cpu", (1,)))
for model in (of_ddp, of_fsdp):
    try:
        infinity.wrap_model(model, torch.optim.AdamW(model.parameters()), {"params": "host", "optimizer": "host"})
    except infinity.InfinityError as error:
        print(type(error).__name__, error)
dist.destroy_process_group()
"""  # noqa: E501


def test_models_of_torchs_own_ranks_are_refused(tmp_path):
    """In a child: a process group of one."""
    done = prepared.run("-c", OF_RANKS, tmp_path / "meeting")
    assert done.returncode == 0, done.stderr
    for kind, said in zip(
        ("DistributedDataParallel", "FSDPSequential"), done.stdout.splitlines(), strict=True
    ):
        assert said.startswith("ConfigError") and kind in said


def test_ranks_that_were_launched_and_not_joined_are_refused(monkeypatch):
    """Method: the environment that torchrun makes, without init_process_group; each rank would
    train apart."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    model = make()
    with pytest.raises(ConfigError, match=r"rank 1 of 2.*init_process_group"):
        infinity.wrap_model(model, torch.optim.SGD(model.parameters(), lr=0.1), HOST)
    assert type(model[0].weight) is nn.Parameter
    monkeypatch.setenv("WORLD_SIZE", "1")
    infinity.wrap_model(model, torch.optim.SGD(model.parameters(), lr=0.1), HOST)


class InParts(torch.Tensor):
    """A frozen weight made of others, as quantised ones are; all of them show one address."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def plain(value):
            return value.codes.float() * value.scale if isinstance(value, cls) else value

        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        return func(
            *map(plain, args), **{key: plain(value) for key, value in (kwargs or {}).items()}
        )


def test_frozen_weights_made_of_others_are_accepted_and_counted(caplog):
    """Method: two quantised weights beside trained ones; the model trains, and what stays is said
    in bytes, and planned."""
    model = make()
    for layer in (model[0], model[2]):
        codes = torch.randint(-8, 8, (8, 8), dtype=torch.int8)
        layer.weight = nn.Parameter(InParts(codes, torch.tensor(0.1)), requires_grad=False)
    trained = [param for param in model.parameters() if param.requires_grad]
    with caplog.at_level(logging.WARNING, "infinity"):
        model, optimizer = infinity.wrap_model(model, torch.optim.SGD(trained, lr=0.1), HOST)
    (said,) = [
        record.getMessage()
        for record in caplog.records
        if "stay where they are" in record.getMessage()
    ]
    assert f"{2 * (64 + 4)} B" in said and "2 InParts" in said, said
    assert infinity.stats(model).buffers_nbytes == 2 * (64 + 4)
    before = {
        name: value.clone() for name, value in model.state_dict().items() if name.endswith("bias")
    }
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    assert not torch.equal(before["2.bias"], model.state_dict()["2.bias"])


def test_weights_that_share_memory_are_still_refused():
    """The twin: plain Parameters over the same bytes."""
    model = make()
    model[2].weight = nn.Parameter(model[0].weight.data)
    with pytest.raises(InfinityError, match="share memory"):
        infinity.wrap_model(model, torch.optim.SGD(model.parameters(), lr=0.1), HOST)
