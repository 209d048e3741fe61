"""Translates a DeepSpeed JSON into the fields of a Config, and says of every key what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from .choices import DTYPES, SHARDED
from .deepspeed_keys import REFUSED, SECTIONS, find

PRECISIONS = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}  # tables of DeepSpeed, one by an old name -> dtype
SWITCHES = ("cpu_offload", "cpu_offload_param", "zero_quantized_weights", "zero_hpz_partition_size")


def _is_on(value: Any) -> bool:
    """Whether a value asks for something: a table whose ``enabled``, or that of its ``shared_parameters``, says so, or in which something
    does; a size above 1, a share, a text other than "auto"."""
    if isinstance(value, Mapping):
        shared = value.get("shared_parameters")
        switch = shared if isinstance(shared, Mapping) and "enabled" in shared else value
        return switch["enabled"] is True if "enabled" in switch else any(map(_is_on, value.values()))
    if isinstance(value, int) and not isinstance(value, bool):
        return value > 1
    return value not in (None, False, "", "auto", [], 0.0)


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
        """Notes every key of ``table`` but the ``taken`` ones as ignored. Raises ConfigError for one that is switched on and cannot be."""
        for key, value in table.items():
            if key in taken:
                continue
            known = find(path, key) if path in SECTIONS else None
            if known is not None and known.fate == REFUSED and _is_on(value):
                raise ConfigError(f"DeepSpeed {path}{key}={value!r} is not to be had here: {known.why}. Leave it out.")
            why = f": {known.why}" if known is not None and known.why else ""
            self.report.append(f"{path}{key} ignored{why.replace('`', '')}")

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

    def switches(self, zero: Mapping) -> None:
        """Maps the keys of ZeRO that are one word here."""
        for key, field, value in (
            ("cpu_offload", "optimizer", "host"),
            ("cpu_offload_param", "params", "host"),
            ("zero_quantized_weights", "compress_gathers", True),
        ):
            if zero.get(key) is True:
                self.fields.setdefault(field, value)
                self.report.append(f"zero_optimization.{key} mapped to {field}={self.fields[field]!r}")
            elif key in zero and zero[key] not in (None, False, "auto"):
                raise ConfigError(f"DeepSpeed zero_optimization.{key}={zero[key]!r} is not true or false")
            elif key in zero:
                self.report.append(f"zero_optimization.{key} ignored: it is off")
        size = zero.get("zero_hpz_partition_size")
        if isinstance(size, int) and not isinstance(size, bool) and size > 1:
            self.fields["shard_in_node"] = True
            self.report.append(
                f"zero_optimization.zero_hpz_partition_size={size} mapped to shard_in_node=True: over a machine's ranks"
            )
        elif size not in (None, 0, 1, "auto"):
            raise ConfigError(f"DeepSpeed zero_optimization.zero_hpz_partition_size={size!r} is not a number of ranks")
        elif "zero_hpz_partition_size" in zero:
            self.report.append("zero_optimization.zero_hpz_partition_size ignored: it is off")

    def accumulation(self) -> None:
        """Maps the dtype in which gradients are summed."""
        table = self.section("", self.mapping, "data_types")
        if (value := table.get("grad_accum_dtype")) is not None:
            if value not in DTYPES:
                raise ConfigError(f"DeepSpeed data_types.grad_accum_dtype={value!r} is not one of 'fp32', 'fp16', 'bf16'")
            self.fields["grad_dtype"] = value
            self.report.append(f"data_types.grad_accum_dtype mapped to grad_dtype={value!r}")
        self.ignore("data_types.", table, "grad_accum_dtype")

    def stage(self, zero: Mapping) -> None:
        """Maps ``stage`` 1, 2 or 3 to what the ranks share out."""
        value = zero.get("stage")
        if isinstance(value, int) and not isinstance(value, bool) and value in self.STAGES:
            self.fields["shard"] = self.STAGES[value]
            self.report.append(f"zero_optimization.stage={value} mapped to shard={self.STAGES[value]!r}")
        elif value in (None, "auto", 0) and value is not False:
            self.report += ["zero_optimization.stage ignored"] if "stage" in zero else []
        else:
            raise ConfigError(f"DeepSpeed zero_optimization.stage={value!r} is not 0, 1, 2 or 3")

    def precision(self, key: str, dtype: str) -> None:
        """Maps the table ``key`` to the dtype of the parameters."""
        table = self.section("", self.mapping, key)
        if table.get("enabled") is True:
            if self.fields.get("param_dtype") not in (None, dtype):
                other = self.fields["param_dtype"]
                raise ConfigError(f"DeepSpeed {other}.enabled and {key}.enabled are both true: the model computes in one dtype")
            self.fields["param_dtype"] = dtype
            self.report.append(f"{key}.enabled mapped to param_dtype={dtype!r}")
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
    translation.switches(zero)
    translation.ignore("zero_optimization.", zero, "offload_param", "offload_optimizer", "stage", *SWITCHES)
    for key, dtype in PRECISIONS.items():
        translation.precision(key, dtype)
    translation.clipping()
    translation.accumulation()
    translation.ignore("", mapping, "zero_optimization", *PRECISIONS, "gradient_clipping", "data_types")
    return translation.fields, translation.report
