"""Partition: which parameters form a unit, who owns it, and what a forward holds at once."""

from __future__ import annotations

import pytest
import torch
from deleted import needs
from torch import nn

from infinity.core.units.handle import COUNTS
from infinity.core.wrap import partition as room
from infinity.core.wrap.described_model import is_managed, read_model
from infinity.core.wrap.partition import SMALL_NBYTES, Group, RowsAtOnce
from infinity.errors import ConfigError


class Called(nn.Module):
    """A module that is no container."""

    def forward(self) -> None: ...


class Block(Called):
    def __init__(self, width: int = 4):
        super().__init__()
        self.linear = nn.Linear(width, width)


def weights(elements: int) -> nn.Module:
    module = Called()
    module.weight = nn.Parameter(torch.empty(elements))
    return module


def model(**children: nn.Module) -> nn.Module:
    made = nn.Module()
    for name, child in children.items():
        made.add_module(name, child)
    return made


def partition(whole: nn.Module, *given) -> list[Group]:
    return room.partition(read_model(whole), *given)


def names(groups) -> list[str]:
    return [group.name for group in groups]


def test_children_of_a_container_with_a_sibling_of_their_class_are_blocks():
    """Twin: a child without one is not, nor are siblings outside a container."""
    layers = nn.Sequential(Block(), nn.Linear(4, 4), Block())
    groups = partition(model(layers=layers, a=nn.LayerNorm(4), b=nn.LayerNorm(4)), "auto")
    assert names(groups) == ["layers.0", "layers.2", "rest:layers.1"]
    assert [group.block for group in groups] == [layers[0], layers[2], None]
    assert groups[0].params == list(layers[0].parameters())
    assert groups[0].owners == [layers[0]]


def test_blocks_inside_a_block_are_not_units_of_their_own():
    outer = nn.ModuleList([nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block())])
    assert names(partition(model(outer=outer), "auto")) == ["outer.0", "outer.1"]
    alone = nn.ModuleList([nn.Sequential(Block(), Block())])
    assert names(partition(model(outer=alone), "auto")) == ["outer.0.0", "outer.0.1"]


def layer() -> list[nn.Module]:
    return [nn.LayerNorm(4), Block(), nn.GELU(), nn.Sequential(nn.Linear(4, 4))]


def space() -> nn.Module:
    """A module that only gives names, one of them to a parameter."""
    made = model(norm=nn.LayerNorm(4), inner=nn.ModuleDict({"block": Block()}))
    made.scale = nn.Parameter(torch.ones(4))
    return made


