"""Trains one step with the installed package, everything on disk. usage: first_step.py
<site-packages that it must come from>"""

import sys

import torch

import infinity
from infinity import native

for where in (infinity.__file__, native._C.__file__):
    if not where.startswith(sys.argv[1]):
        sys.exit(f"{where} is not in {sys.argv[1]}")
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
home = {"params": "nvme", "optimizer": "nvme", "nvme_paths": ["."]}
model, optimizer = infinity.wrap_model(model, torch.optim.AdamW(model.parameters()), home)
before = model.state_dict()["0.weight"].clone()
model(torch.ones(2, 8)).sum().backward()
optimizer.step()
if torch.equal(model.state_dict()["0.weight"], before):
    sys.exit("a step changed nothing")
print("trained a step")
