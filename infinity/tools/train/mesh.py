"""The mesh of `infinity train --mesh`: divides a model over the ranks, by `infinity.parallel`.

axis        a name and its ranks: pp stages, dp data, ep experts, cp sequences, tp tensors; pp is
            the outermost one, and neighbours in tp are neighbours among the ranks
data ranks  those of dp and ep: each has batches of its own
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import infinity

from ...errors import ConfigError, UsageError
from ..plan.mesh_shape import parse_axes
from .classes import auto_class
from .examples import NOT_LEARNED, ExampleBatches

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh


AXES = ("pp", "dp", "ep", "cp", "tp")
# Options that need the whole model on a rank -> what else to do.
_OF_WHOLE = {
    "method": "leave out --mesh: TRL's trainer has data ranks",
    "lora_rank": "give dp alone: adapters are small, and each rank can have them all",
    "stalls": "leave it out",
}
FILLS = {"input_ids": 0, "labels": NOT_LEARNED, "attention_mask": 0}  # of shorter rows
Batch = dict[str, Any]


def mesh_sizes(args: argparse.Namespace, ranks: int) -> dict[str, int] | None:
    """Returns the ranks of each axis of ``--mesh``; None without one. Axes that are left out have
    one, and dp has the rest. Raises ConfigError, UsageError for options that do not go with it."""
    if args.mesh is None:
        _check_no_stages(args, "add --mesh pp=2")
        return None
    axes = parse_axes(args.mesh, AXES)
    others = math.prod(size for name, size in axes.items() if name != "dp")
    sizes = {name: axes.get(name, 1) for name in AXES}
    sizes["dp"] = axes.get("dp", max(1, ranks // others))
    if (count := math.prod(sizes.values())) != ranks:
        said = ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "dp=1"
        raise ConfigError(
            f"--mesh {args.mesh}: {said} is {count} {'rank' if count == 1 else 'ranks'}, and"
            f" {ranks} {'was' if ranks == 1 else 'were'} started: torchrun --standalone"
            f" --nproc-per-node {count} -m infinity train ... starts {count};"
            f" a mesh of {ranks} is --mesh dp={ranks}"
        )
    _check_options(args, sizes)
    return sizes


def _check_no_stages(args: argparse.Namespace, remedy: str) -> None:
    for option in ("pipeline_schedule", "pipeline_chunks"):
        if getattr(args, option) is not None:
            raise ConfigError(f"--{option.replace('_', '-')} is of stages: {remedy}")


def _check_options(args: argparse.Namespace, sizes: dict[str, int]) -> None:
    axes = [name for name in AXES if sizes[name] > 1 and name != "dp"]
    said = f"--mesh {args.mesh}"
    if "pp" not in axes:
        _check_no_stages(args, f"{said} has no pp")
    if not axes and args.method is None:
        return
    for option, remedy in _OF_WHOLE.items():
        if getattr(args, option) is not None:
            name = option.replace("_", "-")
            raise UsageError(f"--{name} does not go with {said}: {remedy}")
    if "pp" in axes and args.optim == "muon":
        raise UsageError(
            f"--optim muon does not go with {said}: it comes with a second optimizer, and a"
            " pipeline takes one. Leave out pp, or give --optim adamw"
        )
    if args.optim != "adamw" and {"ep", "tp"} & {*axes}:
        raise UsageError(
            f"--optim {args.optim} does not go with {said}: it steps whole matrices, of which a"
            " rank has parts. Give dp and cp alone, or --optim adamw"
        )
    if "cp" in axes and len(axes) > 1:
        others = [name for name in axes if name != "cp"]
        raise ConfigError(
            f"{said}: cp goes with dp alone here: leave out cp, or {' and '.join(others)}"
        )
    if {"ep", "tp"} <= {*axes}:
        raise ConfigError(
            f"{said}: ranks of ep have batches of their own, and ranks of tp share one: leave one"
            " of both out"
        )
    if args.pack and {"cp", "pp"} & {*axes}:
        raise UsageError(f"--pack does not go with {said}: leave it out, or give dp and tp alone")


def make_mesh(sizes: dict[str, int] | None, device: str | None) -> DeviceMesh | None:
    """Makes the mesh of these sizes, with dp and the axes of several ranks. Every rank calls
    this."""
    if sizes is None or math.prod(sizes.values()) == 1:
        return None
    from torch.distributed.device_mesh import init_device_mesh

    used = {name: size for name, size in sizes.items() if size > 1 or name == "dp"}
    kind = (device or "cpu").partition(":")[0]
    return init_device_mesh(kind, tuple(used.values()), mesh_dim_names=tuple(used))


def axes_of(mesh: DeviceMesh | None) -> tuple[str, ...]:
    """Lists the axes of a mesh that divide a model or its sequences; none without a mesh."""
    names = (mesh.mesh_dim_names or ()) if mesh is not None else ()
    return tuple(name for name in names if name != "dp")


def check_mesh(
    args: argparse.Namespace, mesh: DeviceMesh | None, model_config: Any, config: infinity.Config
) -> None:
    """Raises ConfigError, before data and weights are read, for a model that the mesh cannot
    divide. Divides it on meta to find out. Every rank calls this."""
    if not axes_of(mesh):
        return
    import torch

    from ...ext.pipeline.choice import choose
    from ...ext.pipeline.stages import chain_of

    with torch.device("meta"):
        model = auto_class(model_config, args.model).from_config(
            model_config, trust_remote_code=args.trust_remote_code
        )
    model = divide(model, mesh, lambda line: None)
    if "pp" in axes_of(mesh):
        chain, stages = chain_of(model), mesh["pp"].size()
        choose(chain, config, stages, **_asked(args), costs=None, load_rate=None)


def check_batches(mesh: DeviceMesh | None, batches: Any) -> None:
    """Raises ConfigError for batches that the mesh cannot divide."""
    if "pp" in axes_of(mesh):
        (batch, *_) = batches.held_out(1)
        if more := sorted({*batch} - {*FILLS}):
            raise ConfigError(
                f"--mesh pp={mesh['pp'].size()} takes batches of text, and those of --data have"
                f" {', '.join(more)}: give dp and tp"
            )
    if "cp" not in axes_of(mesh):
        return
    length, of_samples = batches.sequence_length, isinstance(batches, ExampleBatches)
    size = mesh["cp"].size()
    if of_samples:
        raise ConfigError(
            f"--mesh cp={size} divides windows of running text, and --data has samples, whose rows"
            " are padded: give dp and tp"
        )
    if length % size:
        raise ConfigError(
            f"--mesh cp={size}: --sequence-length {length} does not divide by {size}: give"
            f" {max(size, length - length % size)}"
        )


def divide(model: nn.Module, mesh: DeviceMesh | None, say: Callable[[str], None]) -> nn.Module:
    """Divides the tensors, experts or sequences of ``model`` over the mesh, and says how. Every
    rank calls this. Raises ConfigError on all of them, with the model unchanged."""
    axes = axes_of(mesh)
    with _said(say):
        if "tp" in axes:
            model = infinity.parallel.tensor_parallel(model, mesh["tp"])
        if "ep" in axes:
            model = infinity.parallel.expert_parallel(model, mesh["ep"], exchange="tokens")
        if "cp" in axes:
            model = infinity.parallel.sequence_parallel(model, mesh["cp"])
    return model


def wrap(
    args: argparse.Namespace,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    config: infinity.Config,
    mesh: DeviceMesh | None,
    say: Callable[[str], None],
) -> tuple[Any, list[Any], Any]:
    """Wraps the model with its optimizers. With stages returns this rank's chunks as the model, and
    their pipeline. Every rank calls this."""
    if "pp" not in axes_of(mesh):
        model, optimizers = infinity.wrap_model(model, optimizers, config, mesh=mesh)
        return model, optimizers, None
    (optimizer,) = optimizers
    with _said(say):
        pipe, optimizer = infinity.parallel.pipeline(model, mesh, optimizer, config, **_asked(args))
    return pipe.chunks, [optimizer], pipe


def _asked(args: argparse.Namespace) -> dict[str, Any]:
    """Returns what is asked of the pipeline: each micro-batch of a step is one of its own."""
    return {
        "schedule": args.pipeline_schedule or "auto",
        "micro_batches": args.accumulate,
        "chunks": args.pipeline_chunks,
    }


@contextlib.contextmanager
def _said(say: Callable[[str], None]) -> Iterator[None]:
    """Says what the functions inside print: of the first rank."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        yield
    if text := output.getvalue().rstrip():
        say(text)


def joined(batches: Sequence[Batch], rows: int) -> Batch:
    """Joins micro-batches into the batch of a pipeline: rows are filled up to the longest, and to
    ``rows`` in number, by tokens that are not learned."""
    import torch

    wholes = {}
    for name in batches[0]:
        whole = [row for batch in batches for row in batch[name]]
        more = torch.full_like(whole[0], NOT_LEARNED) if name == "labels" else whole[0]
        wholes[name] = torch.nn.utils.rnn.pad_sequence(
            whole + [more] * (rows - len(whole)), batch_first=True, padding_value=FILLS[name]
        )
    return wholes
