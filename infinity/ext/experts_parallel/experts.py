"""expert_parallel: divides the experts of a mixture among the ranks of a mesh axis, whole experts
to each."""

from __future__ import annotations

import importlib
import math
import re
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from ...errors import ConfigError
from ..dtensor.agreement import agree_over, check_axis
from ..dtensor.input_sums import sum_gradients
from ..dtensor.plans import describe_plan, general, own_plan
from ..dtensor.tensors import check_own_plan, cut_by_own_plan, describe_cut, mark_cut
from ..rows.experts import mark_divided

WEIGHTS = "grouped_gemm"  # transformers' style of a parameter with one slice for each expert
EXCHANGES = {"outputs": "all_reduce", "tokens": "all_to_all"}  # our name -> transformers' name
ONE_SUM = "infinity_all_reduce"  # the name of our own way to exchange outputs, for transformers


def expert_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    exchange: str = "outputs",
    cut_rest: bool = False,
    quiet: bool = False,
) -> nn.Module:
    """Gives each rank of ``mesh`` an equal part of a mixture's experts, before
    :func:`infinity.wrap_model`. Every rank calls this. Returns the same object.

    model
        A transformers model with an ``ep_plan`` (Mixtral, Qwen-MoE, gpt-oss, DeepSeek and others),
        with the same values on every rank, or on ``meta``.
    mesh
        The one-dimensional ``ep`` (or ``tp``) axis of the job's mesh.
    exchange
        "outputs": the ranks have the same batch. Each computes its own experts' tokens, and one
        all-reduce adds up the outputs (transformers' ``AllReduceEP``). "tokens": they are data
        ranks with batches of their own. Tokens go to their experts' ranks and back, by two
        all-to-alls a layer (``AllToAllEP``); all else is sharded over these ranks, too.
    cut_rest
        Also shards attention and other layers, by the model's tp plan. Else every rank has them.
    quiet
        Does not print the plan.

    Raises ConfigError on every rank, with the model unchanged, for a model without such a plan or
    already sharded; for experts, or heads with ``cut_rest``, that do not divide by the ranks; for
    ``cut_rest`` with "tokens" (it needs ranks that share a batch); and for inputs that differ.
    """
    check_axis("expert_parallel", mesh, "ep")

    def describe() -> tuple[dict[str, str], tuple[dict[str, str], dict[str, str], dict[str, str]]]:
        placed = _check(model, mesh, exchange, cut_rest)
        options = {"exchange": exchange, "cut_rest": str(cut_rest)}
        return describe_cut(model, placed[1] | placed[0]) | options, placed

    plan, rest, styles = agree_over("expert_parallel", mesh, describe)
    if not quiet and mesh.get_rank() == 0:
        print(describe_plan(rest | plan, model), flush=True)
    if (size := mesh.size()) == 1:
        return model
    if rest:
        cut_by_own_plan(model, mesh, rest)
    _divide(model, mesh, styles, exchange)
    batches = {"fsdp_size": size} if exchange == "tokens" else {"tp_size": size, "tp_plan": rest}
    experts = {"ep_size": size, "ep_plan": plan, "ep_implementation": EXCHANGES[exchange]}
    mark_cut(model, mesh, **batches, **experts)
    return model


def _check(
    model: nn.Module, mesh: DeviceMesh, exchange: str, cut_rest: bool
) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Returns the plan of the experts, that of the rest, and the style of each module and parameter
    that the first one names."""
    if exchange not in EXCHANGES:
        raise ConfigError(
            f"expert_parallel: exchange is {exchange!r}; there are {', '.join(EXCHANGES)}"
        )
    if exchange == "tokens" and cut_rest:
        raise ConfigError(
            "expert_parallel: cut_rest needs ranks that share a batch; with exchange='tokens' each"
            " has its own. Leave one of both out."
        )
    plan = _own_expert_plan(model)
    if any(isinstance(param, DTensor) for param in model.parameters()):
        raise ConfigError(
            "this model is already sharded: some of its parameters are DTensors."
            " expert_parallel(cut_rest=True) shards both at once."
        )
    styles = {name: plan[general(name)] for name in _names(model) if general(name) in plan}
    _check_experts(model, styles, mesh.size())
    rest = _plan_of_rest(model, plan) if cut_rest else {}
    check_own_plan(model, mesh, rest)
    return plan, rest, styles


def experts_of(model: nn.Module) -> int:
    """Returns the largest number of ranks over which the experts of every layer can be divided; 1
    if ``model`` has none, or no plan for them."""
    return math.gcd(*(param.size(0) for param in expert_parameters(model))) or 1


def expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Lists the parameters of ``model`` that have one slice for each expert, by its plan."""
    plan = getattr(model, "ep_plan", None) or {}
    return [
        param
        for name, param in model.named_parameters(remove_duplicate=False)
        if plan.get(general(name)) == WEIGHTS
    ]


