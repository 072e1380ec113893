"""Walks the directories of a run: checks the metadata of groups above the series, and finds foreign files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from capd.errors import NotAStore
from capd.store.documents.zarr_json import read_group

__all__ = ["foreign_files", "group_documents", "group_problem"]

_SERIES_DEPTH = 5
_GROUP_MEMBERS = frozenset({"zarr_format", "node_type", "attributes", "consolidated_metadata"})
# A spool and a quarantine may have directories with any files.
_OWN = re.compile(
    r"\.capd/(lock|document\.tmp|keeps/[^/]+\.json)|\.capd/node=[^/]+/(catalog\.sqlite(-wal|-shm|-journal)?|remote\.json(\.tmp)?|alerts\.jsonl|moving-[^/]+\.tmp|spool/[^/]+\.(partial|log|tmp)|(spool/)?(?!spool/)[^/]+/.+)"
    r"|(?!\.capd/)([^/]+/){0,5}zarr\.json"
    r"|([^/]+/){5}(moments/.+|data/zarr\.json|data/c/(0|[1-9][0-9]*)(/0)*)"
)


def group_documents(run: Path) -> Iterator[tuple[Path, str]]:
    """Yield each zarr.json between the run and its series that is missing or damaged, and the problem."""
    for depth in range(1, _SERIES_DEPTH):
        for group in sorted(run.glob("/".join(["[!.]*"] * depth))):
            if not group.is_dir() or not any(group.glob("/".join(["*"] * (_SERIES_DEPTH - depth)))):
                continue
            problem = group_problem(group)
            if problem:
                yield group / "zarr.json", problem


def group_problem(group: Path) -> str:
    """Return the problem of a group's zarr.json, or ""."""
    try:
        document = read_group(group)
    except NotAStore as error:
        return str(error)
    if document is None:
        return "the group's metadata is missing"
    known = (document.get("zarr_format"), document.get("node_type")) == (3, "group")
    if not known or document.keys() - _GROUP_MEMBERS or not isinstance(document.get("attributes"), dict):
        return "is not the metadata of a Zarr group"
    return ""


def foreign_files(run: Path) -> Iterator[str]:
    """Yield the paths of files in the run that its format does not define."""
    for directory, names, files in os.walk(run):
        names.sort()
        for name in sorted(files):
            path = str((Path(directory) / name).relative_to(run))
            if not _OWN.fullmatch(path):
                yield path
