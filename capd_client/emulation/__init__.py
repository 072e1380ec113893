"""Emulation of number formats in training: a model computes as if its matrix products had quantised operands.

    emulation = capd_client.emulate(model, "mxfp8")
    emulation = capd_client.emulate(model, {"linear": "mxfp4", "qk": "none", "pv": "none"}, exclude=["lm_head"])
    emulation.remove()

docs/emulation.md has the formulas. A recipe needs no torch.
"""

from __future__ import annotations

from capd_client.config.recipe import QuantSpec, Recipe

__all__ = ["QuantSpec", "Recipe"]
