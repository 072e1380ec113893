"""The endpoint of the daemon: which path it names, and how its socket is bound and removed.

An endpoint is `unix:PATH`. The default is `$XDG_RUNTIME_DIR/capd/capd.sock`, or `<temporary
directory>/capd-<uid>/capd.sock` if that variable names no directory. The directory of a default endpoint must belong
to the user and be closed to everybody else. The socket has mode 0600. Abstract sockets are never used, because they
accept any user.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from capd.errors import ConfigError, EndpointError, StoreBusy

__all__ = ["MAX_PATH_NBYTES", "BoundSocket", "bind", "default_path", "endpoint_path", "parse"]

# sun_path has 108 bytes; one of them is the terminating NUL.
MAX_PATH_NBYTES = 107
_SCHEME = "unix:"
_BACKLOG = 128
_BIND_WAIT_S = 5.0


def parse(endpoint: str, option: str = "--endpoint") -> Path:
    """Return the absolute socket path that `unix:PATH` names. Messages name `option` as the remedy.

    Raises:
        ConfigError: the scheme is another one, or the path is empty.
        EndpointError: the path is too long for a socket.
    """
    if not endpoint.startswith(_SCHEME) or len(endpoint) == len(_SCHEME) or "\0" in endpoint:
        raise ConfigError(f"endpoint {endpoint!r} is not usable; write unix:/path/to/capd.sock")
    path = Path(os.path.abspath(os.path.expanduser(endpoint[len(_SCHEME) :])))
    length = len(os.fsencode(path))
    if length > MAX_PATH_NBYTES:
        raise EndpointError(
            f"socket path {path} has {length} bytes, unix sockets allow {MAX_PATH_NBYTES}; "
            f"use a shorter one, such as {option} {_SCHEME}{_temporary_path()}"
        )
    return path


def default_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the path where the daemon and the tools meet by default. Nothing is created or checked."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/") and os.path.isdir(runtime):
        return parse(f"{_SCHEME}{runtime}/capd/capd.sock")
    return parse(f"{_SCHEME}{_temporary_path()}")


def endpoint_path(endpoint: str | None, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the socket path of a configured endpoint, or the default path. Raises as `parse` does."""
    return parse(endpoint) if endpoint else default_path(environ)


def _temporary_path() -> Path:
    return Path(tempfile.gettempdir()) / f"capd-{os.getuid()}" / "capd.sock"


class BoundSocket:
    """A listening unix socket and its path; `close` removes the path only if it is still this socket's."""

    def __init__(self, sock: socket.socket, path: Path, *, removed_at_close: bool = True) -> None:
        """Own a socket that listens on `path`. Without `removed_at_close`, another process made the path."""
        self.socket = sock
        self.path = path
        self.removed_at_close = removed_at_close
        self._identity = _identity(path)

    @property
    def endpoint(self) -> str:
        """The value of CAPD_ENDPOINT for a rank."""
        return f"{_SCHEME}{self.path}"

    def unlink(self) -> None:
        """Remove the socket's path, unless another process made it or another socket now has it."""
        with contextlib.suppress(OSError):
            if self.removed_at_close and _identity(self.path) == self._identity:
                os.unlink(self.path)

    def close(self) -> None:
        """Stop listening and remove the path."""
        self.unlink()
        self.socket.close()


def _identity(path: Path) -> tuple[int, int, int]:
    found = os.lstat(path)
    # The time is part of it, because inode numbers are reused at once.
    return found.st_dev, found.st_ino, found.st_mtime_ns


def bind(
    path: Path, *, private: bool, others_allowed: bool = False, option: str = "--endpoint"
) -> BoundSocket:
    """Listen on `path`. A socket that a dead daemon left there is replaced.

    Args:
        path: An absolute path of at most MAX_PATH_NBYTES bytes.
        private: The directory is a default one. It must be the user's own and closed to everybody else.
        others_allowed: Users named by --allow-uid can reach the socket. Its mode is 0666, and a directory created here
            has mode 0711. The uid of each peer is still checked.
        option: The option that messages name as the remedy.

    Returns:
        The socket, already listening.

    Raises:
        StoreBusy: A live daemon listens there.
        EndpointError: The path or its directory cannot be used.
    """
    try:
        _make_directory(path.parent, 0o711 if others_allowed else 0o700)
        if private:
            _check_private(path.parent, 0o022 if others_allowed else 0o077)
        with _directory_lock(path.parent):
            _remove_stale(path, option)
            return _listen(path, 0o666 if others_allowed else 0o600)
    except OSError as error:
        raise EndpointError(
            f"cannot listen on {path}: {error.strerror or error}; choose another {option}"
        ) from error


def _make_directory(directory: Path, mode: int) -> None:
    missing = [directory, *directory.parents]
    missing = missing[: next(at for at, here in enumerate(missing) if here.exists())]
    for here in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(here, 0o700)
            # The umask cuts the mode of mkdir.
            os.chmod(here, mode)


def _check_private(directory: Path, forbidden: int) -> None:
    found = os.lstat(directory)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & forbidden:
        raise EndpointError(
            f"{directory} must be a directory of uid {os.getuid()} that is closed to other users "
            f"(it belongs to uid {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}); "
            f"remove it or choose another --endpoint"
        )


@contextlib.contextmanager
def _directory_lock(directory: Path) -> Iterator[None]:
    # Two daemons that both find a stale socket must not remove each other's new one.
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + _BIND_WAIT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise EndpointError(
                        f"{directory} stays locked by another process that is binding there"
                    ) from None
                time.sleep(0.01)
        yield
    finally:
        os.close(fd)


def _remove_stale(path: Path, option: str) -> None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise EndpointError(f"{path} exists and is not a socket; remove it or choose another {option}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_BIND_WAIT_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except (TimeoutError, BlockingIOError):
            # The socket's queue is full, so a daemon listens.
            pass
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise
            return
    raise StoreBusy(f"another daemon listens on {path}; stop it or choose another {option}")


def _listen(path: Path, mode: int) -> BoundSocket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        before = os.umask(0o177)
        try:
            sock.bind(str(path))
        finally:
            os.umask(before)
        if mode != 0o600:
            os.chmod(path, mode)
        sock.listen(_BACKLOG)
        return BoundSocket(sock, path)
    except BaseException:
        sock.close()
        raise
