"""Recipes of image training give the bits of plain torch at home: regularisers written by hand,
averages of weights, sharpness-aware steps, masks and normalised kernels.

Each recipe is a loop as people write it, and reads or writes weights between the passes.
"""

from __future__ import annotations

import copy

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
    sgd,
)
from torch import nn
from torch.nn import functional as F

RECIPES = Recipes()
recipe = RECIPES.add


class Vision(nn.Module):
    """Two convolutions, batch norm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.body = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(F.relu(self.norm(self.stem(x))))).mean((2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))


def images(at: int) -> tuple[torch.Tensor, torch.Tensor]:
    return draw(4, 3, 6, 6, at=at), pick(4, 4, at=at)


# --- losses ---


@recipe
def label_smoothing_and_l2_in_the_loss(run: Run) -> None:
    model, optimizer = run.start(Vision())
    for at in range(3):
        x, y = images(at)
        penalty = sum(p.pow(2).sum() for p in model.parameters())
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1) + 1e-3 * penalty
        run.log(descend(optimizer, loss), penalty)


@recipe
def l1_of_matrices_after_the_forward(run: Run) -> None:
    model, optimizer = run.start(mlp(8, 16, 4))
    for at in range(3):
        loss = fit(model, at)
        l1 = torch.stack([p.abs().sum() for p in model.parameters() if p.dim() > 1]).sum()
        run.log(descend(optimizer, loss + 1e-3 * l1), l1)


@recipe
def mixup_with_a_teacher_of_saved_copies(run: Run) -> None:
    model, optimizer = run.start(Vision())
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    for at in range(3):
        x, y = images(at)
        mixed = 0.7 * x + 0.3 * x.flip(0)
        out = model(mixed)
        loss = 0.7 * F.cross_entropy(out, y) + 0.3 * F.cross_entropy(out, y.flip(0))
        run.log(descend(optimizer, loss))
        run.log({name: (p - first[name]).norm() for name, p in model.named_parameters()})


@recipe
def group_lasso_over_filters(run: Run) -> None:
    model, optimizer = run.start(Vision())
    for at in range(3):
        x, y = images(at)
        lasso = sum(m.weight.flatten(1).norm(dim=1).sum() for m in (model.stem, model.body))
        run.log(descend(optimizer, F.cross_entropy(model(x), y) + 1e-2 * lasso))
        run.log((model.body.weight.flatten(1).norm(dim=1) < 0.3).sum())


@recipe
def orthogonal_kernels(run: Run) -> None:
    model, optimizer = run.start(Vision())
    for at in range(3):
        x, y = images(at)
        w = model.body.weight.view(8, -1)
        gram = w @ w.t() - torch.eye(8)
        run.log(descend(optimizer, F.cross_entropy(model(x), y) + 1e-2 * gram.pow(2).sum()), gram)


@recipe
def sparse_batch_norm_scales(run: Run) -> None:
    """Network slimming adds the sign of the scales to their gradients."""
    model, optimizer = run.start(Vision())
    for at in range(3):
        x, y = images(at)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.grad.data.add_(0.01 * torch.sign(module.weight.data))
        optimizer.step()
        run.log(model.norm.weight.data.abs().sort().values)


@recipe
def arcface_over_the_heads_weight(run: Run) -> None:
    model, optimizer = run.start(Vision())
    for at in range(3):
        x, y = images(at)
        cosine = F.linear(F.normalize(model.features(x)), F.normalize(model.head.weight))
        margin = torch.cos(torch.acos(cosine.clamp(-0.999, 0.999)) + 0.2)
        logits = torch.where(F.one_hot(y, 4).bool(), margin, cosine) * 8
        run.log(descend(optimizer, F.cross_entropy(logits, y)))


@recipe
def center_loss_with_centers_moved_by_hand(run: Run) -> None:
    class Centered(Vision):
        def __init__(self) -> None:
            super().__init__()
            self.centers = nn.Parameter(torch.zeros(4, 8), requires_grad=False)

    model, optimizer = run.start(Centered())
    for at in range(3):
        x, y = images(at)
        features = model.features(x)
        loss = F.cross_entropy(model.head(features), y)
        loss = loss + 0.1 * (features - model.centers[y]).pow(2).sum(1).mean()
        run.log(descend(optimizer, loss))
        with torch.no_grad():
            for cls in y.unique():
                mean = features[y == cls].mean(0)
                model.centers[cls] += 0.5 * (mean - model.centers[cls])


@recipe
def prototypes_read_as_rows(run: Run) -> None:
    model, optimizer = run.start(Vision())
    for at in range(3):
        x, y = images(at)
        distance = torch.cdist(model.features(x), model.head.weight)
        run.log(descend(optimizer, F.cross_entropy(-distance, y)))
        run.log([row.norm() for row in model.head.weight])


# --- averages ---


@recipe
def ema_by_zip_of_a_deepcopied_model(run: Run) -> None:
    plain = Vision()
    average = run.keep(copy.deepcopy(plain)).requires_grad_(False)
    model, optimizer = run.start(plain)
    for at in range(3):
        x, y = images(at)
        run.log(descend(optimizer, F.cross_entropy(model(x), y)))
        for ours, theirs in zip(average.parameters(), model.parameters()):
            ours.data.mul_(0.9).add_(theirs.data, alpha=0.1)
        for ours, theirs in zip(average.buffers(), model.buffers()):
            ours.copy_(theirs)
    run.log(average(images(9)[0]))


@recipe
def ema_by_lerp_of_shadows_and_a_swap_for_evaluation(run: Run) -> None:
    model, optimizer = run.start(mlp(8, 16, 4))
    shadow = {name: p.data.clone() for name, p in model.named_parameters()}
    for at in range(3):
        run.log(descend(optimizer, fit(model, at)))
        for name, p in model.named_parameters():
            shadow[name].lerp_(p.data, 0.2)
        backup = {name: p.data.clone() for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            p.data.copy_(shadow[name])
        with torch.no_grad():
            run.log(fit(model, 9))
        for name, p in model.named_parameters():
            p.data = backup[name]


@recipe
def foreach_ema(run: Run) -> None:
    model, optimizer = run.start(mlp(8, 16, 4))
    shadow = [p.detach().clone() for p in model.parameters()]
    for at in range(3):
        run.log(descend(optimizer, fit(model, at)))
        torch._foreach_mul_(shadow, 0.9)
        torch._foreach_add_(shadow, [p.detach() for p in model.parameters()], alpha=0.1)
    run.log(shadow)


@recipe
def swa_by_hand(run: Run) -> None:
    model, optimizer = run.start(mlp(8, 16, 4))
    average, count = [torch.zeros_like(p) for p in model.parameters()], 0
    for at in range(4):
        run.log(descend(optimizer, fit(model, at)))
        if at % 2:
            for mean, p in zip(average, model.parameters()):
                mean.add_((p.detach() - mean) / (count + 1))
            count += 1
    with torch.no_grad():
        for mean, p in zip(average, model.parameters()):
            p.copy_(mean)
    run.log(fit(model, 9))


@recipe
def lookahead(run: Run) -> None:
    model, optimizer = run.start(mlp(8, 16, 4))
    slow = [p.clone().detach() for p in model.parameters()]
    for at in range(4):
        run.log(descend(optimizer, fit(model, at)))
        if at % 2:
            for kept, p in zip(slow, model.parameters()):
                kept.add_(p.data - kept, alpha=0.5)
                p.data.copy_(kept)


@recipe
def a_soup_of_two_models(run: Run) -> None:
    one, first = run.start(mlp(8, 16, 4))
    other, second = run.start(mlp(8, 16, 4))
    for at in range(2):
        run.log(descend(first, fit(one, at)), descend(second, fit(other, at)))
    with torch.no_grad():
        for p, q in zip(one.parameters(), other.parameters()):
            p.copy_((p + q) / 2)
            q.mul_(0.5).add_(p, alpha=0.5)
    run.log(fit(one, 5), fit(other, 5))


@recipe
def stochastic_weights_from_a_mean_and_a_square(run: Run) -> None:
    """SWAG keeps the first two moments and samples from them."""
    model, optimizer = run.start(mlp(8, 16, 4))
    mean = torch.zeros_like(nn.utils.parameters_to_vector(model.parameters()))
    square = mean.detach().clone()
    for at in range(3):
        run.log(descend(optimizer, fit(model, at)))
        vector = nn.utils.parameters_to_vector(model.parameters()).detach()
        mean = (mean.detach() * at + vector) / (at + 1)
        square = (square * at + vector**2) / (at + 1)
    sample = mean + (square - mean**2).clamp_min(0).sqrt() * draw(mean.numel())
    nn.utils.vector_to_parameters(sample, model.parameters())
    run.log(fit(model, 9))


# --- optimizers around the optimizer ---


@recipe
def sharpness_aware_steps(run: Run) -> None:
    model, optimizer = run.start(Vision())
    for at in range(2):
        x, y = images(at)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        norm = torch.stack([p.grad.norm(2) for p in model.parameters()]).norm(2)
        moves = {}
        with torch.no_grad():
            for p in model.parameters():
                moves[p] = p.grad * (0.05 / (norm + 1e-12))
                p.add_(moves[p])
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(moves[p])
        optimizer.step()
        run.log(loss, norm)


@recipe
def adaptive_sharpness_with_old_weights_assigned(run: Run) -> None:
    model, optimizer = run.start(mlp(8, 16, 4))
    for at in range(2):
        optimizer.zero_grad()
        fit(model, at).backward()
        old = {}
        for name, p in model.named_parameters():
            old[name] = p.data.clone()
            p.data.add_(p.data.abs() * p.grad * 0.05)
        optimizer.zero_grad()
        run.log(fit(model, at).detach())
        fit(model, at).backward()
        for name, p in model.named_parameters():
            p.data = old[name].clone()
        optimizer.step()


@recipe
def weights_perturbed_by_an_adversary(run: Run) -> None:
    """AWP moves the weights along the gradient, relative to their norms, and back."""
    model, optimizer = run.start(Vision())
    for at in range(2):
        x, y = images(at)
        grads = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
        with torch.no_grad():
            moves = [
                0.01 * p.norm() * g / (g.norm() + 1e-8) for p, g in zip(model.parameters(), grads)
            ]
            torch._foreach_add_(list(model.parameters()), moves)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), moves)
        optimizer.step()
        run.log(moves)


@recipe
def centralised_gradients(run: Run) -> None:
    model, optimizer = run.start(Vision())
    for at in range(3):
        x, y = images(at)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for p in model.parameters():
            if p.grad.dim() > 1:
                p.grad.add_(-p.grad.mean(dim=tuple(range(1, p.dim())), keepdim=True))
        optimizer.step()
        run.log([p.grad for p in model.parameters()])


@recipe
def adaptive_gradient_clipping(run: Run) -> None:
    """As in NFNets: by the ratio of unit-wise norms of gradients and weights."""
    model, optimizer = run.start(Vision())

    def unitwise(x: torch.Tensor) -> torch.Tensor:
        return x.norm() if x.dim() < 2 else x.flatten(1).norm(dim=1).view(-1, *[1] * (x.dim() - 1))

    for at in range(3):
        x, y = images(at)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for p in model.parameters():
            most = unitwise(p.detach()).clamp_(min=1e-3) * 0.05
            norm = unitwise(p.grad.detach())
            clipped = p.grad * (most / norm.clamp(min=1e-6))
            p.grad.detach().copy_(torch.where(norm > most, clipped, p.grad))
        optimizer.step()
        run.log([unitwise(p.detach()) for p in model.parameters()])


@recipe
def larc_trust_ratios(run: Run) -> None:
    model, optimizer = run.start(mlp(8, 16, 4))
    for at in range(3):
        optimizer.zero_grad()
        fit(model, at).backward()
        for group in optimizer.param_groups:
            for p in group["params"]:
                weight, grad = torch.norm(p.data), torch.norm(p.grad.data)
                ratio = (0.02 * weight / (grad + 1e-8)).clamp(max=group["lr"]) / group["lr"]
                p.grad.data *= ratio
                run.log(ratio)
        optimizer.step()


@recipe
def decoupled_decay_over_the_groups(run: Run) -> None:
    plain = Vision()
    groups = [
        {"params": [p for p in plain.parameters() if p.dim() > 1], "decay": 0.1},
        {"params": [p for p in plain.parameters() if p.dim() == 1], "decay": 0.0, "lr": 0.05},
    ]
    model, optimizer = run.wrap(plain, sgd(groups))
    for at in range(3):
        x, y = images(at)
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.data.add_(p.data, alpha=-group["decay"] * group["lr"])
        run.log(descend(optimizer, F.cross_entropy(model(x), y)))


@recipe
def layerwise_rates_from_weight_norms(run: Run) -> None:
    plain = mlp(8, 16, 16, 4)
    groups = [{"params": list(layer.parameters())} for layer in plain if list(layer.parameters())]
    model, optimizer = run.wrap(plain, sgd(groups))
    for at in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * group["params"][0].norm().item()
            run.log(group["lr"])
        run.log(descend(optimizer, fit(model, at)))


@recipe
def warm_restarts_to_perturbed_weights(run: Run) -> None:
    """Shrink and perturb: weights are scaled and get a bit of a fresh initialisation."""
    model, optimizer = run.start(mlp(8, 16, 4))
    for at in range(3):
        run.log(descend(optimizer, fit(model, at)))
        fresh = mlp(8, 16, 4)
        with torch.no_grad():
            for p, q in zip(model.parameters(), fresh.parameters()):
                p.mul_(0.8).add_(0.2 * q)


# --- weights in other clothes ---


@recipe
def standardised_kernels_outside_the_model(run: Run) -> None:
    model, optimizer = run.start(Vision())
    for at in range(3):
        x, y = images(at)
        w = model.stem.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        h = F.conv2d(x, w, model.stem.bias, padding=1).relu().mean((2, 3))
        run.log(descend(optimizer, F.cross_entropy(model.head(h), y)))


@recipe
def spectral_norm_by_hand(run: Run) -> None:
    model, optimizer = run.start(mlp(8, 16, 4))
    u = F.normalize(draw(16), dim=0)
    for at in range(3):
        with torch.no_grad():
            w = model[0].weight
            v = F.normalize(w.t() @ u, dim=0)
            u = F.normalize(w @ v, dim=0)
            sigma = u @ w @ v
            w.div_(sigma)
        run.log(descend(optimizer, fit(model, at)), sigma, u)


@recipe
def max_norm_over_filters_after_each_step(run: Run) -> None:
    model, optimizer = run.start(Vision())
    for at in range(3):
        x, y = images(at)
        run.log(descend(optimizer, F.cross_entropy(model(x), y)))
        for module in (model.stem, model.body, model.head):
            module.weight.data = torch.renorm(module.weight.data, 2, 0, 0.4)


@recipe
def batch_norm_folded_into_the_convolution(run: Run) -> None:
    model, optimizer = run.start(Vision())
    for at in range(2):
        x, y = images(at)
        run.log(descend(optimizer, F.cross_entropy(model(x), y)))
    scale = model.norm.weight / torch.sqrt(model.norm.running_var + model.norm.eps)
    fused = nn.Conv2d(3, 8, 3, padding=1)
    with torch.no_grad():
        fused.weight.copy_(model.stem.weight * scale.view(-1, 1, 1, 1))
        fused.bias.copy_((model.stem.bias - model.norm.running_mean) * scale + model.norm.bias)
        run.log(fused(images(5)[0]))


@recipe
def a_head_that_grows_out_of_the_old_one(run: Run) -> None:
    model, optimizer = run.start(Vision())
    run.log(descend(optimizer, F.cross_entropy(model(images(0)[0]), images(0)[1])))
    bigger = nn.Linear(8, 6)
    with torch.no_grad():
        bigger.weight[:4] = model.head.weight
        bigger.bias[:4] = model.head.bias
        bigger.weight[4:] = model.head.weight.mean(0, keepdim=True)
    run.log(list(bigger.parameters()))


@recipe
def a_linear_probe_beside_frozen_features(run: Run) -> None:
    model, _ = run.wrap(Vision().requires_grad_(False).eval())
    probe = run.keep(nn.Linear(8, 4))
    optimizer = sgd(probe.parameters())
    with torch.no_grad():
        probe.weight.copy_(model.head.weight)
    for at in range(3):
        x, y = images(at)
        with torch.no_grad():
            features = model.features(x)
        run.log(descend(optimizer, F.cross_entropy(probe(features), y)))


@recipe
def frozen_stages_thawed_one_by_one(run: Run) -> None:
    model, optimizer = run.start(Vision())
    stages = [model.head, model.body, model.norm, model.stem]
    model.requires_grad_(False)
    for at in range(4):
        stages[at].requires_grad_(True)
        x, y = images(at)
        run.log(descend(optimizer, F.cross_entropy(model(x), y)))
        run.log([p.detach().abs().mean() for p in model.parameters()])


@recipe
def distillation_from_a_wrapped_teacher(run: Run) -> None:
    teacher, _ = run.wrap(Vision().eval().requires_grad_(False))
    student, optimizer = run.start(Vision())
    with torch.no_grad():
        for p, q in zip(student.parameters(), teacher.parameters()):
            p.copy_(q + 0.1 * draw(*q.shape))
    for at in range(3):
        x, y = images(at)
        with torch.no_grad():
            target = teacher(x)
        hint = sum(
            (p - q).pow(2).mean()
            for p, q in zip(student.head.parameters(), teacher.head.parameters())
        )
        loss = F.mse_loss(student(x), target) + 0.1 * hint
        run.log(descend(optimizer, loss), hint)


@recipe
def a_momentum_encoder_and_its_queue(run: Run) -> None:
    """As MoCo does it: the keys' encoder is a wrapped model that follows the queries'."""
    query, optimizer = run.start(mlp(8, 16, 8))
    keys, _ = run.wrap(mlp(8, 16, 8).requires_grad_(False))
    for p, q in zip(query.parameters(), keys.parameters()):
        q.data.copy_(p.data)
    queue = F.normalize(draw(8, 12), dim=0)
    for at in range(3):
        with torch.no_grad():
            for p, q in zip(query.parameters(), keys.parameters()):
                q.data = q.data * 0.9 + p.data * 0.1
            k = F.normalize(keys(draw(4, 8, at=at) + 0.1), dim=1)
        q = F.normalize(query(draw(4, 8, at=at)), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue], 1) / 0.2
        run.log(descend(optimizer, F.cross_entropy(logits, torch.zeros(4, dtype=torch.long))))
        queue = torch.cat([k.t(), queue], 1)[:, :12]


@recipe
def frozen_last_layer_of_dino(run: Run) -> None:
    """Gradients of the last layer are dropped at first, and its rows have length one."""
    model, optimizer = run.start(mlp(8, 16, 4))
    for at in range(3):
        optimizer.zero_grad()
        loss = fit(model, at)
        loss.backward()
        for name, p in model.named_parameters():
            if at < 1 and name.startswith("2."):
                p.grad = None
        optimizer.step()
        with torch.no_grad():
            model[2].weight.copy_(F.normalize(model[2].weight, dim=-1))
        run.log(loss, model[2].weight.norm(dim=1))


@RECIPES.each()
def test_a_recipe_has_the_bits_of_plain_torch(recipe, tmp_path):
    """Method: the recipe runs plain and at home; all that it logs and the final states agree."""
    assert_same_at_home(recipe, tmp_path)
