"""Programs on the late device. Both sides compute there, with the same operations, of which torch's
SGD and Adafactor round as the engine's on the processor.
"""

from __future__ import annotations

import random
from dataclasses import replace

from sim_actions import ACTIONS
from sim_program import Program, draw

FAMILIES = ("chain", "tied", "uncalled", "mixture", "adapters", "packed")
HOMES = ("host", "nvme")
# A child would lack the device's threads; the others are refused where the processor steps
NOT_THERE = ("fork", "new_optimizer", "add_group")


def draw_late(seed: int) -> Program:
    """Draws a program for the late device: that of the seed, as far as it can be played there."""
    program, rng = draw(seed), random.Random(f"late {seed}")
    model = program.model | {"family": rng.choice(FAMILIES)}
    homes = {key: rng.choice(HOMES) for key in ("params", "optimizer")}
    config = {key: value for key, value in program.config.items() if key != "recompute"} | homes
    actions = [("scarce", ACTIONS["scarce"].draw(rng))] * (rng.random() < 0.5)
    for name, given in program.actions:
        if name == "rewrap":
            given = given | {key: rng.choice(HOMES) for key in ("params", "optimizer")}
        if name not in NOT_THERE:
            actions.append((name, given))
    rng.shuffle(actions)
    return replace(
        program,
        model=model,
        optimizer=rng.choice(["SGD", "Adafactor"]),
        config=config,
        actions=tuple(actions),
        dtype="",
        device_room=rng.choice([None, 1.5, 3.0]),
        late=rng.choice([0.1, 0.4]),
        held_out=0,
    )
