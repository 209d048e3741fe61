"""Chosen forward: rows are read by the code of the module's class alone; all others find all rows.

Method: two runs, compared byte for byte, with experts (or an embedding) apart and whole. Twin:
parameters that are ordinary ones while their unit is held show in the bits.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch
from lazily import Lazily
from test_experts_apart import Loop, adamw, make
from test_experts_apart_uses import (
    both,
    mixture,
    read_by_a_hook_before_them,
    routed_by_a_hook,
    running,
    with_hook,
)
from torch.overrides import TorchFunctionMode, resolve_name

import infinity
from infinity.core.units.exposure import Exposure

transformers = pytest.importorskip("transformers")
moe = Lazily("transformers.integrations.moe")


def of_all(loop: Loop, param: torch.Tensor) -> None:
    loop.losses.append(param.detach().abs().sum().item())


# --- code of users inside the forward of the class ---


def a_hook_of_the_activation(loop: Loop) -> None:
    experts = mixture(loop).experts
    with_hook(
        loop,
        experts.act_fn.register_forward_hook(lambda *_: of_all(loop, experts.down_proj)),
    )


def a_hook_of_every_module(loop: Loop) -> None:
    experts = mixture(loop).experts

    def read(module, args):
        if module is experts.act_fn:
            of_all(loop, experts.down_proj)

    with_hook(loop, torch.nn.modules.module.register_module_forward_pre_hook(read))


def an_activation_of_its_own(loop: Loop) -> None:
    experts = mixture(loop).experts

    class Reading(torch.nn.SiLU):
        def forward(self, states):
            of_all(loop, experts.down_proj)
            return super().forward(states)

    experts.act_fn, before = Reading(), experts.act_fn
    loop.step()
    experts.act_fn = before


def a_mode_that_sees_every_function(loop: Loop) -> None:
    found: list[float] = []

    class Seeing(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            for each in args:
                if isinstance(each, torch.nn.Parameter) and "linear" in str(resolve_name(func)):
                    found.append(each.detach().double().sum().item())
            return func(*args, **(kwargs or {}))

    with Seeing():
        loop.step()
    loop.losses.append(sum(found))


def a_view_that_is_kept_for_the_backward(loop: Loop) -> None:
    kept: list[torch.Tensor] = []

    def keep(module, args):
        kept[:] = [module.down_proj[row] for row in range(12)]

    def use(grad):
        loop.losses.append(sum(row.detach().abs().sum().item() for row in kept))

    experts = mixture(loop).experts
    after = experts.down_proj.register_hook(use)
    with_hook(loop, experts.register_forward_pre_hook(keep))
    after.remove()


def the_function_of_the_class(loop: Loop) -> None:
    def again(module, args, output):
        experts, index = module.experts, torch.tensor([[7, 9]] * 3)
        more = type(experts).forward(experts, output.view(-1, 64), index, torch.full((3, 2), 0.5))
        return output + more.view(output.shape)

    with_hook(loop, mixture(loop).register_forward_hook(again))


def experts_alone(loop: Loop) -> None:
    experts = mixture(loop).experts
    read = experts.register_forward_pre_hook(lambda module, _: of_all(loop, module.down_proj))
    states, index = torch.ones(3, 64), torch.tensor([[7, 9]] * 3)
    out = experts(states, index, torch.full((3, 2), 0.5))
    out.sum().backward()
    loop.update(out.sum())
    read.remove()
    loop.step()


def another_class(loop: Loop) -> None:
    class Decayed(type(mixture(loop).experts)):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs) + 1e-3 * self.down_proj.square().mean()

    experts = mixture(loop).experts
    before, experts.__class__ = type(experts), Decayed
    loop.step()
    experts.__class__ = before


def weights_are_clamped_in_a_forward(loop: Loop) -> None:
    def clamp(module, args):
        with torch.no_grad():
            module.down_proj[5].mul_(0.5)

    with_hook(loop, mixture(loop).experts.register_forward_pre_hook(clamp))


# --- code of the library that users replace ---


def decayed(forward: Callable) -> Callable:
    def more(self, *args, **kwargs):
        return forward(self, *args, **kwargs) + 1e-3 * self.down_proj.square().mean()

    return more


def with_attribute(loop: Loop, owner, name: str, value) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, name, value)
        loop.step()


def the_forward_of_the_class_is_replaced(loop: Loop) -> None:
    kind = type(mixture(loop).experts)
    with_attribute(loop, kind, "forward", decayed(kind.forward))


def a_method_of_the_class_is_replaced(loop: Loop) -> None:
    kind = type(mixture(loop).experts)
    with use_of(loop, "batched_mm"):
        with_attribute(loop, kind, "_apply_gate", decayed(kind._apply_gate))


def a_method_is_replaced_on_the_object(loop: Loop) -> None:
    experts = mixture(loop).experts
    gate = types.MethodType(decayed(type(experts)._apply_gate), experts)
    with use_of(loop, "batched_mm"):
        with_attribute(loop, experts, "_apply_gate", gate)


def a_kernel_is_registered(loop: Loop) -> None:
    kernels = moe.ALL_EXPERTS_FUNCTIONS
    kernels["grouped_mm"] = decayed(kernels["grouped_mm"])
    try:
        with use_of(loop, "grouped_mm"):
            loop.step()
    finally:
        kernels._local_mapping.pop("grouped_mm")


@contextmanager
def use_of(loop: Loop, implementation: str):
    config = mixture(loop).experts.config
    before, config._experts_implementation = config._experts_implementation, implementation
    yield
    config._experts_implementation = before


# --- memory that somebody holds over passes ---


def keep(loop: Loop, take: Callable) -> bool:
    """Keeps what ``take`` makes of the weights in a forward. Whether it was kept before."""
    if hasattr(loop, "kept"):
        return True
    with_hook(
        loop,
        mixture(loop).experts.register_forward_pre_hook(
            lambda module, args: setattr(loop, "kept", take(module.down_proj.detach()))
        ),
    )
    return False


def a_view_is_read_in_a_later_pass(loop: Loop) -> None:
    if keep(loop, lambda weight: weight[:]):
        with_hook(
            loop,
            mixture(loop).experts.register_forward_hook(lambda *_: of_all(loop, loop.kept)),
        )


def a_view_is_kept_as_others_are_chosen(loop: Loop) -> None:
    if keep(loop, lambda weight: weight[3]):
        routed_by_a_hook(loop)


def an_array_is_kept_as_others_are_chosen(loop: Loop) -> None:
    if keep(loop, lambda weight: weight.numpy()):
        routed_by_a_hook(loop)


def an_exception_is_kept(loop: Loop) -> None:
    """Whose frames hold the weights that the class computed with."""
    if hasattr(loop, "kept"):
        routed_by_a_hook(loop)
        return
    linear, calls = torch.nn.functional.linear, []

    def fail(*args):
        calls.append(args[0])
        if len(calls) == 7:
            raise ValueError("stop")
        return linear(*args)

    with pytest.raises(ValueError, match="stop") as caught:
        with_attribute(loop, torch.nn.functional, "linear", fail)
    loop.kept = caught
    loop.optimizer.zero_grad()
    loop.step()


def a_gradient_is_a_part_of_another(loop: Loop) -> None:
    """Which does not begin at a whole word."""
    loss, bias = loop.loss(), torch.zeros(1, requires_grad=True)
    loss.backward()
    weights = [param.flatten() for param in mixture(loop).experts.parameters()]
    (1e-3 * torch.cat([bias, *weights]).norm()).backward()
    loop.update(loss)


WAYS = [
    the_forward_of_the_class_is_replaced,
    a_method_of_the_class_is_replaced,
    a_method_is_replaced_on_the_object,
    a_kernel_is_registered,
    a_view_is_read_in_a_later_pass,
    a_view_is_kept_as_others_are_chosen,
    an_array_is_kept_as_others_are_chosen,
    an_exception_is_kept,
    a_gradient_is_a_part_of_another,
    a_hook_of_the_activation,
    a_hook_of_every_module,
    an_activation_of_its_own,
    a_mode_that_sees_every_function,
    a_view_that_is_kept_for_the_backward,
    the_function_of_the_class,
    experts_alone,
    another_class,
    weights_are_clamped_in_a_forward,
]


@pytest.mark.parametrize("way", WAYS)
def test_others_find_all_rows(way, tmp_path, monkeypatch):
    assert both(running(way, tmp_path, "hostile"), monkeypatch) == []


# --- a frozen embedding ---


def with_table(way: Callable[[Loop, torch.nn.Embedding], None], folder, home) -> Callable:
    def run() -> tuple:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=4096, hidden_size=128, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).train()
        table = model.get_input_embeddings().requires_grad_(requires_grad=False)
        trained = [param for param in model.parameters() if param.requires_grad]
        loop = Loop(model, adamw(trained), folder, home)
        for number in range(4):
            way(loop, table) if number % 2 else loop.step()
        return loop.found()

    return run


def tokens_are_changed(loop: Loop, table) -> None:
    with_hook(
        loop, table.register_forward_pre_hook(lambda module, args: ((args[0] + 1000) % 4096,))
    )


def all_tokens_are_read(loop: Loop, table) -> None:
    with_hook(
        loop,
        table.register_forward_hook(
            lambda module, args, output: output + 1e-3 * module.weight.square().mean()
        ),
    )


def a_row_is_read(loop: Loop, table) -> None:
    with_hook(
        loop,
        loop.model.model.norm.register_forward_hook(
            lambda module, args, output: output + 1e-3 * table.weight[4095]
        ),
    )


def the_function_is_called(loop: Loop, table) -> None:
    def add(module, args, output):
        return output + 1e-3 * torch.nn.functional.embedding(args[0] * 0 + 77, module.weight)

    with_hook(loop, table.register_forward_hook(add))


def the_forward_of_every_table_is_replaced(loop: Loop, table) -> None:
    forward = torch.nn.Embedding.forward

    def more(self, tokens):
        return forward(self, tokens) + 1e-3 * self.weight.square().mean()

    with_attribute(loop, torch.nn.Embedding, "forward", more)


def a_norm_is_limited(loop: Loop, table) -> None:
    """Which changes the rows that are looked up, at home, too."""
    table.max_norm = 0.5
    loop.step()
    table.max_norm = None


def tokens_are_mapped_over(loop: Loop, table) -> None:
    tokens = torch.randint(0, 4096, (2, 5), generator=loop.generator)
    with torch.no_grad():
        loop.losses.append(torch.vmap(table)(tokens).sum().item())
    loop.step()


TABLE_WAYS = [
    tokens_are_changed,
    all_tokens_are_read,
    a_row_is_read,
    the_function_is_called,
    the_forward_of_every_table_is_replaced,
    a_norm_is_limited,
    tokens_are_mapped_over,
]


@pytest.mark.parametrize("way", TABLE_WAYS)
def test_others_find_the_whole_table(way, tmp_path, monkeypatch):
    assert both(with_table(way, tmp_path, "hostile"), monkeypatch) == []


# --- installing ---


def test_the_forward_is_the_classes_own_after_unwrapping(tmp_path):
    loop = Loop(model := make(), adamw(model.parameters()), tmp_path)
    assert "forward" in mixture(loop).experts.__dict__
    infinity.unwrap_model(loop.model, loop.optimizer)
    assert "forward" not in mixture(loop).experts.__dict__


def test_parameters_that_are_ordinary_ones_meanwhile_show(tmp_path, monkeypatch):
    """The twin of all of them."""
    real = Exposure.begin
    monkeypatch.setattr(Exposure, "begin", lambda self, *, shows=True: real(self))
    assert both(running(read_by_a_hook_before_them, tmp_path, "host"), monkeypatch)
