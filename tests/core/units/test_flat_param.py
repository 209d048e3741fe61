"""FlatParam: values, masters and moments of parameters go into flat arrays and come back with
their bits.

Words used here: **split**: bf16 weights with the low 16 bits of an fp32 master. **wide**: bf16
weights with the fp32 master itself. **tie**: a value halfway between two of bf16, which torch
rounds to the even one and a split away from zero.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from memory_arrays import Counted, MemoryStore, Told, give_arrays
from native_arrays import same_bits, seeded

from infinity import native
from infinity.core.units.flat_param import ENCODED_AT_ONCE, FlatParam
from infinity.core.units.flat_param_spec import MOMENTS, FlatParamSpec
from infinity.core.units.home_arrays import COPY
from infinity.ext.checkpoint.home_loader import settle_master

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
OWN, SPLIT, WIDE = native.Master.OWN, native.Master.SPLIT, native.Master.FLOAT32
TIE = 1 + 2**-8
AWAY, EVEN = 1 + 2**-7, 1.0
KINDS = {
    "own": FlatParamSpec(F32, F32, OWN, F32, F32, MOMENTS, stepped=True),
    "split": FlatParamSpec(F32, BF16, SPLIT, BF16, F32, MOMENTS, stepped=True),
    "wide": FlatParamSpec(F32, BF16, WIDE, BF16, BF16, MOMENTS, stepped=True),
    "frozen": FlatParamSpec(F32, F32, SPLIT, F32, F32, MOMENTS, stepped=False),
}
LENGTHS = 6, 3000, 3000  # at 0, 64 and 3072: the last one is on both of two ranks


def values(dtype: torch.dtype = F32) -> list[torch.Tensor]:
    """The first one is of two rows, kept by columns."""
    made = [torch.randn(n, generator=seeded(n)).to(dtype) for n in LENGTHS]
    made[0] = made[0].view(3, 2).t()
    return made


def shard_of(kind: str = "own", collectives: Told | None = None, **changes) -> FlatParam:
    """With arrays full of ones."""
    spec = FlatParamSpec(**{**KINDS[kind].__dict__, **changes})
    made = FlatParam(spec, [torch.nn.Parameter(each) for each in values()], collectives)
    made.names[:] = ["a", "b", "c"]
    return give_arrays(made, 1)


def filled(kind: str = "own", **changes) -> tuple[FlatParam, MemoryStore]:
    """With these values at home."""
    flat_param, store = shard_of(kind, **changes), MemoryStore()
    for index, value in enumerate(values(flat_param.spec.wrapped_dtype)):
        flat_param.write_value(store, index, value, version=3)
    store.writes.clear()
    return flat_param, store


def settle(flat_param: FlatParam, store: MemoryStore, index: int, *, version: int) -> None:
    """As a load of weights without masters does it."""
    settle_master(store, SimpleNamespace(flat_param=flat_param, index=index), version=version)


def arrays(flat_param: FlatParam) -> dict[str, torch.Tensor]:
    return {name: array.flat.clone() for name, array in flat_param.arrays.items()}


def differing(flat_param: FlatParam, before: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    """Which elements of which arrays have other bits."""
    found = {}
    for name, now in arrays(flat_param).items():
        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[now.itemsize]
        places = (now.view(integer) != before[name].view(integer)).nonzero().flatten()
        if places.numel():
            found[name] = places.tolist()
    return found


# --- values ---


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_comes_back_with_its_bits_shape_and_strides(kind):
    """Claim: as a new tensor. Twin: what is between the parameters is let be."""
    flat_param, store = filled(kind)
    for index, value in enumerate(values()):
        read = flat_param.read_value(store, index)
        assert same_bits(read.contiguous(), value.contiguous())
        assert read.stride() == value.stride()
        read.zero_()
        assert same_bits(flat_param.read_value(store, index).contiguous(), value.contiguous())
    assert all(
        array[[6, 63, 3064, 6072]].tolist() == [1] * 4 for array in arrays(flat_param).values()
    )


def test_a_wrapped_dtype_is_that_of_what_is_read_unless_another_is_asked_for():
    """Method: bf16 that is computed with in fp16."""
    flat_param, store = filled("own", wrapped_dtype=BF16, dtype=F16)
    value = values(BF16)[1]
    assert same_bits(flat_param.read_value(store, 1), value.to(F16).to(BF16))
    assert same_bits(flat_param.read_value(store, 1, F32), value.to(F16).to(F32))


def test_a_wider_value_is_read_from_the_master_and_the_weights_own_dtype_from_the_weight():
    """Method: a tie, which weight and master round differently; a master that is not the
    weight's."""
    for kind, weight in (("split", AWAY), ("wide", EVEN)):
        flat_param, store = filled(kind)
        flat_param.write_value(store, 1, torch.full((3000,), TIE), version=3)
        assert bool((flat_param.read_value(store, 1, BF16) == weight).all())
        assert bool((flat_param.read_value(store, 1) == TIE).all())
        assert bool((flat_param.read_master(store, 1) == TIE).all())
    flat_param.arrays["master"].flat.fill_(5)
    assert bool((flat_param.read_value(store, 1, BF16) == EVEN).all())
    assert bool((flat_param.read_value(store, 1, F16) == 5).all())


