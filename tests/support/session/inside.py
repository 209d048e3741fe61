"""Inside: the parts of a wrapped model that tests look at, each under one name.

A part that moves inside the package gets another place here, and no test changes.
"""

from __future__ import annotations

from typing import Any

from infinity.core.run.engine import Engine
from infinity.core.run.registry import wrapped

OF_JOB = frozenset(
    "activations add borrowed collectives config edits events extensions find journal kept ledger"
    " lents planned prefetcher ranks reducer remove running schedule scopes storages store traffic"
    " trained units updates".split()
)
OF_ENGINE = frozenset(
    "_resources accumulation admit backward computing device end_step finish_background gradients"
    " is_open make_forward_context make_step_context passes prepare put_to_rest read_value recover"
    " refusal saving_tensors shut_down steps touch touching units_of uses"
    " wait_idle write_value".split()
)


class Inside:
    """The parts of one wrapped model."""

    def __init__(self, engine: Engine):
        self.engine = engine

    @property
    def job(self) -> Any:
        """All parts at once, for a function of the package that takes them."""
        return self.engine.job

    def __getattr__(self, name: str) -> Any:
        if name in OF_JOB:
            return getattr(self.engine.job, name)
        if name in OF_ENGINE:
            return getattr(self.engine, name)
        raise AttributeError(f"tests look at no {name} of a wrapped model: add its place")


def parts_of(held: Any) -> Inside:
    """Returns the parts of a wrapped model: by itself, its engine, or an object that has that."""
    if isinstance(held, Engine):
        return Inside(held)
    return Inside(held.engine if hasattr(held, "engine") else wrapped(held).engine)
