"""Tiny models of many architectures, for tests that must hold for any `transformers` model.

Words used here:

**architecture**: one entry of `ZOO`: a name, a family, a function that builds a tiny model with
random weights and a function that makes a batch. **batch**: the keyword arguments of one forward,
labels included, so that `model(**batch).loss` is a scalar. A batch depends on its seed alone.
**quirk**: what an engine that moves parameters about should know of the architecture: a weight used
while its owner is not running, a block that runs several times, a parameter that no gradient
reaches. Seen by running the model; "" where nothing was seen.

Dropout, layer drop, jitter and spectrogram masking are off; `seed_everything` before each forward
pins the noise that cannot be switched off (ViTMAE's mask, Reformer's hashes), so two runs see the
same numbers.
"""

from __future__ import annotations

import functools
import importlib.util
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import transformers
from torch import nn

Batch = dict[str, Any]
Sizes = dict[str, Any]  # keyword arguments of a config class

VOCAB = 96
HIDDEN = 32
LAYERS = 2
HEADS = 4
BATCH = 2
LENGTH = 12
IMAGE = 32
LABELS = 5

# models with odd sizes or unused heads say so at every build
transformers.logging.set_verbosity_error()


@dataclass(frozen=True, kw_only=True)
class Architecture:
    name: str
    family: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    needs: tuple[str, ...]  # the `transformers` classes it is made of
    packages: tuple[str, ...] = ()  # what it needs besides `transformers`
    quirk: str = ""

    def missing(self) -> list[str]:
        """The classes and packages that this machine lacks."""
        classes = [name for name in self.needs if name not in exported()]
        return classes + [name for name in self.packages if importlib.util.find_spec(name) is None]


@functools.cache
def exported() -> set[str]:
    """What `transformers` has, without importing it."""
    return set(dir(transformers))


ZOO: dict[str, Architecture] = {}


