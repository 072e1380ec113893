"""The options of a format: the allowed values and defaults of each, and errors that name them. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Optional, Union

from capd_client.errors import CapdError

__all__ = ["FORMATS", "OPTIONS", "Block", "FormatError", "Spec", "spec_of"]

Block = Union[None, int, tuple[int, int]]

OPTIONS = (
    "elem", "block", "axis", "scale_mode", "rounding", "overflow", "tensor_scale", "preset", "outer", "shrink",
    "four_over_six", "amax_epsilon",
)  # fmt: skip
POWERS = ("floor", "ceil", "even", "rceil")
SATURATE_OR_INF = ("saturate", "inf")


class FormatError(CapdError, ValueError):
    """An error about a format, option or tensor that cannot be used; names it, its value and the allowed values."""


@dataclass(frozen=True)
class Family:
    """The allowed options of a format. The first of each tuple is the default; an empty tuple means no choice.

    A format has scales if it has `blocks`. `scale_type` then says how a block's scale is stored: "e8m0", "e4m3" or
    "float32".
    """

    elems: tuple[str, ...] = ()
    blocks: tuple[Block, ...] = ()
    scale_modes: tuple[str, ...] = ()
    roundings: tuple[str, ...] = ("even", "away", "stochastic")
    overflows: tuple[str, ...] = ()
    has_legacy: bool = False
    has_tensor_scale: bool = False
    scale_type: str = ""
    outers: tuple[int, ...] = ()
    picks: tuple[str, ...] = ()
    shrinks: bool = False
    has_epsilon: bool = False


FORMATS: dict[str, Family] = {
    "bf16": Family(overflows=("inf", "saturate")),
    "fp16": Family(overflows=("inf", "saturate")),
    "fp8": Family(
        ("e4m3", "e5m2"),
        (None, 128, (128, 128)),
        ("exact", "unit", *POWERS),
        overflows=SATURATE_OR_INF,
        scale_type="float32",
        has_epsilon=True,
    ),
    "mxfp8": Family(("e4m3", "e5m2"), (32,), POWERS, has_legacy=True, scale_type="e8m0"),
    "mxfp6": Family(("e2m3", "e3m2"), (32,), POWERS, has_legacy=True, scale_type="e8m0"),
    "mxfp4": Family(("e2m1",), (32,), (*POWERS, "std"), has_legacy=True, scale_type="e8m0", shrinks=True),
    "nvfp4": Family(
        ("e2m1",),
        (16, (16, 16)),
        roundings=("even", "away", "stochastic", "eden"),
        has_tensor_scale=True,
        scale_type="e4m3",
        outers=(128,),
        picks=("mae", "mse"),
    ),
    # Its scale takes 32 bits: E6M2, and 24 one-bit exponents.
    "hif4": Family(blocks=(64,), roundings=("away", "stochastic"), scale_type="float32"),
    "hifp8": Family(
        roundings=("away", "hybrid", "stochastic"), overflows=("inf", "saturate"), has_legacy=True
    ),
}


# A sign, and the exponent and the mantissa that the element's name counts.
_ELEMENT_BITS = {"e4m3": 8, "e5m2": 8, "e2m3": 6, "e3m2": 6, "e2m1": 4}
_UNSCALED_BITS = {"bf16": 16, "fp16": 16, "hifp8": 8}
_HIF4_BITS = 4
_SCALE_BITS = {"e8m0": 8, "e4m3": 8, "float32": 32}


@dataclass(frozen=True)
class Spec:
    """A format with all its options settled."""

    fmt: str
    elem: Optional[str]
    block: Block
    axis: int
    scale_mode: Optional[str]
    rounding: str
    overflow: Optional[str]
    tensor_scale: bool
    legacy: bool
    outer: Optional[int] = None
    shrink: Optional[float] = None
    four_over_six: Optional[str] = None
    amax_epsilon: Optional[float] = None

    @property
    def is_special(self) -> bool:
        """Whether scales depend on more than a block's largest magnitude (`capd_client.formats.special`)."""
        named = self.outer is not None or self.four_over_six is not None
        return named or self.fmt == "hif4" or self.scale_mode == "std" or self.rounding == "eden"

    @property
    def has_scale_of_all(self) -> bool:
        """Whether a scale depends on the values of the whole tensor."""
        if self.fmt == "fp8":
            return self.block is None and self.scale_mode != "unit"
        return self.fmt == "nvfp4" and self.tensor_scale and self.outer is None

    @property
    def is_random(self) -> bool:
        """Whether results depend on random bits."""
        return self.rounding in ("stochastic", "eden")

    @property
    def is_scaled(self) -> bool:
        """Whether elements have a scale, be it of a block or of the whole tensor."""
        return bool(FORMATS[self.fmt].blocks)

    @property
    def bits_per_value(self) -> float:
        """The stored bits of a value, with its share of its block's scale.

        A scale of a whole tensor counts nothing, as for fp8 without blocks and the upper scale of nvfp4. Sources: OCP
        Microscaling Formats (MX) Specification v1.0, Table 1 (32 elements share 8 bits); "Pretraining Large Language
        Models with NVFP4", arXiv 2509.25149 (16 elements share 8 bits); HiFloat8, arXiv 2409.16626.
        """
        if not self.is_scaled:
            return _UNSCALED_BITS[self.fmt]
        element: float = _HIF4_BITS if self.elem is None else _ELEMENT_BITS[self.elem]
        if self.block is None:
            return element
        if self.outer is not None:
            element += _SCALE_BITS["float32"] / self.outer
        values = self.block if isinstance(self.block, int) else self.block[0] * self.block[1]
        return element + _SCALE_BITS[FORMATS[self.fmt].scale_type] / values

    @property
    def saturate(self) -> bool:
        return self.overflow in (None, "saturate")


