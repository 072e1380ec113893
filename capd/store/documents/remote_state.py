"""The local state of an upload: `.capd/node=<node>/remote.json` says where a node's part of a run is uploaded to.

It is the only durable state. What was uploaded is in the manifest and the series segment of the object store.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

import msgspec

from capd.errors import NotAStore
from capd.store.documents.json_document import MAX_LENGTH, read_document

__all__ = ["REMOTE_STATE_NAME", "RemoteState", "encode_remote_state", "new_origin", "read_remote_state"]

REMOTE_STATE_NAME = "remote.json"
_FORMAT = 1
_REMEDY = "delete the file, and the upload goes on with what the object store has"
_ORIGIN_NBYTES = 16
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_LENGTH)]


class RemoteState(msgspec.Struct, kw_only=True):
    """Where one node's part of a run is uploaded to.

    Attributes:
        format: 1.
        to: The address of the run.
        origin: A random text that tells this store from another one of the same node name.
        generation: The number of the last manifest that is known to be there; 0 without one.
        etag: Its entity tag.
    """

    format: int = _FORMAT
    to: Annotated[str, msgspec.Meta(max_length=4096)]
    origin: Annotated[str, msgspec.Meta(min_length=8, max_length=128)]
    generation: Count = 0
    etag: str | None = None


def new_origin() -> str:
    """Return a random origin."""
    return secrets.token_hex(_ORIGIN_NBYTES)


def encode_remote_state(state: RemoteState) -> bytes:
    """Return the JSON of a state."""
    return msgspec.json.encode(state) + b"\n"


def read_remote_state(directory: Path) -> RemoteState | None:
    """Return the state in a node's directory; None if there is none.

    Raises:
        NotAStore: The file is not a state that this version can read.
        OSError: The file cannot be read.
    """
    path = directory / REMOTE_STATE_NAME
    try:
        document = read_document(path)
    except NotAStore as error:
        raise NotAStore(f"{error}; {_REMEDY}") from error
    if document is None:
        return None
    version = document.get("format")
    if type(version) is int and version > _FORMAT:
        raise NotAStore(f"{path} has format {version}, but this capd reads up to {_FORMAT}; upgrade capd")
    try:
        return msgspec.convert(document, RemoteState)
    except msgspec.ValidationError as error:
        raise NotAStore(f"{path} is no state of an upload: {error}; {_REMEDY}") from error
