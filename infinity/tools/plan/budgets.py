"""Budgets: what each tier may hold in a plan, and where the figure is from."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from ...core.machine.sizes import format_nbytes
from ...core.machine.tiers import BUDGETS, Tier

USABLE = 0.9  # share of a machine's memory and disks; the system and libraries use the rest
GIVEN, HERE, SHARED = "given", "free here", "free here, in one memory with the device"
OF_MACHINE = f"{USABLE:.0%} of the machine's"

Budgets = dict[str, dict[str, Any]]


def budgets_of(given: argparse.Namespace, config: Any, is_named: bool) -> Budgets:
    """Describes the budgets of a plan: of the options ``given``, of the configuration that has
    them, of the machine if one ``is_named``, else of what is free here. A tier without one is left
    out."""
    budgets: Budgets = {}
    for tier in Tier:
        nbytes, source = getattr(config, BUDGETS[tier]), GIVEN
        if is_named and getattr(given, BUDGETS[tier]) is None:
            source = OF_MACHINE
        elif nbytes is None:
            nbytes, source = _free_here(tier, config)
        if nbytes is not None:
            budgets[str(tier)] = {"nbytes": int(nbytes), "from": source}
    return budgets


def _free_here(tier: Tier, config: Any) -> tuple[int | None, str]:
    import torch

    from ...core.machine.card_memory import CardMemory
    from ...core.plan.budgets import measured_free

    where = torch.device(config.device or "cpu")
    if tier is Tier.NVME and not config.nvme_paths:
        return None, HERE
    if tier is Tier.DEVICE and where.type != "cpu":
        return CardMemory(where).engine_nbytes(), HERE
    is_one = tier is Tier.HOST and where.type == "cpu"
    return measured_free(tier, config), SHARED if is_one else HERE


def fits_line(held: Mapping[str, int], budgets: Budgets, who: str = "It") -> str:
    """Returns the first line of a plan that fits: what ``who`` holds of each budget, and where the
    budgets are from."""
    sources = {budget["from"] for budget in budgets.values()}
    of_all = f" in what is {sources.pop()}" if len(sources) == 1 else ""
    return f"{who} fits{of_all}: {', '.join(_tiers(held, budgets, not of_all))}"


def _tiers(held: Mapping[str, int], budgets: Budgets, sourced: bool) -> Iterator[str]:
    for tier, budget in budgets.items():
        said = f"{tier} {format_nbytes(held[tier])} of {format_nbytes(budget['nbytes'])}"
        yield f"{said} ({budget['from']})" if sourced else said
