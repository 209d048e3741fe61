"""Spans: which parameters one kernel call steps, and by what."""

from __future__ import annotations

import pytest
import torch
from inside import parts_of
from torch import nn, optim

import infinity
from infinity import native
from infinity.core.step.known import KNOWN
from infinity.core.step.spans import Spans, runs_of


def job(make=lambda p: optim.SGD(p, lr=0.5)):
    """Three vectors of one flat param, with gradients."""
    net = nn.ParameterList([nn.Parameter(torch.ones(8)) for _ in range(3)])
    net, optimizer = infinity.wrap_model(net, make(list(net)), {"params": "host"})
    for param in net:
        param.grad = torch.ones(8)
    parts_of(net).make_step_context().gradients.average()
    flat_param = net[0]._infinity.flat_param
    return net, optimizer, flat_param


def spans_of(optimizer, flat_param, groups, rule=native.Rule.SGD, clip: float = 1.0):
    group_index_of = dict(zip(flat_param.handles, groups))
    spans = Spans(KNOWN[rule], optimizer.param_groups, group_index_of, optimizer.state)
    return list(spans.of(flat_param, clip))


def test_neighbours_of_one_group_are_one_span():
    net, optimizer, flat_param = job()
    (span,) = spans_of(optimizer, flat_param, [0, 0, 0])
    assert span[:2] == (0, flat_param.layout.placements[2].offset + 8)
    assert span[2].lr == 0.5 and span[2].step == 1 and not span[2].grad_factors


@pytest.mark.parametrize("what", ["group", "step", "factors", "no gradient"])
def test_what_differs_is_a_span_of_its_own(what):
    net, optimizer, flat_param = job()
    groups = [0, 0, 0]
    if what == "group":
        optimizer.param_groups.append(optimizer.param_groups[0] | {"params": [], "lr": 0.25})
        groups = [0, 1, 0]
    elif what == "step":
        flat_param.handles[1].step = 4
    elif what == "factors":
        net[1].grad.mul_(0.5)
    spans = spans_of(optimizer, flat_param, groups[:1] if what == "no gradient" else groups)
    assert len(spans) == (1 if what == "no gradient" else 3)
    if what != "no gradient":
        hyper = spans[1][2]
        found = {"group": hyper.lr == 0.25, "step": hyper.step == 5}
        assert found.get(what, hyper.grad_factors == [0.5])


def test_a_clip_comes_after_the_gradients_own_factors():
    net, optimizer, flat_param = job()
    net[0].grad.mul_(0.5)
    first, rest = spans_of(optimizer, flat_param, [0, 0, 0], clip=0.25)
    assert first[2].grad_factors == [0.5, 0.25] and rest[2].grad_factors == [0.25]


def test_counters_of_its_own_make_a_span():
    net, optimizer, flat_param = job(lambda p: optim.NAdam(p, lr=0.5))
    optimizer.step()
    for param in net:
        param.grad = torch.ones(8)
    parts_of(net).make_step_context().gradients.average()
    assert len(spans_of(optimizer, flat_param, [0, 0, 0], native.Rule.NADAM)) == 1
    optimizer.state[net[1]]["mu_product"].mul_(0.5)
    spans = spans_of(optimizer, flat_param, [0, 0, 0], native.Rule.NADAM)
    assert [span[2].mu_product for span in spans][1] == pytest.approx(spans[0][2].mu_product / 2)


def test_a_span_is_one_run():
    _, optimizer, flat_param = job()
    assert len(runs_of(spans_of(optimizer, flat_param, [0, 0, 0]))) == 1
