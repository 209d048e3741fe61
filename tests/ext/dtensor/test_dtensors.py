"""DTensors: local parts of distributed parameters are read, replaced and made from other values;
plain tensors go through as they are.

Words used here: **here**: this process, as rank 1 of a mesh of 2 x 2 ranks, the others of which
only seem to be there.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lone import lone_group
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from infinity.core.params.parameter import ResidentParameter
from infinity.core.units import forms
from infinity.errors import ConfigError, UsageError
from infinity.ext.checkpoint.meta_init import empty_like
from infinity.ext.dtensor import dtensors

WHOLE = torch.arange(10.0).view(5, 2)
HALF = WHOLE[3:]  # what tp rank 1 of 2 has of the rows
PLACEMENTS = [Replicate(), Shard(0)]
FORM = dtensors.DTensorForm()


@pytest.fixture
def mesh():
    """Here is at (0, 1)."""
    with lone_group(rank=1, size=4):
        yield dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def tensor_on(mesh, placements=PLACEMENTS, whole: torch.Tensor = WHOLE) -> DTensor:
    return distribute_tensor(whole.clone(), mesh, placements, src_data_rank=None)


def param_on(mesh, placements=PLACEMENTS) -> nn.Parameter:
    return nn.Parameter(tensor_on(mesh, placements))


# --- what a tensor is ---


def test_a_distributed_tensor_is_known_from_a_plain_one(mesh):
    plain, param = nn.Parameter(WHOLE.clone()), param_on(mesh)
    assert type(forms.form_of(param)) is dtensors.DTensorForm and forms.is_plain(plain)
    assert forms.plain_class(param) is DTensor and forms.plain_class(plain) is nn.Parameter
    plain.__class__ = ResidentParameter
    assert forms.plain_class(plain) is nn.Parameter
    assert forms.division_of(param).ranks == (0, 1, 2, 3)
    assert forms.division_of(plain).ranks == ()
    assert forms.division_of(tensor_on(mesh["tp"], [Shard(0)])).ranks == (0, 1)
    assert forms.local_of(param).tolist() == HALF.tolist() and forms.local_of(plain) is plain
    assert forms.division_of(plain).told == ""
    assert forms.division_of(param).told == f" {param.placements} over (2, 2)"


def test_only_a_parameter_that_is_exactly_a_dtensor_over_a_plain_tensor_is_distributed(mesh):
    """Twins: a tensor, a plain parameter, another class, and another class inside."""

    class Other(torch.Tensor):
        """Something of a library."""

    class Kind(DTensor):
        """A subclass."""

    assert FORM.moves(param_on(mesh))
    assert not FORM.moves(tensor_on(mesh))
    assert not FORM.moves(nn.Parameter(WHOLE.clone()))
    kind, inside = param_on(mesh), param_on(mesh)
    kind.__class__ = Kind
    inside._local_tensor = HALF.as_subclass(Other)
    assert not FORM.moves(kind)
    assert not FORM.moves(inside)


@pytest.mark.parametrize("first", [Replicate(), Shard(1)])
def test_placements_that_can_be_trained_are_accepted(first, mesh):
    """Twins: a plain parameter; sums that are not reduced, and stripes, with what to do instead."""
    forms.PLAIN.check("w", nn.Parameter(WHOLE.clone()))
    FORM.check("w", param_on(mesh, [first, Shard(0)]))

    class _StripedShard(Shard):
        """Packs weights in stripes."""

    for other, said in (
        (Partial(), "Partial on .* reduce it first"),
        (_StripedShard(0), "Striped"),
    ):
        local = DTensor.from_local(HALF.clone(), mesh, [first, Partial()], run_check=False)
        param = nn.Parameter(local)
        param._spec = SimpleNamespace(mesh=mesh, placements=(first, other), device_mesh=mesh)
        with pytest.raises(ConfigError, match=f"parameter w is a DTensor with placement {said}"):
            FORM.check("w", param)


def test_the_first_of_a_meshs_replicas_is_counted(mesh):
    """By hand: here is the first along dp and the second along tp. Twin: parts are all counted."""
    for placements, counts, is_common in (
        ([Replicate(), Shard(0)], True, False),
        ([Shard(0), Replicate()], False, False),
        ([Replicate(), Replicate()], False, True),
        ([Shard(0), Shard(1)], True, False),
    ):
        param = param_on(mesh, placements)
        assert (forms.division_of(param).copy == 0) is counts
        assert forms.is_common(param) is is_common
    assert forms.division_of(WHOLE).copy is None and forms.is_common(WHOLE)


def test_elements_are_reserved_for_the_largest_local_part(mesh):
    """By hand: of 5 rows the first rank has 3. Along both axes one rank has 2 of them."""
    assert forms.division_of(WHOLE).span == 10
    assert forms.division_of(param_on(mesh)).span == 3 * 2
    assert forms.division_of(param_on(mesh, [Shard(1), Shard(0)])).span == 3 * 1
    assert forms.division_of(param_on(mesh, [Shard(0), Shard(0)])).span == 2 * 2
    assert forms.division_of(param_on(mesh, [Replicate(), Replicate()])).span == 10


def test_a_local_part_begins_at_its_place_in_the_whole(mesh):
    assert forms.division_of(param_on(mesh)).offset == (3, 0)
    assert forms.division_of(param_on(mesh, [Replicate(), Shard(1)])).offset == (0, 1)
    assert forms.division_of(WHOLE).offset == (0, 0)


def test_the_mesh_of_the_job_is_the_root_of_a_parameters(mesh):
    """Twin: plain parameters have none."""
    plain = nn.Parameter(WHOLE.clone())
    assert forms.division_of(plain).mesh is None
    assert forms.division_of(param_on(mesh["tp"], [Shard(0)])).mesh == mesh
    assert forms.division_of(param_on(mesh)).mesh == mesh


# --- making and replacing ---


def test_a_local_value_becomes_a_dtensor_like_its_parameter(mesh):
    """Claim: in its own dtype, of the whole's shape. Twin: of a plain parameter it stays itself."""
    local = HALF.double()
    made = forms.like(param_on(mesh), local)
    assert made._local_tensor is local and made.shape == (5, 2) and made.dtype is torch.float64
    assert made.placements == tuple(PLACEMENTS) and made.device_mesh == mesh
    assert made.stride() == (2, 1) and not made.requires_grad
    assert made._spec.tensor_meta.dtype is torch.float64
    assert forms.like(nn.Parameter(WHOLE), local) is local


