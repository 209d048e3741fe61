"""Fine-tunes a language model on very long sequences: its activations are kept on a disk, its
attention may be a window, and under torchrun each rank has a part of every sequence.

python examples/long_context.py MODEL TEXT OUT [--length 65536] [--window 4096]
torchrun --nproc-per-node 2 examples/long_context.py MODEL TEXT OUT
"""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

import infinity


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("out")
    parser.add_argument("--length", type=int, default=65536)
    parser.add_argument("--window", type=int, help="tokens that a token attends to (default: all)")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()

    def windowed(module, query, key, value, attention_mask, **kwargs):
        """Attends to the last tokens. Queries may have more heads than keys."""
        out = infinity.neighborhood_attention(
            query, key, value, shape=query.shape[2], window=args.window, causal=True
        )
        return out.transpose(1, 2), None

    AttentionInterface.register("windowed", windowed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokens = tokenizer(open(args.text).read(), return_tensors="pt").input_ids[0]
    if len(tokens) <= args.length:
        parser.error(f"{args.text} has {len(tokens)} tokens: give less than --length {args.length}")
    attention = "windowed" if args.window else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(args.model, attn_implementation=attention)
    mesh, is_first = None, True
    if dist.is_torchelastic_launched():
        where = "cuda" if torch.cuda.is_available() else "cpu"
        dist.init_process_group("cpu:gloo,cuda:nccl" if where == "cuda" else "gloo")
        mesh = init_device_mesh(where, (dist.get_world_size(),), mesh_dim_names=("cp",))
        model, is_first = infinity.parallel.sequence_parallel(model, mesh), dist.get_rank() == 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    # Every block is computed again in the backward; its input waits on the disk
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    config = infinity.Config(activations="nvme", nvme_paths="auto")
    model, optimizer = infinity.wrap_model(model, optimizer, config, mesh=mesh)
    model.train()
    for step in range(args.steps):
        drawn = torch.Generator().manual_seed(step)
        start = int(torch.randint(0, len(tokens) - args.length, (), generator=drawn))
        batch = tokens[None, start : start + args.length]  # the same on all ranks
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if is_first:
            print(f"step {step + 1} loss {loss.item():.4f}", flush=True)

    infinity.save_pretrained(model, args.out)
    if is_first:
        tokenizer.save_pretrained(args.out)
    if mesh is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
