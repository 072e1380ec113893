"""The statements of the verdict as sentences.

Numbers are rounded so that a sentence stays true: what a format keeps, loses or has as a share downwards, what it is
behind upwards. Numbers of a sample are rounded to nearest and said with "about".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from capd.analyze.verdict.levels import ENOUGH_DB, POOR_DB
from capd.analyze.verdict.statements import CLOSE_BITS, Statement
from capd.phrase import Phrase, Value, listed

__all__ = ["sentence_of", "short_percent"]

_NONE = ""


def sentence_of(said: Statement) -> Phrase:
    """Return the sentence of a statement."""
    return _SENTENCES[said["rule"]](said)


def short_percent(percent: float) -> str:
    """Return a share in percent with three digits, rounded down, so that 99.96 % is not all."""
    if not percent:
        return "0"
    step = 10.0 ** (math.floor(math.log10(percent)) - 2)
    return f"{math.floor(percent / step * (1 + 1e-12)) * step:.3g}"


def _choice(said: Statement) -> Phrase:
    about = (
        said["format"],
        _kept(said),
        _roles(said["roles"], "{0} and {1}"),
        _bits(said["bits"]),
        _others(said),
    )
    if said["error_db"] == 0:
        return Phrase(
            "{0} keeps {1} dB or more on nine of ten tensors of {2}, at {3} bits a value{4}.", about
        )
    return Phrase("{0} keeps about {1} dB on nine of ten tensors of {2}, at {3} bits a value{4}.", about)


def _kept(said: Statement) -> Value:
    if said["error_db"] == 0:
        return _down(said["sqnr_db"])
    if said["error_db"] is None:
        return f"{said['sqnr_db']:.1f}"
    return Phrase("{0} ± {1}", (f"{said['sqnr_db']:.1f}", _up(said["error_db"])))


def _others(said: Statement) -> Value:
    if not said["others"]:
        return Phrase("; no other format was compared")
    if said["sqnr_db"] >= ENOUGH_DB:
        return _NONE
    behind = said["behind_db"]
    if behind and said["clear"]:
        return Phrase("; the best keeps {0} dB more", (_up(behind),))
    if behind or said["error_db"] != 0:
        return Phrase("; no other format keeps clearly more")
    if said["lossy"]:
        return Phrase("; no format without lost values keeps more")
    return Phrase("; no other format keeps more")


def _poor(said: Statement) -> Phrase:
    near = (_decibels(POOR_DB), said["format"], _down(said["sqnr_db"]), _role(said["role"]))
    return Phrase(
        "No format keeps {0} dB on nine of ten tensors of each role; {1} comes nearest: {2} dB on {3}.", near
    )


def _all_lose(said: Statement) -> Phrase:
    if said["alone"]:
        return Phrase("{0} is no choice as it is: it loses values.", (said["format"],))
    return Phrase(
        "Every format loses values; {0} loses the fewest, {1}.", (said["format"], f"{said['lost']:,}")
    )


def _weak(said: Statement) -> Phrase:
    tensors, of = f"{said['tensors']:,}", f"{said['of']:,}"
    return Phrase(
        "In {0}, {1} of {2} tensors are below {3} dB.", (said["format"], tensors, of, _decibels(POOR_DB))
    )


def _loses_values(said: Statement) -> Phrase:
    about = (_subject(said), f"{said['lost']:,}", f"{said['count']:,}", _role(said["role"]))
    return Phrase("{0} loses {1} of {2} values on {3}: they become Inf or NaN.", about)


def _loses_db(said: Statement) -> Phrase:
    bits: Value = _NONE
    if said["against_bits"] > said["bits"] + CLOSE_BITS:
        bits = Phrase(", at {0} bits instead of {1}", (_bits(said["bits"]), _bits(said["against_bits"])))
    loss: Value = _down(said["loss_db"])
    if said["about"]:
        loss = Phrase("about {0}", (f"{said['loss_db']:.1f}",))
    about = (_subject(said), loss, _role(said["role"]), said["against"], bits, _because(said))
    return Phrase("{0} loses {1} dB on {2} against {3}{4}{5}.", about)


def _all_close(said: Statement) -> Phrase:
    if not said["behind_db"]:
        return Phrase("No format is behind another on any role.")
    return Phrase("No format is more than {0} dB behind the best on any role.", (_up(said["behind_db"]),))


def _uneven(said: Statement) -> Phrase:
    best = _down(said["best_db"]), _role(said["best_role"])
    about = (_subject(said), *best, _down(said["sqnr_db"]), _role(said["role"]), _because(said))
    return Phrase("{0} keeps {1} dB on {2} and {3} dB on {4}{5}.", about)


def _untaken(said: Statement) -> Phrase:
    role = _role(said["role"])
    if not said["tensors"]:
        return Phrase("{0} takes no tensor of {1}, so it is not compared.", (said["format"], role))
    about = (said["format"], f"{said['of'] - said['tensors']:,}", f"{said['of']:,}", role)
    return Phrase("{0} does not take {1} of {2} tensors of {3}; they are left out for all formats.", about)


def _zeros(said: Statement) -> Phrase:
    about = (f"{said['tensors']:,}", f"{said['of']:,}", _role(said["role"]))
    return Phrase("{0} of {1} tensors of {2} hold zeros alone.", about)


def _not_finite(said: Statement) -> Phrase:
    about = (f"{said['records']:,}", f"{said['of']:,}")
    return Phrase(
        "{0} of {1} records hold Inf or NaN; they are left out of the verdict for all formats.", about
    )


def _source(said: Statement) -> Phrase:
    formats = listed(said["formats"], "{0} and {1}")
    return Phrase("{0}: captured values have this format already, so it is not chosen.", (formats,))


def _missing(said: Statement) -> Phrase:
    return Phrase(
        "No {0} were measured, so nothing is said about them.", (_roles(said["roles"], "{0} or {1}"),)
    )


_SENTENCES = {
    "choice": _choice,
    "poor": _poor,
    "all_lose": _all_lose,
    "weak": _weak,
    "loses_values": _loses_values,
    "loses_db": _loses_db,
    "all_close": _all_close,
    "uneven": _uneven,
    "untaken": _untaken,
    "zeros": _zeros,
    "not_finite": _not_finite,
    "source": _source,
    "missing": _missing,
}
_ROLES = {
    "activations": Phrase("activations"),
    "weights": Phrase("weights"),
    "gradients": Phrase("gradients"),
}
_REASONS = {
    "saturation": "; {0} % of the values are beyond its largest one",
    "flush": "; {0} % of the values are below its smallest normal one",
    "underflow": "; {0} % of the values become zero",
}
# Nobody expects a scale of formats with as many bits.
_WIDE_BITS = 16


def _role(role: str) -> Phrase:
    return _ROLES[role]


def _roles(roles: Sequence[str], last: str) -> Value:
    return listed([_ROLES[role] for role in roles], last)


def _subject(said: Statement) -> Value:
    if said["scaled"] or said["bits"] >= _WIDE_BITS:
        return str(said["format"])
    return Phrase("{0} without a scale", (said["format"],))


def _because(said: Statement) -> Value:
    if said["reason"] is None:
        return _NONE
    return Phrase(_REASONS[said["reason"]], (short_percent(said["reason_percent"]),))


def _bits(bits: float) -> str:
    return f"{bits:.3g}"


def _decibels(decibels: float) -> str:
    return f"{decibels:g}"


def _down(decibels: float) -> str:
    return f"{math.floor(decibels * 10 + 1e-9) / 10:.1f}"


def _up(decibels: float) -> str:
    return f"{math.ceil(decibels * 10 - 1e-9) / 10:.1f}"
