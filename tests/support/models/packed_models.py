"""Small models whose frozen layers are packed in every format that the engine moves.

format   a library and its format: how the codes and scales of a layer lie
trained  two thin layers in each block, as an adapter has
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
from torch import nn

WIDTH, BLOCKS, ROWS = 512, 3, 16


class Block(nn.Module):
    def __init__(self, packed: Callable[[nn.Linear], nn.Module]):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = packed(nn.Linear(WIDTH, 2 * WIDTH, bias=False).requires_grad_(False))
        self.down = packed(nn.Linear(2 * WIDTH, WIDTH).requires_grad_(False))
        self.thin = nn.Linear(WIDTH, 8, bias=False)
        self.wide = nn.Linear(8, WIDTH, bias=False)

    def forward(self, x):
        normed = self.norm(x)
        return x + self.down(torch.relu(self.up(normed))) + self.wide(self.thin(normed))


class Buffered(nn.Module):
    """A linear layer of 4-bit codes, eight in an int32, as GPTQ keeps them: in buffers."""

    group = 64

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight = linear.weight.detach().t()
        grouped = weight.reshape(-1, self.group, weight.shape[1])
        scales = grouped.abs().amax(1) / 7
        codes = (grouped / scales[:, None]).round().clamp(-8, 7).add(8).to(torch.int32)
        places = 4 * torch.arange(8, dtype=torch.int32)
        eights = codes.view(-1, 8, weight.shape[1]) << places[None, :, None]
        self.register_buffer("qweight", eights.sum(1).to(torch.int32))
        self.register_buffer("scales", scales.half())
        self.register_buffer("g_idx", (torch.arange(len(weight)) // self.group).to(torch.int32))
        self.bias = linear.bias

    def forward(self, x):
        places = 4 * torch.arange(8, dtype=torch.int32, device=x.device)
        codes = (self.qweight[:, None] >> places[None, :, None]) & 15
        weight = (codes.view(-1, self.qweight.shape[1]) - 8).to(x.dtype)
        out = x @ (weight * self.scales[self.g_idx.long()].to(x.dtype))
        return out if self.bias is None else out + self.bias


class Scaled(nn.Module):
    """A linear layer of fp8 codes in one Parameter and their scales in another."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight = linear.weight.detach()
        scales = weight.abs().amax(1, keepdim=True) / 448
        self.weight = nn.Parameter((weight / scales).to(torch.float8_e4m3fn), False)
        self.weight_scale_inv = nn.Parameter(scales, False)
        self.bias = linear.bias

    def forward(self, x):
        weight = self.weight.to(x.dtype) * self.weight_scale_inv
        return nn.functional.linear(x, weight, self.bias)


class Rounded(torch.Tensor):
    """A weight in signed bytes with a scale for each row, in a class that no library has: what
    `__tensor_flatten__` names is all that the engine knows of it."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scales: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scales.dtype)

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor):
        self.codes, self.scales = codes, scales

    def __tensor_flatten__(self):
        return ["codes", "scales"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Rounded(inner["codes"], inner["scales"])

    def dequantize(self):
        return self.codes.to(self.dtype) * self.scales

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            x, weight, *bias = args
            return func(x, weight.dequantize(), *bias)
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        one = args[0]
        if func is torch.ops.aten.copy_.default:
            one.codes.copy_(args[1].codes)
            one.scales.copy_(args[1].scales)
            return one
        assert func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default), func
        return cls(func(one.codes, **(kwargs or {})), func(one.scales, **(kwargs or {})))


class OfRounded(nn.Module):
    """A linear layer of a rounded weight, which does not say how many features it has."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        dense = linear.weight.detach()
        scales = dense.abs().amax(1, keepdim=True) / 127
        codes = (dense / scales).round().to(torch.int8)
        self.weight, self.bias = nn.Parameter(Rounded(codes, scales), False), linear.bias

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


def _bitsandbytes(kind: str, **options) -> Callable[[nn.Linear], nn.Module]:
    bnb = pytest.importorskip("bitsandbytes")

    def packed(linear: nn.Linear) -> nn.Module:
        layer = getattr(bnb.nn, kind)(
            linear.in_features, linear.out_features, linear.bias is not None, **options
        )
        layer.load_state_dict(linear.state_dict())
        return layer.to("cpu")

    return packed


