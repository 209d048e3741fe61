"""ParamUnit: every move between states is in the table or refused, and a refused or failed one
costs nothing.

Words used here:

**verb**: fetch, stage, drop, gather, release; each belongs to some states and to no others.
**settled**: what the unit charges, leases and holds is what its state says.
"""

from __future__ import annotations

from contextlib import nullcontext

import doubles
import pytest
import torch
from doubles import fault_plan
from models import swap_files
from native_arrays import ENGINES, MIB, same_bits, seeded

from infinity import native
from infinity.core.homes.staging import Staging
from infinity.core.homes.store import ArrayStore
from infinity.core.machine.ledger import Ledger
from infinity.core.machine.tiers import Tier
from infinity.core.machine.traffic import Traffic
from infinity.core.params.parameter import ResidentParameter, StoredParameter
from infinity.core.units.flat_param import FlatParam
from infinity.core.units.flat_param_spec import FlatParamSpec
from infinity.core.units.residency import MOVES, Residency
from infinity.core.units.staged_reads import ReadPiece, StagedReads
from infinity.core.units.unit import ParamUnit
from infinity.errors import CorruptionError, InfinityError, StorageError, UsageError

VERBS = ("fetch", "stage", "drop", "gather", "release")
OF_STATE = {  # of a unit at home on NVMe; GATHERING is passed through inside `gather`
    Residency.STORED: {"fetch"},
    Residency.FETCHING: {"stage", "drop"},
    Residency.STAGED: {"drop", "gather"},
    Residency.RESIDENT: {"release"},
}


def spec(dtype: torch.dtype) -> FlatParamSpec:
    return FlatParamSpec(dtype, dtype, native.Master.OWN, dtype, torch.float32, (), stepped=False)


class Home:
    """A store with one unit of an fp32 and a bf16 flat param, and what is needed to move it."""

    def __init__(self, folder, tier: Tier = Tier.NVME, *, dtypes=(torch.float32, torch.bfloat16)):
        generator = seeded(1)
        self.ledger, self.traffic = Ledger(), Traffic()
        paths = [str(folder)] if tier is Tier.NVME else []
        self.store = ArrayStore(paths, self.ledger, self.traffic, service_nbytes=MIB)
        self.values = [torch.randn(3, 5000, generator=generator).to(dtype) for dtype in dtypes]
        flat_params = [
            FlatParam(spec(value.dtype), [torch.nn.Parameter(value.clone())])
            for value in self.values
        ]
        self.unit = ParamUnit(0, "block", flat_params)
        for flat_param in flat_params:
            flat_param.homes.allocate(self.store, {"weight": tier}, "unit block")
        region = native.Region(MIB)
        self.store.open([region], staging=native.PinnedPool(region))
        for flat_param, value in zip(flat_params, self.values):
            flat_param.write_value(self.store, 0, value, version=0)
        self.unit.allocate()
        self.unit.attach()
        self.idle = self.charged()

    def slots(self) -> list[native.Lease]:
        return [
            self.store.staging.pool.try_lease(flat.weight_nbytes) for flat in self.unit.flat_params
        ]

    def do(self, verb: str) -> None:
        if verb == "gather":
            self.unit.start_gather(self.store, self.ledger)
            self.unit.finish_gather(self.store)
        else:
            getattr(self.unit, verb)(*((self.store, self.slots()) if verb == "fetch" else ()))

    def go(self, state: Residency) -> None:
        """Moves the unit from STORED to ``state`` the regular way."""
        way = {
            Residency.STORED: [],
            Residency.FETCHING: ["fetch"],
            Residency.STAGED: ["fetch", "stage"],
            Residency.RESIDENT: ["fetch", "stage", "gather"],
        }
        for verb in way[state]:
            self.do(verb)
        assert self.unit.residency is state

    def charged(self) -> int:
        return self.ledger.accounts[Tier.DEVICE].charged_nbytes

    def check_settled(self) -> None:
        """What is charged, leased and held is what the unit's state says."""
        state, nbytes = self.unit.residency, self.unit.weight_nbytes
        resident = state is Residency.RESIDENT
        assert self.charged() - self.idle == (nbytes if resident else 0), "device bytes charged"
        staged = nbytes if state in (Residency.FETCHING, Residency.STAGED) else 0
        assert self.store.staging.pool.leased_nbytes == staged, "staging bytes leased"
        held = sum(flat.untyped_storage().nbytes() for flat in self.unit.buffers.flats)
        assert held == (nbytes if resident else 0), "storage"

    def check_values(self) -> None:
        """The resident unit has the bits that were stored."""
        for flat_param, flat, value in zip(
            self.unit.flat_params, self.unit.buffers.flats, self.values
        ):
            assert same_bits(flat_param.layout.placements[0].view(flat).contiguous(), value)


