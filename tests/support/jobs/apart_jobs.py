"""Jobs of experts apart over the ranks of an ``ep`` axis, which every rank of a launch runs (see
`ranks`).

**apart, whole**: the same job twice, of which the second one moves all of this rank's experts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import models
import torch
import torch.distributed as dist
import transformers
from expert_jobs import mesh_of
from inside import parts_of
from parallel_jobs import plainly, values_of

import infinity
from infinity.core.grads.lander import Lander
from infinity.core.units.arrival import Arrival
from infinity.ext.rows.expert_rows import ExpertRows
from infinity.ext.rows.experts import has_experts

EXPERTS, STEPS = 12, 8
SIZES = {
    "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "num_experts_per_tok": 2,
}  # fmt: skip
FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, intermediate_size=64, moe_intermediate_size=128, num_experts=EXPERTS
    ),
    "large table": lambda: transformers.Qwen3MoeConfig(
        **SIZES | {"vocab_size": 4096},
        intermediate_size=64,
        moe_intermediate_size=128,
        num_experts=EXPERTS,
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, intermediate_size=128, num_local_experts=EXPERTS, head_dim=16
    ),
}


def made(family: str, implementation: str) -> torch.nn.Module:
    """A mixture with fresh weights, the same on every rank."""
    torch.manual_seed(0)
    described = FAMILIES[family]()
    described._experts_implementation = implementation
    return transformers.AutoModelForCausalLM.from_config(described).train()


class Loop:
    """A training loop of one rank. ``exchange`` "tokens": each rank has a batch of its own."""

    def __init__(
        self,
        config: dict,
        *,
        exchange: str = "tokens",
        family: str = "qwen3_moe",
        implementation: str = "eager",
        is_frozen: bool = False,
        axes: dict[str, int] | None = None,
    ):
        mesh = mesh_of(axes or {"dp": 1, "ep": dist.get_world_size()})
        model = made(family, implementation)
        model = infinity.parallel.expert_parallel(model, mesh["ep"], exchange=exchange, quiet=True)
        for layer in model.model.layers:
            layer.mlp.experts.requires_grad_(not is_frozen)
        model.get_input_embeddings().requires_grad_(not is_frozen)
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        self.model, self.optimizer = infinity.wrap_model(model, optimizer, config, mesh=mesh)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 1 / (1 + n))
        own = dist.get_rank() if exchange == "tokens" else 0
        self.generator = torch.Generator().manual_seed(3 + own)
        self.losses: list[float] = []

    @property
    def experts(self) -> list[torch.nn.Module]:
        return [layer.mlp.experts for layer in self.model.model.layers]

    def loss(self) -> torch.Tensor:
        tokens = torch.randint(0, 128, (1, 3), generator=self.generator)
        return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss

    def step(self) -> None:
        loss = self.loss()
        loss.backward()
        self.update(loss)

    def update(self, loss: torch.Tensor) -> None:
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def end(self) -> dict[str, torch.Tensor]:
        """Losses, weights and state; then the model is unwrapped, and its weights read again."""
        found = values_of(self.model, self.optimizer)
        infinity.unwrap_model(self.model, self.optimizer)
        found |= {f"unwrapped/{k}": plainly(v) for k, v in self.model.state_dict().items()}
        return found | {"losses": torch.tensor(self.losses, dtype=torch.float64)}


# --- what happens in every third step ---


def a_step(loop: Loop) -> None:
    loop.step()


def a_clipped_step(loop: Loop) -> None:
    loss = loop.loss()
    loss.backward()
    loop.losses.append(infinity.clip_grad_norm_(loop.optimizer, 0.1).item())
    loop.update(loss)


def several_backwards(loop: Loop) -> None:
    for _ in range(3):
        (loss := loop.loss()).backward()
    loop.update(loss)


def an_accumulation(loop: Loop) -> None:
    with infinity.accumulate(loop.model):
        for _ in range(3):
            (loss := loop.loss()).backward()
    loop.update(loss)


def two_forwards_then_a_backward(loop: Loop) -> None:
    loss = loop.loss() + loop.loss()
    loss.backward()
    loop.update(loss)


def a_second_backward(loop: Loop) -> None:
    loss = loop.loss()
    loss.backward(retain_graph=True)
    loss.backward()
    loop.update(loss)


def an_evaluation(loop: Loop) -> None:
    with torch.no_grad():
        loop.losses.append(loop.loss().item())
    loop.step()


def a_read(loop: Loop) -> None:
    loop.step()
    for name, value in values_of(loop.model, loop.optimizer).items():
        loop.losses.append(value.double().sum().item() if "experts" in name else 0.0)


def a_read_of_gradients(loop: Loop) -> None:
    loss = loop.loss()
    loss.backward()
    for param in loop.model.parameters():
        if param.grad is not None:
            loop.losses.append(plainly(param.grad).abs().sum().item())
            param.grad.mul_(0.5)
    loop.update(loss)


def gradients_that_stay(loop: Loop) -> None:
    loss = loop.loss()
    loss.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad(set_to_none=False)
    loop.losses.append(loss.item())


def recomputed_blocks(loop: Loop) -> None:
    loop.model.gradient_checkpointing_enable({"use_reentrant": False})
    loop.step()


def tokens_for_one_rank(loop: Loop) -> None:
    """The other rank's experts get none."""
    with routed(loop, lambda chosen: chosen % (EXPERTS // dist.get_world_size())):
        loop.step()


def a_hook_that_reads(loop: Loop) -> None:
    """On one rank, the weights of all of its experts, before their forward."""
    if dist.get_rank():
        return loop.step()

    def read(module: torch.nn.Module, *_: Any) -> None:
        loop.losses.append(module.down_proj.to_local().detach().double().sum().item())

    hooks = [experts.register_forward_pre_hook(read) for experts in loop.experts]
    loop.step()
    for hook in hooks:
        hook.remove()


def a_replaced_exchange(loop: Loop) -> None:
    """A method of the library, by one that reads the weights of the experts whose tokens come."""
    theirs = transformers.distributed.expert_parallel.AllToAllEP
    own = theirs.__call__

    def call(self: Any, *args: Any) -> torch.Tensor:
        (weight,) = [
            experts.down_proj
            for experts in loop.experts
            if type(experts.down_proj) is torch.Tensor  # the local part
        ]
        loop.losses.append(weight.detach().double().sum().item())
        return own(self, *args)

    with mock.patch.object(theirs, "__call__", call):
        loop.step()


@contextmanager
def routed(loop: Loop, choose: Callable[[torch.Tensor], torch.Tensor]):
    """A block in which the router's choice is changed."""

    def change(module: torch.nn.Module, args: tuple) -> tuple:
        return args[0], choose(args[1]), *args[2:]

    hooks = [experts.register_forward_pre_hook(change) for experts in loop.experts]
    yield
    for hook in hooks:
        hook.remove()


@contextmanager
def whole():
    """A block in which all experts move."""
    with mock.patch.object(Arrival, "bring_rows", lambda self, choose: None):
        yield


def apart(
    way: str, config: dict, *, steps: int = STEPS, fault: str | None = None, **more: Any
) -> dict[str, Any]:
    """What differs between the job with experts apart and the same with whole ones. ``fault``:
    "replay" leaves the steps out that experts have missed."""

    def run() -> tuple[dict[str, torch.Tensor], bool]:
        loop = Loop(config, **more)
        units = parts_of(loop.model).units
        is_apart = any(unit.arrival.rows is not None for unit in units)
        for number in range(steps):
            globals()[way](loop) if number % 3 == 2 else loop.step()
        found = loop.end()
        given_back.append(all(map(has_experts, loop.experts)))
        return found, is_apart

    given_back: list[bool] = []  # the forwards
    with ExitStack() as faults:
        if fault == "replay":
            forget = lambda self, rows: self.wait_running()
            faults.enter_context(mock.patch.object(ExpertRows, "catch_up", forget))
        one, is_apart = run()
    with whole():
        other, is_other_apart = run()
    return {
        "differing": models.differing(one, other),
        "finite": all(bool(value.isfinite().all()) for value in one.values()),
        "apart": is_apart and not is_other_apart,
        "read": len(one["losses"]) - steps,
        "given back": all(given_back),
    }


def resumed(config: dict, other: dict, folder: str) -> dict[str, Any]:
    """A checkpoint, from which a job with other homes goes on as the one that wrote it."""

    def run(saved: str) -> dict[str, torch.Tensor]:
        loop = Loop(config)
        for _ in range(5):
            loop.step()
        infinity.save_checkpoint(saved, loop.model, loop.optimizer)
        infinity.save_pretrained(loop.model, f"{saved}-weights")
        after = Loop(other)
        infinity.load_checkpoint(saved, after.model, after.optimizer)
        same.append(
            not models.differing(
                values_of(loop.model, loop.optimizer), values_of(after.model, after.optimizer)
            )
        )
        ends = []
        for each in (loop, after):
            each.generator = torch.Generator().manual_seed(9 + dist.get_rank())
            each.losses = []
            for _ in range(4):
                each.loss().backward()
                each.optimizer.step()
                each.optimizer.zero_grad()
            ends.append(each.end())
        same.append(not models.differing(*ends))
        return ends[0]

    same: list[bool] = []
    one = run(f"{folder}/apart")
    with whole():
        return {"differing": models.differing(one, run(f"{folder}/whole")), "same": same}


def counted(config: dict, **more: Any) -> dict[str, int]:
    """Bytes of experts that came to the device, and of their gradients that went home, and those
    of the experts that were hit."""
    found = {"came": 0, "went": 0}
    loop, seen, send = Loop(config, **more), Arrival._nbytes, Lander._send_row
    chosen: list[list] = []
    for experts in loop.experts:
        experts.register_forward_pre_hook(lambda _, args: chosen.append(args[1].unique().tolist()))

    def come(self: Arrival, spans: Any) -> int:
        nbytes = seen(self, spans)
        found["came"] += nbytes if self._name.endswith("experts") else 0
        return nbytes

    def go(self: Lander, home: torch.Tensor, *args: Any, **options: Any) -> None:
        found["went"] += home.nbytes
        send(self, home, *args, **options)

    with mock.patch.object(Arrival, "_nbytes", come), mock.patch.object(Lander, "_send_row", go):
        for _ in range(STEPS):
            loop.step()
    of_ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, chosen)
    each = EXPERTS // len(of_ranks)
    first = each * dist.get_rank()
    hits = sum(
        len({one for of_rank in forward for one in of_rank if first <= one < first + each})
        for forward in zip(*of_ranks)
    )
    each_nbytes = sum(param.nbytes // EXPERTS for param in loop.experts[0].parameters())
    infinity.unwrap_model(loop.model, loop.optimizer)
    return found | {"bound": hits * each_nbytes, "each": each_nbytes}
