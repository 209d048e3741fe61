"""A loop over Accelerate's objects, as its examples have it: prepare, accumulate, backward, clip,
gather_for_metrics, a saved and loaded state."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--mixed_precision", default="no")
parser.add_argument("--accumulate", type=int, default=2)
args = parser.parse_args()
accelerator = Accelerator(
    cpu=True, mixed_precision=args.mixed_precision, gradient_accumulation_steps=args.accumulate
)
set_seed(3)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=12)
data = torch.utils.data.TensorDataset(torch.randn(24, 8), torch.randint(4, (24,)))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for epoch in range(2):
    model.train()
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                accelerator.print(f"norm {norm.item():.6f}")
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.9f}")
    if epoch == 0:
        accelerator.save_state("state")
accelerator.load_state("state")
model.eval()
with torch.no_grad():
    found = [accelerator.gather_for_metrics(model(inputs).argmax(1)) for inputs, _ in loader]
accelerator.print(torch.cat(found).tolist(), scheduler.get_last_lr())
accelerator.print(optimizer.state_dict()["param_groups"][0]["lr"])
plain = accelerator.unwrap_model(model)
accelerator.print(type(plain).__name__, sum(p.double().sum().item() for p in plain.parameters()))
