"""Agreement: compares the inputs of ranks that shard one model together, before any change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...core.params.tensors import digest_of
from ...core.units.forms import division_of
from ...core.wrap.module_settings import describe_modules, describe_orders
from ...errors import ConfigError, UsageError

T = TypeVar("T")
MODE = "the mode"  # train() or eval(), in the digests of a batch
LONGEST = 200  # characters of a rank's value, in an error


def collect(what: str, group: dist.ProcessGroup | None, make: Callable[[], T]) -> list[T]:
    """Collects the result of ``make`` on each rank of ``group`` (None: of the job), in rank order.
    A collective.

    If ``make`` raises on a rank, that rank reports it to the others before it raises; these raise
    ConfigError with its text.
    """
    mine: tuple[int, T | None, str] = dist.get_rank(), None, ""
    failure: Exception | None = None
    try:
        mine = mine[0], make(), ""
    except Exception as error:  # noqa: BLE001 - raised when the others have heard of it
        failure, mine = error, (mine[0], None, f"{type(error).__name__}: {error}")
    everyones: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyones, mine, group=group)
    if failure is not None:
        raise failure
    for rank, _, why in everyones:
        if why:
            raise ConfigError(f"{what}: rank {rank} was given what does not fit: {why}")
    return [made for _, made, _ in everyones]


def agree(
    what: str, group: dist.ProcessGroup | None, describe: Callable[[], tuple[dict[str, str], T]]
) -> T:
    """Compares the ranks' descriptions over ``group``. Returns the value that this rank's
    ``describe`` made beside its description. A collective.

    Raises ConfigError on all ranks, naming two ranks and the first difference, if they differ.
    """
    made: list[T] = []

    def describe_mine() -> tuple[int, dict[str, str]]:
        description, value = describe()
        made.append(value)
        return dist.get_rank(), description

    (first, firsts), *others = collect(what, group, describe_mine)
    for rank, theirs in others:
        for key in dict.fromkeys([*firsts, *theirs]):
            if firsts.get(key) != theirs.get(key):
                raise ConfigError(
                    f"{what}: {key} is {_cut(firsts.get(key, 'absent'))} on rank {first} and"
                    f" {_cut(theirs.get(key, 'absent'))} on rank {rank}. Give all ranks the same;"
                    " nothing was changed."
                )
    return made[0]


def agree_over(what: str, mesh: DeviceMesh, describe: Callable[[], tuple[dict[str, str], T]]) -> T:
    """Compares the descriptions of the ranks of ``mesh``, as :func:`agree` does."""
    return agree(what, mesh.get_group(), describe) if mesh.size() > 1 else describe()[1]


def check_axis(what: str, mesh: Any, name: str) -> None:
    """Raises ConfigError unless ``mesh`` is one axis, as ``mesh[name]`` of the job's mesh is."""
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise ConfigError(
            f"{what} takes the {name} axis of a mesh (mesh['{name}']), of one dimension, not"
            f" {mesh!r}"
        )


def describe_model(model: nn.Module) -> dict[str, str]:
    """Describes a model before it is sharded: its parameters, their ties and order in memory, its
    buffers, its modules with their settings, its configuration."""
    described = {"the model": type(model).__name__}
    names: dict[torch.Tensor, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
        kind = "trained" if param.requires_grad else "frozen"
        described[f"parameter {name}"] = (
            f"{tuple(param.shape)}{division_of(param).told} {param.dtype} {kind}"
        )
    for name, buffer in model.named_buffers():
        shape, dtype, digest = (
            (tuple(buffer.shape), buffer.dtype, None) if buffer.is_meta else digest_of(buffer)
        )
        described[f"buffer {name}"] = (
            f"{shape} {dtype} {f'with digest {digest.hex()}' if digest is not None else 'on meta'}"
        )
    described["parameters that are one"] = (
        "; ".join(" = ".join(each) for each in names.values() if len(each) > 1) or "none"
    )
    described |= describe_modules(
        {each: name for name, each in model.named_modules()}
    ) | describe_orders(model.named_parameters())
    settings = getattr(getattr(model, "config", None), "to_dict", dict)()
    own = "_name_or_path", "transformers_version"  # depend on this rank's source of the model
    return described | {
        f"config.{key}": repr(value) for key, value in settings.items() if key not in own
    }


def refuse_other_batches(everyones: list[tuple[int, dict[str, Any]]]) -> None:
    """Raises UsageError if the ranks' digests of their batches differ."""
    (first, theirs), *others = everyones
    for rank, digests in others:
        if differing := [
            name for name in {**theirs, **digests} if theirs.get(name) != digests.get(name)
        ]:
            if differing == [MODE]:
                raise UsageError(
                    f"rank {first} is in {theirs[MODE]} and rank {rank} in {digests[MODE]}: call"
                    " the same on the chunks of all ranks"
                )
            raise UsageError(
                f"ranks {first} and {rank} have other batches ({', '.join(differing)}), though they"
                " have other parts of one model: give all ranks of one coordinate of the data axes"
                " the same batch (a sampler by mesh.get_local_rank('dp'), not by the rank)"
            )


def is_plain(value: Any) -> bool:
    """Returns whether ``value`` has the same repr on every rank that has the same value."""
    return value is None or isinstance(value, (bool, int, float, str))


def _cut(told: str) -> str:
    return told if len(told) <= LONGEST else f"{told[:LONGEST]}..."
