"""Recipes of generative models, pairs of towers, recommenders, graphs and physics give the bits of
plain torch at home: clamped critics, averaged generators, temperatures, codebooks, renormalised
rows, constants of nature that are bare parameters."""

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
    mlp,
    pick,
    sgd,
)
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

RECIPES = Recipes()
recipe = RECIPES.add


# --- generative models ---


@recipe
def wasserstein_critic_clamped(run: Run) -> None:
    critic, critics = run.start(mlp(8, 16, 1))
    generator, generators = run.start(mlp(4, 16, 8))
    for at in range(3):
        with torch.no_grad():
            fake = generator(draw(6, 4, at=at))
        run.log(descend(critics, critic(fake).mean() - critic(draw(6, 8, at=at)).mean()))
        for p in critic.parameters():
            p.data.clamp_(-0.1, 0.1)
        for p in critic.parameters():
            p.requires_grad = False
        run.log(descend(generators, -critic(generator(draw(6, 4, at=at + 9))).mean()))
        for p in critic.parameters():
            p.requires_grad = True


@recipe
def adversaries_with_orthogonal_weights(run: Run) -> None:
    """BigGAN's regularisation is added to gradients by hand."""
    judge, judges = run.start(mlp(8, 16, 1))
    maker, makers = run.start(mlp(4, 16, 8))

    def ortho(model: nn.Module) -> None:
        with torch.no_grad():
            for p in model.parameters():
                if p.dim() > 1:
                    w = p.view(p.shape[0], -1)
                    grad = 2 * torch.mm(torch.mm(w, w.t()) * (1.0 - torch.eye(w.shape[0])), w)
                    p.grad.data += 1e-2 * grad.view(p.shape)

    ones, zeros = torch.ones(6, 1), torch.zeros(6, 1)
    for at in range(3):
        judges.zero_grad()
        fake = maker(draw(6, 4, at=at))
        loss = F.binary_cross_entropy_with_logits(judge(draw(6, 8, at=at)), ones)
        loss = loss + F.binary_cross_entropy_with_logits(judge(fake.detach()), zeros)
        loss.backward()
        ortho(judge)
        judges.step()
        makers.zero_grad()
        F.binary_cross_entropy_with_logits(judge(fake), ones).backward()
        ortho(maker)
        makers.step()
        run.log(loss)


@recipe
def a_generator_and_its_average(run: Run) -> None:
    plain = mlp(4, 16, 8)
    average = run.keep(copy.deepcopy(plain)).eval()
    maker, makers = run.start(plain)
    judge, judges = run.start(mlp(8, 16, 1))
    for at in range(3):
        run.log(descend(judges, F.softplus(judge(maker(draw(6, 4, at=at)).detach())).mean()))
        run.log(descend(makers, F.softplus(-judge(maker(draw(6, 4, at=at)))).mean()))
        ours, theirs = dict(average.named_parameters()), dict(maker.named_parameters())
        for key in ours:
            ours[key].data.mul_(0.9).add_(theirs[key].data, alpha=0.1)
        run.log(average(draw(2, 4)))


@recipe
def adversaries_in_one_model(run: Run) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.maker, self.judge = mlp(4, 16, 8), mlp(8, 16, 1)

        def forward(self, z: torch.Tensor) -> torch.Tensor:
            return self.judge(self.maker(z))

    model, optimizer = run.start(Both())
    for at in range(3):
        model.maker.requires_grad_(False)
        fake = model.maker(draw(6, 4, at=at))
        loss = F.softplus(model.judge(fake)).mean() + F.softplus(-model.judge(draw(6, 8))).mean()
        run.log(descend(optimizer, loss))
        model.maker.requires_grad_(True)
        model.judge.requires_grad_(False)
        run.log(descend(optimizer, F.softplus(-model(draw(6, 4, at=at + 9))).mean()))
        model.judge.requires_grad_(True)


