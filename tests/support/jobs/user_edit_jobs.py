"""Jobs in which users of several ranks change gradients, state or what a forward goes by: all of
them, or the second one alone (see `ranks`).

**apart**: only rank 1 makes the change, or it makes another one.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

if __name__ == "__main__":
    sys.path[:0] = map(str, Path(__file__).parents[1].glob("*/"))

from ranks import serve, told

import infinity
from infinity.ranks.attempt import Attempt

HOST = {"params": "host", "optimizer": "host", "share_homes": False}
WIDTH = 128  # so that both data ranks have rows of a weight


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def stack(width: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4)))


def inputs(seed: int, width: int = 16) -> torch.Tensor:
    return torch.randn(8, width, generator=torch.Generator().manual_seed(seed))


# --- a wrap ---


def wraps(barrier: str, apart: bool) -> dict[str, Any]:
    """A wrap in which an exception strikes rank 1 before it comes to ``barrier``, and the next
    one."""
    own = Attempt.barrier

    def struck(self: Attempt, at: str) -> None:
        if at == barrier and dist.get_rank() == 1:
            # A rank that comes after this attempt's end makes the next one, alone.
            self._store.wait([self._key("came/0")])
            raise ValueError("struck")
        own(self, at)

    if apart:
        Attempt.barrier = struck
    model = stack()
    try:
        said = told(lambda: infinity.unwrap_model(*infinity.wrap_model(model, sgd(model), HOST)))
    except ValueError as error:
        said = str(error)
    finally:
        Attempt.barrier = own
    goes_on = told(lambda: infinity.unwrap_model(*infinity.wrap_model(model, sgd(model), HOST)))
    return {"said": said, "goes on": goes_on}


# --- gradients of data ranks ---

GRADIENTS: dict[str, Callable[[torch.Tensor, float], Any]] = {
    "add_": lambda grad, by: grad.add_(torch.full(grad.shape, by)),
    "div_": lambda grad, by: grad.div_(by),
    "mul_": lambda grad, by: grad.mul_(by),
    "clamp_": lambda grad, by: grad.clamp_(-1e-3 * by, 1e-3 * by),
    "zero_": lambda grad, by: grad.zero_() if by != 1 else None,
    "copy_": lambda grad, by: grad.copy_(torch.full(grad.shape, by)),
}


def gradients(how: str, apart: bool) -> dict[str, Any]:
    """A step whose gradients were changed; what it says, and whether another one follows."""
    model = stack(WIDTH)
    model, optimizer = infinity.wrap_model(model, sgd(model), HOST)
    by = 1.0 + (dist.get_rank() if apart else 2)

    def step(*, changed: bool) -> None:
        model(inputs(dist.get_rank(), WIDTH)).square().mean().backward()
        for param in model.parameters() if changed else ():
            GRADIENTS[how](param.grad, by)
        optimizer.step()

    said = told(lambda: step(changed=True))
    optimizer.zero_grad()
    goes_on = told(lambda: step(changed=False))
    infinity.unwrap_model(model, optimizer)
    return {"said": said, "goes on": goes_on}


def summed(how: str) -> bool:
    """Whether collectives of the user's own on gradients do what they do on torch's: the gradients
    are averages already."""
    model, one = stack(WIDTH), stack(WIDTH)
    model, optimizer = infinity.wrap_model(model, sgd(model), HOST)
    model(inputs(dist.get_rank(), WIDTH)).square().mean().backward()
    for rank in range(2):
        (one(inputs(rank, WIDTH)).square().mean() / 2).backward()
    pairs = list(zip(model.parameters(), one.parameters()))
    for param, plain in pairs:
        if how == "asynchronous":
            dist.all_reduce(param.grad, async_op=True).wait()
        else:
            dist.all_reduce(param.grad)
        if how == "averaged":
            param.grad /= 2
        else:
            plain.grad.mul_(2)
    found = all(torch.allclose(param.grad.clone(), plain.grad) for param, plain in pairs)
    optimizer.step()
    infinity.unwrap_model(model, optimizer)
    return found


def scaler(apart: bool) -> str:
    """A step of GradScalers that have other scales on each rank."""
    model = stack()
    model, optimizer = infinity.wrap_model(model, sgd(model), HOST)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0 * (1 + apart * dist.get_rank()))
    scaler.scale(model(inputs(0)).square().mean()).backward()
    said = told(lambda: scaler.step(optimizer))
    infinity.unwrap_model(model, optimizer)
    return said


# --- ranks with parts of the same tensors ---


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64, bias=False), nn.Linear(64, 16, bias=False)
        self.noise: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        x = x if self.noise is None else x + self.noise(x)
        return scale * self.down(nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    """Of which no rank has a parameter whole."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.register_buffer("gain", torch.ones(16))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        x = x * self.gain
        for block in self.blocks:
            x = x + block(x, scale)
        return x