def seed_everything(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def make_model(architecture: Architecture, seed: int, device: str = "cpu") -> nn.Module:
    """The architecture with the weights that `seed` gives: fp32, in training mode."""
    seed_everything(seed)
    with warnings.catch_warnings():
        # MobileBERT has a weight of no elements when its embedding is as wide as its hidden states.
        warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
        model = architecture.build()
    return model.float().train().to(device)


def make_batch(architecture: Architecture, seed: int, device: str = "cpu") -> Batch:
    batch = architecture.batch(seed)
    return {
        key: value.to(device) if torch.is_tensor(value) else value for key, value in batch.items()
    }


# --------------------------------------------------------------------------------------------------
# Batches
# --------------------------------------------------------------------------------------------------


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _tokens(generator: torch.Generator, length: int = LENGTH) -> torch.Tensor:
    # Ids below 4 are padding, start, end and mask (or image).
    return torch.randint(4, VOCAB, (BATCH, length), generator=generator)


def _classes(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, LABELS, (BATCH,), generator=generator)


def _pixels(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(BATCH, 3, IMAGE, IMAGE, generator=generator)


def causal_batch(seed: int) -> Batch:
    tokens = _tokens(_generator(seed))
    return {"input_ids": tokens, "labels": tokens, "use_cache": False}


def masked_batch(seed: int) -> Batch:
    """One sequence whole, one padded; every token but the padding is a target."""
    generator = _generator(seed)
    tokens, labels = _tokens(generator), _tokens(generator)
    mask = torch.ones_like(tokens)
    mask[1, -3:] = 0
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": labels.masked_fill(mask == 0, -100),
    }


def text_class_batch(seed: int) -> Batch:
    generator = _generator(seed)
    return {"input_ids": _tokens(generator), "labels": _classes(generator)}


def seq2seq_batch(seed: int) -> Batch:
    generator = _generator(seed)
    source, target = _tokens(generator), _tokens(generator, length=LENGTH - 3)
    mask = torch.ones_like(source)
    mask[1, -3:] = 0
    return {"input_ids": source, "attention_mask": mask, "labels": target, "use_cache": False}


def seq2seq_batch_unshifted(seed: int) -> Batch:
    """For FSMT, which does not make the decoder's input from the labels."""
    batch = seq2seq_batch(seed)
    return {**batch, "decoder_input_ids": batch["labels"].roll(shifts=1, dims=1)}


def image_class_batch(seed: int) -> Batch:
    generator = _generator(seed)
    return {"pixel_values": _pixels(generator), "labels": _classes(generator)}


def image_batch(seed: int) -> Batch:
    return {"pixel_values": _pixels(_generator(seed))}


def segmentation_batch(seed: int) -> Batch:
    generator = _generator(seed)
    labels = torch.randint(0, LABELS, (BATCH, IMAGE, IMAGE), generator=generator)
    return {"pixel_values": _pixels(generator), "labels": labels}


def image_text_pair_batch(seed: int) -> Batch:
    generator = _generator(seed)
    return {
        "input_ids": _tokens(generator),
        "pixel_values": _pixels(generator),
        "return_loss": True,
    }


def caption_batch(seed: int) -> Batch:
    generator = _generator(seed)
    tokens = _tokens(generator)
    return {"input_ids": tokens, "pixel_values": _pixels(generator), "labels": tokens}


def image_in_text_batch(seed: int) -> Batch:
    """For Llava: 16 places for image features (id 3), then text."""
    generator = _generator(seed)
    tokens = torch.cat([torch.full((BATCH, 16), 3), _tokens(generator)], dim=1)
    labels = tokens.masked_fill(tokens == 3, -100)
    return {
        "input_ids": tokens,
        "pixel_values": _pixels(generator),
        "labels": labels,
        "use_cache": False,
    }


def image_question_batch(seed: int) -> Batch:
    generator = _generator(seed)
    answers = torch.rand(BATCH, LABELS, generator=generator)
    return {"input_ids": _tokens(generator), "pixel_values": _pixels(generator), "labels": answers}


def wave_batch(seed: int) -> Batch:
    generator = _generator(seed)
    return {
        "input_values": torch.randn(BATCH, 800, generator=generator),
        "labels": _tokens(generator, length=4),
    }


def mel_batch(seed: int) -> Batch:
    """For Whisper: samples x mel bins x frames."""
    generator = _generator(seed)
    features = torch.randn(BATCH, 16, 40, generator=generator)
    return {"input_features": features, "labels": _tokens(generator, length=6), "use_cache": False}


def filterbank_batch(seed: int) -> Batch:
    """For Speech2Text: samples x frames x bins."""
    generator = _generator(seed)
    features = torch.randn(BATCH, 40, 8, generator=generator)
    return {"input_features": features, "labels": _tokens(generator, length=6), "use_cache": False}


def spectrogram_class_batch(seed: int) -> Batch:
    generator = _generator(seed)
    return {
        "input_values": torch.randn(BATCH, 32, 16, generator=generator),
        "labels": _classes(generator),
    }


def channels_batch(seed: int) -> Batch:
    """For PatchTST: samples x times x channels."""
    generator = _generator(seed)
    past, future = (
        torch.randn(BATCH, 16, 2, generator=generator),
        torch.randn(BATCH, 4, 2, generator=generator),
    )
    return {"past_values": past, "future_values": future}


def series_batch(seed: int) -> Batch:
    generator = _generator(seed)
    return {
        "past_values": torch.rand(BATCH, 15, generator=generator) + 0.5,
        "past_time_features": torch.randn(BATCH, 15, 1, generator=generator),
        "past_observed_mask": torch.ones(BATCH, 15),
        "future_values": torch.rand(BATCH, 4, generator=generator) + 0.5,
        "future_time_features": torch.randn(BATCH, 4, 1, generator=generator),
        "static_categorical_features": torch.randint(0, 4, (BATCH, 1), generator=generator),
    }


# --------------------------------------------------------------------------------------------------
# Entering an architecture
# --------------------------------------------------------------------------------------------------


def add(
    name: str,
    family: str,
    classes: tuple[str, str],
    batch: Callable[[int], Batch],
    *sizes: Sizes,
    packages: tuple[str, ...] = (),
    quirk: str = "",
    then: Callable[[nn.Module], nn.Module] = lambda model: model,
    **more: Any,
) -> None:
    """Enter `then(model_class(config_class(**sizes, **more)))`; `classes` are the two by name,
    config first."""
    settings: Sizes = {}
    for part in (*sizes, more):
        settings.update(part)
    config_name, model_name = classes

    def build() -> nn.Module:
        config = getattr(transformers, config_name)(**settings)
        return then(getattr(transformers, model_name)(config))

    if name in ZOO:
        raise ValueError(f"the zoo has {name} already")
    ZOO[name] = Architecture(
        name=name,
        family=family,
        build=build,
        batch=batch,
        needs=classes,
        packages=packages,
        quirk=quirk,
    )


def causal(name: str, stem: str, *sizes: Sizes, family: str = "decoder", **more: Any) -> None:
    add(name, family, (f"{stem}Config", f"{stem}ForCausalLM"), causal_batch, TOKENS, *sizes, **more)


def experts(name: str, stem: str, *sizes: Sizes, **more: Any) -> None:
    causal(name, stem, *sizes, family="mixture of experts", **more)


def recurrent(name: str, stem: str, *sizes: Sizes, **more: Any) -> None:
    causal(name, stem, *sizes, family="state space", **more)


def masked(name: str, stem: str, *sizes: Sizes, **more: Any) -> None:
    add(
        name,
        "encoder",
        (f"{stem}Config", f"{stem}ForMaskedLM"),
        masked_batch,
        TOKENS,
        *sizes,
        **more,
    )


def seq2seq(name: str, stem: str, *sizes: Sizes, **more: Any) -> None:
    classes = (f"{stem}Config", f"{stem}ForConditionalGeneration")
    add(name, "encoder-decoder", classes, seq2seq_batch, TOKENS, *sizes, **more)


def image(name: str, stem: str, *sizes: Sizes, **more: Any) -> None:
    add(
        name,
        "vision",
        (f"{stem}Config", f"{stem}ForImageClassification"),
        image_class_batch,
        *sizes,
        **more,
    )


def without(sizes: Sizes, *names: str) -> Sizes:
    return {key: value for key, value in sizes.items() if key not in names}


TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 2 * HIDDEN,
    "max_position_embeddings": 64,
}
TWO_KEY_HEADS = {"num_key_value_heads": 2}
HEAD_DIM = {"num_key_value_heads": 2, "head_dim": HIDDEN // HEADS}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
QUIET_GPT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0}
GPT_SIZES = {
    **QUIET_GPT,
    "attn_pdrop": 0.0,
    "vocab_size": VOCAB,
    "n_embd": HIDDEN,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_positions": 64,
}
