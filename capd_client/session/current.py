"""The one session of this process, and the calls of a training script that concern the whole session.

No call raises or waits by default. Without CAPD_ENDPOINT capture is off, and every call returns after one check.
CAPD_STRICT=1 is meant for tests and makes the calls raise errors.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from typing import Any, Optional

from capd_client.errors import ConfigError
from capd_client.inflight.counters import CounterValues
from capd_client.process.accidents import accident
from capd_client.process.dynamo import untraced
from capd_client.process.log import RateLimitedLog
from capd_client.session.starting import AnySession, leave, make_session
from capd_client.steps import checkpointing, optimizer_steps

__all__ = ["close", "counters", "flush", "keep", "running", "session", "session_into", "set_moment"]

_lock = threading.RLock()
# Whether this process knows if it captures.
_resolved = False
_starting = False
# None: capture is off.
_session: Optional[AnySession] = None
# The session that `close` ended, for its counters.
_closed: Optional[AnySession] = None
# Whether this process captures nothing more: it has closed, or was forked from a process that captured.
_over = False
_notices = RateLimitedLog()


def session() -> Optional[AnySession]:
    """Return the session of this process, or None if capture is off or over. The first call starts the session."""
    if _resolved:
        return _session
    return _start()


def _start() -> Optional[AnySession]:
    """Resolve the session once. Captures of other threads wait for it. Captures caused by the start do not wait."""
    global _resolved, _session, _starting
    # First, because a child forked during the start must not inherit a held lock.
    _follow_forks()
    with _lock:
        if _resolved or _starting:
            return _session
        _starting = True
        try:
            _session = _begin()
        finally:
            _resolved, _starting = True, False
        return _session


def session_into(directory: str) -> Optional[AnySession]:
    """Return the session of this process. If no setting says on or off, start one with its own daemon.

    Args:
        directory: The store of that daemon.
    """
    global _session, _starting
    current = session()
    if current is not None or _over or os.environ.get("TENSOR_SAVE_ENABLED"):
        return current
    with _lock:
        if _session is not None or _starting:
            return _session
        _starting = True
        try:
            _session = _begin({**os.environ, "TENSOR_SAVE_ENABLED": "true", "TENSOR_SAVE_DIR": directory})
        finally:
            _starting = False
        return _session


def running() -> Optional[AnySession]:
    """Return the session of this process if it has begun, else None."""
    return _session


def _begin(environ: Optional[Mapping[str, str]] = None) -> Optional[AnySession]:
    made = make_session(_notices, environ)
    if made is not None:
        checkpointing.install()
        optimizer_steps.listen(_optimizer_stepped)
        _close_at_exit()
    return made


@cache
def _close_at_exit() -> None:
    atexit.register(close)


@cache
def _follow_forks() -> None:
    os.register_at_fork(after_in_child=_forked)


def _optimizer_stepped() -> None:
    if _session is not None:
        _session.context.optimizer_stepped()


def _forked() -> None:
    """Turn capture off in a forked child. A child is no rank: it keeps neither socket nor arena of its parent."""
    global _lock, _resolved, _starting, _session, _closed, _over
    # A thread that does not exist here may hold the parent's lock.
    _lock = threading.RLock()
    _over = _over or _starting
    _resolved, _starting = _resolved or _starting, False
    forked, _session, _closed = _session, None, None
    if forked is not None:
        _over = True
        forked.forked()


@untraced
def set_moment(**values: Any) -> None:
    """Set the position of the job: iteration, micro_batch, sample_idx, batch_idx, sequence_idx.

    A set value replaces the automatic count and stays until it is set again. A new iteration restarts the
    micro-batches at 0. Values that cannot be used are ignored with one warning.

    Args:
        **values: An int for each field to set, or None to unset it.
    """
    current = session()
    if current is None:
        return
    try:
        current.context.set_moment(**values)
    except ConfigError as error:
        _notices.warn("set_moment", "%s; the moment stays as it was", error)
        if current.config.strict:
            raise


def flush(timeout_s: float = 30.0) -> bool:
    """Wait until all captures until now are committed or dropped.

    If no daemon was ever reached, the call does not wait.

    Args:
        timeout_s: The longest time to wait.

    Returns:
        False if the time is up before, or if anything was captured and no daemon was ever reached.
    """
    current = _session
    return True if current is None else current.flush(timeout_s)


@untraced
def keep(reason: str = "") -> None:
    """Ask the daemon's flight recorder to keep the last iterations of all ranks, and some that follow.

    The call returns at once. The last `[window] iterations` up to the present one are stored with this reason in their
    metadata, and the next `[window] post` when they come. Without a recorder, every capture is stored anyway. If
    capture is off, the call does nothing. An exception that ends the job does the same by itself.

    Args:
        reason: A few words, such as "loss spike". At most 200 characters are stored.
    """
    current = _session
    if current is None:
        return
    try:
        current.keep(reason)
    except Exception as error:
        # Nothing that goes wrong here may end the job.
        _notices.warn("keep", "keep failed: %s: %s", type(error).__name__, error)
        if current.config.strict:
            raise


def close(timeout_s: Optional[float] = None) -> None:
    """Flush, take leave of the daemon, and stop capturing in this process. Runs automatically at exit.

    If an exception ends the job, the daemon's flight recorder keeps the last iterations, with its class as the reason.

    Args:
        timeout_s: The longest time to wait, default CAPD_EXIT_TIMEOUT_S (30). Without a daemon the call does not wait.
    """
    global _resolved, _session, _closed, _over
    with _lock:
        current, _session = _session, None
        _resolved = _over = True
        if current is not None:
            _closed = current
            checkpointing.uninstall()
            optimizer_steps.forget(_optimizer_stepped)
    if current is not None:
        try:
            if (reason := accident()) is not None:
                current.keep(reason)
            leave(current, timeout_s)
        except Exception as error:
            _notices.warn("close", "closing failed: %s: %s", type(error).__name__, error)
            if current.config.strict:
                raise


def counters() -> dict[str, Any]:
    """Return the counters of this process: offered, committed, in_flight, dropped (reason → count).

    offered = committed + in_flight + all dropped. All are zero if capture is off, and final after `close`.
    """
    current = _session or _closed
    return asdict(CounterValues(0, 0, 0, {}) if current is None else current.snapshot())
