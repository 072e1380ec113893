"""The start and the end of a process's session: makes it from the environment, and takes leave of the daemon."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Optional, Union

from capd_client.config.settings import load_config
from capd_client.errors import CapdError
from capd_client.planning.session import PlanSession
from capd_client.process.log import RateLimitedLog, show
from capd_client.session import embedded_daemon
from capd_client.session.session import Session
from capd_client.steps.shared_rules import shared_rules_of

__all__ = ["AnySession", "leave", "make_session"]

AnySession = Union[Session, PlanSession]
"""A session that captures, or under `capd plan` one that only counts."""


def make_session(
    notices: RateLimitedLog, environ: Optional[Mapping[str, str]] = None
) -> Optional[AnySession]:
    """Return a session for the settings of `environ` (default os.environ), or None if capture is off.

    An error turns capture off, with a warning. Under CAPD_STRICT=1 the error is raised.
    """
    config = load_config() if environ is None else load_config(environ)
    if config.log is not None:
        show(config.log)
    if not config.enabled or _in_data_worker():
        return None
    try:
        if config.plan is not None:
            return PlanSession(config)
        return Session(config if config.embedded is None else embedded_daemon.provide(config, notices))
    except Exception as error:
        # No error may end the job, neither a missing thread nor a broken installation.
        notices.warn("start", "capture is off: %s", error if isinstance(error, CapdError) else repr(error))
        if config.strict:
            raise
        return None


def leave(current: AnySession, timeout_s: Optional[float]) -> None:
    """Close the session. The last session of a daemon that the job started has it seal the run, in the time left."""
    config = current.config
    shared_rules_of(current.context).report()
    deadline = time.monotonic() + (config.exit_timeout_s if timeout_s is None else timeout_s)
    current.close(timeout_s)
    welcome = current.transport.welcome if isinstance(current, Session) else None
    if config.embedded is not None and config.endpoint is not None and welcome is not None:
        embedded_daemon.settle(config.endpoint, welcome.run_id, deadline - time.monotonic())


def _in_data_worker() -> bool:
    """Return whether this is a worker process of a DataLoader, which prepares data and is no rank."""
    from torch.utils.data import get_worker_info

    return get_worker_info() is not None
