"""Translates a DeepSpeed JSON into the fields of a Config, and says of every key what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from .choices import SHARDED


class _Translation:
    """A DeepSpeed config on its way to ours: what was taken, and one line for every key of what became of it."""

    HOMES = {"cpu": "host", "nvme": "nvme", "none": "device", None: "device"}
    STAGES = dict(enumerate(SHARDED, start=1))

    def __init__(self, mapping: Mapping):
        self.mapping = mapping
        self.fields: dict[str, Any] = {}
        self.report: list[str] = []

    def section(self, path: str, parent: Mapping, key: str) -> Mapping:
        """Returns the table ``key`` of ``parent``; empty when absent or null."""
        value = parent.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise ConfigError(f"DeepSpeed {path}{key}={value!r} is not a table of keys")
        return value

    def ignore(self, path: str, table: Mapping, *taken: str) -> None:
        """Notes every key of ``table`` but the ``taken`` ones as ignored."""
        self.report += [f"{path}{key} ignored" for key in table if key not in taken]

    def offload(self, zero: Mapping, key: str, field: str) -> None:
        """Maps one of DeepSpeed's offload tables to the home of ``field``."""
        path = f"zero_optimization.{key}."
        table = self.section("zero_optimization.", zero, key)
        if not table:
            return
        device = table.get("device")
        if not isinstance(device, str | None) or device not in self.HOMES:
            raise ConfigError(f"DeepSpeed {path}device={device!r} is not one of 'cpu', 'nvme', 'none'")
        self.fields[field] = self.HOMES[device]
        self.report.append(f"{path}device={device!r} mapped to {field}={self.fields[field]!r}")
        if folder := table.get("nvme_path"):
            paths = self.fields.setdefault("nvme_paths", [])
            if folder not in paths:
                paths.append(folder)
            self.report.append(f"{path}nvme_path used as nvme_paths")
        self.ignore(path, table, "device", "nvme_path")

    def stage(self, zero: Mapping) -> None:
        """Maps ``stage`` 1, 2 or 3 to what the ranks share out."""
        value = zero.get("stage")
        if isinstance(value, int) and not isinstance(value, bool) and value in self.STAGES:
            self.fields["shard"] = self.STAGES[value]
            self.report.append(f"zero_optimization.stage={value} mapped to shard={self.STAGES[value]!r}")
        elif "stage" in zero:
            self.report.append("zero_optimization.stage ignored")

    def precision(self, key: str) -> None:
        """Maps ``bf16`` or ``fp16`` to the dtype of the parameters."""
        table = self.section("", self.mapping, key)
        if table.get("enabled") is True:
            self.fields["param_dtype"] = key
            self.report.append(f"{key}.enabled mapped to param_dtype={key!r}")
        elif "enabled" in table:
            self.report.append(f"{key}.enabled={table['enabled']!r} ignored: the model's own dtype is kept")
        self.ignore(f"{key}.", table, "enabled")

    def clipping(self) -> None:
        """Maps ``gradient_clipping`` to ``max_grad_norm``; "auto" and 0 are no clipping."""
        value = self.mapping.get("gradient_clipping")
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
            self.fields["max_grad_norm"] = float(value)
            self.report.append("gradient_clipping mapped to max_grad_norm")
        elif value in (None, "auto", 0):
            self.report += ["gradient_clipping ignored"] if "gradient_clipping" in self.mapping else []
        else:
            raise ConfigError(f"DeepSpeed gradient_clipping={value!r} is not a number or 'auto'")


def translate_deepspeed(mapping: Mapping) -> tuple[dict[str, Any], list[str]]:
    """Translates DeepSpeed's keys into fields of a Config, with a line for every key that says what became of it."""
    translation = _Translation(mapping)
    zero = translation.section("", mapping, "zero_optimization")
    translation.offload(zero, "offload_param", "params")
    translation.offload(zero, "offload_optimizer", "optimizer")
    translation.stage(zero)
    translation.ignore("zero_optimization.", zero, "offload_param", "offload_optimizer", "stage")
    translation.precision("bf16")
    translation.precision("fp16")
    translation.clipping()
    translation.ignore("", mapping, "zero_optimization", "bf16", "fp16", "gradient_clipping")
    return translation.fields, translation.report
