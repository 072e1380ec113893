"""Keeps in the file of a run, and files of a spool, as a recorder leaves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from capd.store.keeps.file import keeps_path
from capd.store.keeps.held_files import memory_directory, spool_place, window_directory
from capd.store.keeps.keep import Keep, keep_line

__all__ = ["give_keeps", "keep", "leave_held"]


def keep(number: int = 0, **changes: Any) -> Keep:
    """A keep of the iterations around one."""
    fields: dict[str, Any] = {
        "time_ns": number, "reason": "nan", "attempt": 0, "iteration": number, "first": max(0, number - 1),
        "last": number + 1, "node": "node0",
    }  # fmt: skip
    return Keep(**{**fields, **changes})


def give_keeps(run: Path, node: str, *keeps: Keep) -> None:
    """Append keeps to the file of a node."""
    path = keeps_path(run, node)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with path.open("ab") as file:
        file.write(b"".join(map(keep_line, keeps)))


def leave_held(
    run: Path,
    node: str,
    iteration: int,
    nbytes: int,
    *,
    in_memory: bool = False,
    elsewhere: Path | None = None,
) -> Path:
    """Leave a file of the spool, with nothing that is a record, and return it."""
    directory = window_directory(run, node)
    if in_memory:
        directory = memory_directory(run.parent, node) / run.stem
        directory.parent.parent.mkdir(mode=0o700, exist_ok=True)
    if elsewhere is not None:
        directory = elsewhere / spool_place(run.parent, node) / run.stem
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / f"a0-i{iteration}-000000.held"
    path.write_bytes(bytes(nbytes))
    return path
