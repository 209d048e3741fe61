"""Permutation: a shuffled order of many samples, of which any place is computed by itself.

A Feistel network permutes the numbers below the next power of four, and a place that falls outside
of the samples is permuted again (Black and Rogaway 2002). So nothing is stored, and every process
has the same order.
"""

from __future__ import annotations

import numpy as np

ROUNDS = 6
GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment (Steele et al. 2014)
WORD = 2**64 - 1


def mixed(*values: int) -> int:
    """Returns 64 bits that depend on all ``values`` and on their order."""
    state = 0
    for value in values:
        state = int(_splitmix(np.array([(state ^ (value & WORD)) & WORD], np.uint64))[0])
    return state


def shuffled(places: np.ndarray, samples: int, key: int) -> np.ndarray:
    """Returns the samples at ``places`` (each below ``samples``) of the order that ``key`` names.
    int64, of the places' shape."""
    half = max(1, ((samples - 1).bit_length() + 1) // 2)
    keys = [np.uint64(mixed(key, turn)) for turn in range(ROUNDS)]
    shuffled_places = np.asarray(places).astype(np.uint64)
    outside = np.ones(shuffled_places.shape, bool)
    while outside.any():
        shuffled_places[outside] = _permuted(shuffled_places[outside], half, keys)
        outside = shuffled_places >= np.uint64(samples)
    return shuffled_places.astype(np.int64)


def _permuted(values: np.ndarray, half: int, keys: list[np.uint64]) -> np.ndarray:
    """Permutes numbers below ``4 ** half``."""
    mask, shift = np.uint64(2**half - 1), np.uint64(half)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_splitmix(right ^ key) & mask)
    return (left << shift) | right


def _splitmix(words: np.ndarray) -> np.ndarray:
    """Returns splitmix64 of each of ``words``; arithmetic wraps."""
    words = words + np.uint64(GOLDEN)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
