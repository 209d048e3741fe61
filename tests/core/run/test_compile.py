"""torch.compile around and inside a wrapped model: it works, with graph breaks where weights
move."""

from __future__ import annotations

import pytest
import torch
from marks import few
from models import differing
from torch import nn

import infinity

STEPS = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = (
            nn.Embedding(17, 32),
            nn.ModuleList(Block() for _ in range(3)),
            nn.Linear(32, 17),
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def compiled(how: str, model: nn.Module) -> nn.Module:
    """``model``, or what stands for it, compiled in one of the ways people do it. Without code
    generation: quick."""
    for block in model.blocks:
        if how == "forward":
            block.forward = torch.compile(block.forward, backend="aot_eager")
        elif how == "block":
            block.compile(backend="aot_eager")
    return torch.compile(model, backend="aot_eager") if how == "whole" else model


def trained(
    how: str, home: str, folder, *, first: str = "wrap"
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    torch._dynamo.reset()
    torch.manual_seed(1)
    model = Model()
    used = compiled(how, model) if first == "compile" else model
    config = {"params": home, "optimizer": home, "nvme_paths": [str(folder)]}
    model, optimizer = infinity.wrap_model(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), config
    )
    used = compiled(how, model) if first == "wrap" else used
    losses = []
    for step in range(STEPS):
        ids = torch.randint(0, 17, (4, 9), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(used(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("first", ["wrap", "compile"])
@pytest.mark.parametrize("how", ["forward", "block", "whole"])
@pytest.mark.parametrize("home", few(["nvme", "host", "device"], 1))
def test_a_compiled_model_trains_as_it_does_uncompiled(home, how, first, tmp_path):
    """Method: compile each block's forward, each block, or the whole model, before or after the
    wrap; losses and weights are those of the wrapped model without compiling (the graphs call the
    same kernels)."""
    losses, state = trained(how, home, tmp_path, first=first)
    expected_losses, expected = trained("not", home, tmp_path)
    assert torch.allclose(torch.stack(losses), torch.stack(expected_losses), rtol=1e-6, atol=0)
    assert all(
        torch.allclose(state[name], expected[name], rtol=1e-4, atol=1e-6) for name in expected
    )


def test_where_state_lives_changes_no_bit_of_a_compiled_model(tmp_path):
    """Method: the whole model compiled, at every home; losses and weights have the same bits."""
    runs = [trained("whole", home, tmp_path) for home in ("device", "host", "nvme")]
    for losses, state in runs[1:]:
        assert torch.equal(torch.stack(losses), torch.stack(runs[0][0]))
        assert differing(state, runs[0][1]) == []


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def test_a_compiled_step_is_the_step():
    """Method: torch.compile around optimizer.step and zero_grad, which guard nothing of the engine.
    Twin: plain torch's, uncompiled."""
    torch._dynamo.reset()
    found = []
    for wrapped in (True, False):
        model, optimizer = small()
        if wrapped:
            model, optimizer = infinity.wrap_model(
                model, optimizer, {"params": "host", "optimizer": "host"}
            )

        def update(optimizer=optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        update = torch.compile(update, backend="eager") if wrapped else update
        for _ in range(STEPS):
            model(torch.ones(2, 8)).square().sum().backward()
            update()
        found.append(model.state_dict())
    assert differing(*found) == []


def test_a_compiled_loop_body_trains_as_it_does_uncompiled():
    """Forward, backward, step and zero_grad in one compiled function: autograd calls the engine in
    the middle of it, and dynamo does not trace that. Twin: plain torch's, uncompiled."""
    torch._dynamo.reset()
    found = []
    for wrapped in (True, False):
        model, optimizer = small()
        if wrapped:
            model, optimizer = infinity.wrap_model(
                model, optimizer, {"params": "host", "optimizer": "host"}
            )

        def train(x: torch.Tensor, model=model, optimizer=optimizer) -> torch.Tensor:
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        train = torch.compile(train, backend="eager") if wrapped else train
        found.append([train(torch.full((2, 8), 0.1 * step)).detach() for step in range(STEPS)])
        found[-1].append(model.state_dict()["0.weight"].clone())
    assert all(map(torch.equal, *found))


def test_a_whole_graph_and_compiled_autograd_are_refused_with_the_way_that_works():
    """fullgraph=True is torch's own error, with our reason in it. Twin: without either the same
    model trains."""
    torch._dynamo.reset()
    model, optimizer = infinity.wrap_model(*small(), {"params": "host", "optimizer": "host"})
    with pytest.raises(Exception, match="Leave out fullgraph=True"):
        torch.compile(model, backend="eager", fullgraph=True)(torch.ones(2, 8))
    model[0].compile(backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="Leave out fullgraph=True"):
        model(torch.ones(2, 8))
    model[0]._compiled_call_impl = None
    with (
        torch._dynamo.config.patch(compiled_autograd=True),
        pytest.raises(infinity.UsageError, match="compiled_autograd = False"),
    ):
        model(torch.ones(2, 8))
    torch.compile(model, backend="eager")(torch.ones(2, 8)).sum().backward()
    optimizer.step()
