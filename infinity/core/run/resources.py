"""Resources: allocates the memory and disk space that stay for the whole job: homes, staging,
slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ... import native
from ...choices import SAMPLED
from ...config import Config
from ...errors import CapacityError
from ...ranks.collectives import Collectives
from ..homes.store import ArrayStore
from ..homes.swap_space import SUMS_NBYTES
from ..machine import limits, processors
from ..machine.device import Device
from ..machine.ledger import Ledger
from ..machine.tiers import Tier
from ..plan.memory_plan import BUFFERS, LADDER, MemoryPlan
from ..plan.memory_terms import CHECKSUMS, GRADS_AT_ONCE, OF_LATER_ARRAYS, staged_gradients
from ..plan.unit_sizes import UnitSize
from ..step.slots import optimizer_slot_nbytes
from ..units.unit import ParamUnit, flat_params_of
from .activation_store import ActivationStore

FRACTION_FOR_SAVED = 0.8  # of what a card can give; the rest is for temporaries of its operations


class Resources:
    """The arrays of all units, and the memory that transfers and steps share.

    store
        Of the arrays. It reports a failure to the other ranks.
    """

    def __init__(
        self,
        config: Config,
        plan: MemoryPlan,
        ledger: Ledger,
        device: Device,
        collectives: Collectives,
    ):
        """Allocates nothing yet: see :meth:`allocate`."""
        self._config, self._plan, ranks = config, plan, collectives.ranks
        on_disk = Tier.NVME in plan.tiers.values() or config.activations == "nvme"
        self.store = ArrayStore(
            config.nvme_paths if on_disk else (),
            ledger,
            collectives.traffic,
            service_nbytes=plan.service_nbytes,
            checksums=bool(config.checksums),
            sampled=config.checksums == SAMPLED,
            layer=native.disks.state_layer(),
            device=device,
            rank=ranks.world_rank % ranks.local_size,
            ranks=ranks.local_size,
            on_failure=collectives.fail,
        )
        self._charges: dict[tuple[Tier, str], native.Charge] = {}
        self._regions: dict[str, native.Region] = {}

    def allocate(self, units: Sequence[ParamUnit]) -> None:
        """Allocates all of it. Raises CapacityError or StorageError; what was allocated by then is
        freed with the store."""
        plan, store = self._plan, self.store
        self._host_left_nbytes = limits.for_the_engine(limits.memory_left())
        if CHECKSUMS in plan.terms[Tier.NVME]:
            store.space.sums = native.make_sum_cache(SUMS_NBYTES)
        store.space.covered_nbytes = plan.terms[Tier.HOST].get(OF_LATER_ARRAYS, 0)
        for unit in units:
            tiers, cached = plan.tiers_of(unit.index), plan.cached_of(unit.index)
            for flat_param in unit.flat_params:
                flat_param.homes.allocate(store, tiers, f"unit {unit.name}", cached=cached)
        weights = self._pool(plan.staging_nbytes, "staged weights")
        self.grad_staging = self._pool(plan.grad_staging_nbytes, "staged gradients")
        self.activation_staging = self._pool(plan.activation_staging_nbytes, "staged activations")
        # Keeps the memory alive: the updater has only its address.
        self._slots = self._region(plan.slot_count * plan.slot_nbytes, "optimizer slots")
        of_device = "gradients on their way", "optimizer slots", "staged weights"
        for tier, terms in plan.terms.items():
            for term in (*of_device * (tier is Tier.DEVICE), CHECKSUMS, OF_LATER_ARRAYS, BUFFERS):
                self._charge(tier, terms.get(term, 0), term)
        store.open(list(self._regions.values()), staging=weights, backend=plan.staging_backend)

    def _charge(self, tier: Tier, nbytes: int, term: str) -> None:
        self._charges[tier, term] = self.store.ledger.reserve(tier, nbytes, term)

    def _region(self, nbytes: int, term: str) -> native.Region | None:
        if not nbytes:
            return None
        self._charge(Tier.HOST, nbytes, term)
        self._regions[term] = self.store.allocator.make_region(
            nbytes, copied=term != "optimizer slots"
        )
        return self._regions[term]

    def _pool(self, nbytes: int, term: str) -> native.PinnedPool | None:
        region = self._region(nbytes, term)
        return native.PinnedPool(region) if region is not None else None

    def refit(self, sizes: Sequence[UnitSize]) -> bool:
        """Enlarges optimizer slots and gradient staging to the best size for ``sizes`` that fits.
        Returns whether the slots are new, which then need a new updater. Only while nothing is
        stepped and no gradient is in staging.

        Raises CapacityError, with nothing changed, if not even the smallest size fits.
        """
        flat_params, plan = flat_params_of(sizes), self._plan
        whole, pieces = (staged_gradients(sizes, in_pieces=region) for region in (False, True))
        wanted = (
            [sum(whole[:GRADS_AT_ONCE]), sum(whole[:1]), sum(pieces[:1])]
            if plan.tiers["grad"] is Tier.NVME
            else [0]
        )
        before = dict(self._charges), dict(self._regions)  # charged until they are let go
        count = plan.slot_count
        chunks = [
            count * optimizer_slot_nbytes(flat_params, plan.tiers, rung.chunk) for rung in LADDER
        ]
        try:
            staging = self._larger(wanted, plan.grad_staging_nbytes, "staged gradients")
            slots = self._larger(chunks, count * plan.slot_nbytes, "optimizer slots")
            if staging or slots:
                self.store.register(self._regions.values())
        except BaseException:  # an interrupt as well: it would be called again
            self._charges, self._regions = before
            raise
        if staging is not None:
            self.grad_staging = native.PinnedPool(staging)
            self._plan = replace(self._plan, grad_staging_nbytes=staging.nbytes)
        if slots is not None:
            self._slots, self._plan = slots, replace(self._plan, slot_nbytes=slots.nbytes // count)
        planned = sum(region.nbytes for region in (staging, slots) if region)
        self.store.ledger.accounts[Tier.HOST].planned_nbytes += planned
        return slots is not None

    def _larger(self, wanted: Sequence[int], nbytes: int, term: str) -> native.Region | None:
        """Allocates the first size in ``wanted`` that fits, largest first. Returns None if the
        present ``nbytes`` are as good."""
        for size in wanted:
            if size <= nbytes:
                return None
            try:
                return self._region(size, term)
            except CapacityError:
                if size == wanted[-1]:
                    raise
        return None

    def make_updater(self) -> native.Updater:
        """Makes the updater, which steps flat params on the CPU in threads of its own."""
        slots, plan = self._slots, self._plan
        return native.Updater(
            self.store.io,
            slots.address if slots else 0,
            slots.nbytes if slots else 0,
            plan.slot_count if slots else 0,
            self._config.update_threads or processors.for_updates(torch.get_num_threads()),
            owner=slots,
            checksums=bool(self._config.checksums),
            measured=self._config.update_threads is None,
        )

    def make_activations(self, *, placed: bool, local_size: int = 1) -> ActivationStore | None:
        """Makes the store of activations, or returns None if torch keeps them. ``placed``: an
        extension places what blocks save; ``local_size``: ranks on this machine."""
        home = self._config.activations
        most = None  # bytes of host memory: without a budget, what the plan leaves of what was free
        if self._config.host_memory is None:
            planned = self._plan.planned_nbytes(Tier.HOST)
            if self.store.device.is_host:
                of_device = self._plan.planned_nbytes(Tier.DEVICE)
                planned += max(of_device, self._config.device_memory or 0)
            most = max(0, self._host_left_nbytes // local_size - planned)
        if home in ("host", "nvme"):
            return ActivationStore(
                self.store,
                Tier(home),
                self.activation_staging,
                spare_nbytes=None,
                most_nbytes=most if home == "host" else None,
            )
        spare = self._spare_for_activations(placed) if home == "auto" else None
        if spare is None:
            return None
        return ActivationStore(
            self.store, Tier.HOST, None, spare_nbytes=max(0, spare), most_nbytes=most
        )

    def _spare_for_activations(self, placed: bool) -> int | None:
        """Returns the bytes that the plan leaves to activations on the device; None: torch keeps
        all that is saved. On a GPU that is of what the card can give, for a ``device_memory`` there
        is the engine's alone."""
        device, config = self.store.device, self._config
        planned = self._plan.planned_nbytes(Tier.DEVICE)
        if device.is_host:
            return None if config.device_memory is None else config.device_memory - planned
        if not placed or device.memory is None:
            return None
        left = device.memory.left_nbytes(several_ranks=False)
        # The homes of the plan are taken already.
        coming = planned - self.store.ledger.accounts[Tier.DEVICE].charged_nbytes
        return None if left is None else int(FRACTION_FOR_SAVED * (left - coming))