@pytest.mark.parametrize("kind", ["own", "split", "wide"])
def test_a_value_goes_to_weight_and_master_with_its_version(kind):
    flat_param, store = shard_of(kind), MemoryStore()
    flat_param.write_value(store, 0, values()[0], version=7)
    names = ["weight"] if kind == "own" else ["weight", "master"]
    assert [(each.name, each.begin, each.numel, each.version) for each in store.writes] == [
        (name, 0, 6, 7) for name in names
    ]


def test_a_fresh_arrays_zero_low_bits_are_not_written():
    """Twins: other arrays' are, and so are those of wider values, and fp32 masters."""
    value = values(BF16)[0]
    for kind, dtype, fresh, names in (
        ("split", BF16, True, ["weight"]),
        ("split", BF16, False, ["weight", "master"]),
        ("split", F32, True, ["weight", "master"]),
        ("wide", BF16, True, ["weight", "master"]),
        ("own", F32, True, ["weight"]),
    ):
        flat_param, store = shard_of(kind, wrapped_dtype=dtype), MemoryStore()
        flat_param.write_value(store, 0, value.to(dtype), version=0, fresh=fresh)
        assert [each.name for each in store.writes] == names
        if not fresh:
            assert flat_param.arrays["master"].flat[:7].tolist() == [0] * 6 + [1]


def test_a_long_value_is_encoded_piece_by_piece():
    """Method: it does not begin where a piece of the arrays would."""
    length = ENCODED_AT_ONCE + 70
    params = [torch.nn.Parameter(torch.zeros(n)) for n in (1, length)]
    flat_param = give_arrays(FlatParam(KINDS["split"], params))
    store, value = MemoryStore(), torch.randn(length, generator=seeded(0))
    flat_param.write_value(store, 1, value, version=0)
    assert [(each.begin, each.numel) for each in store.writes if each.name == "weight"] == [
        (64, ENCODED_AT_ONCE),
        (64 + ENCODED_AT_ONCE, 70),
    ]
    assert same_bits(flat_param.read_value(store, 1), value)
    before = arrays(flat_param)["weight"]
    settle(flat_param, store, 1, version=0)
    assert [each.numel for each in store.writes[4:]] == [ENCODED_AT_ONCE, 70]
    assert same_bits(flat_param.read_value(store, 1), before[64 : 64 + length].float())


@pytest.mark.parametrize("index", [0, 1])
def test_first_values_are_set_in_row_major_order_from_where_they_begin(index):
    """For a parameter by columns and one by rows. Twin: the other elements stay."""
    flat_param, store = filled("wide", wrapped_dtype=F16)
    before = [flat_param.read_value(store, each) for each in range(3)]
    flat_param.write_first_values(store, index, 2, torch.tensor([1 / 3, -2.0, 5.0], dtype=F32))
    expected = before[index].contiguous().view(-1)
    expected[2:5] = torch.tensor([1 / 3, -2.0, 5.0]).to(F16)
    for each in range(3):
        now = flat_param.read_value(store, each).contiguous()
        assert same_bits(now, expected.view_as(now) if each == index else before[each].contiguous())
    assert {each.version for each in store.writes} == {0}


