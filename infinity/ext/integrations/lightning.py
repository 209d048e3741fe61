"""InfinityStrategy: Lightning's Trainer over a model at home.

    home = {"params": "nvme", "optimizer": "nvme", "nvme_paths": ["."]}
    trainer = lightning.Trainer(strategy=InfinityStrategy(home), ...)

A checkpoint is a folder. It has Lightning's own state without weights and, streamed to the folder
``infinity`` in it, all state at home. Once this module is imported, ``load_from_checkpoint`` reads
such folders too.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch

from ...config import Config
from ...core.run.registry import is_wrapped, wrapped
from ...core.wrap.described_model import read_model
from ...core.wrap.unwrap import unwrap_model
from ...core.wrap.wrap import wrap_model
from ...errors import ConfigError
from ...files.weight_files import WeightFiles
from ...library_versions import require
from ..checkpoint.export import read_weights
from ..checkpoint.load import load_checkpoint
from ..checkpoint.pretrained import save_pretrained
from ..checkpoint.save import save_checkpoint
from .accelerate import AT_HOME, Given
from .plain_loops import as_torch_steps, tell_home
from .weights import load_weights

lightning = require("lightning")

from lightning.fabric.utilities import (  # noqa: E402
    distributed,
)
from lightning.pytorch.core import saving  # noqa: E402
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher  # noqa: E402
from lightning.pytorch.strategies.parallel import ParallelStrategy  # noqa: E402
from lightning.pytorch.trainer.states import TrainerFn  # noqa: E402

OWN = "lightning.ckpt"  # Lightning's part of a checkpoint
HOME_OF = "_infinity_folder"  # entry of a loaded checkpoint: its folder
TIED = "_infinity_tied"  # entry of a saved checkpoint: other names of tied parameters -> the first

# Lightning's callbacks that read or change weights outside of a step -> the replacement.
CALLBACKS = {
    "StochasticWeightAveraging": (
        "average = infinity.swa(module) in on_train_start, and average.update() at the end of each"
        " epoch that counts"
    ),
    "WeightAveraging": (
        "average = infinity.ema(module, decay) in on_train_start, and average.update() in"
        " on_train_batch_end"
    ),
    "ModelPruning": "prune before the training, or after infinity.unwrap_model(module)",
}
plain_load = saving.pl_load


def load_folder(path: Any, map_location: Any = None, **given: Any) -> dict[str, Any]:
    """Reads a checkpoint as Lightning's ``load_from_checkpoint`` does. Of a folder that
    InfinityStrategy wrote, reads the weights in it too. ``given``: what this Lightning's has."""
    folder = Path(path) if isinstance(path, (str, os.PathLike)) else None
    if folder is None or not (folder / OWN).is_file():
        return plain_load(path, map_location=map_location, **given)
    checkpoint = plain_load(folder / OWN, map_location=map_location, **given)
    if (folder / AT_HOME).is_dir():
        state = read_weights(folder / AT_HOME)
    else:
        files = WeightFiles(folder)
        state = {name: files.read(name) for name in files.tensors}
    tied = checkpoint.pop(TIED, {})
    # A file has one of the tied names, not necessarily the first.
    state |= {first: state[name] for name, first in tied.items() if name in state}
    return checkpoint | {"state_dict": state | {name: state[first] for name, first in tied.items()}}


saving.pl_load = load_folder


def refuse_callbacks(callbacks: list[Any]) -> None:
    """Raises ConfigError for a Lightning callback that reads or changes weights between steps."""
    for callback in callbacks:
        for kind in type(callback).__mro__:
            if kind.__module__.startswith(("lightning.", "pytorch_lightning.")) and (
                instead := CALLBACKS.get(kind.__name__)
            ):
                raise ConfigError(
                    f"callback {type(callback).__name__} reads or changes weights between steps,"
                    f" which are at home: leave it out. Instead: {instead}."
                )


