"""Two critics under one optimizer, an actor under another, target copies and a learned temperature:
the updates of a soft actor-critic without its environment, as CleanRL writes them."""

import torch
from torch import nn


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 16), nn.Linear(16, 1)

    def forward(self, x, a):
        return self.fc2(torch.relu(self.fc1(torch.cat([x, a], 1))))


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.mean, self.logstd = nn.Linear(4, 16), nn.Linear(16, 2), nn.Linear(16, 2)

    def forward(self, x):
        x = torch.relu(self.fc1(x))
        return self.mean(x), torch.tanh(self.logstd(x))

    def get_action(self, x):
        mean, log_std = self(x)
        normal = torch.distributions.Normal(mean, log_std.exp())
        drawn = normal.rsample()
        return torch.tanh(drawn), normal.log_prob(drawn).sum(1, keepdim=True)


torch.manual_seed(1)
actor, qf1, qf2, qf1_target, qf2_target = Actor(), Critic(), Critic(), Critic(), Critic()
qf1_target.load_state_dict(qf1.state_dict())
qf2_target.load_state_dict(qf2.state_dict())
q_params = list(qf1.parameters()) + list(qf2.parameters())
q_optimizer = torch.optim.SGD(q_params, lr=0.05, momentum=0.9)
actor_optimizer = torch.optim.SGD(list(actor.parameters()), lr=0.05)
log_alpha = torch.zeros(1, requires_grad=True)
a_optimizer = torch.optim.Adam([log_alpha], lr=1e-2)
for step in range(4):
    x, a, reward, following = torch.randn(8, 4), torch.rand(8, 2), torch.randn(8), torch.randn(8, 4)
    alpha = log_alpha.exp().item()
    with torch.no_grad():
        action, log_pi = actor.get_action(following)
        lower = torch.min(qf1_target(following, action), qf2_target(following, action))
        wanted = reward + 0.9 * (lower - alpha * log_pi).view(-1)
    q1, q2 = qf1(x, a).view(-1), qf2(x, a).view(-1)
    q_loss = nn.functional.mse_loss(q1, wanted) + nn.functional.mse_loss(q2, wanted)
    q_optimizer.zero_grad()
    q_loss.backward()
    q_optimizer.step()
    action, log_pi = actor.get_action(x)
    actor_loss = (alpha * log_pi - torch.min(qf1(x, action), qf2(x, action))).mean()
    actor_optimizer.zero_grad()
    actor_loss.backward()
    actor_optimizer.step()
    alpha_loss = (-log_alpha.exp() * (log_pi.detach() - 2)).mean()
    a_optimizer.zero_grad()
    alpha_loss.backward()
    a_optimizer.step()
    for net, target in ((qf1, qf1_target), (qf2, qf2_target)):
        for param, kept in zip(net.parameters(), target.parameters()):
            kept.data.copy_(0.1 * param.data + 0.9 * kept.data)
    print(f"{step}: {q_loss.item():.9f} {actor_loss.item():.9f} {log_alpha.item():.9f}")
print({name: value.sum().item() for name, value in qf2_target.state_dict().items()})
print({name: value.double().sum().item() for name, value in qf1.state_dict().items()})
