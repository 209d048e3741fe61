"""Every way to write a tensor that the engine gave counts as in torch, or raises. None is lost.

Words used here: a **way** writes a tensor by one of torch's, NumPy's or Python's means; a
**source** gives a tensor of a model or its optimizer, in torch the live one. A write is **honored**
if what is read afterwards is torch's, and **told** if it raises a typed error.
"""

from __future__ import annotations

import ctypes
import io
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from models import at_home
from torch import nn
from torch.nn import functional as F

import infinity
from infinity.core.params.lent import Lent
from infinity.errors import InfinityError

ROWS, COLUMNS = 8, 6
N = ROWS * COLUMNS
Way = Callable[[torch.Tensor], Any]


def flat(t: torch.Tensor) -> torch.Tensor:
    return t.reshape(-1) if t.dim() == 0 else t.view(-1)


def bytes_at(t: torch.Tensor) -> int:
    return t.data_ptr()


def through_thread(t: torch.Tensor) -> None:
    thread = threading.Thread(target=lambda: t.detach().add_(7.0))
    thread.start()
    thread.join()


def by_foreign_optimizer(t: torch.Tensor) -> None:
    weight = nn.Parameter(t.detach())
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=7.0).step()


def swap_ends(t: torch.Tensor) -> None:
    ends = flat(t)
    ends[[0, -1]] = ends[[-1, 0]].clone() + 7.0


def into_out(t: torch.Tensor) -> None:
    torch.add(t, 7.0, out=t.detach())


def from_a_file(t: torch.Tensor) -> None:
    file = io.BytesIO()
    torch.save(t.detach().clone() + 7.0, file)
    file.seek(0)
    t.detach().copy_(torch.load(file))


def from_memmap(t: torch.Tensor) -> None:
    np.copyto(t.detach().numpy(), np.full(tuple(t.shape), 7.0, np.float32))


def in_inference_mode(t: torch.Tensor) -> None:
    with torch.inference_mode():
        t.detach().add_(7.0)


def by_func(t: torch.Tensor) -> None:
    value = t.detach()
    torch.func.functional_call(_Add(), {}, (value,))


