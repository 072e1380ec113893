"""Scans a pickle without executing it: finds the names that it would import and the storages that it declares.

`torch.load(weights_only=True)` runs no foreign code, but it believes the sizes that a pickle declares for its storages.
In a zip file it treats the record's memory as that large; in the older format it allocates that much. So the opcodes
are walked first (`pickletools`), on a stack of constants. Nothing is imported, called or allocated.
"""

from __future__ import annotations

import pickletools
from typing import Any, BinaryIO, NamedTuple

from capd.errors import CapdError
from capd_client.protocol.dtypes import SUPPORTED_DTYPES

__all__ = ["BadTensorFile", "declared_storages"]


class BadTensorFile(CapdError):
    """A file that is damaged or hostile, or is no tensor file of tensor_saver's kind. The message says why."""


_ITEM_NBYTES = {
    "DoubleStorage": 8, "FloatStorage": 4, "HalfStorage": 2, "BFloat16Storage": 2, "LongStorage": 8, "IntStorage": 4,
    "ShortStorage": 2, "CharStorage": 1, "ByteStorage": 1, "BoolStorage": 1, "UntypedStorage": 1,
}  # fmt: skip
_KNOWN = frozenset(
    {"torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3", "torch._utils _rebuild_parameter"}
    | {"collections OrderedDict", "torch Size", "torch device", "torch.storage UntypedStorage"}
    | {f"torch {name}" for name in (*_ITEM_NBYTES, *SUPPORTED_DTYPES)}
)
_VALUES = frozenset({
    "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE",
    "SHORT_BINUNICODE", "GLOBAL",
})  # fmt: skip
_CONTAINERS = frozenset({"EMPTY_DICT", "EMPTY_LIST"})
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
# The number of values that each opcode takes from the stack. REDUCE puts its result there.
_TAKES = {"REDUCE": 2, "BUILD": 1, "APPEND": 1, "SETITEM": 2}


class _Global(NamedTuple):
    name: str


def declared_storages(stream: BinaryIO) -> dict[str, int]:
    """Return the bytes of each storage that the pickle at the stream's position declares, by the storage's key.

    The stream is then at the end of the pickle.

    Raises:
        BadTensorFile: If the pickle is cut off, or has an opcode that torch.save never writes for tensors and plain
            values.
    """
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(stream):
            machine.step(opcode.name, argument)
    except BadTensorFile:
        raise
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        raise BadTensorFile(f"its pickle is cut off or damaged: {error}") from None
    return machine.storages


class _Machine:
    """The pickle machine on constants. It ignores the contents of containers and the results of functions."""

    def __init__(self) -> None:
        self.storages: dict[str, int] = {}
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name in _VALUES:
            stack.append(_known_global(argument) if name == "GLOBAL" else argument)
        elif name in _CONTAINERS:
            stack.append(None)
        elif name == "MARK":
            self._marks.append(len(stack))
        elif name in _TUPLES:
            self._tuple(len(stack) - _TUPLES[name])
        elif name == "TUPLE":
            self._tuple(self._marks.pop())
        elif name in _TAKES:
            del stack[len(stack) - _TAKES[name] :]
            if name == "REDUCE":
                stack.append(None)
        elif name in ("APPENDS", "SETITEMS"):
            del stack[self._marks.pop() :]
        elif name == "BINPERSID":
            self._storage(stack.pop())
            stack.append(None)
        elif name not in ("PROTO", "STOP"):
            raise BadTensorFile(f"its pickle has the opcode {name}, which torch.save does not write")

    def _tuple(self, first: int) -> None:
        if first < 0:
            raise IndexError("the stack is empty")
        self._stack[first:] = [tuple(self._stack[first:])]

    def _storage(self, identity: Any) -> None:
        if not (isinstance(identity, tuple) and len(identity) in (5, 6) and identity[0] == "storage"):
            raise BadTensorFile("its pickle refers to something that is no storage")
        _, kind, key, _, elements = identity[:5]
        if len(identity) == 6 and identity[5] is not None:
            raise BadTensorFile("it shares a storage in a way that only torch before 0.4 wrote")
        item_nbytes = _ITEM_NBYTES.get(kind.name.split(" ")[1]) if isinstance(kind, _Global) else None
        if item_nbytes is None or not isinstance(key, str) or type(elements) is not int or elements < 0:
            raise BadTensorFile("it declares a storage whose type or size is none")
        nbytes = elements * item_nbytes
        if self.storages.setdefault(key, nbytes) != nbytes:
            raise BadTensorFile(f"it declares storage {key[:40]!r} twice, with different sizes")


def _known_global(name: str) -> _Global:
    if name not in _KNOWN:
        raise BadTensorFile(
            f"its pickle wants to import {name.replace(' ', '.')[:80]!r}: that is code, not a tensor, and is not run"
        )
    return _Global(name)
