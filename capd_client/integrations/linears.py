"""Linears that differ from nn.Linear: GPT-2's Conv1D, quantised linears, and linears with their own forward.

Every read of a parametrised weight computes it again. Reading it here could change the job's random numbers. So for
parametrised linears, and for subclasses whose forward calls F.linear, the operands of that call are captured.
"""

from __future__ import annotations

from typing import Any, Optional

from torch import nn
from torch.nn import functional
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized

from capd_client.hooks.function_sites import FunctionSite
from capd_client.hooks.sites import QuantisedState, Site
from capd_client.integrations.callers import names_in
from capd_client.protocol.kinds import LINEAR

__all__ = ["calls_linear", "find_sites", "is_linear", "is_plain"]


_LINEAR = FunctionSite("linear", LINEAR, ("input", "weight"), lambda: [(functional, "linear")], asks=False)

_IN_OUT = (("weight_layout", "in_out"),)
_BEFORE_CAST = (("operands", "before the cast to float8"),)


def find_sites(model: nn.Module) -> dict[str, list[Site]]:
    """Return the linears of `model` that are not a plain nn.Linear, by their qualified names."""
    found = ((name, _site_of(module)) for name, module in model.named_modules())
    return {name: [site] for name, site in found if site is not None}


def is_plain(module: nn.Module) -> bool:
    """Whether the module's product is F.linear(input, self.weight).

    Subclasses count if they keep nn.Linear's forward, as the classes that FSDP2 makes do. A forward set on the
    instance, as torchtitan does, may change input and output. nn.MultiheadAttention never calls its
    NonDynamicallyQuantizableLinear.
    """
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and "forward" not in vars(module)
        and not isinstance(module, NonDynamicallyQuantizableLinear)
        and not is_parametrized(module)
    )


def is_linear(module: nn.Module) -> bool:
    """Whether the module is a Linear that is called. nn.MultiheadAttention only reads the weight of its own linear."""
    return isinstance(module, nn.Linear) and not isinstance(module, NonDynamicallyQuantizableLinear)


def _site_of(module: nn.Module) -> Optional[Site]:
    origin = {f"{base.__module__.partition('.')[0]}.{base.__name__}" for base in type(module).__mro__}
    if "transformers.Conv1D" in origin:
        return Site(module, LINEAR, ("x",), attributes=_IN_OUT)
    if "bitsandbytes.Linear4bit" in origin:
        return Site(module, LINEAR, ("x",), state=_state_of_4bit)
    if "bitsandbytes.Linear8bitLt" in origin:
        return Site(module, LINEAR, ("x",), state=_state_of_8bit)
    if "torchao.Float8Linear" in origin:
        return Site(module, LINEAR, ("input",), attributes=_BEFORE_CAST)
    if calls_linear(module):
        computed = is_parametrized(module) or type(module).forward is not nn.Linear.forward
        return Site(module, LINEAR, function=_LINEAR, computed=computed)
    return None


def calls_linear(module: nn.Module) -> bool:
    """Whether the call of F.linear in the forward of a Linear is the module's own product."""
    if not is_linear(module) or is_plain(module):
        return False
    inside = (other for other in module.modules() if other is not module)
    if any(isinstance(other, nn.Linear) for other in inside):
        return False
    names = names_in(type(module).forward)
    # "forward": it calls the forward of its base class.
    return "linear" in names or "forward" in names


def _state_of_4bit(module: Any) -> QuantisedState:
    """Return the state that turns the bytes of a 4-bit weight into numbers.

    Names are those of bitsandbytes' checkpoints.
    """
    known = module.weight.quant_state
    # The weight is not quantised yet.
    if known is None:
        return QuantisedState({}, {})
    tensors = {"absmax": known.absmax, "quant_map": known.code}
    attributes = {
        "quant_type": known.quant_type, "blocksize": known.blocksize, "shape": tuple(known.shape),
        "dtype": str(known.dtype).removeprefix("torch."),
    }  # fmt: skip
    if known.nested:
        tensors |= {
            "nested_absmax": known.state2.absmax,
            "nested_quant_map": known.state2.code,
            "nested_offset": known.offset,
        }
        attributes |= {"nested_blocksize": known.state2.blocksize}
    return QuantisedState(tensors, attributes)


def _state_of_8bit(module: Any) -> QuantisedState:
    """Return the scale of each row of an 8-bit weight: W = payload * SCB / 127."""
    scale = module.weight.SCB if module.weight.SCB is not None else module.state.SCB
    return QuantisedState({} if scale is None else {"SCB": scale}, {"row_scale_divisor": 127})
