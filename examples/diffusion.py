"""Fine-tunes a diffusion model of diffusers on a folder of pictures, all its weights, with the
optimizer's state where there is room.

python examples/diffusion.py MODEL PICTURES OUT [--steps N]

MODEL: the folder of a UNet2DModel, with its scheduler in the folder `scheduler` or the usual one.
"""

import argparse
import pathlib

import diffusers
import numpy
import torch
from PIL import Image

import infinity

ENDINGS = (".png", ".jpg", ".jpeg", ".webp")


def read(path: pathlib.Path, size: int) -> torch.Tensor:
    """A picture as [3, size, size], from -1 to 1."""
    pixels = numpy.asarray(Image.open(path).convert("RGB").resize((size, size)), numpy.float32)
    return torch.from_numpy(pixels / 127.5 - 1).permute(2, 0, 1)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("model")
    parser.add_argument("pictures", type=pathlib.Path)
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=4)
    args = parser.parse_args()

    unet = diffusers.UNet2DModel.from_pretrained(args.model)
    scheduler = diffusers.DDPMScheduler()
    if (pathlib.Path(args.model) / "scheduler").is_dir():
        scheduler = diffusers.DDPMScheduler.from_pretrained(args.model, subfolder="scheduler")
    paths = sorted(path for path in args.pictures.iterdir() if path.suffix.lower() in ENDINGS)
    if not paths:
        parser.error(f"{args.pictures} has no pictures ({', '.join(ENDINGS)})")

    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-5)
    unet, optimizer = infinity.wrap_model(unet, optimizer)
    device = next(unet.parameters()).device
    unet.train()
    for step in range(args.steps):
        drawn = torch.Generator().manual_seed(step)
        chosen = torch.randint(0, len(paths), (args.batch,), generator=drawn)
        clean = torch.stack([read(paths[at], unet.config.sample_size) for at in chosen])
        noise = torch.randn(clean.shape, generator=drawn)
        times = torch.randint(
            0, scheduler.config.num_train_timesteps, (args.batch,), generator=drawn
        )
        noisy = scheduler.add_noise(clean, noise, times)
        found = unet(noisy.to(device), times.to(device)).sample
        loss = torch.nn.functional.mse_loss(found, noise.to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1} loss {loss.item():.4f}")

    unet, _ = infinity.unwrap_model(unet, optimizer)  # plain again: diffusers saves it itself
    unet.save_pretrained(args.out)
    scheduler.save_pretrained(pathlib.Path(args.out) / "scheduler")


if __name__ == "__main__":
    main()
