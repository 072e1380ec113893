"""The socket of the page: a TCP port of this machine, the next free one if it is taken, or a unix socket."""

from __future__ import annotations

import errno
import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path

from capd.errors import ConfigError, EndpointError
from capd.server.net import endpoint

__all__ = ["PageSocket", "listen_on_path", "listen_on_port"]

_TRIES = 64
_BACKLOG = 128
_LAST_PORT = 65535


@dataclass(frozen=True, slots=True)
class PageSocket:
    """A listening socket.

    Attributes:
        host: The host in a link; "" for a unix socket.
        port: The port; 0 for a unix socket.
        is_loopback: Whether only this machine reaches it.
        names: Further names that the header Host may have.
        bound: Set for a unix socket.
    """

    socket: socket.socket
    host: str = ""
    port: int = 0
    is_loopback: bool = True
    names: frozenset[str] = frozenset()
    bound: endpoint.BoundSocket | None = None

    def close(self) -> None:
        """Stop listening, and remove the path of a unix socket."""
        if self.bound is not None:
            self.bound.close()
        self.socket.close()


def listen_on_path(path: Path) -> PageSocket:
    """Listen on a unix socket, which only this user may open.

    Raises:
        StoreBusy: A program listens there.
        EndpointError: The path cannot be used.
    """
    bound = endpoint.bind(endpoint.parse(f"unix:{path}", "--uds"), private=False, option="--uds")
    return PageSocket(bound.socket, bound=bound)


def listen_on_port(host: str, port: int, *, has_token: bool) -> PageSocket:
    """Listen on a port, or on the next free one after it. 0 is any.

    Raises:
        ConfigError: Other machines reach the host, and there is no token file.
        EndpointError: The host is none of this machine, or no port is free.
    """
    family, address = _resolved(host, port)
    ip = ipaddress.ip_address(address.partition("%")[0])
    if not ip.is_loopback and not has_token:
        raise ConfigError(
            f"--host {host} is open to other machines; add --token-file FILE, or stay on 127.0.0.1 and use `ssh -L`"
        )
    last = min(port + _TRIES, _LAST_PORT) if port else 0
    for number in range(port, last + 1):
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((address, number))
            sock.listen(_BACKLOG)
        except OSError as error:
            sock.close()
            if error.errno == errno.EADDRINUSE and number < last:
                continue
            raise EndpointError(
                f"cannot listen on {host}:{number}: {(error.strerror or str(error)).lower()}; choose another --port"
            ) from error
        found = int(sock.getsockname()[1])
        shown = f"[{address}]" if family == socket.AF_INET6 else address
        names = frozenset({host.lower(), f"[{host.lower()}]", shown.lower()})
        return PageSocket(
            sock, socket.gethostname() if ip.is_unspecified else shown, found, ip.is_loopback, names
        )
    raise AssertionError("unreachable: the last port either listens or raises")


def _resolved(host: str, port: int) -> tuple[socket.AddressFamily, str]:
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "this is no name of a host"
        raise EndpointError(
            f"cannot listen on {host}: {why}; name an address of this machine in --host"
        ) from error
    # IPv4 comes first if a name has both, because browsers resolve localhost so.
    family, _, _, _, where = sorted(found, key=lambda item: item[0] != socket.AF_INET)[0]
    return family, str(where[0])
