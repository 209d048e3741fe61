"""Ranks step by the code of optimizers' classes, wrapped and plain, and write what they found.

All ranks have the same batches, so that the mean of their gradients is each one's.

argv: a folder for the answer, the home, what is sharded
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from prodigyopt import Prodigy
from torch import optim

import infinity
from infinity.errors import UsageError
from infinity.ext.class_step.class_ranks import ClassRanks
from infinity.ext.class_step.class_step import ClassStepper

sys.path.append(str(Path(__file__).parents[1] / "models"))
from matrices_net import OfMatrices, matrices_net, muon_of, trained
from own_optimizers import MuonWithAdam
from small_net import model, same, stepped_by_class, steps

MADE = {
    "in parts": stepped_by_class,
    "Adafactor": lambda p: optim.Adafactor(p, lr=1e-2, weight_decay=0.1),
    "Prodigy": lambda p: Prodigy(p, d0=1e-3),
    "of a script": MuonWithAdam,
    "Muon": lambda p: optim.Muon([each for each in p if each.requires_grad], lr=0.02),
}


def values(net, optimizer) -> tuple[dict, dict]:
    state = optimizer.state_dict()["state"]
    return (
        {name: value.detach().clone() for name, value in net.state_dict().items()},
        {i: {k: torch.as_tensor(v).clone() for k, v in of.items()} for i, of in state.items()},
    )


def run(case: str, home: str, shard: str, folder: Path) -> dict:
    plain, net = model(), model()
    for param in (*plain.parameters(), *net.parameters()):
        param.requires_grad_(case != "Muon" or param.ndim == 2)
    stepping = MADE[case](list(plain.parameters()))
    optimizer = MADE[case](list(net.parameters()))
    config = {"params": home, "optimizer": home, "shard": shard}
    if home == "nvme":
        config["nvme_paths"] = [str(folder)]
    net, optimizer = infinity.wrap_model(net, optimizer, config)
    received = []
    swap = ClassRanks._swap

    def counted(self, given, counts, what):
        received.append(sum(counts))
        return swap(self, given, counts, what)

    ClassRanks._swap = counted
    for run_of in ((plain, stepping), (net, optimizer)):
        steps(*run_of, 6)
    ClassRanks._swap = swap
    found = {"same": same(values(net, optimizer), values(plain, stepping)), "received": received}
    saved = folder / f"saved {case}"
    infinity.save_checkpoint(saved, net, optimizer)
    for run_of in ((plain, stepping), (net, optimizer)):
        steps(*run_of, 2, seed=2)
    after = values(net, optimizer)
    infinity.load_checkpoint(saved, net, optimizer)
    steps(net, optimizer, 2, seed=2)
    found["resumed"] = same(values(net, optimizer), after)
    if case == "Adafactor":
        found |= failing(net, optimizer)
        try:
            with optimizer.step_in_backward():
                net(torch.ones(2, 64)).sum().backward()
        except UsageError as error:
            found["refused"] = str(error)
    return found


def run_matrices(home: str, shard: str, folder: Path) -> dict:
    """Steps heads, experts and convolutions, beside torch's Muon of their matrices."""
    plain, net = matrices_net(), matrices_net()
    theirs = OfMatrices(plain)
    config = {"params": home, "optimizer": home, "shard": shard, "nvme_paths": [str(folder)]}
    net, optimizer = infinity.wrap_model(net, muon_of(net), config)
    for run_of in ((plain, theirs), (net, optimizer)):
        trained(*run_of, 4)
    saved = folder / "saved matrices"
    infinity.save_checkpoint(saved, net, optimizer)
    trained(net, optimizer, 1)
    infinity.load_checkpoint(saved, net, optimizer)
    expected, momentum = plain.state_dict(), theirs.momentum()
    found = {name: (param, optimizer.state[param]) for name, param in net.named_parameters()}
    return {
        "same": all(
            torch.equal(param.detach(), expected[name])
            and torch.equal(state["momentum_buffer"], momentum[name])
            for name, (param, state) in found.items()
        ),
        "resumed": True,  # what is the same was loaded
    }


def failing(net, optimizer) -> dict:
    """An error of the class on one rank, which all ranks raise, and go on after."""
    before, step_of = values(net, optimizer), ClassStepper._step
    net(torch.ones(2, 64)).sum().backward()

    def once(self, *args):
        ClassStepper._step = step_of
        raise ZeroDivisionError("of this rank")

    if dist.get_rank() == 1:
        ClassStepper._step = once
    told = ""
    try:
        optimizer.step()
    except UsageError as error:
        told = str(error)
    optimizer.step()
    optimizer.zero_grad()
    return {"failed": told, "moved": not same(values(net, optimizer), before)}


def main() -> None:
    folder, home, shard = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found = {case: run(case, home, shard, folder) for case in MADE}
    found["matrices"] = run_matrices(home, shard, folder)
    (folder / f"told.{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