def test_a_spec_makes_a_dtensor_of_a_local_part_again(mesh):
    param, local = param_on(mesh), HALF.clone()
    made = FORM.build(FORM.spec(param), local)
    assert made._spec is param._spec and made._local_tensor is local and not made.requires_grad
    assert forms.PLAIN.spec(WHOLE) is None and forms.PLAIN.build(None, local) is local


def test_the_whole_value_is_gathered(mesh):
    """Method: replicas, of which each has the whole; of parts only the form is looked at."""
    param, local = param_on(mesh, [Replicate(), Replicate()]), WHOLE + 1
    assert torch.equal(forms.gathered(forms.like(param, local)), local)
    assert type(forms.gathered(forms.like(param_on(mesh), HALF.clone()))) is torch.Tensor
    assert forms.gathered(forms.like(param_on(mesh), HALF.clone())).shape == (5, 2)
    assert forms.gathered(forms.like(nn.Parameter(WHOLE), local)) is local


@pytest.mark.parametrize("others", [1, 2])
def test_the_groups_of_an_earlier_mesh_are_not_met(others):
    """Method: equal meshes whose groups have other names; without a clear the second fails."""
    with lone_group(rank=1, size=4):
        for _ in range(others):
            dist.new_group([0, 1])
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        assert forms.gathered(forms.like(param_on(mesh), HALF.clone())).shape == (5, 2)


def test_a_parameter_or_its_local_part_becomes_a_view(mesh):
    """Claim: of a distributed one the local part, with a version counter of its own."""
    memory = torch.full((4, 2), 7.0)
    param, plain = param_on(mesh), nn.Parameter(WHOLE.clone())
    FORM.show(param, memory[:2])
    forms.PLAIN.show(plain, memory)
    memory[0, 0] = 1
    assert forms.local_of(param).tolist() == [[1, 7], [7, 7]] and plain.detach()[0, 0] == 1
    assert param.shape == (5, 2) and forms.local_of(param)._version == 0 < memory._version


