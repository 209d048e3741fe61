"""What the tests of meta share.

Words used here: **home**, **child** as in `models.py`. **piece**, **block** as in
`infinity/files/weight_files.py`. **small blocks**: blocks of 64 KiB, the least that can be
asked for, instead of 4 MiB, so that small files have several. **awkward file**: one whose tensors
start at odd offsets, behind a header and one-byte tensors of odd length. **twin**: the same check
on something that is wrong, or on something that is known to be right.
"""

from __future__ import annotations

import json
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import doubles
import pytest
import torch
from runs import adamw
from torch import nn

import infinity
from infinity import native
from infinity.ext.checkpoint import initialiser
from infinity.files import weight_files

SEED = 61
LR = 1e-2
MIB = 2**20
SMALL = native.CHECKSUM_NBYTES
CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}

every_home = pytest.mark.parametrize("home", ["device", "hostile"])
State = dict[str, torch.Tensor]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def write_file(path: Path, tensors: State, *, start: int | None = None) -> Path:
    """A safetensors file with the tensors in this order; the first one's bytes begin at
    ``start``."""
    header, at = {}, 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": CODES[tensor.dtype],
            "shape": [*tensor.shape],
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header).encode()
    if start is not None:
        assert len(text) + 8 <= start
        text = text.ljust(start - 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(raw(tensor))
    return path


def awkward_file(path: Path, tensors: State) -> Path:
    """The tensors, each behind a one-byte tensor of odd length that no model has."""
    between = {f"odd.{i}": torch.ones(2 * i % 7 + 1, dtype=torch.int8) for i in range(len(tensors))}
    mixed = [pair for pairs in zip(between.items(), tensors.items()) for pair in pairs]
    return write_file(path, dict(mixed), start=16385)


@pytest.fixture
def small_blocks(monkeypatch) -> Callable[..., None]:
    """Sets how much of a file is read, and how much of an initialised parameter is sent, at
    once."""

    def set_to(nbytes: int = SMALL) -> None:
        monkeypatch.setattr(weight_files, "READ_NBYTES", nbytes)
        monkeypatch.setattr(initialiser, "PIECE_ELEMENTS", 777)

    set_to()
    return set_to


def faulty_files(monkeypatch, **faults: float) -> None:
    """Injects faults into what reads the weights, and into nothing else."""
    layer = doubles.layer(doubles.fault_plan(**faults))
    mine = types.SimpleNamespace(**vars(native))
    mine.make_io_engine = lambda **kwargs: native.make_io_engine(layer=layer, **kwargs)
    monkeypatch.setattr(weight_files, "native", mine)


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


class OwnWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 7))


def held_weakly() -> tuple[nn.Module, Any]:
    model = on_meta(lambda: nn.Linear(4, 4))
    return model, weakref.ref(model.weight)


def held_by_a_view() -> tuple[nn.Module, Any]:
    model = on_meta(lambda: nn.Linear(4, 4))
    return model, model.weight[0]


def init_without_argument() -> tuple[nn.Module, Any]:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 4)
            self._init_weights()

        def _init_weights(self) -> None:
            nn.init.zeros_(self.line.weight)

    return on_meta(Own), None


def stepped_on_meta() -> tuple[nn.Module, Any]:
    model = on_meta(lambda: nn.Linear(4, 4))
    optimizer = adamw(model, LR)
    model(torch.ones(2, 4, device="meta")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def optimizer_state(optimizer: torch.optim.Optimizer) -> State:
    state = optimizer.state_dict()["state"]
    return {
        f"{i}.{key}": torch.as_tensor(value)
        for i, of_one in state.items()
        for key, value in of_one.items()
    }


def unlike(drawn: State, plain: State) -> list[str]:
    """Names whose values are not distributed alike: constants are the same, and standard deviation
    and mean agree."""
    found = []
    for name, expected in plain.items():
        values, expected = drawn[name].float(), expected.float()
        spread = expected.std() if expected.numel() > 1 else torch.zeros(())
        if spread == 0 or not expected.numel():
            same = torch.equal(values, expected)
        else:
            near = 8 * spread / expected.numel() ** 0.5
            same = (values.std() - spread).abs() <= near and (
                values.mean() - expected.mean()
            ).abs() <= near
        if not same:
            found.append(name)
    return found


def drawn_and_plain(build: Callable[[], nn.Module]) -> tuple[State, State]:
    """Parameters and buffers as a wrap of a meta model draws them, and as the model is when it is
    built."""
    torch.manual_seed(SEED)
    plain = build()
    model, _ = infinity.wrap_model(on_meta(build), None, {"params": "host"})
    return model.state_dict() | dict(model.named_buffers()), plain.state_dict() | dict(
        plain.named_buffers()
    )
