"""Translates a DeepSpeed JSON into the fields of a Config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...choices import DTYPES, SHARDED
from ...errors import ConfigError
from .deepspeed_optimizer import read_optimizer
from .keys import VERSION, Key, read_keys
from .translation import AUTO, Translation

SECTIONS = read_keys("deepspeed")
ZERO = "zero_optimization."
PREFIX = "stage3_"  # DeepSpeed takes the keys of its ZeRO that begin so without it, too
# Tables of DeepSpeed -> dtype; "bfloat16" is an old name.
PRECISIONS = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}
SWITCHES = (  # of ZeRO, and what each sets
    ("cpu_offload", "optimizer", "host"),
    ("cpu_offload_param", "params", "host"),
    ("zero_quantized_weights", "compress_gathers", True),
)
HOMES = {"cpu": "host", "nvme": "nvme", "none": "device", None: "device"}
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
SCHEDULE = "scheduler.type"
SCHEDULES = {  # of DeepSpeed, by transformers' names
    "WarmupLR": "constant_with_warmup",
    "WarmupDecayLR": "linear",
    "WarmupCosineLR": "cosine",
}
AFTER_WARMUP = {  # what a schedule does, by transformers' names
    "constant": "stays constant, without a warm-up",
    "constant_with_warmup": "stays constant after the warm-up",
    "linear": "decays to 0 along a line",
    "cosine": "decays along a cosine",
}
THE_JSONS = "the JSON's "  # begins a line that is a warning of its own

# Keys of DeepSpeed's that are other tools' words, too: only a table of its form is DeepSpeed's.
SHARED = {
    "optimizer": {"type", "params", "legacy_fusion"},
    "scheduler": {"type", "params"},
    **{name: {*SECTIONS[f"{name}."]} for name in ("bf16", "bfloat16", "fp16", "data_types")},
    "amp": {"enabled", "opt_level"},
    "activation_checkpointing": {"partition_activations", "cpu_checkpointing"},
    "autotuning": {"enabled"},
    "flops_profiler": {"enabled"},
}
WORDS = {
    *("checkpoint", "compile", "pipeline", "tensorboard", "wandb", "comet", "timers", "nebula"),
    *("eigenvalue", "log_level", "elasticity", "data_efficiency", "tensor_parallel"),
}


def is_deepspeed(mapping: Mapping) -> bool:
    """Returns whether a table of keys is a DeepSpeed JSON."""
    marks = SECTIONS[""].keys() - WORDS - SHARED.keys()
    return any(mark in mapping for mark in marks) or any(
        isinstance(table := mapping.get(name), Mapping) and not form.isdisjoint(table)
        for name, form in SHARED.items()
    )


def folded(report: list[str]) -> list[str]:
    """Returns the lines of a report that change something, then the count of the others."""
    lines = [
        line
        for line in report
        if " mapped to " in line
        or " unknown" in line
        or "left to the loop" in line
        or line.startswith("start it with")
    ]
    lines = [line for line in lines if not line.startswith(THE_JSONS)]
    left = len(report) - len(lines) - len(differences(report))
    counted = f"{left} more key{'s are' if left > 1 else ' is'} not needed, or off"
    return [*lines, counted] if left else lines


def differences(report: list[str]) -> list[str]:
    """Returns the lines of a report on what trains otherwise than the JSON says."""
    return [line for line in report if line.startswith(THE_JSONS)]


def torch_line(expected: Mapping[str, Any]) -> str:
    """Returns the torch optimizer that a DeepSpeed JSON stands for, as a line to paste."""
    settings = {name: value for name, value in expected.items() if name != "type"}
    words = "".join(f", {name}={value!r}" for name, value in settings.items())
    kind = expected["type"]
    where = kind if kind == "Lion" else f"torch.optim.{kind}"  # torch has no Lion
    return f"optimizer = {where}(model.parameters(){words})"


def _leaves(value: Any) -> list[Any]:
    return (
        [leaf for each in value.values() for leaf in _leaves(each)]
        if isinstance(value, Mapping)
        else [value]
    )


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and value >= 0


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0


class _Translation(Translation):
    tool, sections = "DeepSpeed", SECTIONS
    known = f" (keys up to DeepSpeed {VERSION} are known)"
    loop: Mapping[str, Any]

    def find(self, path: str, name: str) -> Key | None:
        found = super().find(path, name)
        return found or (super().find(path, PREFIX + name) if path == ZERO else None)

    def only_the_loop(self, key: str, value: Any, why: str, told: str = "") -> None:
        """Reports a key that only the training loop can handle, as ``told``. Raises ConfigError if
        strict."""
        if self.strict:
            raise ConfigError(
                f"DeepSpeed {key}={value!r}: {why}. With from_deepspeed(..., strict=False) it is"
                " left to the loop."
            )
        self.report.append(told or f"{key} off: left to the loop")

    # --- ZeRO ---

    def zero(self) -> None:
        """Maps homes, what is sharded, and switches."""
        zero = self.section("", self.mapping, "zero_optimization")
        self.offload(zero, "offload_param", "params")
        self.offload(zero, "offload_optimizer", "optimizer")
        stage = self.value(ZERO, zero, "stage", "0, 1, 2 or 3", lambda n: _is_size(n) and n < 4)
        if stage:
            self.map(f"{ZERO}stage={stage}", shard=SHARDED[stage - 1])
        elif "stage" in zero:
            self.off(f"{ZERO}stage", "shard is the default")
        for key, field, value in SWITCHES:
            if self.value(ZERO, zero, key):
                self.map(f"{ZERO}{key}", **{field: self.fields.get(field, value)})
            elif key in zero:
                self.off(f"{ZERO}{key}")
        key = "zero_hpz_partition_size"
        size = self.value(ZERO, zero, key, "a number of ranks", lambda n: n is False or _is_size(n))
        if (size or 0) > 1:
            self.map(f"{ZERO}{key}={size}, over a machine's ranks,", shard_in_node=True)
        elif key in zero:
            self.off(f"{ZERO}{key}")
        self.rest(ZERO, zero)

    def offload(self, zero: Mapping, key: str, field: str) -> None:
        """Maps one of DeepSpeed's offload tables to the home of ``field``."""
        path = f"{ZERO}{key}."
        table = self.section(ZERO, zero, key)
        if not table:
            return
        device = table.get("device")
        if not isinstance(device, str | None) or device not in HOMES:
            raise ConfigError(
                f"DeepSpeed {path}device={device!r} is not one of 'cpu', 'nvme', 'none'"
            )
        self.map(f"{path}device={device!r}", **{field: HOMES[device]})
        folder = table.get("nvme_path")
        if folder and device == "nvme":
            paths = self.fields.setdefault("nvme_paths", [])
            if folder not in paths:
                paths.append(folder)
            self.report.append(f"{path}nvme_path mapped to nvme_paths")
        elif "nvme_path" in table:
            self.off(f"{path}nvme_path", "nothing of it is on NVMe")
        on_disk = device == "nvme" and field == "params"
        is_one = lambda value: _is_number(value) and value == int(value)
        kept = self.value(path, table, "max_in_cpu", "a number of elements", is_one)
        if kept is not None and on_disk:
            self.map(f"{path}max_in_cpu", weights_on_host=int(kept))
        elif "max_in_cpu" in table:
            self.off(f"{path}max_in_cpu", "" if on_disk else "no parameters are on NVMe")
        self.rest(path, table)

    # --- numbers ---

    def precision(self, key: str, dtype: str) -> None:
        """Maps the table ``key`` to the dtypes of parameters, gradients and optimizer state."""
        table = self.section("", self.mapping, key)
        enabled = self.value(f"{key}.", table, "enabled")
        if table.get("enabled") == AUTO:
            enabled = bool(self.loop.get(f"{dtype}.enabled"))
        if enabled and dtype == "fp16" and self.loop.get("fp16.enabled"):
            # Its GradScaler, as torch's, takes no gradients in fp16.
            self.report.append(f"{key}.enabled left to the loop, which has autocast and GradScaler")
        elif enabled:
            other = self.fields.get("param_dtype", dtype)
            if other != dtype:
                raise ConfigError(
                    f"DeepSpeed {other}.enabled and {key}.enabled are both true: the model computes"
                    " in one dtype"
                )
            self.map(f"{key}.enabled", param_dtype=dtype)
        elif "enabled" in table:
            self.off(f"{key}.enabled={table['enabled']!r}", "the model's own dtype is kept")
        fields = {
            f"{dtype}_master_weights_and_grads": {"master": "none", "grad_dtype": dtype},
            f"{dtype}_optimizer_states": {"moments": dtype},
        }
        for name in (name for name in fields if name in table and self.find(f"{key}.", name)):
            if self.value(f"{key}.", table, name) and enabled:
                self.map(f"{key}.{name}", **fields[name])
            else:
                self.off(f"{key}.{name}")
        self.rest(f"{key}.", table if enabled else dict.fromkeys(table))

    def data_types(self) -> None:
        """Maps the dtypes in which gradients accumulate and the model computes."""
        table = self.section("", self.mapping, "data_types")
        for key, field in (("grad_accum_dtype", "grad_dtype"), ("param_dtype", "param_dtype")):
            is_one = lambda value: isinstance(value, str) and value in DTYPES
            dtype = self.value("data_types.", table, key, "one of 'fp32', 'fp16', 'bf16'", is_one)
            if dtype is not None:
                self.map(f"data_types.{key}", **{field: dtype})
            elif key in table:
                self.off(f"data_types.{key}")
        self.rest("data_types.", table)

    def clipping(self) -> None:
        """Maps ``gradient_clipping`` to ``max_grad_norm``; 0 means no clipping. A loop that clips
        by the same norm is left to it: clipping twice would round twice."""
        key = "gradient_clipping"
        value = self.mapping.get(key)
        if value == AUTO and key not in self.loop:
            why = (
                "that is the max_grad_norm of transformers' Trainer, which is not known here. Give"
                " the number, or 0 where the loop clips"
            )
            self.only_the_loop(key, value, why)
        elif key in self.mapping and value in (AUTO, self.loop.get(key)) and key in self.loop:
            self.report.append(f"{key}={value!r} left to the loop, {self._has(key)}")
        elif self.value("", self.mapping, key, "a number", _is_number):
            self.map(key, max_grad_norm=float(self.mapping[key]))
        elif key in self.mapping:
            self.off(key, "gradients are not clipped")

    def batch(self) -> None:
        """Leaves the sizes of batches to the loop, and says so where it has others."""
        for key in BATCH:
            if (value := self.mapping.get(key, AUTO)) != AUTO and key in self.loop:
                if value == self.loop[key]:
                    self.report.append(f"{key} not needed: the loop has the same")
                else:
                    self.report.append(f"{key}={value!r} left to the loop, {self._has(key)}")

    def _has(self, key: str) -> str:
        value = self.loop[key]
        return "which clips itself" if value is None else f"which has {value!r}"

    # --- optimizer and scheduler ---

    def optimizer(self) -> None:
        """Maps the optimizer to ``expects_optimizer``, which wrap_model checks."""
        table = self.section("", self.mapping, "optimizer")
        self.rest("optimizer.", table)
        if table.get("type") is None:
            if table:
                self.off("optimizer", "it has no type")
            return
        params = self.section("optimizer.", table, "params")
        expected = read_optimizer(table["type"], params, unknown=self.unknown)
        self.map("optimizer", expects_optimizer=expected)

    def scheduler(self) -> None:
        """Leaves the scheduler to the loop. Raises ConfigError for values that the loop's has not,
        and, if strict, for values where there is no loop to compare with."""
        table = self.section("", self.mapping, "scheduler")
        params = self.section("scheduler.", table, "params")
        if table.get("type") is None or all(
            leaf == AUTO for key, value in table.items() if key != "type" for leaf in _leaves(value)
        ):
            if table.get("type") is not None:
                self.report.append(_told_of(table["type"], self.loop.get(SCHEDULE)))
            elif table:
                self.off("scheduler", "it has no type")
        elif SCHEDULE not in self.loop:
            why = (
                "a Config holds no scheduler. Make one of torch's over the optimizer that"
                " wrap_model returns, and leave it out here"
            )
            self.only_the_loop("scheduler", dict(table), why, _told_of(table["type"], None))
        else:
            self._compare_scheduler(table["type"], params)

    def _compare_scheduler(self, kind: Any, params: Mapping) -> None:
        wanted = {SCHEDULE: kind, **{f"scheduler.params.{key}": params[key] for key in params}}
        has = {"scheduler.params.warmup_min_lr": 0, **self.loop}
        other = {
            key: value
            for key, value in wanted.items()
            if value != AUTO and not (key in has and has[key] in (None, value))
        }
        if other:
            said = ", ".join(f"{key}={value!r}" for key, value in other.items())
            loops = ", ".join(f"{key}={has[key]!r}" for key in other if key in has)
            raise ConfigError(
                f"DeepSpeed {said}: the loop's scheduler steps, which has {loops or 'none of it'}."
                f" Give the Trainer lr_scheduler_type={SCHEDULES.get(kind, 'its name')!r} with the"
                ' same learning_rate and warmup_steps, or set these to "auto".'
            )
        self.report.append(_told_of(kind, self.loop[SCHEDULE]))


