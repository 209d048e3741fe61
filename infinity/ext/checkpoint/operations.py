"""Operations of checkpoints, and what they need."""

from __future__ import annotations

from ...core.run.operations import IDLE, READ, SET, Call, OperationKind, Right


class CheckpointOperation(OperationKind):
    """Calls that write or read files."""

    SAVE = Call("save_checkpoint", SET | {Right.NO_BACKWARD})
    LOAD = Call("load_checkpoint", IDLE - {Right.WHOLE_STEP}, loads_all=True)
    SAVE_PRETRAINED = Call("save_pretrained", READ)
    SAVE_MERGED = Call("save_merged", READ)
