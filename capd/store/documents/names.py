"""The paths of a store, made from names that users chose. No other module converts such names to paths.

A safe name is its own path component. It has 1-100 characters of [a-z0-9_.-], does not start with a dot or "__", and is
not reserved. Any other name becomes a readable slug plus "~" and 16 hex digits of its BLAKE2b hash. "~" is not in the
safe alphabet. Two different names therefore never share a component, even on a file system that folds case or Unicode
forms.
"""

from __future__ import annotations

import hashlib
import re

import msgspec

from capd_client.protocol.key import Key

__all__ = ["collided", "component", "key_hash", "series_path", "variant"]

_SAFE = re.compile(r"(?!\.|__)[a-z0-9_.\-]{1,100}\Z")
_UNSAFE_CHARACTER = re.compile(r"[^A-Za-z0-9_.\-]")
_RESERVED = frozenset({"zarr.json", "c", "data", "moments"})
_SLUG_CHARACTERS = 60


def _digest(payload: bytes) -> str:
    return hashlib.blake2b(payload, digest_size=8).hexdigest()


def component(name: str) -> str:
    """Return the path component of `name`: injective, also under case folding and Unicode normalisation."""
    if _SAFE.match(name) and name not in _RESERVED:
        return name
    slug = _UNSAFE_CHARACTER.sub("_", name)[:_SLUG_CHARACTERS].lstrip("._") or "x"
    return f"{slug}~{_digest(name.encode('utf-8', 'surrogatepass'))}"


def key_hash(key: Key) -> str:
    """Return 16 hex digits that represent the whole key."""
    return _digest(msgspec.msgpack.encode(key))


def series_path(key: Key) -> str:
    """Return the group path of a series below the run: quant_type/rank/layer/phase/leaf."""
    layer = "layerNA" if key.layer is None else f"layer{key.layer}"
    place = key.module or ".".join(filter(None, (key.layer_type, key.component))) or "tensor"
    leaf = component(f"{place}.{key.operation}.{key.tensor_name}")
    return f"{component(key.quant_type)}/rank{key.rank}/{layer}/{component(key.phase)}/{leaf}"


def collided(path: str, key: Key) -> str:
    """Return the path of `key` if `path` already belongs to another key."""
    return f"{path}~k{key_hash(key)}"


def variant(path: str, number: int) -> str:
    """Return the path of the `number`-th variant of a series (0: the series itself)."""
    return path if number == 0 else f"{path}~v{number}"
