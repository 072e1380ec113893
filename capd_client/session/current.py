"""The one session of this process, and the calls of a training script that concern it as a whole.

No call raises or waits by default. Off (no CAPD_ENDPOINT) every call returns after one check. Under CAPD_STRICT=1,
meant for tests, errors are raised.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Mapping
from typing import Any, Optional

from capd_client.errors import ConfigError
from capd_client.process.dynamo import untraced
from capd_client.process.log import Notices
from capd_client.session.starting import AnySession, leave, make_session
from capd_client.steps import checkpointing, optimizer_steps

__all__ = ["close", "counters", "flush", "running", "session", "session_into", "set_moment"]

_lock = threading.RLock()
_resolved = False  # whether this process knows if it captures
_starting = False
_session: Optional[AnySession] = None  # None: off
_closed: Optional[AnySession] = None  # the session that `close` ended, for its counters
_over = False  # nothing more is captured in this process: it has closed, or is forked from one that captured
_notices = Notices()
_handlers_registered = False
_fork_handler_registered = False


def session() -> Optional[AnySession]:
    """The session of this process, started at the first call; None when capture is off, or over."""
    if _resolved:
        return _session
    return _start()


def _start() -> Optional[AnySession]:
    """Resolve the session, once; other threads' captures wait for it, those that starting itself causes do not."""
    global _resolved, _session, _starting
    _register_fork_handler()  # first: a child forked meanwhile must not inherit the lock as it is
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
    """The session of this process; where nothing says on or off, one of a daemon of its own on `directory`."""
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
    """The session of this process if it has begun."""
    return _session


def _begin(environ: Optional[Mapping[str, str]] = None) -> Optional[AnySession]:
    made = make_session(_notices, environ)
    if made is not None:
        checkpointing.install()
        optimizer_steps.listen(_optimizer_stepped)
        _register_handlers()
    return made


def _register_handlers() -> None:
    global _handlers_registered
    if _handlers_registered:
        return
    _handlers_registered = True
    atexit.register(close)


def _register_fork_handler() -> None:
    global _fork_handler_registered
    if not _fork_handler_registered:
        _fork_handler_registered = True
        os.register_at_fork(after_in_child=_forked)


def _optimizer_stepped() -> None:
    if _session is not None:
        _session.context.optimizer_stepped()


def _forked() -> None:
    """A forked child is no rank: it holds neither socket nor arena of its parent, and captures nothing."""
    global _lock, _resolved, _starting, _session, _closed, _over
    _lock = threading.RLock()  # the parent's may be held by a thread that does not exist here
    _over = _over or _starting
    _resolved, _starting = _resolved or _starting, False
    forked, _session, _closed = _session, None, None
    if forked is not None:
        _over = True
        forked.forked()


@untraced
def set_moment(**values: Any) -> None:
    """Say where the job is: iteration, micro_batch, sample_idx, batch_idx, sequence_idx (ints, or None to unset).

    What is set wins over the automatic count and stays until it is set again; a new iteration restarts the
    micro-batches at 0. Values that cannot be used are ignored with one warning.
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
    """Wait until everything captured before is committed (or dropped); False when `timeout_s` is up before.

    Where no daemon was ever reached it does not wait, and is False if anything was captured.
    """
    current = _session
    return True if current is None else current.flush(timeout_s)


def close(timeout_s: Optional[float] = None) -> None:
    """Flush, say goodbye to the daemon, and stop capturing in this process. Runs by itself at exit.

    timeout_s: longest time to wait, default CAPD_EXIT_TIMEOUT_S (30); without a daemon it does not wait.
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
            leave(current, timeout_s)
        except Exception as error:
            _notices.warn("close", "closing failed: %s: %s", type(error).__name__, error)
            if current.config.strict:
                raise


def counters() -> dict[str, Any]:
    """What became of the captures of this process: offered, committed, in_flight, dropped (reason → count).

    offered = committed + in_flight + all dropped. Zeros when capture is off; final after `close`.
    """
    current = _session or _closed
    if current is None:
        return {"offered": 0, "committed": 0, "in_flight": 0, "dropped": {}}
    now = current.snapshot()
    return {
        "offered": now.offered,
        "committed": now.committed,
        "in_flight": now.in_flight,
        "dropped": now.dropped,
    }
