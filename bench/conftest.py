"""Options and facts of `pytest bench`: a quick look, and the machine in its files."""

from __future__ import annotations

from typing import Any

import pytest

from infinity.tools.bench import facts
from infinity.tools.bench.settings import Settings

QUICK_SCALE, QUICK_SECONDS = 0.05, 0.1


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options."""
    parser.addoption("--quick", action="store_true", help="a twentieth of the sizes: a quick look")
    parser.addoption("--bench-folder", metavar="DIR", help="on the disk to measure")


def pytest_configure(config: pytest.Config) -> None:
    """Gives each benchmark of a quick look less time."""
    if config.getoption("--quick") and hasattr(config.option, "benchmark_max_time"):
        config.option.benchmark_max_time = QUICK_SECONDS


@pytest.fixture(scope="session")
def settings(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Settings:
    """Makes the settings of the benchmarks."""
    folder = request.config.getoption("--bench-folder") or str(tmp_path_factory.mktemp("bench"))
    return Settings(
        folder=folder, scale=QUICK_SCALE if request.config.getoption("--quick") else 1.0
    )


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict) -> None:
    """Adds the facts that our own result files have."""
    machine_info["infinity"] = facts.machine(config.getoption("--bench-folder") or ".")


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_commit_info(config: pytest.Config, commit_info: dict) -> None:
    """Adds the package's own commit, and the load: another one makes no other machine."""
    commit_info |= {"infinity": facts.commit(), "load": facts.load()}