def cut() -> tuple[nn.Module, Any]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    model = infinity.parallel.tensor_parallel(Net(), mesh["tp"], plan, quiet=True)
    return infinity.wrap_model(model, sgd(model), HOST, mesh=mesh)


def train(model: nn.Module, optimizer: Any, **more: Any) -> None:
    model(inputs(0), **more).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def state(how: str, apart: bool) -> dict[str, Any]:
    """Edits of the state of distributed parameters between two steps, beside one process."""

    def run(model: nn.Module, optimizer: Any, *, edits: bool) -> None:
        train(model, optimizer)
        for param in model.parameters() if edits and how != "clear" else ():
            optimizer.state[param]["momentum_buffer"].mul_(0.5)
        if edits and how == "clear":
            optimizer.state.clear()
        train(model, optimizer)

    one = Net()
    run(one, sgd(one), edits=True)
    model, optimizer = cut()
    said = told(lambda: run(model, optimizer, edits=not apart or dist.get_rank() == 1))
    whole = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in model.state_dict().items()
    }
    off = max(float((value - whole[name]).abs().max()) for name, value in one.state_dict().items())
    infinity.unwrap_model(model, optimizer)
    return {"said": said, "off": off}


def forwards(what: str, apart: bool) -> dict[str, Any]:
    """A step whose forward goes by something beside tensors that it is given."""
    mine = dist.get_rank() if apart else 0
    model, optimizer = cut()
    numpy.random.seed(mine)
    random.seed(mine)
    noises = {
        "NumPy": lambda x: torch.from_numpy(numpy.random.randn(*x.shape)).float(),
        "Python": lambda x: torch.full(x.shape, random.random()),
    }
    for block in model.blocks:
        block.noise = noises.get(what)
    if what == "buffer":
        model.gain.mul_(2 + mine)
    more = {"scale": 1.0 + mine} if what == "argument" else {}
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=what == "autocast" and mine == 1):
        said = told(lambda: train(model, optimizer, **more))
    optimizer.zero_grad()
    infinity.unwrap_model(model, optimizer)
    return {"said": said}


def sequences(what: str, apart: bool) -> dict[str, Any]:
    """A step of ranks with parts of the same sequences, which are of other lengths or in other
    modes."""
    model = stack()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    model, optimizer = infinity.wrap_model(model, sgd(model), HOST, mesh=mesh)
    mine = dist.get_rank() if apart else 1

    def step(*, changed: bool) -> None:
        optimizer.zero_grad()
        model.train(not (changed and what == "mode" and mine))
        given = inputs(dist.get_rank()).view(2, 4, 16)
        model(
            given[:, : 3 if changed and what == "length" and mine else 4]
        ).square().mean().backward()
        optimizer.step()

    said = told(lambda: step(changed=True))
    goes_on = told(lambda: step(changed=False))
    infinity.unwrap_model(model, optimizer)
    return {"said": said, "goes on": goes_on}


# --- stages ---


def pipe_of(model: nn.Module, **options: Any) -> tuple[Any, Any]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    return infinity.parallel.pipeline(
        model, mesh, sgd(model), HOST, micro_batches=2, quiet=True, **options
    )


