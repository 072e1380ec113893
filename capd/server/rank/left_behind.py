"""Takes what a rank that is gone had ready in its arena and had not sent, exactly as if it had been PUT.

The journal says which slots those are (`capd.server.rank.journal`). What was sent already is committed, refused or in
work, and a repeated PUT is no second record; so nothing needs to be known here of how far the rank had come.
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
    """The rank that is gone, as far as a recovery speaks for it: `capd.server.rank.rank.RankSession`."""

    session: Session
    hello: Hello
    taken: int

    def tell(self, connection: int, act: Callable[[Session], None]) -> bool: ...
    def put(self, connection: int, message: Put) -> bool: ...
    def wait_for_room(self, timeout_s: float) -> bool: ...
    def end_recovery(self, connection: int, count: int) -> None: ...


def begin_recovery(rank: LostRank, connection: int, journal: Journal, *, parts: bool) -> None:
    """Recover in a thread of its own, as long as it takes; `LostRank.end_recovery` is called at the end.

    connection: the one that spoke for the rank last; what another one takes over is left to that. parts: take parts of
    large records, too.
    """
    work = partial(_recover, rank, connection, journal, parts)
    try:
        threading.Thread(target=work, name=f"capd-recover-{rank.hello.rank}", daemon=True).start()
    except RuntimeError:  # no further thread is allowed
        work()


def _recover(rank: LostRank, connection: int, journal: Journal, parts: bool) -> None:
    before = rank.taken
    try:
        _hand_on(rank, connection, journal, parts)
    except (ProtocolError, OSError) as error:
        logger.warning("the journal of rank %d cannot be read further: %s", rank.hello.rank, error)
    except Exception:  # outermost loop of the thread: the session must not wait for ever
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
