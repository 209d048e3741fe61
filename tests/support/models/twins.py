"""Plain twins: what plain torch gives for a script is computed once by a worker.

Words used here:

**twin**: the results of a run without the engine. They depend on no home, so the cases of a test
that differ in their homes alone share them. **key**: what they depend on, like a script's name, its
dtype, its seed and the number of its steps.
"""

from __future__ import annotations

import collections
import os
import re
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
from torch.utils._pytree import tree_map

T = TypeVar("T")

MOST = 32  # twins that a worker keeps: the cases of a test follow each other
HOMES = {"auto", "device", "host", "hostile", "nvme"}
_kept: collections.OrderedDict[Hashable, object] = collections.OrderedDict()
_asked: collections.Counter[str] = collections.Counter()  # keys of the running test


def twin(run: Callable[[], T], *key: Hashable) -> T:
    """Returns what ``run`` gives, copied: that of an earlier call with this ``key``, if there was
    one. ``run`` has no other effects."""
    if key not in _kept:
        _kept[key] = tree_map(copied, run())
        if len(_kept) > MOST:
            _kept.popitem(last=False)
    _kept.move_to_end(key)
    return tree_map(copied, _kept[key])


def copied(value: object) -> object:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def of_this_test() -> Hashable:
    """A key of the running test with its parameters, but for those that are homes. Another call in
    the same test gives another key."""
    name = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
    if name not in _asked:
        _asked.clear()
    _asked[name] += 1
    return without_homes(name), _asked[name]


def without_homes(name: str) -> str:
    """The name of a test's case without the parameters that are homes."""
    test, _, parameters = name.partition("[")
    kept = (part for part in re.split(r"[-\]]", parameters) if part not in HOMES)
    return f"{test}[{'-'.join(kept)}"