def _told_of(kind: Any, loops: Any) -> str:
    """Returns the report's line of a scheduler ``kind`` whose loop has ``loops``; None: it is not
    known."""
    if kind == loops:
        return f"scheduler {kind} left to the loop, which has the same"
    wanted, runs = SCHEDULES.get(str(kind)), SCHEDULES.get(str(loops), str(loops))
    does = AFTER_WARMUP[wanted] if wanted else "is none of transformers'"
    remedy = f"set lr_scheduler_type={wanted!r}" if wanted else "make it of torch's in your script"
    if loops is None:
        default = "its default" if wanted == "linear" else "its default decays to 0 along a line"
        where = (
            f"In transformers' Trainer {remedy} ({default}), in a loop of your own one of torch's"
        )
        said = where if wanted else "Make it of torch's in your script"
        return f"{THE_JSONS}scheduler is left to the loop: {kind} {does}. {said}"
    now = AFTER_WARMUP.get(runs, "is another")
    return (
        f"{THE_JSONS}{kind} {does}, this Trainer's {runs} schedule {now}: for the JSON's {remedy}"
    )


def translate_deepspeed(
    mapping: Mapping, *, strict: bool = True, loop: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Translates DeepSpeed's keys into fields of a Config and a report line for every key.

    ``loop``: what the training loop has, by DeepSpeed's keys with dots, such as
    ``"gradient_clipping"`` and ``"bf16.enabled"``: an "auto" takes it. Its ``"scheduler.type"`` is
    the name of DeepSpeed's scheduler that is like the loop's. A value None is not known yet; that
    of ``gradient_clipping``: the loop clips itself.

    Raises ConfigError for keys that are invalid or not supported. ``strict``: also for unknown
    keys, and for those that only the loop can handle. Otherwise these are reported and left out.
    """
    translation = _Translation(mapping, strict=strict, loop=loop or {})
    translation.zero()
    for key, dtype in PRECISIONS.items():
        translation.precision(key, dtype)
    translation.clipping()
    translation.batch()
    translation.data_types()
    translation.optimizer()
    translation.scheduler()
    of_loop = (key for key in BATCH if key in translation.loop and mapping.get(key, AUTO) != AUTO)
    translation.rest("", mapping, "scheduler", *of_loop)
    return translation.fields, translation.report
