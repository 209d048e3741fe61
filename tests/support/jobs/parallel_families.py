"""Jobs that train models of other libraries, cut over ranks (see `ranks`): of transformers, with
peft's adapters, of torchtitan."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

if __name__ == "__main__":
    sys.path[:0] = map(str, Path(__file__).parents[1].glob("*/"))

import models
from parallel_jobs import adamw, loss_of, mesh_of, off, plainly, tokens, train, whole
from ranks import serve, told

import infinity
from infinity.ext.dtensor import tensors


def family(name: str, dropout: float = 0.0, layers: int = 2) -> nn.Module:
    """A small model of transformers with fresh weights, the same on every rank."""
    import transformers as hf

    torch.manual_seed(11)
    small = {
        "vocab_size": 98,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "hidden_size": 64,
        "intermediate_size": 128,
    }
    if name == "llama":
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**small, num_key_value_heads=2))
    elif name == "mistral":
        model = hf.MistralForCausalLM(hf.MistralConfig(**small, num_key_value_heads=2))
    elif name == "gemma3":
        model = hf.Gemma3ForCausalLM(
            hf.Gemma3TextConfig(**small, num_key_value_heads=2, head_dim=16)
        )
    elif name == "opt":
        small["ffn_dim"] = small.pop("intermediate_size")
        model = hf.OPTForCausalLM(hf.OPTConfig(**small, word_embed_proj_dim=64, dropout=dropout))
    elif name == "qwen3":
        model = hf.Qwen3ForCausalLM(
            hf.Qwen3Config(**small, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True)
        )
    elif name == "t5":
        rest = {
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 128,
            "num_layers": layers,
            "num_heads": 4,
            "vocab_size": 98,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
        }
        model = hf.T5ForConditionalGeneration(hf.T5Config(**rest, dropout_rate=dropout))
    elif name == "bert":
        rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        model = hf.BertForMaskedLM(hf.BertConfig(**small, **rates))
    else:
        rates = {"attn_pdrop": dropout, "embd_pdrop": dropout, "resid_pdrop": dropout}
        rest = {"n_embd": 64, "n_layer": layers, "n_head": 4, "vocab_size": 98, "n_positions": 32}
        model = hf.GPT2LMHeadModel(hf.GPT2Config(**rest, **rates))
    return model.train()


def family_losses(
    model: nn.Module, optimizer, steps: int = 3
) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses, grads = [], {}
    for step in range(steps):
        batch = torch.randint(0, 98, (2, 12), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        if step == 0:
            grads = {
                name: plainly(p.grad).clone()
                for name, p in model.named_parameters()
                if p.grad is not None
            }
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, grads


def families(name: str, configs: list[dict], recomputes: bool = False) -> dict[str, Any]:
    """One process, then tensor_parallel with the engine at every home: the model's own plan, or one
    that was found. ``recomputes``: the backward runs each layer again."""
    model = family(name)
    losses, grads = family_losses(model, adamw(model))
    mesh = mesh_of()["tp"]
    found: dict[str, Any] = {"one process": losses, "homes": []}
    for config in configs:
        model = infinity.parallel.tensor_parallel(family(name), mesh, quiet=True)
        names = len(model.state_dict())
        if recomputes:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model, optimizer = infinity.wrap_model(model, adamw(model), config, mesh=mesh)
        mine, theirs = family_losses(model, optimizer)
        found["homes"].append(
            {
                "losses": mine,
                "grads off": off(grads, theirs),
                "q_norm off": off_of(grads, theirs, "q_norm"),
                "weights": whole(model.state_dict()),
            }
        )
        found["names"] = names == len(family(name).state_dict())
        found["cut"] = sum(
            p._local_tensor.numel() if isinstance(p, DTensor) else p.numel()
            for p in model.parameters()
        )
        found["whole"] = sum(p.numel() for p in model.parameters())
        infinity.unwrap_model(model, optimizer)
    return found


def mixture(name: str, layers: int = 2) -> nn.Module:
    """A small mixture of four experts with fresh weights, the same on every rank."""
    import transformers as hf

    torch.manual_seed(3)
    small = {
        "vocab_size": 98,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_experts_per_tok": 2,
    }
    if name == "mixtral":
        return hf.MixtralForCausalLM(hf.MixtralConfig(**small, num_local_experts=4))
    if name == "qwen3_moe":
        return hf.Qwen3MoeForCausalLM(
            hf.Qwen3MoeConfig(**small, num_experts=4, moe_intermediate_size=48, head_dim=16)
        )
    if name == "gpt_oss":
        return hf.GptOssForCausalLM(hf.GptOssConfig(**small, num_local_experts=4, head_dim=16))
    latent = {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
    }
    routed = {
        "n_routed_experts": 4,
        "moe_intermediate_size": 48,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }
    return hf.DeepseekV3ForCausalLM(
        hf.DeepseekV3Config(**small, **latent, **routed, n_shared_experts=1)
    )


def experts(name: str, configs: list[dict]) -> dict[str, Any]:
    """One process, then whole experts on each rank, with the rest whole or cut, at every home."""
    model = mixture(name)
    losses, grads = family_losses(model, adamw(model))
    found: dict[str, Any] = {"one process": losses, "whole": {}, "cut": {}}
    for rest in ("whole", "cut"):
        mesh = init_device_mesh(
            "cpu",
            (1, dist.get_world_size()),
            mesh_dim_names=("dp", "ep" if rest == "whole" else "tp"),
        )
        for config in configs:
            model = mixture(name)
            everything = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
            model = infinity.parallel.expert_parallel(
                model, mesh[mesh.mesh_dim_names[1]], cut_rest=rest == "cut", quiet=True
            )
            here = sum(
                p._local_tensor.numel() for n, p in model.named_parameters() if ".experts." in n
            )
            model, optimizer = infinity.wrap_model(model, adamw(model), config, mesh=mesh)
            mine, theirs = family_losses(model, optimizer)
            found[rest].setdefault("homes", []).append(
                {"losses": mine, "weights": whole(model.state_dict())}
            )
            found[rest] |= {"grads off": off(grads, theirs), "share": here / everything}
            infinity.unwrap_model(model, optimizer)
    return found


MIXED = ("mixtral", "qwen3_moe")


def sharded(name: str, mesh: Any, layers: int = 2) -> nn.Module:
    """A small model, sharded over ``mesh`` by its own plan, or one that was found."""
    if name in MIXED:
        model = mixture(name, layers)
        return infinity.parallel.expert_parallel(model, mesh, cut_rest=True, quiet=True)
    return infinity.parallel.tensor_parallel(family(name, layers=layers), mesh, quiet=True)


def all_reduces(name: str, engine: bool, apart: bool = False) -> dict[str, list[int]]:
    """All-reduces of a layer in a forward and in a backward, by torch's count: what three layers
    have more than two, and all other collectives. ``apart``: without the sharing of inputs."""
    from torch.distributed.tensor.debug import CommDebugMode

    mesh, found = mesh_of(), {"forward": [], "backward": []}
    with pytest.MonkeyPatch.context() as patch:
        if apart:
            patch.setattr(tensors, "share_inputs", lambda *_: None)
        for layers in (2, 3):
            model = sharded(name, mesh["tp"], layers)
            optimizer = adamw(model)
            if engine:
                config = {"params": "host", "optimizer": "host"}
                model, optimizer = infinity.wrap_model(model, optimizer, config, mesh=mesh)
            batch = torch.randint(0, 98, (2, 12), generator=torch.Generator().manual_seed(0))
            with CommDebugMode() as forward:
                loss = model(input_ids=batch, labels=batch).loss
            with CommDebugMode() as backward:
                loss.backward()
            for which, counted in (("forward", forward), ("backward", backward)):
                found[which].append(sum(all_reduces_in(counted.get_comm_counts())))
            if engine:
                infinity.unwrap_model(model, optimizer)
    return {which: few[1] - few[0] for which, few in found.items()}


def all_reduces_in(counts: dict) -> list[int]:
    """How often each kind of all-reduce is among what CommDebugMode has counted."""
    return [count for kind, count in counts.items() if "reduce" in str(kind)]


def two_batches(name: str, how: str) -> dict[str, Any]:
    """Gradients of two batches, added up, of one process and of two ranks from their homes."""
    mesh, batches = mesh_of(), [tokens(step) % 98 for step in range(2)]
    alone = mixture(name) if name in MIXED else family(name)
    for batch in batches:
        alone(input_ids=batch, labels=batch).loss.backward()
    expected = {key: p.grad.clone() for key, p in alone.named_parameters()}
    model = sharded(name, mesh["tp"])
    config = {"params": "host", "optimizer": "host"}
    if how == "small units":
        config["units"] = ["Linear"]
    elif how != "plain":
        model.gradient_checkpointing_enable({"use_reentrant": how == "reentrant"})
    model, optimizer = infinity.wrap_model(model, adamw(model), config, mesh=mesh)
    for batch in batches:
        model(input_ids=batch, labels=batch).loss.backward()
    found = {key: plainly(p.grad).clone() for key, p in model.named_parameters()}
    infinity.unwrap_model(model, optimizer)
    return {"off": off(expected, found), "norms off": off_of(expected, found, "_norm.weight")}


class Heads(nn.Module):
    """Three layers with one input, and a norm of what the first one puts out."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 32, bias=False) for _ in range(3))
        self.norm = nn.LayerNorm(8, bias=False)

    def forward(self, x: torch.Tensor, count: int = 1) -> torch.Tensor:
        heads = [layer(x).unflatten(-1, (-1, 8)) for layer in (self.q, self.k, self.v)]
        return sum(self.norm(heads[0]).square().sum() for _ in range(count)) + sum(
            head.square().sum() for head in heads[1:]
        )


