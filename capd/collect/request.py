"""The request of a collection run: mode, quant types, micro-batches and end. It is checked before the start."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from capd.errors import ConfigError
from capd_client.config.settings import check_setting
from capd_client.protocol.quota import parse_quota

__all__ = ["MODES", "CollectionMode", "CollectionRequest", "Until", "make_request", "parse_duration"]

CollectionMode = Literal["single", "batch", "quick"]
Until = Literal["complete", "stable"]

MODES: tuple[str, ...] = get_args(CollectionMode)
DEFAULT_TYPE = "mxfp8"
BATCH_TYPES = ("bf16", "mxfp8", "mxfp4", "hifp8")
MAX_TYPES = 64

_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)(s|m|h|)")
_SECONDS = {"s": 1, "": 1, "m": 60, "h": 3600}


@dataclass(frozen=True)
class CollectionRequest:
    """The request of one collection run.

    Attributes:
        micro_batches: The micro-batches to keep of each type in total, 0 for all.
        per_iteration: The most micro-batches to keep of one iteration.
        stable_for_s: The time without a new record after which a collection is stable.
        timeout_s: The longest time of each type's job, 0 for no limit.
    """

    mode: CollectionMode
    types: tuple[str, ...]
    micro_batches: int
    per_iteration: int
    until: Until
    stable_for_s: float
    timeout_s: float

    @property
    def quota(self) -> str:
        """The numbers of micro-batches as the job's CAPD_COLLECT."""
        return f"{self.micro_batches or 'all'}/{self.per_iteration}"


def make_request(
    mode: str,
    quant_type: str | None,
    micro_batches: int | None,
    per_iteration: int | None,
    *,
    until: str | None,
    stable_for: str | None,
    timeout: str | None,
) -> CollectionRequest:
    """Return the request that these options make. An option that was not given is None.

    Raises:
        ConfigError: If an option cannot be used. The message names it.
    """
    if mode not in MODES:
        raise ConfigError(f"--mode: {mode!r} is no collection; they are {', '.join(MODES)}")
    kept, most = (1 if number is None else number for number in (micro_batches, per_iteration))
    if mode == "quick" and (kept, most) != (1, 1):
        raise ConfigError(
            "--mode quick keeps one micro-batch; take --mode single for --control-iter and more"
        )
    if until not in (None, "complete", "stable"):
        raise ConfigError(f"--until: {until!r} is not supported; supported: complete, stable")
    request = CollectionRequest(
        mode=mode,  # type: ignore[arg-type] # one of MODES
        types=_types(mode, quant_type),
        micro_batches=kept,
        per_iteration=most,
        until="stable" if until == "stable" else "complete",
        stable_for_s=parse_duration("--stable-for", stable_for or "60s"),
        timeout_s=parse_duration("--timeout", timeout or "15m"),
    )
    try:
        parse_quota(request.quota)
    except ConfigError:
        raise ConfigError(
            f"--control-iter {kept} --collect-micro-batches {most}: the first is a number of micro-batches or 0 "
            "for all, the second at least 1"
        ) from None
    return request


def _types(mode: str, text: str | None) -> tuple[str, ...]:
    if text is None:
        return BATCH_TYPES if mode == "batch" else (DEFAULT_TYPE,)
    types = tuple(name.strip() for name in text.split(","))
    try:
        for name in types:
            check_setting("quant_type", name)
    except ConfigError as error:
        raise ConfigError(f"--quant-type: {error}") from None
    if not all(name.isprintable() for name in types):
        raise ConfigError("--quant-type: a name has printable characters only")
    if len(set(types)) != len(types) or len(types) > MAX_TYPES:
        raise ConfigError(f"--quant-type: up to {MAX_TYPES} different names, not {text[:200]!r}")
    if mode != "batch" and len(types) > 1:
        raise ConfigError(
            f"--quant-type: --mode {mode} collects one type; take --mode batch for {text[:200]}"
        )
    return types


def parse_duration(option: str, text: str) -> float:
    """Return the seconds of an option's "90", "60s", "15m" or "1.5h". Raises ConfigError for any other text."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{option}: {text[:80]!r} is not a time; write 60s, 15m or 1.5h")
    return float(match[1]) * _SECONDS[match[2]]
