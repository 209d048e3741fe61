"""Trains with reaches inside torch turned off, and tells what differs from plain torch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import infinity
from infinity import torch_private

HOMES: dict[str, dict] = {
    "device": {},
    "host": {"params": "host", "optimizer": "host", "activations": "host"},
    "nvme": {"params": "nvme", "optimizer": "nvme"},
}


class Small(nn.Module):
    """An embedding that its head shares, a block whose forward is checkpointed, and one that is
    clamped."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(600, 480)  # large enough to land by its uses
        self.block = nn.Sequential(nn.Linear(480, 16), nn.GELU(), nn.Linear(16, 480))
        self.gain = nn.Linear(480, 480, bias=False)
        self.head = nn.Linear(480, 600, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        x = x + torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)
        with torch.no_grad():
            self.gain.weight.clamp_(-0.04, 0.04)
        return self.head(self.gain(x) + self.table(ids.flip(0)))


def trained(config: dict | None) -> list[torch.Tensor]:
    """Losses and weights of some steps, with a write through a state dict, one through `.data`, an
    array that is kept, and a second backward through a kept graph."""
    torch.manual_seed(0)
    model: nn.Module = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if config is not None:
        model, optimizer = infinity.wrap_model(model, optimizer, config)
    ids, seen = torch.arange(12) * 7 % 600, []
    for step in range(4):
        loss = F.cross_entropy(model(ids + step), ids)
        loss.backward(retain_graph=step == 1)
        if step == 1:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach().clone())
        state = model.state_dict()
        if step == 0:
            state["block.0.bias"].data.add_(0.5)
            kept = state["block.2.bias"].view(-1).numpy()
        if step == 2:
            with torch.no_grad():
                model.block[0].weight.mul_(1.5)
        del state
    assert kept is not None
    return seen + [value.clone() for value in model.state_dict().values()]


def given_as_data(weight: torch.Tensor) -> torch.Tensor:
    """Reads a tensor that has got the weight's memory."""
    other = torch.empty(0)
    other.data = weight
    return other.clone()


ROWS = torch.arange(6)[None]
# Ways to read all of a weight, most of which do not ask its class.
READS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clone": torch.Tensor.clone,
    "rows": lambda weight: torch.stack(list(weight)),
    "numbers": lambda weight: torch.tensor([list(row) for row in weight]),
    "vmap": lambda weight: torch.vmap(lambda row: row * 1)(weight),
    "tensor": lambda weight: torch.tensor(weight),
    "as_tensor": lambda weight: torch.as_tensor(weight, dtype=torch.float64).float(),
    "asarray": lambda weight: torch.asarray(weight, copy=True),
    "Tensor": lambda weight: torch.Tensor(weight).clone(),
    "FloatTensor": lambda weight: torch.FloatTensor(weight).clone(),
    "Variable": lambda weight: torch.autograd.Variable(weight).clone(),
    "new_tensor": lambda weight: torch.ones(1).new_tensor(weight),
    "as_subclass": lambda weight: weight.as_subclass(torch.Tensor).clone(),
    "sparse": lambda weight: torch.sparse_coo_tensor(ROWS, weight).to_dense(),
    "sparse.FloatTensor": lambda weight: torch.sparse.FloatTensor(ROWS, weight).to_dense(),
    "scripted": lambda weight: scripted(weight),
    "numpy": lambda weight: torch.from_numpy(weight.detach().numpy()).clone(),
    "set_": lambda weight: torch.empty(0).set_(weight).clone(),
    "data": given_as_data,
    "to_dlpack": lambda weight: torch.from_dlpack(torch.utils.dlpack.to_dlpack(weight)).clone(),
    "_to_dlpack": lambda weight: torch.from_dlpack(torch._C._to_dlpack(weight)).clone(),
    "nested": lambda weight: torch.nested.nested_tensor([weight])[0].clone(),
}


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x * 1


def tiny(config: dict | None) -> tuple:
    """A small model and its optimizer."""
    torch.manual_seed(3)
    model: nn.Module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return (model, optimizer) if config is None else infinity.wrap_model(model, optimizer, config)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Makes one step."""
    model(torch.ones(2, 6)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def checkpointed(folder: Path) -> bool:
    """Saves, trains on, and loads: tells whether the next step has the same bits."""
    values = []
    for loads in (False, True):
        model, optimizer = tiny(HOMES["host"])
        if loads:
            infinity.load_checkpoint(folder / "saved", model, optimizer)
        else:
            step(model, optimizer)
            infinity.save_checkpoint(folder / "saved", model, optimizer)
        step(model, optimizer)
        values.append([each.clone() for each in model.state_dict().values()])
    return all(map(torch.equal, *values))


def reads() -> dict[str, str]:
    """Tells how each of READS ends on a weight at rest: "right", "wrong", or the error's name."""
    model, optimizer = tiny(HOMES["host"])
    found = {}
    for name, read in READS.items():
        step(model, optimizer)
        right = model.state_dict()["0.weight"].clone()
        try:
            found[name] = "right" if torch.equal(read(model[0].weight), right) else "wrong"
        except RuntimeError as error:
            found[name] = type(error).__name__
    model(torch.ones(2, 6)).sum().backward()
    try:
        torch.utils.dlpack.to_dlpack(model[0].weight.grad)
    except RuntimeError as error:
        found["a gradient"] = type(error).__name__
    return found


def refuses_a_parameter() -> bool:
    """Tells whether a Parameter of its own over a weight at rest is refused."""
    model, _ = tiny(HOMES["host"])
    try:
        nn.Parameter(model[0].weight)
    except infinity.UsageError:
        return True
    return False


def compiled() -> bool:
    """Compiles the model, whose weights an array holds. Tells whether it trains as plain."""
    model, optimizer = tiny(HOMES["host"])
    other, its = tiny(None)
    kept: list = []
    model[2].register_forward_hook(lambda module, args, out: kept.append(module.weight.detach()))
    forwards = torch.compile(model, backend="eager"), other
    for value in (1.0, 0.5):
        for forward, stepped in zip(forwards, (optimizer, its)):
            forward(torch.full((2, 6), value)).square().sum().backward()
            stepped.step()
            stepped.zero_grad()
    assert len(kept) == 2
    return all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


def on_two_ranks(folder: Path) -> bool:
    """Trains on two ranks that have one batch. Tells whether all is as on one."""
    child = os.fork()
    rank = 0 if child else 1
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2
    )
    values = []
    for config in (HOMES["host"], None):
        model, optimizer = tiny(config)
        for _ in range(2):
            step(model, optimizer)
        values.append([each.clone() for each in model.state_dict().values()])
        del model, optimizer
    same = all(map(torch.equal, *values))
    dist.destroy_process_group()
    if not child:
        os._exit(0 if same else 1)
    return same and os.waitpid(child, 0)[1] == 0


if __name__ == "__main__":
    path = Path(sys.argv[1])
    told = {"on": [each.name for each in torch_private.REACHES if each.found is not None]}
    told |= {"two ranks": on_two_ranks(path)}
    plain = trained(None)
    for home, config in HOMES.items():
        more = {"nvme_paths": [str(path)]} if home == "nvme" else {}
        told[home] = all(map(torch.equal, trained(config | more), plain))
    told |= {"checkpoint": checkpointed(path), "reads": reads(), "compiled": compiled()}
    told["parameter"] = refuses_a_parameter()
    print(json.dumps(told))
