"""The users of peers: whether a uid may connect, and why not.

The kernel reports a peer's uid in the daemon's user namespace. A uid without a mapping there is reported as the
overflow uid, 65534, whoever it is. That number therefore never admits anybody where uids can be unmapped.
"""

from __future__ import annotations

from pathlib import Path

from capd.errors import ConfigError

__all__ = ["AllowedUsers"]

_ALL_UIDS = 2**32 - 1
_DEFAULT_OVERFLOW = 65534
_ONE_NAMESPACE = (
    "run daemon and ranks in one user namespace: no PrivateUsers=, no hostUsers: false, the same --userns"
)


class AllowedUsers:
    """The uids whose ranks and tools may connect."""

    def __init__(self, own: int, others: tuple[int, ...], proc: Path = Path("/proc")) -> None:
        """Allow the daemon's own uid and `others`.

        Raises:
            ConfigError: `others` names the uid that stands for every user without a mapping.
        """
        self._proc = proc
        self._uids = frozenset({own, *others})
        self._overflow = _overflow_uid(proc)
        self._own_map = _uid_map(proc / "self")
        # Whether every uid has a mapping here, as outside of user namespaces. An unknown map counts as such.
        self._maps_all = not self._own_map or any(
            length >= _ALL_UIDS for _, _, length in _ranges(self._own_map)
        )
        if not self._maps_all and self._overflow in others:
            raise ConfigError(
                f"--allow-uid {self._overflow} would admit every user without a mapping in this user namespace "
                f"(/proc/self/uid_map: {self._own_map}); leave it out and {_ONE_NAMESPACE}"
            )

    def refusal(self, uid: int, pid: int) -> str | None:
        """Return why a peer may not connect, for its user; None if it may. `pid` is 0 if it is not known here."""
        if uid == self._overflow and not self._maps_all:
            return (
                f"the kernel reports uid {uid} for you, because your uid has no mapping in the daemon's user namespace "
                f"(its /proc/self/uid_map: {self._own_map}); {_ONE_NAMESPACE}"
            )
        if uid in self._uids:
            return None
        allowed = ", ".join(str(one) for one in sorted(self._uids))
        mapped = self._mapped(pid)
        return (
            f"uid {uid} may not connect to this daemon, which allows uid {allowed}; "
            f"start it as uid {uid} or with --allow-uid {uid}{mapped}"
        )

    def _mapped(self, pid: int) -> str:
        """Return a hint if the peer runs in another user namespace, where its uid has another number."""
        theirs = _uid_map(self._proc / str(pid)) if pid > 0 else ""
        if not theirs or theirs == self._own_map:
            return ""
        return f". You are in another user namespace (uid_map: {theirs}), where your uid has another number"


def _overflow_uid(proc: Path) -> int:
    try:
        return int((proc / "sys" / "kernel" / "overflowuid").read_text())
    except (OSError, ValueError):
        return _DEFAULT_OVERFLOW


def _uid_map(process: Path) -> str:
    """Return the uid map of a process on one line, such as "0 100000 65536"; "" if it cannot be read."""
    try:
        lines = (process / "uid_map").read_text().splitlines()
    except OSError:
        return ""
    return ", ".join(" ".join(line.split()) for line in lines) or "empty"


def _ranges(uid_map: str) -> list[tuple[int, ...]]:
    """Return (first uid inside, first uid outside, length) of each line."""
    if uid_map == "empty":
        return []
    return [tuple(int(number) for number in line.split()) for line in uid_map.split(", ")]
