"""Systems: what trains the model of the end-to-end benchmarks: compute alone, plain torch, ours,
DeepSpeed, FSDP2, and the other rivals of `rivals/rivals.toml`, each as its manual has it.

Only torch is imported, and what a system is made of when it is made: a rival's environment has
nothing of ours.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

SIZES = {  # name -> (width, layers): parameters
    "tiny": (64, 2),  # of tests
    "50M": (512, 16),
    "134M": (768, 18),
    "1B": (2048, 19),
}

VOCABULARY = 8192


def make_model(size: str) -> torch.nn.Module:
    """Makes a GPT-2 style model in bf16, without dropout."""
    import transformers

    width, layers = SIZES[size]
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_layer=layers,
        n_embd=width,
        n_head=width // 64,
        n_positions=512,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
        activation_function="gelu_pytorch_tanh",
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        return transformers.GPT2LMHeadModel(config)
    finally:
        torch.set_default_dtype(torch.float32)


class Job:
    """What a system is asked to do: some micro-batches a step, clipped or not."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.tokens = args.batch * args.length
        self.device = torch.device(args.device)
        self.on_gpu = self.device.type == "cuda"
        generator = torch.Generator().manual_seed(1)
        self.batches = [
            torch.randint(0, VOCABULARY, (args.batch, args.length), generator=generator).to(
                self.device
            )
            for _ in range(4)
        ]

    def micro_batches(self) -> Iterator[torch.Tensor]:
        for index in range(self.args.micro_batches):
            yield self.batches[index % len(self.batches)]

    def wait(self) -> None:
        """Waits for the device."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def losses(self, model: Callable) -> Iterator[torch.Tensor]:
        for batch in self.micro_batches():
            yield model(input_ids=batch, labels=batch).loss / self.args.micro_batches


@dataclass
class Running:
    """A system at work on a job."""

    step: Callable[[], None]
    wait_idle: Callable[[], None] = lambda: None  # returns when the last update is at home
    told: Callable[[], dict] = dict  # what it knows of itself, for the JSON


def compute(job: Job) -> Running:
    """Makes the system of forwards and backwards and nothing else: none can be faster."""
    model = make_model(job.args.size).to(job.device)

    def step() -> None:
        for loss in job.losses(model):
            loss.backward()
        for param in model.parameters():
            param.grad = None

    weights = sum(param.numel() * param.itemsize for param in model.parameters())
    return Running(step, told=lambda: {"held_nbytes": 2 * weights})  # with their gradients


def plain(job: Job) -> Running:
    """Makes the system of torch alone, AdamW fused over an fp32 master copy."""
    return _with_masters(job, lambda masters: torch.optim.AdamW(masters, lr=1e-4, fused=True))


def _with_masters(job: Job, make_optimizer: Callable) -> Running:
    """Makes a system of bf16 weights with an fp32 master copy, which the optimizer steps."""
    model = make_model(job.args.size).to(job.device)
    masters = [param.detach().float().requires_grad_() for param in model.parameters()]
    optimizer = make_optimizer(masters)

    def step() -> None:
        for loss in job.losses(model):
            loss.backward()
        if job.args.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for master, param in zip(masters, model.parameters()):
            master.grad, param.grad = param.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for master, param in zip(masters, model.parameters()):
                param.copy_(master)

    return Running(step)


def ours(job: Job) -> Running:
    """Makes the system of Infinity at the home that the system's name has."""
    import infinity
    from infinity.core.run.registry import wrapped
    from infinity.ext.rates.rates import disk_seconds

    home = job.args.system.removeprefix("infinity_").removesuffix("_sent")
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
    model = make_model(job.args.size)
    config = {"params": home, "optimizer": home}
    if home == "nvme":
        config |= {"nvme_paths": [job.args.folder], "host_memory": job.args.host_memory}
    if job.args.units_at_once:
        config["micro_batch"] = job.args.batch
    if job.on_gpu:
        config["device"] = job.args.device
    config["share_homes"] = False if job.args.system.endswith("_sent") else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = infinity.wrap_model(model, optimizer, config)

    def step() -> None:
        if job.args.units_at_once:
            batch = torch.cat(list(job.micro_batches()))
            model(input_ids=batch, labels=batch).loss.backward()
        else:
            for loss in job.losses(model):
                loss.backward()
        if job.args.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    moved = [_moved(model)]

    def wait_idle() -> None:
        wrapped(model).engine.wait_idle()
        moved.append(_moved(model))

    def told() -> dict:
        """Returns the bytes of memory that the engine held at most, and the seconds that the disk
        alone needed for the steps that were timed."""
        tiers = infinity.stats(model).tiers
        held = tiers["device"].peak_nbytes + tiers["host"].peak_nbytes
        read, written = (after - before for before, after in zip(*moved[-2:]))
        seconds = 0.0
        if home == "nvme":
            seconds = disk_seconds([job.args.folder], read, written)
        return {"held_nbytes": held, "disk_seconds": seconds}

    return Running(step, wait_idle, told)


