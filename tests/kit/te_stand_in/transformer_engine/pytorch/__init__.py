"""Modules of TransformerEngine that compute with torch, and its quantised tensors as old and new versions have them."""

from __future__ import annotations

from typing import Any

import nvdlfw_inspect.api as debug_api
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MXFP8Tensor(torch.Tensor):
    """Since 2.20: tells its inner tensors as torch wants it."""

    def __new__(cls, data: Tensor, scale: Tensor) -> MXFP8Tensor:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data: Tensor, scale: Tensor) -> None:
        self._rowwise_data, self._rowwise_scale_inv, self._columnwise_data = data, scale, None

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["_rowwise_data", "_rowwise_scale_inv", "_columnwise_data"], {"fp8_dtype": "E4M3"}

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any
    ) -> MXFP8Tensor:
        return cls(inner["_rowwise_data"], inner["_rowwise_scale_inv"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


class Float8Tensor(torch.Tensor):
    """Before: a method of its own."""

    def __new__(cls, data: Tensor, scale: Tensor) -> Float8Tensor:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data: Tensor, scale: Tensor) -> None:
        self._data, self._scale_inv = data, scale

    def get_metadata(self) -> dict[str, Any]:
        return {
            "data": self._data,
            "fp8_scale_inv": self._scale_inv,
            "fp8_dtype": "E4M3",
            "data_transpose": None,
        }

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def quantised(tensor: Tensor, kind: type = MXFP8Tensor) -> Any:
    scale = tensor.detach().abs().max().reshape(1) / 448
    return kind((tensor.detach() / scale).to(torch.float8_e4m3fn).view(torch.uint8), scale)


class _Quantisers:
    """Made by every forward of a module, in front of its autograd function: asks which tensors are inspected."""

    def __init__(self, layer: str) -> None:
        self._layer = layer
        self._wanted: set[str] = set()
        if debug_api.DEBUG_MANAGER is not None:
            for name in ("activation", "weight", "output", "gradient", "dgrad", "wgrad"):
                if debug_api.transformer_engine.inspect_tensor_enabled(**self._asked(name))[0]:
                    self._wanted.add(name)

    def _asked(self, tensor_name: str) -> dict[str, Any]:
        iteration = debug_api.DEBUG_MANAGER._trainer_iteration_count
        return {"layer_name": self._layer, "tensor_name": tensor_name, "iteration": iteration}

    def inspect(self, tensor_name: str, tensor: Tensor, kind: type | None = None) -> None:
        if tensor_name in self._wanted and debug_api.DEBUG_MANAGER is not None:
            cast = None if kind is None else quantised(tensor, kind)
            debug_api.transformer_engine.inspect_tensor(
                **self._asked(tensor_name), tensor=tensor, tp_group=None, tp_size=1, quantizer=None,
                rowwise_quantized_tensor=cast, columnwise_quantized_tensor=cast,
            )  # fmt: skip


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, quantisers: _Quantisers) -> Tensor:
        quantisers.inspect("activation", x, MXFP8Tensor)
        quantisers.inspect("weight", weight, Float8Tensor)
        ctx.save_for_backward(x, weight)
        ctx.quantisers = quantisers
        output = x @ weight.T
        quantisers.inspect("output", output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        ctx.quantisers.inspect("gradient", gradient, MXFP8Tensor)
        dgrad = gradient @ weight
        ctx.quantisers.inspect("dgrad", dgrad)
        wgrad = gradient.flatten(0, -2).T @ x.flatten(0, -2)
        ctx.quantisers.inspect("wgrad", wgrad)
        return dgrad, wgrad, None


class Linear(nn.Module):
    def __init__(self, in_features: int, out_features: int, name: str = "", *, fuse: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_features, in_features) / 4)
        self.name = name
        self.fuse_wgrad_accumulation = fuse
        self.sequence_parallel = self.use_bias = False
        self.tp_size = 1

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        return _Linear.apply(inp, self.weight, _Quantisers(self.name))


class LayerNormLinear(Linear):
    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        return super().forward(F.layer_norm(inp, inp.shape[-1:]))


class LayerNormMLP(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.fc1_weight = nn.Parameter(torch.randn(size, size) / 4)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        return F.layer_norm(inp, inp.shape[-1:]) @ self.fc1_weight.T


class GroupedLinear(Linear):
    def forward(self, inp: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Tensor:
        return torch.cat([part @ self.weight.T for part in inp.split(m_splits)])


class DotProductAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_format, self.attn_mask_type = "bshd", "causal"

    def forward(
        self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, attention_mask: Any = None,
        qkv_format: str | None = None, attn_mask_type: str | None = None,
    ) -> Tensor:  # fmt: skip
        heads = (t.transpose(1, 2) for t in (query_layer, key_layer, value_layer))
        return F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
