"""packed: a step of LoRA on a base in 4 bits, from NVMe with little host memory, beside PEFT and
bitsandbytes with the base in memory, and on the same base in FP8 and in bf16 from NVMe.

fp8      the folder has FP8 with a scale for each block, whose codes are at home
bound    the packed bytes that a forward and a backward read, once each; the last blocks of the
         forward, which the backward needs first, may stay where they are
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from infinity.tools.bench.results import Measured, row
from infinity.tools.bench.rounds import paired
from infinity.tools.bench.settings import Settings

from .launch import environment

# Llama shapes: hidden size, feed-forward, layers, heads of keys; 1.0 B and 20 M parameters
SHAPES = {"1B": (2048, 5632, 20, 8), "tiny": (256, 768, 4, 2)}
VOCABULARY, TOKENS, STEPS = 4096, 128, 4
HOST_MEMORY = 256 * 2**20


def make_folder(folder: Path, shape: str) -> None:
    """Saves a Llama of random weights, in bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, inner, layers, heads = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=heads,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def adapted(model: torch.nn.Module) -> torch.nn.Module:
    """Adds adapters of rank 8, and recomputes blocks in the backward, as people do."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return get_peft_model(model, config)


def scale(folder: Path, to: Path) -> None:
    """Saves a model again, its linear layers in FP8 with a scale for each block of 128 x 128."""
    from safetensors.torch import load_file, save_file

    to.mkdir()
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        blocks = tensors[name].float().unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        scales = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scales[:, None, :, None]).reshape(tensors[name].shape)
        tensors[name] = codes.to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (to / "config.json").write_text(json.dumps(config))


def ours(
    folder: str, swap: str, shape: str, packs: bool = True
) -> tuple[torch.nn.Module, object, Callable]:
    """Wraps a model on meta. ``packs``: its base is packed as it is read."""
    from transformers import AutoConfig, AutoModelForCausalLM

    import infinity

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=torch.bfloat16
        )
    model.requires_grad_(False)
    model = adapted(infinity.quantize(model, "nf4") if packs else model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    limit = HOST_MEMORY if shape == "1B" else None
    config = {"params": "nvme", "optimizer": "host", "weights": folder, "host_memory": limit}
    model, optimizer = infinity.wrap_model(model, optimizer, config | {"nvme_paths": [swap]})

    def read() -> tuple[int, int]:
        found = infinity.stats(model)
        return found.edges["nvme->host"].nbytes, found.tiers["nvme"].planned_nbytes

    return model, optimizer, read


def peft(folder: str, swap: str, shape: str) -> tuple[torch.nn.Module, object, Callable]:
    """Loads the model as PEFT's users do: bitsandbytes packs it in memory."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map={"": "cpu"}, quantization_config=config
    )
    model = adapted(model.requires_grad_(False))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    return model, optimizer, lambda: (0, 0)


def run(system: str, folder: str, swap: str, shape: str) -> dict:
    """Takes steps. Returns the median seconds of one, the bytes that it read from disk, those that
    the base has there, and the most memory that the process had."""
    made = peft if system == "peft" else partial(ours, packs=system == "ours")
    model, optimizer, read = made(folder, swap, shape)
    model.train()
    tokens = torch.randint(0, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    seconds: list[float] = []
    for step in range(STEPS + 1):
        begin, before = time.perf_counter(), read()[0]
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step:  # the first one learns the order of use
            seconds.append(time.perf_counter() - begin)
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    return {
        "seconds": sorted(seconds)[len(seconds) // 2],
        "read_nbytes": read()[0] - before,
        "packed_nbytes": read()[1],
        "peak_nbytes": peak * 1024,
        "loss": loss.item(),
    }


def measure(settings: Settings) -> Measured:
    """Measures rows ``packed.<system>`` (seconds of a step), ``packed.<system>.peak`` (MiB of the
    process) and ``packed.<system>.read`` (MiB of a step beside the bound)."""
    shape = "1B" if settings.scale >= 1 else "tiny"
    systems = ("ours", "fp8", "bf16", *(("peft",) if settings.rivals is True else ()))
    found: dict[str, list[dict]] = {system: [] for system in systems}
    with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=settings.folder) as root:
        folder, swap = Path(root, "model"), Path(root, "swap")
        swap.mkdir()
        make_folder(folder, shape)
        scale(folder, scaled := Path(root, "scaled"))
        for _ in range(min(3, settings.rounds)):
            for system in systems:
                model = scaled if system == "fp8" else folder
                asked = json.dumps([system, str(model), str(swap), shape])
                done = subprocess.run(
                    [sys.executable, "-P", "-m", "bench.packed", asked],
                    capture_output=True,
                    text=True,
                    check=True,
                    env=environment(HF_HUB_OFFLINE="1"),
                )
                found[system].append(json.loads(done.stdout.strip().splitlines()[-1]))
    seconds = {system: [each["seconds"] for each in its] for system, its in found.items()}
    rows = []
    for system, its in found.items():
        others = [other for other in systems if other != system]
        ratios = {other: paired(seconds[system], seconds[other]) for other in others}
        rows.append(row(f"packed.{system}", "s", seconds[system], ratios=ratios))
        peaks = [each["peak_nbytes"] / 2**20 for each in its]
        rows.append(row(f"packed.{system}.peak", "MiB", peaks))
    for system in ("ours", "fp8", "bf16"):
        read = [each["read_nbytes"] / 2**20 for each in found[system]]
        bound = [2 * each["packed_nbytes"] / 2**20 for each in found[system]]
        ceiling = "the base's bytes, twice", bound
        rows.append(row(f"packed.{system}.read", "MiB", read, ceiling=ceiling))
    return Measured(rows)


if __name__ == "__main__":
    print(json.dumps(run(*json.loads(sys.argv[1]))), flush=True)
    os._exit(0)  # what it made need not be taken down
