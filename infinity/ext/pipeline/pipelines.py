"""pipeline: splits a model over the pp axis of a mesh, wraps this rank's chunks, and runs them."""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, schedules

from ...config import Config
from ...core.params.tensors import digest_of
from ...core.run.registry import engine_of, is_wrapped
from ...core.wrap.agreement import compare
from ...core.wrap.unwrap import unwrap_model
from ...core.wrap.wrap import wrap_model
from ...errors import ConfigError, UsageError
from ..dtensor.agreement import MODE, is_plain, refuse_other_batches
from ..versions_2bw.continuous import without_flush
from .between import Between
from .boundaries import Boundaries, axis_that_shares
from .choice import WEIGHTS_APART, Choice
from .choose_together import choose_together
from .operations import PipelineOperation
from .schedules import COMPARED, attach, empty
from .stages import Chain
from .ties import Ties, find_ties

IGNORED = -100  # a label that losses ignore
KEPT_SHAPES = 4  # batch shapes whose buffers are kept


def pipeline(
    model: nn.Module,
    mesh: DeviceMesh,
    optimizer: torch.optim.Optimizer | None = None,
    config: Config | Mapping[str, Any] | str | os.PathLike | None = None,
    *,
    schedule: str = "auto",
    micro_batches: int,
    chunks: int | None = None,
    costs: Sequence[float] | None = None,
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    quiet: bool = False,
) -> tuple[Pipeline, torch.optim.Optimizer | None]:
    """Splits ``model`` over ``mesh["pp"]`` and wraps this rank's chunks. Every rank calls this.
    Returns the pipeline and the managed optimizer.

    model
        A causal language model of transformers, an ``nn.Sequential``, or one with torchtitan's
        parts, the same on every rank, or on ``meta``. Names, also in checkpoints, stay the model's.
    optimizer
        Over the parameters of the whole model: it keeps this rank's.
    config
        As :func:`infinity.wrap_model` takes it.
    schedule
        One of torch's, or "auto": LoopedBFS at every home, as each schedule adds micro-batches up
        in its own order. It loads a chunk at most twice a step, and keeps the saved tensors of all
        micro-batches. With weights on the device, Interleaved1F1B keeps fewer.
    micro_batches, chunks
        Parts of the batch; parts of the model on each rank. ``chunks=None``: two if there are
        enough layers, one for GPipe and 1F1B; for LoopedBFS as many as it takes for two to fit
        ``Config(device_memory)``.
    costs
        Seconds of each layer for one micro-batch (:func:`measure_costs`); the first rank's count.
        Makes the slowest chunk as fast as possible, also in loading. None: splits by parameters.
    loss_fn
        For other models than transformers': takes outputs and targets; its losses are averaged.

    Prints the choice, unless ``quiet``. Warns of a schedule that computes the weights' gradients
    apart, with gradient checkpointing. Raises ConfigError on every rank, with the model unchanged:
    for a mesh without ``pp``, an unknown chain, inputs that the schedule or device_memory (two
    chunks) does not fit, and inputs that differ between ranks.
    """
    asked = {"schedule": schedule, "micro_batches": micro_batches, "chunks": chunks}
    chain, checked, choice = choose_together(
        model, mesh, optimizer, config, loss_fn, costs=costs, **asked
    )
    if choice.name in WEIGHTS_APART and any(
        getattr(module, "gradient_checkpointing", False) for module in model.modules()
    ):
        warnings.warn(
            f"{choice.name} with gradient checkpointing: torch computes a block again for each"
            " group of its weights, about six times. Use schedule='Interleaved1F1B', or leave"
            " checkpointing out.",
            stacklevel=2,
        )
    if not quiet and dist.get_rank() == 0:
        print(choice.describe(chain), flush=True)
    return _build(chain, choice, mesh, optimizer, checked, loss_fn)


def _build(
    chain: Chain,
    choice: Choice,
    mesh: DeviceMesh,
    optimizer: torch.optim.Optimizer | None,
    config: Config,
    loss_fn: Callable | None,
) -> tuple[Pipeline, torch.optim.Optimizer | None]:
    """Makes this rank's chunks, wraps them, and makes their pipeline. An exception restores the
    optimizer."""
    rank = mesh.get_local_rank("pp")
    all_chunks = [chain.make_chunk(choice.layers_of(number)) for number in range(choice.chunks)]
    mine = [all_chunks[number] for number in choice.chunks_of(rank)]
    ties = find_ties(chain, all_chunks, choice.rank_of, rank)
    kept = keep_own(optimizer, mine)
    managed = None
    try:
        with ties.marked() if ties is not None else nullcontext():
            mine, managed = wrap_model(mine, optimizer, config, mesh=mesh)
        return Pipeline(mine, choice, mesh, loss_fn, ties), managed
    except BaseException:
        if is_wrapped(mine[0]):
            unwrap_model(mine, managed)
        give_back(optimizer, kept)
        raise