def _moved(model: torch.nn.Module) -> tuple[int, int]:
    """Bytes read from and written to the disk so far."""
    import infinity

    edges = infinity.stats(model).edges
    return edges["nvme->host"].nbytes, edges["host->nvme"].nbytes


def deepspeed(job: Job) -> Running:
    """Makes the system of ZeRO-3 with parameters and optimizer on the CPU, or on NVMe at its
    defaults or at better settings."""
    import deepspeed as rival

    _one_process()
    kind = job.args.system.removeprefix("deepspeed_")
    device = "cpu" if kind == "cpu" else "nvme"
    offload = {"device": device, "pin_memory": kind == "nvme_tuned"}
    if device == "nvme":
        offload["nvme_path"] = job.args.folder
    zero = {"stage": 3, "offload_param": dict(offload), "offload_optimizer": dict(offload)}
    if kind == "nvme":
        zero["offload_param"]["buffer_size"] = 5e8
    if kind == "nvme_tuned":
        zero |= {"sub_group_size": int(2e7)}
        zero["offload_param"] |= {"buffer_size": int(3e7)}
        zero["offload_optimizer"] |= {
            "buffer_count": 16,
            "pipeline_read": True,
            "pipeline_write": True,
        }
    config = {
        "train_micro_batch_size_per_gpu": job.args.batch,
        "gradient_accumulation_steps": job.args.micro_batches,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "aio": {
            "block_size": 1048576,
            "queue_depth": 32,
            "intra_op_parallelism": 2 if kind == "nvme_tuned" else 1,
            "single_submit": False,
            "overlap_events": True,
        },
    }
    if job.args.clip:
        config["gradient_clipping"] = 1.0
    model = make_model(job.args.size)
    engine, *_ = rival.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step() -> None:
        for batch in job.micro_batches():
            engine.backward(engine(input_ids=batch, labels=batch).loss)
            engine.step()

    return Running(step)


def fsdp(job: Job) -> Running:
    """Makes the system of FSDP2 with or without CPUOffloadPolicy, fp32 sharded parameters, bf16
    compute, AdamW fused."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    _one_process()
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if job.on_gpu else "gloo")
    model = make_model(job.args.size).float()
    mesh = init_device_mesh(job.device.type, (torch.distributed.get_world_size(),))
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    if job.args.system == "fsdp2_cpu":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=job.on_gpu)
    for block in model.transformer.h:
        fully_shard(block, **options)
    fully_shard(model, **options)
    if job.args.system == "fsdp2":
        model.to(job.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        for loss in job.losses(model):
            loss.backward()
        if job.args.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return Running(step)


def bitsandbytes(job: Job) -> Running:
    """Makes the system of bitsandbytes' AdamW with 8-bit moments over an fp32 master copy."""
    from bitsandbytes.optim import AdamW8bit

    return _with_masters(job, lambda masters: AdamW8bit(masters, lr=1e-4))