def input_sum_bits() -> dict[str, torch.Tensor]:
    """The gradients of an input and of a norm: ours, those that each rank has by itself, added up,
    and the sum of what each layer has over all ranks, as it was made before."""
    mesh = mesh_of()["tp"]
    torch.manual_seed(5)
    model, x = Heads(), torch.randn(3, 5, 16, requires_grad=True)
    rank, size = mesh.get_rank(), mesh.size()
    by_hand = Heads()
    by_hand.norm.load_state_dict(model.norm.state_dict())
    for name in "qkv":
        part = model.get_submodule(name).weight.chunk(size)[rank].detach().clone()
        by_hand.get_submodule(name).weight = nn.Parameter(part)
    own = x.detach().clone().requires_grad_()
    by_hand(own, 2).backward()
    layers = []
    for name in "qkv":  # the gradient by one layer alone
        alone = x.detach().clone().requires_grad_()
        heads = by_hand.get_submodule(name)(alone).unflatten(-1, (-1, 8))
        loss = 2 * by_hand.norm(heads).square().sum() if name == "q" else heads.square().sum()
        layers.append(torch.autograd.grad(loss, alone)[0])
    sums = [own.grad, by_hand.norm.weight.grad, *layers]
    for each in sums:
        dist.all_reduce(each)
    plan = dict.fromkeys("qkv", "colwise") | {"norm": "replicated_with_grad_allreduce"}
    infinity.parallel.tensor_parallel(model, mesh, plan, quiet=True)
    model(x, 2).backward()
    ours = x.grad, model.norm.weight.grad.clone()
    model.norm.weight.grad = None
    # Outside of the layers' module
    model.norm(torch.arange(24.0).view(3, 8)).square().sum().backward()
    outside = model.norm.weight.grad
    return {
        "ours": ours,
        "added up": sums[:2],
        "apart": sums[2] + sums[3] + sums[4],
        "outside": outside,
        "hides": "weight" not in model.norm.__dict__,
    }


