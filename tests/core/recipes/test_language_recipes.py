"""Recipes of language and speech models give the bits of plain torch at home: heads that are read
beside the model, adapters of bare parameters, merges, scaled and replaced layers, and logs."""

from __future__ import annotations

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
from torch.nn import functional as F

RECIPES = Recipes()
recipe = RECIPES.add
VOCABULARY = 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.down(F.gelu(self.up(self.norm(h.cumsum(1) / 4))))


class Language(nn.Module):
    """An embedding, two blocks, and a head, which is the embedding if they are tied."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
        return self.norm(h)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(ids))


class Backbone(Language):
    """Gives hidden states: the head is applied outside."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.hidden(ids)


def text(at: int) -> torch.Tensor:
    return pick(VOCABULARY, 3, 5, at=at)


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def lm_loss(model: nn.Module, at: int) -> torch.Tensor:
    return loss_of(model(text(at)), text(at))


# --- heads and losses ---


@recipe
def a_head_applied_beside_the_backbone(run: Run) -> None:
    model, optimizer = run.start(Backbone())
    for at in range(3):
        logits = F.linear(model(text(at)), model.head.weight)
        run.log(descend(optimizer, loss_of(logits, text(at))))


@recipe
def a_tied_head_applied_beside_the_backbone(run: Run) -> None:
    model, optimizer = run.start(Backbone(tied=True))
    for at in range(3):
        logits = model(text(at)) @ model.embed.weight.T
        run.log(descend(optimizer, loss_of(logits, text(at))))


@recipe
def cross_entropy_in_chunks(run: Run) -> None:
    model, optimizer = run.start(Backbone())
    for at in range(3):
        h, ids = model(text(at))[:, :-1].reshape(-1, 8), text(at)[:, 1:].reshape(-1)
        loss = torch.zeros(())
        for part, target in zip(h.split(5), ids.split(5)):
            logits = F.linear(part, model.head.weight)
            loss = loss + F.cross_entropy(logits, target, reduction="sum")
        run.log(descend(optimizer, loss / len(ids)))


@recipe
def cross_entropy_in_chunks_that_run_backward_first(run: Run) -> None:
    """The head's part of the graph runs chunk by chunk; the backbone gets the sum."""
    model, optimizer = run.start(Backbone())
    for at in range(3):
        optimizer.zero_grad()
        h, ids = model(text(at))[:, :-1].reshape(-1, 8), text(at)[:, 1:].reshape(-1)
        cut = h.detach().requires_grad_()
        for part, target in zip(cut.split(6), ids.split(6)):
            loss = F.cross_entropy(F.linear(part, model.head.weight), target) / 2
            loss.backward()
            run.log(loss)
        h.backward(cut.grad)
        optimizer.step()


@recipe
def sampled_softmax_over_rows_of_the_head(run: Run) -> None:
    model, optimizer = run.start(Backbone())
    for at in range(3):
        h, ids = model(text(at))[:, :-1].reshape(-1, 8), text(at)[:, 1:].reshape(-1)
        negatives = pick(VOCABULARY, 6, at=at)
        right = (h * model.head.weight[ids]).sum(1, keepdim=True)
        wrong = h @ model.head.weight[negatives].t()
        target = torch.zeros(len(h), dtype=torch.long)
        run.log(descend(optimizer, F.cross_entropy(torch.cat([right, wrong], 1), target)))


@recipe
def z_loss_and_a_penalty_on_the_head(run: Run) -> None:
    model, optimizer = run.start(Language())
    for at in range(3):
        logits = model(text(at))
        z = torch.logsumexp(logits, -1).pow(2).mean()
        loss = loss_of(logits, text(at)) + 1e-2 * z + 1e-3 * model.head.weight.norm()
        run.log(descend(optimizer, loss), z)


@recipe
def noise_on_embeddings(run: Run) -> None:
    """NEFTune by a hook of the embedding."""
    plain = Language()

    def noise(module: nn.Module, _: tuple, out: torch.Tensor) -> torch.Tensor:
        size = 5 / math.sqrt(out.shape[1] * out.shape[2])
        return out + torch.empty_like(out).uniform_(-size, size) if module.training else out

    plain.embed.register_forward_hook(noise)
    model, optimizer = run.start(plain)
    for at in range(3):
        run.log(descend(optimizer, lm_loss(model, at)), model.embed.weight.std())