class _Add(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(7.0)


def by_grad_transform(t: torch.Tensor) -> None:
    t.detach().copy_(torch.func.grad(lambda x: (7.0 * x).sum())(t.detach().clone()))


def by_storage_copy(t: torch.Tensor) -> None:
    value = t.detach()
    value.untyped_storage().copy_(torch.full_like(value, 7.0).clone().untyped_storage())


def by_second_tensor_of_storage(t: torch.Tensor) -> None:
    other = torch.empty(0).set_(t.detach().untyped_storage())
    other[t.storage_offset()] = 7.0


def by_memory(t: torch.Tensor) -> None:
    array = (ctypes.c_float * t.numel()).from_address(bytes_at(t))
    array[t.numel() - 1] = 7.0


def by_buffer(t: torch.Tensor) -> None:
    memoryview(t.detach().numpy().reshape(-1)).cast("B")[3] = 0x40


def by_vector(t: torch.Tensor) -> None:
    nn.utils.vector_to_parameters(torch.full((t.numel(),), 7.0), [nn.Parameter(t.detach())])


def by_parameter_over_it(t: torch.Tensor) -> None:
    nn.init.constant_(nn.Parameter(t.detach()), 7.0)


def by_module_over_it(t: torch.Tensor) -> None:
    module = nn.Module()
    module.register_buffer("held", t.detach())
    module.load_state_dict({"held": torch.full_like(t.detach(), 7.0)})


def by_iteration(t: torch.Tensor) -> None:
    for row in t if t.dim() else [t]:
        row.data.fill_(7.0)


def by_where(t: torch.Tensor) -> None:
    torch.where(t.detach() > 0, 7.0, t.detach(), out=t.detach())


def by_clip(t: torch.Tensor) -> None:
    np.clip(t.detach().numpy(), 7.0, 9.0, out=t.detach().numpy())


def set_view_data(t: torch.Tensor) -> None:
    view = flat(t)[-1:]
    view.data.fill_(7.0)


def later_by_numpy(t: torch.Tensor) -> Way:
    array = t.detach().numpy()
    return lambda: array.__setitem__(..., 7.0)


def later_by_dlpack(t: torch.Tensor) -> Way:
    other = torch.from_dlpack(t.detach())
    return lambda: other.fill_(7.0)


def later_by_address(t: torch.Tensor) -> Way:
    address = bytes_at(t)
    return lambda: ctypes.memset(address, 64, 4)


def later_by_view(t: torch.Tensor) -> Way:
    view = flat(t)[-1:]
    return lambda: view.data.fill_(7.0)


def later_by_data(t: torch.Tensor) -> Way:
    data = t.data
    return lambda: data.add_(7.0)


def later_by_storage(t: torch.Tensor) -> Way:
    storage = t.detach().untyped_storage()
    return lambda: storage.__setitem__(4 * t.storage_offset() + 3, 64)


WAYS: dict[str, Way] = {
    "index": lambda t: flat(t).__setitem__(-1, 7.0),
    "ellipsis": lambda t: t.__setitem__(..., 7.0),
    "slice": lambda t: flat(t)[:1].__setitem__(slice(None), 7.0),
    "mask": lambda t: t.__setitem__(t == t, 7.0),
    "list of indices": lambda t: flat(t).__setitem__([0, -1], 7.0),
    "add_": lambda t: t.add_(7.0),
    "+=": lambda t: t.__iadd__(7.0),
    "mul_": lambda t: t.mul_(7.0).add_(1.0),
    "copy_": lambda t: t.copy_(torch.full(t.shape, 7.0)),
    "fill_": lambda t: t.fill_(7.0),
    "zero_": lambda t: t.zero_(),
    "uniform_": lambda t: t.uniform_(7.0, 7.5, generator=torch.Generator().manual_seed(1)),
    "exponential_": lambda t: t.exponential_(generator=torch.Generator().manual_seed(1)),
    "clamp_": lambda t: t.clamp_(7.0, 9.0),
    "lerp_": lambda t: t.lerp_(torch.full(t.shape, 7.0), 0.5),
    "addcmul_": lambda t: t.addcmul_(torch.full(t.shape, 7.0), torch.ones(t.shape)),
    "index_put_": lambda t: flat(t).index_put_((torch.tensor([0]),), torch.tensor(7.0)),
    "index_fill_": lambda t: flat(t).index_fill_(0, torch.tensor([0]), 7.0),
    "index_add_": lambda t: flat(t).index_add_(0, torch.tensor([0]), torch.tensor([7.0])),
    "scatter_": lambda t: flat(t).scatter_(0, torch.tensor([0]), 7.0),
    "put_": lambda t: t.put_(torch.tensor([0]), torch.tensor([7.0])),
    "masked_fill_": lambda t: t.masked_fill_(torch.ones(t.shape, dtype=torch.bool), 7.0),
    "masked_scatter_": lambda t: t.masked_scatter_(
        torch.ones(t.shape, dtype=torch.bool), torch.full((t.numel(),), 7.0)
    ),
    "relu_": lambda t: F.relu(t.sub_(7.0), inplace=True),
    "dropout_": lambda t: F.dropout(t, 1.0, inplace=True),
    "view_as_complex": lambda t: torch.view_as_complex(flat(t).view(-1, 2)).fill_(7.0),
    "view dtype": lambda t: flat(t).view(torch.int32).__setitem__(0, 64),
    "as_strided": lambda t: t.as_strided((1,), (1,), t.storage_offset()).fill_(7.0),
    "diagonal": lambda t: t.diagonal().fill_(7.0),
    "transpose": lambda t: t.t().copy_(torch.full(t.t().shape, 7.0)),
    "unbind": by_iteration,
    "swap of elements": swap_ends,
    "detach": lambda t: t.detach().add_(7.0),
    "data": lambda t: t.data.add_(7.0),
    "data of one element": lambda t: flat(t.data).__setitem__(-1, 7.0),
    "a view's data": set_view_data,
    "requires_grad_": lambda t: t.detach().requires_grad_().data.fill_(7.0),
    "data =": lambda t: setattr(t, "data", torch.full(t.shape, 7.0)),
    "set_": lambda t: t.set_(torch.full(t.shape, 7.0)),
    "swap_tensors": lambda t: torch.utils.swap_tensors(t, torch.full(t.shape, 7.0)),
    "storage": lambda t: t.detach().storage().__setitem__(t.storage_offset(), 7.0),
    "storage's fill_": lambda t: t.detach().storage().fill_(7.0),
    "bytes of the storage": lambda t: t.detach().untyped_storage().__setitem__(3, 64),
    "storage's copy_": by_storage_copy,
    "tensor of the storage": by_second_tensor_of_storage,
    "numpy": lambda t: t.detach().numpy().__setitem__(..., 7.0),
    "numpy of a view": lambda t: flat(t.detach())[-1:].numpy().__setitem__(0, 7.0),
    "asarray": lambda t: np.asarray(t.detach()).fill(7.0),
    "numpy's out": by_clip,
    "memmap": from_memmap,
    "buffer": by_buffer,
    "from_dlpack": lambda t: torch.from_dlpack(t.detach()).fill_(7.0),
    "to_dlpack": lambda t: torch.utils.dlpack.from_dlpack(
        torch.utils.dlpack.to_dlpack(t.detach())
    ).fill_(7.0),
    "numpy's from_dlpack": lambda t: torch.from_numpy(np.from_dlpack(t.detach())).fill_(7.0),
    "memset": lambda t: ctypes.memset(bytes_at(t), 64, 4 * t.numel()),
    "address": by_memory,
    "out": into_out,
    "where's out": by_where,
    "foreach": lambda t: torch._foreach_add_([t], 7.0),
    "foreach copy": lambda t: torch._foreach_copy_([t], [torch.full(t.shape, 7.0)]),
    "thread": through_thread,
    "inference mode": in_inference_mode,
    "functional_call": by_func,
    "torch.func": by_grad_transform,
    "another optimizer": by_foreign_optimizer,
    "init of a parameter over it": by_parameter_over_it,
    "load of a module over it": by_module_over_it,
    "vector_to_parameters": by_vector,
    "a file": from_a_file,
    "apply_": lambda t: t.apply_(lambda x: x + 7.0),
}
LATER: dict[str, Callable[[torch.Tensor], Callable[[], Any]]] = {
    "numpy that is kept": later_by_numpy,
    "dlpack that is kept": later_by_dlpack,
    "address that is kept": later_by_address,
    "view that is kept": later_by_view,
    "data that is kept": later_by_data,
    "storage that is kept": later_by_storage,
}


# --- sources ---


@dataclass
class Side:
    """A wrapped model and its optimizer, or plain ones."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    is_plain: bool
    stack: ExitStack = field(default_factory=ExitStack)
    average: Any = None

    @property
    def param(self) -> nn.Parameter:
        return self.model.weight

    def backward(self) -> None:
        x = torch.arange(3.0 * COLUMNS).view(3, COLUMNS).to(self.param.dtype)
        self.model(x / COLUMNS).float().square().mean().backward()


def value_of(side: Side) -> torch.Tensor:
    with infinity.full_params(side.model) if not side.is_plain else ExitStack():
        return side.model.weight.detach().float().clone()


def state_of(name: str) -> Callable[[Side], torch.Tensor]:
    def read(side: Side) -> torch.Tensor:
        return side.optimizer.state_dict()["state"][0][name].clone()

    return read


def after_step(side: Side) -> torch.Tensor:
    side.optimizer.step()
    return value_of(side)


def of_average(side: Side) -> torch.Tensor:
    if side.is_plain:
        return side.average.clone()
    return side.average.state_dict()["weight"].clone()


def take_average(side: Side) -> torch.Tensor:
    return side.average.detach() if side.is_plain else side.average.state_dict()["weight"]


def take_full(side: Side) -> torch.Tensor:
    if side.is_plain:
        return side.param
    return side.stack.enter_context(infinity.full_params(side.model, writeback=True))["weight"]


def take_assigned(side: Side) -> torch.Tensor:
    side.param.grad = tensor = torch.arange(1.0 * N).view(ROWS, COLUMNS) / N
    return tensor


@dataclass(frozen=True)
class Source:
    take: Callable[[Side], torch.Tensor]
    read: Callable[[Side], torch.Tensor]
    has_grad: bool = False
    lives_over_steps: bool = True


SOURCES = {
    "value": Source(lambda s: s.model.state_dict()["weight"], value_of),
    "keep_vars": Source(lambda s: s.model.state_dict(keep_vars=True)["weight"], value_of),
    "moment": Source(
        lambda s: s.optimizer.state_dict()["state"][0]["exp_avg"], state_of("exp_avg")
    ),
    "second moment": Source(
        lambda s: s.optimizer.state_dict()["state"][0]["exp_avg_sq"], state_of("exp_avg_sq")
    ),
    "step": Source(lambda s: s.optimizer.state_dict()["state"][0]["step"], state_of("step")),
    "state[p]": Source(lambda s: s.optimizer.state[s.param]["exp_avg"], state_of("exp_avg")),
    "state[p]'s step": Source(lambda s: s.optimizer.state[s.param]["step"], state_of("step")),
    "grad": Source(lambda s: s.param.grad, after_step, has_grad=True),
    "assigned grad": Source(take_assigned, after_step, has_grad=True),
    "full_params": Source(take_full, value_of, lives_over_steps=False),
    "row at rest": Source(lambda s: s.param[0], value_of),
    "data at rest": Source(lambda s: s.param.data, value_of),
    "average": Source(take_average, of_average),
    "detached at rest": Source(lambda s: s.param.detach(), value_of),
    # Of these the view alone is kept.
    "rows of a value": Source(lambda s: s.model.state_dict()["weight"][2:], value_of),
    "rows of a moment": Source(
        lambda s: s.optimizer.state_dict()["state"][0]["exp_avg"][2:], state_of("exp_avg")
    ),
    "rows of state[p]": Source(
        lambda s: s.optimizer.state[s.param]["exp_avg"][2:], state_of("exp_avg")
    ),
    "rows of full_params": Source(
        lambda s: take_full(s).detach()[2:], value_of, lives_over_steps=False
    ),
    "rows of an average": Source(lambda s: take_average(s)[2:], of_average),
}


def pair(source: Source, home: str, folder) -> tuple[Side, Side]:
    """Returns a wrapped side that took a step, and a plain one with the same state."""
    torch.manual_seed(0)
    sides = []
    is_sgd = source.has_grad
    for _ in range(2):
        model = nn.Linear(COLUMNS, ROWS, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.arange(1.0 * N).view(ROWS, COLUMNS) / N + 0.5)
        params = model.parameters()
        sides.append(
            (model, torch.optim.SGD(params, lr=1.0) if is_sgd else torch.optim.AdamW(params))
        )
    ours = Side(*infinity.wrap_model(*sides[0], at_home(home, home, folder)), is_plain=False)
    plain = Side(*sides[1], is_plain=True)
    needs_average = source.read is of_average
    for side in (ours, plain):
        side.backward()
        side.optimizer.step()
        side.optimizer.zero_grad()
    if needs_average:
        ours.average = infinity.ema(ours.model, 0.5)
        ours.average.update()
        plain.average = torch.empty(ROWS, COLUMNS)
    even(ours, plain)
    if source.has_grad:
        for side in (ours, plain):
            side.backward()
    return ours, plain


@torch.no_grad()
def even(ours: Side, plain: Side) -> None:
    """Gives the plain side the wrapped one's state, in place."""
    plain.param.copy_(value_of(ours))
    for index, entry in ours.optimizer.state_dict()["state"].items():
        state = plain.optimizer.state_dict()["state"][index]
        for name, value in entry.items():
            if value is not None and name in state:
                state[name].copy_(value)
    if plain.average is not None:
        plain.average.copy_(of_average(ours))


def outcome(source: Source, way: str, home: str, folder, *, late: bool) -> str:
    """Writes both sides, and says what became of it. ``late``: a step comes before the write."""
    ours, plain = pair(source, home, folder)
    errors: list[Exception | None] = []
    read: list[torch.Tensor | None] = []
    writes: list[Callable[[], Any]] = []
    kept = []
    for side in (ours, plain):
        with torch.no_grad():
            tensor = source.take(side)
            kept.append(tensor)
            try:
                write = LATER[way](tensor) if way in LATER else (lambda t=tensor: WAYS[way](t))
            except (RuntimeError, InfinityError, TypeError, ValueError, BufferError) as error:
                write = lambda error=error: (_ for _ in ()).throw(error)
            writes.append(write)
    if late:
        for side in (ours, plain):
            if not source.has_grad:
                side.backward()
            side.optimizer.step()
        even(ours, plain)
    if way in LATER:
        for side in (ours, plain):
            side.model(torch.ones(1, COLUMNS))
            side.model.state_dict(), side.optimizer.state_dict()
    before = None if source.has_grad else source.read(plain)
    for side, write in zip((ours, plain), writes):
        error = value = None
        try:
            with torch.no_grad():
                write()
            side.stack.close()
            value = source.read(side)
            if late and source.read is not after_step and not side.is_plain:
                side.backward()
                side.optimizer.step()  # a snapshot is looked at once in a step
                side.model.state_dict()
        except Exception as raised:  # noqa: BLE001 - whatever it is is looked at below
            error = raised
        errors.append(error)
        read.append(value)
    if errors[1] is not None:
        return "torch raises"
    if isinstance(errors[0], InfinityError):
        return "told"
    if errors[0] is not None:  # by torch, since the tensor has no memory or a weak reference
        assert isinstance(errors[0], RuntimeError), errors[0]
        return "refused"
    if torch.allclose(read[0], read[1], rtol=1e-5, atol=1e-6, equal_nan=True):
        same = before is not None and torch.equal(read[1], before)
        return "no write" if same else "honored"
    return "LOST"


# --- the matrix ---

QUICK = (  # one way for each kind of access that torch does not count
    "index",
    "a view's data",
    "set_",
    "bytes of the storage",
    "numpy of a view",
    "address that is kept",
    "apply_",
)
# As torch's tensor, a gradient's stand-in is what detach() gives; so is a Parameter made of that
DIFFERS = {("grad", "vector_to_parameters")}


def lost(source: str, ways: Iterable[str], home: str, folder, *, late: bool) -> list[str]:
    return [
        way
        for way in ways
        if (source, way) not in DIFFERS
        and outcome(SOURCES[source], way, home, folder, late=late) == "LOST"
    ]


@pytest.mark.parametrize("source", SOURCES)
def test_no_write_is_lost(source, tmp_path):
    """Writes a wrapped side and a plain one in the same way, and compares what is read then."""
    assert lost(source, QUICK, "host", tmp_path, late=False) == []


@pytest.mark.parametrize("source", ["value", "moment", "state[p]", "average", "grad"])
def test_no_write_after_a_step_is_lost(source, tmp_path):
    """As above, to a tensor that was taken before a step: it follows, or the write is told."""
    assert lost(source, QUICK, "nvme", tmp_path, late=True) == []


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("home", ["host", "nvme"])
@pytest.mark.parametrize("source", SOURCES)
def test_no_write_by_any_way_is_lost(source, home, late, tmp_path):
    """As above, by every way."""
    if late and not SOURCES[source].lives_over_steps:
        return
    assert lost(source, [*WAYS, *LATER], home, tmp_path, late=late) == []


def test_a_rule_that_looks_at_nothing_loses_writes(tmp_path, monkeypatch):
    """The failing twin: without the comparison the same writes are lost."""
    monkeypatch.setattr(Lent, "is_written", lambda *_: False)
    found = lost("value", QUICK, "host", tmp_path, late=False)
    assert {"index", "a view's data", "address that is kept"} <= set(found)


def test_every_element_of_a_large_tensor_counts():
    """Sets single elements through ``.data``: of first and last rows and columns, and within."""
    shape = (256, 128)
    model = nn.Linear(shape[1], shape[0], bias=False)
    model, _ = infinity.wrap_model(
        model, torch.optim.AdamW(model.parameters()), {"params": "host", "optimizer": "host"}
    )
    for place in [(0, 0), (0, 127), (255, 0), (255, 127), (3, 5), (128, 64), (200, 77)]:
        model.state_dict()["weight"].data[place] = 7.0
        assert model.state_dict()["weight"][place] == 7.0


def test_a_step_count_is_never_rounded():
    """Writes counts that are no counts to ``optimizer.state``. Twin: a whole one is taken."""
    model = nn.Linear(2, 2, bias=False)
    model, optimizer = infinity.wrap_model(
        model, torch.optim.AdamW(model.parameters()), {"params": "host", "optimizer": "host"}
    )
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    count = optimizer.state[model.weight]["step"]
    for wrong in (2.5, -3.0, float("nan")):
        count.fill_(wrong)
        with pytest.raises(infinity.UsageError, match="whole number"):
            optimizer.state_dict()
    count.fill_(5.0)
    assert optimizer.state_dict()["state"][0]["step"] == 5.0
