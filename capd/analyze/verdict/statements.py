"""The verdict in words: a few statements, each from one rule, with the numbers that it names.

Only formats that measured every tensor of a role are compared there, and only those that lost no value are called good.
Numbers are rounded so that a statement stays true: what a format keeps downwards, what it misses upwards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from capd.analyze.verdict.roles import ROLES
from capd.analyze.verdict.score import Score, best_of

__all__ = ["Statement", "statements_of", "text_of"]

Statement = dict[str, Any]
"""The rule's name under "rule", and its numbers."""

# Formats that miss the best by no more than this are as good, so that the one with fewer bits wins.
_CLOSE_DB = 1.0
# Formats whose bits per value differ by no more than this have as many bits: 8 and 8.25, 4.25 and 4.5.
_CLOSE_BITS = 0.5
# A format without an error counts as this, so that differences are finite.
_EXACT_DB = 400.0
# A share of values, in percent, that is too small to be a reason.
_FEW_PERCENT = 0.1
Roles = Mapping[str, Sequence[Score]]


def statements_of(scores: Sequence[Score]) -> list[Statement]:
    """Return the statements about some scores, the most important first; none if nothing was measured."""
    roles = _comparable(scores)
    if not roles:
        return []
    found = [_overall(roles), _loss(roles)]
    missing = [role for role in ROLES if role not in {one.role for one in scores if one.records}]
    found.append({"rule": "missing", "roles": missing} if missing else None)
    return [one for one in found if one is not None]


def _comparable(scores: Sequence[Score]) -> Roles:
    """Return the scores of each role that cover all of its tensors. Roles of zeros alone tell nothing, so they are left out."""
    told = [one for one in scores if one.records and (one.sqnr_db is not None or one.lost)]
    grouped = groupby(sorted(told, key=lambda one: ROLES.index(one.role)), key=lambda one: one.role)
    found = {}
    for role, group in grouped:
        own = list(group)
        most = max(one.records for one in own)
        found[role] = [one for one in own if one.records == most]
    return found


def _good(scores: Sequence[Score]) -> list[Score]:
    return [one for one in scores if not one.lost and one.sqnr_db is not None]


def _level(score: Score) -> float:
    """The SQNR in dB, without infinities."""
    level = -math.inf if score.sqnr_db is None else score.sqnr_db
    return min(_EXACT_DB, max(-_EXACT_DB, level))


def _labels(roles: Roles) -> list[str]:
    return list(dict.fromkeys(one.label for scores in roles.values() for one in scores))


def _overall(roles: Roles) -> Statement:
    """Name the format of the fewest bits among those that miss the best of no role by more than a dB beyond the least miss."""
    labels = _labels(roles)
    whole = {
        label: own
        for label in labels
        if len(own := [one for scores in roles.values() for one in scores if one.label == label]) == len(roles)
    }
    good = {label: own for label, own in whole.items() if len(_good(own)) == len(roles)}
    if not good:
        return _nobody(whole, len(labels))
    best = {role: max(map(_level, _good(scores))) for role, scores in roles.items()}
    miss = {label: max(best[one.role] - _level(one) for one in own) for label, own in good.items()}
    close = [label for label in good if miss[label] <= min(miss.values()) + _CLOSE_DB]
    chosen = min(close, key=lambda label: (good[label][0].bits, miss[label]))
    kept = min(map(_level, good[chosen]))
    return {
        "rule": "keeps",
        "format": chosen,
        "bits": good[chosen][0].bits,
        "sqnr_db": math.inf if kept == _EXACT_DB else kept,
        "behind_db": miss[chosen] if miss[chosen] < _EXACT_DB / 2 else None,
        "roles": list(roles),
        "alone": len(labels) == 1,
    }


def _nobody(whole: Mapping[str, Sequence[Score]], formats: int) -> Statement:
    if not whole:
        return {"rule": "partial"}
    lost = {label: sum(one.lost for one in own) for label, own in whole.items()}
    least = min(lost, key=lambda label: lost[label])
    if not lost[least]:
        return {"rule": "partial"}
    return {"rule": "all_lose", "format": least, "lost": lost[least], "alone": formats == 1}


def _loss(roles: Roles) -> Statement | None:
    """Name the worst loss: lost values first, then dB against a format of as many bits, then dB against any format."""
    everything = [one for scores in roles.values() for one in scores]
    lossy = [one for one in everything if one.lost]
    if lossy:
        worst = max(lossy, key=lambda one: one.lost / one.count)
        return {**_named("loses_values", worst), "lost": worst.lost, "count": worst.count}
    if len(_labels(roles)) == 1:
        return _uneven(everything)
    peers, others = (_largest(roles, spare) for spare in (_CLOSE_BITS, math.inf))
    if peers is not None and peers["loss_db"] >= _CLOSE_DB:
        return peers
    if others is not None and others["loss_db"] >= _CLOSE_DB:
        return others
    behind = max((one["loss_db"] for one in (peers, others) if one is not None), default=None)
    return None if behind is None else {"rule": "all_close", "behind_db": behind}


