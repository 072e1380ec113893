"""The grammar of placements: how a tensor is distributed over one dimension of the ranks.

| text | meaning |
|---|---|
| `R` | the same on all ranks |
| `S(d)` | split along axis d, in the order of the ranks |
| `S(d):n` | each rank holds n blocks, which lie side by side in the whole: a0 b0, a1 b1 is a0 a1 b0 b1 |
| `S(d)*k` | split along axis d; each part is on k consecutive ranks |
| `S(d)+k` | split along axis d; the terms of the sum that is a part are on k consecutive ranks |
| `P(sum)`, `P(mean)` | to be added up, or averaged |
| `Z(d)` | split along axis d in 2 · size chunks; rank r holds chunk r and chunk 2 · size - 1 - r |
| `I(d)` | split along axis d; the attribute `<dim>_index` lists the positions that the rank holds |
| `QKV(d)` | a rank's query heads, then its key groups, then its value groups |

`S(d):n` is the first linear of a gated MLP: a rank holds gate and up. `S(d)*k` are the keys and values of an attention
with fewer groups than ranks, `S(d)+k` their gradients. `Z(d)` is Megatron's order under context parallelism, and that
of torch's `_HeadTailLoadBalancer`. Sources of the rules: Megatron-LM, `transformer/attention.py` and `mlp.py`.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from capd.errors import ContradictoryParts
from capd_client.process.text import printable
from capd_client.protocol.key import MAX_NDIM

__all__ = ["Placement", "parse_placement"]

_SPLIT = re.compile(r"(S|Z|I|QKV)\((-?[0-9]{1,3})\)(?::([0-9]{1,6}))?(?:([*+])([0-9]{1,6}))?")
_REDUCED = {"P(sum)": "sum", "P(mean)": "mean", "P(avg)": "mean"}
# A rank holds two blocks of a gated MLP, and a few of a fused projection.
_MAX_BLOCKS = 4096
_MAX_SHOWN_CHARS = 80
_KNOWN = "R, S(d), S(d):n, S(d)*k, S(d)+k, P(sum), P(mean), Z(d), I(d), QKV(d)"


class Placement(NamedTuple):
    """How a tensor is distributed over one dimension of the ranks.

    Attributes:
        kind: "R", "S", "P", "Z", "I" or "QKV".
        axis: The axis that is split; may count from the end. 0 if none is split.
        blocks: The blocks of a rank that lie side by side in the whole tensor.
        copies: The consecutive ranks that hold the same part.
        terms: The consecutive ranks that hold the terms of one part.
        reduction: "sum" or "mean" for the kind "P"; otherwise "".
    """

    kind: str
    axis: int = 0
    blocks: int = 1
    copies: int = 1
    terms: int = 1
    reduction: str = ""

    @property
    def splits(self) -> bool:
        """Whether the ranks hold different places of one axis."""
        return self.kind not in ("R", "P")

    def __str__(self) -> str:
        if not self.splits:
            return f"P({self.reduction})" if self.kind == "P" else "R"
        blocks = f":{self.blocks}" if self.blocks > 1 else ""
        shared = f"*{self.copies}" if self.copies > 1 else f"+{self.terms}" if self.terms > 1 else ""
        return f"{self.kind}({self.axis}){blocks}{shared}"


@lru_cache(maxsize=1024)
def _parsed(text: str) -> Placement | str:
    """Return the placement, or what is wrong with the text."""
    if text == "R":
        return Placement("R")
    if text in _REDUCED:
        return Placement("P", reduction=_REDUCED[text])
    match = _SPLIT.fullmatch(text)
    if match is None:
        return f"known are {_KNOWN}"
    kind, axis, blocks, sign, ranks = match[1], int(match[2]), match[3], match[4], int(match[5] or 1)
    if not -MAX_NDIM <= axis < MAX_NDIM:
        return f"a tensor has at most {MAX_NDIM} axes"
    if kind != "S" and (blocks or sign):
        return "only S(d) has blocks, copies or terms"
    if not 1 <= int(blocks or 1) <= _MAX_BLOCKS:
        return f"a rank holds 1 to {_MAX_BLOCKS} blocks"
    if ranks < 1:
        return "at least one rank holds a part"
    copies, terms = (1, ranks) if sign == "+" else (ranks, 1)
    return Placement(kind, axis, int(blocks or 1), copies, terms)


def parse_placement(text: object) -> Placement:
    """Return the placement that a text of the grammar says.

    Raises:
        ContradictoryParts: It is no text, or says none. The message has the text and the grammar.
    """
    if not isinstance(text, str):
        raise ContradictoryParts(f"placement {shown(text)} is no text; known are {_KNOWN}")
    found = _parsed(text)
    if isinstance(found, str):
        raise ContradictoryParts(f"unknown placement {shown(text)}: {found}")
    return found


def shown(value: object) -> str:
    """Return a value from a store as short, printable text."""
    text = printable(repr(value))
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}…"