CONTAINERS = {
    "lists": (lambda: nn.ModuleList(layer()), ["0", "1", "3"]),
    "dicts": (lambda: nn.ModuleDict(dict(zip("abcd", layer()))), ["a", "b", "d"]),
    "names": (space, ["norm", "inner.block"]),
    "parameters": (lambda: nn.ParameterList([torch.ones(4)]), []),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_block_that_is_a_container_is_owned_by_what_is_called_inside(kind):
    """Twin: a subclass with a forward of its own is called, and owns itself."""
    make, called = CONTAINERS[kind]
    layers = nn.ModuleList([make(), make()])
    groups = partition(model(layers=layers), "auto")
    assert names(groups) == ["layers.0", "layers.1"]
    for block, group in zip(layers, groups):
        assert group.block is block and group.params == list(block.parameters())
        assert group.owners == group.called == [block.get_submodule(name) for name in called]
        assert not group.has_distant_users

    class Runs(type(layers[0])):
        def forward(self) -> None: ...

    layers[0].__class__ = layers[1].__class__ = Runs
    groups = partition(model(layers=layers), "auto")
    assert [group.owners for group in groups] == [[block] for block in layers]


def test_lists_of_layers_beside_each_other_are_no_blocks():
    """Method: two lists that are longer than the list they are in, at any depth. Twins: lists that
    are not, and modules of one class that are no list."""
    long = nn.ModuleList([nn.ModuleList([Block() for _ in range(3)]) for _ in range(2)])
    assert names(partition(model(a=long), "auto")) == [
        f"a.{i}.{j}" for i in range(2) for j in range(3)
    ]
    deep = model(
        x=nn.ModuleList([nn.ModuleList([Block()]) for _ in range(3)]),
        y=nn.ModuleList([nn.ModuleList([Block()]) for _ in range(3)]),
    )
    found = names(partition(model(a=model(x=deep.x, y=deep.y)), "auto"))
    assert found == [f"a.{name}.{i}" for name in "xy" for i in range(3)]
    short = nn.ModuleList([nn.ModuleList([Block(), Block()]) for _ in range(2)])
    assert names(partition(model(a=short), "auto")) == ["a.0", "a.1"]
    parts = nn.ModuleList([model(q=Block(), k=Block(), v=Block()) for _ in range(2)])
    assert names(partition(model(a=parts), "auto")) == ["a.0", "a.1"]


def test_parameters_of_a_container_outside_of_blocks_have_no_owner():
    """Twin: those of a called module beside it."""
    whole = model(a=nn.ParameterList([torch.ones(4)]), b=nn.Linear(4, 4), c=space())
    (group,) = partition(whole, "auto")
    assert group.params == list(whole.parameters())
    assert group.owners == [whole.b, whole.c.norm, whole.c.inner.block.linear]
    assert group.called == [] and group.has_distant_users
    (alone,) = partition(model(a=nn.ParameterList([torch.ones(4)])), "auto")
    assert alone.owners == [] and alone.has_distant_users  # it may be used anywhere


def test_a_tied_weight_of_a_container_is_owned_by_the_called_modules_that_hold_it():
    """Twin: a container that holds it is no owner."""
    layers = nn.ModuleList([nn.ModuleList(layer()) for _ in range(2)])
    whole = model(layers=layers, head=nn.Linear(4, 4, bias=False), names=nn.Module())
    whole.head.weight = whole.names.weight = layers[0][1].linear.weight
    first, second = partition(whole, "auto")
    assert first.owners == [layers[0][0], layers[0][1], layers[0][3], whole.head]
    assert first.has_distant_users and first.called == first.owners[:3]
    assert not second.has_distant_users


def test_named_classes_are_units_and_a_name_without_a_module_is_refused():
    whole = model(a=Block(), b=nn.Sequential(Block(), nn.Linear(4, 4)))
    assert names(partition(whole, ("Block",))) == ["a", "b.0", "rest:b.1"]
    assert names(partition(whole, ("Sequential", "Block"))) == ["a", "b"]
    assert names(partition(Block(), ("Block",))) == ["model"]
    with pytest.raises(ConfigError, match="no module of class Blok; the model has Block, Linear"):
        partition(whole, ("Block", "Blok"))


@pytest.mark.parametrize("extra", [0, 1])
def test_a_module_with_more_than_small_weights_is_a_unit_and_others_share_one(extra):
    small = SMALL_NBYTES // 4
    whole = model(a=weights(small + extra), b=weights(8), c=weights(8))
    groups = partition(whole, "auto")
    assert names(groups) == (["a", "rest:b"] if extra else ["rest:a"])
    assert groups[-1].owners == list(whole.children())[extra:]


@pytest.mark.parametrize("extra", [0, 1])
def test_small_modules_share_a_unit_of_up_to_four_times_the_small_size(extra):
    small = SMALL_NBYTES // 4
    parts = {f"m{number}": weights(small) for number in range(3)}
    whole = model(**parts, m3=weights(small - 1), m4=weights(1 + extra))
    assert names(partition(whole, "auto")) == ["rest:m0", "rest:m4"][: 1 + extra]


def test_modules_are_small_up_to_a_quarter_of_the_largest_block():
    blocks = nn.ModuleList([weights(2 * SMALL_NBYTES), weights(8)])  # 8 times as many bytes
    quarter = SMALL_NBYTES // 2
    small = model(blocks=blocks, a=weights(quarter), b=weights(quarter))
    assert names(partition(small, "auto"))[2:] == ["rest:a"]
    large = model(blocks=blocks, a=weights(quarter + 1), b=weights(quarter + 1))
    assert names(partition(large, "auto"))[2:] == ["a", "b"]


def test_a_tied_weight_is_in_one_unit_that_every_holder_owns():
    """Twin: an untied weight has one owner; a holder inside the owner is not named again."""
    whole = model(embed=nn.Linear(4, 4, bias=False), layers=nn.Sequential(Block(), Block()))
    whole.head = nn.Linear(4, 4, bias=False)
    whole.head.weight = whole.layers[1].linear.weight
    groups = {group.name: group for group in partition(whole, "auto")}
    assert list(groups) == ["layers.0", "layers.1", "rest:embed"]
    assert groups["layers.1"].owners == [whole.layers[1], whole.head]
    assert groups["layers.0"].owners == [whole.layers[0]]
    assert groups["rest:embed"].owners == [whole.embed]


@needs("ext/tiles")
def test_tiled_and_shared_weights_are_units_of_their_own():
    """Only the shared one is owned: tiles are brought by themselves."""
    whole = model(tiled=weights(4), shared=weights(4), plain=weights(4))
    setattr(whole.shared.weight, COUNTS, True)
    tiled, shared, plain = partition(whole, "auto", {whole.tiled.weight: RowsAtOnce(8)})
    assert (tiled.name, tiled.at_once.numel, tiled.owners) == ("tiled.weight", 8, [])
    assert (shared.name, shared.at_once, shared.owners) == ("shared.weight", None, [whole.shared])
    assert plain.params == [whole.plain.weight]


def test_parameters_of_other_classes_are_in_no_unit():
    class Quantised(nn.Parameter):
        pass

    whole = model(a=weights(4))
    whole.odd = Quantised(torch.empty(4))
    assert not is_managed(whole.odd) and is_managed(whole.a.weight)
    assert [group.params for group in partition(whole, "auto")] == [[whole.a.weight]]


def test_nested_forwards_hold_all_their_units_and_siblings_do_not():
    whole = model(a=weights(1), b=weights(1), c=weights(1))
    whole.weight = nn.Parameter(torch.empty(1))
    groups = [Group(str(n), [], [owner]) for n, owner in enumerate((whole, whole.a, whole.b))]
    nbytes = dict(zip(map(id, groups), (1, 10, 100)))
    assert room.held_nbytes(read_model(whole), groups, nbytes) == 101
    groups[1].owners.append(whole.c)  # a backward holds it from its first use to its last
    assert room.held_nbytes(read_model(whole), groups, nbytes) == 111
    groups[1].block = nn.ModuleList([whole.a, whole.c])  # which are used one after the other
    assert room.held_nbytes(read_model(whole), groups, nbytes) == 101
    groups[1].owners.clear()  # an operation holds it, in the forward of the first one
    assert room.held_nbytes(read_model(whole), groups, nbytes) == 101
    nbytes[id(groups[1])] = 1000
    assert room.held_nbytes(read_model(whole), groups, nbytes) == 1000


def test_a_named_class_may_stand_inside_another_named_one():
    """It is a part of the outer unit then. Twin: a class that the model lacks is refused."""

    class Inner(nn.Linear):
        pass

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner(4, 4)

    model = nn.Sequential(Outer(), Outer())
    assert [group.name for group in partition(model, ("Outer", "Inner"))] == ["0", "1"]
    with pytest.raises(ConfigError, match="no module of class Other"):
        partition(model, ("Outer", "Other"))
