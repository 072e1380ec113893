"""The recovery of a rank that is gone: submits the ready captures of its arena as if the rank had PUT them.

The journal names the ready slots (`capd.server.rank.journal`). A capture that was already sent is committed, refused
or in work, and a repeated PUT creates no second record. The recovery therefore need not know how far the rank had
come.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol

from capd.errors import ProtocolError
from capd.server.rank.journal import Journal
from capd.server.rank.session import Session
from capd_client.protocol.messages import Define, Hello, Put

__all__ = ["LostRank", "begin_recovery"]

logger = logging.getLogger(__name__)

_ROOM_S = 1.0


class LostRank(Protocol):
    """The rank that is gone, as a recovery uses it: `capd.server.rank.rank.RankSession`."""

    session: Session
    hello: Hello
    taken: int

    def tell(self, connection: int, act: Callable[[Session], None]) -> bool: ...
    def put(self, connection: int, message: Put) -> bool: ...
    def wait_for_room(self, timeout_s: float) -> bool: ...
    def end_recovery(self, connection: int, count: int) -> None: ...


def begin_recovery(rank: LostRank, connection: int, journal: Journal, *, parts: bool) -> None:
    """Recover in a separate thread, for as long as it takes. `LostRank.end_recovery` is called at the end.

    Args:
        rank: The rank that is gone.
        connection: The ordinal of the rank's last connection. The recovery ends if another connection takes over.
        journal: The journal in the rank's arena.
        parts: Also take parts of large records.
    """
    work = partial(_recover, rank, connection, journal, parts)
    try:
        threading.Thread(target=work, name=f"capd-recover-{rank.hello.rank}", daemon=True).start()
    except RuntimeError:
        # The system allows no further thread.
        work()


def _recover(rank: LostRank, connection: int, journal: Journal, parts: bool) -> None:
    before = rank.taken
    try:
        _hand_on(rank, connection, journal, parts)
    except (ProtocolError, OSError) as error:
        logger.warning("the journal of rank %d cannot be read further: %s", rank.hello.rank, error)
    except Exception:
        # This is the outermost loop of the thread: the session must not wait forever.
        logger.exception("the journal of rank %d cannot be read further", rank.hello.rank)
    finally:
        rank.end_recovery(connection, rank.taken - before)


def _hand_on(rank: LostRank, connection: int, journal: Journal, parts: bool) -> None:
    found = journal.find()
    keys = rank.session.keys
    for define, nbytes in journal.definitions(found.keys - keys.keys()):
        if define.id not in keys and not rank.tell(connection, _defining(define, nbytes)):
            return
    for batch in journal.batches(found):
        items = [item for item in batch if item.key_id in keys and (parts or item.part is None)]
        if items and not rank.put(connection, Put(items)):
            return
        while not rank.wait_for_room(_ROOM_S):
            pass


def _defining(define: Define, nbytes: int) -> partial[None]:
    return partial(Session.define, message=define, frame_nbytes=nbytes)
