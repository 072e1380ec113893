"""The metrics as a file for the textfile collector of node_exporter, replaced as a whole every few seconds."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from capd.errors import ConfigError, EndpointError, StoreBusy

__all__ = ["TextFile"]

logger = logging.getLogger(__name__)

INTERVAL_S = 15.0
_STOP_S = 2.0
# node_exporter reads no other names.
_SUFFIX = ".prom"
_FIRST_BYTES = b"# HELP capd_"
# node_exporter runs as another user. The directory decides who may read.
_MODE = 0o644


class TextFile:
    """The file and the thread that writes it. A file of a daemon that was killed stays, and its age shows that."""

    def __init__(self, path: Path) -> None:
        """Claim the path. Nothing is written yet.

        Raises:
            ConfigError: The name does not end in `.prom`, or another file is there.
            EndpointError: The directory cannot be written.
            StoreBusy: Another daemon writes this file.
        """
        self._path = path.absolute()
        if self._path.suffix != _SUFFIX:
            raise ConfigError(
                f"--metrics-file {path} must end in {_SUFFIX}; node_exporter reads nothing else"
            )
        self._lock_path = self._path.with_name(f".{self._path.name}.lock")
        self._lock = self._claim()
        try:
            self._check_content()
        except BaseException:
            self._release()
            raise
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._failed = False

    def start(self, page: Callable[[], bytes]) -> None:
        """Write the page now and every INTERVAL_S."""
        self._thread = threading.Thread(target=self._run, args=(page,), name="capd-metrics-file", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and remove the file, so that nobody takes old figures for new ones."""
        self._stop.set()
        if self._thread is not None:
            # A page that a dead file system holds up is not waited for.
            self._thread.join(_STOP_S)
            with contextlib.suppress(OSError):
                self._path.unlink()
        self._release()

    def unlink(self) -> None:
        """Remove the file, for a process that ends at once."""
        for path in (self._path, self._lock_path):
            with contextlib.suppress(OSError):
                path.unlink()

    def _run(self, page: Callable[[], bytes]) -> None:
        self._write(page)
        while not self._stop.wait(INTERVAL_S):
            self._write(page)

    def _write(self, page: Callable[[], bytes]) -> None:
        # The lock makes it ours alone.
        new = self._path.with_name(f".{self._path.name}.new")
        try:
            content = page()
            if self._stop.is_set():
                return
            # A pipe that somebody put there would never open, and a link could be to any file.
            new.unlink(missing_ok=True)
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
            with open(fd, "wb") as file:
                os.fchmod(fd, _MODE)
                file.write(content)
            new.rename(self._path)
            self._failed = False
        except Exception as error:
            # This is the outermost loop of the thread. The next attempt may succeed.
            with contextlib.suppress(OSError):
                new.unlink()
            if not self._failed:
                self._failed = True
                expected = isinstance(error, OSError)
                logger.error("cannot write %s, retrying: %s", self._path, error, exc_info=not expected)

    def _claim(self) -> int:
        """Return a locked descriptor of the lock file. The lock ends with the process."""
        while True:
            try:
                fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise EndpointError(
                    f"cannot write in {self._path.parent}: {(error.strerror or str(error)).lower()}; "
                    f"choose another --metrics-file"
                ) from error
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                raise StoreBusy(
                    f"another daemon writes {self._path}; give each daemon a --metrics-file of its own"
                ) from None
            if _is_at(fd, self._lock_path):
                return fd
            # Its daemon removed it in the meantime.
            os.close(fd)

    def _check_content(self) -> None:
        """Refuse to replace a file that no daemon wrote."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigError(self._foreign(str(error.strerror))) from error
        with open(fd, "rb") as file:
            if file.read(len(_FIRST_BYTES)) != _FIRST_BYTES:
                raise ConfigError(self._foreign("it was not written by capd"))

    def _foreign(self, why: str) -> str:
        return f"{self._path} is not replaced: {why.lower()}; remove it or choose another --metrics-file"

    def _release(self) -> None:
        with contextlib.suppress(OSError):
            self._lock_path.unlink()
        os.close(self._lock)


def _is_at(fd: int, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), os.stat(path))
    return False