@recipe
def a_variational_autoencoder_with_a_learned_noise(run: Run) -> None:
    class Variational(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = mlp(8, 16, 8), mlp(4, 16, 8)
            self.log_sigma = nn.Parameter(torch.zeros(()))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            mean, log_var = self.encoder(x).chunk(2, 1)
            z = mean + torch.randn_like(mean) * (log_var / 2).exp()
            return self.decoder(z), mean, log_var

    model, optimizer = run.start(Variational(), lr=0.02)
    for at in range(3):
        x = draw(6, 8, at=at)
        out, mean, log_var = model(x)
        nll = 0.5 * ((x - out) / model.log_sigma.exp()).pow(2).mean() + model.log_sigma
        kl = -0.5 * (1 + log_var - mean**2 - log_var.exp()).mean()
        run.log(descend(optimizer, nll + kl), model.log_sigma.exp().item())
        with torch.no_grad():
            run.log(model.decoder(draw(2, 4, at=at)))


@recipe
def a_codebook_moved_by_averages(run: Run) -> None:
    """VQ-VAE with an embedding that no gradient reaches."""

    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = mlp(8, 16, 4), mlp(4, 16, 8)
            self.codebook = nn.Embedding(5, 4).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.decoder(self.encoder(x))

    model, optimizer = run.start(Quantised())
    sums, counts = model.codebook.weight.data.clone(), torch.ones(5)
    for at in range(3):
        x = draw(6, 8, at=at)
        z = model.encoder(x)
        codes = torch.cdist(z, model.codebook.weight).argmin(1)
        quantised = z + (model.codebook(codes) - z).detach()
        loss = F.mse_loss(model.decoder(quantised), x)
        loss = loss + F.mse_loss(z, model.codebook.weight[codes])
        run.log(descend(optimizer, loss), codes)
        one_hot = F.one_hot(codes, 5).float()
        counts.mul_(0.9).add_(one_hot.sum(0), alpha=0.1)
        sums.mul_(0.9).add_(one_hot.t() @ z.detach(), alpha=0.1)
        model.codebook.weight.data.copy_(sums / counts.unsqueeze(1))
        unused = one_hot.sum(0) == 0
        model.codebook.weight.data[unused] = z.detach()[: int(unused.sum())]


@recipe
def a_codebook_trained_by_its_loss(run: Run) -> None:
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.codes = mlp(8, 16, 4), nn.Parameter(torch.randn(5, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x)

    model, optimizer = run.start(Quantised())
    for at in range(3):
        z = model(draw(6, 8, at=at))
        index = (z.detach()[:, None] - model.codes).pow(2).sum(-1).argmin(1)
        q = model.codes.index_select(0, index)
        loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
        run.log(descend(optimizer, loss), index, model.codes.grad)


@recipe
def denoising_with_an_average_for_samples(run: Run) -> None:
    model, optimizer = run.start(mlp(9, 16, 8))
    shadow = {k: v.detach().clone() for k, v in model.state_dict().items()}
    for at in range(3):
        t, noise = torch.rand(6, 1), torch.randn(6, 8)
        x = (1 - t) * draw(6, 8, at=at) + t * noise
        run.log(descend(optimizer, F.mse_loss(model(torch.cat([x, t], 1)), noise)))
        with torch.no_grad():
            decay = min(0.9, (1 + at) / (10 + at))
            for name, p in model.named_parameters():
                shadow[name].sub_((1 - decay) * (shadow[name] - p))
    stored = [p.detach().clone() for p in model.parameters()]
    model.load_state_dict(shadow)
    with torch.no_grad():
        run.log(model(draw(2, 9)))
    for p, kept in zip(model.parameters(), stored):
        p.data.copy_(kept.data)


@recipe
def an_additive_coupling_flow_with_a_learned_prior(run: Run) -> None:
    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift, self.log_scale = mlp(4, 16, 4), nn.Parameter(torch.zeros(8))
            self.mean, self.log_std = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = x.chunk(2, 1)
            return torch.cat([a, b + self.shift(a)], 1) * self.log_scale.exp()

    model, optimizer = run.start(Flow(), lr=0.02)
    for at in range(3):
        prior = Normal(model.mean, model.log_std.exp())
        log_prob = prior.log_prob(model(draw(6, 8, at=at))).sum(1) + model.log_scale.sum()
        run.log(descend(optimizer, -log_prob.mean()))
        with torch.no_grad():
            run.log(Normal(model.mean, model.log_std.exp()).sample((2,)) / model.log_scale.exp())


@recipe
def bayes_by_backprop_outside_the_forward(run: Run) -> None:
    class Bayes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mu = nn.Parameter(torch.randn(4, 8) / 4)
            self.rho = nn.Parameter(torch.full((4, 8), -3.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.mu)

    model, optimizer = run.start(Bayes(), lr=0.02)
    for at in range(3):
        posterior = Normal(model.mu, F.softplus(model.rho))
        w = posterior.rsample()
        prior = Normal(torch.zeros(4, 8), torch.ones(4, 8))
        loss = F.cross_entropy(F.linear(draw(6, 8, at=at), w), pick(4, 6, at=at))
        run.log(descend(optimizer, loss + 1e-2 * kl_divergence(posterior, prior).sum()))
        run.log((model.mu.abs() / F.softplus(model.rho)).median(), model(draw(2, 8)))


@recipe
def wasserstein_critic_with_a_gradient_penalty(run: Run) -> None:
    critic, critics = run.start(mlp(8, 16, 1), lr=0.02)
    maker, makers = run.start(mlp(4, 16, 8), lr=0.02)
    for at in range(2):
        real, fake = draw(6, 8, at=at), maker(draw(6, 4, at=at)).detach()
        mixed = (0.3 * real + 0.7 * fake).requires_grad_()
        (grad,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        penalty = (grad.norm(dim=1) - 1).pow(2).mean()
        run.log(descend(critics, critic(fake).mean() - critic(real).mean() + 10 * penalty))
        run.log(descend(makers, -critic(maker(draw(6, 4, at=at + 9))).mean()), penalty)


# --- pairs of towers ---


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = mlp(8, 16, 6), mlp(5, 16, 6)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
        self.logit_bias = nn.Parameter(torch.tensor(-1.0))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.normalize(self.image(x), dim=-1), F.normalize(self.text(y), dim=-1)


@recipe
def contrast_with_a_clamped_scale(run: Run) -> None:
    model, optimizer = run.start(Towers())
    for at in range(3):
        a, b = model(draw(5, 8, at=at), draw(5, 5, at=at))
        logits = model.logit_scale.exp() * a @ b.t()
        target = torch.arange(5)
        loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2
        run.log(descend(optimizer, loss))
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(14))
        run.log(model.logit_scale.exp().item())


@recipe
def contrast_with_a_scale_assigned(run: Run) -> None:
    model, optimizer = run.start(Towers())
    for at in range(3):
        a, b = model(draw(5, 8, at=at), draw(5, 5, at=at))
        run.log(
            descend(
                optimizer, F.cross_entropy(model.logit_scale.exp() * a @ b.t(), torch.arange(5))
            )
        )
        model.logit_scale.data = torch.clamp(model.logit_scale.data, 0, 2.6)
        run.log(float(model.logit_scale), math.exp(model.logit_scale.item()))


@recipe
def sigmoid_contrast_with_a_bias(run: Run) -> None:
    model, optimizer = run.start(Towers())
    for at in range(3):
        a, b = model(draw(5, 8, at=at), draw(5, 5, at=at))
        logits = a @ b.t() * model.logit_scale.exp() + model.logit_bias
        sign = 2 * torch.eye(5) - 1
        run.log(descend(optimizer, -F.logsigmoid(sign * logits).sum() / 5), model.logit_bias.item())


@recipe
def towers_called_one_by_one(run: Run) -> None:
    model, optimizer = run.start(Towers())
    for at in range(3):
        a = F.normalize(model.image(draw(5, 8, at=at)), dim=1)
        with torch.no_grad():
            b = F.normalize(model.text(draw(5, 5, at=at)), dim=1)
        scale = model.logit_scale.exp().clamp(max=10)
        run.log(descend(optimizer, F.cross_entropy(scale * a @ b.t(), torch.arange(5))))
        run.log([p.grad is None for p in model.parameters()])


@recipe
def one_word_of_an_embedding_is_learned(run: Run) -> None:
    """Textual inversion restores all rows but one after each step."""

    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body = nn.Embedding(12, 8), mlp(8, 16, 8)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.body(self.embed(ids).mean(1))

    plain = Text()
    plain.body.requires_grad_(False)
    model, optimizer = run.start(plain, weight_decay=0.01)
    with torch.no_grad():
        model.embed.weight[11] = model.embed.weight[3].clone()
    original = model.embed.weight.data.clone()
    others = torch.ones(12, dtype=torch.bool)
    others[11] = False
    for at in range(3):
        ids = torch.cat([pick(12, 4, 3, at=at), torch.full((4, 1), 11)], 1)
        run.log(descend(optimizer, F.mse_loss(model(ids), draw(4, 8, at=at))))
        with torch.no_grad():
            model.embed.weight[others] = original[others]
        run.log(model.embed.weight[11].detach().cpu(), model.embed.weight[[11]].norm())


@recipe
def rows_whose_gradients_are_zeroed(run: Run) -> None:
    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(12, 8), nn.Linear(8, 4)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.out(self.embed(ids).mean(1))

    model, optimizer = run.start(Text(), momentum=0.0)
    for at in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(pick(12, 4, 3, at=at)), pick(4, 4, at=at))
        loss.backward()
        model.embed.weight.grad[:11] = 0
        model.embed.weight.grad.data[11].mul_(2)
        optimizer.step()
        run.log(loss, model.embed.weight[:3])


# --- recommenders ---


class Factors(nn.Module):
    def __init__(self, **more: float) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(9, 8, **more), nn.Embedding(11, 8, **more)
        self.user_bias, self.item_bias = nn.Embedding(9, 1), nn.Embedding(11, 1)
        self.mean = nn.Parameter(torch.zeros(1))

    def forward(self, u: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        bias = self.mean + self.user_bias(u).squeeze(1) + self.item_bias(i).squeeze(1)
        return bias + (self.user(u) * self.item(i)).sum(1)


def ratings(at: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return pick(9, 7, at=at), pick(11, 7, at=at + 50), draw(7, at=at)


@recipe
def factors_with_decay_of_the_rows_used(run: Run) -> None:
    model, optimizer = run.start(Factors())
    for at in range(3):
        u, i, r = ratings(at)
        decay = model.user.weight[u].pow(2).sum() + model.item.weight[i].pow(2).sum()
        run.log(descend(optimizer, F.mse_loss(model(u, i), r) + 1e-2 * decay), decay)


@recipe
def rows_renormalised_after_each_step(run: Run) -> None:
    model, optimizer = run.start(Factors())
    for at in range(3):
        u, i, r = ratings(at)
        run.log(descend(optimizer, F.mse_loss(model(u, i), r)))
        with torch.no_grad():
            model.user.weight.renorm_(2, 0, 1.0)
            norms = model.item.weight.norm(dim=1, keepdim=True)
            model.item.weight.mul_((1.0 / norms.clamp(min=1.0)).expand_as(model.item.weight))
            run.log(model.user.weight.norm(dim=1), norms)


@recipe
def embeddings_with_a_largest_norm(run: Run) -> None:
    """The embedding renormalises rows as it is read, alone and in the model."""
    model, optimizer = run.start(Factors(max_norm=1.0))
    for at in range(3):
        u, i, r = ratings(at)
        with torch.no_grad():
            run.log(model.item(i).norm(dim=1))
            run.log(F.embedding(u, model.user.weight, max_norm=0.9).norm(dim=1))
        run.log(descend(optimizer, F.mse_loss(model(u, i), r)))
        run.log(model.item.weight.norm(dim=1))


@recipe
def bayesian_personalised_ranking(run: Run) -> None:
    model, optimizer = run.start(Factors())
    for at in range(3):
        u, good, _ = ratings(at)
        bad = pick(11, 7, at=at + 90)
        loss = -F.logsigmoid(model(u, good) - model(u, bad)).mean()
        run.log(descend(optimizer, loss))
        scores = model.user.weight @ model.item.weight.t() + model.item_bias.weight.squeeze(1)
        run.log(scores.topk(3, dim=1).indices, scores.argsort(1)[:, :2])


@recipe
def rows_read_beside_the_model(run: Run) -> None:
    model, optimizer = run.start(Factors())
    for at in range(3):
        u, i, r = ratings(at)
        found = (model.user.weight[u] * model.item.weight[i]).sum(-1)
        found = found + model.user_bias.weight[u, 0] + model.item_bias.weight[i, 0] + model.mean
        run.log(descend(optimizer, F.mse_loss(found, r)))


@recipe
def metric_factors_in_the_unit_ball(run: Run) -> None:
    model, optimizer = run.start(Factors())
    for at in range(3):
        u, i, _ = ratings(at)
        near = (model.user(u) - model.item(i)).pow(2).sum(1)
        far = (model.user(u)[:, None] - model.item.weight[None]).pow(2).sum(-1).min(1).values
        run.log(descend(optimizer, F.relu(near - far + 0.5).mean()))
        for p in (model.user.weight, model.item.weight):
            norm = p.data.norm(p=2, dim=1, keepdim=True)
            p.data = p.data / torch.maximum(norm, torch.ones_like(norm))


@recipe
def skip_grams_with_negative_samples(run: Run) -> None:
    model, optimizer = run.start(Factors())
    counts = torch.ones(11)
    for at in range(3):
        u, i, _ = ratings(at)
        counts += torch.bincount(i, minlength=11)
        noise = torch.multinomial(counts**0.75, 14, replacement=True).view(7, 2)
        good = F.logsigmoid((model.user(u) * model.item(i)).sum(1))
        bad = F.logsigmoid(-torch.bmm(model.item(noise), model.user(u)[..., None])).sum((1, 2))
        run.log(descend(optimizer, -(good + bad).mean()))
        unit = F.normalize(model.user.weight.detach())
        run.log((unit @ unit.t()).fill_diagonal_(-1).argmax(1))


@recipe
def translations_of_a_knowledge_graph(run: Run) -> None:
    """TransE normalises entities before each batch."""
    model, optimizer = run.start(Factors())
    for at in range(3):
        model.item.weight.data = F.normalize(model.item.weight.data, p=2, dim=-1)
        head, relation, tail = pick(11, 7, at=at), pick(9, 7, at=at), pick(11, 7, at=at + 5)
        good = (model.item(head) + model.user(relation) - model.item(tail)).norm(p=1, dim=1)
        wrong = model.item(tail.flip(0))
        bad = (model.item(head) + model.user(relation) - wrong).norm(p=1, dim=1)
        run.log(descend(optimizer, F.margin_ranking_loss(bad, good, torch.ones(7), margin=1.0)))


@recipe
def cold_items_set_to_the_mean_of_warm_ones(run: Run) -> None:
    model, optimizer = run.start(Factors())
    for at in range(3):
        u, i, r = ratings(at)
        run.log(descend(optimizer, F.mse_loss(model(u, i), r)))
        cold = torch.ones(11, dtype=torch.bool).index_fill(0, i, False)
        with torch.no_grad():
            warm = model.item.weight[~cold].mean(0)
            model.item.weight.copy_(torch.where(cold[:, None], warm, model.item.weight))
            model.item_bias.weight.masked_fill_(cold[:, None], 0.0)
            model.mean.copy_(r.mean().view(1))


# --- graphs ---


def adjacency(at: int = 0) -> torch.Tensor:
    edges = (draw(7, 7, at=at) > 0.5).float()
    edges = ((edges + edges.t() + torch.eye(7)) > 0).float()
    degree = edges.sum(1).rsqrt()
    return degree[:, None] * edges * degree


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nodes = nn.Embedding(7, 8)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.eps, self.attend = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.randn(2, 16) / 4)

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        h = F.relu(a @ self.first(self.nodes.weight))
        return a @ self.second(h)


@recipe
def a_convolution_over_a_dense_graph(run: Run) -> None:
    model, optimizer = run.start(Graph())
    y = pick(4, 7)
    for at in range(3):
        out = model(adjacency())
        decay = 5e-2 * model.first.weight.pow(2).sum()
        run.log(descend(optimizer, F.cross_entropy(out[:4], y[:4]) + decay))
        with torch.no_grad():
            run.log((model(adjacency()).argmax(1) == y).float().mean())


@recipe
def smooth_embeddings_of_nodes(run: Run) -> None:
    model, optimizer = run.start(Graph())
    laplacian = torch.eye(7) - adjacency()
    for at in range(3):
        z = model.nodes.weight
        smooth = torch.trace(z.t() @ laplacian @ z)
        loss = F.cross_entropy(model(adjacency()), pick(4, 7))
        run.log(descend(optimizer, loss + 1e-2 * smooth), smooth)


@recipe
def attention_with_bare_vectors(run: Run) -> None:
    model, optimizer = run.start(Graph())
    mask = adjacency() == 0
    for at in range(3):
        h = model.first(model.nodes.weight)
        scores = (h @ model.attend[0])[:, None] + (h @ model.attend[1])[None]
        scores = F.leaky_relu(scores, 0.2).masked_fill(mask, -torch.inf)
        out = model.second(F.elu(scores.softmax(1) @ h))
        run.log(descend(optimizer, F.cross_entropy(out, pick(4, 7))))


@recipe
def an_isomorphism_network_with_its_epsilon(run: Run) -> None:
    model, optimizer = run.start(Graph())
    for at in range(3):
        x = model.nodes(torch.arange(7))
        h = F.relu(model.first((1 + model.eps) * x + adjacency() @ x))
        run.log(descend(optimizer, F.cross_entropy(model.second(h), pick(4, 7))), model.eps.item())
        with torch.no_grad():
            model.eps.clamp_(-0.01, 0.01)


@recipe
def links_predicted_from_dot_products(run: Run) -> None:
    model, optimizer = run.start(Graph())
    target = (adjacency() > 0).float()
    for at in range(3):
        z = model.nodes.weight
        run.log(descend(optimizer, F.binary_cross_entropy_with_logits(z @ z.t(), target)))
        with torch.no_grad():
            model.nodes.weight.sub_(model.nodes.weight.mean(0))


# --- physics ---


class Physics(nn.Module):
    """A network for a field, and constants of nature as bare parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.field = mlp(1, 16, 16, 1)
        self.k, self.damping = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor([0.5]))

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        return self.field(t)


@recipe
def a_decay_rate_found_from_data(run: Run) -> None:
    """The equation's derivative is a difference quotient, so that first order is enough."""
    model, optimizer = run.start(Physics(), lr=0.02)
    t = torch.linspace(0, 1, 9)[:, None]
    for _ in range(3):
        u, ahead = model(t), model(t + 0.1)
        residual = (ahead - u) / 0.1 + model.k * u
        loss = residual.pow(2).mean() + F.mse_loss(u, torch.exp(-2 * t))
        run.log(descend(optimizer, loss), model.k.item())
        with torch.no_grad():
            model.k.clamp_(0.5, 1.01)


@recipe
def a_heat_equation_with_second_derivatives(run: Run) -> None:
    model, optimizer = run.start(Physics(), lr=0.02)
    for at in range(2):
        t = draw(6, 1, at=at).requires_grad_()
        u = model(t)
        (first,) = torch.autograd.grad(u.sum(), t, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), t, create_graph=True)
        residual = first + model.damping * u - model.k * second
        run.log(descend(optimizer, residual.pow(2).mean() + (model(torch.zeros(1, 1)) - 1) ** 2))
        model.k.data.clamp_(min=0.1)


@recipe
def an_oscillator_integrated_by_hand(run: Run) -> None:
    model, optimizer = run.start(Physics(), lr=0.02)
    for at in range(3):
        x, v = torch.tensor(1.0), torch.tensor(0.0)
        path = []
        for _ in range(4):
            v = v - 0.1 * (model.k * x + model.damping.squeeze() * v)
            x = x + 0.1 * v
            path.append(x)
        loss = (torch.stack(path) - torch.linspace(1, 0.5, 4)).pow(2).sum()
        run.log(descend(optimizer, loss + 1e-3 * model.field[0].weight.pow(2).sum()))
        for p in (model.k, model.damping):
            p.data = p.data.abs().clamp(min=0.1)
        run.log(model.k.item(), model.damping.tolist())


@recipe
def losses_balanced_by_learned_uncertainties(run: Run) -> None:
    class Tasks(Physics):
        def __init__(self) -> None:
            super().__init__()
            self.log_vars = nn.Parameter(torch.zeros(2))

    model, optimizer = run.start(Tasks(), lr=0.02)
    for at in range(3):
        t = draw(6, 1, at=at)
        parts = torch.stack([F.mse_loss(model(t), t.sin()), model(torch.zeros(1, 1)).pow(2).mean()])
        loss = (torch.exp(-model.log_vars) * parts).sum() + model.log_vars.sum()
        run.log(descend(optimizer, loss), parts, model.log_vars.exp().tolist())


@recipe
def multipliers_that_rise(run: Run) -> None:
    """An augmented Lagrangian: the multiplier's gradient is turned round."""

    class Constrained(Physics):
        def __init__(self) -> None:
            super().__init__()
            self.multiplier = nn.Parameter(torch.zeros(()))

    model, optimizer = run.start(Constrained(), lr=0.02)
    for at in range(3):
        optimizer.zero_grad()
        violation = model(torch.ones(1, 1)).squeeze() - 1
        loss = model(draw(6, 1, at=at)).pow(2).mean() + model.multiplier * violation
        loss.backward()
        model.multiplier.grad.neg_()
        optimizer.step()
        model.multiplier.data.clamp_(min=0)
        run.log(loss, violation, model.multiplier.item())


@recipe
def loss_weights_from_gradients_of_each_term(run: Run) -> None:
    model, optimizer = run.start(Physics(), lr=0.02)
    balance = 1.0
    for at in range(3):
        t = draw(6, 1, at=at)
        first = (model(t + 0.1) - model(t)).pow(2).mean()
        second = F.mse_loss(model(t), t.cos())
        params = list(model.field.parameters())
        one = torch.autograd.grad(first, params, retain_graph=True)
        other = torch.autograd.grad(second, params, retain_graph=True)
        most = max(g.abs().max() for g in one)
        mean = torch.cat([g.abs().flatten() for g in other]).mean()
        balance = 0.5 * balance + 0.5 * (most / mean).item()
        run.log(descend(optimizer, first + balance * second), balance)


@recipe
def an_ensemble_pushed_apart(run: Run) -> None:
    members = [run.start(mlp(1, 8, 1), lr=0.02) for _ in range(3)]
    for at in range(2):
        vectors = [torch.cat([p.flatten() for p in m.parameters()]) for m, _ in members]
        spread = sum((a - b).pow(2).sum() for a in vectors for b in vectors)
        t = draw(6, 1, at=at)
        loss = sum(F.mse_loss(m(t), t.sin()) for m, _ in members) - 1e-4 * spread
        for _, optimizer in members:
            optimizer.zero_grad()
        loss.backward()
        for _, optimizer in members:
            optimizer.step()
        run.log(loss, spread)


@recipe
def particles_moved_by_a_kernel(run: Run) -> None:
    """Stein's gradient descent writes gradients of two wrapped models from both."""
    models = [run.wrap(plain, sgd(plain.parameters())) for plain in (mlp(2, 8, 1), mlp(2, 8, 1))]
    for at in range(2):
        x, y = draw(6, 2, at=at), draw(6, 1, at=at)
        for model, optimizer in models:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
        flat = torch.stack(
            [nn.utils.parameters_to_vector(m.parameters()).detach() for m, _ in models]
        )
        grads = torch.stack(
            [torch.cat([p.grad.flatten() for p in m.parameters()]) for m, _ in models]
        )
        kernel = torch.exp(-torch.cdist(flat, flat).pow(2) / 10)
        push = kernel @ grads - (kernel.sum(1, keepdim=True) * flat - kernel @ flat) / 5
        for (model, optimizer), row in zip(models, push):
            for p, g in zip(model.parameters(), row.split([p.numel() for p in model.parameters()])):
                p.grad = g.view_as(p).clone()
            optimizer.step()
        run.log(kernel, push)


@RECIPES.each()
def test_a_recipe_has_the_bits_of_plain_torch(recipe, tmp_path):
    """Method: the recipe runs plain and at home; all that it logs and the final states agree."""
    assert_same_at_home(recipe, tmp_path)
