"""Recipes of reinforcement, meta- and continual learning give the bits of plain torch at home:
target networks that follow by hand, temperatures beside the model, weights that are saved and
restored, and penalties that hold weights where they were."""

from __future__ import annotations

import copy
import math

import torch
from recipe_cases import (
    Recipes,
    Run,
    assert_same_at_home,
    descend,
    draw,
    fit,
    mlp,
    pick,
)
from torch import nn
from torch.distributions import Categorical, Normal, kl_divergence
from torch.nn import functional as F

RECIPES = Recipes()
recipe = RECIPES.add


class Actor(nn.Module):
    """A mean, with a standard deviation that is a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(6, 16, 2)
        self.log_std = nn.Parameter(torch.full((2,), -0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)

    def policy(self, x: torch.Tensor) -> Normal:
        mean = self.body(x)
        return Normal(mean, self.log_std.exp().expand_as(mean))


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(6, 16)
        self.actor = nn.Linear(16, 4)
        self.critic = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.tanh(self.shared(x))
        return self.actor(h), self.critic(h).squeeze(-1)


def values_of(q: nn.Module, at: int) -> torch.Tensor:
    return q(draw(5, 6, at=at)).gather(1, pick(4, 5, 1, at=at))


# --- reinforcement learning ---


@recipe
def dqn_with_a_target_copied_every_other_step(run: Run) -> None:
    plain = mlp(6, 16, 4)
    target = run.keep(copy.deepcopy(plain))
    q, optimizer = run.start(plain)
    for at in range(4):
        with torch.no_grad():
            wanted = draw(5, 1, at=at) + 0.9 * target(draw(5, 6, at=at + 9)).max(1, True).values
        run.log(descend(optimizer, F.smooth_l1_loss(values_of(q, at), wanted)))
        if at % 2:
            target.load_state_dict(q.state_dict())


@recipe
def dqn_with_a_plain_target_that_follows(run: Run) -> None:
    plain = mlp(6, 16, 4)
    target = run.keep(copy.deepcopy(plain))
    q, optimizer = run.start(plain)
    for at in range(3):
        with torch.no_grad():
            wanted = 0.9 * target(draw(5, 6, at=at + 9)).amax(1, keepdim=True)
        run.log(descend(optimizer, F.mse_loss(values_of(q, at), wanted)))
        for p, follower in zip(q.parameters(), target.parameters()):
            follower.data.copy_(0.1 * p.data + 0.9 * follower.data)


@recipe
def double_dqn_with_a_wrapped_target(run: Run) -> None:
    q, optimizer = run.start(mlp(6, 16, 4))
    target, _ = run.wrap(mlp(6, 16, 4).requires_grad_(False))
    target.load_state_dict(q.state_dict())
    for at in range(3):
        x = draw(5, 6, at=at + 9)
        with torch.no_grad():
            wanted = 0.9 * target(x).gather(1, q(x).argmax(1, keepdim=True))
        run.log(descend(optimizer, F.mse_loss(values_of(q, at), wanted)))
        with torch.no_grad():
            for p, follower in zip(q.parameters(), target.parameters()):
                follower.mul_(0.9)
                torch.add(follower, p, alpha=0.1, out=follower)


@recipe
def sac_with_a_temperature_beside_the_model(run: Run) -> None:
    actor, optimizer = run.start(Actor())
    log_alpha = torch.zeros(1, requires_grad=True)
    temperature = torch.optim.Adam([log_alpha], lr=0.01)
    for at in range(3):
        action_of = actor.policy(draw(5, 6, at=at))
        raw = action_of.loc + action_of.scale * draw(5, 2, at=at + 5)
        log_prob = action_of.log_prob(raw) - torch.log(1 - torch.tanh(raw).pow(2) + 1e-6)
        log_prob = log_prob.sum(1)
        loss = (log_alpha.exp().detach() * log_prob + torch.tanh(raw).sum(1)).mean()
        run.log(descend(optimizer, loss))
        run.log(descend(temperature, -(log_alpha * (log_prob - 2).detach()).mean()))
    run.log(log_alpha, actor.log_std.exp())


@recipe
def sac_with_a_temperature_in_the_model(run: Run) -> None:
    class Agent(Actor):
        def __init__(self) -> None:
            super().__init__()
            self.log_alpha = nn.Parameter(torch.tensor(0.1))

    agent, optimizer = run.start(Agent())
    for at in range(3):
        action = agent(draw(5, 6, at=at))
        alpha = agent.log_alpha.exp()
        entropy = agent.log_std.sum() + action.pow(2).sum(1)
        loss = (alpha.detach() * entropy).mean() - (alpha * (entropy.detach() - 1)).mean()
        run.log(descend(optimizer, loss), alpha, agent.log_alpha.item())


@recipe
def two_critics_and_two_wrapped_targets(run: Run) -> None:
    critics = [run.start(mlp(6, 16, 1)) for _ in range(2)]
    targets = [run.wrap(mlp(6, 16, 1).requires_grad_(False))[0] for _ in range(2)]
    for (critic, _), target in zip(critics, targets):
        for p, follower in zip(critic.parameters(), target.parameters()):
            follower.data.copy_(p.data)
    for at in range(3):
        x = draw(5, 6, at=at)
        with torch.no_grad():
            wanted = 0.5 + 0.9 * torch.min(*(target(x) for target in targets))
        for critic, optimizer in critics:
            run.log(descend(optimizer, F.mse_loss(critic(draw(5, 6, at=at + 9)), wanted)))
        for (critic, _), target in zip(critics, targets):
            for p, follower in zip(critic.parameters(), target.parameters()):
                follower.data.lerp_(p.data, 0.05)


@recipe
def ddpg_whose_actor_is_trained_through_the_critic(run: Run) -> None:
    actor, actors = run.start(mlp(6, 16, 2))
    critic, critics = run.start(mlp(8, 16, 1))
    for at in range(3):
        x, wanted = draw(5, 6, at=at), draw(5, 1, at=at)
        with torch.no_grad():
            action = actor(x)
        run.log(descend(critics, F.mse_loss(critic(torch.cat([x, action], 1)), wanted)))
        run.log(descend(actors, -critic(torch.cat([x, actor(x)], 1)).mean()))
        critics.zero_grad()


@recipe
def ppo_with_clipped_norms(run: Run) -> None:
    model, optimizer = run.start(ActorCritic())
    x, actions, returns = draw(8, 6), pick(4, 8), draw(8)
    with torch.no_grad():
        logits, value = model(x)
        old, advantage = Categorical(logits=logits).log_prob(actions), returns - value
    for _ in range(3):
        logits, value = model(x)
        policy = Categorical(logits=logits)
        ratio = (policy.log_prob(actions) - old).exp()
        gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        loss = -gain + 0.5 * F.mse_loss(value, returns) - 0.01 * policy.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        run.log(loss, nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        run.log((ratio - 1).abs().gt(0.2).float().mean())


@recipe
def ppo_with_a_bare_deviation_that_is_clamped(run: Run) -> None:
    actor, optimizer = run.start(Actor())
    x = draw(8, 6)
    with torch.no_grad():
        old = actor.policy(x)
        actions = old.mean + old.stddev * draw(8, 2, at=1)
        before = old.log_prob(actions).sum(-1)
    for _ in range(3):
        policy = actor.policy(x)
        ratio = (policy.log_prob(actions).sum(-1) - before).exp()
        run.log(descend(optimizer, -(ratio * draw(8)).mean() - 0.1 * policy.entropy().mean()))
        with torch.no_grad():
            actor.log_std.clamp_(-0.52, 0.5)


@recipe
def a_policy_of_bare_parameters(run: Run) -> None:
    class Bandit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.log_std = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))

        def forward(self) -> torch.Tensor:
            return self.mean

    model, optimizer = run.start(Bandit())
    for at in range(3):
        policy = Normal(model.mean, model.log_std.exp())
        action = policy.mean.detach() + draw(3, at=at)
        run.log(descend(optimizer, -(policy.log_prob(action) * draw(3, at=at)).sum()))
        run.log(policy.entropy())


@recipe
def a_divergence_from_the_policy_of_before(run: Run) -> None:
    actor, optimizer = run.start(Actor())
    x = draw(8, 6)
    for at in range(3):
        policy = actor.policy(x)
        old = Normal(policy.loc.detach().clone(), policy.scale.detach().clone())
        run.log(descend(optimizer, -policy.log_prob(draw(8, 2, at=at)).mean()))
        with torch.no_grad():
            run.log(kl_divergence(old, actor.policy(x)).sum(-1).mean())


@recipe
def a_line_search_over_the_vector_of_weights(run: Run) -> None:
    """As TRPO steps: along a direction, with shorter and shorter steps until one is better."""
    model, _ = run.start(mlp(6, 16, 4))
    for at in range(2):
        loss = fit(model, at, size=6)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        direction = -torch.cat([g.reshape(-1) for g in grads])
        start = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        for exponent in range(4):
            step = 4.0 * 0.3**exponent
            nn.utils.vector_to_parameters(start + step * direction, model.parameters())
            with torch.no_grad():
                found = fit(model, at, size=6)
            run.log(found, step)
            if found < loss - 0.01:
                break


@recipe
def noisy_parameters_to_explore(run: Run) -> None:
    model, optimizer = run.start(mlp(6, 16, 4))
    for at in range(3):
        noise = [0.1 * torch.randn_like(p) for p in model.parameters()]
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), noise)
            run.log(model(draw(5, 6, at=at)).argmax(1))
            torch._foreach_sub_(list(model.parameters()), noise)
        run.log(descend(optimizer, fit(model, at, size=6)))


@recipe
def evolution_strategies_write_gradients(run: Run) -> None:
    model, optimizer = run.start(mlp(6, 16, 4))
    for at in range(2):
        centre = [p.data.clone() for p in model.parameters()]
        found = [torch.zeros_like(p) for p in centre]
        for _ in range(3):
            noise = [torch.randn_like(p) for p in centre]
            for p, kept, moved in zip(model.parameters(), centre, noise):
                p.data.copy_(kept + 0.05 * moved)
            with torch.no_grad():
                reward = -fit(model, at, size=6).item()
            for total, moved in zip(found, noise):
                total.add_(moved, alpha=reward / 3)
            run.log(reward)
        for p, kept, total in zip(model.parameters(), centre, found):
            p.data.copy_(kept)
            p.grad = -total
        optimizer.step()


@recipe
def sign_by_sign_search_without_gradients(run: Run) -> None:
    """As MeZO does it: noise is drawn again from its seed instead of being kept."""
    model, _ = run.wrap(mlp(6, 16, 4))

    def move(seed: int, scale: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        for p in model.parameters():
            z = torch.normal(0.0, 1.0, size=p.data.size(), generator=generator)
            p.data = p.data + scale * z

    for at in range(3):
        with torch.no_grad():
            move(at, 0.01)
            up = fit(model, at, size=6)
            move(at, -0.02)
            down = fit(model, at, size=6)
            move(at, 0.01)
        slope = ((up - down) / 0.02).item()
        move(at, -0.05 * slope)
        run.log(up, down, slope)


@recipe
def redo_revives_dormant_neurons(run: Run) -> None:
    model, optimizer = run.start(mlp(6, 16, 4))
    for at in range(3):
        run.log(descend(optimizer, fit(model, at, size=6)))
        with torch.no_grad():
            activity = torch.tanh(F.linear(draw(8, 6), model[0].weight, model[0].bias)).abs()
            dormant = activity.mean(0) < activity.mean()
            fresh = torch.empty_like(model[0].weight)
            nn.init.kaiming_uniform_(fresh, a=math.sqrt(5))
            model[0].weight[dormant] = fresh[dormant]
            model[0].bias[dormant] = 0
            model[2].weight[:, dormant] = 0
        run.log(dormant)


@recipe
def popart_rescales_the_last_layer(run: Run) -> None:
    model, optimizer = run.start(mlp(6, 16, 1))
    mean, std = torch.zeros(1), torch.ones(1)
    for at in range(3):
        returns = 3 * draw(8, 1, at=at) + 1
        new_mean, new_std = returns.mean().view(1), returns.std().view(1)
        with torch.no_grad():
            model[2].weight.mul_(std / new_std)
            model[2].bias.copy_((std * model[2].bias + mean - new_mean) / new_std)
        mean, std = new_mean, new_std
        loss = F.mse_loss(model(draw(8, 6, at=at)), (returns - mean) / std)
        run.log(descend(optimizer, loss))


# --- meta-learning ---


@recipe
def reptile_interpolates_to_saved_weights(run: Run) -> None:
    model, optimizer = run.start(mlp(8, 16, 4))
    for task in range(2):
        before = {name: p.clone() for name, p in model.state_dict().items()}
        for at in range(2):
            run.log(descend(optimizer, fit(model, 10 * task + at)))
        after = model.state_dict()
        model.load_state_dict({n: before[n] + (after[n] - before[n]) * 0.5 for n in before})


@recipe
def reptile_in_place(run: Run) -> None:
    model, optimizer = run.start(mlp(8, 16, 4))
    for task in range(2):
        before = [p.detach().clone() for p in model.parameters()]
        for at in range(2):
            run.log(descend(optimizer, fit(model, 10 * task + at)))
        with torch.no_grad():
            for p, kept in zip(model.parameters(), before):
                p.copy_(kept + 0.3 * (p - kept))


@recipe
def first_order_maml_with_copies_by_hand(run: Run) -> None:
    model, optimizer = run.start(mlp(8, 16, 4))
    names = [name for name, _ in model.named_parameters()]
    for at in range(2):
        optimizer.zero_grad()
        for task in range(2):
            fast = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}

            def loss_of(seed: int, weights: dict[str, torch.Tensor]) -> torch.Tensor:
                h = torch.tanh(
                    F.linear(draw(6, 8, at=seed), weights["0.weight"], weights["0.bias"])
                )
                out = F.linear(h, weights["2.weight"], weights["2.bias"])
                return F.cross_entropy(out, pick(4, 6, at=seed))

            grads = torch.autograd.grad(loss_of(at + task, fast), list(fast.values()))
            fast = {
                n: (w - 0.1 * g).detach().requires_grad_()
                for n, w, g in zip(names, fast.values(), grads)
            }
            loss = loss_of(at + task + 20, fast)
            grads = torch.autograd.grad(loss, list(fast.values()))
            for p, g in zip(model.parameters(), grads):
                p.grad = g if p.grad is None else p.grad + g
            run.log(loss)
        optimizer.step()


@recipe
def first_order_maml_on_the_weights_themselves(run: Run) -> None:
    model, optimizer = run.start(mlp(8, 16, 4))
    for at in range(2):
        saved = [p.data.clone() for p in model.parameters()]
        grads = torch.autograd.grad(fit(model, at), list(model.parameters()))
        with torch.no_grad():
            for p, g in zip(model.parameters(), grads):
                p -= 0.1 * g
        optimizer.zero_grad()
        loss = fit(model, at + 20)
        loss.backward()
        with torch.no_grad():
            for p, kept in zip(model.parameters(), saved):
                p.data.copy_(kept)
        optimizer.step()
        run.log(loss)


@recipe
def maml_with_fast_weights_in_the_graph(run: Run) -> None:
    """The fast weights are functions of the parameters; the inner gradients are constants."""
    model, optimizer = run.start(mlp(8, 16, 4))
    for at in range(2):
        inner = torch.autograd.grad(fit(model, at), list(model.parameters()))
        w, b, w2, b2 = [p - 0.1 * g for p, g in zip(model.parameters(), inner)]
        out = F.linear(torch.tanh(F.linear(draw(6, 8, at=at + 20), w, b)), w2, b2)
        run.log(descend(optimizer, F.cross_entropy(out, pick(4, 6, at=at))))


@recipe
def maml_of_second_order(run: Run) -> None:
    model, optimizer = run.start(mlp(8, 16, 4))
    for at in range(2):
        params = list(model.parameters())
        inner = torch.autograd.grad(fit(model, at), params, create_graph=True)
        w, b, w2, b2 = [p - 0.1 * g for p, g in zip(params, inner)]
        out = F.linear(torch.tanh(F.linear(draw(6, 8, at=at + 20), w, b)), w2, b2)
        run.log(descend(optimizer, F.cross_entropy(out, pick(4, 6, at=at))))


@recipe
def inner_rates_that_are_learned(run: Run) -> None:
    class Learner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(8, 4)
            self.rates = nn.ParameterList([torch.full_like(p, 0.1) for p in self.body.parameters()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x)

    model, optimizer = run.start(Learner(), lr=0.05)
    for at in range(3):
        loss = fit(model, at)
        inner = torch.autograd.grad(loss, list(model.body.parameters()))
        fast = [p - rate * g for p, rate, g in zip(model.body.parameters(), model.rates, inner)]
        out = F.linear(draw(6, 8, at=at + 20), *fast)
        run.log(descend(optimizer, F.cross_entropy(out, pick(4, 6, at=at))))
        with torch.no_grad():
            for rate in model.rates:
                rate.clamp_(min=0.09)


@recipe
def prototypical_steps_with_the_encoder_called_by_itself(run: Run) -> None:
    class Few(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.scale = mlp(8, 16, 8), nn.Parameter(torch.tensor(2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.encoder(x)

    model, optimizer = run.start(Few())
    for at in range(3):
        support = model.encoder(draw(8, 8, at=at)).view(4, 2, 8).mean(1)
        distance = torch.cdist(model(draw(6, 8, at=at + 9)), support)
        loss = F.cross_entropy(-model.scale * distance, pick(4, 6, at=at))
        run.log(descend(optimizer, loss), model.scale.item())


# --- continual learning ---


@recipe
def elastic_weight_consolidation(run: Run) -> None:
    model, optimizer = run.start(mlp(8, 16, 4))
    run.log(descend(optimizer, fit(model)))
    fisher = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for at in range(2):
        optimizer.zero_grad()
        fit(model, at).backward()
        for name, p in model.named_parameters():
            fisher[name] += p.grad.data.clone().pow(2) / 2
    anchor = {name: p.data.clone() for name, p in model.named_parameters()}
    for at in range(5, 8):
        penalty = sum(
            (fisher[name] * (p - anchor[name]).pow(2)).sum() for name, p in model.named_parameters()
        )
        run.log(descend(optimizer, fit(model, at) + 50 * penalty), penalty)


@recipe
def synaptic_intelligence(run: Run) -> None:
    model, optimizer = run.start(mlp(8, 16, 4))
    path = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    last = {name: p.detach().clone() for name, p in model.named_parameters()}
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    for at in range(3):
        optimizer.zero_grad()
        loss = fit(model, at)
        loss.backward()
        optimizer.step()
        for name, p in model.named_parameters():
            path[name].add_(-p.grad * (p.detach() - last[name]))
            last[name] = p.detach().clone()
        run.log(loss)
    omega = {
        name: path[name] / ((p.detach() - start[name]) ** 2 + 0.1)
        for name, p in model.named_parameters()
    }
    surrogate = sum(
        (omega[name].clamp_min(0) * (p - start[name]) ** 2).sum()
        for name, p in model.named_parameters()
    )
    run.log(descend(optimizer, fit(model, 9) + surrogate), surrogate, omega)


@recipe
def l2_sp_to_the_starting_point(run: Run) -> None:
    model, optimizer = run.start(mlp(8, 16, 4))
    start = nn.utils.parameters_to_vector(model.parameters()).detach()
    for at in range(3):
        moved = nn.utils.parameters_to_vector(model.parameters()) - start
        run.log(descend(optimizer, fit(model, at) + 0.1 * moved.pow(2).sum()), moved.norm())


@recipe
def memory_aware_synapses(run: Run) -> None:
    model, optimizer = run.start(mlp(8, 16, 4))
    omega = [torch.zeros_like(p) for p in model.parameters()]
    for at in range(2):
        optimizer.zero_grad()
        model(draw(6, 8, at=at)).pow(2).sum(1).mean().backward()
        for total, p in zip(omega, model.parameters()):
            total += p.grad.abs()
    old = [p.clone().detach() for p in model.parameters()]
    for at in range(3):
        loss = fit(model, at)
        for total, kept, p in zip(omega, old, model.parameters()):
            loss = loss + 0.1 * torch.sum(total * torch.pow(p - kept, 2))
        run.log(descend(optimizer, loss))


@recipe
def packnet_freezes_the_large_weights(run: Run) -> None:
    model, optimizer = run.start(mlp(8, 16, 4))
    run.log(descend(optimizer, fit(model)))
    masks = {}
    for name, p in model.named_parameters():
        masks[name] = p.data.abs() > p.data.abs().median()
    for at in range(3):
        optimizer.zero_grad()
        loss = fit(model, at)
        loss.backward()
        for name, p in model.named_parameters():
            p.grad.data[masks[name]] = 0
        optimizer.step()
        run.log(loss, [p.data[masks[name]].sum() for name, p in model.named_parameters()])


@recipe
def gradients_projected_off_a_memory(run: Run) -> None:
    model, optimizer = run.start(mlp(8, 16, 4))
    for at in range(3):
        optimizer.zero_grad()
        fit(model, at + 20).backward()
        memory = torch.cat([p.grad.view(-1) for p in model.parameters()]).clone()
        optimizer.zero_grad()
        loss = fit(model, at)
        loss.backward()
        grad = torch.cat([p.grad.view(-1) for p in model.parameters()])
        dot = (grad * memory).sum()
        if dot < 0:
            grad = grad - dot / (memory * memory).sum() * memory
        place = 0
        for p in model.parameters():
            p.grad.copy_(grad[place : place + p.numel()].view_as(p))
            place += p.numel()
        optimizer.step()
        run.log(loss, dot)


@recipe
def learning_without_forgetting(run: Run) -> None:
    model, optimizer = run.start(mlp(8, 16, 4))
    old = run.keep(mlp(8, 16, 4))
    old.load_state_dict({name: p.clone() for name, p in model.state_dict().items()})
    for at in range(3):
        x = draw(6, 8, at=at)
        out = model(x)
        soft = F.kl_div(F.log_softmax(out / 2, 1), F.softmax(old(x).detach() / 2, 1))
        run.log(descend(optimizer, F.cross_entropy(out, pick(4, 6, at=at)) + soft))


@recipe
def a_new_task_copies_the_weights_of_the_last(run: Run) -> None:
    class Tasks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(8, 16, 8)
            self.heads = nn.ModuleDict({str(task): nn.Linear(8, 4) for task in range(2)})

        def forward(self, x: torch.Tensor, task: str = "0") -> torch.Tensor:
            return self.heads[task](torch.tanh(self.body(x)))

    model, optimizer = run.start(Tasks())
    for at in range(2):
        run.log(descend(optimizer, fit(model, at)))
    with torch.no_grad():
        for new, old in zip(model.heads["1"].parameters(), model.heads["0"].parameters()):
            new.copy_(old)
    for at in range(2):
        loss = F.cross_entropy(model(draw(6, 8, at=at), "1"), pick(4, 6, at=at))
        away = (model.heads["1"].weight - model.heads["0"].weight.detach()).pow(2).sum()
        run.log(descend(optimizer, loss + away), away)


@recipe
def continual_backprop_replaces_the_least_useful_unit(run: Run) -> None:
    model, optimizer = run.start(mlp(8, 16, 4))
    for at in range(3):
        run.log(descend(optimizer, fit(model, at)))
        utility = model[0].bias.data.abs() * model[2].weight.data.abs().sum(0)
        unit = utility.argmin().item()
        with torch.no_grad():
            model[0].weight[unit].uniform_(-0.1, 0.1)
            model[0].bias[unit] = 0.0
            model[2].bias += model[2].weight[:, unit] * 0.5
            model[2].weight[:, unit].zero_()
        run.log(utility, unit)


@RECIPES.each()
def test_a_recipe_has_the_bits_of_plain_torch(recipe, tmp_path):
    """Method: the recipe runs plain and at home; all that it logs and the final states agree."""
    assert_same_at_home(recipe, tmp_path)
