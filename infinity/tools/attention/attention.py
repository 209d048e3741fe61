"""`infinity attention`: counts the tiles of keys that a kernel of neighborhood attention reads, and
says which strides are worth it (Hassani et al. 2025, arXiv 2504.16922).

bound     how many times as many tiles dense attention reads: no kernel with such tiles gains more
own       the same of infinity.neighborhood_attention, whose tiles read no key beside their windows
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from typing import Any

from ...errors import ConfigError
from ..cli.answers import print_object
from ..cli.options import FLAG, takes
from ..cli.values import a_count, zero_or_more

LARGEST_AXIS = 2**20  # in tokens: strides are tried one by one


def per_axis(text: str) -> int | tuple[int, ...]:
    """Parses numbers from 1 on, as "30x48x80" or "18,24,24"; a single one is for all axes."""
    return _numbers(text, a_count)


def flag_per_axis(text: str) -> int | tuple[int, ...]:
    """Parses numbers from 0 on, as :func:`per_axis`."""
    return _numbers(text, zero_or_more)


def _numbers(text: str, parse: Callable[[str], int]) -> int | tuple[int, ...]:
    numbers = tuple(map(parse, text.replace("x", ",").split(",")))
    return numbers if len(numbers) > 1 else numbers[0]


OF_AXES = takes("N,N,N", per_axis)
NEEDED = OF_AXES | {"required": True}
OPTIONS = (
    ("shape", takes("SHAPE", per_axis), "tokens along each axis, as 30x48x80"),
    (
        "--window",
        NEEDED,
        "keys that a query reads along each axis, as 18,24,24; one number is for all",
    ),
    ("--q-tile", NEEDED, "queries along each axis of a tile of the kernel"),
    ("--kv-tile", NEEDED, "keys along each axis of a tile of the kernel"),
    (
        "--stride",
        OF_AXES,
        "queries along each axis that share a window (default: all that are worth it)",
    ),
    ("--dilation", OF_AXES, "distance between the keys of a window", 1),
    (
        "--causal",
        takes("N,N,N", flag_per_axis),
        "1: along this axis no key is after its query",
        0,
    ),
    (
        "--share",
        takes("F"),
        "attention's share of a job's time, as 60%%: how much faster does the job become?",
    ),
    ("--json", FLAG, "the rows as one JSON object on stdout"),
)


def run(args: argparse.Namespace) -> int:
    """Prints the strides, and what they read."""
    simulated = simulate(args)
    if args.json:
        print_object(simulated)
    else:
        print("\n".join(_lines(simulated)))
    return 0


def simulate(args: argparse.Namespace) -> dict[str, Any]:
    """Counts what each row of strides reads. Raises ConfigError if no such windows exist."""
    from ...ext.attention import attention_tiles as tiles
    from ...ext.checkpoint.interval import share_of

    share = None if args.share is None else share_of(args.share, "--share")
    axes = tiles.axes_of(args.shape, args.window, args.stride or 1, args.dilation, args.causal)
    if max(axis.tokens for axis in axes) > LARGEST_AXIS:
        raise ConfigError(f"SHAPE {args.shape}: an axis has at most {LARGEST_AXIS} tokens here")
    sizes = [
        tiles.per_axis(name, value, len(axes))
        for name, value in (("--q-tile", args.q_tile), ("--kv-tile", args.kv_tile))
    ]
    readings = tiles.worth_reading(axes, *sizes)
    sparse = [each.strides for each in readings if each.block_sparse]
    shown = readings if args.stride is None else [tiles.read_tiles(axes, *sizes)]
    return {
        "rows": [
            {
                "stride": list(each.strides),
                "tiles": each.tiles,
                "all_tiles": each.all_tiles,
                "bound": each.bound,
                "own_bound": tiles.own_bound(tiles.with_strides(axes, each.strides)),
                "end_to_end": None if share is None else tiles.end_to_end(each.bound, share),
                "block_sparse": each.block_sparse,
            }
            for each in shown
        ],
        "least_block_sparse": list(sparse[0]) if sparse else None,
        "bound_by_operations": math.prod(axis.tokens**2 / axis.pairs() for axis in axes),
    }


def _lines(found: dict[str, Any]) -> Iterator[str]:
    def strides(row: list[int]) -> str:
        return "x".join(map(str, row))

    has_share = found["rows"][0]["end_to_end"] is not None
    last = "end to end" if has_share else ""
    yield f"{'stride':<14}{'tiles of keys':>16}{'bound':>9}{'own tiles':>11}{last:>13}".rstrip()
    for row in found["rows"]:
        counts = f"{row['tiles']} of {row['all_tiles']}"
        gain = f"{row['end_to_end']:.2f}x" if has_share else ""
        mark = "   block-sparse" if row["block_sparse"] else ""
        yield (
            f"{strides(row['stride']):<14}{counts:>16}{row['bound']:>8.2f}x"
            f"{row['own_bound']:>10.2f}x{gain:>13}".rstrip()
            + mark
        )
    yield f"By operations, windows gain at most {found['bound_by_operations']:.2f}x."
    if least := found["least_block_sparse"]:
        yield f"The least block-sparse stride, with which no tile needs a mask: {strides(least)}."
    else:
        yield "No stride is block-sparse with these tiles: some of them need a mask."
