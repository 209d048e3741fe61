"""Choice: chooses a pipeline's schedule, its number of chunks and its split points, and describes
the reason in a line.

LoopedBFS loads each chunk at most twice a step, for any number of micro-batches: 2 v - W loads for
v chunks with W in the window. All others load a chunk once or twice for every micro-batch as soon
as the rank's chunks exceed the window.

Each schedule adds micro-batches up in its own order. So "auto" is the same schedule at every home.
The number of chunks does not change a bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...config import Config
from ...core.machine.sizes import format_nbytes
from ...core.units.forms import local_of
from ...core.wrap.described_model import read_model
from ...errors import ConfigError
from ...files.kept_dtypes import computing_dtypes
from .cuts import cut_evenly
from .stages import Chain

ONE_CHUNK = ("GPipe", "1F1B")  # schedules with one chunk a rank; all others here have several
# The last rank has the middle chunks, the first one both ends.
IN_A_V = ("ZBVZeroBubble", "DualPipeV")
INTERLEAVED = ("Interleaved1F1B", "InterleavedZeroBubble", *IN_A_V)
WEIGHTS_APART = ("InterleavedZeroBubble", *IN_A_V)  # of the weights' gradients, by an op of its own
NAMES = (*ONE_CHUNK, "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", *IN_A_V)


@dataclass(frozen=True)
class Choice:
    """A schedule, and its chunks."""

    name: str
    lengths: tuple[int, ...]  # layers of each chunk
    ranks: int
    micro_batches: int
    why: str

    @property
    def chunks(self) -> int:
        """Number of chunks of the whole model."""
        return len(self.lengths)

    @property
    def is_single(self) -> bool:
        """Whether the schedule takes one chunk a rank."""
        return self.name in ONE_CHUNK

    @property
    def last_rank(self) -> int:
        """The rank of the pp axis with the last chunk."""
        return self.rank_of(self.chunks - 1)

    def rank_of(self, number: int) -> int:
        """Returns the rank of the pp axis with a chunk."""
        return (
            min(number, 2 * self.ranks - 1 - number) if self.name in IN_A_V else number % self.ranks
        )

    def chunks_of(self, rank: int) -> list[int]:
        """Lists the numbers of a rank's chunks."""
        return [number for number in range(self.chunks) if self.rank_of(number) == rank]

    def layers_of(self, number: int) -> range:
        """Returns the numbers of a chunk's layers."""
        begin = sum(self.lengths[:number])
        return range(begin, begin + self.lengths[number])

    def describe(self, chain: Chain) -> str:
        """Describes the choice and its reason in one line."""
        return (
            f"pipeline: {type(chain.model).__name__}, {len(chain.layers)} layers in chunks of"
            f" {', '.join(map(str, self.lengths))} over {self.ranks} ranks; {self.name} with"
            f" {self.micro_batches} micro-batches ({self.why})"
        )


def choose(
    chain: Chain,
    config: Config,
    ranks: int,
    *,
    schedule: str,
    micro_batches: int,
    chunks: int | None,
    costs: Sequence[float] | None,
    load_rate: float | None,
    nbytes: Sequence[int] | None = None,
) -> Choice:
    """Chooses as :func:`pipeline` documents.

    costs
        Seconds of each layer for one micro-batch.
    load_rate
        Bytes per second at which weights are read from their home. None: not measured.
    nbytes
        Of each layer, as :func:`layer_nbytes` counts them. None: they are counted.

    Raises ConfigError, with the numbers, if the inputs do not fit.
    """
    layers = len(chain.layers)
    if costs is not None and len(costs) != layers:
        raise ConfigError(f"costs has {len(costs)} numbers, the model {layers} layers")
    name, why = _name(schedule)
    below = config.params != "device"
    nbytes, loading = nbytes or layer_nbytes(chain, config), None
    if costs is not None and load_rate is not None and below:
        costs = [micro_batches * cost for cost in costs]
        loading = [2 * each / load_rate for each in nbytes]
    costs = chain.costs() if costs is None else costs
    for count in [chunks] if chunks is not None else _counts(name, layers, ranks, config):
        check_counts(name, count, layers, ranks, micro_batches)
        lengths = cut_evenly(costs, ranks * count, loading=loading)
        choice = Choice(name, tuple(lengths), ranks, micro_batches, why)
        largest = max(
            sum(nbytes[n] for n in choice.layers_of(number)) for number in range(choice.chunks)
        )
        if config.device_memory is None or 2 * largest <= config.device_memory:
            return choice
    if name in INTERLEAVED and below:
        raise ConfigError(
            f"{name} changes from chunk to chunk with every micro-batch, and"
            f" device_memory={format_nbytes(config.device_memory)} does not hold two of the largest"
            f" ({format_nbytes(largest)}): each would be loaded for every micro-batch. Use"
            " schedule='LoopedBFS', which loads each at most twice a step, more chunks of a rank,"
            " or more device_memory."
        )
    return choice


def layer_nbytes(chain: Chain, config: Config) -> list[int]:
    """Counts the bytes of each layer's weights on this rank."""
    dtype_of = computing_dtypes(read_model(chain.model), config.param_dtype)
    return [
        sum(local_of(p).numel() * dtype_of(p).itemsize for p in layer.parameters())
        for layer in chain.layers
    ]


def _name(schedule: str) -> tuple[str, str]:
    """Returns the schedule, and its reason."""
    if schedule not in ("auto", *NAMES):
        raise ConfigError(f"schedule: there is no {schedule!r}; there are auto, {', '.join(NAMES)}")
    if schedule != "auto":
        return schedule, "as asked"
    return "LoopedBFS", "the same at every home: each chunk is loaded at most twice a step"


def _counts(name: str, layers: int, ranks: int, config: Config) -> list[int]:
    """Returns the chunks per rank to try, fewest first. Two chunks must fit the window together."""
    if name in ONE_CHUNK or (layers < 2 * ranks and name not in IN_A_V):
        return [1]
    more = name == "LoopedBFS" and config.device_memory is not None
    return [*range(2, max(2, layers // ranks) + 1)] if more else [2]


def check_counts(name: str, chunks: int, layers: int, ranks: int, micro_batches: int) -> None:
    """Raises ConfigError if a schedule does not accept this number of chunks or micro-batches."""
    if (name in ONE_CHUNK and chunks != 1) or (name in IN_A_V and chunks != 2):
        raise ConfigError(
            f"schedule {name} takes {1 if name in ONE_CHUNK else 2} chunks of the model on each"
            f" rank, not {chunks}"
        )
    if layers < ranks * chunks:
        raise ConfigError(
            f"{layers} layers cannot be cut into {ranks * chunks} chunks (pp={ranks}, {chunks} on"
            " each rank): use fewer"
        )
    if micro_batches < 1:
        raise ConfigError(f"micro_batches is {micro_batches}: at least one")
    rounds = max(1, micro_batches // ranks)
    if name in ("Interleaved1F1B", "InterleavedZeroBubble") and micro_batches % rounds:
        raise ConfigError(
            f"{name} takes a multiple of {rounds} micro-batches here ({ranks} ranks), not"
            f" {micro_batches}"
        )
    if name == "1F1B" and micro_batches < ranks:
        raise ConfigError(
            f"1F1B takes at least as many micro-batches as ranks of the pp axis, {ranks}, not"
            f" {micro_batches}"
        )
    if name == "DualPipeV" and micro_batches < 2 * ranks:
        raise ConfigError(
            f"DualPipeV takes at least {2 * ranks} micro-batches, one for each of its {2 * ranks}"
            f" chunks, not {micro_batches}"
        )
