"""A language model that is saved as a whole: after each epoch with the best loss, by `torch.save`,
or kept by `copy.deepcopy`. It is loaded for the test, as word models of torch's examples are."""

import copy
import sys

import torch
from torch import nn

torch.manual_seed(0)
keep = sys.argv[1] if len(sys.argv) > 1 else "save"


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Embedding(8, 6)
        self.rnn = nn.LSTM(6, 6, 2)
        self.more = nn.ModuleList([nn.Linear(6, 6), nn.LayerNorm(6), nn.BatchNorm1d(6)])
        self.decoder = nn.Linear(6, 8, bias=False)
        self.decoder.weight = self.encoder.weight
        self.whole = [self]

    def forward(self, words):
        self.seen = words.shape
        hidden = self.rnn(self.encoder(words))[0].flatten(0, 1)
        for layer in self.more:
            hidden = layer(hidden)
        return self.decoder(hidden)


def doubled(module, inputs, output):
    return 2 * output


model = Words()
model.more[0].register_forward_hook(doubled)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
words, best, found = torch.randint(0, 8, (5, 3)), float("inf"), None
for epoch in range(3):
    model.train()
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(words), words.flatten())
    loss.backward()
    optimizer.step()
    print(epoch, loss.item())
    if loss.item() < best:
        best = loss.item()
        if keep == "save":
            torch.save({"epoch": epoch, "model": model}, "words.pt")
        else:
            found = copy.deepcopy(model)
if keep == "save":
    found = torch.load("words.pt", weights_only=False)["model"]
found.eval()
print(found(words).sum().item(), found.seen, sorted(vars(found)), found.whole[0] is found)
print(found.decoder.weight is found.encoder.weight, type(found.decoder.weight).__name__)
print([len(hooks) for name, hooks in vars(found.more[0]).items() if "hooks" in name and hooks])
print(model(words).sum().item())