def experts_refused() -> dict[str, str]:
    """What expert_parallel and meshes with ep do not take."""
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "ep"))
    import transformers as hf

    small = {
        "vocab_size": 98,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "hidden_size": 64,
        "intermediate_size": 96,
    }
    odd = hf.MixtralForCausalLM(
        hf.MixtralConfig(**small, num_local_experts=3, num_key_value_heads=2)
    )
    both = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("tp", "ep"))
    cut = infinity.parallel.expert_parallel(mixture("mixtral"), mesh["ep"], quiet=True)
    found = {
        "no mixture": told(lambda: infinity.parallel.expert_parallel(family("llama"), mesh["ep"])),
        "experts": told(lambda: infinity.parallel.expert_parallel(odd, mesh["ep"])),
        "mesh": told(lambda: infinity.parallel.expert_parallel(mixture("mixtral"), mesh)),
        "cut": told(lambda: infinity.parallel.expert_parallel(cut, mesh["ep"])),
        "one axis of size 1": told(
            lambda: infinity.unwrap_model(
                *infinity.wrap_model(cut, None, {"params": "host"}, mesh=both)
            )
        ),
    }
    return found | {"untouched": str(all(type(p) is nn.Parameter for p in odd.parameters()))}


def generates(name: str, config: dict, folder: str) -> dict[str, Any]:
    """Greedy tokens of one process and of the wrapped model; and its folders as each
    save_pretrained writes them."""
    model, prompt = family(name).eval(), torch.arange(8)[None]
    alone = model.generate(prompt, max_new_tokens=6, do_sample=False).tolist()
    mesh = mesh_of()["tp"]
    model = infinity.parallel.tensor_parallel(family(name), mesh, quiet=True)
    model, optimizer = infinity.wrap_model(model, adamw(model), config, mesh=mesh)
    model.eval()
    ours = model.generate(prompt, max_new_tokens=6, do_sample=False).tolist()
    expected, saved = family(name).state_dict(), {}
    ways = {"ours": lambda path: infinity.save_pretrained(model, path)}
    if name == "llama":  # cut by its own plan: transformers puts the parts together, too
        ways["theirs"] = lambda path: model.save_pretrained(path)
    for way, save in ways.items():
        path = Path(folder) / f"{name}-{way}"
        save(path)
        dist.barrier()
        saved[way] = not models.differing(type(model).from_pretrained(path).state_dict(), expected)
    infinity.unwrap_model(model, optimizer)
    return {"same": alone == ours, "saved": all(saved.values())}


