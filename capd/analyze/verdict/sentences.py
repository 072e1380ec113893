"""The statements of the verdict as English sentences.

Numbers are rounded so that a sentence stays true: what a format keeps downwards, what it misses upwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from capd.analyze.verdict.statements import CLOSE_BITS, Statement

__all__ = ["sentence_of"]


def sentence_of(said: Statement) -> str:
    """Return a statement as an English sentence."""
    return _TEXTS[said["rule"]](said)


def _keeps(said: Statement) -> str:
    bits, roles = f"{said['bits']:g} bits a value", _listed(said["roles"], "and")
    if said["sqnr_db"] == math.inf:
        return f"{said['format']} keeps every value of {roles} exactly, at {bits}."
    kept = f"{said['format']} keeps {_down(said['sqnr_db'])} dB or more on {roles}"
    if said["alone"]:
        return f"{kept}, at {bits}; no other format was measured."
    if said["behind_db"] is None:
        return f"{kept}, at {bits}."
    lossless = " without lost values" if said["lossy"] else ""
    if not said["behind_db"]:
        return f"{kept}, and no format{lossless} is better there, at {bits}."
    return f"{kept}, within {_up(said['behind_db'])} dB of the best{lossless}, at {bits}."


def _all_lose(said: Statement) -> str:
    if said["alone"]:
        return f"{said['format']} is no choice as it is: it loses values."
    return f"Every format loses values; {said['format']} loses the fewest, {said['lost']:,}."


def _loses_values(said: Statement) -> str:
    lost, count = said["lost"], said["count"]
    return f"{_subject(said)} loses {lost:,} of {count:,} values on {said['role']}: they become Inf or NaN."


def _loses_db(said: Statement) -> str:
    against = said["against"]
    if said["against_bits"] > said["bits"] + CLOSE_BITS:
        against = f"{against}, at {said['bits']:g} bits instead of {said['against_bits']:g}"
    return f"{_subject(said)} loses {said['loss_db']:.1f} dB on {said['role']} against {against}{_because(said)}."


def _all_close(said: Statement) -> str:
    if not said["behind_db"]:
        return "No format is behind another on any role."
    return f"No format is more than {_up(said['behind_db'])} dB behind the best on any role."


def _fewer(said: Statement) -> str:
    return (
        f"{_listed(said['formats'], 'and')} could not measure every tensor, so no comparison is made there."
    )


def _uneven_text(said: Statement) -> str:
    best = f"{said['best_db']:.1f} dB on {said['best_role']}"
    return f"{_subject(said)} keeps {best} and {said['sqnr_db']:.1f} dB on {said['role']}{_because(said)}."


def _missing(said: Statement) -> str:
    return f"No {_listed(said['roles'], 'or')} were measured, so nothing is said about them."


_TEXTS = {
    "keeps": _keeps,
    "partial": lambda said: "No format took every tensor without losing a value, so none is the best of all.",
    "all_lose": _all_lose,
    "loses_values": _loses_values,
    "loses_db": _loses_db,
    "all_close": _all_close,
    "fewer": _fewer,
    "uneven": _uneven_text,
    "missing": _missing,
}
_REASONS = {
    "saturation": "are beyond its largest one",
    "flush": "are below its smallest normal one",
    "underflow": "become zero",
}


def _subject(said: Statement) -> str:
    return said["format"] if said["scaled"] else f"{said['format']} without a scale"


def _because(said: Statement) -> str:
    if said["reason"] is None:
        return ""
    return f"; {said['reason_percent']:.3g} % of the values {_REASONS[said['reason']]}"


def _listed(words: Sequence[str], last: str) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def _down(decibels: float) -> str:
    return f"{math.floor(decibels * 10) / 10:.1f}"


def _up(decibels: float) -> str:
    return f"{math.ceil(decibels * 10) / 10:.1f}"
