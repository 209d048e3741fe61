"""Shapes of meshes: what is parsed and refused, which links an axis uses, and what that costs."""

from __future__ import annotations

import dataclasses
import itertools
import random
import string

import pytest

from infinity.errors import ConfigError
from infinity.tools.plan.endurance import Endurance
from infinity.tools.plan.machine_file import (
    MACHINES,
    OF_INPUTS,
    OF_WEIGHTS,
    Machine,
    known_machines,
)
from infinity.tools.plan.mesh_choice import count_gathers
from infinity.tools.plan.mesh_shape import AXES, MeshShape, meshes_of, parse_mesh

SEED = 20261129
DGX = Machine.read("dgx-h100")


def test_a_mesh_is_parsed_and_told_as_a_line_to_paste():
    """What is left out goes to dp."""
    mesh = parse_mesh("pp=4,tp=8", 128)
    assert mesh == MeshShape(4, 4, 8) and mesh == parse_mesh(" tp = 8, dp=4 ,pp=4", 128)
    assert (
        mesh.paste()
        == 'mesh = init_device_mesh("cuda", (4, 4, 8), mesh_dim_names=("pp", "dp", "tp"))'
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pp=4,xp=8", "no axis 'xp'"),
        ("ep=2,tp=2", "leave one of both out"),
        ("ep=3", "ep=3 makes 126 ranks, and the machines have 128"),
        ("", "no axis ''"),
        ("pp", "pp needs a number"),
        ("pp=", "pp needs a number"),
        ("pp=0", "pp needs a number"),
        ("pp=-2", "pp needs a number"),
        ("pp=2.5", "pp needs a number"),
        ("pp=\u0662", "pp needs a number"),
        ("pp=2,pp=2", "given twice"),
        ("pp=4,dp=4,tp=4", "pp=4, dp=4, tp=4 makes 64 ranks, and the machines have 128"),
        ("tp=3", "as pp=1, dp=32, tp=4"),
        ("tp=256", "machines have 128"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_all_degrees(text, said):
    with pytest.raises(ConfigError, match=said):
        parse_mesh(text, 128)


def test_ten_thousand_random_inputs_are_taken_or_refused():
    """Method: texts near a mesh, and random ones. What is taken has the product of the ranks."""
    draw, taken = random.Random(SEED), 0
    for _ in range(10_000):
        ranks = draw.choice([1, 2, 6, 8, 12, 128, 1000])
        if draw.random() < 0.5:
            text = "".join(draw.choices(string.printable, k=draw.randrange(12)))
        else:
            names = draw.sample([*AXES, "cp"], draw.randrange(1, 4))
            values = [draw.choice(["1", "2", "4", "8", "0", "x", "1e3", ""]) for _ in names]
            text = ",".join(map("=".join, zip(names, values)))
        try:
            mesh = parse_mesh(text, ranks)
        except ConfigError as error:
            assert "--mesh" in str(error)
            continue
        taken += 1
        assert mesh.ranks == ranks
    assert taken > 100


def test_all_meshes_of_a_number_of_ranks():
    for ranks in (1, 7, 12, 128):
        found = list(meshes_of(ranks))
        tried = {
            MeshShape(pp, dp, tp)
            for pp, dp, tp in itertools.product(range(1, ranks + 1), repeat=3)
            if ranks <= 12 and pp * dp * tp == ranks
        }
        assert len(set(found)) == len(found) and all(mesh.ranks == ranks for mesh in found)
        assert not tried or set(found) == tried
    assert len(found) == 36


def test_ranks_of_ep_divide_the_experts_and_share_no_batch():
    """Twin: without experts there is no such mesh."""
    found = set(meshes_of(8, experts=12))
    with_experts = {mesh for mesh in found if mesh.ep > 1}
    assert found - with_experts == set(meshes_of(8))
    assert with_experts == {
        MeshShape(pp, 8 // pp // ep, 1, ep)
        for pp, ep in itertools.product((1, 2, 4, 8), (2, 4))
        if pp * ep <= 8
    }
    mesh = parse_mesh("pp=2,ep=4", 16)
    assert mesh == MeshShape(2, 2, 1, 4) and mesh.data == 8
    assert mesh.paste() == (
        'mesh = init_device_mesh("cuda", (2, 2, 4), mesh_dim_names=("pp", "dp", "ep"))'
    )


def test_an_exchange_sends_what_leaves_a_node_through_its_network():
    """8 ranks on nodes of 4: each sends 4 of 7 parts to the other node. Twin: one node."""
    machine = dataclasses.replace(DGX, devices=4)
    axis = MeshShape(1, 1, 1, 8).axis("ep", machine)
    assert axis.exchange_network_seconds(7e9) == 4 * 4e9 / machine.network
    assert axis.exchange_seconds(7e9, 2) == 4 * 4e9 / machine.network + 2 * machine.latency
    inside = MeshShape(1, 1, 1, 8).axis("ep", DGX)
    assert inside.exchange_seconds(7e9, 2) == 7e9 / DGX.device_link
    assert inside.exchange_network_seconds(7e9) == 0


def test_an_axis_is_inside_if_no_group_leaves_its_node():
    """Nodes of 8. Twin: the same degrees in another order of axes."""
    mesh = MeshShape(4, 4, 8)
    tp, dp, pp = (mesh.axis(name, DGX) for name in ("tp", "dp", "pp"))
    assert tp.is_inside and not dp.is_inside and not pp.is_inside
    assert tp.rate == DGX.device_link and dp.rate == pytest.approx(DGX.network / 8)
    assert MeshShape(4, 1, 2).axis("pp", DGX).is_inside
    assert not MeshShape(4, 4, 2).axis("pp", DGX).is_inside
    # A group of 16 has half of its ranks on each of two nodes: one ring, and all of the network.
    wide = MeshShape(1, 1, 16).axis("tp", DGX)
    assert wide.rings == 1 and wide.rate == DGX.network
    assert not MeshShape(1, 1, 6).axis("tp", DGX).is_inside


def test_data_ranks_alone_use_the_network_as_without_a_mesh():
    """A node receives each byte once for all its devices."""
    axis = MeshShape(1, 32, 1).axis("dp", DGX)
    received = 1e9
    expected = received * 32 / 31 * 3 / 4 / DGX.network + 5 * DGX.latency
    assert axis.network_seconds(received, 5) == pytest.approx(expected)
    assert MeshShape(1, 8, 1).axis("dp", DGX).network_seconds(received, 5) == 0


def test_a_hop_inside_a_node_is_cheaper_than_one_between_nodes():
    """pp=4 with 4 ranks a stage: two stages are on a node."""
    pp = MeshShape(4, 1, 4).axis("pp", DGX)
    near, far = pp.hop_seconds(1e9, 0, 1), pp.hop_seconds(1e9, 1, 2)
    assert near == 1e9 / DGX.device_link
    assert far == pytest.approx(1e9 / (DGX.network / 4) + DGX.latency)
    assert pp.hop_seconds(1e9, 2, 2) == 0


def test_faster_links_never_cost_more():
    """Over random machines and meshes: twice the link, or the network, is never slower."""
    draw = random.Random(SEED + 1)
    for _ in range(2000):
        machine = dataclasses.replace(
            DGX,
            devices=draw.choice([1, 2, 4, 8, 16]),
            device_link=10 ** draw.uniform(8, 12),
            network=10 ** draw.uniform(8, 12),
        )
        mesh = MeshShape(*(draw.choice([1, 2, 3, 4, 8]) for _ in range(4)))
        for field in ("device_link", "network"):
            faster = dataclasses.replace(machine, **{field: 2 * getattr(machine, field)})
            for name in AXES:
                slow, fast = mesh.axis(name, machine), mesh.axis(name, faster)
                assert fast.collective_seconds(1e9, 7) <= slow.collective_seconds(1e9, 7)
                assert fast.network_seconds(1e9, 7) <= slow.network_seconds(1e9, 7)
                assert fast.exchange_seconds(1e9, 7) <= slow.exchange_seconds(1e9, 7)
                last = slow.size - 1
                assert fast.hop_seconds(1e9, 0, last) <= slow.hop_seconds(1e9, 0, last)


def least_gathers(uses: list[int], window: int) -> int:
    """The fewest gathers of equal units, by trying every eviction."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for unit in uses:
        following: dict[frozenset[int], int] = {}
        for resident, count in states.items():
            if unit in resident:
                options = [(resident, count)]
            elif len(resident) < window:
                options = [(resident | {unit}, count + 1)]
            else:
                options = [(resident - {out} | {unit}, count + 1) for out in resident]
            for state, gathers in options:
                following[state] = min(gathers, following.get(state, gathers))
        states = following
    return min(states.values())


def test_gathers_are_the_fewest_that_a_window_allows():
    """Method: tries every eviction of random uses of equal units. Twin: a window one larger needs
    fewer, somewhere."""
    draw, fewer = random.Random(SEED + 2), 0
    for _ in range(200):
        units, window = draw.randint(2, 5), draw.randint(1, 4)
        uses = [draw.randrange(units) for _ in range(draw.randint(1, 14))]
        found = count_gathers(uses, [7] * units, 7 * window)
        assert sum(found) == least_gathers(uses, window)
        fewer += sum(count_gathers(uses, [7] * units, 7 * window + 7)) < sum(found)
    assert fewer > 20
    assert count_gathers([0, 1, 0], [9, 1], 4) == [2, 1]


def test_a_drives_endurance_is_what_is_written_a_day():
    """A terabyte a day lasts a drive of 1,825 TB five years. Twins: one byte more warns, and
    without a rating nothing is promised."""
    step = {"written": 2e12, "seconds": 86400.0, "drives": 2}
    lasts = Endurance.of_step(**step, rating=1825e12)
    assert lasts.daily_nbytes == 1e12 and lasts.years == 5 and not lasts.is_above
    assert "1 TB written a day to each of 2 drives" in lasts.line and "5 years" in lasts.line
    tired = Endurance.of_step(**step | {"written": 8e12}, rating=1825e12)
    assert tired.is_above and "WARNING: 4 times what the rating allows" in tired.line
    assert "456 days" in tired.line
    unknown = Endurance.of_step(**step | {"drives": 1}, rating=None)
    assert unknown.years is None and "--drive-rating" in unknown.line
    assert "the drive" in unknown.line
    assert Endurance.of_step(0, 1.0, 1, 1e12) is None


def test_machine_files_name_a_rating_and_their_sources():
    """Also those of several devices, for which meshes are planned."""
    several = [Machine.read(name) for name in known_machines()]
    assert sum(machine.devices > 1 for machine in several) >= 6
    assert all(machine.drive_rating and machine.sources for machine in several)


def test_halves_of_a_backward_are_measured_or_of_the_machine_file(tmp_path, monkeypatch):
    """Method: torch's two functions run on real blocks, with seconds that are given. Twins: a file
    without halves, and one with a half of no size."""
    import torch

    from infinity.tools.plan import plan_measured

    text = (MACHINES / "dgx2.toml").read_text()
    path = tmp_path / "mine.toml"
    path.write_text(text.replace("[devices]\n", "[devices]\ninputs = 0.7\nweights = 0.4\n"))
    given, plain = Machine.read(str(path)), Machine.read("dgx2")
    assert (given.of_inputs, given.of_weights) == (0.7, 0.4)
    assert (plain.of_inputs, plain.of_weights) == (OF_INPUTS, OF_WEIGHTS)
    path.write_text(text.replace("[devices]\n", "[devices]\ninputs = 0\n"))
    with pytest.raises(ConfigError, match="inputs"):
        Machine.read(str(path))

    seconds = itertools.cycle([2.0, 1.2, 0.8])
    monkeypatch.setattr(plan_measured, "_seconds", lambda work, where: (work(), next(seconds))[1])
    for name, size in (("WIDTH", 16), ("HEADS", 2), ("TOKENS", 4), ("BLOCKS", 2)):
        monkeypatch.setattr(plan_measured, name, size)
    measured = plan_measured.measured_halves("cpu", torch.float32)
    assert measured == pytest.approx((0.6, 0.4))
