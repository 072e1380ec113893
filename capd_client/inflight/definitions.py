"""The definitions of captures: key, dtype and attributes are constant and become one small number on the wire.

A number is assigned once per process and means the same on every connection. The transport sends the DEF that
explains it before its first use on each connection. A definition that a peer would refuse is refused here, with a
reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Optional

import msgspec
import torch

from capd_client.errors import ConfigError
from capd_client.protocol.dtypes import ITEM_NBYTES, short_name_of
from capd_client.protocol.key import Key
from capd_client.protocol.messages import MAX_KEYS, Define, decode_client, encode
from capd_client.protocol.scalars import is_scalar
from capd_client.tensors import emulation_label

__all__ = ["Definition", "Definitions", "dtype_name", "short_name"]

MAX_ATTRIBUTES_NBYTES = 64 << 10
# Key objects whose definition is found by identity.
_MAX_REMEMBERED = 1 << 16


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name on the wire: torch's name without the prefix."""
    return str(dtype).removeprefix("torch.")


def short_name(dtype: torch.dtype) -> str:
    """Return the default quant_type of a tensor: bf16, fp16, fp32, fp64, fp8, fp4, otherwise torch's name."""
    return short_name_of(dtype_name(dtype))


class Definition:
    """An interned (key, dtype, attributes). `item_nbytes` is 0 for a dtype that capd does not keep.

    A scalar never waits for room, no policy keeps less of it, and it does not count against the budget of its step.
    """

    __slots__ = ("attributes", "define", "id", "is_scalar", "item_nbytes", "key")

    def __init__(self, define: Define, key: Key, attributes: object) -> None:
        self.define = define
        self.id = define.id
        self.item_nbytes = ITEM_NBYTES.get(define.dtype, 0)
        self.is_scalar = is_scalar(key)
        # The caller's object is kept alive, so that no other object can get its id.
        self.key = key
        self.attributes = attributes


class Definitions:
    """All definitions of a session. The caller holds the session's lock, except for `find`.

    Args:
        interned: Called with every new definition.
    """

    def __init__(self, interned: Callable[[Define], None] = lambda _: None) -> None:
        self._interned = interned
        # By (id of the key object, dtype, id of the attributes); or with what they hold instead of their id.
        self.found: dict[Any, Definition] = {}
        self._by_content: dict[tuple[Key, str, bytes], Definition] = {}
        self._all: list[Definition] = []

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, key_id: int) -> Definition:
        return self._all[key_id]

    def find(
        self, key: Key, dtype: torch.dtype, attributes: Optional[dict[str, Any]]
    ) -> Optional[Definition]:
        """Return the definition last made for this very key object, or None."""
        found = self.found.get((id(key), dtype, id(attributes)))
        if found is not None or attributes is None:
            return found
        try:
            found = self.found.get((id(key), dtype, _content_of(attributes)))
        except TypeError:
            # An attribute has an unhashable value.
            return None
        # The same object came again. The definition holds it, so its id is unique.
        if found is not None and found.attributes is attributes:
            self.found[id(key), dtype, id(attributes)] = found
        return found

    def make(self, key: Key, dtype: torch.dtype, attributes: Optional[dict[str, Any]]) -> Definition:
        """Find a definition by its content, or intern a new one.

        Attributes that do not name an emulation get the one that is active.

        Raises:
            ConfigError: The protocol cannot carry the key or the attributes, or the process has too many keys.
        """
        try:
            packed = msgspec.msgpack.encode(
                {emulation_label.ATTRIBUTE: emulation_label.current(), **(attributes or {})}
            )
        except (TypeError, ValueError, RecursionError, OverflowError) as error:
            raise ConfigError(f"attributes cannot be sent: {error}") from None
        try:
            content = (key, dtype_name(dtype), packed)
            definition = self._by_content.get(content)
        except TypeError as error:
            raise ConfigError(f"the key has a field of a wrong type: {error}") from None
        if definition is None:
            definition = self._intern(key, content[1], packed)
            self._by_content[content] = definition
        self._remember(key, dtype, attributes, definition)
        return definition

    def _intern(self, key: Key, dtype: str, packed: bytes) -> Definition:
        if len(packed) > MAX_ATTRIBUTES_NBYTES:
            raise ConfigError(f"attributes take {len(packed)} bytes, the limit is {MAX_ATTRIBUTES_NBYTES}")
        if len(self._all) >= MAX_KEYS:
            raise ConfigError(
                f"more than {MAX_KEYS} different keys in one process; a counter belongs in the moment or the "
                "metadata, not into a name"
            )
        attributes = msgspec.msgpack.decode(packed)
        try:
            # The store keeps attributes as JSON.
            json.dumps(attributes, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"attributes hold something that JSON does not: {error}") from None
        define = Define(id=len(self._all), key=key, dtype=dtype, attributes=attributes)
        try:
            # The daemon does exactly this check.
            decode_client(encode(define))
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"the key cannot be sent: {error}") from None
        definition = Definition(define, key, None)
        self._interned(define)
        self._all.append(definition)
        return definition

    def _remember(
        self, key: Key, dtype: torch.dtype, attributes: Optional[dict[str, Any]], definition: Definition
    ) -> None:
        # A caller may make new key objects all the time.
        if len(self.found) >= _MAX_REMEMBERED:
            self.found.clear()
        held = Definition(definition.define, key, attributes)
        at: Any = (id(key), dtype, id(None) if attributes is None else _content_of(attributes))
        try:
            self.found[at] = held
        except TypeError:
            return


def _content_of(attributes: dict[str, Any]) -> tuple[Any, ...]:
    """Return what attributes hold. The types tell True and 1.0 from 1."""
    return tuple(attributes.items()), tuple(map(type, attributes.values()))
