"""Translates a DeepSpeed JSON into the fields of a Config, and reports the result for every key:

mapped       to a field
not needed   with the reason
off          the key is switched off or unset
unknown      not a key of DeepSpeed; an error if the caller is strict
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from ...choices import DTYPES, SHARDED
from ...errors import ConfigError
from .deepspeed_keys import (
    BF16,
    DATA_TYPES,
    FP16,
    NOT_NEEDED,
    REFUSED,
    SECTIONS,
    VERSION,
    Key,
    find,
)
from .deepspeed_optimizer import read_optimizer

# Tables of DeepSpeed -> dtype; "bfloat16" is an old name.
PRECISIONS = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}
SWITCHES = ("cpu_offload", "cpu_offload_param", "zero_quantized_weights", "zero_hpz_partition_size")
AUTO = "auto"
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
    "bf16": {key.name for key in BF16},
    "bfloat16": {key.name for key in BF16},
    "fp16": {key.name for key in FP16},
    "amp": {"enabled", "opt_level"},
    "data_types": {key.name for key in DATA_TYPES},
    "activation_checkpointing": {"partition_activations", "cpu_checkpointing"},
    "autotuning": {"enabled"},
    "flops_profiler": {"enabled"},
}
WORDS = {
    "checkpoint",
    "compile",
    "pipeline",
    "tensorboard",
    "wandb",
    "comet",
    "timers",
    "nebula",
} | {
    "eigenvalue",
    "log_level",
    "elasticity",
    "data_efficiency",
    "tensor_parallel",
}


def is_deepspeed(mapping: Mapping) -> bool:
    """Returns whether a table of keys is a DeepSpeed JSON."""
    marks = {key.name for key in SECTIONS[""]} - WORDS - SHARED.keys()
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


def is_on(value: Any, off: tuple[Any, ...] = ()) -> bool:
    """Tells whether a value switches something on: a size above 1, a fraction, a text but "auto".

    Of a table, ``enabled`` decides, or that of its ``shared_parameters``; without one, whether any
    value inside is on. ``off``: further values that are off.
    """
    if isinstance(value, Mapping):
        shared = value.get("shared_parameters")
        switch = shared if isinstance(shared, Mapping) and "enabled" in shared else value
        return (
            switch["enabled"] not in (False, None, AUTO)
            if "enabled" in switch
            else any(map(is_on, value.values()))
        )
    if isinstance(value, int) and not isinstance(value, bool):
        return value > 1
    return value not in (None, False, "", AUTO, [], 0.0, *off)


def _leaves(value: Any) -> list[Any]:
    return (
        [leaf for each in value.values() for leaf in _leaves(each)]
        if isinstance(value, Mapping)
        else [value]
    )


class _Translation:
    """A translation in progress: the fields set so far, and a report line for every key."""

    HOMES = {"cpu": "host", "nvme": "nvme", "none": "device", None: "device"}
    STAGES = dict(enumerate(SHARDED, start=1))

    def __init__(self, mapping: Mapping, *, strict: bool, loop: Mapping[str, Any]):
        self.mapping, self.strict, self.loop = mapping, strict, loop
        self.fields: dict[str, Any] = {}
        self.report: list[str] = []

    def map(self, key: str, field: str, value: Any) -> None:
        """Sets ``field`` from ``key``. Raises ConfigError if another key set another value."""
        if self.fields.get(field) not in (None, value):
            raise ConfigError(
                f"DeepSpeed {key} asks for {field}={value!r}, and another key for"
                f" {self.fields[field]!r}"
            )
        self.fields[field] = value
        self.report.append(f"{key} mapped to {field}={value!r}")

    def off(self, key: str, why: str = "") -> None:
        """Reports that ``key`` has no effect."""
        self.report.append(f"{key} off" + (f": {why}" if why else ""))

    def unknown(self, path: str, key: str, names: list[str] | None = None) -> None:
        """Reports a key that DeepSpeed does not have. Raises ConfigError if strict."""
        near = difflib.get_close_matches(
            str(key), names or [known.name for known in SECTIONS[path]], n=1, cutoff=0.6
        )
        elsewhere = [
            section
            for section in SECTIONS
            if section != path and find(section, str(key)) is not None
        ]
        hint = f": did you mean {path}{near[0]}?" if near else ""
        if elsewhere and not near:
            hint = f": it belongs to {elsewhere[0].removesuffix('.') or 'the top level'}"
        if self.strict:
            raise ConfigError(
                f"DeepSpeed {path}{key} is unknown (keys up to DeepSpeed {VERSION} are"
                f" known){hint}. Correct it, leave it out, or have it ignored by"
                " from_deepspeed(..., strict=False)."
            )
        self.report.append(f"{path}{key} unknown{hint}")

    def only_the_loop(self, key: str, value: Any, why: str, told: str = "") -> None:
        """Reports a key that only the training loop can handle, as ``told``. Raises ConfigError if
        strict."""
        if self.strict:
            raise ConfigError(
                f"DeepSpeed {key}={value!r}: {why}. With from_deepspeed(..., strict=False) it is"
                " left to the loop."
            )
        self.report.append(told or f"{key} off: left to the loop")

    def section(self, path: str, parent: Mapping, key: str) -> Mapping:
        """Returns the table ``key`` of ``parent``; empty if absent, null or false. Raises
        ConfigError if it is not a table."""
        value = parent.get(key)
        if value is None or value is False:
            if key in parent:
                self.off(f"{path}{key}")
            return {}
        if not isinstance(value, Mapping):
            raise ConfigError(f"DeepSpeed {path}{key}={value!r} is not a table of keys")
        return value

    def rest(self, path: str, table: Mapping, *taken: str) -> None:
        """Reports every key of ``table`` except the ``taken`` ones. Raises ConfigError for one that
        is switched on and not supported, or unknown if strict."""
        for key, value in table.items():
            known = find(path, key) if isinstance(key, str) else None
            if known is None and str(key).startswith("_"):
                self.off(f"{path}{key}", "a remark")
            elif known is None:
                self.unknown(path, key)
            elif known.name not in taken:
                self._note(f"{path}{key}", known, value)

    def _note(self, key: str, known: Key, value: Any) -> None:
        why = known.why.replace("`", "")
        if known.fate == REFUSED and is_on(value, known.off):
            raise ConfigError(
                f"DeepSpeed {key}={value!r} is not to be had here: {why}. Leave it out."
            )
        if known.fate == NOT_NEEDED:
            self.report.append(f"{key} not needed: {why}")
        else:
            self.off(key)

    # --- ZeRO ---

    def offload(self, zero: Mapping, key: str, field: str) -> None:
        """Maps one of DeepSpeed's offload tables to the home of ``field``."""
        path = f"zero_optimization.{key}."
        table = self.section("zero_optimization.", zero, key)
        if not table:
            return
        device = table.get("device")
        if not isinstance(device, str | None) or device not in self.HOMES:
            raise ConfigError(
                f"DeepSpeed {path}device={device!r} is not one of 'cpu', 'nvme', 'none'"
            )
        self.fields[field] = self.HOMES[device]
        self.report.append(f"{path}device={device!r} mapped to {field}={self.fields[field]!r}")
        folder = table.get("nvme_path")
        if folder and device == "nvme":
            paths = self.fields.setdefault("nvme_paths", [])
            if folder not in paths:
                paths.append(folder)
            self.report.append(f"{path}nvme_path mapped to nvme_paths")
        elif "nvme_path" in table:
            self.off(f"{path}nvme_path", "nothing of it is on NVMe")
        self._kept(path, table, on_disk=device == "nvme" and field == "params")
        self.rest(path, table, "device", "nvme_path", "max_in_cpu")

    def _kept(self, path: str, table: Mapping, *, on_disk: bool) -> None:
        """Maps ``max_in_cpu``, the elements of parameters on disk that stay in memory."""
        count = table.get("max_in_cpu")
        if count in (None, AUTO) or not on_disk:
            if "max_in_cpu" in table:
                self.off(f"{path}max_in_cpu", "" if on_disk else "no parameters are on NVMe")
        elif (
            isinstance(count, bool)
            or not isinstance(count, (int, float))
            or count < 0
            or count != int(count)
        ):
            raise ConfigError(f"DeepSpeed {path}max_in_cpu={count!r} is not a number of elements")
        else:
            self.map(f"{path}max_in_cpu", "weights_on_host", int(count))

    def switches(self, zero: Mapping) -> None:
        """Maps the switches of ZeRO that set one field each."""
        for key, field, value in (
            ("cpu_offload", "optimizer", "host"),
            ("cpu_offload_param", "params", "host"),
            ("zero_quantized_weights", "compress_gathers", True),
        ):
            if zero.get(key) is True:
                self.fields.setdefault(field, value)
                self.report.append(
                    f"zero_optimization.{key} mapped to {field}={self.fields[field]!r}"
                )
            elif key in zero and zero[key] not in (None, False, AUTO):
                raise ConfigError(
                    f"DeepSpeed zero_optimization.{key}={zero[key]!r} is not true or false"
                )
            elif key in zero:
                self.off(f"zero_optimization.{key}")
        size = zero.get("zero_hpz_partition_size")
        if isinstance(size, int) and not isinstance(size, bool) and size > 1:
            self.map(
                f"zero_optimization.zero_hpz_partition_size={size}, over a machine's ranks,",
                "shard_in_node",
                True,
            )
        elif size not in (None, 0, 1, AUTO):
            raise ConfigError(
                f"DeepSpeed zero_optimization.zero_hpz_partition_size={size!r} is not a number of"
                " ranks"
            )
        elif "zero_hpz_partition_size" in zero:
            self.off("zero_optimization.zero_hpz_partition_size")

    def stage(self, zero: Mapping) -> None:
        """Maps ``stage`` 1, 2 or 3 to ``shard``."""
        value = zero.get("stage")
        if isinstance(value, int) and not isinstance(value, bool) and value in self.STAGES:
            self.map(f"zero_optimization.stage={value}", "shard", self.STAGES[value])
        elif value in (None, AUTO, 0) and value is not False:
            if "stage" in zero:
                self.off("zero_optimization.stage", "shard is the default")
        else:
            raise ConfigError(f"DeepSpeed zero_optimization.stage={value!r} is not 0, 1, 2 or 3")

    # --- numbers ---

    def precision(self, key: str, dtype: str) -> None:
        """Maps the table ``key`` to the dtypes of parameters, gradients and optimizer state."""
        table = self.section("", self.mapping, key)
        enabled = self._switch(key, table, "enabled")
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
            self.map(f"{key}.enabled", "param_dtype", dtype)
        elif "enabled" in table:
            self.off(f"{key}.enabled={table['enabled']!r}", "the model's own dtype is kept")
        low, states = f"{dtype}_master_weights_and_grads", f"{dtype}_optimizer_states"
        for name, fields in (
            (low, {"master": "none", "grad_dtype": dtype}),
            (states, {"moments": dtype}),
        ):
            if self._switch(key, table, name) and enabled:
                for field, value in fields.items():
                    self.map(f"{key}.{name}", field, value)
            elif name in table and find(f"{key}.", name) is not None:
                self.off(f"{key}.{name}")
        self.rest(
            f"{key}.", table if enabled else {name: None for name in table}, "enabled", low, states
        )

    def _switch(self, key: str, table: Mapping, name: str) -> bool:
        if (value := table.get(name)) not in (None, True, False, AUTO) or (
            isinstance(value, int) and not isinstance(value, bool)
        ):
            raise ConfigError(f"DeepSpeed {key}.{name}={value!r} is not true or false")
        return value is True

    def data_types(self) -> None:
        """Maps the dtypes in which gradients accumulate and the model computes."""
        table = self.section("", self.mapping, "data_types")
        for key, field in (("grad_accum_dtype", "grad_dtype"), ("param_dtype", "param_dtype")):
            value = table.get(key)
            if value in (None, AUTO):
                if key in table:
                    self.off(f"data_types.{key}")
            elif not isinstance(value, str) or value not in DTYPES:
                raise ConfigError(
                    f"DeepSpeed data_types.{key}={value!r} is not one of 'fp32', 'fp16', 'bf16'"
                )
            else:
                self.map(f"data_types.{key}", field, value)
        self.rest("data_types.", table, "grad_accum_dtype", "param_dtype")

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
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
            self.map(key, "max_grad_norm", float(value))
        elif value in (None, 0) and value is not False:
            if key in self.mapping:
                self.off(key, "gradients are not clipped")
        else:
            raise ConfigError(f"DeepSpeed gradient_clipping={value!r} is not a number")

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
        self.rest("optimizer.", table, "type", "params")
        if table.get("type") is None:
            if table:
                self.off("optimizer", "it has no type")
            return
        params = self.section("optimizer.", table, "params")
        expected = read_optimizer(table["type"], params, unknown=self.unknown)
        self.map("optimizer", "expects_optimizer", expected)

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
    zero = translation.section("", mapping, "zero_optimization")
    translation.offload(zero, "offload_param", "params")
    translation.offload(zero, "offload_optimizer", "optimizer")
    translation.stage(zero)
    translation.switches(zero)
    translation.rest(
        "zero_optimization.", zero, "offload_param", "offload_optimizer", "stage", *SWITCHES
    )
    for key, dtype in PRECISIONS.items():
        translation.precision(key, dtype)
    translation.clipping()
    translation.batch()
    translation.data_types()
    translation.optimizer()
    translation.scheduler()
    taken = (
        "zero_optimization",
        *PRECISIONS,
        "gradient_clipping",
        "data_types",
        "optimizer",
        "scheduler",
        *(key for key in BATCH if key in translation.loop and mapping.get(key, AUTO) != AUTO),
    )
    translation.rest("", mapping, *taken)
    return translation.fields, translation.report