def off_of(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], part: str) -> float:
    return off({n: v for n, v in a.items() if part in n}, b) if any(part in n for n in a) else 0.0


ADAPTED = ["q_proj", "v_proj", "o_proj", "down_proj"]  # layers cut by columns, and by rows


def adapted(rank: int = 4, dropout: float = 0.0) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=rank, lora_alpha=8, lora_dropout=dropout, target_modules=ADAPTED, init_lora_weights=False
    )


def adapters(config: dict, folder: str) -> dict[str, Any]:
    """LoRA around layers that are cut, beside one process: losses, adapters, what peft saves; and
    what is refused."""
    from peft import (
        LoraConfig,
        PeftModel,
        get_peft_model,
        get_peft_model_state_dict,
        set_peft_model_state_dict,
    )

    mesh, found = mesh_of()["tp"], {}

    def trainable(model: nn.Module) -> Any:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    drawn: dict[str, torch.Tensor] = {}  # peft draws the cut ones anew on every rank
    for where in ("ours", "one process"):
        base = family("llama")
        if where == "ours":
            base = infinity.parallel.tensor_parallel(base, mesh, quiet=True)
        torch.manual_seed(1)
        model = get_peft_model(base, adapted())
        if where == "ours":
            drawn = whole(get_peft_model_state_dict(model))
        else:
            set_peft_model_state_dict(model, drawn)
        optimizer = trainable(model)
        if where == "ours":
            model, optimizer = infinity.wrap_model(model, optimizer, config, mesh=mesh)
        losses, grads = family_losses(model, optimizer)
        weights = whole(get_peft_model_state_dict(model, model.state_dict()))
        found[where] = {"losses": losses, "grads": grads, "weights": weights}
        if where == "ours":
            infinity.save_pretrained(model, Path(folder) / "adapters")
            dist.barrier()
            again = PeftModel.from_pretrained(family("llama"), Path(folder) / "adapters")
            found["saved"] = not models.differing(whole(get_peft_model_state_dict(again)), weights)
            infinity.unwrap_model(model, optimizer)
    ours, alone = found["ours"], found["one process"]
    found["grads off"], found["weights off"] = (
        off(ours["grads"], alone["grads"]),
        off(ours["weights"], alone["weights"]),
    )

    found["adapted before"] = told(
        lambda: infinity.parallel.tensor_parallel(
            get_peft_model(family("llama"), adapted()), mesh, quiet=True
        )
    )
    plan = {
        "transformer.h.*.mlp.c_fc": "colwise",
        "transformer.h.*.mlp.c_proj": "rowwise",
    }  # not linear layers of torch
    cut = infinity.parallel.tensor_parallel(family("gpt2"), mesh, plan, quiet=True)
    whole_adapters = get_peft_model(
        cut, LoraConfig(r=4, target_modules=["c_fc"], fan_in_fan_out=True)
    )
    found["whole adapters"] = told(
        lambda: infinity.wrap_model(whole_adapters, trainable(whole_adapters), config, mesh=mesh)
    )
    return found


