"""The memory plan: sums of named terms within every budget, and where none fits, the least budget
that does.

Words used here:

**homes**: what Config says of params and optimizer; fixed, or "auto". **least**: the bytes an error
names as the least that works. A plan with exactly that budget succeeds; with one byte less it fails
(the twin).
"""

from __future__ import annotations

import dataclasses
import random
import re

import pytest
import torch
from models import at_home, differing, loss_of, tokens, transformer, with_least
from runs import adamw

import infinity
from infinity import native
from infinity.config import Config
from infinity.core.machine.tiers import Tier
from infinity.core.plan.memory_plan import LADDER, MemoryPlan
from infinity.core.plan.memory_terms import SAVE
from infinity.core.plan.plan import make_plan
from infinity.core.plan.unit_sizes import MIN_CHUNK, FlatParamSize, UnitSize
from infinity.core.units.flat_param_spec import MOMENTS, FlatParamSpec
from infinity.core.units.staged_reads import PIECE_NBYTES
from infinity.errors import CapacityError, ConfigError

MIB = 1024 * 1024
AMPLE = "1TiB"  # so that nothing is measured on the machine that runs the tests
HOMES = ("device", "host", "nvme")

bf16, fp32 = torch.bfloat16, torch.float32
SPECS = {
    "split": FlatParamSpec(bf16, bf16, native.Master.SPLIT, bf16, fp32, MOMENTS, True),
    "fp32": FlatParamSpec(fp32, fp32, native.Master.OWN, fp32, fp32, MOMENTS, True),
    "whole": FlatParamSpec(bf16, bf16, native.Master.FLOAT32, fp32, bf16, MOMENTS, True),
    "int8": FlatParamSpec(bf16, bf16, native.Master.SPLIT, bf16, torch.uint8, MOMENTS, True),
    "momentum": FlatParamSpec(fp32, fp32, native.Master.OWN, fp32, fp32, MOMENTS[:1], True),
    "frozen": FlatParamSpec(bf16, bf16, native.Master.OWN, bf16, fp32, (), False),
}


def unit(name: str, *flat_params: tuple[str, int]) -> UnitSize:
    return UnitSize(name, tuple(FlatParamSize(SPECS[kind], numel) for kind, numel in flat_params))


def equal_units(count: int, numel: int, kind: str = "split") -> list[UnitSize]:
    return [unit(f"block{i}", (kind, numel)) for i in range(count)]


def random_units(rng: random.Random) -> list[UnitSize]:
    def flat_param() -> tuple[str, int]:
        return rng.choice(list(SPECS)), 4096 * rng.choice([1, 2, 8, 9, 33, 100, 400])

    return [
        unit(f"u{i}", *(flat_param() for _ in range(rng.choice([1, 1, 2]))))
        for i in range(rng.randint(1, 12))
    ]


def config_of(folder, **values) -> Config:
    ample = dict(
        device_memory=AMPLE, host_memory=AMPLE, nvme_capacity=AMPLE, nvme_paths=[str(folder)]
    )
    return Config(**(ample | values))


def plan_of(
    units: list[UnitSize], config: Config, *, held: int | None = None, reuses: bool = False
) -> MemoryPlan:
    held = max(u.weight_nbytes for u in units) if held is None else held
    return make_plan(units, config, held_nbytes=held, reuses=reuses)


def least_of(error: pytest.ExceptionInfo | Exception) -> tuple[str, int]:
    """The setting and the number of bytes that a CapacityError asks for."""
    message = str(getattr(error, "value", error))
    return message.split(" ", 1)[0], int(
        re.search(r"the least that works here is .*? \((\d+) bytes\)", message)[1]
    )


# --- sums ---


