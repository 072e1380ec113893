"""The listening sockets that a service manager passes (socket activation, sd_listen_fds(3)).

Ranks that connect while the daemon restarts wait in such a socket's queue, because the service manager keeps the
socket open. The daemon never removes its path, because it did not make it.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import MutableMapping
from pathlib import Path

from capd.errors import EndpointError
from capd.server.net.endpoint import BoundSocket

__all__ = ["METRICS", "RANKS", "inherited_sockets", "ranks_socket"]

RANKS = "ranks"
METRICS = "metrics"
"""The names of sockets, as `FileDescriptorName=` in the unit gives them."""
_FIRST = 3
_MAX_SOCKETS = 16
_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
# Names that systemd gives if the unit gives none.
_UNNAMED = ("", "unknown", "stored", "connection")
_WRITE_PATH = "write ListenStream=/run/capd/capd.sock into its .socket unit"
_NAME_IT = f"write FileDescriptorName={RANKS} into its .socket unit"


def inherited_sockets(environ: MutableMapping[str, str] | None = None) -> dict[str, socket.socket]:
    """Return the sockets that the service manager passed to this process, by name; usually none.

    A single socket without a name of capd's is the one of the ranks. The variables are taken out of the environment
    and the descriptors are closed at an exec, so that no child process uses them.

    Raises:
        EndpointError: A socket has no name that capd knows, or two have the same; or their number is none.
    """
    environ = os.environ if environ is None else environ
    pid, fds, names = (environ.pop(name, "") for name in _VARIABLES)
    # The variables of a parent are not meant for this process.
    if pid != str(os.getpid()):
        return {}
    count = next((number for number in range(_MAX_SOCKETS + 1) if str(number) == (fds or "0")), None)
    if count is None:
        # Ranks would wait forever in the queue of a socket that is left out.
        raise EndpointError(
            f"the service manager passed {fds[:20]!r} sockets (LISTEN_FDS), capd takes {RANKS} and {METRICS}; "
            "leave the others out of the .socket unit"
        )
    given = (names.split(":") + [""] * count)[:count]
    found: dict[str, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        for fd, name in enumerate(given, _FIRST):
            try:
                os.set_inheritable(fd, False)
                passed = stack.enter_context(socket.socket(fileno=fd))
            except OSError as error:
                raise EndpointError(
                    f"descriptor {fd} of the service manager is no socket: {error.strerror}"
                ) from error
            alone = len(given) == 1 and (name in _UNNAMED or name.endswith(".socket"))
            known = RANKS if alone else name
            if known not in (RANKS, METRICS):
                raise EndpointError(
                    f"the service manager passed a socket with the name {name!r}, capd knows {RANKS} and {METRICS}; "
                    f"{_NAME_IT}"
                )
            if known in found:
                raise EndpointError(
                    f"the service manager passed two sockets with the name {known}; leave one out"
                )
            found[known] = passed
        stack.pop_all()
    return found


def ranks_socket(passed: socket.socket, endpoint: Path | None) -> BoundSocket:
    """Return the passed socket as the one that ranks connect to.

    Args:
        passed: The socket from the service manager.
        endpoint: The path of a configured endpoint; None if none is configured.

    Raises:
        EndpointError: The socket does not listen on a path, its path is gone, or another endpoint is configured.
    """
    if passed.family != socket.AF_UNIX or passed.type != socket.SOCK_STREAM:
        raise EndpointError(f"the service manager passed a socket that is no unix stream; {_WRITE_PATH}")
    if not passed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        raise EndpointError(
            "the service manager passed a socket that does not listen; set Accept=no in its unit"
        )
    name = passed.getsockname()
    # Abstract sockets have names of bytes, or begin with NUL; they would accept any user.
    if not isinstance(name, str) or not name.startswith("/"):
        raise EndpointError(f"the service manager passed a socket without a path; {_WRITE_PATH}")
    path = Path(name)
    if endpoint is not None and os.path.realpath(endpoint) != os.path.realpath(path):
        raise EndpointError(
            f"the service manager passed unix:{path}, but the endpoint is configured as unix:{endpoint}; "
            "leave --endpoint and CAPD_ENDPOINT out, or change ListenStream="
        )
    try:
        is_there = path.is_socket()
    except PermissionError as error:
        raise EndpointError(
            f"the directory of the socket {path} is closed to uid {os.geteuid()}; set DirectoryMode=0755 in its unit"
        ) from error
    if not is_there:
        raise EndpointError(
            f"the socket {path} is gone from its directory, so no rank can find it; "
            "`systemctl restart capd.socket` makes it again"
        )
    return BoundSocket(passed, path, removed_at_close=False)
