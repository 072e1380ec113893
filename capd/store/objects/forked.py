"""Whether this process was forked from one that had used an object store.

The threads of obstore end with a fork, and a request in the child would wait for them for ever.
"""

from __future__ import annotations

import os

from capd.errors import ObjectStoreError
from capd.store.objects.address import Address

__all__ = ["note_use"]

_used_by: int | None = None


def note_use(address: Address) -> None:
    """Note that this process uses an object store.

    Raises:
        ObjectStoreError: The process that it was forked from did so before the fork.
    """
    global _used_by
    if _used_by is None:
        _used_by = os.getpid()
    if _used_by != os.getpid():
        raise ObjectStoreError(
            f"{address} cannot be used in a process that was forked after the first use of an object store; start "
            'workers another way, for example by DataLoader(…, multiprocessing_context="forkserver")'
        )
