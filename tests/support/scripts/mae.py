"""A masked autoencoder, trained as its script does: groups by dimension, a schedule within epochs,
a class that scales, clips and steps, log lines by a meter, and checkpoints to resume from."""

import argparse
import math
import sys

import torch
from torch import nn


class Masked(nn.Module):
    def __init__(self, patches=6, size=12, width=16):
        super().__init__()
        self.embed = nn.Linear(size, width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.randn(1, patches + 1, width) * 0.02, False)
        layer = {"batch_first": True, "norm_first": True, "dropout": 0.0}
        self.encoder = nn.TransformerEncoderLayer(width, 2, 32, **layer)
        self.decoder = nn.TransformerEncoderLayer(width, 2, 32, **layer)
        self.norm, self.pred = nn.LayerNorm(width), nn.Linear(width, size)

    def forward(self, images, mask_ratio):
        count = images.shape[1]
        keep = int(count * (1 - mask_ratio))
        shuffled = torch.argsort(torch.rand(images.shape[:2]), dim=1)
        restore = torch.argsort(shuffled, dim=1)
        x = self.embed(images) + self.pos_embed[:, 1:]
        index = shuffled[:, :keep, None].expand(-1, -1, x.shape[2])
        x = torch.gather(x, 1, index)
        token = (self.cls_token + self.pos_embed[:, :1]).expand(len(x), -1, -1)
        x = self.encoder(torch.cat([token, x], dim=1))[:, 1:]
        x = torch.cat([x, self.mask_token.expand(len(x), count - keep, -1)], dim=1)
        x = torch.gather(x, 1, restore[:, :, None].expand(-1, -1, x.shape[2]))
        pred = self.pred(self.norm(self.decoder(x + self.pos_embed[:, 1:])))
        mask = (restore >= keep).float()
        return ((pred - images).square().mean(-1) * mask).sum() / mask.sum(), pred, mask


class NativeScaler:
    def __init__(self):
        self._scaler = torch.amp.GradScaler("cpu", enabled=False)

    def __call__(self, loss, optimizer, parameters, update_grad):
        self._scaler.scale(loss).backward()
        if not update_grad:
            return None
        self._scaler.unscale_(optimizer)
        norms = [p.grad.detach().norm(2) for p in parameters if p.grad is not None]
        self._scaler.step(optimizer)
        self._scaler.update()
        return torch.norm(torch.stack(norms), 2)

    def state_dict(self):
        return self._scaler.state_dict()


def adjust(optimizer, epoch, args):
    if epoch < 1:
        lr = args.lr * epoch
    else:
        lr = args.lr * 0.5 * (1 + math.cos(math.pi * (epoch - 1) / args.epochs))
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
    return lr


def main(args):
    torch.manual_seed(0)
    data = torch.randn(16, 6, 12)
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, drop_last=True)
    model = Masked()
    print(f"Model = {model}")
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    groups = [{"params": others, "weight_decay": 0.0}, {"params": decayed, "weight_decay": 0.05}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))
    print(optimizer)
    scaler, start = NativeScaler(), 0
    if args.resume:
        saved = torch.load(args.resume)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["epoch"] + 1
        print("With optim & sched!")
    for epoch in range(start, args.epochs):
        model.train(True)
        optimizer.zero_grad()
        for step, samples in enumerate(loader):
            if step % args.accum_iter == 0:
                lr = adjust(optimizer, step / len(loader) + epoch, args)
            loss, _, _ = model(samples, mask_ratio=0.5)
            if not math.isfinite(loss.item()):
                sys.exit(1)
            update = (step + 1) % args.accum_iter == 0
            norm = scaler(loss / args.accum_iter, optimizer, model.parameters(), update)
            if update:
                optimizer.zero_grad()
            shown = f"lr: {lr:.6f}  loss: {loss:.4f}"
            shown += "" if norm is None else f"  norm: {norm:.3f}"
            print(f"Epoch: [{epoch}]  [{step}/{len(loader)}]  {shown}")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(state | {"scaler": scaler.state_dict()}, f"checkpoint-{epoch}.pth")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--accum_iter", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--resume", default="")
    main(parser.parse_args())
