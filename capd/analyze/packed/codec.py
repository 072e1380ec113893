"""The msgpack form of analysed values, by the types of their fields. It is the same for the same values.

Reading checks every value against its type, because a partial result may come from anybody. Nothing is pickled.
"""

from __future__ import annotations

import collections
import math
import struct
import types
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from capd.analyze.distribution import Distribution
from capd.analyze.exact import ShortSum
from capd.errors import CapdError

__all__ = ["Damaged", "pack", "unpack"]

_WHOLE = 1
_LEAST, _MOST = -(2**63), 2**63 - 1
# A sum of float64 in units (`capd.analyze.exact`) needs fewer bits.
_MOST_SHIFT = 1 << 16
# A `ShortSum` needs less.
_MOST_EXPONENT = 1 << 12
_SCALARS = (int, float, str, bool, bytes, type(None))
T = TypeVar("T")


class Damaged(CapdError):
    """A partial result does not have the form of one; says which part."""


class _Form(NamedTuple):
    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]


class _Shorts:
    """Stands for `array[int]`, which Python cannot evaluate."""

    def __class_getitem__(cls, _of: Any) -> type[_Shorts]:
        return cls


def pack(value: Any, kind: Any) -> bytes:
    """Return the bytes of a value of a type."""
    return msgspec.msgpack.encode(_form(kind).pack(value))


def unpack(data: bytes, kind: type[T]) -> T:
    """Return the value of a type that has these bytes.

    Raises:
        Damaged: The bytes are of no such value.
    """
    try:
        form: _Form = _form(kind)  # type: ignore[arg-type]  # a type can be hashed
        found: T = form.unpack(msgspec.msgpack.decode(data, ext_hook=_extension))
        return found
    except Damaged:
        raise
    except (
        msgspec.DecodeError,
        ValueError,
        TypeError,
        LookupError,
        ArithmeticError,
        RecursionError,
        struct.error,
    ) as error:
        raise Damaged(f"a partial result is damaged: {error}") from error


def _extension(code: int, data: memoryview) -> int:
    shift: int = struct.unpack_from("<I", data)[0]
    mantissa = int.from_bytes(data[4:], "little", signed=True)
    if code != _WHOLE or shift > _MOST_SHIFT:
        raise Damaged(f"a partial result has a number of kind {code}, {shift} bits long")
    return mantissa << shift


def _packed_int(value: int) -> Any:
    if _LEAST <= value <= _MOST:
        return int(value)
    shift = (value & -value).bit_length() - 1
    mantissa = value >> shift
    length = mantissa.bit_length() // 8 + 1
    return msgspec.msgpack.Ext(
        _WHOLE, struct.pack("<I", shift) + mantissa.to_bytes(length, "little", signed=True)
    )


@cache
def _form(kind: Any) -> _Form:
    origin, args = get_origin(kind), get_args(kind)
    if kind in _SCALARS or kind is None:
        return _scalar(kind)
    if origin in (Union, types.UnionType):
        return _union(args)
    if origin is Literal:
        return _Form(lambda value: value, lambda found: _one_of(found, args))
    if origin is tuple and args[-1] is not Ellipsis:
        return _together([_form(one) for one in args], tuple)
    if origin in (list, tuple, Sequence):
        make = tuple if origin is tuple else list
        of = _form(args[0])
        return _Form(
            lambda value: [of.pack(one) for one in value], lambda found: make(map(of.unpack, _list(found)))
        )
    if origin in (set, frozenset, Collection):
        return _set(_form(args[0]), set if origin is set else frozenset)
    if origin in (dict, Mapping):
        return _mapping(_form(args[0]), _form(args[1]), dict)
    if origin is collections.Counter:
        counter = _mapping(_form(args[0]), _form(int), collections.Counter)
        # The order of numbers says nothing.
        return (
            counter._replace(pack=lambda value: counter.pack(dict(sorted(value.items()))))
            if args[0] is int
            else counter
        )
    if origin is np.ndarray:
        return _numbers(np.dtype(get_args(args[1])[0]).newbyteorder("<"))
    if origin is Callable:
        # A function is found again by what is beside it.
        return _Form(lambda _: None, _nothing)
    if kind is _Shorts:
        return _Form(lambda value: value.tobytes(), lambda found: array("h", _bytes(found)))
    if kind is object:
        return _Form(lambda value: value, _plain)
    if kind is Distribution:
        return _Form(_packed_distribution, _distribution)
    if kind is ShortSum:
        return _short_sum(_record(kind))
    return _record(kind)


def _scalar(kind: Any) -> _Form:
    if kind is int:
        return _Form(_packed_int, lambda found: _checked(found, int))
    if kind is float:
        # Python calls whole numbers floats, too, and JSON shows them as they are.
        return _Form(
            lambda value: _packed_int(value) if isinstance(value, int) else float(value),
            lambda found: _checked(found, float, int),
        )
    kind = type(None) if kind is None else kind
    return _Form(lambda value: value, lambda found: _checked(found, kind))


def _checked(found: Any, *kinds: type) -> Any:
    if type(found) not in kinds:
        raise Damaged(f"a partial result has {type(found).__name__} in the place of {kinds[0].__name__}")
    return found


