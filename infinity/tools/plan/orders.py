"""Orders: reads the order in which each rank of a pipeline computes, from the schedules."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.pipelining import schedules

from ...ext.pipeline.choice import Choice
from ...ext.versions_2bw.continuous import order_of
from .pipeline_clock import BACKWARD, FORWARD, INPUTS, WEIGHTS, Op

KINDS = {
    "FORWARD": FORWARD,
    "FULL_BACKWARD": BACKWARD,
    "BACKWARD_INPUT": INPUTS,
    "BACKWARD_WEIGHT": WEIGHTS,
}


def orders_of(choice: Choice, micro_batches: int | None = None) -> list[list[Op]]:
    """Returns the ops of each rank of ``choice``, in order. ``micro_batches``: others than its
    own. Makes no process group and runs nothing."""
    count = choice.micro_batches if micro_batches is None else micro_batches
    if choice.name == "GPipe":
        return [
            [Op(kind, rank, n) for kind in (FORWARD, BACKWARD) for n in range(count)]
            for rank in range(choice.ranks)
        ]
    if choice.name == "1F1B":
        return [
            [
                Op(FORWARD if each.is_forward else BACKWARD, rank, each.number)
                for each in order_of(rank, choice.ranks, count)
            ]
            for rank in range(choice.ranks)
        ]
    stages = [_Unbuilt(number, choice) for number in choice.chunks_of(0)]
    made = getattr(schedules, f"Schedule{choice.name}")
    # Transfers take most of a schedule's making, and are not looked at.
    ordered = type(made.__name__, (made,), {"_prepare_schedule_with_comms": lambda *_, **__: None})
    order = ordered(stages, count).pipeline_order
    return [_ops_of(order[rank]) for rank in range(choice.ranks)]


def step_of(choice: Choice) -> int:
    """Returns the micro-batches by which a run of ``choice`` may be made longer or shorter with
    the same rounds."""
    return choice.micro_batches // max(1, choice.micro_batches // choice.ranks)


def _ops_of(actions: list[Any]) -> list[Op]:
    """Translates torch's actions; None is an idle place, and a pair that overlaps is two ops."""
    ops = []
    for action in actions:
        for each in (action.sub_actions or (action,)) if action is not None else ():
            if (kind := KINDS.get(each.computation_type.name)) is not None:
                ops.append(Op(kind, each.stage_index, each.microbatch_index))
    return ops


class _Unbuilt:
    """Stands for a stage where only the order of a schedule is wanted."""

    has_backward, device, submod, group = True, "cpu", nn.Identity(), None

    def __init__(self, number: int, choice: Choice):
        self.stage_index, self.num_stages = number, choice.chunks
        self.group_size, self.group_rank = choice.ranks, choice.rank_of(number)
        self.is_first, self.is_last = number == 0, number == choice.chunks - 1
