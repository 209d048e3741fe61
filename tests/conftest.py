"""What every test module uses."""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

gc.disable()  # until all is imported: collections that find nothing take a quarter of that time

import doubles
import prepared
import torch
from deleted import skip_without, skipped
from interrupts import forget_ignored_interrupts
from marks import mark_files, mark_slow, refuse_kept_errors, skip_after_time
from order import longest_first
from ranks import StandingRanks


@pytest.hookimpl(trylast=True)  # after pytest has set its own hook
def pytest_configure(config: pytest.Config) -> None:
    forget_ignored_interrupts()
    if getattr(config.option, "numprocesses", None):
        prepared.share()  # with all workers
    doubles.install()
    # Most models are on the processor, and where there is a GPU each wrap of one warns.
    logging.getLogger("infinity.core.wrap.lay_out").addFilter(
        lambda record: "is computed there" not in record.msg
    )


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Writes each failure at once, for a run that may be cut off."""
    path = os.environ.get("INFINITY_FAILURES")
    if path and report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(path, "a") as file:
            file.write(f"--- {report.nodeid}\n{report.longreprtext[-2000:]}\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Skips a test that asks for a folder that was deleted in this copy."""
    return skip_without(item, (yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Skips a file likewise."""
    return skip_without(collector, (yield))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    skip_after_time()


@pytest.fixture(scope="module", autouse=True)
def short_collections() -> None:
    """Takes what is imported by now out of the garbage collector's sight: these tests collect
    often."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors of a few thousand elements go faster on one thread, and a child needs no more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def no_thread_left(request, short_collections) -> Iterator[None]:
    """A device or store that a module leaves open would fail another one that counts threads. It is
    looked for before the next module: until then the last test's fixtures are referred to. A test
    that failed may keep what it made. Threads that free space end by themselves."""
    if (removal := sys.modules.get("infinity.ext.checkpoint.removal")) is not None:
        removal.wait_for_space()
    left = own_threads()
    failed = request.session.testsfailed or skipped
    assert not left or failed, f"a module before this one leaves {left}"
    yield


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("infinity")]


@pytest.fixture(autouse=True)
def said_seed(request) -> None:
    """A test that fails shows what it drew from."""
    if (seed := getattr(request.module, "SEED", None)) is not None:
        print(f"seed {seed}")


@pytest.fixture
def swap(tmp_path) -> Path:
    """A folder for swap files."""
    (tmp_path / "swap").mkdir()
    return tmp_path / "swap"


@pytest.fixture(scope="module")
def launch_folder(tmp_path_factory) -> Path:
    """A folder for all that one launch of ranks does, with `swap` for swap files."""
    folder = tmp_path_factory.mktemp("launch")
    (folder / "swap").mkdir()
    return folder


@pytest.fixture(scope="session")
def standing_ranks() -> Iterator[Callable[[int], StandingRanks]]:
    """So many ranks, which run the jobs of all tests of this worker that ask for them."""
    kept: dict[int, StandingRanks] = {}
    yield lambda world: kept.setdefault(world, StandingRanks(world))
    for ranks in kept.values():
        ranks.close()


@pytest.fixture(scope="module")
def chosen(request) -> Callable[..., set[tuple]]:
    """Which values of some parameters this module's tests are run with: what is made for all of
    them at once need not be made for others."""
    cases = [
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    return lambda *names: {
        tuple(case[name] for name in names) for case in cases if set(names) <= set(case)
    }


def pytest_collection_finish() -> None:
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    refuse_kept_errors(items)
    mark_files(items)
    mark_slow(items)
    if hasattr(items[0].config if items else None, "workerinput"):
        longest_first(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config) -> None:
    """Leaves the files in the order that `order` gives them, not by their number of tests."""
    gc.enable()  # this process collects no tests
    config.option.loadscopereorder = False
