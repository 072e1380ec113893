"""The statements of the verdict: each comes from one rule, and has the numbers that its sentence names.

A format is chosen by its weakest role: the SQNR that nine of ten tensors reach there. Formats that lose a value, and
the source's own format, are not chosen. Bits decide between formats that are about equal.
`capd.analyze.verdict.sentences` says a statement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from capd.analyze.verdict.levels import ENOUGH_DB, POOR_DB
from capd.analyze.verdict.roles import JUDGED
from capd.analyze.verdict.score import RoleScores, Score, is_beyond_error

__all__ = ["CLOSE_BITS", "Statement", "chosen_format", "statements_of"]

Statement = dict[str, Any]
"""The rule's name under "rule", and its numbers."""

CLOSE_BITS = 0.5
"""Formats whose bits per value differ by no more than this have as many bits: 8 and 8.25, 4.25 and 4.5."""
# Formats that are behind the best by no more than this are as good, so that the one with fewer bits wins.
_CLOSE_DB = 1.0
# A share of values, in percent, that is too small to be a reason.
_FEW_PERCENT = 0.1
Own = Mapping[str, Score]


def statements_of(roles: Sequence[RoleScores]) -> list[Statement]:
    """Return the statements about the scores of all roles, the most important first; none if nothing was read."""
    judged = [one for one in roles if one.role in JUDGED]
    formats = _formats(judged)
    found = [
        _overall(judged, formats),
        _weak(formats),
        _loss(judged, formats),
        *map(_untaken, judged),
        *map(_zeros, judged),
        _left_out(roles),
        _source(roles),
        _missing(judged),
    ]
    return [one for one in found if one is not None]


def chosen_format(statements: Sequence[Statement]) -> str | None:
    """Return the format that the statements choose, None if there is none."""
    return next((one["format"] for one in statements if one["rule"] == "choice"), None)


def _formats(judged: Sequence[RoleScores]) -> dict[str, Own]:
    """Return the scores of each candidate that took tensors of every role with an SQNR, by role."""
    told = [one for one in judged if any(each.levels is not None or each.lost for each in one.candidates)]
    found: dict[str, dict[str, Score]] = {}
    for role in told:
        for one in role.candidates:
            found.setdefault(one.label, {})[role.role] = one
    return {label: own for label, own in found.items() if len(own) == len(told)}


def _weakest(own: Own) -> tuple[str, Score]:
    """Return the role on which a format keeps least, and its score."""
    return min(own.items(), key=lambda each: each[1].merit_db)


def _least_db(own: Own) -> float:
    return _weakest(own)[1].merit_db


def _whole(formats: Mapping[str, Own]) -> dict[str, Own]:
    return {label: own for label, own in formats.items() if all(one.is_whole for one in own.values())}


def _choice(formats: Mapping[str, Own]) -> str | None:
    """Return the format with the fewest bits among those whose weakest role is about the best, then the best on all."""
    whole = _whole(formats)
    best = max(map(_least_db, whole.values()), default=0.0)
    close = [label for label, own in whole.items() if _least_db(own) >= best - _CLOSE_DB]
    return min(close, key=lambda label: _order(whole[label]), default=None)


def _order(own: Own) -> tuple[float, float]:
    return next(iter(own.values())).bits, -sum(one.merit_db for one in own.values())


def _overall(judged: Sequence[RoleScores], formats: Mapping[str, Own]) -> Statement | None:
    """Name the chosen format, or say why there is none."""
    if not formats:
        return None
    chosen = _choice(formats)
    if chosen is None:
        lost = {label: sum(one.lost for one in own.values()) for label, own in formats.items()}
        least = min(lost, key=lambda label: lost[label])
        return {"rule": "all_lose", "format": least, "lost": lost[least], "alone": len(formats) == 1}
    whole = _whole(formats)
    nearest = max(whole, key=lambda label: _least_db(whole[label]))
    role, weakest = _weakest(whole[nearest])
    if weakest.merit_db < POOR_DB:
        return {"rule": "poor", "format": nearest, "role": role, "sqnr_db": _tenth(weakest)}
    _, own = _weakest(whole[chosen])
    return {
        "rule": "choice",
        "format": chosen,
        "bits": own.bits,
        "sqnr_db": own.merit_db,
        "error_db": _error(own),
        "roles": list(whole[chosen]),
        "others": len(formats) - 1,
        "behind_db": weakest.merit_db - own.merit_db,
        "clear": is_beyond_error(weakest, own),
        "lossy": len(whole) < len(formats),
    }


def _tenth(score: Score) -> float | None:
    return None if score.levels is None else score.levels.tenth_db


