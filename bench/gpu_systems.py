"""gpu systems: the step of a training on a GPU, by each of the systems that :mod:`bench.gpu_train`
compares."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Callable

import torch

from .llama import SHAPES, Llama

Step = Callable[[], torch.Tensor]
Context = Callable[[], contextlib.AbstractContextManager]


def plain(args: argparse.Namespace) -> tuple[Step, dict]:
    """Makes the step of torch alone, nothing offloaded: bf16 weights, an fp32 master copy, AdamW
    fused."""
    model = _real_model(args)
    masters = [param.detach().float().requires_grad_() for param in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=torch.device(args.device).type == "cuda")

    def step() -> torch.Tensor:
        loss = _backward(model, args)
        if args.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for master, param in zip(masters, model.parameters()):
            master.grad, param.grad = param.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), masters)
        return loss

    return step, {}


def ours(args: argparse.Namespace) -> tuple[Step, dict]:
    """Makes the step of Infinity, from a model on meta, with the configuration that is given."""
    import infinity
    from infinity.core.run.registry import wrapped

    torch.manual_seed(0)
    with torch.device("meta"):
        model = Llama(SHAPES[args.size]).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = infinity.wrap_model(
        model, optimizer, {"device": args.device, **json.loads(args.config)}
    )
    # Else every block is recomputed by torch's checkpoint, and nothing is left to choose
    model.recomputes = not json.loads(args.config).get("recompute", False)
    model.products_kept = args.products
    for block in model.blocks if args.compile else ():
        block.compile(backend=args.compile)
    told = {"model": model}
    is_split = args.micro_batches > 1
    collecting = (lambda: infinity.accumulate(model)) if is_split else contextlib.nullcontext

    def step() -> torch.Tensor:
        loss = _usual_step(model, optimizer, args, collecting)
        if args.wait:
            wrapped(model).engine.wait_idle()
        return loss

    return step, told


def deepspeed(args: argparse.Namespace) -> tuple[Step, dict]:
    """Makes the step of ZeRO-3 with weights and optimizer on the host."""
    import deepspeed as rival

    _one_process()
    offload = {"device": "cpu", "pin_memory": True}
    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_param": dict(offload),
            "offload_optimizer": dict(offload),
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        **({"gradient_clipping": 1.0} if args.clip else {}),
    }
    model = _real_model(args, device="cpu")
    engine, *_ = rival.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step() -> torch.Tensor:
        loss = engine(_batch(args))
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step, {}


def fsdp(args: argparse.Namespace) -> tuple[Step, dict]:
    """Makes the step of FSDP2 with CPUOffloadPolicy: fp32 shards, bf16 compute."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    _one_process()
    kind = torch.device(args.device).type
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    model = _real_model(args, device="cpu").float()
    options = {
        "mesh": init_device_mesh(kind, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=kind == "cuda"),
    }
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    return lambda: _usual_step(model, optimizer, args), {}


SYSTEMS = {"plain": plain, "infinity": ours, "deepspeed": deepspeed, "fsdp2": fsdp}


def _real_model(args: argparse.Namespace, device: str | None = None) -> Llama:
    torch.manual_seed(0)
    with torch.device(device or args.device):
        torch.set_default_dtype(torch.bfloat16)
        try:
            return Llama(SHAPES[args.size])
        finally:
            torch.set_default_dtype(torch.float32)


_batches: dict[tuple[int, ...], torch.Tensor] = {}


def _batch(args: argparse.Namespace) -> torch.Tensor:
    """Always the same one: what is in it costs nothing and changes nothing."""
    shape, vocabulary = (args.batch, args.length), SHAPES[args.size].vocabulary
    if (vocabulary, *shape) not in _batches:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, vocabulary, shape, generator=generator)
        _batches[vocabulary, *shape] = ids.to(args.device)
    return _batches[vocabulary, *shape]


def _backward(
    model: Llama, args: argparse.Namespace, collecting: Context = contextlib.nullcontext
) -> torch.Tensor:
    parts, losses = _batch(args).chunk(args.micro_batches), []
    with collecting():
        for part in parts:
            loss = model(part) / len(parts)
            loss.backward()
            losses.append(loss.detach())
    return sum(losses[1:], losses[0])


def _usual_step(
    model: Llama,
    optimizer: torch.optim.Optimizer,
    args: argparse.Namespace,
    collecting: Context = contextlib.nullcontext,
) -> torch.Tensor:
    loss = _backward(model, args, collecting)
    if args.clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _one_process() -> None:
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 20000))
