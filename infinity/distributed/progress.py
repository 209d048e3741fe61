"""Progress: says how many steps and backwards a rank has done: part of what ranks tell each other at every rendezvous."""

from __future__ import annotations

from .channel import Channel
from .data_ranks import DataRanks


class Progress:
    """How far this rank is, in words. Ranks whose words differ raise at their next rendezvous."""

    def __init__(self) -> None:
        self._words, self._to_stages = "", "(after 0 steps)"

    def note(self, *, steps: int, backwards: int) -> None:
        """Sets how many optimizer steps were made, and how many backwards since the last."""
        self._words = f"(after {steps} steps and {backwards} backwards)"
        self._to_stages = f"(after {steps} steps)"  # a stage that trains nothing runs no backward

    def __str__(self) -> str:
        return self._words

    def said_to(self, channel: Channel, ranks: DataRanks) -> str:
        """Returns what is said on ``channel``: to other stages only what they have in common."""
        return self._to_stages if channel is ranks.stages else self._words