def axes(names: list[str]) -> dict[str, list[str]]:
    """Losses and weights of a job whose mesh calls its data axis by each of ``names``."""
    from decoder import decoder

    found = {}
    for name in names:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(name,))
        model = decoder()
        model, optimizer = infinity.wrap_model(
            model, adamw(model), {"params": "host", "optimizer": "host"}, mesh=mesh
        )
        losses = train(model, optimizer, "plain", data_rank=mesh.get_local_rank(name))["losses"]
        found[name] = {"losses": losses, "weights": whole(model.state_dict())}
        infinity.unwrap_model(model, optimizer)
    return found


def titan(config: dict, loss_parallel: bool) -> dict[str, Any]:
    """torchtitan's Llama, cut by torchtitan: its own training, and ours."""
    from torch.distributed.tensor.parallel import loss_parallel as in_parts
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs
    from torchtitan.models.llama3.infra.parallelize import apply_tp

    mesh, found = mesh_of()["tp"], {}
    for where in ("torchtitan", "ours"):
        arguments = TransformerModelArgs(
            dim=64,
            n_layers=2,
            n_heads=4,
            n_kv_heads=2,
            vocab_size=98,
            max_seq_len=32,
            multiple_of=16,
        )
        torch.manual_seed(3)
        model = Transformer(arguments)
        model.init_weights()
        apply_tp(model, mesh, loss_parallel, False)
        optimizer = adamw(model)
        if where == "ours":
            model, optimizer = infinity.wrap_model(model, optimizer, config, mesh=mesh)
        losses, norms = [], []
        for step in range(3):
            with in_parts() if loss_parallel else torch.enable_grad():
                loss = loss_of(model, tokens(step) % 98, "sequences")
                loss.backward()
            norms.append(
                plainly(infinity.clip_grad_norm_(optimizer, 1.0)).item()
                if where == "ours"
                else clipped(model)
            )
            optimizer.step()
            optimizer.zero_grad()
            losses.append(plainly(loss).item())
        found[where] = {"losses": losses, "norms": norms, "weights": whole(model.state_dict())}
        if where == "ours":
            infinity.unwrap_model(model, optimizer)
    found["off"] = off(found["torchtitan"]["weights"], found["ours"]["weights"])
    return found


def clipped(model: nn.Module) -> float:
    return plainly(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)).item()


if __name__ == "__main__":
    serve(globals())
