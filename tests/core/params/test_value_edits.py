"""ValueEdits: values that were set outside the optimizer are at home, on all ranks or on none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from inside import parts_of
from models import at_home
from small import RAMP, AtHome, Small, small_at_home

import infinity
from infinity.core.params.value_edits import ValueEdits
from infinity.core.run.journal import Journal
from infinity.errors import UsageError

ODD = torch.linspace(0.1, 0.8, 8).view(2, 4)  # of which bf16 loses bits


class Update:
    """Of a flat param; counts its waits."""

    waits = 0

    def wait(self) -> None:
        self.waits += 1


class Collectives:
    """Notes what the ranks compare, and refuses what it is told to."""

    def __init__(self, ranks: Any = None, refuses: str = "nothing"):
        self.ranks = ranks or SimpleNamespace(data_size=2, tp_group=None)
        self.asked, self.refuses, self.holds_everywhere = [], refuses, True
        self.of_experts = self

    def meet(
        self, what: str, *tensors: torch.Tensor, flags=(), over_tensors: bool = True, then=None
    ) -> list[bool]:
        if flags:
            self.asked.append((what, list(flags)))
            return [any(flags) or not self.holds_everywhere]
        self.asked.append((what, [each.clone() for each in tensors], over_tensors))
        if self.refuses in what:
            raise UsageError(f"{what}: another value on rank 1")
        if then is not None:
            then()
        return []


class Releases:
    """Stands for the prefetcher."""

    def __init__(self) -> None:
        self.units: list = []

    def release_all(self, units: list) -> None:
        self.units.append(list(units))


class Edits(ValueEdits):
    """With what it was told."""

    def __init__(self, job: AtHome, collectives: Any = None):
        self.prefetcher, self.journal = Releases(), Journal()
        self.collectives = collectives or Collectives()
        super().__init__(
            parts_of(job).store,
            self.prefetcher,
            self.journal,
            self.collectives,
            parts_of(job).steps,
        )
        for handle in job.handles:
            handle.flat_param.collectives = self.collectives


def halved() -> AtHome:
    """In bf16, of which the master has the bits that the weight lacks."""
    model = Small().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = infinity.wrap_model(model, optimizer, at_home("host", "host", None))
    return AtHome(model, optimizer, parts_of(model).engine)


def value(job: AtHome, index: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    handle = job.handles[index]
    return handle.flat_param.read_value(parts_of(job).store, handle.index, dtype).clone()


def test_a_value_is_at_home_once_it_is_written():
    """Once the copies that computed with the old one are released, and its update has ended. Twin:
    the other parameter stays."""
    job = small_at_home()
    edits, first, update = Edits(job), job.handles[0], Update()
    first.flat_param.homes.commit(first.flat_param.homes.draft(), update)
    version = first.version
    edits.write_value(first, ODD.clone().requires_grad_())
    assert torch.equal(value(job), ODD) and torch.equal(value(job, 1), torch.ones(2, 4))
    assert update.waits == 1 and first.version == version + 1
    assert edits.prefetcher.units == [[first.unit]] and edits.journal.is_clear
    edits.write_value(first, RAMP)
    assert torch.equal(value(job), torch.stack([RAMP, RAMP]))


def test_ranks_agree_on_a_value_before_any_of_them_writes_it():
    """Twin: one that another rank does not set is written nowhere."""
    job = small_at_home()
    edits = Edits(job)
    edits.write_value(job.handles[0], ODD)
    ((what, (compared,), over_tensors),) = edits.collectives.asked
    assert what == "setting layers.0.weight" and torch.equal(compared, ODD) and over_tensors
    edits.collectives.refuses = "layers.0"
    version = job.handles[0].version
    with pytest.raises(UsageError, match="another value on rank 1"):
        edits.write_value(job.handles[0], ODD * 2)
    assert torch.equal(value(job), ODD) and job.handles[0].version == version
    assert edits.journal.is_clear


class Loaded(torch.nn.Module):
    """Sets a value when torch loads it."""

    def __init__(self, set_value: Any):
        super().__init__()
        self.set_value = set_value

    def _load_from_state_dict(self, state_dict: dict, *args: Any) -> None:
        for name in list(state_dict):
            try:
                self.set_value(name)
            except UsageError as error:
                args[-1].append(str(error))


def test_after_a_refusal_the_rest_of_that_load_is_refused_too():
    """Without a meeting: ranks would be at different parameters. Twins: the next load, and a value
    outside of one."""
    job = small_at_home()
    edits, by_name = Edits(job, Collectives(refuses="layers.1")), {}
    by_name = {handle.name: handle for handle in job.handles}
    load = Loaded(lambda name: edits.write_value(by_name[name], ODD))
    names = list(by_name)[:3]
    with pytest.raises(RuntimeError) as caught:
        load.load_state_dict(dict.fromkeys(names))
    assert "layers.2.weight is not loaded, since the load was refused before: setting" in str(
        caught.value
    )
    assert [asked[0] for asked in edits.collectives.asked] == [f"setting {n}" for n in names[:2]]
    assert torch.equal(value(job), ODD) and torch.equal(value(job, 2), torch.ones(2, 4))
    edits.write_value(by_name[names[2]], ODD)
    assert torch.equal(value(job, 2), ODD)
    edits.collectives.refuses = "nothing"
    load.load_state_dict(dict.fromkeys(names))
    assert torch.equal(value(job, 1), ODD)


def test_a_value_outside_of_a_load_is_asked_anew_each_time():
    job = small_at_home()
    edits = Edits(job, Collectives(refuses="layers.0"))
    for _ in range(2):
        with pytest.raises(UsageError, match="setting layers.0.weight: another"):
            edits.write_value(job.handles[0], ODD)
    assert len(edits.collectives.asked) == 2


@pytest.mark.parametrize("case", ["loaded", "not loaded", "other value", "elsewhere other"])
def test_a_master_that_was_loaded_stays_with_the_value_that_it_belongs_to(case):
    """Optimizer state was loaded first. Twins: none was loaded, another value, or another rank has
    another one: then the master is the value's."""
    job = halved()
    edits, first = Edits(job), job.handles[0]
    edits.write_value(first, ODD)  # in fp32: with its lower bits
    assert torch.equal(value(job), ODD)
    first.has_loaded_master = case != "not loaded"
    edits.collectives.holds_everywhere = case != "elsewhere other"
    shown = ODD.bfloat16() * (2 if case == "other value" else 1)
    version = first.version
    edits.write_value(first, shown)
    keeps = case == "loaded"
    assert torch.equal(value(job), ODD if keeps else shown.float())
    assert (first.version == version) == keeps and first.has_loaded_master == keeps
    least = [asked[1] for asked in edits.collectives.asked if len(asked) == 2]
    holds = case in ("loaded", "elsewhere other")
    assert least == ([] if case == "not loaded" else [[not holds]])


