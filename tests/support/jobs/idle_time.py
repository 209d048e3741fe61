"""How long ranks of a pipeline stand idle, from what each of them executed."""

from __future__ import annotations

SECONDS = {
    "forward": 1.0,
    "backward": 2.0,
    "inputs": 1.0,
    "weights": 1.0,
}  # of a rank's whole part, in any unit


def idle_share(ranks: list[dict], micro_batches: int) -> float:
    """Time that a rank stands idle in what was executed, in parts of the time that it computes; the
    ranks take turns at one clock.

    ``ranks``: for each the number of "chunks" of all, and what it has "done", in order: (what,
    chunk, micro-batch).
    """
    chunks, pending = ranks[0]["chunks"], [list(rank["done"]) for rank in ranks]
    each = chunks // len(ranks)
    ended: dict[tuple[str, int, int], float] = {}
    clocks = [0.0] * len(ranks)

    def needs(what: str, chunk: int, micro: int) -> list[tuple]:
        if what == "forward":
            return [("forward", chunk - 1, micro)] if chunk else []
        if what == "weights":
            return [("gradient", chunk, micro)]
        return [
            ("forward", chunk, micro),
            *([("gradient", chunk + 1, micro)] if chunk + 1 < chunks else []),
        ]

    while any(pending):
        moved = False
        for rank, waiting in enumerate(pending):
            while waiting and all(need in ended for need in needs(*waiting[0])):
                what, chunk, micro = waiting.pop(0)
                begin = max([clocks[rank], *(ended[need] for need in needs(what, chunk, micro))])
                clocks[rank] = begin + SECONDS[what] / each
                # A first chunk's gradients of inputs are nobody's: torch does all of it with the
                # weights.
                ended["gradient" if what in ("backward", "inputs") else what, chunk, micro] = (
                    clocks[rank]
                )
                moved = True
        assert moved, "what was executed waits for itself"
    work = 3.0 * micro_batches
    return (max(clocks) - work) / work