@recipe
def adversarial_embeddings(run: Run) -> None:
    """FGM perturbs the embedding along its gradient and restores it."""
    model, optimizer = run.start(Language())
    for at in range(3):
        optimizer.zero_grad()
        lm_loss(model, at).backward()
        backup = model.embed.weight.data.clone()
        norm = torch.norm(model.embed.weight.grad)
        if norm != 0 and not torch.isnan(norm):
            model.embed.weight.data.add_(0.5 * model.embed.weight.grad / norm)
        loss = lm_loss(model, at)
        loss.backward()
        model.embed.weight.data = backup
        optimizer.step()
        run.log(loss, norm)


@recipe
def preferences_against_a_frozen_reference(run: Run) -> None:
    """DPO with a reference that is a wrapped model and starts as a copy."""
    policy, optimizer = run.start(Language())
    reference, _ = run.wrap(Language().requires_grad_(False))
    reference.load_state_dict(policy.state_dict())

    def log_prob(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        found = F.log_softmax(model(ids)[:, :-1], -1)
        return found.gather(2, ids[:, 1:, None]).sum((1, 2))

    for at in range(3):
        good, bad = text(at), text(at + 10)
        with torch.no_grad():
            before = log_prob(reference, good) - log_prob(reference, bad)
        margin = log_prob(policy, good) - log_prob(policy, bad) - before
        run.log(descend(optimizer, -F.logsigmoid(0.1 * margin).mean()))
        run.log(sum((p - q).norm() for p, q in zip(policy.parameters(), reference.parameters())))


@recipe
def a_reward_head_of_bare_parameters(run: Run) -> None:
    class Reward(Backbone):
        def __init__(self) -> None:
            super().__init__()
            self.v, self.offset = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(()))

    model, optimizer = run.start(Reward())
    for at in range(3):
        good = model(text(at))[:, -1] @ model.v + model.offset
        bad = model(text(at + 10))[:, -1] @ model.v + model.offset
        run.log(descend(optimizer, -F.logsigmoid(good - bad).mean()), model.offset.item())


@recipe
def prompts_tuned_in_front_of_a_frozen_model(run: Run) -> None:
    class Prompted(Language):
        def __init__(self) -> None:
            super().__init__()
            self.requires_grad_(False)
            self.prompt = nn.Parameter(torch.zeros(2, 8))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            h = torch.cat([self.prompt.expand(len(ids), -1, -1), self.embed(ids)], 1)
            for block in self.blocks:
                h = block(h)
            return self.head(self.norm(h))[:, 2:]

    model, optimizer = run.start(Prompted())
    with torch.no_grad():
        model.prompt.copy_(model.embed.weight[pick(VOCABULARY, 2)])
    for at in range(3):
        run.log(descend(optimizer, lm_loss(model, at)))
        nearest = (model.prompt @ model.embed.weight.t()).argmax(1)
        run.log(nearest, torch.cdist(model.prompt, model.embed.weight).min(1))


# --- schedules over layers ---


@recipe
def norms_and_ratios_by_name(run: Run) -> None:
    model, optimizer = run.start(Language())
    for at in range(3):
        optimizer.zero_grad()
        lm_loss(model, at).backward()
        stats = {}
        for name, p in model.named_parameters():
            stats[f"{name}/norm"] = p.data.norm().item()
            stats[f"{name}/grad"] = p.grad.norm().item()
            stats[f"{name}/ratio"] = stats[f"{name}/grad"] / (stats[f"{name}/norm"] + 1e-8)
            stats[f"{name}/rms"] = p.detach().float().pow(2).mean().sqrt().item()
        optimizer.step()
        run.log(stats)


@recipe
def layers_frozen_and_thawed(run: Run) -> None:
    model, optimizer = run.start(Language())
    for at in range(4):
        for number, block in enumerate(model.blocks):
            block.requires_grad_(at % 2 == number)
        run.log(descend(optimizer, lm_loss(model, at)))
        run.log([p.abs().sum() for block in model.blocks for p in block.parameters()])


@recipe
def widths_scaled_at_the_start(run: Run) -> None:
    """muP: hidden matrices by fan-in, the head by the width, residual outputs by the depth."""
    model, optimizer = run.start(Language())
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("down.weight"):
                p.mul_(1 / math.sqrt(2 * len(model.blocks)))
            elif p.dim() == 2 and "blocks" in name:
                p.normal_(0, 1 / math.sqrt(p.shape[1]))
        model.head.weight.div_(8)
        model.embed.weight *= 0.02 / model.embed.weight.std()
    for at in range(3):
        run.log(descend(optimizer, lm_loss(model, at)))


@recipe
def layers_dropped_at_random(run: Run) -> None:
    class Dropping(Language):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            h = self.embed(ids)
            for block in self.blocks:
                h = h if self.training and torch.rand(()) < 0.5 else block(h)
            return self.head(self.norm(h))

    model, optimizer = run.start(Dropping())
    for at in range(4):
        optimizer.zero_grad()
        loss = lm_loss(model, at)
        loss.backward()
        run.log(loss, [p.grad is None for p in model.parameters()])
        optimizer.step()


