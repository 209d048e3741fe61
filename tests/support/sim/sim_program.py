"""Programs that a seed draws: a model, where it lives, and what its user does with it.

**program**: plain data, so that it is written down, played again and shortened. All of it is drawn
before it runs.
"""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

from sim_actions import ACTIONS, Action
from sim_disk import LYING, MILD, SAID
from sim_models import FAMILIES

HOMES = ("device", "host", "nvme")
OPTIMIZERS = {
    "AdamW": {"lr": 0.01, "weight_decay": 0.1, "fused": True},
    "Adam": {"lr": 0.01, "weight_decay": 0.01, "fused": True},
    "SGD": {"lr": 0.0625, "momentum": 0.5, "weight_decay": 0.03125},
    "Adafactor": {"lr": 0.01},
}


@dataclasses.dataclass(frozen=True)
class Program:
    """What is played. ``config``: options of the wrap; ``room``, ``device_room``: host and device
    memory, in parts of the least that works; ``disk``: probabilities of faults; ``dtype``: of the
    weights, or "autocast"; ``late``: the share of a late device's jobs that are delayed;
    ``network``: the share of collectives that a rank comes late to; ``actions``: a name and its
    arguments each."""

    model: dict[str, Any]
    optimizer: str
    config: dict[str, Any]
    actions: tuple[Action, ...]
    room: float | None = None
    device_room: float | None = None
    disk: dict[str, float] = dataclasses.field(default_factory=dict)
    dtype: str = ""
    late: float = 0.0
    network: dict[str, float] = dataclasses.field(default_factory=dict)
    io: str = "threads"
    held_out: int = 0  # parameters that enter the optimizer later
    ranks: int = 1

    def text(self) -> str:
        """Writes the program in one line."""
        fields = dataclasses.asdict(self)
        plain = Program(self.model, self.optimizer, {}, ())
        kept = {name: value for name, value in fields.items() if value != getattr(plain, name)}
        return json.dumps({"model": self.model, "optimizer": self.optimizer, **kept})

    @classmethod
    def read(cls, text: str) -> Program:
        fields = {"config": {}, **json.loads(text)}
        actions = tuple((name, given) for name, given in fields.pop("actions", ()))
        return cls(actions=actions, **fields)


def draw(seed: int) -> Program:
    """Draws the program of a seed."""
    rng = random.Random(f"program {seed}")
    family = rng.choice(list(FAMILIES))
    optimizer = rng.choice(list(OPTIMIZERS))
    model = {
        "family": family,
        "seed": rng.randrange(100),
        "width": rng.choice([16, 32]),
        "blocks": rng.randrange(2, 5),
        "odd": rng.randrange(2) if not OPTIMIZERS[optimizer].get("fused") else 0,
    }
    config = draw_config(rng)
    disk = {name: rate for name, rate in MILD.items() if rng.random() < 0.3}
    faults = rng.random() < 0.4
    if faults:
        among = [*SAID, *LYING] if config.get("checksums", True) else SAID
        disk |= {rng.choice(among): rng.choice([0.02, 0.1, 0.5])}
    if disk:
        disk["seed"] = rng.randrange(1 << 30)
    held_out = rng.choice([0, 0, 1, 2]) if family in ("chain", "tied", "mixture") else 0
    left_out = {"scarce"} if faults else {"scarce", "faults"}
    names = [name for name in ACTIONS if name not in left_out]
    weights = [ACTIONS[name].weight for name in names]
    chosen = rng.choices(names, weights, k=rng.randrange(4, 13))
    actions = [(name, ACTIONS[name].draw(rng)) for name in chosen]
    if faults:
        config |= on_disk(rng)
        actions.insert(rng.randrange(len(actions)), ("faults", {"on": True}))
    program = Program(
        model,
        optimizer,
        config,
        tuple(actions),
        room=rng.choice([None, 1.0, 1.0, 1.3, 3.0]),
        device_room=rng.choice([None, None, 1.0, 1.5]),
        dtype=rng.choice(["", "", "autocast", "bf16"][: 4 if optimizer.startswith("Adam") else 3]),
        disk=disk,
        io=rng.choice(["auto", "threads"]),
        held_out=held_out,
    )
    if program.dtype == "autocast" and program.device_room == 1.0:
        # A gradient is made in two dtypes then, for which the least budget may have no room.
        return dataclasses.replace(program, device_room=1.5)
    return program


def on_disk(rng: random.Random) -> dict[str, str]:
    """Draws which of a model's homes is the disk that fails."""
    homes = [("nvme", "nvme"), ("nvme", "host"), ("host", "nvme"), ("hostile", "hostile")]
    params, optimizer = rng.choice(homes)
    return {"params": params, "optimizer": optimizer}


def draw_config(rng: random.Random) -> dict[str, Any]:
    """Draws the options of a wrap."""
    config: dict[str, Any] = {"params": rng.choice(HOMES), "optimizer": rng.choice(HOMES)}
    if rng.random() < 0.15:
        config = {"params": "hostile", "optimizer": "hostile"}
    if rng.random() < 0.3:
        config["activations"] = rng.choice(["host", "nvme"])
    if rng.random() < 0.2:
        config["checksums"] = False
    if rng.random() < 0.2:
        config["units"] = ["Linear"]
    if rng.random() < 0.1:
        config["recompute"] = True
    if rng.random() < 0.1:
        config["update_threads"] = 1
    if rng.random() < 0.1:
        config["audit"] = rng.choice([1.0, 0.25])
    return config
