"""KeptArrays: arrays that a feature keeps beside flat params' own: an average, a momentum.

kept     one array for each of some flat params: this rank's shard, where the master is
keeper   the extension that keeps them: a checkpoint asks it what to tell with them
passing  arrays over memory of the keeper's own, which only a checkpoint reads and writes

Kept arrays are planned, charged, parked, saved, loaded and freed with the flat param's own: their
home is :attr:`HomeArrays.kept`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ... import native
from ...errors import InternalError
from ..homes.arrays import StateArray
from ..homes.store import ArrayStore
from ..machine.sizes import round_up
from ..machine.tiers import Tier
from ..seams import Extension
from .flat_param import FlatParam
from .flat_param_spec import ARRAYS
from .handle import ParamHandle
from .pieces import PIECE_NUMEL, Piece
from .unit import ParamUnit, flat_params_of

NAME = re.compile("[a-z][a-z0-9_]{0,63}")
UNIT = "unit"  # what a checkpoint's files of the flat params' own arrays are called


class Kept:
    """One kept array for each of :attr:`flat_params`. Used inside a use of the engine."""

    def __init__(
        self,
        kept_arrays: KeptArrays,
        name: str,
        dtype: torch.dtype | None,
        keeper: Extension | None,
        saved_as: str,
    ):
        self.name, self.keeper, self.saved_as = name, keeper, saved_as
        self._kept_arrays, self._dtype = kept_arrays, dtype
        self.flat_params: dict[FlatParam, None] = {}  # in order
        self.passing: dict[FlatParam, StateArray] = {}

    def array_of(self, flat_param: FlatParam) -> StateArray:
        """Returns the array beside ``flat_param``."""
        return self.passing.get(flat_param) or flat_param.homes.kept[self.name]

    def dtype_of(self, flat_param: FlatParam) -> torch.dtype:
        """Returns the dtype of the array beside ``flat_param``: by default that of its value."""
        if self._dtype is not None:
            return self._dtype
        return torch.float32 if "master" in flat_param.arrays else flat_param.spec.dtype

    def has(self, handle: ParamHandle) -> bool:
        """Tells whether a parameter has a part of these arrays."""
        return handle.flat_param in self.passing or handle.flat_param in self.flat_params

    def read(self, piece: Piece) -> torch.Tensor:
        """Reads the elements of a piece into a CPU tensor of its own. Blocks on the disk."""
        return self._kept_arrays.store.read(self.array_of(piece.flat_param), piece.begin, piece.end)

    def read_whole(self, handle: ParamHandle) -> torch.Tensor:
        """Reads a parameter's elements, flat, in the order of its storage. Every rank calls
        this."""
        flat_param = handle.flat_param
        return flat_param.parts.read(
            self._kept_arrays.store, "weight", handle.index, array=self.array_of(flat_param)
        )

    def write_own(self, handle: ParamHandle, values: torch.Tensor) -> None:
        """Writes this rank's elements of a parameter, flat."""
        begin, end = handle.flat_param.layout.part_at_home("weight", handle.index)
        if begin < end:
            self._kept_arrays.write_array(self.array_of(handle.flat_param), begin, values)

    def free(self) -> None:
        """Frees the memory. Idempotent."""
        self._kept_arrays.free(self)


