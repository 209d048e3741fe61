"""Logits of a head in tiles in many models, in lower precision, and over steps.

Words used here: see `test_logits` (pair, fused, whole).
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

transformers = pytest.importorskip("transformers")

from logits_cases import (  # noqa: F401
    DEVICE,
    SEED,
    VOCAB,
    WIDTH,
    Model,
    ce,
    check_close,
    check_pair,
    counts,
    inference,
    inputs,
    labels,
    no_grad,
    pair,
    same,
    sgd,
    wrap,
)
from models import seeded

# --- models ---


class Pair(nn.Module):
    """Two tiled layers, one on the other."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, VOCAB), nn.Linear(VOCAB, WIDTH)

    def forward(self, x):
        return self.down(self.up(x))


class Several(Model):
    """One head three times in a forward, and a low-rank product beside it."""

    def __init__(self):
        super().__init__()
        self.low = nn.Sequential(nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, VOCAB, bias=False))

    def forward(self, x):
        h = self.before(x).tanh()
        return self.head(h), self.head(h * 0.5), self.head(h) + self.low(h)


class Output(nn.Module):
    """A head that is narrow, of rows larger than a tile should be; ``says``: that it is a head."""

    def __init__(self, says: bool = True):
        super().__init__()
        self.layer, self.says = nn.Linear(20000, 40), says

    def get_output_embeddings(self):
        if not self.says:
            raise NotImplementedError
        return self.layer

    def forward(self, x):
        return self.layer(x.repeat(1, 1, 313)[..., :20000])


def frozen(*names):
    return lambda: Model(
        change=lambda m: [
            p.requires_grad_(not n.startswith(names)) for n, p in m.named_parameters()
        ]
    )


def hooked(register, hook, part=lambda m: m.head):
    return Model, lambda m, x: (getattr(part(m), register)(hook) and None, ce(m(x), labels()))


