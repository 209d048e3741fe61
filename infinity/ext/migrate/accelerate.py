"""Translates Accelerate's YAML, or an `fsdp_config` of it or of the Trainer, into the fields of a
Config.

`fsdp_config` has its keys with the prefix `fsdp_` in Accelerate's YAML, and without it in the
Trainer's. A `deepspeed_config` is translated as a DeepSpeed JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...choices import DTYPES
from ...errors import ConfigError
from ...untrusted import read_table
from .deepspeed import translate_deepspeed
from .keys import Key, read_keys
from .translation import AUTO, Translation

SECTIONS = read_keys("accelerate")
PREFIX = "fsdp_"
NAMES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
STRATEGIES = {  # of FSDP, by name or by its number from 1 on -> what is sharded, within a machine
    "FULL_SHARD": ("parameters", False),
    "SHARD_GRAD_OP": ("gradients", False),
    "NO_SHARD": ("optimizer", False),  # here optimizer state is never held twice
    "HYBRID_SHARD": ("parameters", True),
    "HYBRID_SHARD_ZERO2": ("gradients", True),
} | {True: ("parameters", False), False: ("gradients", False)}

FSDP = "fsdp_config."
HOST = {"params": "host", "optimizer": "host"}
OFFLOADS = {  # switches, and what each sets
    "offload_params": HOST,
    "cpu_offload": HOST,
    "activation_checkpointing_offload": {"activations": "host"},
}
DEEPSPEED = {  # keys of Accelerate's table -> those of a DeepSpeed JSON
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "gradient_clipping": "gradient_clipping",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}
OWN_OF_DEEPSPEED = ("zero3_init_flag", "zero3_save_16bit_model", "deepspeed_")  # not needed


def is_accelerate(mapping: Mapping) -> bool:
    """Returns whether a table of keys is Accelerate's YAML, or an `fsdp_config`."""
    marks = ("distributed_type", "fsdp_config", "deepspeed_config", "compute_environment")
    names = SECTIONS[FSDP].keys() - {"version", "activation_checkpointing"}  # others' words
    return any(key in marks or str(key).startswith(PREFIX) or str(key) in names for key in mapping)