def spec_of(fmt: str, options: dict[str, Any]) -> Spec:
    """Settle the options of a format: check the given ones and fill in the defaults.

    Raises:
        FormatError: The message names the option, its value and the allowed values.
    """
    if not isinstance(fmt, str) or fmt not in FORMATS:
        raise _refused("fmt", fmt, FORMATS)
    family = FORMATS[fmt]
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise FormatError(f"{fmt} has no option {unknown[0]!r}; the options are {', '.join(OPTIONS)}")
    given = {name: value for name, value in options.items() if value is not None}
    legacy = _is_legacy(fmt, family, given)
    shrinks = ("a number from 0.5 to 1, such as 0.75",) if family.shrinks else ()
    shrink = _extra(fmt, "shrink", shrinks, given, _is_shrink)
    epsilons = ("a number from 1.2e-38 to 1e30, such as 1e-4",) if family.has_epsilon else ()
    epsilon = _extra(fmt, "amax_epsilon", epsilons, given, _is_epsilon)
    found = Spec(
        fmt=fmt,
        elem=_choice(fmt, "elem", family.elems, given, "e5m2" if legacy and fmt == "mxfp8" else None),
        block=_block(fmt, family, given),
        axis=_axis(fmt, family, given),
        scale_mode=_choice(fmt, "scale_mode", family.scale_modes, given),
        rounding=_choice(fmt, "rounding", family.roundings, given, "away" if legacy else None) or "even",
        overflow=_choice(fmt, "overflow", family.overflows, given, "saturate" if legacy else None),
        tensor_scale=_tensor_scale(fmt, family, given),
        legacy=legacy,
        outer=_extra(
            fmt, "outer", family.outers, given, lambda one: type(one) is int and one in family.outers
        ),
        shrink=None if shrink is None else float(shrink),
        four_over_six=_extra(fmt, "four_over_six", family.picks, given, family.picks.__contains__),
        amax_epsilon=None if epsilon is None else float(epsilon),
    )
    _check_together(found)
    return found


def _extra(
    fmt: str, name: str, allowed: Sequence[Any], given: dict[str, Any], accepts: Callable[[Any], bool]
) -> Any:
    """Return an option that few formats take, None if it was not given. Nothing is allowed in the others."""
    value = given.get(name)
    if value is None:
        return None
    if not allowed:
        raise FormatError(f"{fmt} takes no {name}; it was given {value!r}")
    if not accepts(value):
        raise _refused(f"{name} of {fmt}", value, allowed)
    return value


