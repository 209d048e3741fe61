"""Jobs of ranks that have parts of the same sequences, beside one process (see `ranks`)."""

from __future__ import annotations

import contextlib
import math
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

if __name__ == "__main__":
    sys.path[:0] = map(str, Path(__file__).parents[1].glob("*/"))

import models
from live import Live
from parallel_families import adapted, family, mixture
from parallel_jobs import adamw, off, whole
from ranks import serve, told

import infinity
from infinity.ext.sequence import sequence_parts

TOKENS = 24


def language_model(name: str) -> nn.Module:
    """A small causal model with fresh weights, the same on every rank."""
    if name == "mixtral":
        return mixture(name).train()
    if name != "windows":
        return family(name)
    import transformers as hf

    torch.manual_seed(12)
    return hf.Qwen3ForCausalLM(
        hf.Qwen3Config(
            vocab_size=98,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            use_sliding_window=True,
            sliding_window=7,
            layer_types=["sliding_attention", "full_attention"],
        )
    ).train()


# Frequencies that follow the length, and such that do not
ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"max_position_embeddings": 4},
    "longrope": {
        "max_position_embeddings": 48,
        "original_max_position_embeddings": 14,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0 + each for each in range(8)],
    },
    "yarn": {"max_position_embeddings": 48, "original_max_position_embeddings": 14},
}


def rotary(name: str) -> nn.Module:
    """A Llama with frequencies of the type ``name``, or with what stands for a user's own."""
    import transformers as hf

    options = dict(ROPES.get(name, {}))
    rope = {"rope_type": name, "factor": 4.0, "rope_theta": 1e4} if options else None
    if rope is not None:
        rope |= {key: options.pop(key) for key in [*options] if key != "max_position_embeddings"}
    torch.manual_seed(12)
    config = hf.LlamaConfig(
        vocab_size=98,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters=rope,
        **options,
    )
    model = hf.LlamaForCausalLM(config).train()
    OWN.get(name, lambda model: None)(model)
    return model


def scaled_by_length(model: nn.Module) -> None:
    """Attention that is scaled by the logarithm of the length, beyond twelve tokens (log-n)."""
    kind = type(model.model.layers[0].self_attn)

    class Scaled(kind):
        def forward(self, hidden_states, *given, **more):
            count = max(12, hidden_states.shape[1])
            self.scaling = self.head_dim**-0.5 * math.log(count) / math.log(12)
            return super().forward(hidden_states, *given, **more)

    for layer in model.model.layers:
        layer.self_attn.__class__ = Scaled


