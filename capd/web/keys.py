"""The keys of the page: the token in the printed link, and the cookie that a browser gets for it.

Without a token file, a link works once, and using it makes the next one. So a link that a history or a list of
processes shows is worthless once its browser is in.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from capd.errors import ConfigError
from capd.server.metrics.access import read_token

__all__ = ["Keys", "token_of"]

_NBYTES = 32
_OPTION = "--token-file"


class Keys:
    """The token that opens the page, and the secret in the cookie.

    Attributes:
        is_fixed: Whether the token comes from a file. It then opens the page any number of times.
    """

    def __init__(self, fixed: bytes | None = None, renewed: Callable[[str], None] | None = None) -> None:
        """Make the keys.

        Args:
            fixed: The token of a token file; None for links that work once.
            renewed: Called with the next token after one was used.
        """
        self.is_fixed = fixed is not None
        self._renewed = renewed
        self._token = fixed or _made()
        # With a token file, a browser stays in when the page starts again.
        self._cookie = (
            _made()
            if fixed is None
            else hmac.new(fixed, b"capd web cookie", hashlib.sha256).hexdigest().encode()
        )

    @property
    def token(self) -> str:
        """The token of the next link."""
        return self._token.decode()

    @property
    def cookie(self) -> str:
        """The value of the cookie."""
        return self._cookie.decode()

    def redeem(self, token: str) -> bool:
        """Return whether this is the token. One that is not from a file is used up by this."""
        if not hmac.compare_digest(token.encode(errors="replace"), self._token):
            return False
        if not self.is_fixed:
            self._token = _made()
            if self._renewed is not None:
                self._renewed(self.token)
        return True

    def knows(self, cookie: str) -> bool:
        """Return whether this is the value of the cookie."""
        return hmac.compare_digest(cookie.encode(errors="replace"), self._cookie)


def _made() -> bytes:
    return secrets.token_urlsafe(_NBYTES).encode()


def token_of(path: Path) -> bytes:
    """Return the token in a file. If there is no file, it is made, with a new token and mode 0600.

    Raises:
        ConfigError: Others can read the file, it belongs to somebody else, it holds no token, or it cannot be made.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return read_token(path, _OPTION)
    except OSError as error:
        raise ConfigError(
            f"cannot make the token file {path}: {(error.strerror or str(error)).lower()}; name another {_OPTION}"
        ) from error
    with os.fdopen(fd, "wb") as file:
        file.write(_made() + b"\n")
    return read_token(path, _OPTION)
