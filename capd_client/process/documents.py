"""The documents of a job's processes for the command that started it: one JSON file each, in a directory. No torch."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import TypeVar

import msgspec

__all__ = ["leave", "left"]

T = TypeVar("T", bound=msgspec.Struct)


def leave(directory: str, document: msgspec.Struct) -> None:
    """Replace this process's document, readable by this user alone. Raises OSError."""
    path = os.path.join(directory, f"{socket.gethostname().replace(os.sep, '_')}.{os.getpid()}.json")
    temporary = f"{path}.tmp"
    content = msgspec.json.encode(document)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
    os.replace(temporary, path)


def left(directory: Path, kind: type[T]) -> list[T]:
    """Return the documents of all processes."""
    found = []
    for path in sorted(directory.glob("*.json")):
        with contextlib.suppress(FileNotFoundError):
            found.append(msgspec.json.decode(path.read_bytes(), type=kind))
    return found