LOSS = lambda m, x: ce(m(x), labels())
masked = lambda: Model(change=lambda m: m.head.bias.data[:300].fill_(-torch.inf))
KINDS = {
    "frozen weight": (frozen("head.weight"), LOSS),
    "frozen bias": (frozen("head.bias"), LOSS),
    "frozen head": (frozen("head"), LOSS),
    "frozen body": (frozen("before"), LOSS),
    "frozen": (frozen("before", "head"), LOSS),
    "layer on layer": (Pair, lambda m, x: m(x)),
    "several": (Several, lambda m, x: [ce(z, labels()) for z in m(x)]),
    "one is whole": (Several, lambda m, x: (m(x)[0].exp(), ce(m(x)[1], labels()))),
    "masked classes": (masked, lambda m, x: ce(m(x), labels().clamp(300))),
    "masked label": (masked, lambda m, x: LOSS(m, x).detach()),
    "large logits": (lambda: Model(change=lambda m: m.head.weight.data.mul_(1e3)), LOSS),
    "in a sequence": (
        lambda: nn.Sequential(Model(), nn.Dropout(0.0), nn.LogSoftmax(-1)),
        lambda m, x: F.nll_loss(m(x)[0], labels()[0]),
    ),
    "2-d": (Model, lambda m, x: F.cross_entropy(m(x[0]), labels()[0])),
    "no rows": (Model, lambda m, x: (m(x[:0]).sum(), LOSS(m, x))),
    "strided": (Model, lambda m, x: ce(m(x.transpose(0, 1)[::2]), labels()[:, :3].T)),
    "eval": (Model, lambda m, x: LOSS(m.eval(), x)),
    "no_grad": (Model, lambda m, x: no_grad(lambda: (m(x), m(x).requires_grad, LOSS(m, x)))()),
    "one row": (Output, lambda m, x: ce(m(x), labels(vocab=40))),
    "inference_mode": (
        Model,
        lambda m, x: inference(lambda: torch.tensor(LOSS(m, x).tolist()))().numel(),
    ),
    "no head named": (lambda: Output(says=False), lambda m, x: ce(m(x), labels(vocab=40))),
    "compiled": (Model, lambda m, x: ce(torch.compile(m, backend="eager")(x), labels())),
    "around, reentrant": (Model, lambda m, x: ce(checkpoint(m, x, use_reentrant=True), labels())),
    "around": (Model, lambda m, x: ce(checkpoint(m, x, use_reentrant=False), labels())),
    "around the loss": (Model, lambda m, x: checkpoint(LOSS, m, x, use_reentrant=False)),
    "inside, reentrant": (lambda: Model(around={"use_reentrant": True}), LOSS),
    "inside": (lambda: Model(around={"use_reentrant": False}), LOSS),
    "forward hook": hooked("register_forward_hook", lambda m, args, out: out * 2),
    "tensor hook": hooked(
        "register_forward_hook", lambda m, args, out: out.register_hook(lambda g: g * 2) and None
    ),
    "backward hook": hooked("register_full_backward_hook", lambda m, gi, go: (gi[0] * 2,)),
    "backward hook of the model": hooked(
        "register_full_backward_hook", lambda m, gi, go: None, part=lambda m: m
    ),
    "backward pre-hook": hooked("register_full_backward_pre_hook", lambda m, go: (go[0] * 2,)),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_models_and_ways_to_run_them(counts, name):
    """Pairs; where the loss is of nothing but rows of the head's output, it is fused."""
    same(pair(KINDS[name][0]), KINDS[name][1])
    assert not counts["whole"] or KINDS[name][1] is not LOSS or "inside" in name


def language_model(name: str) -> nn.Module:
    kind = {"Bert": "ForMaskedLM", "GPT2": "LMHeadModel", "T5": "ForConditionalGeneration"}.get(
        name, "ForCausalLM"
    )
    sizes = dict(
        vocab_size=3000,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=96,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_key_value_heads=1,
        head_dim=32,
    )
    if name in ("GPT2", "T5"):
        sizes = dict(
            vocab_size=3000,
            n_positions=32,
            n_embd=64,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            d_model=64,
            d_kv=32,
            num_layers=1,
            num_heads=2,
            d_ff=96,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    config = getattr(transformers, name + "Config")(
        **sizes, bos_token_id=0, eos_token_id=0, pad_token_id=0
    )
    return seeded(SEED, lambda: getattr(transformers, name + kind)(config))


@pytest.mark.parametrize("name", ["Llama", "Llama, recomputed", "GPT2", "Bert", "T5", "Cohere"])
def test_language_models(swap, counts, name):
    """HF models: 2 steps, num_items_in_batch and ignored labels, a loss outside, generation. Most
    heads are tied, BERT's has a bias, Cohere's logits are scaled, so whole; the others' are fused.
    Twin: logits that are asked for.
    """
    name, recomputed = name.split(",")[0], "," in name
    models, ids = [language_model(name) for _ in range(2)], labels((2, 12), 3000)
    [
        m.gradient_checkpointing_enable({"use_reentrant": "hostile" == "host"})
        for m in models
        if recomputed
    ]
    kept = wrap(models[0], swap, "hostile", device_memory=704 * 1024)[1]
    more = {"num_items_in_batch": torch.tensor(19)} if name in ("Llama", "GPT2") else {}
    for step in range(2):
        y = ids.index_fill(1, torch.tensor([step, 5]), -100)
        losses = [m.train()(input_ids=ids, labels=y, **more).loss for m in models]
        [loss.backward() for loss in losses]
        assert counts["fused"] == (step + 1) * (name != "Cohere") and (counts["whole"] > 0) == (
            name == "Cohere"
        )
        check_pair(models, losses)
        for each, m in zip((kept, sgd(models[1])), models):
            each.step()
            m.zero_grad()
    outs = [
        m(input_ids=ids, return_dict=False, **({"decoder_input_ids": ids} if name == "T5" else {}))[
            0
        ]
        for m in models
    ]
    outs = [(ce(z[:, :-1], ids[:, 1:], reduction="sum") / 3, z.logsumexp(-1)) for z in outs]
    [sum(t.mean() for t in out).backward() for out in outs]
    check_pair(models, outs)
    assert counts["whole"] > 0
    if name == "Llama":
        assert torch.equal(
            *[m.eval().generate(ids[:, :4], max_new_tokens=4, do_sample=False) for m in models]
        )


@pytest.mark.parametrize(
    "more",
    [{"activations": "host"}, {"activations": "nvme"}, {"micro_batch": 2}, {"params": "nvme"}],
    ids=str,
)
def test_other_features(swap, counts, more):
    """Activations at home, chunks of blocks that are heads (and of what follows on one), weights on
    disk: pairs."""
    layers = lambda: nn.Sequential(
        nn.Linear(WIDTH, VOCAB), nn.Linear(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
    )
    same(
        pair(layers if "micro_batch" in more else Model, swap, **more),
        lambda m, x: ce(m(x), labels((40, 20))),
        shape=(40, 20),
    )
    assert (counts["fused"], counts["whole"] > 0) == (
        (0, True) if "micro_batch" in more else (1, False)
    )


# --- precision and steps ---


@pytest.mark.parametrize("loss", ["inside", "outside", "whole, outside", "alone inside"])
def test_autocast(loss):
    """bf16 autocast of model and loss, of the model, of the loss: a pair within 2 %; 1e-5 where the
    model ran in fp32."""

    def use(m, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=loss != "alone inside"):
            z, found = m(x), ce(m(x).float(), labels()) if loss == "inside" else None
        with torch.autocast("cpu", torch.bfloat16, enabled=loss == "alone inside"):
            return (
                z.float().logsumexp(-1)
                if "whole" in loss
                else ce(z.float(), labels())
                if found is None
                else found
            )

    same(pair(), use, tolerance=1e-5 if loss == "alone inside" else 0.02)


def test_bf16_with_split_master(swap, counts):
    """3 steps against the same engine with room for the head: loss and weights within bf16's
    rounding. Twin: with room, none fused."""
    models = [seeded(SEED, Model).bfloat16() for _ in range(2)]
    wraps = [
        wrap(m, swap, "hostile", device_memory=size) for m, size in zip(models, (DEVICE, "64MiB"))
    ]
    losses = {}
    for model, optimizer in wraps[::-1]:
        assert counts["fused"] == 0
        for _ in range(3):
            losses[model] = ce(model(inputs().detach().bfloat16()).float(), labels())
            losses[model].backward()
            optimizer.step()
            optimizer.zero_grad()
    assert counts == {"fused": 3, "whole": 0}
    states = [m.state_dict() | {"loss": losses[m].detach()} for m in models]
    [check_close(states[0][key], states[1][key], key, tolerance=0.02) for key in states[0]]


def test_scaled_accumulated_and_clipped_steps():
    """GradScaler, 3 micro-batches, unscale, clip by norm, step; twice. Weights as the plain
    model's."""
    models = pair()
    for m, optimizer in zip(models, (models[0].kept[0], sgd(models[1]))):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(2):
            [
                scaler.scale(ce(m(inputs()[part]), labels()[part]) / 3).backward()
                for part in range(3)
            ]
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    states = [m.state_dict() for m in models]
    [check_close(states[0][key], states[1][key], key) for key in states[1]]