def keep_own(
    optimizer: torch.optim.Optimizer | None, chunks: Sequence[nn.Module]
) -> tuple[list[list], dict]:
    """Removes all parameters but those of ``chunks`` from an optimizer. Returns what it had."""
    if optimizer is None:
        return [], {}
    own = {param for chunk in chunks for param in chunk.parameters()}
    kept = [group["params"] for group in optimizer.param_groups], dict(optimizer.state)
    for group in optimizer.param_groups:
        group["params"] = [param for param in group["params"] if param in own]
    for param in [param for param in optimizer.state if param not in own]:
        del optimizer.state[param]
    return kept


def give_back(optimizer: torch.optim.Optimizer | None, kept: tuple[list[list], dict]) -> None:
    """Restores an optimizer."""
    params, state = kept
    for group, of_group in zip(optimizer.param_groups if optimizer is not None else (), params):
        group["params"] = of_group
    if optimizer is not None:
        optimizer.state.update(state | optimizer.state)


class Pipeline:
    """This rank's chunks of a model, and their schedule. Every rank calls :meth:`step`."""

    def __init__(
        self,
        chunks: list[nn.Module],
        choice: Choice,
        mesh: DeviceMesh,
        loss_fn: Callable | None,
        ties: Ties | None,
    ):
        # Wrapped: for state_dict, save_checkpoint(path, pipe.chunks, optimizer), unwrap_model.
        self.chunks = chunks
        self._engine, self._choice = engine_of(chunks), choice
        self._numbers = choice.chunks_of(mesh.get_local_rank("pp"))
        self._loss_fn, self._ties = loss_fn, ties
        self._between = Between(self._engine.job, mesh["pp"], self._give_all_up)
        self._teller = self._between.rank_of(choice.last_rank)  # it has the losses
        # (batch shapes and trained chunks, whether it trains) -> schedule; most recently used last.
        self._schedules = OrderedDict[tuple, Any]()
        self._counted: float = 1  # labels of the batch that the loss counts
        shares = axis_that_shares(chunks[0], mesh)
        self._boundaries = (
            Boundaries(chunks, self._numbers, choice.chunks, shares, self._engine.job.collectives)
            if shares is not None
            else None
        )
        if ties is not None:
            ties.start(self._engine, self._between)

    def step(
        self, inputs: torch.Tensor | None = None, target: torch.Tensor | None = None, **batch: Any
    ) -> torch.Tensor:
        """Runs forward and backward of a batch, in micro-batches. Returns the loss, on every rank.

        For transformers models ``step(input_ids=..., labels=..., attention_mask=...)``, the same on
        all ranks of the pp axis; the loss is that of the whole batch, as in one process. For others
        ``step(inputs, target)``. Lengths may differ between steps: the first step of each length
        runs one more micro-batch, in which stages exchange the shapes of their tensors.

        ``num_items_in_batch=``: of a transformers model, labels to divide the loss by, in place of
        the batch's own. Data ranks whose batches have unlike many give the mean of theirs, so that
        every label counts the same.

        Raises UsageError for a batch that does not divide, or differs between stages.
        """
        return self._pass(inputs, target, batch, "step()")

    def run(
        self,
        batches: Sequence[Mapping[str, Any]],
        optimizer: torch.optim.Optimizer,
        *,
        after_update: Callable[[], Any] | None = None,
        weights: str = "two",
        error_feedback: bool = False,
        quiet: bool = False,
    ) -> list[torch.Tensor]:
        """Runs ``batches`` without a flush between them, with one update for each. Returns the loss
        of each, on every rank. When it returns, there is one version of the weights. For
        ``weights``, ``error_feedback`` and ``quiet`` see :func:`without_flush`.

        batches
            Arguments of :meth:`step` by name: ``{"input_ids": ..., "labels": ...}``, for others
            ``{"inputs": ..., "target": ...}``. The same number on every rank, all of one shape.

        For the schedule 1F1B. Raises ConfigError for another, and for a trained table that is also
        the head; else as :meth:`step` and :meth:`WithoutFlush.run` do.
        """
        batches = list(batches)
        self._check_run(batches)
        counts, schedules, runs = [], {}, []
        for batch in batches:
            rest = {k: v for k, v in batch.items() if k not in ("inputs", "target")}
            tensors = batch.get("inputs"), batch.get("target")
            schedule, *tensors = self._agree_on(*tensors, rest, "run()")
            schedules[id(schedule)] = schedule
            runs.append(tuple(tensors))
            counts.append(self._counted)
        if not runs:
            return []
        job = self._engine.job
        with job.uses.begin(), job.collectives.together("the batches of run()"):
            if len(schedules) > 1:
                raise UsageError(
                    "run() takes batches of one shape: run those of each shape by themselves"
                )
        options: dict[str, Any] = {"weights": weights, "error_feedback": error_feedback}
        run = without_flush(schedule, optimizer, quiet=quiet, **options)

        def begin(number: int) -> None:
            self._counted = counts[number]

        run.on_batch = begin
        with self._in_parts():
            losses = run.run(runs, after_update=after_update)
        of_batches = losses if losses is not None else [[]] * len(runs)
        return [self._tell(list(of_batch)) for of_batch in of_batches]

    def _check_run(self, batches: list[Any]) -> None:
        """Raises an error on every rank if ``batches`` cannot run without flush. A collective."""
        if self._choice.name != "1F1B":
            raise ConfigError(
                "run() without flush is for the schedule 1F1B, this pipeline has"
                f" {self._choice.name}: build it with pipeline(..., schedule='1F1B'), or call"
                " step() for each batch"
            )
        if self._ties is not None and self._ties.are_trained:
            raise ConfigError(
                "run() without flush: the first and the last stage share a table that is trained,"
                " and would have to wait for each other after every batch. Untie it"
                " (tie_word_embeddings=False), freeze it, or call step() for each batch."
            )
        job = self._engine.job
        job.uses.check(PipelineOperation.RUN)
        with job.uses.begin():
            with job.collectives.together("the batches of run()"):
                for number, batch in enumerate(batches):
                    if not isinstance(batch, Mapping):
                        raise UsageError(
                            "run() takes batches by name, as {'inputs': ..., 'target': ...}:"
                            f" batch {number} is a {type(batch).__name__}"
                        )
            inputs = {"the number of batches": str(len(batches))}
            compare(job.collectives, inputs, "run()")

    @torch.no_grad()
    def eval(
        self, inputs: torch.Tensor | None = None, target: torch.Tensor | None = None, **batch: Any
    ) -> torch.Tensor:
        """Runs only the forward. Returns the loss, on every rank. Every rank calls this."""
        return self._pass(inputs, target, batch, "eval()")

    def _pass(self, inputs: Any, target: Any, batch: dict[str, Any], call: str) -> torch.Tensor:
        """Runs a batch through the schedule. Returns the loss."""
        schedule, inputs, target, batch = self._agree_on(inputs, target, batch, call)
        run = schedule.eval if call == "eval()" else schedule.step
        losses: list[torch.Tensor] = []
        if self._choice.chunks - 1 in self._numbers:
            batch = {**batch, "target": target, "losses": losses}
        with self._in_parts(), self._adding_up() if call == "step()" else nullcontext():
            run(*((inputs,) if 0 in self._numbers else ()), **batch)
        return self._tell(losses)

    def _adding_up(self) -> AbstractContextManager:
        if self._ties is None:
            return nullcontext()
        return self._ties.adding_up(self._engine.job, self._between)

    def _parts(
        self, inputs: Any, target: Any, batch: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        inputs = batch.pop("input_ids", inputs)
        target = batch.pop("labels", target)
        if inputs is None or target is None:
            raise UsageError(
                "a pipeline's step takes inputs and targets: step(input_ids=..., labels=...), or"
                " step(inputs, target)"
            )
        if len(inputs) % self._choice.micro_batches:
            raise UsageError(
                f"a batch of {len(inputs)} does not divide into {self._choice.micro_batches}"
                " micro-batches: give a multiple"
            )
        if self._loss_fn is None:
            counted = int((target[..., 1:] != IGNORED).sum())
            self._counted = batch.pop("num_items_in_batch", counted)
        return inputs, target, batch

    def _agree_on(
        self, inputs: Any, target: Any, batch: dict[str, Any], call: str
    ) -> tuple[Any, torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Returns the schedule for this shape, and its inputs. Raises UsageError on all ranks if
        one makes another ``call``, if a batch does not divide, or if stages or tp ranks have
        different batches: outputs of one would be compared with labels of another. A collective."""
        trains = call != "eval()"
        collectives, ranks = self._engine.job.collectives, self._engine.job.ranks
        self._engine.uses.check(PipelineOperation.BATCH)
        with self._engine.uses.begin():
            with collectives.together(f"the batch of a pipeline's {call}"):
                inputs, target, batch = self._parts(inputs, target, batch)
                inputs_by_name = {"the inputs": inputs, "the targets": target, **batch}
                tensors = {
                    name: value
                    for name, value in inputs_by_name.items()
                    if isinstance(value, torch.Tensor)
                }
                digests = {name: digest_of(value) for name, value in tensors.items()}
                digests |= {
                    name: repr(inputs_by_name[name])
                    for name in inputs_by_name
                    if is_plain(inputs_by_name[name])
                }
                digests["num_items_in_batch"] = repr(self._counted)
                mode = "train()" if self.chunks[0].training else "eval()"
                mine = dist.get_rank(), digests | {MODE: mode}
            channels = [each for each in (ranks.tp_group, ranks.pp_group) if each is not None]
            trained = tuple(
                any(param.requires_grad for param in chunk.parameters()) for chunk in self.chunks
            )
            said = mine, self._between.said, trained
            everyones = collectives.collect(said, "digests of the batch of a pipeline", channels)
            self._between.settle([state for _, state, _ in everyones])
            # Other data ranks do not see a difference.
            with collectives.together("having compared the batch of a pipeline"):
                refuse_other_batches([theirs for theirs, _, _ in everyones])
            # Tensors between stages have a gradient if an earlier stage is trained.
            shapes = (
                tuple((name, tuple(value.shape), value.dtype) for name, value in tensors.items()),
                tuple(trained for _, _, trained in everyones),
            )
            # The first step of a shape and kind runs one more micro-batch, which gathers weights.
            # So all data ranks must do it together.
            (is_new,) = collectives.meet(
                "the shapes of the batch of a pipeline",
                flags=[(shapes, trains) not in self._schedules],
            )
        return self._schedule_of(shapes, trains=trains, is_new=is_new), inputs, target, batch

    def _schedule_of(self, shapes: tuple, *, trains: bool, is_new: bool) -> Any:
        if is_new:
            self._give_up((shapes, True))
            self._give_up((shapes, False))
            self._schedules[shapes, trains] = self._make_schedule()
        self._schedules.move_to_end((shapes, trains))
        while len(self._schedules) > KEPT_SHAPES:
            self._give_up(next(iter(self._schedules)))
        return self._schedules[shapes, trains]

    def _give_up(self, key: tuple[tuple, bool]) -> None:
        if (schedule := self._schedules.pop(key, None)) is not None:
            empty(schedule)

    def _give_all_up(self) -> None:
        for key in list(self._schedules):
            self._give_up(key)

    @contextmanager
    def _in_parts(self) -> Iterator[None]:
        parts = self._boundaries.in_parts() if self._boundaries is not None else nullcontext()
        with self._between.passing(), parts:
            yield

    def _make_schedule(self) -> Any:
        device = self._engine.device.where
        count = self._choice.chunks
        stages = [
            PipelineStage(chunk, n, count, device, group=self._between.group)
            for chunk, n in zip(self.chunks, self._numbers)
        ]
        made = getattr(schedules, f"Schedule{self._choice.name}")
        only = stages[0] if self._choice.is_single else stages
        schedule = made(only, self._choice.micro_batches, loss_fn=self._loss, scale_grads=False)
        setattr(schedule, COMPARED, True)
        return attach(schedule)

    def _loss(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self._loss_fn is not None:
            return self._loss_fn(outputs, target) / self._choice.micro_batches
        model = self.chunks[-1]
        size = model.config.get_text_config().vocab_size
        # Over all labels of the batch: a micro-batch with fewer weighs less, as in one process.
        return model.loss_function(
            logits=outputs, labels=target, vocab_size=size, num_items_in_batch=self._counted
        )

    def _tell(self, losses: list[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros((), device=self._engine.device.where)
        if losses:
            total = torch.stack([loss.detach().float() for loss in losses]).sum()
        with self._between.passing():
            dist.broadcast(total, self._teller, group=self._between.group)
        return total
