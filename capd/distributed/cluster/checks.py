"""The checks of a cluster before anything runs on it: versions, the sight of the runs, and the memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from capd.distributed.cluster.workers import facts_here, seen_here
from capd.errors import CapdError, ConfigError
from capd_client.process.text import human_nbytes

__all__ = ["check_memory", "check_sight", "check_versions", "least_limit"]

# The elements, their values as float64, and what a format makes of them.
_COPIES = 6
_PARTIAL_NBYTES = 64 << 20
_NAMED = 3


def check_versions(client: Any) -> None:
    """Raise CapdError unless all workers have our versions. The message has a line for each difference."""
    own = facts_here()
    wrong = [
        f"{address} has {_differences(own, facts)}"
        for address, facts in _everywhere(client, facts_here).items()
        if facts != own
    ]
    if wrong:
        raise CapdError(
            f"workers differ from this process, and results would not be the same: {_some(wrong)}; "
            "install the same versions everywhere"
        )


def check_sight(client: Any, places: Sequence[str]) -> None:
    """Raise CapdError unless all workers see these runs as we do."""
    here = seen_here(places)
    for address, seen in _everywhere(client, seen_here, places).items():
        if not isinstance(seen, dict):
            raise CapdError(f"worker {address} cannot look at the runs: {seen}")
        for place in places:
            one, own = seen[place], here[place]
            if isinstance(one, str):
                raise CapdError(
                    f"worker {address} does not see {place}: {one}; share its file system with all workers"
                )
            if isinstance(own, tuple) and (one[0] != own[0] or one[1] < own[1]):
                raise CapdError(
                    f"worker {address} does not see {place}: it finds run {one[0]} with {one[1]:,} records there, "
                    f"and here it is run {own[0]} with {own[1]:,}"
                )


def check_memory(largest: int, name: str, limit: int | None) -> None:
    """Raise ConfigError if the largest record of a series cannot be measured within the memory of a worker."""
    needed = _COPIES * largest + _PARTIAL_NBYTES
    if limit is not None and needed > limit:
        raise ConfigError(
            f"the largest record of {name}, {human_nbytes(largest)}, needs {human_nbytes(needed)}, and a worker has "
            f"{human_nbytes(limit)}; give --memory-limit {-(-needed >> 20)}MiB or more"
        )


def least_limit(client: Any) -> int | None:
    """Return the least memory limit of a worker, None if none has one."""
    workers = client.scheduler_info()["workers"].values()
    return min((one["memory_limit"] for one in workers if one.get("memory_limit")), default=None)


def _everywhere(client: Any, function: Any, *arguments: Any) -> Mapping[str, Any]:
    """Return what a function returns on each worker, or the text of its error."""
    try:
        found: Mapping[str, Any] = client.run(function, *arguments, on_error="return")
    except Exception as error:
        raise CapdError(
            f"a worker cannot run capd: {error}; install the same capd, with its extra `distributed`, on all workers"
        ) from error
    return {
        address: f"{type(one).__name__}: {one}" if isinstance(one, BaseException) else one
        for address, one in found.items()
    }


def _differences(own: Mapping[str, str], facts: Mapping[str, str] | str) -> str:
    if isinstance(facts, str):
        return f"no usable capd ({facts})"
    return ", ".join(
        f"{name} {facts.get(name, 'missing')} (here {version})"
        for name, version in own.items()
        if facts.get(name) != version
    )


def _some(texts: Sequence[str]) -> str:
    return "; ".join(texts[:_NAMED]) + (f"; and {len(texts) - _NAMED} more" if len(texts) > _NAMED else "")
