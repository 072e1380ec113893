"""What the records of an attention call say about it: its mask, its scale, and whatever else changes the scores.

The metadata, each key only if it is known:

    attn_mask_type          TransformerEngine's words: no_mask, causal (aligned at the first token),
                            causal_bottom_right (at the last one), arbitrary, …; Megatron's as it prints them
    attention_mask_shape    the shape of the mask that was given, null without one
    softmax_scale           the factor of Q Kᵀ
    attention_dropout       the probability with which a weight is dropped in this call
    attention_variant       what else changes the scores: sliding_window, softcap, sinks, position_bias; fp8, if their
                            products are in FP8
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Optional

from torch import nn

from capd_client.hooks.sites import operands_of

__all__ = ["of_core", "of_core_call", "of_sdpa", "of_transformers"]

_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
# The function and the module come first.
_TRANSFORMERS = ("function", "module", "query", "key", "value", "attention_mask", "dropout", "scaling")
_SDPA_OF_TRANSFORMERS, _FLASH_OF_TRANSFORMERS = "sdpa_attention_forward", "flash_attention_forward"
# The arguments of the functions of transformers that change the scores, and the words for them.
_VARIANTS = {
    "sliding_window": "sliding_window", "softcap": "softcap", "s_aux": "sinks", "position_bias": "position_bias",
}  # fmt: skip


def of_sdpa(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a call of F.scaled_dot_product_attention."""
    query, _, _, mask, dropout, causal, scale = operands_of(_SDPA, args, kwargs)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return {**_mask(mask, "causal" if causal else "no_mask"), **_numbers(scale, dropout or 0.0)}


def of_transformers(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a call of an attention function of transformers."""
    function, module, query, key, _, mask, dropout, scale = operands_of(_TRANSFORMERS, args, kwargs)
    known = _mask(mask, _word(getattr(function, "__name__", ""), module, query, kwargs))
    given = {name for name in _VARIANTS if kwargs.get(name) is not None}
    if "sliding_window" in given and kwargs["sliding_window"] >= key.shape[2]:
        given.discard("sliding_window")
    variant = [word for name, word in _VARIANTS.items() if name in given]
    return {**known, **_numbers(scale, dropout or 0.0), **({"attention_variant": variant} if variant else {})}


def _word(function: str, module: Any, query: Any, kwargs: Mapping[str, Any]) -> Optional[str]:
    """Return the word of the mask of a function that is given none, None if it is not known."""
    causal, is_flash = kwargs.get("is_causal"), function == _FLASH_OF_TRANSFORMERS
    if is_flash or function == _SDPA_OF_TRANSFORMERS:
        causal = getattr(module, "is_causal", None) if causal is None else causal
    elif causal:
        # Others need not follow the argument.
        return None
    if causal is None or (is_flash and _may_be_packed(query, kwargs)):
        return None
    if not causal or query.shape[2] == 1:
        return "no_mask"
    return "causal_bottom_right" if is_flash else "causal"


def _may_be_packed(query: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a row may hold several sequences, which do not see each other. Reading ids would wait for the device."""
    told = kwargs.get("position_ids") is not None and query.shape[0] == 1
    return told or kwargs.get("cu_seq_lens_q") is not None


def of_core(module: nn.Module) -> dict[str, Any]:
    """Return the metadata that all calls of a core attention of Megatron or TransformerEngine share."""
    core: Any = module
    config = getattr(core, "config", None)
    scale = getattr(core, "softmax_scale", None)
    softmax = getattr(core, "scale_mask_softmax", None)
    if scale is not None and softmax is not None:
        # With apply_query_key_layer_scaling the softmax multiplies by what the product was divided by.
        scale *= getattr(softmax, "scale", None) or 1
    dropout = getattr(core, "attention_dropout", None)
    probability = getattr(dropout, "p", getattr(config, "attention_dropout", None))
    window = getattr(softmax, "window_size", getattr(core, "window_size", None))
    variant = ["sliding_window"] if _is_window(window) else []
    if getattr(core, "softmax_type", getattr(config, "softmax_type", "vanilla")) != "vanilla":
        variant.append("sinks")
    return {**_numbers(scale, probability), **({"attention_variant": variant} if variant else {})}


def of_core_call(given: Mapping[str, Any], kind: Optional[str], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a call of a core attention.

    Args:
        given: The arguments of the call, by their names in Megatron and TransformerEngine.
        kind: The type of the mask of calls that name none.
        known: The metadata of all calls: `of_core`.
    """
    own = given.get("attn_mask_type")
    variant = list(known.get("attention_variant", ()))
    if _is_window(given.get("window_size")) and "sliding_window" not in variant:
        variant.append("sliding_window")
    biases = (given.get(name) for name in ("attention_bias", "core_attention_bias", "alibi_slopes"))
    if (given.get("core_attention_bias_type") or "no_bias") != "no_bias" or any(
        one is not None for one in biases
    ):
        variant.append("position_bias")
    return {
        "attention_mask_shape": _shape_of(given.get("attention_mask")),
        "attn_mask_type": kind if own is None else str(own),
        **known,
        **({"attention_variant": variant} if variant else {}),
    }


def _shape_of(mask: Any) -> Any:
    """Return the shape of a mask. Cross-attention has two masks: return both shapes."""
    if isinstance(mask, tuple):
        return [_shape_of(one) for one in mask]
    shape = getattr(mask, "shape", None)
    return None if shape is None else list(shape)


def _mask(mask: Any, word: Optional[str]) -> dict[str, Any]:
    if mask is not None:
        return {"attention_mask_shape": _shape_of(mask), "attn_mask_type": "arbitrary"}
    return {"attention_mask_shape": None, **({} if word is None else {"attn_mask_type": word})}


def _numbers(scale: Any, dropout: Any) -> dict[str, Any]:
    found = {"softmax_scale": scale, "attention_dropout": dropout}
    # Numbers alone are known: a tensor on a device would have to be waited for.
    return {name: float(number) for name, number in found.items() if isinstance(number, (int, float))}


def _is_window(window: Any) -> bool:
    """Whether a window of (left, right) tokens limits the left: -1 is none."""
    return isinstance(window, (tuple, list)) and len(window) == 2 and window[0] is not None and window[0] >= 0