def _is_shrink(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0.5 <= value <= 1


def _is_epsilon(value: Any) -> bool:
    # The least is a normal number of float32.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 1.2e-38 <= value < 1e30


def _check_together(spec: Spec) -> None:
    """Raise FormatError for options that exclude each other."""
    special = {
        "outer": spec.outer is not None,
        "four_over_six": spec.four_over_six is not None,
        "rounding='eden'": spec.rounding == "eden",
    }
    used = [name for name, is_used in special.items() if is_used]
    if len(used) > 1:
        raise FormatError(f"{spec.fmt} cannot have {used[0]} and {used[1]} together")
    if spec.four_over_six is not None and spec.rounding == "stochastic":
        raise FormatError(f"{spec.fmt} with four_over_six rounds to nearest; leave rounding out")
    blocks: tuple[Block, ...] = (16, (16, 16)) if used == ["four_over_six"] else (16,)
    if used and spec.block not in blocks:
        raise FormatError(
            f"{spec.fmt} with {used[0]} cannot have block {spec.block}; allowed are {', '.join(map(str, blocks))}"
        )
    if spec.fmt == "hif4" and spec.block != 64:
        raise _refused("block of hif4", spec.block, FORMATS["hif4"].blocks)
    if used and used[0] != "outer" and not spec.tensor_scale:
        raise FormatError(f"{spec.fmt} with {used[0]} needs the tensor's scale; leave tensor_scale out")
    if spec.shrink is not None and (spec.scale_mode == "std" or spec.legacy):
        raise FormatError(f"{spec.fmt} takes shrink with a scale of the largest magnitude alone")
    if spec.amax_epsilon is not None and spec.scale_mode == "unit":
        raise FormatError(
            f"{spec.fmt} takes amax_epsilon with a scale of the largest magnitude, not with unit"
        )


def _is_legacy(fmt: str, family: Family, given: dict[str, Any]) -> bool:
    preset = given.get("preset")
    if preset is None:
        return False
    if preset != "legacy":
        raise _refused(f"preset of {fmt}", preset, ("legacy",))
    if not family.has_legacy:
        having = ", ".join(name for name, other in FORMATS.items() if other.has_legacy)
        raise FormatError(f"{fmt} has no legacy preset; formats with one are {having}")
    fixed = {"scale_mode": "floor", "rounding": "away", "overflow": "saturate"}
    for name, only in fixed.items():
        if given.get(name, only) != only:
            raise _refused(f"{name} with preset='legacy'", given[name], (only,))
    return True


def _choice(
    fmt: str, name: str, allowed: Sequence[str], given: dict[str, Any], default: Optional[str] = None
) -> Optional[str]:
    if name not in given:
        return default if default in allowed else next(iter(allowed), None)
    if not allowed:
        raise FormatError(f"{fmt} takes no {name}; it was given {given[name]!r}")
    if given[name] not in allowed:
        raise _refused(f"{name} of {fmt}", given[name], allowed)
    return str(given[name])


def _block(fmt: str, family: Family, given: dict[str, Any]) -> Block:
    if "block" not in given:
        return family.blocks[0] if family.blocks else None
    block = given["block"]
    if not family.blocks:
        raise FormatError(f"{fmt} has no scales, so it takes no block; it was given {block!r}")
    block = tuple(block) if isinstance(block, list) else block
    sides: Union[tuple[Any, ...], list[Any]] = block if isinstance(block, tuple) else (block,)
    is_tile = len(sides) == (2 if isinstance(block, tuple) else 1)
    if not is_tile or not all(type(side) is int and side > 0 for side in sides):
        raise FormatError(
            f"block of {fmt} cannot be {block!r}; allowed are a number of values along the axis and a tile "
            f"(rows, columns), as {', '.join(map(str, family.blocks))}"
        )
    return (int(sides[0]), int(sides[1])) if isinstance(block, tuple) else int(block)


def _axis(fmt: str, family: Family, given: dict[str, Any]) -> int:
    axis = given.get("axis", -1)
    if "axis" in given and not family.blocks:
        raise FormatError(f"{fmt} has no scales, so it takes no axis; it was given {axis!r}")
    if type(axis) is not int:
        raise _refused(f"axis of {fmt}", axis, ("a dimension of the tensor, -1 by default",))
    return axis


def _tensor_scale(fmt: str, family: Family, given: dict[str, Any]) -> bool:
    value = given.get("tensor_scale", family.has_tensor_scale)
    if "tensor_scale" in given and not family.has_tensor_scale:
        raise FormatError(f"{fmt} takes no tensor_scale; it was given {value!r}")
    if not isinstance(value, bool):
        raise _refused(f"tensor_scale of {fmt}", value, (True, False))
    return value


def _refused(what: str, value: object, allowed: Any) -> FormatError:
    return FormatError(f"{what} cannot be {value!r}; allowed are {', '.join(map(str, allowed))}")