@pytest.fixture(params=ENGINES)
def kind(request, monkeypatch) -> str:
    monkeypatch.setenv("INFINITY_IO", request.param)
    return request.param


# --- legal moves ---


def test_a_unit_goes_round_and_brings_its_bits(tmp_path, kind):
    """Takes the regular way three times; in every state exactly what it costs is charged, leased
    and held."""
    home = Home(tmp_path)
    storages = [flat.untyped_storage()._cdata for flat in home.unit.buffers.flats]
    home.check_settled()
    for _ in range(3):
        for verb in ("fetch", "stage", "gather"):
            home.do(verb)
            home.check_settled()
        home.check_values()
        home.do("release")
        assert home.unit.residency is Residency.STORED
        home.check_settled()
    assert storages == [flat.untyped_storage()._cdata for flat in home.unit.buffers.flats], (
        "a storage was replaced"
    )


@pytest.mark.parametrize(
    "state", [Residency.FETCHING, Residency.STAGED], ids=lambda state: state.name
)
def test_a_unit_on_its_way_can_be_dropped_and_fetched_again(tmp_path, state):
    """Drops the bytes unused, as a full staging pool asks for, and comes back."""
    home = Home(tmp_path)
    home.go(state)
    home.do("drop")
    assert home.unit.residency is Residency.STORED
    home.check_settled()
    home.go(Residency.RESIDENT)
    home.check_values()


def test_a_unit_at_home_in_memory_is_gathered_without_staging(tmp_path):
    """Gathers from STORED, twice; no slot is leased."""
    home = Home(tmp_path, Tier.HOST)
    for _ in range(2):
        home.do("gather")
        assert home.unit.residency is Residency.RESIDENT
        home.check_settled()
        home.check_values()
        home.do("release")
        home.check_settled()
    assert home.store.staging.pool.peak_nbytes == 0


def test_a_unit_at_home_on_the_device_is_resident_always(tmp_path):
    """Attaches a unit whose arrays are the device's own: it stays, and charges nothing twice."""
    home = Home(tmp_path, Tier.DEVICE)
    assert home.unit.computes_at_home and home.unit.residency is Residency.RESIDENT
    assert home.charged() == home.unit.weight_nbytes
    home.check_values()


def test_parameters_keep_identity_and_change_class_with_exposure(tmp_path):
    """Exposes and conceals a resident unit: the objects stay, their class says who may touch
    them."""
    home = Home(tmp_path)
    params = [param for flat in home.unit.flat_params for param in flat.params]
    assert all(type(param) is StoredParameter for param in params)
    home.go(Residency.RESIDENT)
    home.unit.exposure.begin()
    assert all(type(param) is ResidentParameter for param in params)
    assert all(same_bits(param.detach(), value) for param, value in zip(params, home.values))
    home.unit.exposure.end()
    assert all(type(param) is StoredParameter for param in params)
    assert params == [param for flat in home.unit.flat_params for param in flat.params]


# --- illegal moves ---


def test_the_table_names_every_state_and_the_verbs_follow_it():
    """Reads MOVES: every state is there, is reached, and is left."""
    assert set(MOVES) == set(Residency)
    reached = set().union(*MOVES.values())
    assert reached == set(Residency)
    assert all(MOVES.values())


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("state", OF_STATE, ids=lambda state: state.name)
def test_a_move_outside_the_table_raises_with_the_history_and_costs_nothing(tmp_path, state, verb):
    """Tries every verb in every state: one that belongs there works, any other raises UsageError
    and the unit is as it was, with nothing charged, leased, emptied or lost."""
    home = Home(tmp_path)
    home.go(state)
    if verb in OF_STATE[state]:
        home.do(verb)
        home.check_settled()
        return
    slots = (
        home.slots() if verb == "fetch" else []
    )  # held here, so that the unit's own leases can be counted
    with pytest.raises(UsageError) as caught:
        home.unit.fetch(home.store, slots) if verb == "fetch" else home.do(verb)
    for slot in slots:
        slot.release()
    message = str(caught.value)
    assert "unit block" in message and state.name in message
    if state is not Residency.STORED:
        assert "STORED->FETCHING" in message, "the history is missing"
    assert home.unit.residency is state
    home.check_settled()
    way_on = {
        Residency.STORED: ["fetch", "stage", "gather"],
        Residency.FETCHING: ["stage", "gather"],
        Residency.STAGED: ["gather"],
        Residency.RESIDENT: [],
    }
    for each in way_on[state]:
        home.do(each)
    home.check_values()


def test_the_history_is_the_last_few_moves(tmp_path):
    """Goes round ten times and reads the message: the latest moves, and not all of them."""
    home = Home(tmp_path)
    for _ in range(10):
        home.go(Residency.STAGED)
        home.do("drop")
    with pytest.raises(UsageError) as caught:
        home.do("stage")
    moves = str(caught.value).split("last moves: ")[1].split(", ")
    assert moves[-3:] == ["STORED->FETCHING", "FETCHING->STAGED", "STAGED->STORED"]
    assert len(moves) <= 10