class KeptArrays:
    """All kept arrays of one job. Used from the thread that runs the model.

    ``planned``: has the ``plan``, and ``add`` for bytes of a tier under a name.
    """

    def __init__(
        self,
        store: ArrayStore,
        units: Sequence[ParamUnit],
        version: Callable[[], int],
        planned: Any,
    ):
        self.store, self._units, self._version, self._planned = store, units, version, planned
        self._kept: list[Kept] = []

    def keep(
        self,
        name: str,
        dtype: torch.dtype | None = None,
        flat_params: Iterable[FlatParam] | None = None,
        *,
        keeper: Extension | None = None,
        saved_as: str | None = None,
        purpose: str | None = None,
        otherwise: Tier | None = None,
    ) -> Kept:
        """Allocates an array of ``dtype`` beside each of ``flat_params``, zeroed, where its master
        is, or its weight.

        name
            Of the arrays in the plan, in a checkpoint, and in :meth:`write`. A
            :class:`~infinity.core.seams.Term` of that name was these arrays.
        dtype
            None: fp32 beside masters, else the parameters' own.
        flat_params
            None: all that an optimizer steps.
        keeper
            Its ``describe``, ``expect`` and ``resume`` go with the arrays through checkpoints;
            ``job.remove`` of it frees them.
        saved_as
            What a checkpoint's files of the arrays are called; None: ``name``.
        what
            Names all of them in the error; None: ``name``.
        otherwise
            The tier that is taken where that one has no room.

        Raises CapacityError without room, with nothing changed; InternalError for names that are
        taken, or that no file can have.
        """
        saved_as = saved_as or name
        keepers = {kept.saved_as: kept.keeper for kept in self._kept}
        # Those of arrays and terms of the engine's own
        names = {*ARRAYS, "weights", "gradients", "buffers", *(kept.name for kept in self._kept)}
        if name in names or saved_as == UNIT or keepers.get(saved_as, keeper) is not keeper:
            raise InternalError(f"other arrays are called {name!r}, saved as {saved_as!r}")
        if not (NAME.fullmatch(name) and NAME.fullmatch(saved_as)):
            raise InternalError(f"arrays {name!r}, saved as {saved_as!r}: use a-z, 0-9 and _")
        targets = self.stepped if flat_params is None else flat_params
        kept = Kept(self, name, dtype, keeper, saved_as)
        wanted = {flat_param: kept.dtype_of(flat_param) for flat_param in targets}
        # A keeper's terms of this name were these arrays
        terms = {tier: -of.get(name, 0) for tier, of in self._planned.plan.terms.items()}
        tiers = self.make_room(wanted.items(), purpose or name, reserved=terms, otherwise=otherwise)
        try:
            self._kept.append(kept)
            for tier, term in terms.items():
                self._planned.add(tier, name, term)
                self.store.ledger.accounts[tier].planned_nbytes += term
            for (flat_param, dtype_there), tier in zip(wanted.items(), tiers):
                self._allocate(kept, flat_param, dtype_there, purpose or name, tier)
        except BaseException:
            self.free(kept)
            raise
        return kept

    @property
    def stepped(self) -> list[FlatParam]:
        """The flat params that an optimizer steps."""
        return [flat_param for flat_param in flat_params_of(self._units) if flat_param.spec.stepped]

    def make_room(
        self,
        wanted: Iterable[tuple[FlatParam, torch.dtype]],
        purpose: str,
        *,
        reserved: Mapping[Tier, int] | None = None,
        otherwise: Tier | None = None,
    ) -> list[Tier]:
        """Makes room for the ``wanted`` arrays as :meth:`keep` makes them, and for ``reserved``
        bytes, of which planned ones are negative. Returns the arrays' tiers. Raises CapacityError,
        which names the need of all of them."""
        needed, tiers = Counter(reserved), []
        for flat_param, dtype in wanted:
            tier = flat_param.arrays.get("master", flat_param.weight).tier
            nbytes = _nbytes_of(flat_param, dtype)
            room = self.store.ledger.room(tier, planned=True)
            if room is not None and needed[tier] + nbytes > room:
                tier = otherwise or tier
            needed[tier] += nbytes
            tiers.append(tier)
        for tier, nbytes in needed.items():
            self.store.allocator.make_room(tier, nbytes, purpose)
        return tiers

    def _allocate(
        self, kept: Kept, flat_param: FlatParam, dtype: torch.dtype, purpose: str, tier: Tier
    ) -> None:
        array = self.store.allocator.allocate_later(
            tier, dtype, flat_param.layout.shard_numel, purpose
        )
        kept.flat_params[flat_param] = None  # first: an interrupt must not hide it from free()
        flat_param.homes.kept[kept.name] = array
        self._planned.add(tier, kept.name, _nbytes_of(flat_param, dtype))
        if tier is Tier.NVME:  # disk space may hold old bytes
            self._clear(array)

    def free(self, kept: Kept) -> None:
        """Frees the memory of ``kept``. Idempotent."""
        while kept.flat_params:
            flat_param, _ = kept.flat_params.popitem()
            array = flat_param.homes.kept.pop(kept.name, None)
            if array is not None:  # else the homes are gone
                self._planned.add(array.tier, kept.name, -_nbytes_of(flat_param, array.dtype))
                self.store.allocator.free_more(array)
        kept.passing = {}
        self._kept = [other for other in self._kept if other is not kept]

    def free_of(self, keeper: Extension) -> None:
        """Frees all that ``keeper`` keeps."""
        for kept in self._kept:  # a list of its own: free() makes a new one
            if kept.keeper is keeper:
                self.free(kept)

    def clear(self, kept: Kept) -> None:
        """Sets all elements of ``kept`` to zero."""
        for flat_param in kept.flat_params:
            self._clear(kept.array_of(flat_param))

    def _clear(self, array: StateArray) -> None:
        zeros = torch.zeros(min(PIECE_NUMEL, array.numel), dtype=array.dtype, device="cpu")
        for at in range(0, array.numel, PIECE_NUMEL):
            self.write_array(array, at, zeros[: array.numel - at])

    def write(self, piece: Piece, parts: Mapping[str, torch.Tensor]) -> None:
        """Writes new ``parts`` of a piece: of kept arrays and of the flat param's own, by their
        names. For :func:`change_pieces`."""
        homes = piece.flat_param.homes
        for name, part in parts.items():
            array = homes.kept[name] if name in homes.kept else homes.arrays[name]
            self.write_array(array, piece.begin, part)

    def write_array(self, array: StateArray, begin: int, values: torch.Tensor) -> None:
        """Writes ``values`` at element ``begin`` of one array, as of the present step."""
        self.store.write(array, begin, values, version=self._version())

    # --- checkpoints ---

    def saved(self) -> dict[str, list[Kept]]:
        """Returns what checkpoints hold, by the name under which they do."""
        by_name: dict[str, list[Kept]] = {}
        for kept in self._kept:
            by_name.setdefault(kept.saved_as, []).append(kept)
        return by_name


def _nbytes_of(flat_param: FlatParam, dtype: torch.dtype) -> int:
    return round_up(dtype.itemsize * flat_param.layout.shard_numel, native.BLOCK_NBYTES)
