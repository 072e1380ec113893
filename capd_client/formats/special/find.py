"""The special quantiser of a tensor in a format."""

from __future__ import annotations

import torch

from capd_client.formats.spec import Spec
from capd_client.formats.special.deviation import DeviationQuantiser
from capd_client.formats.special.eden import EdenQuantiser
from capd_client.formats.special.four_over_six import FourOverSixQuantiser
from capd_client.formats.special.hif4 import Hif4Quantiser
from capd_client.formats.special.outer import OuterQuantiser
from capd_client.formats.special.quantiser import SpecialQuantiser

__all__ = ["special_quantiser"]


def special_quantiser(values: torch.Tensor, spec: Spec) -> SpecialQuantiser:
    """Return the quantiser of all `values`, for a spec that `is_special`."""
    if spec.fmt == "hif4":
        return Hif4Quantiser(spec)
    if spec.scale_mode == "std":
        return DeviationQuantiser(spec)
    if spec.four_over_six is not None:
        return FourOverSixQuantiser(spec, values)
    return OuterQuantiser(spec) if spec.outer is not None else EdenQuantiser(spec, values)