class InfinityStrategy(ParallelStrategy):
    """Trains a LightningModule whose weights and optimizer state are at home.

    config
        The configuration, as :func:`infinity.wrap_model` takes it. Without a ``device`` the model
        computes on the Trainer's.

    With several devices Lightning starts the processes and the engine averages their gradients.
    ``setup`` raises ConfigError for a module with several optimizers. A second ``fit`` begins with
    a new optimizer, as in Lightning: the model is unwrapped and wrapped again.
    """

    strategy_name = "infinity"

    def __init__(self, config: Given = None, **kwargs: Any):
        super().__init__(**kwargs)
        self._config, self.num_nodes = Config.make(config), 1

    # --- processes ---

    @property
    def is_distributed(self) -> bool:
        """Whether there are several processes, each reading its own part of the data."""
        return self.num_nodes * self.num_processes > 1

    @property
    def num_processes(self) -> int:
        """The number of processes on this machine."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def root_device(self) -> torch.device:
        """The compute device of this process."""
        return self.parallel_devices[self.local_rank]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The arguments of a distributed sampler: number of processes, and this one's rank."""
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    def _configure_launcher(self) -> None:
        if self.is_distributed:
            self._launcher = _SubprocessScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )

    def set_world_ranks(self) -> None:
        """Sets this process's rank and the world size in the cluster environment."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(
                self.node_rank * self.num_processes + self.local_rank
            )
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
            lightning.pytorch.utilities.rank_zero_only.rank = self.global_rank

    def setup_environment(self) -> None:
        """Creates the process group, if there are several processes. Every process calls this."""
        super().setup_environment()
        self.set_world_ranks()
        if self.is_distributed:
            backend = distributed._get_default_process_group_backend_for_device(self.root_device)
            distributed._init_dist_connection(self.cluster_environment, backend)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor over the processes; every process calls this. Returns other values as
        they are."""
        return (
            distributed._sync_ddp_if_available(tensor, group, reduce_op=reduce_op)
            if torch.is_tensor(tensor)
            else tensor
        )

    def barrier(self, name: str | None = None) -> None:
        """Waits for all processes (a barrier)."""
        if self.is_distributed:
            torch.distributed.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns the object of process ``src`` on every process. Every process calls this."""
        if not self.is_distributed:
            return obj
        held = [obj]
        torch.distributed.broadcast_object_list(held, src)
        return held[0]

    # --- the model ---

    def model_to_device(self) -> None:
        """Does nothing: units are copied to the device when they are used."""

    def setup(self, trainer: Any) -> None:
        """Wraps the model; for ``fit``, with its optimizer. Every process calls this.

        Raises ConfigError for several optimizers, or a callback that needs weights between steps.
        """
        self.accelerator.setup(trainer)
        fits = trainer.state.fn == TrainerFn.FITTING
        module = self.lightning_module
        if fits:
            refuse_callbacks(trainer.callbacks)
        if fits and is_wrapped(module):
            unwrap_model(module)
        self.model = self.precision_plugin.convert_module(self.model)
        if fits:
            self.setup_optimizers(trainer)
            if len(self.optimizers) > 1:
                raise ConfigError(
                    f"{type(module).__name__}.configure_optimizers gives {len(self.optimizers)}"
                    " optimizers: give one, with several groups"
                )
        if not is_wrapped(module):
            device = self._config.device or self.root_device
            own_config = dataclasses.replace(self._config, device=device)
            config, optimizer = own_config, next(iter(self.optimizers), None)
            if optimizer is not None:
                config = as_torch_steps(own_config, [optimizer])
            _, managed = wrap_model(module, optimizer, config)
            if optimizer is not None:
                tell_home(module, optimizer, own_config, config)
            self.optimizers = [] if managed is None else [managed]
        self.setup_precision_plugin()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's training_step as one forward of the whole module. With manual
        optimization, runs it as Lightning does."""
        if not self.lightning_module.automatic_optimization:
            return super().training_step(*args, **kwargs)
        return self._as_forward(
            "training_step", self.precision_plugin.train_step_context, args, kwargs
        )

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's validation_step as one forward."""
        return self._as_forward(
            "validation_step", self.precision_plugin.val_step_context, args, kwargs
        )

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's test_step as one forward."""
        return self._as_forward("test_step", self.precision_plugin.test_step_context, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's predict_step as one forward."""
        return self._as_forward(
            "predict_step", self.precision_plugin.predict_step_context, args, kwargs
        )

    def _as_forward(self, name: str, context: Any, args: tuple, kwargs: dict) -> Any:
        """Runs the module's forward hooks around the whole step, which may use the module's own
        parameters outside its submodules."""
        with context():
            return self._forward_redirection(
                self.lightning_module, self.lightning_module, name, *args, **kwargs
            )

    def teardown(self) -> None:
        """Ends a run. The model stays wrapped, with its trained weights at home."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # --- checkpoints ---

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: a checkpoint is read after the model is wrapped."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns nothing: the weights are written beside Lightning's own checkpoint."""
        return {}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Returns nothing: the state is written beside Lightning's own checkpoint."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Writes the folder ``filepath``. With optimizer states it has all state, to resume from;
        without them, only the weights as safetensors. Every process calls this."""
        folder, module = Path(filepath), self.lightning_module
        if self.is_global_zero:
            folder.mkdir(parents=True, exist_ok=True)
        self.barrier()
        if "optimizer_states" in checkpoint:
            save_checkpoint(folder / AT_HOME, module, wrapped(module).optimizer, overwrite=True)
        else:
            save_pretrained(module, folder, overwrite=True)  # Lightning chose the folder
        if self.is_global_zero:
            names = read_model(module).names.values()
            checkpoint = checkpoint | {TIED: {name: its[0] for its in names for name in its[1:]}}
            self.checkpoint_io.save_checkpoint(
                checkpoint, folder / OWN, storage_options=storage_options
            )

    def load_checkpoint(self, checkpoint_path: str | Path, *given: Any, **named: Any) -> dict:
        """Reads Lightning's part of a checkpoint folder, or a plain checkpoint file. ``given`` and
        ``named``: what this Lightning's has, ``weights_only`` from 2.6 on."""
        folder = Path(checkpoint_path)
        if not folder.is_dir():
            return super().load_checkpoint(checkpoint_path, *given, **named)
        return super().load_checkpoint(folder / OWN, *given, **named) | {HOME_OF: str(folder)}

    def load_model_state_dict(self, checkpoint: dict[str, Any], strict: bool = True) -> None:
        """Loads a checkpoint's weights home; if the folder has all state, the optimizer's too."""
        if HOME_OF not in checkpoint:
            super().load_model_state_dict(checkpoint, strict)
        elif (home := Path(checkpoint[HOME_OF]) / AT_HOME).is_dir():
            load_checkpoint(home, self.lightning_module, wrapped(self.lightning_module).optimizer)
        else:
            load_weights(self.lightning_module, checkpoint[HOME_OF])

    def load_optimizer_state_dict(self, checkpoint: dict[str, Any]) -> None:
        """Loads the optimizer states of a plain checkpoint. Those of a folder were loaded with the
        weights."""
        if HOME_OF not in checkpoint:
            for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"]):
                optimizer.load_state_dict(state)
