"""Folders of models: whether the engine streams their weights, as they are or made dense."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError

if TYPE_CHECKING:
    from torch import nn


def misfit(path: Path | None, model: nn.Module | None) -> str:
    """Returns which weight of a folder has another shape than the model of its config.json has; ""
    if all fit."""
    from ...files.module_names import Incoming
    from ...files.weight_files import WeightFiles

    if path is None or model is None or not any(path.glob("*.safetensors")):
        return ""
    kept = model.state_dict(keep_vars=True)
    for name, source in Incoming(model, WeightFiles(path).sources(), kept).sources.items():
        if source.shape != kept[name].shape:
            return (
                f"{path}: {name} has the shape {tuple(source.shape)} in its files and"
                f" {tuple(kept[name].shape)} by its config.json: one of the two is another model's."
            )
    return ""


def is_streamed(model: nn.Module, path: Path | None) -> bool:
    """Returns whether ``model`` is on meta and the safetensors or the GGUF file in ``path`` have
    all its tensors."""
    from ...ext.checkpoint.hub_names import may_lack
    from ...ext.coded.gguf_file import GgufFile, gguf_path
    from ...ext.packed.unpacked import without_scales
    from ...files.module_names import Incoming
    from ...files.weight_files import WeightFiles

    if path is None or not path.is_dir() or not all(param.is_meta for param in model.parameters()):
        return False
    file = gguf_path(path)
    if file is None and not any(path.glob("*.safetensors")):
        return False
    if is_packed_folder(model.config):
        return is_nf4_folder(model.config)
    kept = model.state_dict(keep_vars=True)  # persistent buffers too
    own_sources = (
        without_scales(WeightFiles(path).sources(), path)
        if file is None
        else GgufFile(file, model).sources()
    )
    incoming = Incoming(model, own_sources, kept).sources
    there = {id(kept[name]) for name in incoming}
    return all(
        id(tensor) in there or may_lack(model, name) for name, tensor in kept.items()
    ) and all(
        source.shape == kept[name].shape
        and source.dtype.is_floating_point == kept[name].dtype.is_floating_point
        for name, source in incoming.items()
    )


def rest_of(path: Path | None, model: nn.Module) -> dict[str, Any]:
    """Returns the sources of a folder's tensors for which the class of ``model`` has no place:
    layers that predict further tokens, for example."""
    from ...ext.checkpoint.hub_names import left_out
    from ...ext.packed.unpacked import without_scales
    from ...files.weight_files import WeightFiles

    if path is None or not any(path.glob("*.safetensors")) or is_packed_folder(model.config):
        return {}
    return left_out(model, without_scales(WeightFiles(path).sources(), path))


def is_packed_folder(config: Any) -> bool:
    """Returns whether a configuration is of a folder that is packed in fewer bits, and stays so.
    Those in FP8 and MXFP4 are not: trained weights of them become dense."""
    from ...ext.packed.unpacked import is_scaled

    packing = _packing_of(config)
    return bool(packing) and not is_scaled(packing)


def is_nf4_folder(config: Any) -> bool:
    """Returns whether a folder is packed by bitsandbytes in 4 bits, whose tensors the engine
    streams."""
    return bool(_packing_of(config).get("load_in_4bit"))


def _packing_of(config: Any) -> dict[str, Any]:
    packing = getattr(config, "quantization_config", None) or {}
    packing = packing if isinstance(packing, dict) else packing.to_dict()
    # transformers notes it of a model that it has made dense
    return {} if packing.get("quant_method") == "gguf" else packing


def check_packed(path: Path | None, config: Any, quantize: str | None, *, trains_all: bool) -> None:
    """Raises ConfigError for a folder that is packed in fewer bits and cannot be used like this."""
    if not is_packed_folder(config):
        return
    if trains_all:
        raise ConfigError(
            f"{path} is packed in fewer bits (quantization_config), and packed weights are not"
            " trained, but their adapters are: add --lora"
        )
    if quantize is not None:
        raise ConfigError(f"{path} is packed already: leave out --quantize {quantize}")