# --- moves that fail ---


def test_a_refused_read_leaves_the_unit_at_home(tmp_path, kind):
    """Makes the reads fail with EIO: `stage` raises it, the slots come back, the unit is STORED and
    may try again."""
    home = Home(tmp_path)
    # An engine's faults are fixed when it is made, so for the fetch the store's is another one.
    broken = native.IoEngine(kind=kind, layer=doubles.layer(fault_plan(eio=1.0)))
    broken.create_file(str(tmp_path / "broken"), MIB)
    whole = home.store.staging
    home.store.staging = Staging(broken, home.store.device, checksums=True, sampled=False)
    home.store.staging.open(whole.pool)
    home.do("fetch")
    with pytest.raises(StorageError):
        home.do("stage")
    assert home.unit.residency is Residency.STORED
    home.check_settled()
    home.store.staging = whole
    home.go(Residency.RESIDENT)
    home.check_values()


def test_a_read_that_cannot_be_started_leaves_the_unit_at_home(tmp_path, monkeypatch):
    """Method: the engine takes the first of two reads, and refuses the second. A unit that looked
    fetched would be gathered with the bytes of the first alone. Twin: the next try brings all."""
    home = Home(tmp_path)
    start, started = home.store.staging.fetch, []

    def refuse(*args, **how):
        if started:
            raise StorageError(24, "read", "/swap")
        started.append(start(*args, **how))
        return started[0]

    with monkeypatch.context() as patch:
        patch.setattr(home.store.staging, "fetch", refuse)
        with pytest.raises(StorageError):
            home.do("fetch")
    assert started[0].done and home.unit.residency is Residency.STORED
    home.check_settled()
    home.go(Residency.RESIDENT)
    home.check_values()


def test_a_changed_block_is_found_before_it_is_used(tmp_path, kind):
    """Flips a bit of the swap file: staging raises, nothing is charged, the parameters stay without
    storage. A read that is dropped says nothing; flipped back, the unit is gathered."""
    home = Home(tmp_path)
    extent = home.unit.flat_params[1].weight.extent
    swap = swap_files(tmp_path)[0]

    def flip() -> None:
        with open(swap, "r+b") as file:
            file.seek(extent.offset + 100)
            byte = file.read(1)[0]
            file.seek(extent.offset + 100)
            file.write(bytes([byte ^ 1]))

    flip()
    for move in ("stage", "drop"):
        home.go(Residency.FETCHING)
        with pytest.raises(CorruptionError) if move == "stage" else nullcontext():
            home.do(move)
        assert home.unit.residency is Residency.STORED
        home.check_settled()
    flip()
    home.go(Residency.STAGED)
    home.do("gather")


def test_a_device_budget_that_is_full_refuses_the_gather_and_keeps_the_bytes_staged(tmp_path):
    """Gathers one byte over the device's budget, then within it."""
    home = Home(tmp_path)
    account = home.ledger.accounts[Tier.DEVICE]
    account.budget_nbytes = home.unit.weight_nbytes - 1
    home.go(Residency.STAGED)
    with pytest.raises(InfinityError, match="unit block"):
        home.do("gather")
    assert home.unit.residency is Residency.STAGED
    home.check_settled()
    account.budget_nbytes += 1
    home.do("gather")
    home.check_values()


class Late:
    """A read that is under way until it is waited for; the first wait may fail with it, or be
    interrupted before."""

    def __init__(self, error: BaseException | None = None):
        self.error, self.over = error, False

    def wait(self) -> None:
        error, self.error = self.error, None
        self.over = not isinstance(error, KeyboardInterrupt)
        if error:
            raise error


@pytest.mark.parametrize(
    "kind, said",
    [(StorageError, (5, "read", "/swap")), (KeyboardInterrupt, ())],
    ids=["EIO", "Ctrl-C"],
)
def test_slots_are_given_back_only_when_no_read_is_under_way_into_them(tmp_path, kind, said):
    """Fails or interrupts the first of two reads: the second may still be writing into its slot,
    and after Ctrl-C the first too. Nobody else may get such memory."""
    home = Home(tmp_path)
    home.do("fetch")
    for piece in home.unit._reads.pieces:
        piece.read.wait()
    reads, under_way_at_release = [Late(kind(*said)), Late()], []

    class Slot:
        def __init__(self, read: Late):
            self.read = read

        def release(self) -> None:
            under_way_at_release.append(not self.read.over)

    kept = home.unit._reads.slots
    home.unit._reads = StagedReads([Slot(read) for read in reads])
    home.unit._reads.pieces = [ReadPiece(i, 0, read) for i, read in enumerate(reads)]
    with pytest.raises(kind):
        home.do("stage")
    assert kept and not any(under_way_at_release)
