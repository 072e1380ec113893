"""The recipes of papers and libraries, as the tables of a recipe's file.

Each is the recipe of linear layers. Which layers keep a higher precision is a choice of modules (`exclude`). Sources:

- nvfp4-te: TransformerEngine's NVFP4BlockScaling at d0067d0, and arXiv 2509.25149. The transform is of the dW product
  alone, and its signs are fixed.
- mxfp4-rht-sr: Tseng et al., arXiv 2502.20586, and amazon-science/mxfp4-llm. The forward stays in bf16.
- quartet: Castro et al., arXiv 2505.14669, and IST-DASLab/Quartet at 00ccd38.
- quartet2: arXiv 2601.22813, and IST-DASLab/Quartet-II at 8776a90. `capd_client.formats.special.eden` says what is not
  public.
- tetrajet2: arXiv 2510.27527, and thu-ml/TetraJet-v2-NVFP4Training at ca5953f. MXFP8 for outlier channels is left out.
- deepseek-v3: arXiv 2412.19437, §3.3.2, and for X `act_quant` of deepseek-ai/DeepSeek-V3 at 9b4e978, whose amax is at
  least 1e-4. The code of training is not public, so dY and W have no such bound. Scales are exact quotients. The paper
  has powers of two for the inputs of some layers (`scale_mode = "rceil"`), which a recipe of all layers leaves out.
- fp8-block-te: TransformerEngine's Float8BlockScaling with its defaults: scales are powers of two, amax has no bound.
- fp4-all-the-way: arXiv 2505.19115: stochastic rounding of dY in dX and dW, and of X in dW.
- mxfp8-nvidia: arXiv 2506.08027, and TransformerEngine's MXFP8BlockScaling.
"""

from __future__ import annotations

from typing import Any

__all__ = ["PRESETS"]

_NVFP4 = {"format": "nvfp4"}
_NVFP4_SR = {"format": "nvfp4", "rounding": "stochastic"}
_TILES = {"format": "nvfp4", "block": [16, 16]}
_MXFP8 = {"format": "mxfp8", "scale_mode": "rceil"}
_QUARTET = {"format": "mxfp4", "scale_mode": "std"}
_SHRUNK = {"format": "mxfp4", "rounding": "stochastic", "shrink": 0.75}
_FOUR_OVER_SIX = {"format": "nvfp4", "four_over_six": "mse"}
_EDEN = {"format": "nvfp4", "rounding": "eden"}
_OUTER = {"format": "nvfp4", "outer": 128}
_OUTER_SR = {"format": "nvfp4", "outer": 128, "rounding": "stochastic"}
_BLOCK_FP8 = {"format": "fp8", "block": 128}
_ACTIVATION_FP8 = {"format": "fp8", "block": 128, "amax_epsilon": 1e-4}
_TILE_FP8 = {"format": "fp8", "block": [128, 128]}
_POWER_FP8 = {"format": "fp8", "block": 128, "scale_mode": "rceil"}
_POWER_TILE_FP8 = {"format": "fp8", "block": [128, 128], "scale_mode": "rceil"}


def _again(operand: dict[str, Any]) -> dict[str, Any]:
    """Return an operand that is quantised again from the forward's values."""
    return {**operand, "source": "requantised"}


def _seeded(size: int) -> dict[str, Any]:
    return {"kind": "hadamard", "size": size, "signs": "seeded"}


PRESETS: dict[str, dict[str, Any]] = {
    "nvfp4-te": {
        "fprop": {"x": _NVFP4, "w": _TILES},
        "dgrad": {"g": _NVFP4_SR, "w": _TILES},
        "wgrad": {
            "g": _NVFP4_SR, "x": _NVFP4, "transform": {"kind": "hadamard", "size": 16, "signs": "te", "round": "bf16"},
        },
    },
    "mxfp4-rht-sr": {
        "dgrad": {"g": _SHRUNK, "w": _SHRUNK, "transform": _seeded(64)},
        "wgrad": {"g": _SHRUNK, "x": _SHRUNK, "transform": _seeded(64)},
    },
    "quartet": {
        "mask": True,
        "fprop": {"x": _QUARTET, "w": _QUARTET, "transform": {"kind": "hadamard", "size": 32}},
        "dgrad": {"g": _SHRUNK, "w": _again(_SHRUNK), "transform": _seeded(32)},
        "wgrad": {"g": _SHRUNK, "x": _again(_SHRUNK), "transform": _seeded(32)},
    },
    "quartet2": {
        "fprop": {"x": _FOUR_OVER_SIX, "w": _FOUR_OVER_SIX},
        "dgrad": {"g": _EDEN, "w": _again(_EDEN), "transform": _seeded(128)},
        "wgrad": {"g": _EDEN, "x": _again(_EDEN), "transform": _seeded(128)},
    },
    "tetrajet2": {
        "fprop": {"x": _OUTER, "w": _OUTER},
        "dgrad": {"g": _OUTER_SR, "w": _again(_OUTER_SR), "transform": _seeded(16)},
        "wgrad": {"g": _OUTER_SR, "x": _again(_OUTER_SR), "transform": _seeded(16)},
    },
    "deepseek-v3": {
        "fprop": {"x": _ACTIVATION_FP8, "w": _TILE_FP8},
        "dgrad": {"g": _BLOCK_FP8, "w": _TILE_FP8},
        "wgrad": {"g": _BLOCK_FP8, "x": _ACTIVATION_FP8},
    },
    "fp8-block-te": {
        "fprop": {"x": _POWER_FP8, "w": _POWER_TILE_FP8},
        "dgrad": {"g": _POWER_FP8, "w": _POWER_TILE_FP8},
        "wgrad": {"g": _POWER_FP8, "x": _POWER_FP8},
    },
    "fp4-all-the-way": {
        "fprop": {"x": _NVFP4, "w": _NVFP4},
        "dgrad": {"g": _NVFP4_SR, "w": _NVFP4},
        "wgrad": {"g": _NVFP4_SR, "x": _NVFP4_SR},
    },
    "mxfp8-nvidia": {
        "fprop": {"x": _MXFP8, "w": _MXFP8},
        "dgrad": {"g": _MXFP8, "w": _MXFP8},
        "wgrad": {"g": _MXFP8, "x": _MXFP8},
    },
}  # fmt: skip
"""The tables of each preset, without its name."""