@pytest.mark.parametrize("index", [0, 1])
def test_first_values_of_bf16_write_no_low_bits(index):
    flat_param, store = filled("split", wrapped_dtype=BF16)
    flat_param.write_first_values(store, index, 0, torch.ones(2))
    assert [each.name for each in store.writes] == ["weight"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_writes_what_is_in_its_slice(rank):
    """Twin: a parameter that is elsewhere is not written at all."""
    flat_param, store, value = shard_of("split", Told(rank)), MemoryStore(), values()[2]
    flat_param.write_value(store, 2, value, version=1)
    own, at = (slice(0, 1024), 3072) if rank == 0 else (slice(1024, 3000), 0)
    accumulation = native.join_master(
        *(flat_param.arrays[name].flat for name in ("weight", "master"))
    )
    here = slice(at, at + own.stop - own.start)
    assert same_bits(accumulation[here], value[own])
    accumulation[here] = accumulation[-1 if rank else 0]
    assert accumulation.unique().numel() == 1  # as it was
    store.writes.clear()
    flat_param.write_value(store, 0, values()[0], version=1)
    assert bool(store.writes) == (rank == 0)


def test_bytes_are_those_of_the_padded_weights_and_of_a_ranks_slice():
    flat_param = shard_of("split", Told(1))
    assert (flat_param.weight_nbytes, flat_param.shard_nbytes) == (8192 * 2, 4096 * 2)
    assert flat_param.weight is flat_param.arrays["weight"] and flat_param.spec.dtype is BF16


def test_a_value_is_flattened_in_the_order_of_the_parameters_strides():
    """Claim: into a copy on the processor without a graph."""
    flat_param = shard_of()
    value = torch.tensor([[1.0, 3.0, 5.0], [2.0, 4.0, 6.0]], requires_grad=True)
    with torch.device("meta"):
        flat = flat_param.flattened(value, 0)
    assert flat.tolist() == [1, 2, 3, 4, 5, 6] and not flat.requires_grad
    flat.zero_()
    assert value[0, 0] == 1


# --- what is waited for ---


def busy(flat_param: FlatParam, store: MemoryStore) -> list[Counted]:
    """Gives it an update, and a read of its arrays."""
    found = [Counted(store), Counted(store)]
    flat_param.homes.commit(flat_param.homes.draft(), found[0])
    flat_param.homes.read_until(COPY, found[1])
    return found


CHANGES = {
    "write_value": lambda s, io: s.write_value(io, 1, values()[1], version=0),
    "write_first_values": lambda s, io: s.write_first_values(io, 1, 0, values()[1]),
    "changes": lambda s, io: s.changes(io, 1, values()[1]),
    "write_changes": lambda s, io: s.write_changes(io, 1, {}, version=0),
    "write_master": lambda s, io: s.write_master(io, 1, values()[1], version=0),
}
READS = {
    "read_value": lambda s, io: s.read_value(io, 1),
    "read_moment": lambda s, io: s.read_moment(io, "exp_avg", 1),
    "assembling_values": lambda s, io: s.assembling_values(io),
    "assembling_state": lambda s, io: s.assembling_state(io, (), masters=True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_waits_until_the_arrays_are_idle(name):
    flat_param, store = filled("split")
    running = busy(flat_param, store)
    CHANGES[name](flat_param, store)
    assert [each.waits for each in running] == [1, 1]
    assert flat_param.homes.update is None and flat_param.homes.draft().events == []


@pytest.mark.parametrize("name", READS)
def test_a_read_waits_for_the_update_before_it_and_for_no_other_read(name):
    """Claim: values are waited for where a failing disk is noted."""
    flat_param, store = filled("split")
    running = busy(flat_param, store)
    READS[name](flat_param, store)
    assert [each.waits for each in running] == [1, 0]
    assert running[0].was_guarded == ("value" in name)


def test_a_moment_waits_for_the_update_before_it_is_written():
    flat_param, store = filled("own", moment_dtype=torch.uint8)
    running = busy(flat_param, store)
    flat_param.write_moment(store, "exp_avg", 1, values()[1], version=0)
    assert running[0].waits == 1 and running[1].waits > 0


# --- edits ---


@pytest.mark.parametrize("kind", ["own", "split", "wide"])
def test_an_edit_replaces_the_elements_that_differ_and_lets_the_others_be(kind):
    """Claim: masters of the others keep the bits that the weight does not show. Twin: until it is
    written nothing has changed, and an edit that changes nothing has no parts."""
    flat_param, store = filled(kind)
    before, weight = arrays(flat_param), flat_param.read_value(store, 1, flat_param.spec.dtype)
    assert flat_param.changes(store, 1, weight) == {}
    edited = weight.clone()
    edited[5], edited[2999] = 0.25, -0.0
    parts = flat_param.changes(store, 1, edited)
    assert differing(flat_param, before) == {} and store.writes == []
    flat_param.write_changes(store, 1, parts, version=9)
    changed = differing(flat_param, before)
    assert changed.pop("weight") == [64 + 5, 64 + 2999]
    assert all(set(places) <= {64 + 5, 64 + 2999} for places in changed.values())
    assert same_bits(flat_param.read_value(store, 1, flat_param.spec.dtype), edited)
    assert flat_param.read_value(store, 1)[5] == 0.25  # with a master of its own
    assert {(each.begin, each.version) for each in store.writes} == {(64, 9)}


def test_an_edit_is_found_by_bits():
    """Twin: a NaN is as it was, and zero has a sign."""
    flat_param, store = filled()
    value = values()[1]
    value[:2] = torch.tensor([float("nan"), 0.0])
    flat_param.write_value(store, 1, value, version=0)
    assert flat_param.changes(store, 1, value) == {}
    value[1] = -0.0
    assert list(flat_param.changes(store, 1, value)) == ["weight"]


def test_an_edit_in_the_wrapped_dtype_is_compared_with_the_master():
    """Method: bits that the weight does not have. Twin: the master's own value is no edit."""
    flat_param, store = filled("split")
    value = values()[1]
    assert flat_param.changes(store, 1, value) == {}
    value[7] = torch.nextafter(value[7], torch.tensor(9.0))
    before = arrays(flat_param)
    flat_param.write_changes(store, 1, flat_param.changes(store, 1, value), version=0)
    assert differing(flat_param, before)["master"] == [64 + 7]
    assert same_bits(flat_param.read_value(store, 1), value)


def test_an_edit_may_be_compared_with_the_value_before_in_place_of_home():
    """Claim: elements that are as they were before keep what is at home."""
    flat_param, store = filled()
    before, after = torch.zeros(3000), torch.zeros(3000)
    assert flat_param.changes(store, 1, after, before=before) == {}
    after[4] = 2
    flat_param.write_changes(
        store, 1, flat_param.changes(store, 1, after, before=before), version=0
    )
    expected = values()[1]
    expected[4] = 2
    assert same_bits(flat_param.read_value(store, 1), expected)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_finds_and_writes_the_edits_of_its_slice(rank):
    """Twins: those of the other shard are none here. The value before is cut the same way."""
    flat_param, store, value = shard_of("own", Told(rank)), MemoryStore(), values()[2]
    flat_param.write_value(store, 2, value, version=0)
    here, elsewhere, at = (1000, 1100, 3072 + 1000) if rank == 0 else (1100, 1000, 1100 - 1024)
    for before in (None, value.clone()):
        edited = value.clone()
        edited[elsewhere] = 7
        assert flat_param.changes(store, 2, edited, before=before) == {}
        edited[here] = 8
        was = arrays(flat_param)
        flat_param.write_changes(
            store, 2, flat_param.changes(store, 2, edited, before=before), version=0
        )
        assert differing(flat_param, was) == {"weight": [at]}
        flat_param.write_value(store, 2, value, version=0)
    nowhere = 0
    if rank == 1:
        assert flat_param.changes(store, nowhere, torch.zeros(2, 3)) == {}


def test_a_shard_holds_a_value_that_has_its_bits_in_the_compute_dtype():
    """Twins: other bits, or another dtype."""
    flat_param, store = filled("split")
    weight = flat_param.read_value(store, 1, BF16)
    assert flat_param.holds(store, 1, weight)
    assert not flat_param.holds(store, 1, flat_param.read_value(store, 1))
    weight[0] += 1
    assert not flat_param.holds(store, 1, weight)


# --- masters ---


def test_a_settled_master_is_that_of_its_weight_alone():
    """Twins: the other parameters' stay; without masters nothing is written."""
    for kind in ("split", "wide"):
        flat_param, store = filled(kind)
        weight, other = flat_param.read_value(store, 1, BF16), flat_param.read_value(store, 2)
        settle(flat_param, store, 1, version=6)
        assert same_bits(flat_param.read_value(store, 1), weight.float())
        assert same_bits(flat_param.read_value(store, 2), other)
        assert same_bits(flat_param.read_value(store, 1, BF16), weight)
        assert [(each.name, each.version) for each in store.writes] == [("master", 6)]
    flat_param, store = filled("own")
    settle(flat_param, store, 1, version=6)
    assert store.writes == []


@pytest.mark.parametrize(
    "kind, wrapped, hides",
    [
        ("own", BF16, False),
        ("split", F32, False),
        ("split", BF16, True),
        ("wide", F16, True),
        ("wide", F32, False),
    ],
)
def test_masters_hide_bits_from_values_narrower_than_they_are(kind, wrapped, hides):
    assert shard_of(kind, wrapped_dtype=wrapped).hides_bits is hides


@pytest.mark.parametrize("kind", ["split", "wide"])
def test_a_master_is_set_where_it_is_the_weights_and_counted_where_it_is_not(kind):
    """Claim: the others keep theirs, and no weight changes."""
    flat_param, store = filled(kind)
    before = arrays(flat_param)
    master = flat_param.read_master(store, 1).double()
    settle(flat_param, store, 1, version=0)
    settled = flat_param.read_master(store, 1)
    master[[3, 9]] += 1
    store.writes.clear()
    assert flat_param.write_master(store, 1, master, version=8) == 2
    assert [(each.name, each.begin, each.version) for each in store.writes] == [("master", 64, 8)]
    expected = master.float()
    expected[[3, 9]] = settled[[3, 9]]
    assert same_bits(flat_param.read_master(store, 1), expected)
    assert same_bits(flat_param.arrays["weight"].flat, before["weight"])


def test_a_master_is_read_in_fp32_whatever_dtype_was_wrapped():
    """Twin: the value itself is read as it was wrapped."""
    flat_param, store = shard_of("split", wrapped_dtype=BF16), MemoryStore()
    flat_param.write_value(store, 1, values()[1], version=0)
    assert same_bits(flat_param.read_master(store, 1), values()[1])
    assert flat_param.read_value(store, 1).dtype is BF16


def test_a_rank_without_a_part_of_a_parameter_sets_no_master():
    """Twin: one with a part sets that."""
    flat_param, store = shard_of("split", Told(1)), MemoryStore()
    assert flat_param.write_master(store, 0, torch.zeros(2, 3), version=0) == 0 and not store.writes
    value = values()[2]
    flat_param.write_value(store, 2, value, version=0)
    settle(flat_param, store, 2, version=0)
    store.writes.clear()
    assert flat_param.write_master(store, 2, value, version=0) == 0
    assert [(each.begin, each.numel) for each in store.writes] == [(0, 1976)]
    accumulation = native.join_master(
        *(flat_param.arrays[name].flat for name in ("weight", "master"))
    )
    assert same_bits(accumulation[:1976], value[1024:])


# --- moments ---


def test_moments_come_back_in_the_dtype_that_they_are_stored_in():
    """Twin: the other moment is another array."""
    for dtype in (F32, BF16):
        flat_param, store = shard_of("own", moment_dtype=dtype), MemoryStore()
        value = values()[0].double()
        flat_param.write_moment(store, "exp_avg", 0, value, version=2)
        read = flat_param.read_moment(store, "exp_avg", 0)
        assert same_bits(read.contiguous(), value.to(dtype).contiguous())
        assert read.stride() == (1, 2)
        assert bool((flat_param.read_moment(store, "exp_avg_sq", 0) == 1).all())
        assert [(each.name, each.version) for each in store.writes] == [("exp_avg", 2)]


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_coded_moments_come_back_as_their_codes_say(name):
    """Method: decoded and encoded again they have the same codes and scales."""
    flat_param, store = shard_of("own", moment_dtype=torch.uint8), MemoryStore()
    value = values()[1].abs()
    flat_param.write_moment(store, name, 1, value, version=2)
    codes, scales = native.encode_moments(value, sq=name == "exp_avg_sq")
    assert same_bits(flat_param.arrays[name].flat[64:3064], codes)
    assert same_bits(flat_param.arrays[f"{name}_scale"].flat[1:48], scales)
    decoded = native.decode_moments(codes, scales, sq=name == "exp_avg_sq")
    assert same_bits(flat_param.read_moment(store, name, 1), decoded)
    assert [(each.name, each.version) for each in store.writes] == [
        (name, 2),
        (f"{name}_scale", 2),
    ]


def test_an_array_beside_coded_moments_is_read_as_it_is():
    flat_param, store = shard_of("own", moment_dtype=torch.uint8), MemoryStore()
    flat_param.write_flat(store, "grad", 0, values()[0].double(), version=4)
    assert same_bits(
        flat_param.read_moment(store, "grad", 0).contiguous(), values()[0].contiguous()
    )
    assert [(each.name, each.version) for each in store.writes] == [("grad", 4)]


# --- several ranks ---


def told(kind: str, **changes) -> tuple[FlatParam, MemoryStore, Told]:
    """Rank 1 of two, whose peer has ones everywhere, too."""
    ranks = Told(1)
    flat_param = shard_of(kind, ranks, **changes)
    for name, array in flat_param.arrays.items():
        ones = torch.ones(2 * array.flat.numel(), dtype=array.dtype)
        ranks.wholes[f"reading {name} of a and its unit"] = ones
        for param in "abc":
            ranks.wholes[f"reading {name} of {param}"] = ones
    return flat_param, MemoryStore(), ranks


def meetings(block: str, kind: str, **changes) -> list[str]:
    """Arrays for which ranks meet at the begin of a block, and for which they do so inside it."""
    flat_param, store, ranks = told(kind, **changes)
    blocks = {
        "values": lambda: flat_param.assembling_values(store),
        "moments": lambda: flat_param.assembling_state(store, ["exp_avg"], masters=False),
        "state": lambda: flat_param.assembling_state(
            store, ["exp_avg", "exp_avg_sq"], masters=True
        ),
    }
    with blocks[block]():
        begun = [each.split()[1] for each in ranks.meetings]
        ranks.meetings.clear()
        if block == "values":
            flat_param.read_value(store, 2)
        else:
            flat_param.read_moment(store, "exp_avg", 2)
            if block == "state":
                flat_param.read_master(store, 2)
        assert ranks.meetings == []
    flat_param.read_value(store, 2)
    assert ranks.meetings
    return begun


def test_ranks_meet_once_for_each_array_that_is_read_inside_a_block():
    """Twin: outside of it they meet for each read."""
    assert meetings("values", "own") == ["weight"]
    assert meetings("values", "split") == ["weight", "master"]
    assert meetings("values", "split", wrapped_dtype=BF16) == ["weight"]
    assert meetings("moments", "split") == ["exp_avg"]
    assert meetings("state", "split") == ["exp_avg", "exp_avg_sq", "weight", "master"]
    coded = {"moment_dtype": torch.uint8}
    assert meetings("moments", "own", **coded) == ["exp_avg", "exp_avg_scale"]
    assert meetings("state", "own", **coded) == [
        "exp_avg",
        "exp_avg_sq",
        "exp_avg_scale",
        "exp_avg_sq_scale",
        "weight",
    ]


def test_a_block_takes_moments_without_codes_beside_coded_ones():
    flat_param, store, ranks = told("own", moment_dtype=torch.uint8)
    with flat_param.assembling_state(store, ["grad"], masters=False):
        assert ranks.meetings == ["reading grad of a and its unit"]