def translate_accelerate(
    mapping: Mapping, *, strict: bool, loop: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Returns the fields of a Config that ``mapping`` asks for, and a line for every key. ``loop``:
    as for translate_deepspeed. Raises ConfigError for a key that is switched on and not supported;
    ``strict``: also for an unknown one."""
    translation = _Translation(mapping, strict=strict, loop=loop)
    if any(key in mapping for key in SECTIONS[""]):
        translation.file()
    else:
        translation.sections = {"": SECTIONS[FSDP]}
        translation.fsdp(mapping, "")
    return translation.fields, translation.report


class _Translation(Translation):
    tool, sections, noes = "Accelerate", SECTIONS, ("false", "False", "no")

    def find(self, path: str, name: str) -> Key | None:
        return super().find(path, name) or super().find(path, name.removeprefix(PREFIX))

    # --- the file ---

    def file(self) -> None:
        """Translates Accelerate's YAML."""
        old = "fp16" if self.mapping.get("fp16") is True else None
        mixed_precision = self.mapping.get("mixed_precision", old)
        named = "DEEPSPEED" if self.mapping.get("deepspeed_config") else "FSDP"
        kind = str(self.mapping.get("distributed_type", named)).upper()
        if self.mapping.get("use_cpu") is True:
            self.map("use_cpu", device="cpu")
        if kind == "DEEPSPEED":
            self.deepspeed(self.section("", self.mapping, "deepspeed_config"), mixed_precision)
        elif kind == "FSDP":
            self.precision("mixed_precision", mixed_precision)
            self.fsdp(self.section("", self.mapping, "fsdp_config"), FSDP)
        elif mixed_precision not in (None, "no", False):  # YAML reads `no` as false
            self.report.append(
                f"mixed_precision={mixed_precision!r} left to the loop: autocast in it, or"
                " Config(param_dtype=...)"
            )
        for other, table in (("DEEPSPEED", "deepspeed_config"), ("FSDP", "fsdp_config")):
            if kind != other and self.mapping.get(table):
                self.report.append(f"{table} off: distributed_type is {kind}")
        self.rest("", self.mapping)
        if launch := self._launch():
            self.report.append(f"start it with: {launch}")

    def _launch(self) -> str:
        """Returns the command that starts as many ranks; "" for one."""
        size, nodes = (
            count if type(count := self.mapping.get(key)) is int and count > 0 else 1
            for key in ("num_processes", "num_machines")
        )
        words = ["torchrun", f"--nproc-per-node {max(1, size // nodes)}"]
        if nodes > 1:
            words += [f"--nnodes {nodes}", f"--node-rank {self.mapping.get('machine_rank', 0)}"]
            for key, option in (("ip", "--master-addr"), ("port", "--master-port")):
                if value := self.mapping.get(f"main_process_{key}"):
                    words.append(f"{option} {value}")
        return " ".join([*words, "train.py"]) if size > 1 else ""

    def deepspeed(self, table: Mapping, mixed_precision: Any) -> None:
        """Translates Accelerate's table for DeepSpeed, or the JSON that it names."""
        settings: dict[str, Any] = {}
        if (named := table.get("deepspeed_config_file")) is not None:
            settings = read_table(Path(named))
        else:
            if mixed_precision in ("bf16", "fp16"):
                settings[mixed_precision] = {"enabled": True}
            for key, value in table.items():
                if key in DEEPSPEED:
                    *parts, last = DEEPSPEED[key].split(".")
                    inner = settings
                    for part in parts:
                        inner = inner.setdefault(part, {})
                    inner[last] = value
                elif str(key).startswith(OWN_OF_DEEPSPEED):
                    why = "a model on meta is filled as its file is read: `weights`"
                    self.report.append(f"deepspeed_config.{key} not needed: {why}")
                else:
                    self.unknown("deepspeed_config.", key, DEEPSPEED)
        if self.loop is None:  # Accelerate fills in the rest
            for name in ("bf16", "fp16"):
                if isinstance(of := settings.get(name), Mapping) and of.get("enabled") == AUTO:
                    settings[name] = {**of, "enabled": mixed_precision == name}
            if settings.get("gradient_clipping") == AUTO:
                settings["gradient_clipping"] = 1.0
        fields, report = translate_deepspeed(settings, strict=self.strict, loop=self.loop)
        self.fields |= fields
        self.report += report

    # --- FSDP ---

    def fsdp(self, table: Mapping, path: str) -> None:
        """Translates an `fsdp_config`, with or without the prefix of its keys."""
        for key, value in table.items():
            name, key = str(key).removeprefix(PREFIX), f"{path}{key}"
            if name in ("sharding_strategy", "reshard_after_forward"):
                self._strategy(key, value)
            elif name == "mixed_precision_policy":
                self.precision(key, value)
            elif name in OFFLOADS and self._is_true(key, value):
                self.map(key, **OFFLOADS[name])
        self.rest(path, table)

    def _strategy(self, key: str, value: Any) -> None:
        named = value
        if isinstance(value, str):
            named = {"TRUE": True, "FALSE": False}.get(value.upper(), value.upper().lstrip("_"))
            named = NAMES[int(named) - 1] if named in ("1", "2", "3", "4", "5") else named
        elif type(value) is int and 1 <= value <= len(NAMES):
            named = NAMES[value - 1]
        if not isinstance(named, (str, bool)) or named not in STRATEGIES:
            raise ConfigError(f"{key}={value!r} is not one of {', '.join(NAMES)}, or true or false")
        shard, in_node = STRATEGIES[named]
        self.map(key, shard=shard, **({"shard_in_node": True} if in_node else {}))

    def _is_true(self, key: str, value: Any) -> bool:
        known = {"true": True, "false": False, "none": False}
        truth = known.get(str(value).lower())
        if truth is None:
            raise ConfigError(f"{key}={value!r} is not true or false")
        if not truth:
            self.report.append(f"{key} off")
        return truth

    def precision(self, key: str, value: Any) -> None:
        """Maps a dtype to ``param_dtype``."""
        if value in (None, "no", False, AUTO):  # YAML reads `no` as false
            return
        if not isinstance(value, str) or value not in DTYPES:
            raise ConfigError(f"{key}={value!r} is not one of 'no', 'fp32', 'fp16', 'bf16'")
        self.map(key, param_dtype=value)
