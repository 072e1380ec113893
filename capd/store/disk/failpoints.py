"""Failpoints: named places in the store's protocols where a test can stop or fail the process.

Example: `CAPD_FAILPOINTS="seal.after_rename=kill,commit.after_write=error"`. The actions are:

- `kill`: SIGKILL to the process
- `term`, `hup`, `int`: the signal that asks the process to stop
- `error`: an OSError EIO
- `enospc`: an OSError ENOSPC
- `hang`: never continue

`=kill@3` acts at the third pass. All actions except `kill` happen once. Without the variable a failpoint costs one look
into an empty dictionary.
"""

from __future__ import annotations

import errno
import os
import signal
import threading

__all__ = ["NAMES", "failpoint"]

NAMES = (
    "create.before_header",  # a new shard or small log
    "create.after_header",
    "claim.before_rename",  # a new series' directory
    "claim.after_rename",
    "commit.before_write",  # a large record's chunks and COMMIT
    "commit.after_write",
    "log.before_write",  # small records
    "log.after_write",
    "settle.before_append",  # pending small records, moved from the log to a shard
    "settle.after_append",
    "log.before_delete",
    "sync.before",  # the group sync of durable stores
    "sync.after",
    "rewrite.before_rename",  # the copy of a file whose sync failed
    "reopen.before_rename",  # the copy of a sealed shard that is continued
    "catalog.before_write",
    "catalog.after_write",
    "seal.before_index",
    "seal.after_index",
    "seal.after_sync",
    "seal.after_rename",
    "seal.after_tables",
    "seal.after_documents",
    "compact.after_copy",  # a sealed shard without replaced chunks
    "compact.before_delete",
    "replace.after_sync",
    "replace.after_first",
    "recover.after_partials",
    "recover.after_seals",
    "recover.after_logs",
    "copy.before_rename",  # a file of a copied run
    "copy.after_file",
    "copy.after_files",
    "copy.after_series",  # records of a copied or merged run
    "copy.after_records",
    "copy.after_verify",
    "copy.after_publish",
    "recover.before_rename",  # the intact records of a damaged file, copied
    "move.before_check",  # an uploaded shard that a stub replaces
    "move.after_check",
    "move.after_stub",
    "move.after_rename",
    "move.after_sync",
    "remove.before_mark",  # series that `capd rm` removes
    "remove.after_mark",
    "remove.after_move",
    "remove.after_catalog",
    "remove.after_done",
    "trash.before_mark",  # a run that `capd rm`, `capd prune` or the daemon removes
    "trash.after_mark",
    "trash.after_note",
    "trash.after_rename",
    "empty.after_mark",  # an entry of the trash whose space is freed
    "empty.after_tree",
    "restore.before_rename",  # a run that leaves the trash
    "restore.after_rename",
    "upload.before_state",  # what an upload keeps locally
    "upload.after_state",
    "upload.before_shards",  # an upload to an object store
    "upload.before_shard",
    "upload.after_shard",
    "upload.after_shards",
    "upload.after_moments",
    "upload.after_lengths",
    "upload.after_attributes",
    "upload.after_arrays",
    "upload.after_groups",
    "upload.before_records",
    "upload.after_records",
    "upload.after_series",
    "upload.before_manifest",
    "upload.after_manifest",
    "upload.before_delete",
    "upload.after_delete",
    "upload.before_abort",
    "upload.after_abort",
)
_ERRORS = {"error": errno.EIO, "enospc": errno.ENOSPC}
_SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "hup": signal.SIGHUP, "int": signal.SIGINT}
_ACTIONS = (*_SIGNALS, *_ERRORS, "hang")


def _parse(text: str) -> dict[str, tuple[str, int]]:
    found: dict[str, tuple[str, int]] = {}
    for entry in filter(None, text.split(",")):
        name, _, action = entry.partition("=")
        action, _, number = action.partition("@")
        if name not in NAMES or action not in _ACTIONS:
            raise ValueError(f"CAPD_FAILPOINTS: {entry!r} is not NAME={'|'.join(_ACTIONS)}[@N]")
        found[name] = (action, int(number or 1))
    return found


_active = _parse(os.environ.get("CAPD_FAILPOINTS", ""))


def failpoint(name: str) -> None:
    """Perform the action of CAPD_FAILPOINTS for `name`, if there is one. `hang` never returns.

    Raises:
        OSError: The action is `error` or `enospc`.
    """
    if not _active or name not in _active:
        return
    action, left = _active[name]
    if left > 1:
        _active[name] = (action, left - 1)
        return
    del _active[name]
    if action in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[action])
        return
    if action == "hang":
        threading.Event().wait()
    raise OSError(_ERRORS[action], os.strerror(_ERRORS[action]), f"failpoint {name}")