def chosen_of(model: nn.Module) -> int:
    """Returns how many experts of a layer a token goes to; 0 if the configuration does not tell."""
    return getattr(model.config.get_text_config(), "num_experts_per_tok", 0) or 0


def _divide(model: nn.Module, mesh: DeviceMesh, styles: dict[str, str], exchange: str) -> None:
    """Makes transformers give this rank its experts, and each layer's experts their tokens."""
    theirs = importlib.import_module("transformers.distributed.expert_parallel")
    sharing = mesh if exchange == "outputs" else _Alone()
    way = EXCHANGES[exchange]
    if exchange == "outputs":
        way = ONE_SUM
        theirs.EPImplementationInterface.register(way, _one_sum(theirs.AllReduceEP))
    theirs.apply_expert_parallelism(model, mesh, sharing, styles, ep_implementation=way)
    for name in (
        {name.rpartition(".")[0] for name, style in styles.items() if style == WEIGHTS}
        if exchange == "tokens"
        else ()
    ):
        mark_divided(model.get_submodule(name))


def _one_sum(theirs: type) -> type:
    """Makes a class of transformers' ``AllReduceEP`` that sums the gradients of the tokens and of
    their routing weights by one all-reduce; theirs has one for each."""

    class OneSum(theirs):  # type: ignore[misc]
        def __call__(
            self, tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
        ) -> torch.Tensor:
            mesh, count = self.ep_mesh, self.num_local_experts
            tokens, weights = sum_gradients(mesh, tokens, weights)
            elsewhere = experts // count != mesh.get_local_rank()
            own = (experts % count).masked_fill(elsewhere, count)
            output = self.experts_forward(tokens, own, weights.masked_fill(elsewhere, 0.0))
            partial = DTensor.from_local(output, mesh, [Partial()], run_check=False)
            return partial.redistribute(placements=[Replicate()]).to_local()

    return OneSum


class _Alone:
    """A mesh axis of one rank, which transformers requires, for ranks with batches of their own."""

    def __init__(self) -> None:
        # On paper there is no store through which another backend could meet.
        backend = "fake" if dist.get_backend() == "fake" else "gloo"
        self._group = dist.new_group(
            [dist.get_rank()], backend=backend, use_local_synchronization=True
        )

    def size(self) -> int:
        return 1

    def get_group(self) -> dist.ProcessGroup:
        return self._group


def _own_expert_plan(model: nn.Module) -> dict[str, str]:
    plan = getattr(model, "ep_plan", None)
    if not isinstance(plan, dict) or WEIGHTS not in plan.values():
        raise ConfigError(
            f"{type(model).__name__} has no plan for its experts (ep_plan, as models of"
            " transformers 5.2x have that are mixtures of experts): cut it with tensor_parallel,"
            " or give its parameters as DTensors that are Shard(0) over the axis"
        )
    return dict(plan)


def _names(model: nn.Module) -> list[str]:
    """Returns the names of parameters, then of modules: the replaced forward of a module counts the
    remaining experts."""
    return [
        name
        for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_modules())
    ]


def _plan_of_rest(model: nn.Module, experts: dict[str, str]) -> dict[str, str]:
    """Returns the model's tensor-parallel plan without the modules of ``experts`` and those inside
    them."""
    inside = re.compile(rf"(?:{'|'.join(map(re.escape, experts))})(?:\..+)?").fullmatch
    rest = {name: style for name, style in own_plan(model).items() if not inside(name)}
    if not rest:
        raise ConfigError(
            f"cut_rest: {type(model).__name__} has no tensor-parallel plan for what are not its"
            " experts"
        )
    return rest


def _check_experts(model: nn.Module, styles: dict[str, str], size: int) -> None:
    params: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    for name, style in styles.items():
        if style == WEIGHTS and params[name].size(0) % size:
            raise ConfigError(
                f"{name}: {params[name].size(0)} experts cannot be shared out equally to {size}"
                f" ranks (ep={size})"
            )