def stages(what: str, apart: bool) -> dict[str, Any]:
    """A step that one stage comes to another way; and one that follows."""
    pipe, optimizer = pipe_of(stack(), loss_fn=nn.functional.mse_loss)
    acts = not apart or dist.get_rank() == 1

    def step() -> None:
        pipe.step(inputs(0), inputs(1))
        if what == "clipping":
            infinity.clip_grad_norm_(optimizer, 0.02 if acts else 0.01)
        if what == "zero_grad" and acts:
            optimizer.zero_grad()
        if what == "zeros" and acts:
            optimizer.zero_grad(set_to_none=False)
        optimizer.step()

    if what == "mode" and acts:
        for chunk in pipe.chunks:
            chunk.eval()
    said = told(step)
    optimizer.zero_grad()
    what = "nothing"
    for chunk in pipe.chunks:
        chunk.train()
    goes_on = told(step)
    infinity.unwrap_model(pipe.chunks, optimizer)
    return {"said": said, "goes on": goes_on}


def table(what: str, apart: bool) -> dict[str, Any]:
    """A table that both stages have, changed between two steps."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
    }
    config = LlamaConfig(
        **sizes,
        num_key_value_heads=2,
        vocab_size=37,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    if what == "buffers":
        model.model.rotary_emb.inv_freq.mul_(1 + apart * dist.get_rank())
        return {"said": told(lambda: infinity.unwrap_model(*_of(pipe_of(model)))), "equal": True}
    pipe, optimizer = pipe_of(model)
    ids = torch.arange(32).view(4, 8)
    name, param = next(
        (n, p)
        for c in pipe.chunks
        for n, p in c.named_parameters()
        if "embed" in n or "lm_head" in n
    )
    acts = not apart or dist.get_rank() == 1

    def step(*, changes: bool) -> None:
        pipe.step(input_ids=ids, labels=ids)
        if changes and what == "gradient":
            param.grad.mul_(0.5)
        if changes and what == "frozen":
            param.requires_grad_(False)
        optimizer.step()
        optimizer.zero_grad()

    step(changes=False)
    if acts and what == "momentum":
        optimizer.state[param]["momentum_buffer"].zero_()
    if acts and what == "state":
        optimizer.state.clear()
    if what == "value":
        with infinity.full_params(pipe.chunks, writeback=True) as values:
            if acts:
                values[name].mul_(2)
    said = told(lambda: step(changes=acts))
    with infinity.full_params(pipe.chunks, [name]) as values:
        mine = values[name].detach().clone()
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine)
    optimizer.zero_grad()
    infinity.unwrap_model(pipe.chunks, optimizer)
    return {"said": said, "equal": torch.equal(*both)}


def _of(made: tuple[Any, Any]) -> tuple[Any, Any]:
    return made[0].chunks, made[1]


def unfreezing(schedule: str) -> dict[str, Any]:
    """Stages that are trained from the second step on, and the last of which alone is from the
    third; beside one process."""

    def run(step: Callable[[], Any], parts: list[nn.Module], *, is_first: bool) -> None:
        step()
        for part in parts:
            part.requires_grad_(True)
        step()
        if is_first:
            parts[0].requires_grad_(False)
        step()

    one = stack()
    for number in range(3):
        one[number].requires_grad_(False)
    optimizer = sgd(one)

    def plainly() -> None:
        nn.functional.mse_loss(one(inputs(0)), inputs(1)).backward()
        optimizer.step()
        optimizer.zero_grad()

    model = stack()
    for number in range(3):
        model[number].requires_grad_(False)
    pipe, ours = pipe_of(model, loss_fn=nn.functional.mse_loss, schedule=schedule)

    def piped() -> None:
        pipe.step(inputs(0), inputs(1))
        ours.step()
        ours.zero_grad()

    said = told(lambda: run(piped, list(pipe.chunks), is_first=dist.get_rank() == 0))
    run(plainly, [one[:2] if schedule == "1F1B" else one[:1], one], is_first=True)
    values = {name: value for chunk in pipe.chunks for name, value in chunk.state_dict().items()}
    off = max(
        float((value - values[name]).abs().max())
        for name, value in one.state_dict().items()
        if name in values
    )
    infinity.unwrap_model(pipe.chunks, ours)
    return {"said": said, "off": off}


if __name__ == "__main__":
    serve(globals())
