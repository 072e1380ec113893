"""Errors of the client side.

CapdError                 base of everything capd raises on purpose (`capd.errors` continues the tree)
├── ConfigError           an environment variable, option or capd.toml entry that cannot be used
├── EmbeddedError         the daemon that a job starts for itself does not start
├── ProtocolError         a peer sent something outside the wire protocol
└── ArenaError            the shared memory of a rank could not be made or used

Inside a training job none of these reaches the caller: `capd_client.api` turns them into counted drops
and rate-limited warnings. They surface only from constructors used by tools and tests.
"""

from __future__ import annotations

__all__ = ["COUNTED", "ArenaError", "CapdError", "ConfigError", "EmbeddedError", "ProtocolError"]


class CapdError(Exception):
    """Base of capd's own errors; the message says what happened, where, and what to do next."""


class ConfigError(CapdError):
    """A setting that cannot be used; names the setting, its origin and the accepted values."""


class ProtocolError(CapdError):
    """A peer broke the wire protocol; the connection it came on is closed, nothing else suffers."""


class ArenaError(CapdError):
    """The arena could not be created, sealed or mapped."""


class EmbeddedError(CapdError):
    """The daemon that the job was to start cannot be started; the job runs without capture."""


COUNTED = "_capd_counted"
"""An attribute of errors whose capture is counted already: code that they pass must not count it again."""
