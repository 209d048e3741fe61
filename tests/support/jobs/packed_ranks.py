"""Two ranks train adapters on packed layers, wrapped and plain, and write what they found.

argv: a folder for the answer, the home, what is sharded
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import infinity

sys.path.append(str(Path(__file__).parents[1] / "models"))
from packed_models import BLOCKS, FORMATS, ROWS, WIDTH, Block, make, state, trained
from safetensors.torch import save_file
from scaled import in_fp8
from torch import nn

from infinity.ext.coded.coded import Coded

KINDS = (
    *("bitsandbytes nf4", "bitsandbytes int8", "torchao int8", "buffers", "parameters", "coded"),
    "packed here",  # by the wrap, of weights in memory
    "compressed",  # gathered as 8-bit codes, but for the packed weight's own, which lie in fp32
)


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def in_a_file(file: Path) -> tuple[nn.Module, nn.Module]:
    """Makes a model with dense weights, and one on meta whose file has them in FP8."""
    torch.manual_seed(0)
    plain, model = (
        nn.Sequential(*[Block(lambda linear: linear) for _ in range(BLOCKS)]) for _ in range(2)
    )
    tensors = plain.state_dict()
    for name in [name for name in tensors if name.endswith(("up.weight", "down.weight"))]:
        codes, scales = in_fp8(tensors[name], 128, 128)
        each = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        tensors[name].copy_(codes.float() * each)
        tensors |= {name: codes, f"{name}_scale_inv": scales}
    if dist.get_rank() == 0:
        save_file(tensors, file)
    dist.barrier()
    for each in (plain, model):
        for name, param in each.named_parameters():
            param.requires_grad_(".thin." in name or ".wide." in name)
    return plain.train(), model.to("meta").train()


def to_pack() -> tuple[nn.Module, nn.Module]:
    """Makes a packed model, and one that the wrap packs."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(nn.Sequential(*[Block(lambda linear: linear) for _ in range(BLOCKS)]).train())
        for name, param in made[-1].named_parameters():
            param.requires_grad_(".thin." in name or ".wide." in name)
    return infinity.quantize(made[0], "fp8"), made[1]


def dense(model: nn.Module) -> dict[str, torch.Tensor]:
    """The frozen weights, dense."""
    found = model.state_dict()
    return {
        name: value.dequantize() if isinstance(value, Coded) else value
        for name, value in found.items()
        if ".thin." not in name and ".wide." not in name
    }


def run(kind: str, home: str, shard: str, folder: Path) -> dict:
    rank, count = dist.get_rank(), dist.get_world_size()
    more = {}
    if kind == "compressed":
        kind, shard, more = "bitsandbytes fp4 in fp32", "parameters", {"compress_gathers": True}
    coded, file = kind == "coded", folder / "coded.safetensors"
    if kind == "packed here":
        plain, model = to_pack()
    else:
        plain, model = in_a_file(file) if coded else (make(kind), make(kind))
    if rank == 1 and not coded:  # the first rank's values count
        with torch.no_grad():
            own = model.parameters() if kind == "packed here" else trained(model)
            for tensor in (*own, *model.buffers()):
                tensor.zero_()
    stepping = torch.optim.AdamW(trained(plain), lr=1e-2, fused=True)
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
    config = {"params": home, "optimizer": home, "shard": shard, **more}
    if home == "nvme":
        config["nvme_paths"] = [str(folder)]
    if coded:
        config["weights"] = str(file)
    elif kind == "packed here":
        config["quantize"] = "fp8"
    model, optimizer = infinity.wrap_model(model, optimizer, config)
    losses, expected = [], []
    for step in range(3):
        loss = model(batch(step, rank)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / count)
        mean = sum(plain(batch(step, each)).pow(2).mean() for each in range(count)) / count
        mean.backward()
        stepping.step()
        stepping.zero_grad()
        expected.append(mean.item())
    if coded:
        mine, theirs = dense(model), dense(plain)
        same = all(torch.equal(mine[name], theirs[name]) for name in theirs)
        same &= any(isinstance(each, Coded) for each in model.parameters())
    else:
        same = state(model) == state(plain)
    if kind == "torchao int8":
        same &= all(state(each) == state(plain) for each in changed(plain, model))
    return {"losses": losses, "expected": expected, "same": same}


def changed(plain: nn.Module, model: nn.Module) -> Iterator[nn.Module]:
    """Changes the packed weights of both models in place: between passes, in a forward, by a
    load. Yields the wrapped one after each."""
    torch.manual_seed(1)
    given = Block(FORMATS["torchao int8"]())
    with torch.no_grad():
        for each in (plain, model):
            each[0].up.weight.copy_(given.up.weight)
        yield model
        for each in (plain, model):
            change = partial(each[1].up.weight.copy_, given.up.weight)
            hook = each[1].up.register_forward_pre_hook(
                lambda *_, change=change: (change(), None)[1]
            )
            each(batch(9, 0))
            hook.remove()
        yield model
        for each in (plain, model):
            each[2].load_state_dict(given.state_dict())
        yield model


def main() -> None:
    folder, home, shard = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found = {kind: run(kind, home, shard, folder) for kind in KINDS}
    if dist.get_rank() == 0:
        (folder / "told.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
