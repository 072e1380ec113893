"""The file of the keeps of a run on one node, `.capd/node=NAME/window/keeps.jsonl`: its readers, and that of a new run.

Only the daemon of the node appends. A kill may leave a part of a line at the end, which readers leave out. A daemon
notes the keeps of other nodes, too, so that several files may have one keep.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from capd.store.disk.files import make_directory, sync_paths, write_file
from capd.store.disk.line_file import Lines, parsed_lines, read_line_file, whole_lines_of
from capd.store.keeps.held_files import window_directory
from capd.store.keeps.keep import Keep, keep_line, keep_of

__all__ = [
    "MAX_KEEPS_NBYTES", "distinct_keeps", "keeps_path", "parse_keeps", "read_keeps", "whole_keep_lines",
    "write_keeps",
]  # fmt: skip

MAX_KEEPS_NBYTES = 64 << 20
"""Nobody reads more of a file. A daemon writes fewer keeps."""
_NAME = "keeps.jsonl"


def keeps_path(run: Path, node: str) -> Path:
    """Return the file of a node's keeps."""
    return window_directory(run, node) / _NAME


def parse_keeps(payload: bytes) -> Lines[Keep]:
    """Return the keeps in the bytes of a file, which may come from anybody."""
    return parsed_lines(payload, keep_of)


def read_keeps(path: Path) -> Lines[Keep]:
    """Return the keeps of a file; none if there is no file.

    Raises:
        StoreError: It is not a regular file.
        OSError: It cannot be read.
    """
    return parse_keeps(read_line_file(path, MAX_KEEPS_NBYTES))


def whole_keep_lines(path: Path) -> bytes:
    """Return the bytes of a file up to the end of its last whole line. Raises as `read_keeps`."""
    return whole_lines_of(path, MAX_KEEPS_NBYTES)


def distinct_keeps(keeps: Iterable[Keep]) -> list[Keep]:
    """Return keeps in order of time, each once."""
    return sorted(dict.fromkeys(keeps), key=lambda keep: keep.time_ns)


def write_keeps(run: Path, keeps: Mapping[str, Iterable[Keep]]) -> None:
    """Write the keeps of a new run, durably.

    Args:
        run: The directory of the run.
        keeps: The keeps by node. Nodes without a part in the run are left out.

    Raises:
        OSError: A file cannot be written.
    """
    for node, those in keeps.items():
        path = keeps_path(run, node)
        payload = b"".join(map(keep_line, those))
        if payload and path.parent.parent.is_dir():
            make_directory(path.parent)
            write_file(path, payload)
            sync_paths([path, path.parent, path.parent.parent], run)
