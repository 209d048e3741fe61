"""AtHome: a tensor without memory that stands for a gradient, and what it does not share."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from small import RAMP, AtHome, small_at_home

from infinity import UsageError

ROWS = torch.stack([RAMP, RAMP])


@pytest.fixture
def job() -> AtHome:
    job = small_at_home()
    job.backward(RAMP, 2 * RAMP)
    return job


@pytest.fixture
def grad(job) -> torch.Tensor:
    return job.handles[0].param.grad


def saved(grad: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(grad, file)
    file.seek(0)
    return torch.load(file)


TAKES = {
    "clone": torch.clone,
    "deepcopy": copy.deepcopy,
    "pickle": lambda grad: pickle.loads(pickle.dumps(grad)),
    "save": saved,
}


@pytest.mark.parametrize("how", TAKES)
def test_a_copy_is_a_plain_tensor_of_the_values_and_no_part_of_the_gradient(grad, how):
    taken = TAKES[how](grad)
    assert type(taken) is torch.Tensor and torch.equal(taken, ROWS)
    taken.fill_(9.0)
    assert torch.equal(grad.clone(), ROWS)


def test_one_deep_copy_of_several_references_is_one_tensor(job, grad):
    """Twin: another gradient is another one."""
    first, again, other = copy.deepcopy([grad, grad, job.handles[1].param.grad])
    assert first is again and other is not first and torch.equal(other, 2 * ROWS)


@pytest.mark.parametrize("take", [copy.copy, torch.detach, lambda grad: grad.data])
def test_what_shares_memory_in_torch_is_the_gradient_itself(grad, take):
    taken = take(grad)
    taken.fill_(9.0)
    assert grad.tolist() == [[9.0] * 4] * 2


def test_it_has_the_form_of_its_parameter_and_shows_its_values(grad):
    assert grad.shape == (2, 4) and grad.stride() == (4, 1) and grad.storage_offset() == 0
    assert grad.dtype == torch.float32 and grad.device.type == "cpu"
    assert grad.tolist() == ROWS.tolist()
    assert repr(grad) == f"GradProxy(layers.0.weight, {ROWS!r})"
    assert not grad.is_shared() and not grad.is_pinned()


EXPORTS = {
    "DLPack": lambda grad: torch.utils.dlpack.from_dlpack(grad),
    "data_ptr()": lambda grad: grad.data_ptr(),
    "untyped_storage()": lambda grad: grad.untyped_storage(),
    "storage()": lambda grad: grad.storage(),
    "storage() of a type": lambda grad: grad._typed_storage(),
    "share_memory_()": lambda grad: grad.share_memory_(),
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("what", EXPORTS)
def test_memory_that_the_engine_uses_again_is_not_shared(grad, what):
    """Twin: a copy can be."""
    name = what.partition(" by ")[0].partition(" of a ")[0]
    with pytest.raises(UsageError) as caught:
        EXPORTS[what](grad)
    assert str(caught.value).startswith(f"layers.0.weight.grad: {name} would share")
    EXPORTS[what](grad.clone())


def test_its_storage_cannot_be_written_past_it(grad):
    """By torch's own method: a write there would be to no memory."""
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(RuntimeError):
        torch.Tensor.untyped_storage(grad).fill_(0)
    assert torch.equal(grad.clone(), ROWS)


def test_on_a_processor_there_is_no_interface_of_cuda(grad):
    """As on a plain tensor: whoever looks for one finds none."""
    assert not hasattr(grad, "__cuda_array_interface__")


def test_data_is_replaced_by_values_of_its_form(grad):
    """Twins: by itself it stays as it is; another shape or dtype is refused."""
    grad.data = grad.detach()
    for other in (torch.ones(4, 2), torch.ones(2, 4).double()):
        with pytest.raises(UsageError, match=r"layers\.0\.weight\.grad\.data = "):
            grad.data = other
    assert torch.equal(grad.clone(), ROWS)
    grad.data = 2 * ROWS
    assert torch.equal(grad.clone(), 2 * ROWS)


@pytest.mark.parametrize("reshape", ["resize_", "unsqueeze_", "t_", "squeeze_"])
def test_another_shape_is_refused(grad, reshape):
    """Twin: that of a copy can be changed."""
    args = {"resize_": (4, 2), "unsqueeze_": (0,)}.get(reshape, ())
    with pytest.raises(UsageError, match=r"layers\.0\.weight\.grad"):
        getattr(grad, reshape)(*args)
    assert grad.shape == (2, 4) and torch.equal(grad.clone(), ROWS)
    getattr(grad.clone(), reshape)(*args)
