"""A small GPT, trained as nanoGPT does: groups with and without decay, micro-steps, a scaler,
clipping, a schedule by hand, estimates of the loss, a checkpoint to resume from. Under torchrun in
DistributedDataParallel, whose synchronisation it switches; the first rank alone estimates, saves
and generates."""

import math
import os
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

iterations, batch_size, block_size, micro_steps = 4, 2, 8, 2
learning_rate, min_lr, warmup, grad_clip, fused = 1e-3, 1e-4, 2, 1.0, True
compile_model, init_from, out, device, tied, digits = False, "scratch", "ckpt.pt", "cpu", True, 15
for word in sys.argv[1:]:  # --name=value
    name, _, value = word[2:].partition("=")
    globals()[name] = type(globals()[name])(eval(value) if name != "init_from" else value)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width, bias=False)
        self.attend = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        q, k, v = (
            each.unflatten(-1, (2, -1)).transpose(1, 2)
            for each in self.attend(self.ln_1(x)).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab=32, width=16, layers=2):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab, width),
                "wpe": nn.Embedding(block_size, width),
                "h": nn.ModuleList([Block(width) for _ in range(layers)]),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.transformer.wte.weight = self.lm_head.weight
        print(f"number of parameters: {sum(p.numel() for p in self.parameters())}")

    def forward(self, idx, targets=None):
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(idx.shape[1]))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1]]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self):
        params = {name: p for name, p in self.named_parameters() if p.requires_grad}
        decay = [p for p in params.values() if p.dim() >= 2]
        other = [p for p in params.values() if p.dim() < 2]
        print(f"num decayed parameter tensors: {len(decay)}, {len(other)} others")
        groups = [
            {"params": decay, "weight_decay": 0.1},
            {"params": other, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=fused)

    @torch.no_grad()
    def generate(self, idx, count):
        for _ in range(count):
            logits, _ = self(idx[:, -block_size:])
            drawn = torch.multinomial(F.softmax(logits[:, -1], dim=-1), num_samples=1)
            idx = torch.cat((idx, drawn), dim=1)
        return idx


rank, world = int(os.environ.get("RANK", -1)), int(os.environ.get("WORLD_SIZE", 1))
if ddp := rank != -1:
    dist.init_process_group("gloo")
    micro_steps //= world
is_first = rank <= 0
torch.manual_seed(1337)
data = torch.randint(32, (400,))
torch.manual_seed(1337 + max(0, rank))
ctx = nullcontext() if device == "cpu" else torch.amp.autocast(device)


def get_batch():
    ix = torch.randint(len(data) - block_size - 1, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    return x.to(device), torch.stack([data[i + 1 : i + 1 + block_size] for i in ix]).to(device)


model, begin, checkpoint = GPT(), 0, None
if init_from == "resume":
    checkpoint = torch.load(out, map_location=device)
    model.load_state_dict(checkpoint["model"])
    begin = checkpoint["iteration"]
model.to(device)
scaler = torch.amp.GradScaler(device, enabled=False)
optimizer = model.configure_optimizers()
if init_from == "resume":
    optimizer.load_state_dict(checkpoint["optimizer"])
checkpoint, raw_model = None, model
if compile_model:
    print("compiling the model...")
    model = torch.compile(model, backend="eager")
if ddp:
    model = DDP(model)


@torch.no_grad()
def estimate_loss():
    model.eval()
    with torch.random.fork_rng():
        losses = [model(*get_batch())[1].item() for _ in range(2)]
    model.train()
    return sum(losses) / len(losses)


def get_lr(it):
    if it < warmup:
        return learning_rate * (it + 1) / (warmup + 1)
    ratio = (it - warmup) / max(1, iterations - warmup)
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


x, y = get_batch()
raw_model = model.module if ddp else raw_model
for iteration in range(begin, iterations):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iteration)
    if iteration % 2 == 0 and is_first:
        print(f"step {iteration}: val loss {estimate_loss():.4f}")
        if iteration > 0:
            state = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"iteration": iteration}, out)
            print(f"saving checkpoint to {os.path.basename(out)}")
    for micro_step in range(micro_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == micro_steps - 1
        with ctx:
            loss = model(x, y)[1] / micro_steps
        x, y = get_batch()
        scaler.scale(loss).backward()
    if grad_clip:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if is_first:
        print(f"iter {iteration}: loss {loss.item() * micro_steps:.{digits}f}")
if is_first:
    print(raw_model.generate(torch.zeros(1, 1, dtype=torch.long), 6).tolist())
if ddp:
    dist.destroy_process_group()
