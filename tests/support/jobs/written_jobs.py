"""What a version writes, tiny, and what its next steps give: for `tools/fixtures.py`, which writes
it once for each version, and for the tests of the later ones.

Every operation rounds each element alone or gives an exact result, so that no bit depends on a
processor's vectors, on threads or on an order of sums.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = map(str, Path(__file__).parents[1].glob("*/"))
import torch
import torch.distributed as dist
from ranks import serve
from torch import nn

import infinity

WRITTEN = Path(__file__).parents[2] / "ext/checkpoint/written"
EXTRA = {"epoch": 3, "tuple": (1, None, float("inf")), "tensor": torch.arange(3), 7: [True]}
Pair = tuple[nn.Module, torch.optim.Optimizer]


class Scaled(nn.Module):
    def __init__(self, shape: tuple[int, int], dtype: torch.dtype):
        super().__init__()
        self.weight, self.bias = (nn.Parameter(_dyadic(shape).to(dtype)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.bias


class Net(nn.Module):
    """Layers of one product and one sum for each element, and a buffer that counts."""

    def __init__(self, dtype: torch.dtype = torch.float32, shape: tuple[int, int] = (4, 8)):
        super().__init__()
        self.layers = nn.ModuleList(Scaled(shape, dtype) for _ in range(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        for layer in self.layers:
            x = layer(x)
        return x


class Packed(nn.Module):
    """A layer whose base is packed, and whose adapters are trained."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(64, 64, bias=False)
        with torch.no_grad():
            self.project.weight.copy_(_dyadic((64, 64)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(x)


class SignSum(torch.optim.Optimizer):
    """A class of a script's own, stepped by its own code."""

    def __init__(self, params: Any, lr: float):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["sum"] = torch.zeros_like(param)
                state["sum"].mul_(0.5).add_(param.grad.sign())
                param.sub_(state["sum"] * group["lr"])


def _dyadic(shape: tuple[int, int]) -> torch.Tensor:
    values = torch.randint(32, 97, shape) / 64
    return torch.where(torch.randint(2, shape) == 1, values, -values)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _wrapped(
    config: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    make: Callable[[nn.Module], torch.optim.Optimizer] = _adamw,
    shape: tuple[int, int] = (4, 8),
) -> Pair:
    torch.manual_seed(5)
    model = Net(dtype, shape)
    if "nvme" in config.values():
        config = config | {"nvme_paths": [tempfile.mkdtemp()]}
    return infinity.wrap_model(model, make(model), config)


def _homes(home: str) -> dict[str, Any]:
    return {"params": home, "optimizer": home}


def _adapters() -> Pair:
    import peft

    torch.manual_seed(5)
    options = {"r": 1, "lora_alpha": 1, "target_modules": ["project"]}
    model = peft.get_peft_model(Packed(), peft.LoraConfig(**options))
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_" in name:
                param.copy_(_dyadic(tuple(param.shape)))
    model = infinity.quantize(model, "nf4").train()
    trained = [param for param in model.parameters() if param.requires_grad]
    return infinity.wrap_model(model, torch.optim.AdamW(trained, lr=1e-2), _homes("host"))


ONE: dict[str, Callable[[], Pair]] = {
    "fp32 on the device": lambda: _wrapped(_homes("device")),
    "fp32 in host memory": lambda: _wrapped(
        _homes("host"), make=lambda model: torch.optim.SGD(model.parameters(), 0.125, 0.5)
    ),
    "split bf16 in host memory": lambda: _wrapped(_homes("host"), torch.bfloat16),
    "fp32 masters, bf16 moments": lambda: _wrapped(
        _homes("nvme") | {"master": "fp32", "moments": "bf16"}, torch.bfloat16
    ),
    "8-bit moments on nvme": lambda: _wrapped(
        _homes("nvme") | {"moments": "int8"}, torch.bfloat16, shape=(32, 32)
    ),
    "a class of its own": lambda: _wrapped(
        _homes("host"), make=lambda model: SignSum(model.parameters(), lr=1 / 64)
    ),
    "an average": lambda: _wrapped(_homes("host"), torch.bfloat16),
    "adapters on packed nf4": _adapters,
}
AVERAGED, ADAPTERS = "an average", "adapters on packed nf4"
# What two ranks write
TWO = ("two ranks", "groups that train apart")
SAVER, TRAIN = "a saver with its order", "infinity train"
TINY = {
    "model_type": "gpt2",
    "vocab_size": 256,
    "n_positions": 16,
    "n_embd": 8,
    "n_layer": 1,
    "n_head": 1,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def saved_in(folder: Path, case: str, group: int = 0) -> Path:
    """The folder of a case's checkpoint."""
    return folder / (case.replace(" ", "-").replace(",", "") + (f"-{group}" if group else ""))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """One step on a batch from the saved generator. The loss's bits, as text."""
    if any("lora_" in name for name, _ in model.named_parameters()):
        # One input and one output of each product: its sums have one term
        at, of = torch.randint(64, (2,)).tolist()
        found = model(torch.nn.functional.one_hot(torch.tensor([at]), 64).float())[:, of]
    else:
        found = model(torch.randint(-8, 9, tuple(next(model.parameters()).shape)) / 8)
    found = found.float()
    (found * found).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return math.fsum(value * value for value in found.detach().flatten().tolist()).hex()


def _digest(state: dict[str, Any]) -> str:
    found = hashlib.sha256()
    for name in sorted(name for name, value in state.items() if isinstance(value, torch.Tensor)):
        value = state[name].detach().cpu().contiguous().flatten()
        found.update(name.encode() + bytes(value.view(torch.uint8).tolist()))
    return found.hexdigest()


def _went_on(model: nn.Module, optimizer: Any, more: Callable[[], Any] = lambda: None) -> dict:
    """What is there, what two steps give, and what is there then."""
    told: dict[str, Any] = {"weights": _digest(model.state_dict()), "losses": []}
    for _ in range(2):
        told["losses"].append(step(model, optimizer))
        more()
    return told | {"after": _digest(model.state_dict())}


def _averages(case: str, model: nn.Module) -> tuple[Any, Callable[[], Any]]:
    average = infinity.ema(model, 0.5) if case == AVERAGED else None
    return average, (lambda: None) if average is None else average.update


def _with_average(told: dict, model: nn.Module, average: Any) -> dict:
    if average is not None:
        with average.applied():
            told["average"] = _digest(model.state_dict())
    return told


def write(folder: Path, case: str) -> dict[str, Any]:
    """Writes the checkpoint of a case after two steps. What the next two give."""
    model, optimizer = ONE[case]()
    average, update = _averages(case, model)
    for _ in range(2):
        step(model, optimizer)
        update()
    infinity.save_checkpoint(saved_in(folder, case), model, optimizer, extra=EXTRA)
    told = _with_average(_went_on(model, optimizer, update), model, average)
    infinity.unwrap_model(model, optimizer)
    return told


def go_on(folder: Path, case: str, spoil: bool = False) -> dict[str, Any]:
    """What two steps from a written checkpoint give. ``spoil``: with another seed after it."""
    model, optimizer = ONE[case]()
    average, update = _averages(case, model)
    extra = infinity.load_checkpoint(saved_in(folder, case), model, optimizer)
    assert repr(extra) == repr(EXTRA)
    if spoil:
        torch.manual_seed(1)
    told = _with_average(_went_on(model, optimizer, update), model, average)
    infinity.unwrap_model(model, optimizer)
    return told


def run_saver(folder: Path, *, writes: bool = False) -> dict[str, Any]:
    """Two steps of a loop that saves itself, in a folder that it may write: the batches that it
    takes, losses and weights."""
    model, optimizer = _wrapped(_homes("host"))
    dataset = torch.arange(24).view(12, 2)
    saver = infinity.Checkpoints(saved_in(folder, SAVER), model, optimizer, extra=EXTRA)
    resumed = saver.resume()
    assert writes or repr(resumed.extra) == repr(EXTRA)
    order = infinity.data.Order(dataset, batch_size=3, seed=1, consumed=resumed.steps)
    told: dict[str, Any] = {"weights": _digest(model.state_dict()), "batches": [], "losses": []}
    for batch in itertools.islice(order, 2):
        told["batches"].append(list(map(int, batch)))
        told["losses"].append(step(model, optimizer))
        saver.after_step()
    saver.close()
    told["after"] = _digest(model.state_dict())
    infinity.unwrap_model(model, optimizer)
    return told


def run_train(folder: Path, steps: int, *flags: str) -> list[float]:
    """Losses of `infinity train` up to so many ``steps``, in a folder that it may write."""
    from infinity.tools.cli import main

    saved, model, data = saved_in(folder, TRAIN), folder / "model.json", folder / "text.txt"
    model.write_text(json.dumps(TINY))
    data.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    words = f"--model {model} --data {data} --params host --optimizer host --dtype fp32 --steps"
    words += f" {steps} --checkpoint {saved} --warmup-steps 1 --batch-size 2 --sequence-length 16"
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        assert main(["train", *words.split(), "--eval-batches", "1", "--json", *flags]) == 0
    return json.loads(told.getvalue().splitlines()[-1])["losses"]


def exported(folder: Path) -> str:
    """The bits of the weights in a checkpoint of `infinity train`."""
    from safetensors.torch import load_file

    from infinity.ext.checkpoint.export import export

    with tempfile.TemporaryDirectory() as made:
        export(saved_in(folder, TRAIN), Path(made) / "out")
        return _digest(load_file(Path(made) / "out/model.safetensors"))


def write_loops(folder: Path) -> dict[str, Any]:
    """Writes the checkpoints of whole loops, and what the next two steps of copies of them give."""
    run_saver(folder, writes=True)
    run_train(folder, 2)
    return go_on_with_loops(folder)


def go_on_with_loops(folder: Path) -> dict[str, Any]:
    """What the next two steps of copies of loops give."""
    with tempfile.TemporaryDirectory() as scratch:
        for name in (SAVER, TRAIN):
            shutil.copytree(saved_in(folder, name), saved_in(Path(scratch), name))
        told = {SAVER: run_saver(Path(scratch)), TRAIN: {"weights": exported(Path(scratch))}}
        told[TRAIN]["losses"] = run_train(Path(scratch), 4, "--resume")
    return told


def two_ranks(folder: str, case: str, writes: bool) -> dict[str, Any]:
    """What :func:`write` and :func:`go_on` do, on each of two ranks."""
    if case == TWO[0]:
        return _of_two(saved_in(Path(folder), case), writes, *_wrapped(_homes("host")))
    names = {"mesh_dim_names": ("slow", "dp")}
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1), **names)
    torch.manual_seed(5)
    model = Net()
    model, optimizer = infinity.wrap_model(model, _adamw(model), _homes("host"), mesh=mesh["dp"])
    local = infinity.LocalSteps(model, mesh["slow"], every=3, lr=0.5, momentum=0.5)
    path = saved_in(Path(folder), case, local.group)
    return _of_two(path, writes, model, optimizer, local.after_step)


def _of_two(
    path: Path,
    writes: bool,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    more: Callable[[], Any] = lambda: None,
) -> dict[str, Any]:
    torch.manual_seed(100 + dist.get_rank())
    for _ in range(2 if writes else 0):
        step(model, optimizer)
        more()
    if writes:
        infinity.save_checkpoint(path, model, optimizer, extra=EXTRA)
    else:
        infinity.load_checkpoint(path, model, optimizer)
    told = _went_on(model, optimizer, more)
    infinity.unwrap_model(model, optimizer)
    return told


def read(version: Path) -> dict[str, Any]:
    """What the version gave, by case: of one process, or of each rank."""
    return json.loads((version / "expected.json").read_text())


if __name__ == "__main__":
    serve(globals())