def _error(score: Score) -> float | None:
    return None if score.levels is None else score.levels.error_db


def _weak(formats: Mapping[str, Own]) -> Statement | None:
    """Count the tensors that even the chosen format does not keep."""
    chosen = _choice(formats)
    levels = (
        [] if chosen is None else [one.levels for one in formats[chosen].values() if one.levels is not None]
    )
    poor = sum(one.poor for one in levels)
    if not poor or min(one.merit_db for one in levels) < POOR_DB:
        return None
    return {"rule": "weak", "format": chosen, "tensors": poor, "of": sum(one.tensors for one in levels)}


def _loss(judged: Sequence[RoleScores], formats: Mapping[str, Own]) -> Statement | None:
    """Name the worst loss: lost values first, then dB against a format of as many bits, then dB against any format."""
    lossy = [(role.role, one) for role in judged for one in role.candidates if one.lost]
    if lossy:
        role, worst = max(lossy, key=lambda each: each[1].lost / each[1].count)
        return {**_named("loses_values", role, worst), "lost": worst.lost, "count": worst.count}
    if len({one.label for role in judged for one in role.candidates}) == 1:
        return _uneven(formats)
    peers, others = (_largest(judged, spare) for spare in (CLOSE_BITS, math.inf))
    for found in (peers, others):
        if found is not None and found["loss_db"] >= _CLOSE_DB:
            return found
    # A score beyond the cap, or one of a sample, is not known so exactly.
    levels = [one.levels for role in judged for one in role.candidates]
    is_told = all(one is None or (one.error_db == 0 and one.tenth_db <= ENOUGH_DB) for one in levels)
    return {"rule": "all_close", "behind_db": others["loss_db"]} if others is not None and is_told else None


def _largest(judged: Sequence[RoleScores], spare_bits: float) -> Statement | None:
    """Return the largest loss against the best format of at most so many more bits, beyond the error of a sample."""
    losses = []
    for role in judged:
        whole = [one for one in role.candidates if one.is_whole]
        for one in whole:
            peers = [other for other in whole if other.bits <= one.bits + spare_bits]
            best = max(peers, key=lambda other: other.merit_db)
            loss = best.merit_db - one.merit_db
            if not loss or is_beyond_error(one, best):
                losses.append((loss, role.role, one, best))
    if not losses:
        return None
    loss, name, worst, best = max(losses, key=lambda each: each[0])
    return {
        **_named("loses_db", name, worst),
        "loss_db": loss,
        "about": not _error(worst) == _error(best) == 0,
        "against": best.label,
        "against_bits": best.bits,
        **_reason(worst, best),
    }


def _uneven(formats: Mapping[str, Own]) -> Statement | None:
    """Compare the roles under the only format."""
    for own in formats.values():
        role, worst = _weakest(own)
        best_role, best = max(own.items(), key=lambda each: each[1].merit_db)
        if best.merit_db - worst.merit_db >= _CLOSE_DB and is_beyond_error(worst, best):
            return {
                **_named("uneven", role, worst),
                "sqnr_db": worst.merit_db,
                "best_role": best_role,
                "best_db": best.merit_db,
                **_reason(worst, best),
            }
    return None


def _named(rule: str, role: str, score: Score) -> Statement:
    return {"rule": rule, "format": score.label, "bits": score.bits, "scaled": score.is_scaled, "role": role}


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


def _untaken(role: RoleScores) -> Statement | None:
    """Name the format that took the fewest tensors of a role, if one could not take all."""
    fewest = min(role.scores, key=lambda one: one.taken, default=None)
    if fewest is None or fewest.taken == role.tensors:
        return None
    return {
        "rule": "untaken",
        "format": fewest.label,
        "role": role.role,
        "tensors": fewest.taken,
        "of": role.tensors,
    }


def _zeros(role: RoleScores) -> Statement | None:
    if not role.zeros:
        return None
    return {"rule": "zeros", "role": role.role, "tensors": role.zeros, "of": role.tensors}


def _left_out(roles: Sequence[RoleScores]) -> Statement | None:
    left_out = sum(one.left_out for one in roles)
    if not left_out:
        return None
    return {"rule": "not_finite", "records": left_out, "of": sum(one.records for one in roles)}


def _source(roles: Sequence[RoleScores]) -> Statement | None:
    own = dict.fromkeys(score.label for one in roles for score in one.scores if score.is_source)
    return {"rule": "source", "formats": list(own)} if own else None


def _missing(judged: Sequence[RoleScores]) -> Statement | None:
    missing = [role for role in JUDGED if role not in {one.role for one in judged}]
    return {"rule": "missing", "roles": missing} if missing and judged else None