def torchao(job: Job) -> Running:
    """Makes the system of torchao's CPUOffloadOptimizer, fp32 parameters, bf16 compute."""
    from torchao.optim import CPUOffloadOptimizer

    model = make_model(job.args.size).float().to(job.device)
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)
    return _autocast(job, model, optimizer)


def trainstream(job: Job) -> Running:
    """Makes the system of TrainStream, which keeps gradients and moments on the host: fp32
    parameters, bf16 compute."""
    import trainstream as rival

    model = make_model(job.args.size).float().to(job.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    clipped = {"max_grad_norm": 1.0} if job.args.clip else {}
    model, optimizer = rival.wrap(
        model, optimizer, offload=True, accumulation_steps=job.args.micro_batches, **clipped
    )
    return _autocast(job, model, optimizer, clips_itself=True)


def _autocast(
    job: Job, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, clips_itself=False
) -> Running:
    """Makes a system of fp32 parameters whose forward computes in bf16."""

    def forward(**inputs: torch.Tensor):
        with torch.autocast(job.device.type, torch.bfloat16):
            return model(**inputs)

    def step() -> None:
        for loss in job.losses(forward):
            loss.backward()
        if job.args.clip and not clips_itself:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return Running(step)


class Embedding(torch.nn.Module):
    """The model's first chunk, of those that RamTorch moves one by one."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.wte, self.wpe = model.transformer.wte, model.transformer.wpe

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))


class Block(torch.nn.Module):
    """A block as a chunk: hidden states in, hidden states out."""

    def __init__(self, block: torch.nn.Module):
        super().__init__()
        self.block = block

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found = self.block(hidden)
        return found if isinstance(found, torch.Tensor) else found[0]


def ramtorch(job: Job) -> Running:
    """Makes the system of RamTorch's OffloadModel, which moves chunks of weights from the host:
    fp32 parameters, bf16 compute, AdamW fused. Its chunks share no weight: the output has its own
    copy of the embedding's."""
    from ramtorch import OffloadModel

    model = make_model(job.args.size).float()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    parts = model.transformer
    head = torch.nn.Sequential(parts.ln_f, model.lm_head)
    chunks = [Embedding(model), *map(Block, parts.h), head]
    moved = OffloadModel(chunks, device=job.args.device, keep_activations=True)
    optimizer = torch.optim.AdamW(moved.parameters(), lr=1e-4, fused=True)

    def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        flat = logits[:, :-1].flatten(0, 1).float()
        loss = torch.nn.functional.cross_entropy(flat, ids[:, 1:].flatten())
        return loss / job.args.micro_batches

    def step() -> None:
        for batch in job.micro_batches():
            with torch.autocast(job.device.type, torch.bfloat16):
                moved.step(batch, targets=batch, loss_fn=loss_of)
        moved.flush_grads()
        if job.args.clip:
            torch.nn.utils.clip_grad_norm_(moved.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return Running(step)


def unsloth(job: Job) -> Running:
    """Makes the system of Unsloth, which trains all weights of the model from a folder."""
    from unsloth import FastModel

    with tempfile.TemporaryDirectory() as folder:
        make_model(job.args.size).save_pretrained(folder)
        model, _ = FastModel.from_pretrained(
            folder, full_finetuning=True, load_in_4bit=False, max_seq_length=job.args.length
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return _autocast(job, model, optimizer)


def _one_process() -> None:
    """What torchrun would have set, where it has not."""
    if "RANK" in os.environ:
        return
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 20000))


SYSTEMS: dict[str, Callable[[Job], Running]] = {
    "compute": compute,
    "plain": plain,
    "infinity_device": ours,
    "infinity_host": ours,
    "infinity_nvme": ours,
    "fsdp2_cpu": fsdp,
    "infinity_host_sent": ours,
    "fsdp2": fsdp,
    "deepspeed_cpu": deepspeed,
    "deepspeed_nvme": deepspeed,
    "deepspeed_nvme_tuned": deepspeed,
    "bitsandbytes": bitsandbytes,
    "torchao": torchao,
    "trainstream": trainstream,
    "ramtorch": ramtorch,
    "unsloth": unsloth,
}