def terms_by_hand(
    units, plan: MemoryPlan, choice, held: int, device_memory: int
) -> dict[Tier, dict[str, int]]:
    """The plan's terms from the definitions in its comments, written a second time."""
    flat_params = [flat for each in units for flat in each.flat_params]
    kinds = {
        "weight": "weights",
        "master": "optimizer state",
        "exp_avg": "optimizer state",
        "exp_avg_sq": "optimizer state",
        "moment_3": "optimizer state",
        "moment_4": "optimizer state",
        "grad": "gradients",
        "exp_avg_scale": "optimizer state",
        "exp_avg_sq_scale": "optimizer state",
    }
    terms: dict[Tier, dict[str, int]] = {tier: {} for tier in Tier}
    for name in plan.tiers:
        for index, each in enumerate(units):
            tier = plan.tiers_of(index)[name]
            for flat_param in each.flat_params:
                nbytes = (
                    -(
                        -int(flat_param.numel * flat_param.spec.nbytes_per_element.get(name, 0))
                        // 4096
                    )
                    * 4096
                )
                places = [(tier, kinds[name])]
                if index in plan.cached.get(name, ()):
                    places.append((Tier.HOST, kinds[name] + " kept from NVMe"))
                for place, what in places:
                    terms[place][what] = terms[place].get(what, 0) + nbytes
    weights = sorted((each.weight_nbytes for each in units), reverse=True)
    on_disk = Tier.NVME in plan.tiers.values()
    host = terms[Tier.HOST]
    if plan.tiers["weight"] is Tier.NVME:
        whole = [each for each in weights if choice.units_ahead or each <= PIECE_NBYTES]
        host["staged weights"] = sum(whole[: choice.units_ahead + 1])
    if SAVE in plan.terms[Tier.HOST]:
        host[SAVE] = 20 * MIB
    if plan.tiers["grad"] is Tier.NVME:
        most = 1 << 60 if choice.units_ahead else PIECE_NBYTES
        grads = sorted((min(most, flat.nbytes("grad")) for flat in flat_params), reverse=True)
        host["staged gradients"] = sum(grads[: 1 if choice.chunk == MIN_CHUNK else 3])
    slot = 0
    for flat_param in flat_params:
        if flat_param.spec.stepped:
            per = sum(
                size
                for name, size in flat_param.spec.nbytes_per_element.items()
                if plan.tiers[name] is Tier.NVME
            )
            chunk = (
                max(choice.chunk, 65536)
                if flat_param.spec.moment_dtype == torch.uint8
                else choice.chunk
            )
            slot = max(slot, int(per) * min(chunk, flat_param.numel))
    host["optimizer slots"] = choice.slot_count * slot
    host["service buffer"] = choice.service_nbytes if on_disk else native.BLOCK_NBYTES
    if terms[Tier.NVME] and sum(terms[Tier.NVME].values()):
        arrays = sum(flat.nbytes(name) > 0 for flat in flat_params for name in plan.tiers)
        host["checksums"] = 4 * (sum(terms[Tier.NVME].values()) // native.CHECKSUM_NBYTES + arrays)
    if plan.tiers["weight"] is not Tier.DEVICE:
        needed = min(held + weights[0], sum(weights))
        spare = device_memory - sum(terms[Tier.DEVICE].values())
        terms[Tier.DEVICE]["gathered weights"] = min(sum(weights), max(needed, spare))
    return {
        tier: {what: nbytes for what, nbytes in parts.items() if nbytes}
        for tier, parts in terms.items()
    }


@pytest.mark.parametrize("seed", range(40))
def test_a_plan_is_the_sum_of_its_terms(tmp_path, seed):
    """Plans random models with random homes and budgets, and adds the terms up a second time from
    their definitions."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    units = random_units(rng)
    held = rng.choice(units).weight_nbytes
    device = rng.choice([1, 4, 64]) * MIB + sum(u.weight_nbytes for u in units) * 10
    config = config_of(
        tmp_path, params=rng.choice(HOMES), optimizer=rng.choice(HOMES), device_memory=device
    )
    for choice in LADDER:
        # The budget that fits this choice and no more generous one, found by asking for it.
        try:
            plan = plan_of(units, config, held=held)
        except CapacityError as error:
            assert least_of(error)[0] == "host_memory"
            break
        chosen = next(
            c for c in LADDER if plan.terms == terms_by_hand(units, plan, c, held, device)
        )
        assert chosen.units_ahead == plan.units_ahead
        for tier in Tier:
            assert plan.planned_nbytes(tier) == sum(plan.terms[tier].values())
        assert plan.device_window_nbytes == plan.terms[Tier.DEVICE].get("gathered weights", 0)
        assert plan.staging_nbytes == plan.terms[Tier.HOST].get("staged weights", 0)
        assert plan.slot_count * plan.slot_nbytes == plan.terms[Tier.HOST].get("optimizer slots", 0)
        config = config_of(
            tmp_path,
            params=config.params,
            optimizer=config.optimizer,
            device_memory=device,
            host_memory=plan.planned_nbytes(Tier.HOST) - 1,
        )


@pytest.mark.parametrize("params", HOMES)
@pytest.mark.parametrize("optimizer", HOMES)
def test_homes_that_are_asked_for_are_taken(tmp_path, params, optimizer):
    """Asks for every pair of homes and reads where the arrays went; gradients stay in memory while
    it lasts."""
    plan = plan_of(equal_units(6, 65536), config_of(tmp_path, params=params, optimizer=optimizer))
    assert plan.tiers["weight"] == params
    assert {plan.tiers[name] for name in ("master", "exp_avg", "exp_avg_sq")} == {optimizer}
    assert plan.tiers["grad"] == ("device" if optimizer == "device" else "host")
    if "nvme" not in (params, optimizer):
        assert plan.planned_nbytes(Tier.NVME) == 0 == plan.slot_nbytes == plan.staging_nbytes


# --- budgets ---


def test_the_ladder_descends():
    """Every rung asks for no more than the one above it, and the last for the least the updater can
    use."""
    for above, below in zip(LADDER, LADDER[1:]):
        assert above.units_ahead >= below.units_ahead
        assert above.chunk >= below.chunk
        assert above.service_nbytes >= below.service_nbytes
    assert LADDER[-1].chunk == MIN_CHUNK
    assert all(choice.chunk % MIN_CHUNK == 0 for choice in LADDER)
    assert all(choice.service_nbytes % native.CHECKSUM_NBYTES == 0 for choice in LADDER)


@pytest.mark.parametrize(
    "params, optimizer", [("nvme", "nvme"), ("host", "nvme"), ("nvme", "host"), ("nvme", "device")]
)
def test_the_most_generous_plan_that_fits_is_taken(tmp_path, params, optimizer):
    """Walks down: a budget of exactly the last plan's bytes gives that plan again, one byte less a
    smaller one."""
    units = equal_units(8, 2 * MIB)
    homes = dict(params=params, optimizer=optimizer)
    plan, seen = plan_of(units, config_of(tmp_path, **homes)), []
    assert plan.units_ahead == LADDER[0].units_ahead
    while True:
        nbytes = plan.planned_nbytes(Tier.HOST)
        seen.append(nbytes)
        assert plan_of(units, config_of(tmp_path, host_memory=nbytes, **homes)) == plan
        try:
            plan = plan_of(units, config_of(tmp_path, host_memory=nbytes - 1, **homes))
        except CapacityError as error:
            assert least_of(error) == ("host_memory", min(seen))
            break
        assert plan.planned_nbytes(Tier.HOST) < nbytes
    assert len(seen) >= 4, "the ladder has rungs in between"


def test_gradients_move_to_the_disk_when_the_host_is_too_small_for_them(tmp_path):
    """Gives the host less than the gradients need: their home becomes NVMe, with staging; ample
    memory is the twin."""
    units = equal_units(16, 4 * MIB)
    homes = dict(params="nvme", optimizer="nvme")
    grads = sum(flat.nbytes("grad") for u in units for flat in u.flat_params)
    small = plan_of(units, config_of(tmp_path, host_memory=grads, **homes))
    assert small.tiers["grad"] is Tier.NVME and small.grad_staging_nbytes > 0
    assert plan_of(units, config_of(tmp_path, **homes)).tiers["grad"] is Tier.HOST


def check_least_is_enough(
    folder, units, values: dict, *, held: int | None = None, twin: bool = True
) -> str | None:
    """Plans with ``values``; where that fails, with exactly the named budget (which must succeed)
    and one byte less."""
    try:
        plan = plan_of(units, config_of(folder, **values), held=held)
    except CapacityError as error:
        setting, least = least_of(error)
        tier = {"device_memory": Tier.DEVICE, "host_memory": Tier.HOST, "nvme_capacity": Tier.NVME}[
            setting
        ]
        assert least > values[setting]
        plan = plan_of(units, config_of(folder, **(values | {setting: least})), held=held)
        assert plan.planned_nbytes(tier) <= least
        if twin:
            with pytest.raises(CapacityError) as again:
                plan_of(units, config_of(folder, **(values | {setting: least - 1})), held=held)
            assert least_of(again) == (setting, least)
        return setting
    for tier, key in (
        (Tier.DEVICE, "device_memory"),
        (Tier.HOST, "host_memory"),
        (Tier.NVME, "nvme_capacity"),
    ):
        if key in values:
            assert plan.planned_nbytes(tier) <= values[key]
    return None


@pytest.mark.parametrize("short", ["device_memory", "host_memory", "nvme_capacity"])
@pytest.mark.parametrize("params", HOMES)
@pytest.mark.parametrize("optimizer", HOMES)
def test_the_least_budget_that_is_named_is_the_least_that_works(tmp_path, params, optimizer, short):
    """Gives one tier next to nothing with every pair of homes: the named budget works, one byte
    less does not."""
    units = equal_units(5, 3 * 65536) + [unit("rest", ("fp32", 8192), ("frozen", 4096))]
    failed = check_least_is_enough(
        tmp_path, units, {"params": params, "optimizer": optimizer, short: 100}
    )
    uses = {
        "device_memory": True,
        "host_memory": True,
        "nvme_capacity": "nvme" in (params, optimizer),
    }
    assert failed == (short if uses[short] else None)


@pytest.mark.parametrize("seed", range(60))
def test_a_plan_fits_its_budgets_or_names_the_least_for_fixed_homes(tmp_path, seed):
    """Plans random models within random budgets and fixed homes."""
    print(f"seed {seed}")
    rng = random.Random(1000 + seed)
    units = random_units(rng)
    values = {
        "params": rng.choice(HOMES),
        "optimizer": rng.choice(HOMES),
        "host_memory": rng.randrange(1, 40 * MIB),
    }
    values[rng.choice(["device_memory", "nvme_capacity"])] = rng.randrange(1, 40 * MIB)
    config = {
        key: value for key, value in values.items() if key not in ("device_memory", "nvme_capacity")
    }
    check_least_is_enough(tmp_path, units, config)
    try:
        plan_of(units, config_of(tmp_path, **config))
    except CapacityError:
        return
    check_least_is_enough(tmp_path, units, values)


@pytest.mark.parametrize("seed", range(30))
def test_a_plan_fits_its_budgets_or_names_the_least_for_automatic_homes(tmp_path, seed):
    """Lets the homes be chosen: they depend on the budgets, and the named budget must work all the
    same. (A smaller one may work too, with other homes.)"""
    print(f"seed {seed}")
    rng = random.Random(2000 + seed)
    units = equal_units(
        rng.choice([1, 4, 10, 20]), 4096 * rng.choice([1, 8, 16, 64]), rng.choice(["split", "fp32"])
    )
    total = sum(u.weight_nbytes for u in units)
    host, device = [1000, 64 * 1024, MIB, 2 * total], [total, 2 * total, 4 * total]
    values = {"host_memory": rng.choice(host), "device_memory": rng.choice(device)}
    check_least_is_enough(tmp_path, units, values, twin=False)


def test_a_named_host_budget_works_where_it_changes_the_home_of_the_weights(tmp_path):
    """Ten units of 64 KiB with 1 MiB of device: with the budget that the error names, "auto" may
    choose other homes than it did before, which must not need more than was named."""
    values = {"host_memory": 1000, "device_memory": MIB}
    assert check_least_is_enough(tmp_path, equal_units(10, 32768), values, held=65536, twin=False)


def test_automatic_homes_are_the_fastest_with_room(tmp_path):
    """Shrinks device and host step by step: weights and state move from device to host to NVMe,
    never back."""
    units = equal_units(10, 65536)
    weights = sum(u.weight_nbytes for u in units)
    order = ["device", "host", "nvme"]
    for shrunk in ("device_memory", "host_memory"):
        places = []
        for budget in (200 * weights, 20 * weights, 8 * weights, 4 * weights):
            values = {
                "device_memory": 2 * weights // 5 if shrunk == "host_memory" else AMPLE,
                shrunk: budget,
            }
            plan = plan_of(units, config_of(tmp_path, **values))
            places.append((order.index(plan.tiers["weight"]), order.index(plan.tiers["exp_avg"])))
        assert places == sorted(places), places
        assert places[0] != places[-1]


def test_without_a_folder_nothing_goes_to_the_disk(tmp_path):
    """Plans a model that would need NVMe, without one: automatic homes stay above, and asking for
    it is refused."""
    units = equal_units(10, 65536)
    config = Config(device_memory=AMPLE, host_memory=AMPLE)
    plan = plan_of(units, config)
    assert plan.planned_nbytes(Tier.NVME) == 0
    with pytest.raises(CapacityError) as caught:
        plan_of(
            units, Config(params="host", optimizer="host", device_memory=AMPLE, host_memory=MIB)
        )
    assert least_of(caught)[0] == "host_memory"
    with pytest.raises(ConfigError, match="nvme_paths"):
        Config(params="nvme")


def test_a_capacity_error_shows_its_sum():
    """Reads the message: the budget and every term of the sum; and the bytes that are needed."""
    units = equal_units(4, MIB)
    with pytest.raises(CapacityError) as caught:
        plan_of(
            units, Config(params="host", optimizer="host", device_memory=AMPLE, host_memory="1MiB")
        )
    message = str(caught.value)
    for part in (
        "host_memory is 1.0 MiB",
        "weights 8.0 MiB",
        "optimizer state 40.0 MiB",
        "gradients 8.0 MiB",
    ):
        assert part in message, part
    assert caught.value.needed == dict([least_of(caught)])


@pytest.mark.parametrize(
    "values", [{}, {"host_memory": 1}, {"params": "nvme", "host_memory": 1}], ids=str
)
def test_a_model_without_parameters_is_planned_like_any_other(tmp_path, values):
    """Plans no units at all, with ample memory and with one byte: a plan or a CapacityError."""
    try:
        plan = make_plan([], config_of(tmp_path, **values), held_nbytes=0)
        assert plan.planned_nbytes(Tier.DEVICE) == plan.planned_nbytes(Tier.NVME) == 0
    except CapacityError as error:
        assert values and least_of(error)[0] == "host_memory"


def test_a_frozen_shard_needs_weights_only(tmp_path):
    """Plans the same model frozen and stepped."""
    frozen = plan_of(
        equal_units(4, 65536, "frozen"), config_of(tmp_path, params="nvme", optimizer="nvme")
    )
    stepped = plan_of(
        equal_units(4, 65536, "split"), config_of(tmp_path, params="nvme", optimizer="nvme")
    )
    assert frozen.planned_nbytes(Tier.NVME) == 4 * 2 * 65536
    assert stepped.planned_nbytes(Tier.NVME) == 4 * (2 + 2 + 8) * 65536
    assert frozen.slot_nbytes == 0 < stepped.slot_nbytes


def test_the_device_window_holds_what_is_held_and_one_unit_more(tmp_path):
    """Plans with the least device memory: one byte less than held + the largest unit is refused."""
    units = equal_units(6, 65536)
    size = units[0].weight_nbytes
    homes = dict(params="host", optimizer="host")
    plan = plan_of(units, config_of(tmp_path, device_memory=3 * size, **homes), held=2 * size)
    assert plan.device_window_nbytes == 3 * size
    with pytest.raises(CapacityError) as caught:
        plan_of(units, config_of(tmp_path, device_memory=3 * size - 1, **homes), held=2 * size)
    assert least_of(caught) == ("device_memory", 3 * size)
    ample = plan_of(units, config_of(tmp_path, **homes), held=2 * size)
    assert ample.device_window_nbytes == 6 * size, "more than the whole model is never gathered"


# --- what of an NVMe home is cached on the host ---


def test_what_fits_a_given_host_budget_stays_there(tmp_path):
    """Plans eight units on disk under budgets from the least to ample: what is kept never exceeds
    the budget, grows with it, weights first, and leaves one unit on disk; a budget that was not
    given keeps nothing.
    """
    units = equal_units(8, 65536)

    def plan_with(host_memory):
        return plan_of(
            units, config_of(tmp_path, params="nvme", optimizer="nvme", host_memory=host_memory)
        )

    assert plan_with(None).cached == {}
    try:
        plan_with(1)
    except CapacityError as error:
        least = least_of(error)[1]
    weights, state = [], []
    for spare in range(0, 40 * MIB, MIB // 4):
        plan = plan_with(least + spare)
        assert plan.planned_nbytes(Tier.HOST) <= least + spare
        assert plan.terms[Tier.NVME]["weights"] == 8 * 2 * 65536, "its place on disk stays"
        assert plan.terms[Tier.NVME]["optimizer state"] == 8 * 10 * 65536
        weights.append(len(plan.cached.get("weight", ())))
        state.append(len(plan.cached.get("exp_avg", ())))
        assert (
            plan.cached.get("master") == plan.cached.get("exp_avg") == plan.cached.get("exp_avg_sq")
        )
        # Nothing more of it would have fitted.
        assert weights[-1] == 7 or least + spare - plan.planned_nbytes(Tier.HOST) < 2 * 65536
    assert (weights[-1], state[-1]) == (7, 7)
    assert min(weights) < 7, "the twin: a small budget keeps less"


def test_what_is_kept_is_not_moved_and_changes_no_bit(tmp_path):
    """Trains under the least and under an ample host budget: the same bits, and less traffic, but
    some."""

    def run(host_memory):
        model = transformer(1, blocks=4, dropout=0.0)
        optimizer = adamw(model, 1e-2)
        config = at_home("nvme", "nvme", tmp_path, param_dtype="bf16", host_memory=host_memory)
        if host_memory is None:
            config = with_least(model, optimizer, config)
        model, optimizer = infinity.wrap_model(model, optimizer, config)
        for at in range(3):
            loss_of(model, tokens(at)).backward()
            optimizer.step()
            optimizer.zero_grad()
        state = model.state_dict()
        return state, infinity.stats(model)

    (least, moved), (ample, kept) = run(None), run("256MiB")
    assert differing(least, ample) == []
    for edge in ("nvme->host", "host->nvme"):
        assert 0 < kept.edges[edge].nbytes < moved.edges[edge].nbytes / 2
    assert kept.tiers["host"].peak_nbytes <= kept.tiers["host"].planned_nbytes <= 256 * MIB


def test_gradients_that_autograd_makes_are_planned(tmp_path):
    """Plans two units of which one is most: without a budget its gradient has room of its own;
    within the least one the window makes room for it, but for what is held. Twin: frozen units
    need none."""
    large, small = 512 * 4096, 4096
    sizes = [
        dataclasses.replace(unit(name, ("fp32", numel)), autograd_nbytes=4 * numel)
        for name, numel in (("table", large), ("block", small), ("last", small))
    ]
    term = "gradients in the backward"
    homes = dict(params="host", optimizer="host")
    free = dict.fromkeys(Tier, 1 << 40)

    def device_terms(units, **values):
        config = Config(**homes, host_memory=AMPLE, **values)
        return make_plan(units, config, held_nbytes=4 * large, free=free).terms[Tier.DEVICE]

    assert device_terms(sizes)[term] == 4 * large
    with pytest.raises(CapacityError) as told:
        device_terms(sizes, device_memory=MIB)
    least = int(re.search(r"least that works here is [^(]*\((\d+) bytes\)", str(told.value))[1])
    terms = device_terms(sizes, device_memory=least)
    assert sum(terms.values()) == least
    assert terms["gathered weights"] + terms[term] >= 2 * 4 * large
    with pytest.raises(CapacityError):
        device_terms(sizes, device_memory=least - 1)
    assert device_terms(sizes, device_memory=AMPLE)[term] == 4 * large
    frozen = [dataclasses.replace(each, autograd_nbytes=0) for each in sizes]
    assert term not in device_terms(frozen)
