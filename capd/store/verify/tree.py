"""Walks the directories of a run: checks the metadata of groups above the series, and finds foreign files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from capd.errors import NotAStore
from capd.store.catalog.rows import CATALOG_NAME
from capd.store.documents.zarr_json import read_group
from capd.store.scan.survey import shard_files
from capd.store.verify.damage import Damage

__all__ = ["foreign_files", "group_documents", "group_problem"]

_SERIES_DEPTH = 5
_GROUP_MEMBERS = frozenset({"zarr_format", "node_type", "attributes", "consolidated_metadata"})
_OWN = frozenset({f"{CATALOG_NAME}{suffix}" for suffix in ("", "-wal", "-shm", "-journal", ".new")})


def group_documents(run: Path) -> Iterator[Damage]:
    """Yield the groups between the run and its series whose zarr.json is missing or damaged."""
    for depth in range(1, _SERIES_DEPTH):
        for group in sorted(run.glob("/".join(["[!.]*"] * depth))):
            if not group.is_dir() or not any(group.glob("/".join(["*"] * (_SERIES_DEPTH - depth)))):
                continue
            problem = group_problem(group)
            if problem:
                file = str((group / "zarr.json").relative_to(run))
                yield Damage("metadata", "", (), file, None, problem)


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
    """Yield the paths in the run that its format does not define."""
    for directory, names, files in os.walk(run):
        here = Path(directory)
        parts = here.relative_to(run).parts
        names.sort()
        if parts[:1] == (".capd",):
            if len(parts) >= 3:
                names.clear()
            yield from (str((here / name).relative_to(run)) for name in sorted(_strange(here, parts, files)))
            continue
        if len(parts) == _SERIES_DEPTH:
            yield from _in_series(run, here, names, files)
            names.clear()
            continue
        yield from (str((here / name).relative_to(run)) for name in sorted(files) if name != "zarr.json")


def _strange(here: Path, parts: tuple[str, ...], files: list[str]) -> Iterator[str]:
    """Yield foreign names in `.capd` and the nodes' directories. The quarantine may hold any file."""
    if len(parts) == 2 and parts[1].startswith("node="):
        yield from (name for name in files if name not in _OWN)
    elif len(parts) == 3 and parts[2] == "spool":
        yield from (name for name in files if not name.endswith((".partial", ".log", ".tmp")))
    elif len(parts) < 3:
        yield from files


def _in_series(run: Path, series: Path, names: list[str], files: list[str]) -> Iterator[str]:
    yield from (str((series / name).relative_to(run)) for name in sorted(files) if name != "zarr.json")
    yield from (f"{(series / name).relative_to(run)}/" for name in names if name not in ("data", "moments"))
    shards = set(shard_files(series).values())
    for directory, _, found in os.walk(series / "data"):
        for name in sorted(found):
            path = Path(directory) / name
            if path not in shards and path != series / "data" / "zarr.json":
                yield str(path.relative_to(run))
