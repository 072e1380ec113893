"""A record's reference: `capd:` and, as a query, the fields that identify the record in its run.

    capd:quant_type=mxfp8&rank=0&layer=3&phase=pre&…&tensor_name=query&iteration=7&micro_batch=0&call=0&sample_idx=2

Fields without a value are omitted. `capd.open(store).record(reference)` finds the record.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl, urlencode

import msgspec

from capd_client.errors import ConfigError
from capd_client.protocol.key import ORDINALS, Key, Moment

__all__ = ["parse_reference", "reference_of"]

_SCHEME = "capd:"
_MAX_CHARS = 1 << 17
# The tensor's name is the last field of a key.
_KEY = (*(name for name in Key.__struct_fields__ if name != "tensor_name"), "tensor_name")
_NUMBERS = ("rank", "layer")
_MAY_BE_EMPTY = ("layer_type", "component", "module", "stack")


def reference_of(key: Key, moment: Moment) -> str:
    """Return the reference of the record of `key` at `moment`."""
    given = [f"{name}={number}" for name in ORDINALS if (number := getattr(moment, name)) is not None]
    if not moment.attempt:
        # The attempt, which is the last one.
        given.pop()
    return f"{_beginning(key)}&{'&'.join(given)}"


# Kept, as hardly any key is new: writing it again was a large part of each call of tensor_saver.
@lru_cache(maxsize=1 << 12)
def _beginning(key: Key) -> str:
    """Return the common beginning of the references of all records of a key."""
    fields = {name: getattr(key, name) for name in _KEY}
    given = {n: v for n, v in fields.items() if v is not None and (v != "" or n not in _MAY_BE_EMPTY)}
    return _SCHEME + urlencode(given, errors="replace")


def parse_reference(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of the key and of the moment in a reference. Raises ConfigError for any other text."""
    try:
        if not text.startswith(_SCHEME) or len(text) > _MAX_CHARS:
            raise ValueError
        pairs = parse_qsl(
            text.removeprefix(_SCHEME),
            keep_blank_values=True,
            strict_parsing=True,
            max_num_fields=len(_KEY + ORDINALS),
        )
        given: dict[str, Any] = {
            name: int(value) if name in (*_NUMBERS, *ORDINALS) else value for name, value in pairs
        }
        unknown = given.keys() - {*_KEY, *ORDINALS}
        if unknown or len(given) < len(pairs):
            raise ValueError
        key = Key(**{name: given[name] for name in _KEY if name in given})
    except (ValueError, TypeError):
        raise ConfigError(f"{text!r:.200} is no reference of a capd record") from None
    moment = {"attempt": 0} | {name: given[name] for name in ORDINALS if name in given}
    return msgspec.structs.asdict(key), moment
