"""InfinityAccelerator: an Accelerator that wraps models and their optimizers.

    home = {"params": "nvme", "optimizer": "nvme", "nvme_paths": ["."]}
    accelerator = InfinityAccelerator(infinity=home)

``prepare`` wraps; ``backward``, ``accumulate`` and the rest are Accelerator's own. The engine
averages gradients over ranks, so no model is put into DistributedDataParallel. None is moved to a
device whole.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...config import Config
from ...core.run.registry import is_wrapped, wrapped
from ...core.step.clipping import clip_grad_norm_
from ...core.step.optimizer import InfinityOptimizer
from ...core.wrap.unwrap import unwrap_model
from ...core.wrap.wrap import wrap_model
from ...errors import ConfigError
from ...library_versions import require
from ..checkpoint.load import load_checkpoint
from ..checkpoint.pretrained import save_pretrained
from ..checkpoint.save import save_checkpoint
from .plain_loops import as_torch_steps, tell_home

accelerate = require("accelerate")

Given = Config | Mapping[str, Any] | str | os.PathLike | None
AT_HOME = "infinity"  # the folder for state at home, beside accelerate's own files


class InfinityAccelerator(accelerate.Accelerator):
    """Prepares models and their optimizers by :func:`infinity.wrap_model`.

    infinity
        The configuration, as wrap_model takes it, for models that are prepared with an optimizer.
        Without a ``device`` the model computes on the accelerator's.
    infinity_reference
        The same for models that are prepared without an optimizer (a reference, a teacher), whose
        weights stream. None: as ``infinity``. Budgets are per model, so two models may take twice
        as much.

    The other arguments are Accelerator's. Raises ConfigError with DeepSpeed, FSDP or Megatron,
    which manage parameters themselves.
    """

    def __init__(
        self, *args: Any, infinity: Given = None, infinity_reference: Given = None, **kwargs: Any
    ):
        super().__init__(*args, **kwargs)
        loop = {
            "gradient_clipping": None,  # accelerator.clip_grad_norm_
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "bf16.enabled": self.mixed_precision == "bf16",
            "fp16.enabled": self.mixed_precision == "fp16",
        }
        self._live_at(infinity, infinity_reference, loop)

    @classmethod
    def adopt(
        cls,
        accelerator: accelerate.Accelerator,
        infinity: Given,
        infinity_reference: Given,
        loop: Mapping[str, Any],
    ) -> None:
        """Changes the class of an existing Accelerator to this one, with its configurations.
        ``loop``: what the training loop has, for the "auto" of a DeepSpeed JSON."""
        accelerator.__class__ = cls
        accelerator._live_at(infinity, infinity_reference, loop)

    def _live_at(self, infinity: Given, reference: Given, loop: Mapping[str, Any]) -> None:
        kind = accelerate.DistributedType
        if self.distributed_type in (kind.DEEPSPEED, kind.FSDP, kind.MEGATRON_LM):
            raise ConfigError(
                f"this Accelerator uses {self.distributed_type.value}, which manages parameters"
                " itself: start it with torchrun, without Accelerate's file and without deepspeed="
                " or fsdp=, and give that file as infinity=FILE. The engine shards over its ranks."
            )
        configs = [Config.make(infinity, loop=loop)]
        configs += configs if reference is None else [Config.make(reference, loop=loop)]
        self._config, self._reference = (
            one if one.device is not None else dataclasses.replace(one, device=self.device)
            for one in configs
        )

    # --- preparing ---

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Wraps the models among ``args``, each with its optimizer, and prepares all of ``args`` as
        Accelerator does.

        A model that was prepared without an optimizer before is unwrapped and wrapped with it.
        Raises ConfigError for a model with several optimizers, or an optimizer without its model.
        """
        managed = self._wrap_all([arg for arg in args if isinstance(arg, nn.Module)], args)
        args = tuple(managed.get(id(arg), arg) for arg in args)
        return super().prepare(*args, device_placement=device_placement)

    def _wrap_all(self, models: list[nn.Module], args: tuple) -> dict[int, torch.optim.Optimizer]:
        """Wraps ``models``. Returns the wrapped optimizer for each plain one, by its id."""
        plain = [
            arg for arg in args if isinstance(arg, torch.optim.Optimizer) and self._is_plain(arg)
        ]
        managed: dict[int, torch.optim.Optimizer] = {}
        for model in models:
            params = set(model.parameters())
            own = [
                one
                for one in plain
                if any(param in params for group in one.param_groups for param in group["params"])
            ]
            if len(own) > 1:
                raise ConfigError(
                    f"a {type(model).__name__} was prepared with {len(own)} optimizers: give it"
                    " one, with several parameter groups"
                )
            if own:
                if is_wrapped(model) and wrapped(model).optimizer is None:
                    unwrap_model(model)
                config = as_torch_steps(self._config, own)
                _, managed[id(own[0])] = wrap_model(model, own[0], config)
                tell_home(model, own[0], self._config, config)
            elif not is_wrapped(model):
                wrap_model(model, None, self._reference)
        for one in plain:
            if id(one) not in managed:
                raise ConfigError(
                    f"a {type(one).__name__} was prepared without its model:"
                    " accelerator.prepare(model, optimizer, ...) in one call"
                )
        return managed

    @staticmethod
    def _is_plain(optimizer: torch.optim.Optimizer) -> bool:
        return not isinstance(getattr(optimizer, "optimizer", optimizer), InfinityOptimizer)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepares a wrapped model; wraps it without an optimizer first if it is not.

        Neither moves it nor puts it into DistributedDataParallel. Mixed precision and compilation
        are Accelerator's.
        """
        if not is_wrapped(inner := self.unwrap_model(model, keep_torch_compile=False)):
            wrap_model(inner, None, self._reference)
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> torch.optim.Optimizer:
        """Prepares an optimizer without moving its state."""
        return super().prepare_optimizer(optimizer, device_placement=False)

    # --- the step ---

    def clip_grad_norm_(
        self, parameters: Any, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Clips as Accelerator does. If tensors or pipeline stages are split over ranks, clips by
        the norm over all of them; then every rank calls this."""
        cut = [
            pair
            for pair in self._pairs()
            if pair[1] is not None and wrapped(pair[0]).engine.job.collectives.ranks.is_cut
        ]
        if not cut:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        self.unscale_gradients()
        return clip_grad_norm_(cut[0][1], max_norm, norm_type)

    # --- checkpoints ---

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any
    ) -> str:
        """Saves as Accelerator does, and streams the state of wrapped models to checkpoints in the
        folder ``infinity`` beside its files. Every rank calls this."""
        with self._without_pairs() as pairs:
            folder = super().save_state(output_dir, safe_serialization, **kwargs)
        for number, (model, optimizer) in enumerate(pairs):
            save_checkpoint(Path(folder) / AT_HOME / str(number), model, optimizer, overwrite=True)
        return folder

    def load_state(self, input_dir: str | None = None, *given: Any, **named: Any) -> None:
        """Loads a folder that :meth:`save_state` or a plain Accelerator saved. ``given`` and
        ``named``: what this Accelerator's has. Every rank calls this."""
        folders: list[Path] = []
        handle = self.register_load_state_pre_hook(
            lambda models, folder: folders.append(Path(folder))
        )
        try:
            if input_dir is not None and not (Path(input_dir).expanduser() / AT_HOME).is_dir():
                super().load_state(input_dir, *given, **named)
                return
            with self._without_pairs() as pairs:
                super().load_state(input_dir, *given, **named)
        finally:
            handle.remove()
        for number, (model, optimizer) in enumerate(pairs):
            load_checkpoint(folders[0] / AT_HOME / str(number), model, optimizer)

    def save_model(
        self, model: nn.Module, save_directory: str | os.PathLike, *args: Any, **kwargs: Any
    ) -> None:
        """Writes a model as safetensors. A wrapped one is written a few parameters at a time, and
        ignores the shard size that is passed."""
        if is_wrapped(inner := self.unwrap_model(model, keep_torch_compile=False)):
            save_pretrained(inner, save_directory, overwrite=True)  # as Accelerate does
        else:
            super().save_model(model, save_directory, *args, **kwargs)

    def _pairs(self) -> list[tuple[nn.Module, InfinityOptimizer | None]]:
        models = dict.fromkeys(
            self.unwrap_model(model, keep_torch_compile=False) for model in self._models
        )
        return [(model, wrapped(model).optimizer) for model in models if is_wrapped(model)]

    @contextmanager
    def _without_pairs(self) -> Iterator[list[tuple[nn.Module, InfinityOptimizer | None]]]:
        """Hides wrapped models and optimizers from Accelerator, which would read whole state dicts
        into memory."""
        pairs, before = self._pairs(), (self._models, self._optimizers)
        homes = [model for model, _ in pairs]
        self._models = [
            model
            for model in self._models
            if self.unwrap_model(model, keep_torch_compile=False) not in homes
        ]
        self._optimizers = [
            optimizer for optimizer in self._optimizers if self._is_plain(optimizer)
        ]
        try:
            yield pairs
        finally:
            self._models, self._optimizers = before