class Places(nn.Module):
    """Adds learned places, counted in what it is given."""

    def __init__(self, words: nn.Module):
        super().__init__()
        self.words, self.places = words, nn.Embedding(TOKENS, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.words(ids) + self.places(torch.arange(ids.shape[1]))


class Frequencies(nn.Module):
    """Frequencies that follow the largest position; ``learns``: with a parameter."""

    def __init__(self, inner: nn.Module, *, learns: bool):
        super().__init__()
        self.inner = inner
        self.gain = nn.Parameter(torch.ones(())) if learns else 1.0

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple:
        scale = self.gain * (1 + position_ids.max() / 100)
        return tuple(each * scale for each in self.inner(x, position_ids))


def with_frequencies(model: nn.Module, *, learns: bool = False) -> None:
    model.model.rotary_emb = Frequencies(model.model.rotary_emb, learns=learns)


OWN: dict[str, Any] = {
    "scaled": scaled_by_length,
    "places": lambda model: setattr(model.model, "embed_tokens", Places(model.model.embed_tokens)),
    "frequencies": with_frequencies,
    "learned frequencies": lambda model: with_frequencies(model, learns=True),
}


def rotated(name: str, *, fault: bool = False) -> tuple[str, float]:
    """Two steps of one process, then of parts, which are shorter than the first length that counts.
    How far the weights are apart. ``fault``: all modules get the part's positions."""
    model, mesh = rotary(name), axis()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def train(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
        for step in range(2):
            model(**batch_of(step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return whole(model.state_dict())

    right, found = train(model, optimizer), {}
    with contextlib.ExitStack() as blind:
        if fault:
            for checked in ("computes_positions", "depends_on_others"):
                blind.enter_context(mock.patch.object(sequence_parts, checked, lambda *_: False))
        model = infinity.parallel.sequence_parallel(rotary(name), mesh["cp"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        config = {"params": "host", "optimizer": "host"}
        model, optimizer = infinity.wrap_model(model, optimizer, config, mesh=mesh)
        said = told(lambda: found.update(train(model, optimizer)))
    infinity.unwrap_model(model, optimizer)
    off = [(right[key] - value).abs().max().item() for key, value in found.items()]
    return said, max(off, default=-1.0)


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """A batch with prompts that have no loss, more of them in the first half."""
    tokens = torch.randint(0, 98, (2, TOKENS), generator=torch.Generator().manual_seed(step))
    labels = tokens.clone()
    labels[:, : 5 + step] = -100
    return {"input_ids": tokens, "labels": labels}


def trained(model: nn.Module, optimizer: Any, of_rank: int = 0) -> tuple[list, dict]:
    losses, grads = [], {}
    for step in range(3):
        loss = model(**batch_of(step + 10 * of_rank)).loss
        loss.backward()
        if step == 0:
            grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, grads


def axis(dp: int = 1) -> Any:
    return init_device_mesh("cpu", (dp, dist.get_world_size() // dp), mesh_dim_names=("dp", "cp"))


def divided(model: nn.Module, config: dict, mesh: Any, *, recomputes: bool = False) -> Any:
    model = infinity.parallel.sequence_parallel(model, mesh["cp"])
    if recomputes:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return infinity.wrap_model(model, adamw(model), config, mesh=mesh)


def parts(name: str, configs: list[dict], folder: str) -> dict[str, Any]:
    """One process, then parts of its sequences at every home, computed again in the backward on the
    last; and without an exchange."""
    model, mesh = language_model(name), axis()
    losses, grads = trained(model, adamw(model))
    found: dict[str, Any] = {"one process": losses, "homes": []}
    for number, config in enumerate(configs):
        recomputes = number == len(configs) - 1
        model, optimizer = divided(language_model(name), config, mesh, recomputes=recomputes)
        mine, theirs = trained(model, optimizer)
        with torch.no_grad():
            logits = model.eval()(input_ids=batch_of(0)["input_ids"]).logits
        infinity.save_pretrained(model, folder)
        dist.barrier()
        weights = whole(model.state_dict())
        saved = type(model).from_pretrained(folder)
        found["homes"].append(
            {"losses": mine, "grads off": off(grads, theirs), "weights": weights}
            | {
                "tokens": logits.shape[1],
                "saved": not models.differing(saved.state_dict(), weights),
            }
        )
        with torch.no_grad():
            right = saved(input_ids=batch_of(0)["input_ids"]).logits
        right = right.chunk(mesh["cp"].size(), 1)[mesh["cp"].get_local_rank()]
        found["logits off"] = (logits - right).abs().max().item()
        infinity.unwrap_model(model, optimizer)
    with mock.patch.object(sequence_parts, "_exchange", lambda tensor, *_: tensor):
        model, optimizer = divided(language_model(name), configs[0], mesh)
        found["apart"] = trained(model, optimizer)[0]
        infinity.unwrap_model(model, optimizer)
    return found


def memory() -> dict[str, int]:
    """The most bytes of one process, and of this rank's part, at one time."""
    found = {}
    for name in ("one process", "part"):
        model = language_model("llama")
        if name == "part":
            model = infinity.parallel.sequence_parallel(model, axis()["cp"])
        tokens = torch.zeros(1, 2048, dtype=torch.long)
        with Live() as live:
            model(input_ids=tokens, labels=tokens).loss.backward()
        found[name] = live.peak_nbytes
    return found


def adapters(config: dict) -> dict[str, Any]:
    """LoRA around a model whose sequences are divided, beside one process."""
    import peft

    def made(model: nn.Module) -> nn.Module:
        torch.manual_seed(13)
        return peft.get_peft_model(model, adapted())

    model, mesh = made(language_model("llama")), axis()
    losses, grads = trained(model, adamw(model))
    model = infinity.parallel.sequence_parallel(language_model("llama"), mesh["cp"])
    model = made(model)
    model, optimizer = infinity.wrap_model(model, adamw(model), config, mesh=mesh)
    mine, theirs = trained(model, optimizer)
    infinity.unwrap_model(model, optimizer)
    return {"one process": losses, "losses": mine, "grads off": off(grads, theirs)}


def data_and_parts(config: dict) -> dict[str, Any]:
    """Two data ranks of two parts each, beside one process with both batches."""
    model, mesh = language_model("llama"), axis(2)
    loss = sum(model(**batch_of(10 * rank)).loss for rank in range(2)) / 2
    loss.backward()
    grads = {name: param.grad for name, param in model.named_parameters()}
    model, optimizer = divided(language_model("llama"), config, mesh)
    losses, theirs = trained(model, optimizer, mesh["dp"].get_local_rank())
    infinity.unwrap_model(model, optimizer)
    return {"loss": losses[0], "grads off": off(grads, theirs)}


def positionless() -> nn.Module:
    """A model that counts its positions itself."""
    model = language_model("llama")

    class Counts(type(model)):
        def forward(self, input_ids=None, labels=None, **more):
            return super().forward(input_ids=input_ids, labels=labels, **more)

    model.__class__ = Counts
    return model


def refused() -> dict[str, str]:
    """What sequence_parallel and its forwards do not take."""
    import transformers as hf

    mesh, rank = axis()["cp"], dist.get_rank()
    divide = infinity.parallel.sequence_parallel
    small = {"hidden_size": 48, "num_hidden_layers": 1, "vocab_size": 98, "intermediate_size": 48}
    odd = hf.LlamaForCausalLM(hf.LlamaConfig(**small, num_attention_heads=3))
    whole_mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    mamba = hf.Mamba2ForCausalLM(
        hf.Mamba2Config(
            hidden_size=32, num_heads=4, head_dim=16, num_hidden_layers=1, vocab_size=98, n_groups=1
        )
    )
    balanced = language_model("mixtral")
    balanced.config.output_router_logits = True
    flex = language_model("llama")
    flex.config._attn_implementation = "flex_attention"
    found = {
        "no language model": told(lambda: divide(family("bert"), mesh)),
        "no model of transformers": told(lambda: divide(nn.Linear(2, 2), mesh)),
        "state space": told(lambda: divide(mamba, mesh)),
        "heads": told(lambda: divide(odd, mesh)),
        "mesh": told(lambda: divide(language_model("llama"), whole_mesh)),
        "models differ": told(lambda: divide(language_model(("llama", "gpt2")[rank]), mesh)),
        "balanced experts": told(lambda: divide(balanced, mesh)),
        "flex": told(lambda: divide(flex, mesh)),
        "no positions": told(lambda: divide(positionless(), mesh)),
        "unchanged": odd.config._attn_implementation,
    }
    model = divide(language_model("llama"), mesh)
    tokens, padded = batch_of(0)["input_ids"], torch.ones(2, TOKENS)
    padded[0, 0] = 0
    forwards = {
        "length": {"input_ids": tokens[:, 1:]},
        "padding": {"input_ids": tokens, "attention_mask": padded},
        "packed": {"input_ids": tokens, "position_ids": torch.arange(TOKENS)[None] % 12},
        "unknown": {"input_ids": tokens, "token_type_ids": tokens},
        "no tokens": {"labels": tokens},
        "last logits": {"input_ids": tokens, "logits_to_keep": 1},
        "other batches": {"input_ids": tokens + rank},
        "on one rank": {"input_ids": tokens[:, rank:]},
        "goes on": {"input_ids": tokens, "attention_mask": torch.ones(2, TOKENS)},
    }
    found |= {name: told(lambda: model(**given)) for name, given in forwards.items()}
    wrong = {"params": "host", "recompute": True}
    found["recompute"] = told(lambda: divided(language_model("llama"), wrong, axis()))
    found["generation"] = told(lambda: model.generate(tokens, max_new_tokens=2))
    return found


if __name__ == "__main__":
    serve(globals())
