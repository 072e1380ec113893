"""Counts a capture that cannot be taken as it is, and says in the job's log what is wrong with it."""

from __future__ import annotations

from typing import Optional

from capd_client.accounts import Accounts
from capd_client.counter_page import DropReason
from capd_client.definitions import Definition
from capd_client.errors import Counted
from capd_client.key import Moment
from capd_client.notices import Notices

__all__ = ["Refusing"]


class Refusing:
    """Drops in front of the books, each told of at most every 20 s and reason."""

    def __init__(self, books: Accounts, notices: Notices) -> None:
        self._books = books
        self._notices = notices

    def refuse(
        self,
        definition: Optional[Definition],
        reason: DropReason,
        moment: Moment,
        problem: str,
        nbytes: int = 0,
        *,
        name: str = "",
    ) -> None:
        """problem: what a reader of the log is told. name: of the tensor, where there is no definition."""
        self._books.refuse(definition, reason, nbytes, moment.iteration)
        try:
            if definition is not None:
                name = definition.key.tensor_name
            self._notices.warn(reason.value, "%s is not captured: %s", name, problem)
        except BaseException as error:  # a signal handler's
            raise Counted from error
