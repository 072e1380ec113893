"""The errors of the daemon, the store and the command line.

CapdError (capd_client.errors)
├── ConfigError
├── EndpointError          the socket cannot be bound or found, or does not answer     exit 3 in tools
├── StoreError             the store cannot be opened, read or written                 exit 1
│   ├── StoreBusy          another daemon owns the store root on this node             exit 7
│   ├── StoreFull          out of disk space or over a budget                          exit 6
│   │   └── QuotaReached   over a quota of the run                                     exit 6
│   ├── NotAStore          nothing, a foreign hierarchy, or a newer format             exit 1
│   │   └── RemovedRun     the run was removed; tells when and by whom                 exit 1
│   ├── ObjectStoreError   an object store does not answer, refuses, or lacks an object  exit 1
│   └── DamagedRecord      stored bytes fail their checksum or contradict their frame  exit 4
├── ContradictoryParts     what is said of a tensor's parts does not fit together      exit 2
├── MissingParts           parts of a tensor are missing; tells of which ranks         exit 2
├── NoSuchRecord           a series has no record with this index (an IndexError, too)  exit 1
├── NoSuchSeries           a run has no series with this path (a KeyError, too)         exit 1
└── NothingMatched         a selection is empty                                        exit 5

`exit_code` on each class is the exit code of the command line.
"""

from __future__ import annotations

import errno
from typing import ClassVar

from capd_client.errors import ArenaError, CapdError, ConfigError, ProtocolError

__all__ = [
    "NO_SPACE", "ArenaError", "CapdError", "ConfigError", "ContradictoryParts", "DamagedRecord", "EndpointError",
    "MissingParts", "NoSuchRecord", "NoSuchSeries", "NotAStore", "NothingMatched", "ObjectStoreError", "ProtocolError",
    "QuotaReached", "RemovedRun", "StoreBusy", "StoreError", "StoreFull", "exit_code_of",
]  # fmt: skip

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The error numbers of an OSError for no space."""


class EndpointError(CapdError):
    """The daemon's socket cannot be bound or found, or does not answer; names the path and the remedy."""

    exit_code: ClassVar[int] = 3


class StoreError(CapdError):
    """The store cannot be opened, read or written; names the path. retry: a later attempt may succeed."""

    exit_code: ClassVar[int] = 1

    def __init__(self, *message: object, retry: bool = False) -> None:
        super().__init__(*message)
        self.retry = retry


class StoreBusy(StoreError):
    """Another daemon owns this store root (or socket) on this node; names its pid."""

    exit_code: ClassVar[int] = 7


class StoreFull(StoreError):
    """Writing stopped at max_disk, keep_free or ENOSPC; names the limit."""

    exit_code: ClassVar[int] = 6


class QuotaReached(StoreFull):
    """A record does not fit into a quota of its run; names the quota and the remedy."""


class NotAStore(StoreError):
    """The path holds no capd run, or one of a format this version cannot read."""


class RemovedRun(NotAStore):
    """The run was removed; names the date, the user and the remedy."""


class ObjectStoreError(StoreError):
    """An object store does not answer, refuses, or lacks an object; names the address and the remedy.

    reason: One of `capd.store.objects.failures.REASONS`.
    """

    def __init__(self, *message: object, reason: str = "other", retry: bool = False) -> None:
        super().__init__(*message, retry=retry)
        self.reason = reason


class DamagedRecord(StoreError):
    """Stored bytes fail their checksum or contradict their frame; names series, record and file."""

    exit_code: ClassVar[int] = 4


class ContradictoryParts(CapdError):
    """The placements, sizes or shapes of a tensor's parts do not fit together; names the part and the attribute."""

    exit_code: ClassVar[int] = 2


class MissingParts(CapdError):
    """Parts of a tensor are missing; names their places in the mesh, and their ranks and nodes."""

    exit_code: ClassVar[int] = 2


class NoSuchRecord(CapdError, IndexError):
    """A series has no record with the requested index; names the series and its number of records."""


class NoSuchSeries(CapdError, KeyError):
    """A run has no series of the requested path; names similar ones."""

    # A KeyError would quote the message.
    __str__ = Exception.__str__


class NothingMatched(CapdError):
    """A selection matched nothing; names the selection."""

    exit_code: ClassVar[int] = 5


def exit_code_of(error: CapdError) -> int:
    """Return the command line's exit code for `error` (2 for a ConfigError, 1 if its class has none)."""
    if isinstance(error, ConfigError):
        return 2
    return int(getattr(error, "exit_code", 1))
