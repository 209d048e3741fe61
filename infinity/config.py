"""Config: every choice of the user, checked once, when it is made."""

from __future__ import annotations

import difflib
import importlib
import logging
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .amounts import parse_nbytes
from .choices import (
    AUTO,
    COMPILE_OPTIONS,
    DTYPES,
    HOMES,
    MASTERS,
    MOMENT_DTYPES,
    QUANTIZED,
    SAMPLED,
    SHARDED,
    Unset,
)
from .core import seams
from .core.machine.tiers import home_of
from .errors import ConfigError
from .untrusted import read_table

logger = logging.getLogger(__name__)

MOST_THREADS = 1024  # of the optimizer: more than the CPUs of any machine


@dataclass(frozen=True, kw_only=True)
class Config:
    """Holds the configuration of :func:`infinity.wrap_model`. Raises ConfigError if it is invalid.

    params, optimizer, activations
        Home of the weights, the optimizer state (master and moments), and the tensors saved for the
        backward: ``"auto"``, ``"device"``, ``"host"`` or ``"nvme"``.
    device_memory, host_memory, nvme_capacity
        Hard budgets: bytes, or text such as ``"48GiB"``. None: measured free space. The ranks of a
        machine share host memory and disks equally. ``device_memory`` is per rank.
    nvme_paths
        Folders for state at home on NVMe; needed if anything is. ``"auto"``: if memory does not
        hold all state, chooses a scratch folder on a disk of this machine, and logs it. This is the
        default of :func:`infinity.wrap_model` without a configuration.
    weights_on_host
        Elements of weights also cached in host memory, per rank, if ``params="nvme"``. None: as
        many as fit if ``host_memory`` is given and activations are not sent to it, else none.
    param_dtype
        dtype the model computes in (``torch.bfloat16`` or ``"bf16"``); None: the model's own.
    master
        For 16-bit parameters: ``"split"`` (an exact fp32 master as the bf16 weight plus its low 16
        bits; fp16 keeps a whole fp32 master), ``"fp32"`` (a whole fp32 master), ``"none"``.
    moments
        The optimizer's moments at rest: ``"fp32"``, ``"bf16"``, or ``"int8"``: 8-bit codes with a
        scale per 64 elements, 2.03 bytes per parameter instead of 8, an approximation
        (docs/configuration.md).
    grad_dtype
        dtype gradients accumulate in; None: the parameter's own.
    units
        ``"auto"``, or class names of the modules that move as one.
    shard
        What is sharded over ranks: ``"optimizer"`` (optimizer state; ZeRO-1), ``"gradients"`` (also
        gradients; ZeRO-2), or ``"parameters"`` (everything; ZeRO-3).
    shard_in_node, compress_gathers
        With several ranks. ``shard_in_node``: the ranks of a machine shard gathered weights among
        themselves, so the backward gathers inside the machine (ZeRO++'s secondary partition).
        ``compress_gathers``: weights are gathered as 8-bit codes with a scale per 256 elements.
        Their error is up to 1/254 of the block's largest value.
    share_homes
        Whether ranks that compute on the CPUs of one machine read each other's weights in shared
        memory instead of sending them. The bits are the same. None: if the machine allows it.
    device
        The compute device: ``"cuda"``, ``"cuda:1"``, ``"cpu"``. None: the device of the model's
        parameters, or the CPU if they are on ``meta``. Buffers, and parameters that the engine does
        not manage, are moved there.
    update_threads
        Threads of the optimizer's kernels. None: at most as many as torch computes with, and at
        most this rank's share of the CPUs. Under torchrun, which sets torch to one thread, that
        share. The first steps measure whether fewer are as fast, and then fewer are used.
    speculate
        Does nothing, and goes with the next release: True logs a warning. Updates run under the
        next forward, or, without clipping, in the backward by ``optimizer.step_in_backward()``.
    recompute
        Whether ``activations="auto"`` may recompute a block's forward in the backward, if that
        costs less than to send its activations, or they do not fit on the host. As with torch's
        checkpoint, both runs must give the same result.
    compile
        Whether each repeated block is compiled by itself until ``unwrap_model``, as by
        ``block.compile()``. Options of ``torch.compile`` in place of True: ``{"dynamic": True}``.
    fused_loss
        Whether a cross-entropy of the output layer's logits is computed in parts of the tokens, so
        that whole logits never exist. Any other use of the logits computes them. Sums are added
        in another order than without.
    tied
        Pairs of parameter names: the second parameter becomes the first. For models whose ties were
        broken, as by torch's parallelize_module. transformers' and
        ``infinity.parallel.tensor_parallel`` keep them.
    checksums
        Whether bytes from disk are verified. ``"sampled"``: as True, but also uses the road from
        disk to a GPU without Infinity's kernels, and verifies each byte there once in 16 reads.
    audit
        Share of the work that is done twice and compared, to find a machine that gives wrong bits:
        0.01 for a hundredth, 0 for none (docs/audits.md). It changes no bit.
    expects_optimizer
        The required optimizer: its class's name as ``type``, and arguments of its constructor.
        wrap_model refuses another. ``from_deepspeed`` sets it from the JSON.
    micro_batch, max_grad_norm, weights, quantize, trace
        Samples a unit runs at once; clipping inside the step; safetensors (a file or folder) or a
        GGUF file for a model on ``meta``; ``"nf4"``, ``"int8"`` or ``"fp8"`` for its frozen linear
        layers and experts (:func:`infinity.quantize`); a path for the timeline.
    """

    params: str = "auto"
    optimizer: str = "auto"
    activations: str = "auto"
    device_memory: int | str | None = None
    host_memory: int | str | None = None
    nvme_capacity: int | str | None = None
    nvme_paths: tuple[str, ...] | list[str] | str = ()
    weights_on_host: int | None = None
    param_dtype: torch.dtype | str | None = None
    master: str = Unset("split")
    moments: str = Unset("fp32")
    grad_dtype: torch.dtype | str | None = None
    units: str | tuple[str, ...] | list[str] = "auto"
    shard: str = "parameters"
    shard_in_node: bool = False
    compress_gathers: bool = False
    share_homes: bool | None = None
    device: str | torch.device | None = None
    update_threads: int | None = None
    micro_batch: int | None = None
    max_grad_norm: float | None = None
    speculate: bool = False
    recompute: bool = False
    compile: bool | Mapping[str, Any] = False
    fused_loss: bool = False
    checksums: bool | str = True
    weights: str | os.PathLike | None = None
    quantize: str | None = None
    tied: tuple[tuple[str, str], ...] | list = ()
    trace: str | os.PathLike | None = None
    audit: float = 0.0
    expects_optimizer: Mapping[str, Any] | tuple[tuple[str, Any], ...] | None = None

    def __post_init__(self) -> None:
        for name in ("params", "optimizer", "activations"):
            self._choose(name, HOMES)
        self._choose("master", MASTERS)
        self._choose("moments", MOMENT_DTYPES)
        self._choose("shard", SHARDED)
        self._choose("quantize", QUANTIZED)
        for name in ("device_memory", "host_memory", "nvme_capacity"):
            self._set(name, parse_nbytes(getattr(self, name), name))
        for name in ("param_dtype", "grad_dtype"):
            self._set(name, self._parse_dtype(name))
        if self.nvme_paths != AUTO:
            self._set_paths()
        pairs = self.tied if isinstance(self.tied, (list, tuple)) else [self.tied]
        if not all(
            isinstance(pair, (list, tuple))
            and len(pair) == 2
            and all(isinstance(name, str) for name in pair)
            for pair in pairs
        ):
            raise ConfigError(f"tied={self.tied!r} must be a list of pairs of parameter names")
        self._set("tied", tuple(map(tuple, pairs)))
        if self.units != "auto":
            self._set("units", self._parse_list("units", str))
        for name in ("params", "optimizer", "activations"):
            if getattr(self, name) == "nvme" and not self.nvme_paths:
                raise ConfigError(
                    f"{name}='nvme' needs a folder on the disk to use:"
                    " Config(nvme_paths=['/path/on/the/disk'])"
                )
        self._check_device()
        self._check_numbers()
        self._check_compile()
        self._set_expected()

    def _set_paths(self) -> None:
        paths = self._parse_list("nvme_paths", (str, os.PathLike))
        if any(not str(path) or "\0" in str(path) for path in paths):
            raise ConfigError(f"nvme_paths={self.nvme_paths!r}: a path is empty or has a NUL")
        # Absolute from here on: the process may change its working directory.
        self._set("nvme_paths", tuple(os.path.abspath(path) for path in paths))

    def _set_expected(self) -> None:
        told = self.expects_optimizer
        if told is not None:
            pairs = sorted(told.items()) if isinstance(told, Mapping) else told
            if not isinstance(pairs, (list, tuple)) or not all(
                isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs
            ):
                raise ConfigError(
                    f"expects_optimizer={told!r} must be a table of hyperparameters, or None"
                )
            if not isinstance(dict(pairs).get("type"), str):
                raise ConfigError(f"expects_optimizer={told!r} names no class: give type='AdamW'")
            self._set(
                "expects_optimizer",
                tuple((name, tuple(v) if isinstance(v, list) else v) for name, v in pairs),
            )

    def _check_device(self) -> None:
        if self.device is not None:
            try:
                self._set("device", str(torch.device(self.device)))
            except (RuntimeError, TypeError) as error:
                raise ConfigError(
                    f"device={self.device!r} is not a device: give 'cuda', 'cuda:1' or 'cpu'"
                ) from error

    def _check_compile(self) -> None:
        options = self.compile
        if isinstance(options, bool):
            return
        if not isinstance(options, Mapping):
            raise ConfigError(
                f"compile={options!r} must be True, False, or a table of torch.compile's options:"
                f" {', '.join(COMPILE_OPTIONS)}"
            )
        for name in options:
            if name not in COMPILE_OPTIONS:
                why = "weights come between operations" if name == "fullgraph" else "unknown option"
                raise ConfigError(
                    f"compile={dict(options)!r}: {name}: {why}. Give some of"
                    f" {', '.join(COMPILE_OPTIONS)}"
                )
        inner = options.get("options")
        graphs = isinstance(inner, Mapping) and inner.get("triton.cudagraphs")
        graphs = graphs or options.get("backend") == "cudagraphs"
        if options.get("mode") in ("reduce-overhead", "max-autotune") or graphs:
            raise ConfigError(
                f"compile={dict(options)!r} captures CUDA graphs, but weights come to other places"
                " each time: leave it out, or give mode='max-autotune-no-cudagraphs'"
            )

    def _check_numbers(self) -> None:
        for name, what in (
            ("micro_batch", "of samples, or None for all"),
            ("update_threads", "or None for torch's"),
        ):
            count = getattr(self, name)
            if count is not None and not (
                isinstance(count, int) and not isinstance(count, bool) and count > 0
            ):
                raise ConfigError(f"{name}={count!r} must be a positive number {what}")
        if self.update_threads is not None and self.update_threads > MOST_THREADS:
            raise ConfigError(
                f"update_threads={self.update_threads} is more than {MOST_THREADS}: give the"
                " processors that are to step, or None"
            )
        kept = self.weights_on_host
        if kept is not None and not (
            isinstance(kept, int) and not isinstance(kept, bool) and kept >= 0
        ):
            raise ConfigError(
                f"weights_on_host={kept!r} must be a number of elements, 0 or more, or None"
            )
        if isinstance(self.audit, bool) or not (
            isinstance(self.audit, (int, float)) and 0 <= self.audit <= 1
        ):
            raise ConfigError(
                f"audit={self.audit!r} must be a share of the work: 0.01 for a hundredth, 0 for"
                " none"
            )
        norm = self.max_grad_norm
        if norm is not None and not (
            isinstance(norm, (int, float)) and not isinstance(norm, bool) and 0 < norm < math.inf
        ):
            raise ConfigError(
                f"max_grad_norm={norm!r} must be a positive number, or None for no clipping"
            )
        if self.trace is not None and (
            not isinstance(self.trace, (str, os.PathLike)) or "\0" in os.fspath(self.trace)
        ):
            raise ConfigError(f"trace={self.trace!r} must be the path of a file, or None")
        if self.trace is not None:
            self._set("trace", os.path.abspath(self.trace))
        if self.share_homes is not None and not isinstance(self.share_homes, bool):
            raise ConfigError(
                f"share_homes={self.share_homes!r} must be True, False, or None for where it is"
                " possible"
            )
        for name in ("speculate", "recompute", "fused_loss", "shard_in_node", "compress_gathers"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be True or False")
        if not isinstance(self.checksums, bool) and self.checksums != SAMPLED:
            raise ConfigError(f"checksums={self.checksums!r} must be True, False or {SAMPLED!r}")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _choose(self, name: str, allowed: Collection[str | None]) -> None:
        value = getattr(self, name)
        if value not in allowed:
            known = [home] if (home := home_of(str(value))) in allowed else []
            near = known + difflib.get_close_matches(str(value), [*filter(None, allowed)], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}{hint}"
            )

    def _parse_list(self, name: str, kinds: type | tuple[type, ...]) -> tuple:
        value = getattr(self, name)
        values = (value,) if isinstance(value, kinds) else value or ()
        if not isinstance(values, (list, tuple)) or not all(
            isinstance(item, kinds) for item in values
        ):
            raise ConfigError(f"{name}={value!r} must be text, or a list of it")
        return tuple(values)

    def _parse_dtype(self, name: str) -> torch.dtype | None:
        value = getattr(self, name)
        if isinstance(value, str):
            value = DTYPES.get(value.removeprefix("torch."), value)
        if value is None or value in DTYPES.values():
            return value
        raise ConfigError(
            f"{name}={value!r} is not one of fp32, bf16, fp16, or None for the model's own"
        )

    @classmethod
    def make(
        cls,
        source: Config | Mapping | str | os.PathLike | None,
        *,
        loop: Mapping[str, Any] | None = None,
    ) -> Config:
        """Makes a Config from a Config, a dict, or the path of a TOML, JSON or YAML file, also of
        DeepSpeed or Accelerate. None: the defaults. ``loop``: as for :meth:`from_deepspeed`. Raises
        ConfigError."""
        if source is None:
            return cls()
        if isinstance(source, cls):
            return source
        if isinstance(source, Mapping):
            return cls._from_mapping(source, "", loop)
        if isinstance(source, (str, os.PathLike)):
            return cls._from_mapping(read_table(Path(source)), f"{os.fspath(source)}: ", loop)
        raise ConfigError(
            f"config is a {type(source).__name__}: give a Config, a dict, or the path of a file"
        )

    @classmethod
    def _from_mapping(cls, mapping: Mapping, where: str, loop: Mapping[str, Any] | None) -> Config:
        if seams.is_there(seams.CONFIG_READER):
            return _reader().read(cls, mapping, where, loop)
        for name in mapping:
            if name not in cls.__dataclass_fields__:
                raise ConfigError(f"{where}there is no setting {name!r} (docs/configuration.md)")
        return cls(**mapping)

    @classmethod
    def from_deepspeed(
        cls,
        source: Mapping | str | os.PathLike,
        *,
        strict: bool = True,
        loop: Mapping[str, Any] | None = None,
    ) -> Config:
        """Makes a Config from a DeepSpeed JSON. Logs what it changes and the torch optimizer that
        it stands for, as a warning so that it is seen; as information, every key's result. Makes
        its folder for NVMe, as DeepSpeed does.

        Raises ConfigError for keys that change the training and are not supported. ``strict``: also
        for unknown keys, and those that only the loop can handle (a scheduler, a
        ``gradient_clipping`` of "auto"). Otherwise they are logged and left out. ``loop``: what the
        loop has, by DeepSpeed's keys (``{"gradient_clipping": 1.0, "bf16.enabled": True}``), for
        the values "auto"."""
        return _reader().from_deepspeed(cls, source, strict=strict, loop=loop)

    @classmethod
    def from_accelerate(
        cls,
        source: Mapping | str | os.PathLike,
        *,
        strict: bool = True,
        loop: Mapping[str, Any] | None = None,
    ) -> Config:
        """Makes a Config from Accelerate's YAML, or from an `fsdp_config` of it or of transformers'
        Trainer. Logs what it changes, and the command that starts as many ranks. Arguments and
        errors are those of :meth:`from_deepspeed`."""
        return _reader().from_accelerate(cls, source, strict=strict, loop=loop)


def _reader() -> Any:
    """Returns the module that reads other tools' configurations: :data:`.seams.CONFIG_READER`."""
    return importlib.import_module(seams.CONFIG_READER)
