"""The errors of the client side.

CapdError                 base of every error that capd raises on purpose (`capd.errors` continues the tree)
├── ConfigError           an environment variable, option or capd.toml entry that cannot be used
├── EmbeddedError         the daemon that a job starts for itself did not start
├── ProtocolError         a peer sent something outside the wire protocol
└── ArenaError            the shared memory of a rank could not be created or used

In a training job none of these errors reaches the caller: the public calls of `capd_client` turn them into counted
drops and rate-limited warnings. Only constructors that tools and tests call raise them.
"""

from __future__ import annotations

__all__ = ["COUNTED", "ArenaError", "CapdError", "ConfigError", "EmbeddedError", "ProtocolError"]


class CapdError(Exception):
    """The base of capd's own errors. The message says what happened, where, and what to do next."""


class ConfigError(CapdError):
    """A setting cannot be used. The message names the setting, its origin and the accepted values."""


class ProtocolError(CapdError):
    """A peer broke the wire protocol. Its connection is closed, and nothing else is affected."""


class ArenaError(CapdError):
    """The arena could not be created, sealed or mapped."""


class EmbeddedError(CapdError):
    """The daemon that the job starts for itself cannot be started. The job runs without capture."""


COUNTED = "_capd_counted"
"""An attribute of errors whose capture is counted already: code that they pass must not count it again."""