def _torchao(path: str, name: str, *, dtype: torch.dtype = torch.float32, **options):
    ao = pytest.importorskip("torchao.quantization")
    config = getattr(importlib.import_module(path), name)(**options)

    def packed(linear: nn.Linear) -> nn.Module:
        linear = linear.to(dtype)
        ao.quantize_(linear, config)
        return linear

    return packed


def _nf4_tensor(linear: nn.Linear) -> nn.Module:
    path = "torchao.quantization.quantize_.workflows.nf4.nf4_tensor"
    made = pytest.importorskip(path).to_nf4(linear.weight.detach())
    linear.weight = nn.Parameter(made, requires_grad=False)
    return linear


def _hqq(linear: nn.Linear) -> nn.Module:
    hqq = pytest.importorskip("hqq.core.quantize")
    config = hqq.BaseQuantizeConfig(nbits=4, group_size=64)
    return hqq.HQQLinear(linear, config, compute_dtype=torch.float32, device="cpu")


def _gguf(linear: nn.Linear) -> nn.Module:
    utils = pytest.importorskip("diffusers.quantizers.gguf.utils")
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType.Q8_0
    layer = utils.GGUFLinear(
        linear.in_features,
        linear.out_features,
        linear.bias is not None,
        compute_dtype=torch.float32,
        device="cpu",
    )
    rows = gguf.quants.quantize(linear.weight.detach().numpy(), kind)
    layer.weight = utils.GGUFParameter(torch.from_numpy(rows), quant_type=kind)
    layer.bias = linear.bias
    return layer


INFERENCE = "torchao.prototype.mx_formats.inference_workflow"
FORMATS: dict[str, Callable[[], Callable[[nn.Linear], nn.Module]]] = {
    "bitsandbytes nf4": lambda: _bitsandbytes("LinearNF4", compute_dtype=torch.float32),
    "bitsandbytes fp4": lambda: _bitsandbytes(
        "LinearFP4", compute_dtype=torch.float32, compress_statistics=False
    ),
    "bitsandbytes nf4 in bf16": lambda: _bitsandbytes(
        "LinearNF4", compute_dtype=torch.float32, quant_storage=torch.bfloat16
    ),
    "bitsandbytes fp4 in fp32": lambda: _bitsandbytes(
        "LinearFP4", compute_dtype=torch.float32, quant_storage=torch.float32
    ),
    "bitsandbytes int8": lambda: _bitsandbytes("Linear8bitLt", has_fp16_weights=False),
    "torchao int8": lambda: _torchao("torchao.quantization", "Int8WeightOnlyConfig"),
    "torchao fp8": lambda: _torchao("torchao.quantization", "Float8WeightOnlyConfig"),
    "torchao nvfp4": lambda: _torchao(INFERENCE, "NVFP4WeightOnlyConfig"),
    "torchao nf4": lambda: _nf4_tensor,
    "hqq": lambda: _hqq,
    "gguf": lambda: _gguf,
    "buffers": lambda: Buffered,
    "parameters": lambda: Scaled,
    "a class of one's own": lambda: OfRounded,
}


def make(kind: str, blocks: int = BLOCKS) -> nn.Sequential:
    """Makes a model of packed blocks, with its thin layers trained, in training mode."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(FORMATS[kind]()) for _ in range(blocks)])
    for name, param in model.named_parameters():
        param.requires_grad_(".thin." in name or ".wide." in name)
    return model.train()


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def batch(step: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Trains, and returns the loss of every step."""
    found = []
    for step in steps:
        loss = model(batch(step)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the gradients of one batch."""
    model(batch(0)).pow(2).mean().backward()
    named = dict(model.named_parameters())
    return {name: named[name].grad.clone() for name in named if named[name].requires_grad}


def packed_bytes(value: torch.Tensor) -> list[bytes]:
    """Returns the bytes of a tensor, or of the inner tensors of a subclass."""
    if hasattr(value, "__tensor_flatten__"):
        return [
            each
            for name in value.__tensor_flatten__()[0]
            for each in packed_bytes(getattr(value, name))
        ]
    flat = value.detach().contiguous().reshape(-1)
    return [bytes(flat.view(torch.uint8).numpy())]


def state(model: nn.Module) -> dict[str, list[bytes]]:
    """Returns the bytes of every entry of a state dict but those of the trained layers."""
    return {
        name: packed_bytes(value)
        for name, value in model.state_dict().items()
        if isinstance(value, torch.Tensor) and ".thin." not in name and ".wide." not in name
    }
