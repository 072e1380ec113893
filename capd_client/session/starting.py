"""Makes the session of a process as its environment says, and takes leave of the daemon that it has been with."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Optional, Union

from capd_client.config.settings import load_config
from capd_client.errors import CapdError
from capd_client.planning.session import PlanSession
from capd_client.process.log import Notices, show
from capd_client.session import embedded_daemon
from capd_client.session.session import Session
from capd_client.steps.shared_rules import shared_rules_of

__all__ = ["AnySession", "leave", "make_session"]

AnySession = Union[Session, PlanSession]
"""One that captures, or under `capd plan` one that says what would be captured."""


def make_session(notices: Notices, environ: Optional[Mapping[str, str]] = None) -> Optional[AnySession]:
    """A session as `environ` (default os.environ) says; None where capture is off, or cannot be on, with a warning.

    Raises what it would warn of under CAPD_STRICT=1.
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
    except Exception as error:  # also no thread, or a broken installation: nothing of it ends the job
        notices.warn("start", "capture is off: %s", error if isinstance(error, CapdError) else repr(error))
        if config.strict:
            raise
        return None


def leave(current: AnySession, timeout_s: Optional[float]) -> None:
    """Close the session; the last one with a daemon of the job's own has it seal the run, in the time left."""
    config = current.config
    shared_rules_of(current.context).tell()
    deadline = time.monotonic() + (config.exit_timeout_s if timeout_s is None else timeout_s)
    current.close(timeout_s)
    welcome = current.transport.welcome if isinstance(current, Session) else None
    if config.embedded is not None and config.endpoint is not None and welcome is not None:
        embedded_daemon.settle(config.endpoint, welcome.run_id, deadline - time.monotonic())


def _in_data_worker() -> bool:
    """Whether this is a DataLoader's worker process: it prepares data and is no rank."""
    from torch.utils.data import get_worker_info

    return get_worker_info() is not None
