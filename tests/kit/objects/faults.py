"""What a proxy saw of a request, and how it may fail it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

__all__ = [
    "ACCESS_DENIED",
    "CLOCK_SKEW",
    "INTERNAL_ERROR",
    "INVALID_KEY",
    "NOT_IMPLEMENTED",
    "QUOTA_EXCEEDED",
    "SLOW_DOWN",
    "STORAGE_FULL",
    "Answer",
    "Faults",
    "Request",
]

CONDITIONS = ("if-none-match", "if-match")


@dataclasses.dataclass(frozen=True)
class Answer:
    """An error as an S3 server tells it."""

    status: int
    code: str
    message: str = "The proxy of the tests says so."

    def body(self) -> bytes:
        """Its document."""
        text = f"<Error><Code>{self.code}</Code><Message>{self.message}</Message><RequestId>1</RequestId></Error>"
        return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}'.encode()


SLOW_DOWN = Answer(503, "SlowDown", "Please reduce your request rate.")
INTERNAL_ERROR = Answer(500, "InternalError", "We encountered an internal error. Please try again.")
NOT_IMPLEMENTED = Answer(
    501, "NotImplemented", "A header you provided implies functionality that is not implemented."
)
CLOCK_SKEW = Answer(403, "RequestTimeTooSkewed", "The difference between the request time and the current time is too large.")  # fmt: skip # noqa: E501
INVALID_KEY = Answer(
    403, "InvalidAccessKeyId", "The access key Id you provided does not exist in our records."
)
ACCESS_DENIED = Answer(403, "AccessDenied", "Access Denied")
STORAGE_FULL = Answer(
    507, "XMinioStorageFull", "Storage backend has reached its minimum free drive threshold."
)
QUOTA_EXCEEDED = Answer(403, "QuotaExceeded", "The quota of the bucket is exceeded.")


@dataclasses.dataclass
class Request:
    """A request as the client sent it, and what became of it.

    Attributes:
        method: GET, PUT…
        path: Its path without the query.
        query: Its query; "" without one.
        headers: By their names in small letters.
        received: Bytes of its body that the proxy has read.
        status: That of the answer; 0 as long as there is none, or if the connection was cut before it.
        sent: Bytes of the answer's body that the proxy has sent, or is about to.
        fault: The fault that it met; "" for none.
    """

    method: str
    path: str
    query: str
    headers: dict[str, str]
    received: int = 0
    status: int = 0
    sent: int = 0
    fault: str = ""

    @property
    def range(self) -> str:
        """The Range header; "" without one."""
        return self.headers.get("range", "")

    @property
    def is_conditional(self) -> bool:
        """Whether it has If-None-Match or If-Match."""
        return any(name in self.headers for name in CONDITIONS)

    @property
    def writes_object(self) -> bool:
        """Whether its body is an object or a part of one."""
        return self.method == "PUT" and self.path.strip("/").count("/") > 0

    def __str__(self) -> str:
        query = f"?{self.query}" if self.query else ""
        notes = " ".join(filter(None, [self.range, self.fault]))
        return (
            f"{self.method} {self.path}{query} {self.status} +{self.received} -{self.sent} {notes}".rstrip()
        )


@dataclasses.dataclass
class Faults:
    """How a proxy fails requests. A test sets what it wants while the proxy runs; none by default.

    Attributes:
        concerns: The requests that the faults are for; all by default. The rest passes.
        times: So many requests fail, then no further one; None for all. Waiting is no failure and does not count.
        every: `answer` goes to each n-th request of those concerned; 1 is each. 0 for none.
        answer: The error for these.
        conditional: What becomes of conditional puts: "pass"; "strip", as of a server that ignores conditions; or
            "refuse", with `NOT_IMPLEMENTED`.
        capacity_nbytes: Puts that go beyond so many bytes in total meet `full`; None for no limit.
        full: The error of a full bucket.
        cut_request_at: Close the connection after so many bytes of a put's body; None for never.
        cut_answer_at: Close the connection after so many bytes of a get's body; None for never.
        truncate_to: Answer a get with so many bytes, with the length of these; None for all.
        corrupt_at: Flip the byte at this place of a get's body; None for none.
        lose_answer: Forward the request, read the answer and close the connection instead of sending it.
        delay_s: Wait so long before a request is forwarded.
        bytes_per_s: The bandwidth of one connection, each way; 0 for no limit.
    """

    concerns: Callable[[Request], bool] = lambda _: True
    times: int | None = None
    every: int = 0
    answer: Answer = SLOW_DOWN
    conditional: str = "pass"
    capacity_nbytes: int | None = None
    full: Answer = STORAGE_FULL
    cut_request_at: int | None = None
    cut_answer_at: int | None = None
    truncate_to: int | None = None
    corrupt_at: int | None = None
    lose_answer: bool = False
    delay_s: float = 0.0
    bytes_per_s: float = 0.0

    def of_answer(self) -> bool:
        """Whether a get's body is harmed."""
        return any(one is not None for one in (self.cut_answer_at, self.truncate_to, self.corrupt_at))
