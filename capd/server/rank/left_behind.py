"""Takes what a rank that is gone had ready in its arena and had not sent, exactly as if it had been PUT.

The journal says which slots those are (`capd.server.rank.journal`). What was sent already is committed, refused or in
work, and a repeated PUT is no second record; so nothing needs to be known here of how far the rank had come.
"""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import TYPE_CHECKING

from capd.errors import ProtocolError
from capd.server.rank.journal import Journal
from capd.server.rank.session import Session
from capd_client.protocol.messages import Define, Put

if TYPE_CHECKING:
    from capd.server.rank.rank import RankSession

__all__ = ["begin_recovery"]

logger = logging.getLogger(__name__)

_ROOM_S = 1.0


def begin_recovery(rank: RankSession, connection: int, journal: Journal, *, parts: bool) -> None:
    """Recover in a thread of its own, as long as it takes; `RankSession.end_recovery` is called at the end.

    connection: the one that spoke for the rank last; what another one takes over is left to that. parts: take parts of
    large records, too.
    """
    work = partial(_recover, rank, connection, journal, parts)
    try:
        threading.Thread(target=work, name=f"capd-recover-{rank.hello.rank}", daemon=True).start()
    except RuntimeError:  # no further thread is allowed
        work()


def _recover(rank: RankSession, connection: int, journal: Journal, parts: bool) -> None:
    before = rank.taken
    try:
        _hand_on(rank, connection, journal, parts)
    except (ProtocolError, OSError) as error:
        logger.warning("the journal of rank %d cannot be read further: %s", rank.hello.rank, error)
    except Exception:  # outermost loop of the thread: the session must not wait for ever
        logger.exception("the journal of rank %d cannot be read further", rank.hello.rank)
    finally:
        rank.end_recovery(connection, rank.taken - before)


def _hand_on(rank: RankSession, connection: int, journal: Journal, parts: bool) -> None:
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