@recipe
def the_last_layers_reset_in_the_middle(run: Run) -> None:
    model, optimizer = run.start(Language())
    for at in range(3):
        run.log(descend(optimizer, lm_loss(model, at)))
        if at == 1:
            for module in model.blocks[-1].modules():
                if isinstance(module, (nn.Linear, nn.LayerNorm)):
                    module.reset_parameters()
            nn.init.normal_(model.head.weight, std=0.02)


@recipe
def a_block_that_starts_as_a_copy_of_another(run: Run) -> None:
    model, optimizer = run.start(Language())
    model.blocks[1].load_state_dict(model.blocks[0].state_dict())
    with torch.no_grad():
        for p, q in zip(model.blocks[1].parameters(), model.blocks[0].parameters()):
            run.log(torch.allclose(p, q))
        model.blocks[1].down.weight.zero_()
        model.blocks[1].down.bias.zero_()
    for at in range(2):
        run.log(descend(optimizer, lm_loss(model, at)))


@recipe
def accumulation_with_a_penalty_in_each_part(run: Run) -> None:
    model, optimizer = run.start(Language())
    for at in range(2):
        optimizer.zero_grad()
        for part in range(3):
            l2 = sum(p.square().sum() for p in model.blocks.parameters())
            loss = (lm_loss(model, 3 * at + part) + 1e-3 * l2) / 3
            loss.backward()
            run.log(loss)
        run.log(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()


@recipe
def cautious_decay_where_gradients_agree(run: Run) -> None:
    model, optimizer = run.start(Language())
    for at in range(3):
        optimizer.zero_grad()
        loss = lm_loss(model, at)
        loss.backward()
        for p in model.parameters():
            agree = (p.data * p.grad > 0).to(p.dtype)
            p.data.sub_(0.01 * p.data * agree)
            run.log(agree.mean())
        optimizer.step()


@recipe
def rows_of_rare_words_moved_to_the_mean(run: Run) -> None:
    model, optimizer = run.start(Language(tied=True))
    seen = torch.zeros(VOCABULARY)
    for at in range(3):
        run.log(descend(optimizer, lm_loss(model, at)))
        seen += torch.bincount(text(at).flatten(), minlength=VOCABULARY)
        rare = seen < 2
        with torch.no_grad():
            mean = model.embed.weight[~rare].mean(0)
            model.embed.weight[rare] = model.embed.weight[rare].lerp(mean, 0.3)
    run.log(model.head.weight - model.embed.weight)


@recipe
def a_router_balanced_by_its_bias(run: Run) -> None:
    class Mixture(Backbone):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(8, 4, bias=False)
            self.bias = nn.Parameter(torch.zeros(4), requires_grad=False)
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            h = self.hidden(ids).flatten(0, 1)
            scores = torch.sigmoid(self.router(h))
            self.chosen = (scores + self.bias).topk(2, 1).indices
            gate = torch.zeros_like(scores).scatter(1, self.chosen, scores.gather(1, self.chosen))
            out = torch.stack([expert(h) for expert in self.experts], 1)
            return self.head((gate[..., None] * out).sum(1)).view(*ids.shape, -1)

    model, optimizer = run.start(Mixture())
    for at in range(3):
        run.log(descend(optimizer, lm_loss(model, at)))
        load = torch.bincount(model.chosen.flatten(), minlength=4).float()
        model.bias.data.add_(0.01 * torch.sign(load.mean() - load))
        run.log(load, F.cosine_similarity(model.router.weight[0], model.router.weight[1], dim=0))


# --- adapters ---


class Adapted(nn.Module):
    """A frozen linear layer with factors beside it."""

    def __init__(self, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.A = nn.Parameter(torch.randn(rank, 8) / 8)
        self.B = nn.Parameter(torch.zeros(8, rank))
        self.E = nn.Parameter(torch.ones(rank, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + F.linear(F.linear(x, self.E * self.A), self.B)


class Adapters(nn.Module):
    def __init__(self, rank: int = 2) -> None:
        super().__init__()
        self.first, self.second = Adapted(rank), Adapted(rank)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def adapted_loss(model: nn.Module, at: int) -> torch.Tensor:
    return F.mse_loss(model(draw(6, 8, at=at)), draw(6, 8, at=at + 10))


@recipe
def lora_merged_by_hand_and_back(run: Run) -> None:
    model, optimizer = run.start(Adapters())
    for at in range(2):
        run.log(descend(optimizer, adapted_loss(model, at)))
    with torch.no_grad():
        before = model(draw(6, 8))
        for layer in (model.first, model.second):
            layer.base.weight += layer.B @ (layer.E * layer.A)
            layer.kept = layer.B.detach().clone()
            layer.B.zero_()
        run.log(model(draw(6, 8)), before)
        for layer in (model.first, model.second):
            layer.B.copy_(layer.kept)
            layer.base.weight -= layer.B @ (layer.E * layer.A)
    run.log(descend(optimizer, adapted_loss(model, 5)))


@recipe
def relora_restarts_its_factors(run: Run) -> None:
    model, optimizer = run.start(Adapters())
    for at in range(3):
        run.log(descend(optimizer, adapted_loss(model, at)))
        for layer in (model.first, model.second):
            layer.base.weight.data += layer.B.data @ (layer.E.data * layer.A.data)
            nn.init.kaiming_uniform_(layer.A, a=math.sqrt(5))
            nn.init.zeros_(layer.B)
            optimizer.state[layer.B]["momentum_buffer"].zero_()


@recipe
def adalora_masks_ranks_and_keeps_factors_orthogonal(run: Run) -> None:
    model, optimizer = run.start(Adapters(rank=4))
    for at in range(3):
        orthogonal = 0.0
        for name, p in model.named_parameters():
            if name.endswith((".A", ".B")):
                gram = p @ p.T if name.endswith("A") else p.T @ p
                orthogonal = orthogonal + torch.norm(gram - torch.eye(4), p="fro")
        run.log(descend(optimizer, adapted_loss(model, at) + 0.01 * orthogonal))
        scores = torch.cat(
            [
                (p * p.grad).abs().view(-1)
                for name, p in model.named_parameters()
                if name.endswith(".E")
            ]
        )
        threshold = torch.kthvalue(scores, at + 1)[0].item()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name.endswith(".E"):
                    p.masked_fill_((p * p.grad).abs() <= threshold, 0.0)
        run.log(threshold)


@recipe
def lora_plus_with_two_rates(run: Run) -> None:
    plain = Adapters()
    named = list(plain.named_parameters())
    groups = [
        {"params": [p for name, p in named if name.endswith("A")], "lr": 0.05},
        {"params": [p for name, p in named if name.endswith("B")], "lr": 0.4},
    ]
    model, optimizer = run.wrap(plain, sgd(groups))
    for at in range(3):
        run.log(descend(optimizer, adapted_loss(model, at)))
        run.log([group["params"][0].norm() for group in optimizer.param_groups])


@recipe
def dora_normalises_the_adapted_weight_outside(run: Run) -> None:
    class Dora(Adapted):
        def __init__(self) -> None:
            super().__init__()
            self.m = nn.Parameter(torch.ones(8))

    model, optimizer = run.start(Dora())
    with torch.no_grad():
        model.m.copy_(model.base.weight.norm(dim=1))
    for at in range(3):
        w = model.base.weight + model.B @ model.A
        w = model.m[:, None] * w / w.norm(dim=1, keepdim=True).detach()
        out = F.linear(draw(6, 8, at=at), w, model.base.bias)
        run.log(descend(optimizer, F.mse_loss(out, draw(6, 8, at=at + 10))))


@recipe
def pissa_starts_from_singular_vectors(run: Run) -> None:
    model, optimizer = run.start(Adapters())
    with torch.no_grad():
        for layer in (model.first, model.second):
            u, s, v = torch.linalg.svd(layer.base.weight)
            layer.B.copy_(u[:, :2] * s[:2].sqrt())
            layer.A.copy_(s[:2, None].sqrt() * v[:2])
            layer.base.weight.sub_(layer.B @ layer.A)
    for at in range(3):
        run.log(descend(optimizer, adapted_loss(model, at)))


@recipe
def bitfit_and_task_arithmetic(run: Run) -> None:
    plain = Language()
    for name, p in plain.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    model, optimizer = run.start(plain)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    for at in range(2):
        run.log(descend(optimizer, lm_loss(model, at)))
    vector = {name: p.detach() - start[name] for name, p in model.named_parameters()}
    for scale in (0.0, 0.5, 2.0):
        for name, p in model.named_parameters():
            p.data.copy_(start[name] + scale * vector[name])
        with torch.no_grad():
            run.log(lm_loss(model, 5))


@recipe
def ties_trims_and_elects_signs(run: Run) -> None:
    models = [run.start(mlp(8, 16, 8)) for _ in range(2)]
    base = {name: p.detach().clone() for name, p in models[0][0].named_parameters()}
    models[1][0].load_state_dict(base)
    for number, (model, optimizer) in enumerate(models):
        for at in range(2):
            run.log(descend(optimizer, adapted_loss(model, 10 * number + at)))
    merged = run.keep(mlp(8, 16, 8))
    with torch.no_grad():
        for name, p in merged.named_parameters():
            deltas = torch.stack([m.get_parameter(name) - base[name] for m, _ in models])
            cut = deltas.abs().flatten(1).median(1).values.view(-1, *[1] * p.dim())
            deltas = deltas * (deltas.abs() > cut)
            agree = deltas.sign() == deltas.sum(0).sign()
            p.copy_(base[name] + (deltas * agree).sum(0) / agree.sum(0).clamp(min=1))


@recipe
def slerp_of_two_checkpoints(run: Run) -> None:
    one, optimizer = run.start(mlp(8, 16, 8))
    other, _ = run.wrap(mlp(8, 16, 8))
    run.log(descend(optimizer, adapted_loss(one, 0)))
    with torch.no_grad():
        for p, q in zip(one.parameters(), other.parameters()):
            a, b = p.flatten(), q.flatten()
            angle = torch.acos((a @ b / (a.norm() * b.norm())).clamp(-1, 1))
            mixed = (torch.sin(0.7 * angle) * a + torch.sin(0.3 * angle) * b) / torch.sin(angle)
            p.copy_(mixed.view_as(p))
            run.log(angle)
    run.log(adapted_loss(one, 1))


# --- speech ---


class Speech(nn.Module):
    """A convolution and a recurrent layer over frames."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Conv1d(8, 16, 3, padding=1)
        self.rnn = nn.GRU(16, 16, batch_first=True)
        self.out = nn.Linear(16, 6)
        self.steps = nn.ParameterList([torch.randn(16, 16) / 4 for _ in range(2)])

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.front(x)).transpose(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.rnn(self.encode(x))[0])


@recipe
def connectionist_temporal_classification(run: Run) -> None:
    model, optimizer = run.start(Speech())
    for at in range(3):
        log_probs = model(draw(2, 8, 9, at=at)).log_softmax(-1).transpose(0, 1)
        target = pick(5, 2, 3, at=at) + 1
        loss = F.ctc_loss(log_probs, target, torch.tensor([9, 9]), torch.tensor([3, 3]))
        optimizer.zero_grad()
        loss.backward()
        run.log(loss, nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        run.log(model.rnn.weight_hh_l0.norm(), torch.linalg.svdvals(model.rnn.weight_hh_l0[:16]))


@recipe
def contrastive_predictive_coding(run: Run) -> None:
    """Predictors are bare parameters, read beside the encoder that is called by itself."""
    model, optimizer = run.start(Speech())
    for at in range(3):
        z = model.encode(draw(4, 8, 9, at=at))
        context = model.rnn(z)[0][:, 5]
        loss = torch.zeros(())
        for ahead, weight in enumerate(model.steps):
            scores = z[:, 6 + ahead] @ (context @ weight.t()).t()
            loss = loss + F.cross_entropy(scores, torch.arange(4))
        run.log(descend(optimizer, loss))


@recipe
def recurrent_weights_kept_orthogonal_with_open_gates(run: Run) -> None:
    plain = nn.LSTM(8, 8, batch_first=True)
    model, optimizer = run.start(plain)
    for name, p in model.named_parameters():
        if "weight_hh" in name:
            for gate in p.data.chunk(4, 0):
                nn.init.orthogonal_(gate)
        elif "bias" in name:
            p.data.zero_()
            p.data[8:16].fill_(1.0)
    for at in range(3):
        out, _ = model(draw(3, 5, 8, at=at))
        penalty = sum((w @ w.t() - torch.eye(8)).pow(2).sum() for w in model.weight_hh_l0.chunk(4))
        run.log(descend(optimizer, out.pow(2).mean() + 1e-2 * penalty), penalty)


@recipe
def variational_weight_noise_of_a_recogniser(run: Run) -> None:
    model, optimizer = run.start(Speech())
    for at in range(3):
        optimizer.zero_grad()
        clean = {name: p.data.clone() for name, p in model.named_parameters()}
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn(p.size()) * 0.02)
        loss = model(draw(2, 8, 9, at=at)).pow(2).mean()
        loss.backward()
        for name, p in model.named_parameters():
            p.data.copy_(clean[name])
        optimizer.step()
        run.log(loss)


@RECIPES.each()
def test_a_recipe_has_the_bits_of_plain_torch(recipe, tmp_path):
    """Method: the recipe runs plain and at home; all that it logs and the final states agree."""
    assert_same_at_home(recipe, tmp_path)
