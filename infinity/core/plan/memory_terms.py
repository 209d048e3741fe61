"""Memory terms: adds up each part's bytes per tier, for given homes and buffer sizes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ... import native
from ...config import Config
from ..homes.staging import ThroughHost
from ..homes.swap_space import GROWTH_NBYTES, SUMS_NBYTES
from ..machine.device import Device
from ..machine.sizes import round_up
from ..machine.tiers import Tier
from ..seams import kinds
from ..step.device_slots import DEVICE_SLOTS
from ..step.slots import needed_device_slot_nbytes, optimizer_slot_nbytes
from ..units.flat_param_spec import ARRAYS, home_of
from ..units.staged_reads import PIECE_NBYTES
from .memory_plan import BUFFERS, GRADIENTS, MemoryPlan, Rung, term_of
from .unit_sizes import MIN_CHUNK, UnitSize, bucket_numel

# Staged: one accumulates, one is written, one is read for a parameter used twice.
GRADS_AT_ONCE = 3
ACTIVATION_SLOTS = 8  # four transfers at once, of up to two slots each
# Copies of the largest gradient: being read, being converted, being added to the one at home.
GRADS_IN_FLIGHT = 3
SAVE = "a save beside the training"  # the name of its bytes in plans
TO_BE_AVERAGED, OF_OTHER_RANKS = "gradients to be averaged", "gradients of other ranks"
SAVE_NBYTES = 20 * 1024 * 1024  # the least
CHECKSUMS, OF_LATER_ARRAYS = "checksums", "checksums of later arrays"
FLOAT32_NBYTES = 4


def staged_gradients(units: Sequence[UnitSize], *, in_pieces: bool) -> list[int]:
    """Returns the bytes of each flat param's gradient that pass at once, largest first. Of what is
    never whole on the device that is a piece, or of all (``in_pieces``)."""
    return sorted(
        (
            min(flat.nbytes("grad"), PIECE_NBYTES)
            if in_pieces or unit.at_once_nbytes
            else flat.nbytes("grad")
            for unit in units
            for flat in unit.flat_params
        ),
        reverse=True,
    )


class MemoryTerms:
    """The sum of a plan, with a reason beside each term."""

    def __init__(
        self,
        units: Sequence[UnitSize],
        config: Config,
        home_tiers: tuple[Tier, Tier, Tier],
        rung: Rung,
        held_nbytes: int,
        device: Device,
        *,
        backend: type[ThroughHost] = ThroughHost,
        buffers_nbytes: int = 0,
        reuses: bool = False,
    ):
        """``home_tiers``: of weights, optimizer state and gradients. ``held_nbytes``: the most
        weight bytes that a forward holds at once. ``backend``: of staged weights.
        ``buffers_nbytes``: of the model's buffers. ``reuses``: see :func:`.plan.make_plan`."""
        self._backend, self._buffers_nbytes, self._reuses = backend, buffers_nbytes, reuses
        self._units, self._config, self._rung, self._held, self._device = (
            units,
            config,
            rung,
            held_nbytes,
            device,
        )
        self._params, self._optimizer, self._grad = home_tiers
        self._flat_params = [flat for unit in units for flat in unit.flat_params]
        self._stepped = [flat for flat in self._flat_params if flat.spec.stepped]
        self._whole_units = [unit for unit in units if not unit.at_once_nbytes]
        self._whole_flats = [flat for unit in self._whole_units for flat in unit.flat_params]
        self.tiers = {name: home_of(name, *home_tiers) for name in ARRAYS}
        self.terms: dict[Tier, dict[str, int]] = {tier: {} for tier in Tier}

    def plan(self) -> MemoryPlan:
        """Adds up all terms to a plan. Call once."""
        for name, tier in self.tiers.items():
            self._add(
                tier,
                term_of(name),
                sum(flat.nbytes(name) for flat in self._flat_params),
            )
        staging, grads = self._staging(), self._grad_staging()
        activations = 0
        if self._config.activations == "nvme":
            slot_nbytes = max(self._rung.service_nbytes, native.CHECKSUM_NBYTES)
            activations = self._add(Tier.HOST, "staged activations", ACTIVATION_SLOTS * slot_nbytes)
        backend = self._backend if staging else ThroughHost
        self._add(Tier.DEVICE, "staged weights", backend.device_nbytes(staging))
        slot = optimizer_slot_nbytes(self._flat_params, self.tiers, self._rung.chunk)
        self._add(Tier.HOST, "optimizer slots", self._rung.slot_count * slot)
        service = self._service()
        # They stay on the compute device. If the CPU computes that is the host, unless only the
        # device's budget was given.
        only_device = self._config.host_memory is None and self._config.device_memory is not None
        at = Tier.DEVICE if only_device or not self._device.is_host else Tier.HOST
        self._add(at, BUFFERS, self._buffers_nbytes)
        later = GROWTH_NBYTES * bool(activations)
        for kind in kinds():
            for term in kind.terms(self._config, self._units, self._device):
                later += self._add(*term) * (term.tier is Tier.NVME)
        self._add(Tier.HOST, OF_LATER_ARRAYS, native.sums_nbytes(later))
        landing, device_slot = self._device_step()
        in_buckets = self._add_ranks()
        window, autograd = self._window()  # take the rest of a budget
        return MemoryPlan(
            tiers=self.tiers,
            units_ahead=self._rung.units_ahead,
            staging_nbytes=staging,
            grad_staging_nbytes=grads,
            activation_staging_nbytes=activations,
            slot_count=self._rung.slot_count,
            slot_nbytes=slot,
            service_nbytes=service,
            device_window_nbytes=window,
            in_buckets=in_buckets,
            autograd_nbytes=autograd,
            landing_nbytes=landing,
            staging_backend=backend,
            device_slot_nbytes=device_slot,
            terms=self.terms,
        )

    def _add(self, tier: Tier, term: str, nbytes: int) -> int:
        if nbytes:
            self.terms[tier][term] = self.terms[tier].get(term, 0) + nbytes
        return nbytes

    def _staging(self) -> int:
        if self._params is not Tier.NVME:
            return 0
        ahead, shards = self._rung.units_ahead, (unit.shard_nbytes for unit in self._whole_units)
        staged = sorted(nbytes for nbytes in shards if ahead or nbytes <= PIECE_NBYTES)
        return self._add(Tier.HOST, "staged weights", sum(staged[~ahead:]))

    def _grad_staging(self) -> int:
        if self._grad is not Tier.NVME:
            return 0
        nbytes = staged_gradients(self._units, in_pieces=not self._rung.units_ahead)
        del nbytes[1 if self._rung.chunk == MIN_CHUNK else GRADS_AT_ONCE :]
        return self._add(Tier.HOST, "staged gradients", sum(nbytes))

    def _service(self) -> int:
        on_disk = sum(self.terms[Tier.NVME].values())
        # Each may be on disk, with a partial last block.
        arrays = sum(flat.nbytes(name) > 0 for flat in self._flat_params for name in self.tiers)
        sums = native.sums_nbytes(on_disk, arrays)
        if sums > SUMS_NBYTES and self._rung.sums_on_disk and self._config.checksums:
            tables = native.sum_table_nbytes(on_disk, arrays)
            self._add(Tier.NVME, CHECKSUMS, tables)
            sums = SUMS_NBYTES + native.digests_nbytes(tables)
        service = (
            self._rung.service_nbytes if Tier.NVME in self.tiers.values() else native.BLOCK_NBYTES
        )
        self._add(Tier.HOST, CHECKSUMS, sums)
        return self._add(Tier.HOST, "service buffer", service)

    def _add_ranks(self) -> bool:
        """Adds the terms that only several ranks need. Returns whether a gradient is averaged in
        buckets: if a budget has no room for whole ones."""
        averaged = [flat for flat in self._whole_flats if flat.spec.stepped and flat.is_averaged]
        if not averaged:
            return False
        at_home = any(flat.whole_grad for flat in self._flat_params)
        whole = max(flat.whole_nbytes("grad") for flat in averaged)
        # Filled while weights of the same units are held; one waits.
        ratio = max(flat.spec.grad_dtype.itemsize / flat.spec.dtype.itemsize for flat in averaged)
        filled = round_up(int(self._held * ratio), native.BLOCK_NBYTES)
        # As received, and their sum in fp32, also of each replica; plus a whole gradient whose
        # home is not this memory.
        shards = [flat.numel // flat.shards for flat in averaged]
        replicas = max(flat.replicas for flat in averaged)
        of_replicas = (replicas + 1) * (replicas > 1) * FLOAT32_NBYTES
        at_device = whole * (not self._device.is_host) * at_home
        # All wait until a pass of several micro-batches ends; else one more whole one is reduced.
        of_all = sum(flat.whole_nbytes("grad") for flat in averaged)
        waiting = of_all if self._reuses else 2 * whole + filled
        others = 2 * whole + of_replicas * max(shards) + at_device
        available = int(self._config.device_memory or sys.maxsize) - self._least_window()
        available -= sum(self.terms[Tier.DEVICE].values())
        in_buckets = 2 * PIECE_NBYTES < 3 * whole and available < waiting * (not at_home) + others
        if in_buckets:
            buckets = [
                bucket_numel(flat.shards, flat.spec.grad_dtype.itemsize) for flat in averaged
            ]
            others = 2 * PIECE_NBYTES + of_replicas * max(buckets) + at_device
            waiting -= whole * (not self._reuses)
        self._add(Tier.DEVICE, TO_BE_AVERAGED, waiting * (not at_home))
        self._add(Tier.DEVICE, OF_OTHER_RANKS, others)
        return in_buckets

    def _least_window(self) -> int:
        """Returns the weights gathered at once: the most held, plus one unit. In the backward the
        next unit arrives while the last one's gradients are still accumulated."""
        sharded = any(unit.is_sharded for unit in self._units)
        if self._params is Tier.DEVICE and not sharded:
            return 0
        sizes = [unit.weight_nbytes for unit in self._whole_units]
        largest, total = max(sizes, default=0), sum(sizes)
        least = self._held + largest
        if self._config.device_memory is None:
            least += self._device.overlaps * largest  # one more is being copied meanwhile
        return total if sharded and self._config.shard != "parameters" else min(least, total)

    def _window(self) -> tuple[int, int]:
        """Adds the weights gathered at once, and the gradients that autograd makes of a unit.
        Within the least budget the window makes room for them, as far as it is larger than what is
        held; the rest of a larger one is theirs first, then for more weights."""
        config, window, autograd = self._config, self._least_window(), self._autograd_nbytes()
        if config.device_memory is not None:
            available = int(config.device_memory) - sum(self.terms[Tier.DEVICE].values())
            averaged = any(unit.is_averaged for unit in self._units)  # ranks evict nothing
            least = max(0, autograd - max(0, window - self._held)) if not averaged else autograd
            autograd = max(least, min(autograd, available - window))
            # With params="auto", units get a home in the rest instead.
            if window and config.params != "auto":
                total = sum(unit.weight_nbytes for unit in self._whole_units)
                window = min(total, max(window, available - autograd))
        self._add(Tier.DEVICE, "gathered weights", window)
        self._add(Tier.DEVICE, GRADIENTS, autograd)
        return window, autograd

    def _autograd_nbytes(self) -> int:
        """Counts the gradients that autograd makes of a unit before they land. An accelerator's are
        counted as gradients on their way. Several ranks have room for averages, which a backward
        does not need while autograd adds up a tied weight's."""
        if not self._device.is_host:
            return 0
        most = max((unit.autograd_nbytes for unit in self._units), default=0)
        of_device = self.terms[Tier.DEVICE]
        most -= sum(of_device.get(term, 0) for term in (TO_BE_AVERAGED, OF_OTHER_RANKS))
        return round_up(max(0, most), native.BLOCK_NBYTES)

    def _device_step(self) -> tuple[int, int]:
        """Adds in-flight gradients of a device whose memory the CPU cannot access, and slots for
        state that it steps."""
        landing = device_slot = 0
        if not self._device.is_host and self._stepped:
            landing = max((flat.nbytes("grad") for flat in self._whole_flats), default=0)
            # Those of some rows land before the next ones are made.
            rows = [unit.autograd_nbytes for unit in self._units if unit.at_once_nbytes]
            on_their_way = max(GRADS_IN_FLIGHT * landing, *rows, 0)
            self._add(Tier.DEVICE, "gradients on their way", on_their_way)
            tiers = {self._params, self._optimizer, self._grad}
            if Tier.DEVICE in tiers and len(tiers) > 1:  # the device steps it, and the others pass
                device_slot = needed_device_slot_nbytes(self._units)
                self._add(Tier.DEVICE, "optimizer slots", DEVICE_SLOTS * device_slot)
        return landing, device_slot
