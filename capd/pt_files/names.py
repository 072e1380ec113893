"""File names of tensor_saver's files. It writes three schemes and reads every scheme that tensor_saver ever had.

  A  {timestamp}_{counter}_{layer_type}_L{layer}_{operation}_{quant_type}_{tensor_name}.pt
  B  {timestamp}_{counter}_{layer_type}_L{layer}_{operation}_{phase}_{component}_{quant_type}_{tensor_name}.pt
  C  {timestamp}_{counter}_iter{iteration}_{layer_type}_L{layer}_{operation}_{phase}_{component}_{quant_type}_
     rank{rank}_sample{sample_idx}_{tensor_name}.pt

Later versions wrote `rank00`, left `sample` out and put `group{index}` at the end. Without a layer, `_L…` is missing.
Names are for people and globs. The content of a file is authoritative (`capd.pt_files.dictionary`).
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any, Literal, get_args

from capd_client.protocol.key import Key, Moment

__all__ = ["SCHEMES", "NameParts", "Scheme", "file_name", "name_parts", "stamp_of"]

Scheme = Literal["A", "B", "C"]
SCHEMES: tuple[str, ...] = get_args(Scheme)

_UNSAFE = re.compile(r"[^A-Za-z0-9_.+\-]")
# File names have at most 255 bytes.
_MAX_NAME_CHARS = 240
_LONG_PART, _SHORT_PART = 60, 16


def stamp_of(time_ns: int) -> str:
    """Return the local time as file names hold it."""
    return time.strftime("%Y%m%d_%H%M%S", time.localtime(time_ns // 1_000_000_000))


def file_name(scheme: Scheme, key: Key, moment: Moment, layer: int | None, stamp: str, counter: int) -> str:
    """Return the name of a record's file. The key and the layer are as the file shows them.

    Characters that are awkward in file names become "-". If the name would be too long, its words are cut.
    """

    def joined(most: int) -> str:
        def word(text: str) -> str:
            return _UNSAFE.sub("-", text)[:most] or "unknown"

        parts = [stamp, f"{counter:04d}"]
        if scheme == "C":
            parts.append(f"iter{moment.iteration:03d}")
        parts.append(word(key.layer_type))
        if layer is not None:
            parts.append(f"L{layer}")
        parts.append(word(key.operation))
        if scheme != "A":
            parts += [word(key.phase), word(key.component)]
        parts.append(word(key.quant_type))
        if scheme == "C":
            parts += [f"rank{key.rank}", f"sample{moment.sample_idx or 0}"]
        return "_".join((*parts, word(key.tensor_name))) + ".pt"

    name = joined(_LONG_PART)
    return name if len(name) <= _MAX_NAME_CHARS else joined(_SHORT_PART)


@dataclass(frozen=True, slots=True)
class NameParts:
    """The parts of a file's name. `stamp` and `counter` order files in time; `fields` has the metadata's names."""

    stamp: str
    counter: int
    fields: dict[str, Any]


_NUMBER = r"\d{1,18}"
_NAME = re.compile(
    rf"""(?P<stamp>\d{{8}}_\d{{6}})_(?P<counter>{_NUMBER})
    (?:_iter(?P<iteration>{_NUMBER}))?
    _(?P<layer_type>.+?)
    (?:_L(?P<layer_idx>{_NUMBER}))?
    _(?P<operation>forward|backward)
    (?:_(?P<phase>pre|post|unknown)_(?P<component>[^_]+))?
    _(?:(?P<quant_of_rank>.+?)_rank(?P<rank>{_NUMBER})
        (?:_sample(?P<sample_idx>{_NUMBER}))?(?:_group(?P<group>{_NUMBER}))?
      |(?P<quant_type>(?:bf|fp|mxfp|nvfp|hifp|int)\d+(?:_quantized)?|[^_]+))
    _(?P<tensor_name>.+)\.(?:pt|pth|pkl)""",
    re.VERBOSE,
)
_WHOLE = frozenset({"iteration", "layer_idx", "rank", "sample_idx", "group"})


def name_parts(name: str) -> NameParts | None:
    """Return the parts of a name of any scheme, otherwise None. A word that contains "_" may be cut short."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    said = {field: text for field, text in found.groupdict().items() if text is not None}
    stamp, counter = said.pop("stamp"), int(said.pop("counter"))
    if "quant_of_rank" in said:
        said["quant_type"] = said.pop("quant_of_rank")
    return NameParts(
        stamp, counter, {field: int(text) if field in _WHOLE else text for field, text in said.items()}
    )
