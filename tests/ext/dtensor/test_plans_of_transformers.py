"""Plans of transformers need a version that applies them."""

from __future__ import annotations

import importlib

import pytest
from torch import nn

from infinity.errors import ConfigError
from infinity.ext.dtensor.plans import styles_of_transformers

transformers = pytest.importorskip("transformers", minversion="5.23")
NAME = "transformers.distributed.tensor_parallel"


def test_a_version_that_takes_no_plan_is_refused_with_the_remedy(monkeypatch):
    """Twin: one that does is returned."""
    theirs = importlib.import_module(NAME)
    assert styles_of_transformers(nn.Linear(2, 2), "") is theirs
    monkeypatch.setattr(theirs, "apply_tensor_parallelism", lambda model, mesh: None)
    said = rf"Linear .*>= 5\.23, and {transformers.__version__} is installed\. Do that"
    with pytest.raises(ConfigError, match=said):
        styles_of_transformers(nn.Linear(2, 2), "Do that")


def test_a_version_without_the_module_is_refused(monkeypatch):
    imported = importlib.import_module

    def without(name: str):
        if name == NAME:
            raise ModuleNotFoundError(name)
        return imported(name)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(ConfigError, match="needs transformers"):
        styles_of_transformers(nn.Linear(2, 2), "")