def _largest(roles: Roles, spare_bits: float) -> Statement | None:
    """Return the largest loss against the best format of at most so many more bits. Formats without error are no measure."""
    losses = []
    for scores in roles.values():
        finite = [one for one in _good(scores) if one.sqnr_db is not None and one.sqnr_db < math.inf]
        for one in finite:
            peers = {other.label: other for other in finite if other.bits <= one.bits + spare_bits}
            best = peers[str(best_of(peers))]
            losses.append((_level(best) - _level(one), one, best))
    if not losses:
        return None
    loss, worst, best = max(losses, key=lambda each: each[0])
    return {
        **_named("loses_db", worst),
        "loss_db": loss,
        "against": best.label,
        "against_bits": best.bits,
        **_reason(worst, best),
    }


def _uneven(scores: Sequence[Score]) -> Statement | None:
    """Compare the roles under the only format."""
    finite = [one for one in _good(scores) if one.sqnr_db is not None and one.sqnr_db < math.inf]
    best, worst = max(finite, key=_level, default=None), min(finite, key=_level, default=None)
    if best is None or worst is None or _level(best) - _level(worst) < _CLOSE_DB:
        return None
    return {
        **_named("uneven", worst),
        "sqnr_db": worst.sqnr_db,
        "best_role": best.role,
        "best_db": best.sqnr_db,
        **_reason(worst, best),
    }


def _named(rule: str, score: Score) -> Statement:
    return {
        "rule": rule,
        "format": score.label,
        "bits": score.bits,
        "scaled": score.is_scaled,
        "role": score.role,
    }


def _reason(worst: Score, best: Score) -> Statement:
    """Name the share of values by which the worse score differs most: saturated, below the smallest normal value, or zero.

    Values below the smallest normal one are said to become zero if at least half of them do. The share is a fact beside
    the loss; nothing proves that it is the cause.
    """
    shares = {
        "saturation": worst.saturation_percent - best.saturation_percent,
        "flush": worst.flush_percent - best.flush_percent,
    }
    reason = max(shares, key=lambda name: shares[name])
    if shares[reason] < _FEW_PERCENT:
        return {"reason": None, "reason_percent": None}
    if reason == "flush" and 2 * worst.underflow_percent >= worst.flush_percent:
        reason = "underflow"
    return {"reason": reason, "reason_percent": getattr(worst, f"{reason}_percent")}


def text_of(said: Statement) -> str:
    """Return a statement as an English sentence."""
    return _TEXTS[said["rule"]](said)


def _keeps(said: Statement) -> str:
    bits = f"{said['bits']:g} bits a value"
    where = "everywhere" if len(said["roles"]) > 1 else f"of the {said['roles'][0]}"
    if said["sqnr_db"] == math.inf:
        return f"{said['format']} keeps every value exactly {where}, at {bits}."
    kept = f"{said['format']} keeps {_down(said['sqnr_db'])} dB or more {where}"
    if said["alone"]:
        return f"{kept}, at {bits}; no other format was measured."
    if said["behind_db"] is None:
        return f"{kept}, at {bits}."
    if not said["behind_db"]:
        return f"{kept}, and no other format is better, at {bits}."
    return f"{kept}, within {_up(said['behind_db'])} dB of the best, at {bits}."


def _all_lose(said: Statement) -> str:
    if said["alone"]:
        return f"{said['format']} is no choice as it is: it loses values."
    return f"Every format loses values; {said['format']} loses the fewest, {said['lost']:,}."


def _loses_values(said: Statement) -> str:
    lost, count = said["lost"], said["count"]
    return f"{_subject(said)} loses {lost:,} of {count:,} values on {said['role']}: they become Inf or NaN."


def _loses_db(said: Statement) -> str:
    against = said["against"]
    if said["against_bits"] > said["bits"] + _CLOSE_BITS:
        against = f"{against}, at {said['bits']:g} bits instead of {said['against_bits']:g}"
    return f"{_subject(said)} loses {said['loss_db']:.1f} dB on {said['role']} against {against}{_because(said)}."


def _uneven_text(said: Statement) -> str:
    best = f"{said['best_db']:.1f} dB on {said['best_role']}"
    return f"{_subject(said)} keeps {best} and {said['sqnr_db']:.1f} dB on {said['role']}{_because(said)}."


def _missing(said: Statement) -> str:
    roles = said["roles"]
    named = roles[0] if len(roles) == 1 else f"{', '.join(roles[:-1])} or {roles[-1]}"
    return f"No {named} were measured, so nothing is said about them."


_TEXTS = {
    "keeps": _keeps,
    "partial": lambda said: "No format took every tensor, so none is the best of all.",
    "all_lose": _all_lose,
    "loses_values": _loses_values,
    "loses_db": _loses_db,
    "all_close": lambda said: f"No format is more than {_up(said['behind_db'])} dB behind the best anywhere.",
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


def _down(decibels: float) -> str:
    return f"{math.floor(decibels * 10) / 10:.1f}"


def _up(decibels: float) -> str:
    return f"{math.ceil(decibels * 10) / 10:.1f}"
