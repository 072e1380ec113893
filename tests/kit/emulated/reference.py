"""Quantisers and a linear written from the formats' definitions alone: exact fractions, one block after the other."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np

from tests.kit.formats.oracle import Codebook, float_codebook, hif8_codebook

Array = np.ndarray[Any, np.dtype[np.float64]]
Quantise = Callable[[Array], Array]

EMAX = {"e4m3": 8, "e5m2": 15, "e2m3": 2, "e3m2": 4, "e2m1": 2}
book = cache(float_codebook)
hif8_book = cache(hif8_codebook)


def rounded(value: float, codes: Codebook, ties: str = "even") -> float:
    return math.copysign(float(codes.nearest(abs(Fraction(value)), ties)), value)


def mx(elem: str) -> Quantise:
    """OCP MX, 32 values under the power of two floor(log2 amax) - emax."""

    def block(values: Array) -> list[float]:
        amax = float(np.abs(values).max())
        if amax == 0:
            return [0.0] * len(values)
        scale = 2.0 ** max(math.frexp(amax)[1] - 1 - EMAX[elem], -127)
        return [rounded(float(value) / scale, book(elem)) * scale for value in values]

    return lambda row: np.concatenate([block(part) for part in blocks(row, 32)])


def nvfp4(tensor: Array) -> Quantise:
    """16 values under an E4M3 scale, under one float32 for the tensor, in float32 as NVIDIA's kernels compute."""
    one, six = np.float32(1), np.float32(6)
    encode = np.float32(448 * 6) / np.float32(np.abs(tensor).max())
    decode = one / encode

    def block(values: Array) -> list[float]:
        wanted = np.float32(np.abs(values).max()) * (encode * np.float32(1 / 6))
        scale = np.float32(rounded(float(wanted), book("e4m3"))) * decode
        if scale == 0:
            return [0.0] * len(values)
        scaled = [np.clip(np.float32(value) * (one / scale), -six, six) for value in values]
        return [float(np.float32(rounded(float(value), book("e2m1"))) * scale) for value in scaled]

    return lambda row: np.concatenate([block(part) for part in blocks(row, 16)])


def fp8(tensor: Array) -> Quantise:
    """E4M3 under one float32: 448 / amax."""
    scale = np.float32(448.0 / float(np.abs(tensor).max()))
    back = np.float32(1) / scale
    return lambda row: np.array(
        [float(np.float32(rounded(float(np.float32(value) * scale), book("e4m3"))) * back) for value in row]
    )


def hifp8(row: Array) -> Array:
    """To nearest, ties away from zero, in each binade."""
    return np.array([rounded(float(value), hif8_book(), "away") for value in row])


def fp16(row: Array) -> Array:
    return row.astype(np.float32).astype(np.float16).astype(np.float64)


def bf16(row: Array) -> Array:
    def one(value: float) -> float:
        mantissa, exponent = math.frexp(value)
        return math.ldexp(round(mantissa * 256), exponent - 8)  # Python rounds halves to even

    return np.array([one(float(value)) for value in row])


def blocks(row: Array, size: int) -> list[Array]:
    return [row[start : start + size] for start in range(0, len(row), size)]


FORMATS: dict[str, Callable[[Array], Quantise]] = {
    "mxfp8": lambda _: mx("e4m3"),
    "mxfp8 e5m2": lambda _: mx("e5m2"),
    "mxfp6": lambda _: mx("e2m3"),
    "mxfp6 e3m2": lambda _: mx("e3m2"),
    "mxfp4": lambda _: mx("e2m1"),
    "nvfp4": nvfp4,
    "fp8": fp8,
    "hifp8": lambda _: hifp8,
    "fp16": lambda _: fp16,
    "bf16": lambda _: bf16,
    "none": lambda _: lambda row: row,
}
"""Given a whole tensor, what quantises its rows."""


def quantised(tensor: Array, name: str, axis: int) -> Array:
    """`tensor` in a format, blocks along `axis`."""
    return np.apply_along_axis(FORMATS[name](tensor), axis, tensor)


def option(name: str) -> dict[str, str]:
    """What a recipe calls one of FORMATS."""
    fmt, _, elem = name.partition(" ")
    return {"format": fmt, **({"elem": elem} if elem else {})}


def linear(
    x: Array, w: Array, b: Array, g: Array, forward: str, backward: str
) -> tuple[Array, Array, Array, Array]:
    """Y, dX, dW and db of Y = X · Wᵀ + b, for X [tokens, in], W [out, in], dY [tokens, out]."""
    y = quantised(x, forward, 1) @ quantised(w, forward, 1).T + b
    dx = quantised(g, backward, 1) @ quantised(w, backward, 0)
    dw = quantised(g, backward, 0).T @ quantised(x, backward, 0)
    return y, dx, dw, g.sum(0)


def attention(
    q: Array, k: Array, v: Array, g: Array, qk: str, pv: str, *, causal: bool = False
) -> tuple[Array, Array, Array, Array]:
    """O, dQ, dK and dV of one head with both products quantised, for [tokens, width]."""
    scale = 1 / math.sqrt(q.shape[1])
    scores = quantised(q, qk, 1) @ quantised(k, qk, 1).T * scale
    if causal:
        scores = np.where(np.tri(*scores.shape) > 0, scores, -np.inf)
    p = np.exp(scores - scores.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    o = quantised(p, pv, 1) @ quantised(v, pv, 0)
    dp = quantised(g, pv, 1) @ quantised(v, pv, 1).T
    dv = quantised(p, pv, 0).T @ quantised(g, pv, 0)
    ds = p * (dp - (dp * p).sum(1, keepdims=True)) * scale
    dq = quantised(ds, qk, 1) @ quantised(k, qk, 0)
    dk = quantised(ds, qk, 0).T @ quantised(q, qk, 0)
    return o, dq, dk, dv
