"""Tags and pins of runs: in the run's document, where copies of the run keep them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from capd.errors import ConfigError, NotAStore
from capd.lifecycle.house_lock import housekeeping
from capd.store.disk.run_document import change_attributes
from capd.store.disk.run_lock import RunLock
from capd.store.documents.zarr_json import run_attributes

__all__ = ["pin_run", "tag_run", "tags_of"]

_TAG = re.compile(r"[\w][\w.:@+-]{0,63}")
_MAX_TAGS = 64
_PATIENCE_S = 30.0


def tags_of(run: Path) -> list[str]:
    """Return the tags of a run, in order. Raises NotAStore."""
    found = run_attributes(run).get("tags")
    return sorted(tag for tag in found if isinstance(tag, str)) if isinstance(found, list) else []


def tag_run(run: Path, add: Iterable[str], remove: Iterable[str] = ()) -> list[str]:
    """Add tags to a run and remove others. Return all its tags. A daemon may be writing the run.

    Raises:
        ConfigError: A tag has characters other than letters, digits and `_.:@+-`, or there are too many.
        NotAStore: The directory is not a run.
        StoreError: The run cannot be changed now.
    """
    new = list(add)
    for tag in new:
        if not _TAG.fullmatch(tag):
            raise ConfigError(
                f"{tag!r} cannot be a tag: use up to 64 letters, digits and the characters _ . : @ + -"
            )
    with _changing(run):
        tags = sorted({*tags_of(run), *new} - {*remove})
        if len(tags) > _MAX_TAGS:
            raise ConfigError(f"{run} would have more than {_MAX_TAGS} tags; remove some with --remove")
        change_attributes(run, lambda capd: _set(capd, "tags", tags))
    return tags


def pin_run(run: Path, *, pinned: bool) -> None:
    """Pin a run, so that no command removes it, or unpin it. A daemon may be writing it.

    Raises:
        NotAStore: The directory is not a run.
        StoreError: The run cannot be changed now.
    """
    with _changing(run):
        change_attributes(run, lambda capd: _set(capd, "pinned", pinned))


@contextlib.contextmanager
def _changing(run: Path) -> Iterator[None]:
    if not run.is_dir():
        raise NotAStore(f"{run} is no run directory; `capd runs` lists the runs")
    # Nothing is written beside a directory that is no run.
    run_attributes(run)
    # A daemon that completes a removal of series changes the document, too. It holds the run alone.
    with housekeeping(run.absolute().parent), RunLock.shared(run, _PATIENCE_S):
        yield


def _set(capd: dict[str, Any], member: str, value: bool | Sequence[str]) -> None:
    if value:
        capd[member] = value
    else:
        capd.pop(member, None)