def test_an_empty_parameter_is_like_one_on_meta_and_has_no_storage(mesh):
    for requires_grad in (True, False):
        local = torch.empty(2, 2, device="meta")
        meta = nn.Parameter(forms.like(param_on(mesh), local), requires_grad=requires_grad)
        made = empty_like(meta)
        assert FORM.moves(made) and made._spec is meta._spec
        assert made.requires_grad is requires_grad
        assert made._local_tensor.is_cpu and made._local_tensor.shape == (2, 2)
        assert made._local_tensor.untyped_storage().nbytes() == 0


# --- parts of other values ---


def test_a_whole_value_is_cut_as_its_parameter_is(mesh):
    """Twin: of a plain parameter it stays itself, or is gathered."""
    value = WHOLE + 100
    assert torch.equal(forms.part_of(param_on(mesh), value, "w"), value[3:])
    assert torch.equal(
        forms.part_of(param_on(mesh, [Replicate(), Shard(1)]), value, "w"), value[:, 1:]
    )
    assert forms.part_of(nn.Parameter(WHOLE), value, "w") is value
    replicas = tensor_on(mesh, [Replicate(), Replicate()], value)
    assert torch.equal(forms.part_of(nn.Parameter(WHOLE), replicas, "w"), value)


def test_a_value_that_is_cut_the_same_way_is_taken_and_another_is_cut_again(mesh):
    value = WHOLE + 100
    same = tensor_on(mesh, PLACEMENTS, value)
    assert forms.part_of(param_on(mesh), same, "w") is same._local_tensor
    replicas = tensor_on(mesh, [Replicate(), Replicate()], value)
    assert torch.equal(forms.part_of(param_on(mesh), replicas, "w"), value[3:])


def test_a_value_of_another_shape_or_mesh_is_refused(mesh):
    """Twin: a plain parameter's value of another shape is left to others."""
    with pytest.raises(UsageError, match=r"w: a tensor of shape \(2, 5\) .* of \(5, 2\)"):
        forms.part_of(param_on(mesh), WHOLE.t(), "w")
    with pytest.raises(UsageError, match="w: a DTensor on .* for one on"):
        forms.part_of(param_on(mesh), tensor_on(mesh["tp"], [Shard(0)]), "w")
    assert forms.part_of(nn.Parameter(WHOLE), WHOLE.t(), "w").shape == (2, 5)


# --- torch's scaler, and inputs in parts ---


def test_gradients_of_both_kinds_are_unscaled_together(mesh):
    """Claim: torch's handler is replaced once, however often that is asked for. Twins: only plain
    ones, only distributed ones."""
    dtensors.let_scalers_mix()
    handlers = dict(DTensor._op_dispatcher._custom_op_handlers)
    dtensors.let_scalers_mix()
    assert handlers == DTensor._op_dispatcher._custom_op_handlers
    for kinds in ("pd", "p", "d", "dpd"):
        grads = [torch.ones(3) if kind == "p" else tensor_on(mesh) for kind in kinds]
        found = torch.zeros(())
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.tensor(0.5))
        expected = [[0.5] * 3 if kind == "p" else (HALF / 2).tolist() for kind in kinds]
        assert [forms.local_of(grad).tolist() for grad in grads] == expected
        assert found.item() == 0


def test_a_plain_gradient_that_is_not_finite_is_found_beside_distributed_ones(mesh):
    dtensors.let_scalers_mix()
    found = torch.zeros(())
    grads = [tensor_on(mesh), torch.tensor([torch.inf])]
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.tensor(0.5))
    assert found.item() == 1


@pytest.mark.parametrize(
    "first, takes",
    [
        (ColwiseParallel(input_layouts=Shard(1)), True),
        (ColwiseParallel(), False),
        (RowwiseParallel(), True),
        (RowwiseParallel(input_layouts=Replicate()), False),
        (None, True),
    ],
)
def test_inputs_come_in_parts_if_the_first_distributed_layer_takes_a_shard(first, takes, mesh):
    """Twins: later layers do not matter, nor hooks of others. Without the first, the second
    counts."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].register_forward_pre_hook(lambda module, args: None)
    plan = {"1": ColwiseParallel(input_layouts=Shard(1))} | ({"0": first} if first else {})
    if first is not None and takes:
        plan["1"] = ColwiseParallel()
    parallelize_module(model, mesh["tp"], plan)
    assert dtensors.takes_parts(model) is takes
    assert not dtensors.takes_parts(nn.Linear(2, 2))
