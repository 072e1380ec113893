"""The statements of the verdict: each comes from one rule, and has the numbers that its sentence names.

Only formats that measured every tensor of a role are compared there. Only formats that lost no value are called good.
`capd.analyze.verdict.sentences` says a statement in English, the report's page in the reader's language.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from capd.analyze.verdict.roles import ROLES
from capd.analyze.verdict.score import Score, best_of

__all__ = ["CLOSE_BITS", "Statement", "statements_of"]

Statement = dict[str, Any]
"""The rule's name under "rule", and its numbers."""

CLOSE_BITS = 0.5
"""Formats whose bits per value differ by no more than this have as many bits: 8 and 8.25, 4.25 and 4.5."""
# Formats that miss the best by no more than this are as good, so that the one with fewer bits wins.
_CLOSE_DB = 1.0
# A format without an error counts as this, so that differences are finite.
_EXACT_DB = 400.0
# A share of values, in percent, that is too small to be a reason.
_FEW_PERCENT = 0.1
Roles = Mapping[str, Sequence[Score]]


def statements_of(scores: Sequence[Score]) -> list[Statement]:
    """Return the statements about some scores, the most important first; none if nothing was measured."""
    measured = [one for one in scores if one.records]
    roles = _comparable(measured)
    if not roles:
        return []
    formats = list(dict.fromkeys(one.label for one in measured))
    fewer = [label for label in formats if not all(label in map(_label, own) for own in roles.values())]
    missing = [role for role in ROLES if role not in {one.role for one in measured}]
    found = [
        _overall(roles, formats),
        _loss(roles, formats),
        {"rule": "fewer", "formats": fewer} if fewer else None,
        {"rule": "missing", "roles": missing} if missing else None,
    ]
    return [one for one in found if one is not None]


def _comparable(measured: Sequence[Score]) -> Roles:
    """Return the scores of each role that cover all of its tensors, without roles of zeros alone."""
    told = [one for one in measured if one.sqnr_db is not None or one.lost]
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


def _label(score: Score) -> str:
    return score.label


def _overall(roles: Roles, formats: Sequence[str]) -> Statement:
    """Name the format with the fewest bits among those that are about as near to the best of each role as any.

    A format's miss is its largest distance to the best format of a role, in dB. A miss within 1 dB of the least one is
    as good.
    """
    whole = {
        label: own
        for label in formats
        if len(own := [one for scores in roles.values() for one in scores if one.label == label])
        == len(roles)
    }
    good = {label: own for label, own in whole.items() if len(_good(own)) == len(roles)}
    if not good:
        return _nobody(whole, len(formats))
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
        "alone": len(formats) == 1,
        "lossy": any(one.lost for scores in roles.values() for one in scores),
    }


def _nobody(whole: Mapping[str, Sequence[Score]], formats: int) -> Statement:
    if len(whole) < formats:
        return {"rule": "partial"}
    lost = {label: sum(one.lost for one in own) for label, own in whole.items()}
    least = min(lost, key=lambda label: lost[label])
    return {"rule": "all_lose", "format": least, "lost": lost[least], "alone": formats == 1}


def _loss(roles: Roles, formats: Sequence[str]) -> Statement | None:
    """Name the worst loss: lost values first, then dB against a format of as many bits, then dB against any format."""
    everything = [one for scores in roles.values() for one in scores]
    lossy = [one for one in everything if one.lost]
    if lossy:
        worst = max(lossy, key=lambda one: one.lost / one.count)
        return {**_named("loses_values", worst), "lost": worst.lost, "count": worst.count}
    if len(formats) == 1:
        return _uneven(everything)
    peers, others = (_largest(roles, spare) for spare in (CLOSE_BITS, math.inf))
    if peers is not None and peers["loss_db"] >= _CLOSE_DB:
        return peers
    if others is not None and others["loss_db"] >= _CLOSE_DB:
        return others
    is_told = all(map(_is_finite, everything)) and len(everything) == len(formats) * len(roles)
    return {"rule": "all_close", "behind_db": others["loss_db"]} if others is not None and is_told else None


def _is_finite(score: Score) -> bool:
    return score.sqnr_db is not None and math.isfinite(score.sqnr_db)


def _largest(roles: Roles, spare_bits: float) -> Statement | None:
    """Return the largest loss against the best format of at most so many more bits.

    A format without an error is no measure, so it is left out.
    """
    losses = []
    for scores in roles.values():
        finite = list(filter(_is_finite, _good(scores)))
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
    finite = list(filter(_is_finite, _good(scores)))
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
    """Name the share of values by which the worse score differs most from the better one.

    The shares are: saturated, below the smallest normal value, and zero.

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
