"""capd: the daemon, the command line and the reader. `capd.open(path)` reads a run back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from capd._version import __version__

if TYPE_CHECKING:
    from capd.store.reader import open_store as open  # noqa: A004 - the name users know

__all__ = ["__version__", "open"]


def __getattr__(name: str) -> Any:
    if name == "open":
        from capd.store.reader import open_store

        return open_store
    raise AttributeError(f"module 'capd' has no attribute {name!r}")
