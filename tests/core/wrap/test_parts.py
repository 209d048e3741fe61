"""Parts: several modules as one, whose names, tensors and calls are those of its parts."""

from __future__ import annotations

import torch
from torch import nn

from infinity.core.wrap.described_model import read_model
from infinity.core.wrap.parts import Parts, merged_in, parts_of


class Stage(nn.Module):
    """A part that has some layers of a model under their own numbers, and a buffer."""

    def __init__(self, *numbers: int, mask: torch.Tensor | None = None):
        super().__init__()
        self.layers = nn.ModuleDict({str(n): nn.Linear(n + 1, 1, bias=False) for n in numbers})
        if mask is not None:
            self.register_buffer("mask", mask, persistent=False)


class Drawing(Stage):
    def _init_weights(self, module: nn.Module) -> None:
        """Draws nothing."""


def test_parts_with_different_names_keep_them_and_their_tensors():
    first, second = Stage(0, 1), Stage(4, 5)
    merged = Parts([first, second])
    named = dict(merged.named_parameters())
    assert list(named) == [f"layers.{number}.weight" for number in (0, 1, 4, 5)]
    assert named["layers.1.weight"] is first.layers["1"].weight
    assert named["layers.4.weight"] is second.layers["4"].weight


def test_parts_with_one_name_for_two_tensors_are_numbered():
    """Twin: parts that share the tensor of that name are not."""
    first, second = Stage(0), Stage(0)
    named = dict(Parts([first, second]).named_parameters())
    assert list(named) == ["0.layers.0.weight", "1.layers.0.weight"]
    assert named["1.layers.0.weight"] is second.layers["0"].weight
    second.layers["0"] = first.layers["0"]
    assert list(dict(Parts([first, second]).named_parameters())) == ["layers.0.weight"]


def test_a_tensor_that_is_replaced_in_the_whole_is_replaced_in_its_parts():
    class Own(nn.Module):
        def __init__(self, **params: torch.Tensor):
            super().__init__()
            for name, value in params.items():
                self.register_parameter(name, nn.Parameter(value))

    first, second = Own(a=torch.ones(1)), Own(b=torch.ones(2))
    merged = Parts([first, second])
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(2))
    merged.a, merged.b = a, b
    assert first.a is a and second.b is b


def test_a_module_that_only_one_part_holds_tensors_of_is_that_parts_own():
    """Twin: one that both hold tensors of is new, and of their common container's kind."""
    first, second = nn.Module(), nn.Module()
    first.head, second.head = nn.Identity(), nn.Linear(1, 1)
    first.layers, second.layers = Stage(0).layers, Stage(1).layers
    first.body, second.body = Stage(2), Drawing(3)
    merged = Parts([first, second])
    assert merged.head is second.head
    assert merged.layers not in (first.layers, second.layers)
    assert type(merged.layers) is nn.ModuleDict and type(merged.body) is nn.Module
    assert merged.layers["0"] is first.layers["0"] and merged.layers["1"] is second.layers["1"]


def test_a_module_without_tensors_in_any_part_is_the_first_parts():
    first, second = nn.Module(), nn.Module()
    first.act, second.act = nn.ReLU(), nn.ReLU()
    assert Parts([first, second]).act is first.act


def test_buffers_of_one_name_are_both_kept_and_the_first_keeps_the_name():
    """Twin: a buffer that the parts share is there once, and is replaced in all of them."""
    masks = [torch.zeros(1), torch.ones(1), torch.ones(2)]
    stages = [Stage(number, mask=mask) for number, mask in enumerate(masks)]
    merged = Parts(stages)
    buffers = dict(merged.named_buffers())
    assert list(buffers) == ["mask", "mask~1", "mask~2"]
    assert all(kept is mask for kept, mask in zip(buffers.values(), masks))
    assert all(stage.mask is mask for stage, mask in zip(stages, masks))
    assert "mask" not in merged.state_dict()
    sharing = [Stage(number, mask=masks[0]) for number in range(2)]
    common = Parts(sharing)
    assert list(dict(common.named_buffers())) == ["mask"]
    common.mask = masks[1]
    assert all(stage.mask is masks[1] for stage in sharing)


def test_a_model_of_parts_is_called_by_its_parts_and_another_by_itself():
    first, second = Stage(0), Stage(1)
    assert parts_of(Parts([first, second])) == [first, second]
    assert parts_of(first) == [first]


def test_a_call_of_a_merged_module_means_those_of_the_parts():
    first, second = Stage(0), Stage(1)
    merged = Parts([first, second])
    model = read_model(merged)
    assert model.meant(merged) == [first, second]
    assert model.meant(merged.layers) == [first.layers, second.layers]
    leaf = first.layers["0"]
    assert model.meant(leaf) == [leaf]
    assert merged_in(first) == {} and read_model(first).meant(first) == [first]


def test_values_are_drawn_as_the_first_part_that_can_draws_them():
    """Twin: without such a part the whole cannot draw."""
    drawing = Drawing(1)
    assert Parts([Stage(0), drawing, Drawing(2)])._init_weights == drawing._init_weights
    assert not hasattr(Parts([Stage(0), Stage(1)]), "_init_weights")
