"""Proximal policy optimization in one file, as CleanRL writes it: an agent that is never called
itself, rollouts without gradients, and one optimizer of its two networks."""

import torch
from torch import nn
from torch.distributions.categorical import Categorical


def layer_init(layer, std=2**0.5):
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.constant_(layer.bias, 0.0)
    return layer


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(
            layer_init(nn.Linear(4, 16)), nn.Tanh(), layer_init(nn.Linear(16, 1), std=1.0)
        )
        self.actor = nn.Sequential(
            layer_init(nn.Linear(4, 16)), nn.Tanh(), layer_init(nn.Linear(16, 2), std=0.01)
        )

    def get_value(self, x):
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        spread = Categorical(logits=self.actor(x))
        if action is None:
            action = spread.sample()
        return action, spread.log_prob(action), spread.entropy(), self.critic(x)


class Walk:
    """Stands for an environment: a state that an action pushes."""

    def __init__(self, count):
        self.state = torch.randn(count, 4)

    def step(self, action):
        push = (action * 2 - 1).float().unsqueeze(1) * torch.tensor([0.1, 0.0, -0.1, 0.2])
        self.state = 0.95 * self.state + push
        return self.state, -self.state.square().sum(1)


torch.manual_seed(1)
agent, envs = Agent().to("cpu"), Walk(4)
optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-3, eps=1e-5, fused=True)
steps, observed = 8, envs.state
for iteration in range(1, 4):
    optimizer.param_groups[0]["lr"] = (1.0 - (iteration - 1.0) / 3) * 2.5e-3
    obs, actions, logprobs, rewards, values = [], [], [], [], []
    for _ in range(steps):
        with torch.no_grad():
            action, logprob, _, value = agent.get_action_and_value(observed)
        obs.append(observed)
        observed, reward = envs.step(action)
        actions.append(action)
        logprobs.append(logprob)
        values.append(value.flatten())
        rewards.append(reward)
    with torch.no_grad():
        following, advantages, last = agent.get_value(observed).flatten(), [], 0.0
        for step in reversed(range(steps)):
            delta = rewards[step] + 0.9 * following - values[step]
            last = delta + 0.9 * 0.95 * last
            following = values[step]
            advantages.insert(0, last)
    b_obs, b_actions = torch.cat(obs), torch.cat(actions)
    b_logprobs, b_advantages = torch.cat(logprobs), torch.cat(advantages)
    b_returns = b_advantages + torch.cat(values)
    for _ in range(2):
        for rows in torch.randperm(len(b_obs)).split(16):
            _, newlogprob, entropy, newvalue = agent.get_action_and_value(
                b_obs[rows], b_actions[rows]
            )
            ratio = (newlogprob - b_logprobs[rows]).exp()
            advantage = b_advantages[rows]
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            pg_loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
            v_loss = 0.5 * (newvalue.view(-1) - b_returns[rows]).square().mean()
            loss = pg_loss - 0.01 * entropy.mean() + 0.5 * v_loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
    print(f"iteration={iteration}, loss={loss.item()!r}, return={torch.stack(rewards).mean():.6f}")
torch.save(agent.actor.state_dict(), "actor.pt")
print({name: round(value.sum().item(), 6) + 0.0 for name, value in torch.load("actor.pt").items()})
