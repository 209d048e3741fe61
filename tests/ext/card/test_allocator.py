"""Settings of torch's allocator: the plan is held, or it is told that it may not hold."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from infinity.core.machine.card_memory import CardMemory
from infinity.ext.card.allocator import AllocatorSettings, hold, settings_of

WINDOW = 300 << 20


class Memory(CardMemory):
    """A card whose allocator has 4 GiB from the driver."""

    reserved = 4 << 30

    def _reserved_nbytes(self) -> int:
        return self.reserved


@pytest.fixture
def memory() -> Memory:
    found = Memory(torch.device("cuda:0"))
    found.note_cached(WINDOW)
    return found


def test_settings_are_read_as_torch_reads_them():
    """Twin: the older variable counts only where the newer one has none."""
    older = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128, expandable_segments:True"}
    assert settings_of({}) == {}
    assert settings_of(older) == {"max_split_size_mb": "128", "expandable_segments": "True"}
    assert settings_of(older | {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}) == {
        "backend": "cudaMallocAsync"
    }


@pytest.mark.parametrize(
    "text", ["max_split_size_mb:128", "garbage_collection_threshold:0.8,max_split_size_mb:512"]
)
def test_a_window_that_cannot_be_kept_is_taken_unit_by_unit(text, memory):
    """The allocator frees the window's block: it is not warmed again in the next pass. Twin:
    without the setting it is."""
    memory.reserved -= WINDOW
    assert memory.was_given_back()
    memory.reserved += WINDOW
    settings = settings_of({"PYTORCH_ALLOC_CONF": text})
    told = hold(memory, WINDOW, settings, is_async=False)
    assert text.partition(":")[0] in told and "unit by unit" in told
    memory.reserved -= WINDOW
    assert not memory.was_given_back()


@pytest.mark.parametrize(
    "text", ["", "expandable_segments:True", "max_split_size_mb:300", "roundup_power2_divisions:4"]
)
def test_settings_under_which_the_plan_holds_change_and_tell_nothing(text, memory):
    settings = settings_of({"PYTORCH_ALLOC_CONF": text})
    assert hold(memory, WINDOW, settings, is_async=False) == ""
    assert memory.cached_nbytes == WINDOW


def test_another_allocator_than_torchs_own_is_told(memory):
    assert "cudaMallocAsync" in hold(memory, WINDOW, {}, is_async=True)
    assert memory.cached_nbytes == WINDOW


def test_a_wrap_tells_it_once(memory, monkeypatch, caplog):
    """Method: installs the extension of a card in a job. Twins: a later optimizer, and a processor,
    tell nothing."""
    card = SimpleNamespace(where=torch.device("cuda:0"), is_host=False, memory=memory)
    job = SimpleNamespace(
        planned=SimpleNamespace(plan=SimpleNamespace(device_window_nbytes=WINDOW))
    )
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:128")
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    extension = AllocatorSettings.begin(None, card, None, None)
    extension.install(job, object())
    extension.install(job, None)
    assert [record.message for record in caplog.records] == [
        "cuda:0: max_split_size_mb:128 cuts nothing from a larger block, so the window of 300.0 MiB"
        " for weights is taken unit by unit: the same bytes and bits, but the driver may be asked"
        " for memory in later steps, too"
    ]
    assert emptied == [1]
    processor = SimpleNamespace(where=torch.device("cpu"), is_host=True)
    assert AllocatorSettings.begin(None, processor, None, None) is None
