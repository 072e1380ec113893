"""Emulation of number formats in training: a model computes as if its matrix products had quantised operands.

    emulation = capd_client.emulate(model, "mxfp8")
    emulation = capd_client.emulate(model, {"linear": "mxfp4", "qk": "none", "pv": "none"}, exclude=["lm_head"])
    emulation.remove()

docs/emulation.md has the formulas. `capd_client.config.recipe` needs no torch. The names below are imported at
their first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from capd_client.config.recipe import QuantSpec, Recipe

if TYPE_CHECKING:
    from capd_client.emulation.emulation import Emulation, emulate

__all__ = ["Emulation", "QuantSpec", "Recipe", "emulate"]


def __getattr__(name: str) -> Any:
    if name not in ("Emulation", "emulate"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from capd_client.emulation import emulation

    return getattr(emulation, name)
