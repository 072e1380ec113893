"""Who may read the metrics: the address that is listened on, the token, and the Host that a browser must name."""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
import socket
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from capd.errors import ConfigError, EndpointError
from capd.server.net import endpoint

__all__ = ["Access", "Listening", "adopt", "listen", "read_token"]

_UNIX = "unix:"
_OVER_IP = (socket.AF_INET, socket.AF_INET6)
_BACKLOG = 128
_TOKEN_NBYTES = (16, 1024)
_OTHERS = 0o077
# A secret that root mounts for a group, as Kubernetes does, is meant for this group.
_OTHERS_OF_ROOT = 0o037


@dataclass(frozen=True, slots=True)
class Access:
    """The checks of a request.

    Attributes:
        token: The token that `/metrics` demands; None for none.
        hosts: The names that the header Host may have; None for any. A page of another site that a browser on this
            machine shows cannot read loopback addresses by a name of its own then.
    """

    token: bytes | None = None
    hosts: frozenset[str] | None = None

    def knows_host(self, headers: Mapping[str, str]) -> bool:
        """Return whether the request names this server."""
        if self.hosts is None or "host" not in headers:
            return self.hosts is None
        return re.sub(r":\d*$", "", headers["host"]).lower() in self.hosts

    def knows_token(self, headers: Mapping[str, str]) -> bool:
        """Return whether the request has the token, if one is demanded."""
        if self.token is None:
            return True
        scheme, _, given = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self.token)


@dataclass(frozen=True, slots=True)
class Listening:
    """A listening socket, its address for people, and who may use it. path: set for a unix socket."""

    socket: socket.socket
    address: str
    access: Access
    bound: endpoint.BoundSocket | None = None

    def close(self) -> None:
        """Stop listening, and remove the path of a unix socket."""
        if self.bound is not None:
            self.bound.close()
        self.socket.close()


def listen(address: str, token_file: Path | None) -> Listening:
    """Listen on `unix:PATH` or `HOST:PORT`.

    Raises:
        ConfigError: The host is not loopback and there is no token, or the token file cannot be used.
        EndpointError: The address cannot be used, for example because it is taken.
        StoreBusy: A program listens on the path.
    """
    token = None if token_file is None else read_token(token_file)
    if address.startswith(_UNIX):
        bound = endpoint.bind(endpoint.parse(address, "--metrics"), private=False, option="--metrics")
        return Listening(bound.socket, bound.endpoint, Access(token), bound)
    host, port = address.rpartition(":")[::2]
    family, where = _resolve(host.strip("[]"), int(port), address)
    access = _access_over_ip(where[0], host, address, token)
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(where)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise EndpointError(
            f"cannot serve metrics on {address}: {(error.strerror or str(error)).lower()}; "
            f"stop the program that listens there, or choose another --metrics"
        ) from error
    return Listening(sock, _url(sock), access)


def adopt(sock: socket.socket, token_file: Path | None) -> Listening:
    """Use a socket that a service manager passed. Its path, if it has one, stays at the end.

    Raises:
        ConfigError: The socket is open to other machines and there is no token, or the token file cannot be used.
        EndpointError: Nobody can scrape the socket, or it is an abstract one.
    """
    _check_passed(sock)
    token = None if token_file is None else read_token(token_file)
    if sock.family == socket.AF_UNIX:
        return Listening(sock, f"{_UNIX}{sock.getsockname()}", Access(token))
    host = str(sock.getsockname()[0])
    return Listening(sock, _url(sock), _access_over_ip(host, host, _url(sock), token))


def _check_passed(sock: socket.socket) -> None:
    problem = ""
    if sock.type != socket.SOCK_STREAM or sock.family not in (*_OVER_IP, socket.AF_UNIX):
        problem = "is no unix or TCP stream"
    elif not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        problem = "does not listen"
    # Abstract sockets have names of bytes, or begin with NUL; they would accept any user.
    elif sock.family == socket.AF_UNIX and not str(sock.getsockname()).startswith("/"):
        problem = "has no path"
    if problem:
        raise EndpointError(
            f"the service manager passed a socket for metrics that {problem}; "
            f"write ListenStream=/run/capd/metrics.sock and Accept=no into its .socket unit"
        )


def _access_over_ip(ip: str, host: str, address: str, token: bytes | None) -> Access:
    """Return the checks for an address of IP. Raises ConfigError if it needs a token."""
    is_loopback = ipaddress.ip_address(ip.partition("%")[0]).is_loopback
    if not is_loopback and token is None:
        raise ConfigError(
            f"the metrics on {address} are open to other machines; add --metrics-token-file FILE, "
            f"or choose --metrics 127.0.0.1:PORT or unix:PATH"
        )
    if token is not None:
        return Access(token)
    return Access(
        None, frozenset({"localhost", "127.0.0.1", "[::1]", host.lower(), ip.lower(), f"[{ip.lower()}]"})
    )


def _url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://{f'[{host}]' if sock.family == socket.AF_INET6 else host}:{port}/metrics"


def _resolve(host: str, port: int, address: str) -> tuple[socket.AddressFamily, tuple[str, int]]:
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        # Python refuses names such as `..` before the resolver sees them.
        why = error.strerror if isinstance(error, OSError) else "this is no name of a host"
        raise EndpointError(
            f"cannot serve metrics on {address}: {why}; name an address of this machine in --metrics"
        ) from error
    # IPv4 comes first if a name has both, because Prometheus resolves localhost so.
    family, _, _, _, where = sorted(found, key=lambda item: item[0] != socket.AF_INET)[0]
    return family, (str(where[0]), port)


def read_token(path: Path, option: str = "--metrics-token-file") -> bytes:
    """Return the token in a file: one line of 16 to 1024 visible ASCII characters.

    Args:
        path: The file.
        option: The option that messages name as the remedy.

    Raises:
        ConfigError: Others can read the file, it belongs to somebody else, or its content is no token.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(
            f"cannot read the token file {path}: {(error.strerror or str(error)).lower()}; "
            f"make one with `umask 077; openssl rand -hex 32 > {path}`"
        ) from error
    try:
        found = os.fstat(fd)
        forbidden = _OTHERS_OF_ROOT if found.st_uid == 0 != os.getuid() else _OTHERS
        if not stat.S_ISREG(found.st_mode) or found.st_uid not in (0, os.getuid()):
            raise ConfigError(
                f"the token file {path} is no file of uid {os.getuid()}; make one with "
                f"`umask 077; openssl rand -hex 32 > FILE`, and name it in {option}"
            )
        if found.st_mode & forbidden:
            raise ConfigError(
                f"others can read or write the token file {path} (mode {stat.S_IMODE(found.st_mode):04o}); "
                f"run `chmod 600 {path}`, and use a new token if others may have read it"
            )
        token = os.read(fd, _TOKEN_NBYTES[1] + 3).rstrip(b"\r\n")
    finally:
        os.close(fd)
    if not _TOKEN_NBYTES[0] <= len(token) <= _TOKEN_NBYTES[1] or not re.fullmatch(rb"[\x21-\x7e]+", token):
        raise ConfigError(
            f"the token file {path} must hold one line of {_TOKEN_NBYTES[0]} to {_TOKEN_NBYTES[1]} visible ASCII "
            f"characters; make one with `umask 077; openssl rand -hex 32 > FILE`"
        )
    return token
