"""Fine-tunes a diffusion transformer of diffusers (Flux, Qwen-Image, Wan, ...) by flow matching:
all its weights, with the optimizer's state on a disk.

python examples/diffusion_transformer.py MODEL SAMPLES OUT [--optimizer adafactor]

MODEL: the folder of the transformer. SAMPLES: safetensors files, one a batch, with the arguments of
its forward by name: `hidden_states` are the clean latents, the others what the text encoder gave.
Arguments that are no tensors, as Qwen-Image's `img_shapes`, are in `arguments.json` beside them.
"""

import argparse
import json
import pathlib

import diffusers
import torch
from safetensors.torch import load_file

import infinity

OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-5),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-4),
}


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("model")
    parser.add_argument("samples", type=pathlib.Path)
    parser.add_argument("out")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--times", type=float, default=1.0, help="the last time: 1000 for Wan")
    args = parser.parse_args()
    files = sorted(args.samples.glob("*.safetensors"))
    if not files:
        parser.error(f"{args.samples} has no safetensors files")

    further = args.samples / "arguments.json"
    arguments = json.loads(further.read_text()) if further.exists() else {}

    model = diffusers.AutoModel.from_pretrained(args.model)
    model.enable_gradient_checkpointing()
    config = infinity.Config(optimizer="nvme", nvme_paths="auto")
    optimizer = OPTIMIZERS[args.optimizer](model.parameters())
    model, optimizer = infinity.wrap_model(model, optimizer, config)
    device = next(model.parameters()).device
    model.train()
    for step in range(args.steps):
        drawn = torch.Generator().manual_seed(step)
        chosen = int(torch.randint(0, len(files), (), generator=drawn))
        inputs = load_file(files[chosen], device=str(device))
        clean = inputs.pop("hidden_states")
        noise = torch.randn(clean.shape, generator=drawn).to(clean)
        times = torch.rand(len(clean), generator=drawn).to(clean)
        share = times.view(-1, *[1] * (clean.dim() - 1))
        noisy = (1 - share) * clean + share * noise
        found = model(noisy, timestep=args.times * times, return_dict=False, **inputs, **arguments)[
            0
        ]
        loss = torch.nn.functional.mse_loss(found, noise - clean)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1} loss {loss.item():.4f}")

    model, _ = infinity.unwrap_model(model, optimizer)  # plain again: diffusers saves it itself
    model.save_pretrained(args.out)


if __name__ == "__main__":
    main()
