"""A loop on the accelerator: a model that is moved there, a frozen teacher, an evaluation before,
and a copy for an average."""

import copy
import sys

import torch
from torch import nn


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU())
        self.head = nn.Linear(16, 4)
        self.register_buffer("scale", torch.full((4,), 0.5))

    def forward(self, x):
        return self.head(self.body(x)) * self.scale


torch.manual_seed(0)
device = torch.accelerator.current_accelerator() if "cpu" not in sys.argv else torch.device("cpu")
teacher = nn.Linear(8, 4).requires_grad_(False).to(device)
model = Student()
average = copy.deepcopy(model).to(device)
model = model.to(device)
if "early" in sys.argv:
    with torch.no_grad():
        print(f"{model(torch.ones(4, 8, device=device)).mean().item():.6f}")
print("weights at", next(model.parameters()).device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(3):
    x = torch.randn(4, 8).to(device)
    loss = (model(x) - teacher(x)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for kept, param in zip(average.parameters(), model.parameters()):
            kept.mul_(0.9).add_(param, alpha=0.1)
    print(f"{step}: {loss.item():.6f} {loss.device.type} {next(model.parameters()).device.type}")
model.to(device)
with torch.no_grad():
    x = torch.ones(4, 8, device=device)
    print(f"{model.eval()(x).mean().item():.6f} {average.eval()(x).mean().item():.6f}")
state = {name: value.cpu().double().sum().item() for name, value in model.state_dict().items()}
print({name: round(value, 5) for name, value in state.items()})
