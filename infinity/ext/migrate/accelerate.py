"""Translates Accelerate's YAML, or an `fsdp_config` of it or of the Trainer, into the fields of a
Config, and reports the result for every key.

mapped       to a field
not needed   with the reason
loop         the training loop, or the command that starts it, has it
refused      if it is on: it changes the training, and is not supported

`fsdp_config` has its keys with the prefix `fsdp_` in Accelerate's YAML, and without it in the
Trainer's. A `deepspeed_config` is translated as a DeepSpeed JSON.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...choices import DTYPES
from ...errors import ConfigError
from .deepspeed import AUTO, is_on, translate_deepspeed
from .deepspeed_keys import MAPPED, NOT_NEEDED, REFUSED, Key

PREFIX = "fsdp_"
LOOP = "loop"
NAMES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
STRATEGIES = {  # of FSDP, by name or by its number from 1 on -> what is sharded, within a machine
    "FULL_SHARD": ("parameters", False),
    "SHARD_GRAD_OP": ("gradients", False),
    "NO_SHARD": ("optimizer", False),  # here optimizer state is never held twice
    "HYBRID_SHARD": ("parameters", True),
    "HYBRID_SHARD_ZERO2": ("gradients", True),
} | {True: ("parameters", False), False: ("gradients", False)}

AHEAD = "weights come as far ahead as the budgets leave room for"
WHOLE = "`save_pretrained` and `state_dict()` have all weights; checkpoints are sharded"
FILLED = "a model on meta is filled as its file is read: `weights`"
FOUND = "`units='auto'` finds the model's blocks"
TPU = "it is for TPUs"
START = "torchrun starts the ranks"
RENTED = "start the command on the machine itself"
SAGEMAKER = (
    "ec2_instance_type iam_role_name image_uri profile region base_job_name pytorch_version"
    " transformers_version py_version sagemaker_inputs_file sagemaker_metrics_file additional_args"
).split()
FSDP = (
    Key(
        "sharding_strategy",
        MAPPED,
        "`shard`: FULL_SHARD `parameters`, SHARD_GRAD_OP `gradients`, NO_SHARD `optimizer`;"
        " HYBRID_SHARD also `shard_in_node=True`",
    ),
    Key(
        "reshard_after_forward",
        MAPPED,
        "`shard`: true `parameters`, false `gradients`; or as `sharding_strategy`",
    ),
    Key("offload_params", MAPPED, "`params='host'`, `optimizer='host'`"),
    Key("cpu_offload", MAPPED, "`params='host'`, `optimizer='host'`"),
    Key("mixed_precision_policy", MAPPED, "a dtype: `param_dtype`"),
    Key(
        "activation_checkpointing",
        LOOP,
        "`model.gradient_checkpointing_enable()`, or `--gradient-checkpointing`",
    ),
    Key("activation_checkpointing_offload", MAPPED, "`activations='host'`"),
    Key("auto_wrap_policy", NOT_NEEDED, FOUND),
    Key("transformer_layer_cls_to_wrap", NOT_NEEDED, FOUND),
    Key("transformer_cls_names_to_wrap", NOT_NEEDED, FOUND),
    Key("min_num_params", NOT_NEEDED, FOUND),
    Key("backward_prefetch", NOT_NEEDED, AHEAD),
    Key("backward_prefetch_policy", NOT_NEEDED, AHEAD),
    Key("forward_prefetch", NOT_NEEDED, AHEAD),
    Key("limit_all_gathers", NOT_NEEDED, AHEAD),
    Key("use_orig_params", NOT_NEEDED, "parameters stay the model's own"),
    Key("state_dict_type", NOT_NEEDED, WHOLE),
    Key("sync_module_states", NOT_NEEDED, FILLED),
    Key("cpu_ram_efficient_loading", NOT_NEEDED, FILLED),
    Key("version", NOT_NEEDED, "there is one form"),
    Key("ignored_modules", REFUSED, "freeze what is not to be trained, with `requires_grad_`"),
    Key("xla", REFUSED, TPU),
    Key("xla_fsdp_v2", REFUSED, TPU),
    Key("xla_fsdp_settings", REFUSED, TPU),
    Key("xla_fsdp_grad_ckpt", REFUSED, TPU),
)
TOP = (
    Key("distributed_type", MAPPED, "which of the tables below is read"),
    Key("fsdp_config", MAPPED, "see its keys"),
    Key("deepspeed_config", MAPPED, "as [a DeepSpeed JSON](#a-deepspeed-json)"),
    Key(
        "mixed_precision",
        MAPPED,
        "with FSDP and DeepSpeed `param_dtype`; else it is the Accelerator's autocast",
    ),
    Key("use_cpu", MAPPED, "`device='cpu'`"),
    Key("num_processes", LOOP, START),
    Key("num_machines", LOOP, START),
    Key("machine_rank", LOOP, START),
    Key("main_process_ip", LOOP, START),
    Key("main_process_port", LOOP, START),
    *(Key(name, NOT_NEEDED, START) for name in ("rdzv_backend", "same_network", "mpirun_config")),
    *(Key(name, NOT_NEEDED, START) for name in ("gpu_ids", "enable_cpu_affinity", "debug")),
    *(Key(name, NOT_NEEDED, START) for name in ("num_cpu_threads_per_process", "max_restarts")),
    *(Key(name, NOT_NEEDED, START) for name in ("use_mps_device", "use_xpu", "ipex_config")),
    Key("main_training_function", NOT_NEEDED, START),
    Key("compute_environment", NOT_NEEDED, START),
    Key("dynamo_config", NOT_NEEDED, "Config(compile=True) compiles blocks"),
    Key("dynamo_backend", NOT_NEEDED, "`dynamo_config` by its old name"),
    Key("fp16", MAPPED, "`mixed_precision: fp16` by its old name"),
    *(Key(name, NOT_NEEDED, RENTED) for name in SAGEMAKER),
    Key("parallelism_config", REFUSED, "give wrap_model a mesh"),
    Key("tp_config", REFUSED, "give wrap_model a mesh"),
    Key("megatron_lm_config", REFUSED, "give wrap_model a mesh"),
    Key("fp8_config", REFUSED, "weights are computed with in fp32, bf16 or fp16"),
    Key("downcast_bf16", REFUSED, TPU, off=("no",)),
    *(Key(name, REFUSED, TPU) for name in ("tpu_name", "tpu_zone", "tpu_vm", "tpu_env")),
    *(
        Key(name, REFUSED, TPU)
        for name in ("tpu_use_cluster", "tpu_use_sudo", "command_file", "commands")
    ),
)
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
    names = {key.name for key in FSDP} - {"version", "activation_checkpointing"}  # others' words
    return any(key in marks or str(key).startswith(PREFIX) or str(key) in names for key in mapping)


def translate_accelerate(
    mapping: Mapping,
    *,
    strict: bool,
    read: Callable[[Path], Mapping],
    loop: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Returns the fields of a Config that ``mapping`` asks for, and a line for every key. ``read``:
    reads the DeepSpeed JSON that it may name; ``loop``: as for translate_deepspeed. Raises
    ConfigError for a key that is switched on and not supported; ``strict``: also for an unknown
    one."""
    translation = _Translation(mapping, strict=strict, loop=loop)
    if any(key.name in mapping for key in TOP):
        translation.file(read)
    else:
        translation.fsdp(mapping, "")
    return translation.fields, translation.report