def test_a_change_that_was_begun_is_finished_by_the_journal():
    """After an interrupt. Twin: an edit of a tied one is noted as often as it was set."""
    job = small_at_home()
    edits, first = Edits(job), job.handles[0]
    first.is_tied = True

    class Stopped:
        waits = 0

        def wait(self) -> None:
            self.waits += 1
            if self.waits == 1:
                raise KeyboardInterrupt

    first.flat_param.homes.commit(first.flat_param.homes.draft(), Stopped())
    with pytest.raises(KeyboardInterrupt):
        edits.write_value(first, ODD)
    assert not edits.journal.is_clear and first.edits != 0
    edits.journal.finish()
    assert torch.equal(value(job), ODD)


# --- elements ---


def test_only_the_elements_that_differ_are_written():
    """The others keep the bits of their master. All parameters together, and then what ends it."""
    job, ended = halved(), []
    edits, (first, second, *_) = Edits(job), job.handles
    for handle in (first, second):
        edits.write_value(handle, ODD)
    edits.prefetcher.units.clear()
    first.is_tied, versions = True, (first.version, second.version)
    changed = ODD.bfloat16()
    changed[0, 0] = 9.0
    edits.write_changes(
        [(first, changed), (second, ODD.bfloat16())],
        "leaving a block",
        lambda: ended.append(value(job)[0, 0].item()),
    )
    expected = ODD.clone()
    expected[0, 0] = 9.0
    assert torch.equal(value(job), expected) and torch.equal(value(job, 1), ODD)
    assert ended == [9.0] and edits.prefetcher.units == [[first.unit, second.unit]]
    assert (first.version, second.version) == (versions[0] + 1, versions[1] + 1)
    assert first.edits != 0 and second.edits == 0
    edits.write_changes([(first, ODD.bfloat16())], "without an end")


def test_ranks_agree_on_all_edits_before_any_is_made():
    """Data ranks on all values, in one comparison for each group of them."""
    job = small_at_home()
    edits, (first, second, *_) = Edits(job), job.handles
    edits.collectives.of_experts = experts = Collectives()
    second.flat_param.collectives, edits.collectives.refuses = experts, "a block"
    with pytest.raises(UsageError, match="another value"):
        edits.write_changes([(first, ODD), (second, ODD * 2)], "a block")
    assert torch.equal(value(job), torch.ones(2, 4)) and len(experts.asked) == 1
    edits.collectives.refuses = "nothing"
    edits.collectives.asked.clear()
    experts.asked.clear()
    edits.write_changes([(first, ODD), (second, ODD * 2)], "a block")
    for each, expected in ((edits.collectives, ODD), (experts, ODD * 2)):
        ((what, (compared,), over_tensors),) = each.asked
        assert what == "a block with 1 tensors" and torch.equal(compared, expected)
        assert not over_tensors
    assert torch.equal(value(job, 1), ODD * 2)


@pytest.mark.parametrize("data_size", [1, 2])
def test_ranks_with_other_parts_agree_on_what_they_have_in_common(data_size):
    """Twins: without them, or without data ranks, nothing is compared for those."""
    job = small_at_home()
    edits, first = Edits(job), job.handles[0]
    edits.collectives.ranks = SimpleNamespace(data_size=data_size, tp_group=object())
    edits.write_changes([(first, ODD)], "a block")
    (what, (compared,), over_tensors), *data = edits.collectives.asked
    assert what == "a block with 1 tensors that all have" and torch.equal(compared, ODD)
    assert over_tensors and len(data) == data_size - 1
    edits.collectives.ranks = SimpleNamespace(data_size=1, tp_group=None)
    edits.collectives.asked.clear()
    edits.write_changes([(first, ODD * 2)], "a block")
    assert edits.collectives.asked == [] and torch.equal(value(job), ODD * 2)
