"""Cuts: divides a chain of layers into the stages of a pipeline by PipeDream's dynamic programme
(Narayanan et al., 2019, section 3.1), of one machine each. Exact: equal to trying every cut."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import accumulate

from ...errors import ConfigError


def cut_evenly(
    seconds: Sequence[float], stages: int, *, loading: Sequence[float] | None = None
) -> list[int]:
    """Cuts a chain into ``stages`` stages of one machine each, so that the slowest is as fast as
    possible. Returns the number of layers of each stage.

    seconds
        Of each layer, forward and backward.
    loading
        Seconds to load each layer's weights from home, which overlaps with compute. A stage takes
        the larger of both sums.

    Raises ConfigError with the numbers if there are fewer layers than stages.
    """
    if len(seconds) < stages:
        raise ConfigError(
            f"a model of {len(seconds)} layers cannot be cut into {stages} stages: use fewer stages"
            " (pp), or chunks of a rank"
        )
    return list(_cut(tuple(seconds), stages, tuple(loading or ())))


@lru_cache(maxsize=64)  # a search over meshes asks for the same cut again and again
def _cut(seconds: tuple[float, ...], stages: int, loading: tuple[float, ...]) -> tuple[int, ...]:
    sums = [0.0, *accumulate(seconds)]
    loads = [0.0, *accumulate(loading)] if loading else [0.0] * len(sums)

    @cache
    def best(end: int, count: int) -> tuple[float, tuple[int, ...]]:
        if count == 1:
            return max(sums[end], loads[end]), (end,)
        options = ((k, best(k, count - 1)) for k in range(count - 1, end))
        return min(
            (max(slowest, sums[end] - sums[k], loads[end] - loads[k]), (*lengths, end - k))
            for k, (slowest, lengths) in options
        )

    return best(len(seconds), stages)[1]