class _Translation:
    """A translation in progress: the fields set so far, and a report line for every key."""

    def __init__(self, mapping: Mapping, *, strict: bool, loop: Mapping[str, Any] | None):
        self.mapping, self.strict, self.loop = mapping, strict, loop
        self.fields: dict[str, Any] = {}
        self.report: list[str] = []
        old = "fp16" if mapping.get("fp16") is True else None
        self.mixed_precision = mapping.get("mixed_precision", old)

    def map(self, key: str, value: Any, **fields: Any) -> None:
        """Sets fields from ``key``. Raises ConfigError if another key set another value."""
        for name, field in fields.items():
            if self.fields.setdefault(name, field) != field:
                raise ConfigError(
                    f"{key}={value!r} asks for {name}={field!r}, and another key for"
                    f" {self.fields[name]!r}: leave one of them out"
                )
        mapped = ", ".join(f"{name}={field!r}" for name, field in fields.items())
        self.report.append(f"{key} mapped to {mapped}")

    # --- the file ---

    def file(self, read: Callable[[Path], Mapping]) -> None:
        """Translates Accelerate's YAML."""
        named = "DEEPSPEED" if self.mapping.get("deepspeed_config") else "FSDP"
        kind = str(self.mapping.get("distributed_type", named)).upper()
        if self.mapping.get("use_cpu") is True:
            self.map("use_cpu", True, device="cpu")
        if kind == "DEEPSPEED":
            self.deepspeed(self.table("deepspeed_config"), read)
        elif kind == "FSDP":
            self.precision("mixed_precision", self.mixed_precision)
            self.fsdp(self.table("fsdp_config"), "fsdp_config.")
        elif self.mixed_precision not in (None, "no", False):  # YAML reads `no` as false
            self.report.append(
                f"mixed_precision={self.mixed_precision!r} left to the loop: autocast in it, or"
                " Config(param_dtype=...)"
            )
        for other, table in (("DEEPSPEED", "deepspeed_config"), ("FSDP", "fsdp_config")):
            if kind != other and self.mapping.get(table):
                self.report.append(f"{table} off: distributed_type is {kind}")
        taken = ("distributed_type", "fsdp_config", "deepspeed_config", "use_cpu")
        self.rest("", self.mapping, TOP, *taken, "mixed_precision", "fp16")
        if launch := self._launch():
            self.report.append(f"start it with: {launch}")

    def table(self, key: str) -> Mapping:
        """Returns a table of the file, empty if absent. Raises ConfigError if it is none."""
        value = self.mapping.get(key) or {}
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key}={value!r} is not a table of keys")
        return value

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

    def deepspeed(self, table: Mapping, read: Callable[[Path], Mapping]) -> None:
        """Translates Accelerate's table for DeepSpeed, or the JSON that it names."""
        settings: dict[str, Any] = {}
        if (named := table.get("deepspeed_config_file")) is not None:
            settings = dict(read(Path(named)))
        else:
            if self.mixed_precision in ("bf16", "fp16"):
                settings[self.mixed_precision] = {"enabled": True}
            for key, value in table.items():
                if key in DEEPSPEED:
                    *parts, last = DEEPSPEED[key].split(".")
                    inner = settings
                    for part in parts:
                        inner = inner.setdefault(part, {})
                    inner[last] = value
                elif str(key).startswith(OWN_OF_DEEPSPEED):
                    self.report.append(f"deepspeed_config.{key} not needed: {FILLED}")
                else:
                    self.unknown("deepspeed_config.", key, list(DEEPSPEED))
        if self.loop is None:  # Accelerate fills in the rest
            for name in ("bf16", "fp16"):
                if isinstance(of := settings.get(name), Mapping) and of.get("enabled") == AUTO:
                    settings[name] = {**of, "enabled": self.mixed_precision == name}
            if settings.get("gradient_clipping") == AUTO:
                settings["gradient_clipping"] = 1.0
        fields, report = translate_deepspeed(settings, strict=self.strict, loop=self.loop)
        self.fields |= fields
        self.report += report

    # --- FSDP ---

    def fsdp(self, table: Mapping, path: str) -> None:
        """Translates an `fsdp_config`, with or without the prefix of its keys."""
        present = {
            str(key).removeprefix(PREFIX): (f"{path}{key}", value) for key, value in table.items()
        }
        for name in ("sharding_strategy", "reshard_after_forward"):
            if name in present:
                self._strategy(*present[name])
        for name in ("offload_params", "cpu_offload"):
            if name in present and self._is_true(*present[name]):
                self.map(present[name][0], True, params="host", optimizer="host")
        name = "activation_checkpointing_offload"
        if name in present and self._is_true(*present[name]):
            self.map(present[name][0], True, activations="host")
        if "mixed_precision_policy" in present:
            self.precision(*present["mixed_precision_policy"])
        taken = [key.name for key in FSDP if key.fate == MAPPED]
        self.rest(path, table, FSDP, *taken, *(PREFIX + name for name in taken))

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
        self.map(key, value, shard=shard, **({"shard_in_node": True} if in_node else {}))

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
        self.map(key, value, param_dtype=value)

    # --- the others ---

    def rest(self, path: str, table: Mapping, keys: tuple[Key, ...], *taken: str) -> None:
        """Reports every key of ``table`` but the ``taken`` ones. Raises ConfigError for one that is
        switched on and not supported, or unknown if strict."""
        known = {key.name: key for key in keys}
        for key, value in table.items():
            if key in taken or str(key).startswith("_"):  # `_description`: a remark
                continue
            row = known.get(str(key)) or known.get(str(key).removeprefix(PREFIX))
            if row is None:
                self.unknown(path, key, list(known))
            elif row.fate == REFUSED and is_on(value, (*row.off, "false", "False", "no")):
                why = row.why.replace("`", "")
                raise ConfigError(
                    f"{path}{key}={value!r} is not to be had here: {why}. Leave it out."
                )
            elif row.fate == REFUSED or value in (None, False):
                self.report.append(f"{path}{key} off")
            elif row.fate == LOOP and row.why != START:
                self.report.append(f"{path}{key} left to the loop: {row.why.replace('`', '')}")
            else:
                self.report.append(f"{path}{key} not needed: {row.why.replace('`', '')}")

    def unknown(self, path: str, key: Any, names: list[str]) -> None:
        """Reports an unknown key. Raises ConfigError if strict."""
        near = difflib.get_close_matches(str(key).removeprefix(PREFIX), names, n=1)
        hint = f": did you mean {near[0]}?" if near else ""
        if self.strict:
            raise ConfigError(
                f"{path}{key} is not a key of Accelerate that is known here{hint or '.'} Correct"
                " it, or leave it out."
            )
        self.report.append(f"{path}{key} unknown{hint}")


def table() -> Iterator[str]:
    """Yields the lines of docs/migration.md's table."""
    yield "| key | what becomes of it | |"
    yield "|---|---|---|"
    for section, keys in (("", TOP), ("fsdp_config.", FSDP)):
        for key in keys:
            yield f"| `{section}{key.name}` | {key.fate} | {key.why} |"
