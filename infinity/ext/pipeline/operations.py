"""Operations of pipelines, and what they need."""

from __future__ import annotations

from ...core.run.operations import ONE_VERSION, SET, Call, OperationKind, Right


class PipelineOperation(OperationKind):
    """Calls of schedules."""

    SCHEDULE_STEP = Call("a step of a schedule", ONE_VERSION | {Right.WHOLE_STEP}, True)
    BATCH = Call("another batch", ONE_VERSION | {Right.WHOLE_STEP}, True)
    RUN = Call("another run", SET, True)
