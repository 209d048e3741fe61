"""InCommon: compares what ranks with other local parts of the same tensors must have in common, at
barriers that they reach anyway.

given     the tensors that a root forward gets: their digests are compared before compute
drawn     the generators that a root forward drew from: compared at the next barrier
changed   buffers that were changed since the wrap: compared as the given tensors are
sample    a few elements of a gradient that each of these ranks has whole: compared before a step,
          within rounding, as are sketches of the gradients that reach the outputs

Reading values from an accelerator waits for it. So there they are compared only in the first steps,
and in some of the later ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from ... import native
from ...core.machine.device import Device
from ...core.run.job import Job
from ...core.seams import Events, Extension
from ...core.units.forms import is_common, local_of
from ...core.units.handle import ParamHandle, handle_of
from ...errors import UsageError
from ...ranks.collectives import Collectives
from ...torch_private import is_of_transform
from .described import mode_of, number_of, shape_of, tensors_in
from .draws import Draws
from .dtensors import takes_parts
from .fit import check_fit
from .sketches import Sketches, number_of_ordered, ordered, projected

FIRST_STEPS, LATER_STEPS = 8, 32  # on an accelerator: number of first steps, interval later
FORWARDS = 4  # of such a step, whose values are compared
# Of the norm, by which projections may differ.
TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-3}
OTHER_TOLERANCE = 3e-2
SAME_BATCH = (
    "Give all ranks of one coordinate of the data axes the same batch (a sampler by"
    " mesh.get_local_rank('dp'), not by the rank), in the same mode."
)
SAME_SEED = (
    "Seed these ranks alike, by the coordinate of the data axes (torch.manual_seed(seed +"
    " mesh.get_local_rank('dp'))): infinity.parallel.tensor_parallel draws other masks where ranks"
    " have other heads."
)
SAME_LOSS = (
    "Compute the same loss on all ranks of one coordinate of the data axes: from the same labels,"
    " in the same mode."
)


class ChangedBuffers:
    """The buffers of a model, and their versions when they were read last."""

    def __init__(self) -> None:
        self._buffers: list[tuple[torch.nn.Module, str, str]] = []  # module, key and name
        # Of the buffers read last.
        self._versions: dict[str, tuple[weakref.ref[torch.Tensor], int]] = {}

    def note(self, model: torch.nn.Module) -> None:
        """Takes the buffers of ``model`` as they are."""
        self._buffers = [
            (module, key, f"buffer {path}.{key}" if path else f"buffer {key}")
            for path, module in model.named_modules()
            for key, buffer in module._buffers.items()
            if handle_of(buffer) is None
        ]
        self.read()

    def read(self) -> dict[str, torch.Tensor]:
        """Returns the buffers that were changed since the last call, by name."""
        buffers: dict[str, torch.Tensor] = {}
        for module, key, name in self._buffers:
            if (buffer := module._buffers.get(key)) is None or buffer.is_inference():
                continue
            known, version = self._versions.get(name, (lambda: None, -1))
            if known() is not buffer or version != buffer._version:
                self._versions[name] = weakref.ref(buffer), buffer._version
                buffers[name] = buffer
        return buffers


class InCommon(Extension):
    """Compares over the ranks of the tp axis, or of ep if they share a batch."""

    def __init__(self, collectives: Collectives, device: Device):
        self._collectives, self._device = collectives, device
        self._channel = collectives.ranks.tp_group
        self._buffers, self._draws, self._sketches = ChangedBuffers(), Draws(device), Sketches()
        # Roots, and whether they get parts of a sequence.
        self._of_parts = weakref.WeakKeyDictionary[torch.nn.Module, bool]()
        self._step, self._forwards = -1, 0  # root forwards since that step
        self._is_compared = False  # inputs are compared already, as the batch they are part of
        self._root: torch.nn.Module | None = None  # whose forward runs

    @classmethod
    def check_model(cls, model: Any, config: Any, ranks: Any) -> None:
        """Raises ConfigError for parts that do not fit the mesh, as :func:`.fit.check_fit` does."""
        check_fit(model, config, ranks)

    @classmethod
    def begin(
        cls, config: Any, device: Device, collectives: Collectives, events: Events
    ) -> InCommon | None:
        """Returns the comparison if there is such an axis."""
        return None if collectives.ranks.tp_group is None else cls(collectives, device)

    def install(self, job: Job, model: torch.nn.Module) -> None:
        """Takes the buffers of ``model`` as they are, whether equal on these ranks or a rank's own,
        and compares from now on."""
        self._steps, self._gradients, self._trained = job.steps, job.gradients, job.trained
        self._buffers.note(model)
        job.events.pass_begun.append(self.begin_forward)
        job.events.pass_ended.append(self.end_forward)
        job.events.step_compared.append(self.meet_for_step)

    def drop(self, job: Job) -> None:
        """Forgets what was drawn and sketched: ranks may have ended the pass at other places."""
        self._root = None
        self._draws.drop()
        self._sketches.take()

    # --- a root forward ---

    def begin_forward(self, root: torch.nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
        """Begins a root forward. Every rank calls this, and waits for the others. Raises
        UsageError, on all of these ranks, if they were given different tensors."""
        if self._step != self._steps.index:
            self._step, self._forwards = self._steps.index, 0
        self._forwards += 1
        self._gradients.takes_samples = self._is_due
        if not self._is_compared:
            buffers = {name: self.summary(buffer) for name, buffer in self._buffers.read().items()}
            self.compare(
                "a forward",
                {
                    "the mode": mode_of(root, self._device),
                    **self._described(root, args, kwargs),
                    **buffers,
                },
            )
        # Ranks with parts of a sequence draw other dropout masks, too.
        self._draws.begin(are_compared=not self._takes_parts(root))
        self._root = root

    def end_forward(self, module: torch.nn.Module, outputs: Iterable[torch.Tensor]) -> None:
        """Ends the forward of ``module``, if it is a root's, with its ``outputs``."""
        if self._root is not module:
            return
        self._root = None
        self._draws.end()
        if self._gradients.takes_samples and not self._is_compared:
            for output in outputs:
                if output.requires_grad and is_common(output) and output.numel():
                    self._sketches.watch(output)

    @contextmanager
    def without_comparisons(self) -> Iterator[None]:
        """Skips comparisons of forwards inside the block: a pipeline schedule runs them, and
        compares its whole batch. Tensors between stages may be cut, and torch's trial inputs are
        arbitrary."""
        self._is_compared = True
        try:
            yield
        finally:
            self._is_compared = False

    def compare(self, what: str, given: dict[str, str]) -> None:
        """Raises UsageError, on all of these ranks, if they reach ``what`` with different
        ``given``, or drew different random numbers. Every rank calls this, and waits for the
        others."""
        collectives = self._collectives
        with collectives.heard_elsewhere(self._channel):
            spans = collectives.spans(
                self._channel, what, [number_of(given), number_of(self._draws.drawn)]
            )
            if any(least != most for least, most in spans):
                self._refuse(what, given if spans[0][0] != spans[0][1] else {})
        self._draws.forget()

    def _takes_parts(self, root: torch.nn.Module) -> bool:
        if root not in self._of_parts:
            self._of_parts[root] = takes_parts(root)
        return self._of_parts[root]

    def compare_batch(self, what: str, args: tuple, kwargs: Mapping[str, Any]) -> None:
        """Raises UsageError, on all of these ranks, if they reach ``what`` with different
        batches."""
        named = tensors_in([*enumerate(args), *kwargs.items()], "")
        self.compare(what, {name: self.summary(tensor) for name, tensor in named})

    def _described(
        self, root: torch.nn.Module, args: tuple, kwargs: Mapping[str, Any]
    ) -> dict[str, str]:
        are_parts = self._takes_parts(root)
        named = tensors_in([*enumerate(args), *kwargs.items()], "")
        plain = {
            f"argument {key}": repr(value)
            for key, value in [*enumerate(args), *kwargs.items()]
            if _is_plain(value)
        }
        return {
            name or "the input": self.summary(tensor, with_values=not are_parts)
            for name, tensor in named
        } | plain

    def summary(self, tensor: torch.Tensor, *, with_values: bool = True) -> str:
        """Describes a tensor as a string that compares equal. Includes a digest of its values if
        they are the same on all ranks and can be read."""
        shape, local = shape_of(tensor), local_of(tensor)
        is_read = self._is_due or local.device.type == "cpu"
        if not (with_values and is_read and is_common(tensor) and _has_bytes(local)):
            return shape
        raw = local.detach().resolve_conj().resolve_neg().cpu().contiguous()
        return (
            f"{shape} with digest {native.crc32c(raw.view(-1).view(torch.uint8)):08x}"
            if raw.numel()
            else shape
        )

    # --- a step ---

    def meet_for_step(self, what: str, then: Callable[[], None] = lambda: None) -> None:
        """Meets for the step ``what``, and compares what these ranks have in common. Raises
        UsageError on all of them, or calls ``then`` as soon as they are known to agree."""
        self._collectives.compare_over(self._channel, what, self, then)

    def values(self) -> list[int]:
        """Returns the numbers that this rank contributes to a step's barrier."""
        grads = [sample for _, sample in self._samples()]
        outputs, reached = self._sketches.take()
        said = [
            ordered(number)
            for tensors in (grads, outputs, reached)
            for number in projected(tensors)
        ]
        return [number_of(self._draws.drawn), *said]

    def agrees(self, spans: list[tuple[int, int]]) -> bool:
        """Tells whether ``spans``, the (least, most) of all ranks' :meth:`values`, are equal. If
        so, clears what was drawn: the next step compares from here."""
        if any(self._differing(spans)):
            return False
        self._draws.forget()
        return True

    def check(self, spans: list[tuple[int, int]]) -> None:
        """Raises UsageError, on all of these ranks, if ``spans`` show a difference."""
        drawn, losses, grads = self._differing(spans)
        if drawn:
            self._refuse("a step", {})
        if losses:
            raise UsageError(
                "a step: the gradient of what the model gives differs between ranks with parts of"
                f" the same tensors, though the model gives the same on all of them. {SAME_LOSS}"
            )
        if grads:
            self._refuse_gradients()

    def _differing(self, spans: list[tuple[int, int]]) -> tuple[bool, bool, bool]:
        """Returns three flags: a difference in drawn numbers, in gradients of equal outputs, in
        gradients of parameters."""
        drawn, *others = spans
        grads, outputs, reached = (self._differ(*others[begin : begin + 2]) for begin in (0, 2, 4))
        return drawn[0] != drawn[1], reached and not outputs, grads

    def _differ(self, projection: tuple[int, int], norm: tuple[int, int]) -> bool:
        """Tells whether tensors with these projections and norms differ by more than rounding."""
        largest = number_of_ordered(norm[1])
        width = number_of_ordered(projection[1]) - number_of_ordered(projection[0])
        return largest < float("inf") and width > self._tolerance() * largest

    def _samples(self) -> Iterator[tuple[ParamHandle, torch.Tensor]]:
        return (
            (handle, handle.grad.sample)
            for handle in self._trained
            if handle.grad.sample is not None
        )

    def _tolerance(self) -> float:
        dtypes = {handle.flat_param.spec.grad_dtype for handle, _ in self._samples()}
        return max(
            (TOLERANCES.get(dtype, OTHER_TOLERANCE) for dtype in dtypes), default=OTHER_TOLERANCE
        )

    # --- errors ---

    def _refuse(self, what: str, given: dict[str, str]) -> NoReturn:
        drawn = {
            f"the state of {name} before what was drawn": f"digest {state:016x}"
            for name, state in self._draws.drawn.items()
        }
        self._draws.forget()
        everyones = self._collect((given, drawn), what)
        for part, remedy in ((0, SAME_BATCH), (1, SAME_SEED)):
            (first, firsts), *others = [(rank, mine[part]) for rank, mine in everyones]
            for rank, theirs in others:
                for name in dict.fromkeys([*firsts, *theirs]):
                    if firsts.get(name) != theirs.get(name):
                        said = (
                            f"{name} is {firsts.get(name, 'absent')} on rank {first} and"
                            f" {theirs.get(name, 'absent')} on rank {rank}"
                        )
                        raise UsageError(
                            f"{what}: {said}, though they have parts of the same tensors. {remedy}"
                        )
        raise UsageError(
            f"{what}: ranks with parts of the same tensors reached this call"
            " with different inputs, but no difference can be named"
        )

    def _refuse_gradients(self) -> NoReturn:
        mine = {handle.name: sample.double().cpu() for handle, sample in self._samples()}
        (first, firsts), *others = self._collect(mine, "a step")
        largest: dict[str, tuple[float, int]] = {}
        for rank, theirs in others:
            for name in firsts.keys() & theirs.keys():
                off, norm = (firsts[name] - theirs[name]).norm(), firsts[name].norm()
                largest[name] = max(
                    largest.get(name, (0.0, rank)),
                    (float(off / norm) if norm else float(off), rank),
                )
        name, (off, rank) = max(
            largest.items(), key=lambda item: item[1], default=("a parameter", (0.0, first))
        )
        raise UsageError(
            f"a step: the gradient of {name}, which ranks {first} and {rank} have whole, differs"
            f" between them by {off:.3g} of its norm, though they have parts of the same tensors."
            f" {SAME_LOSS}"
        )

    def _collect(self, mine: Any, what: str) -> list[tuple[int, Any]]:
        collectives = self._collectives
        return collectives.collect(
            (collectives.ranks.world_rank, mine), f"what differs at {what}", [self._channel]
        )

    # --- readings ---

    @property
    def _is_due(self) -> bool:
        is_compared = self._step < FIRST_STEPS or self._step % LATER_STEPS == 0
        return self._device.is_host or (is_compared and self._forwards <= FORWARDS)


def _has_bytes(tensor: torch.Tensor) -> bool:
    """Tells whether ``tensor`` is a plain tensor with memory: not on meta, not at home, not a
    functorch or fake tensor."""
    is_plain = type(tensor) in (
        torch.Tensor,
        torch.nn.Parameter,
    ) and not is_of_transform(tensor)
    return (
        is_plain
        and not tensor.is_meta
        and tensor.layout is torch.strided
        and handle_of(tensor) is None
    )


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str))