def _one_of(found: Any, words: tuple[Any, ...]) -> Any:
    if found not in words:
        raise Damaged(f"a partial result has none of {', '.join(map(str, words))} where one of them belongs")
    return found


def _union(args: tuple[Any, ...]) -> _Form:
    others = [one for one in args if one not in _SCALARS]
    if not others:
        # Python calls whole numbers floats, too.
        args = (*args, int) if float in args else args
        return _Form(
            lambda value: _packed_int(value) if type(value) is int else value,
            lambda found: _checked(found, *args),
        )
    [kind] = others
    form = _form(kind)
    return _Form(
        lambda value: None if value is None else form.pack(value),
        lambda found: None if found is None else form.unpack(found),
    )


def _together(forms: Sequence[_Form], make: Callable[[list[Any]], Any]) -> _Form:
    def unpacked(found: Any) -> Any:
        return make([form.unpack(one) for form, one in zip(forms, _list(found), strict=True)])

    return _Form(lambda value: [form.pack(one) for form, one in zip(forms, value, strict=True)], unpacked)


def _set(of: _Form, make: Callable[[Any], Any]) -> _Form:
    return _Form(
        lambda value: sorted((of.pack(one) for one in value), key=msgspec.msgpack.encode),
        lambda found: make(map(of.unpack, _list(found))),
    )


def _mapping(keys: _Form, values: _Form, make: Callable[[dict[Any, Any]], Any]) -> _Form:
    def packed(value: Mapping[Any, Any]) -> list[Any]:
        return [part for key, one in value.items() for part in (keys.pack(key), values.pack(one))]

    def unpacked(found: Any) -> Any:
        parts = _list(found)
        return make(
            {keys.unpack(key): values.unpack(one) for key, one in zip(parts[::2], parts[1::2], strict=True)}
        )

    return _Form(packed, unpacked)


def _numbers(dtype: np.dtype[Any]) -> _Form:
    return _Form(
        lambda value: value.astype(dtype, copy=False).tobytes(),
        lambda found: np.frombuffer(_bytes(found), dtype).astype(dtype.newbyteorder("=")),
    )


def _record(kind: Any) -> _Form:
    """Return the form of a class: the values of its fields, in order."""
    hints = get_type_hints(kind, localns={"array": _Shorts})
    has_fields: bool = is_dataclass(kind)
    if issubclass(kind, msgspec.Struct):
        names: tuple[str, ...] = kind.__struct_fields__
    elif has_fields:
        names = tuple(one.name for one in fields(kind))
    else:
        names = tuple(getattr(kind, "_fields", hints))
    forms = [_form(hints[name]) for name in names]

    def made(values: list[Any]) -> Any:
        if issubclass(kind, msgspec.Struct):
            return msgspec.convert(
                values if kind.__struct_config__.array_like else dict(zip(names, values, strict=True)), kind
            )
        if issubclass(kind, tuple):
            return kind(*values)
        found: Any = object.__new__(kind) if has_fields else kind()
        for name, value in zip(names, values, strict=True):
            object.__setattr__(found, name, value)
        return found

    form = _together(forms, made)
    return form._replace(pack=lambda value: form.pack([getattr(value, name) for name in names]))


def _short_sum(form: _Form) -> _Form:
    def unpacked(found: Any) -> Any:
        one: ShortSum = form.unpack(found)
        if abs(one.exponent) > _MOST_EXPONENT:
            raise Damaged(f"a partial result has a sum in units of 2**{one.exponent}")
        return one

    return form._replace(unpack=unpacked)


def _packed_distribution(value: Distribution) -> list[Any]:
    grids = [
        [grid, codes.astype("<u2").tobytes(), counts.astype("<i8").tobytes()]
        for grid, codes, counts in value.patterns()
    ]
    return [value.exact, grids]


def _distribution(found: Any) -> Distribution:
    exact, grids = _list(found)
    distribution = Distribution()
    distribution.exact = _checked(exact, bool)
    for grid, codes, counts in map(_list, _list(grids)):
        patterns = np.frombuffer(_bytes(codes), "<u2").astype(np.uint16)
        numbers = np.frombuffer(_bytes(counts), "<i8").astype(np.int64)
        ascend = patterns.size < 2 or bool((patterns[1:] > patterns[:-1]).all())
        if grid not in ("float16", "bfloat16") or patterns.size != numbers.size or not ascend:
            raise Damaged("a partial result has a distribution whose patterns and counts do not fit")
        distribution.count(grid, patterns, numbers)
    return distribution


def _list(found: Any) -> list[Any]:
    checked: list[Any] = _checked(found, list)
    return checked


def _bytes(found: Any) -> bytes:
    checked: bytes = _checked(found, bytes)
    return checked


def _nothing(found: Any) -> None:
    _checked(found, type(None))


def _plain(found: Any) -> Any:
    """Return a value of JSON, and check that it is one."""
    if isinstance(found, float) and not math.isfinite(found):
        raise Damaged("a partial result has a number that JSON does not have")
    return found
