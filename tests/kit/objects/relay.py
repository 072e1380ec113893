"""One connection through the proxy: requests to the server, answers to the client, piece by piece."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any

from tests.kit.objects.faults import CONDITIONS, NOT_IMPLEMENTED, Answer, Request
from tests.kit.objects.signing import authorization

if TYPE_CHECKING:
    from tests.kit.objects.proxy import FaultProxy

__all__ = ["Relay"]

PIECE_NBYTES = 256 * 1024
_SLOW_PIECE_S = 0.05  # a limited bandwidth gives a piece so often
_PATIENCE_S = 60.0
# They are of one connection, or answered by the proxy itself.
_HOP = (
    "connection",
    "keep-alive",
    "proxy-connection",
    "expect",
    "transfer-encoding",
    "te",
    "trailer",
    "upgrade",
)


class Relay(BaseHTTPRequestHandler):
    """Reads requests of one client until it goes, or a fault closes the connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = _PATIENCE_S

    def __init__(self, request: Any, client_address: Any, server: Any, proxy: FaultProxy) -> None:
        self._proxy = proxy
        self._upstream: http.client.HTTPConnection | None = None
        super().__init__(request, client_address, server)

    def do_GET(self) -> None:
        """Relay a request of any method."""
        proxy = self._proxy
        path, _, query = self.path.partition("?")
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.command, path, query, headers)
        proxy.note(request)
        number = proxy.count(request)
        if proxy.on_request is not None:
            proxy.on_request(request)
        if number and proxy.faults.delay_s:
            proxy.stopping.wait(proxy.faults.delay_s)
        answer = self._error(request, number) if number else None
        if answer is not None:
            for _ in self._body(request):
                pass
            self._refuse(request, answer)
        elif not self._forward(request, bool(number)):
            request.fault = request.fault or "no server"
            self.close_connection = True

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def finish(self) -> None:
        """Close both connections."""
        if self._upstream is not None:
            self._upstream.close()
        super().finish()

    def log_message(self, *_: Any) -> None:
        """Say nothing: `FaultProxy.requests` has it."""

    def _error(self, request: Request, number: int) -> Answer | None:
        """The error that a request meets before it is forwarded."""
        faults, may_fail = self._proxy.faults, self._proxy.may_fail
        if faults.every and number % faults.every == 0 and may_fail(request, faults.answer.code):
            return faults.answer
        if faults.conditional == "refuse" and request.is_conditional and request.method in ("PUT", "POST") \
                and may_fail(request, NOT_IMPLEMENTED.code):  # fmt: skip
            return NOT_IMPLEMENTED
        if request.writes_object and not self._proxy.has_room(self._length(request)) \
                and may_fail(request, faults.full.code):  # fmt: skip
            return faults.full
        return None

    def _refuse(self, request: Request, answer: Answer) -> None:
        body = b"" if request.method == "HEAD" else answer.body()
        request.status, request.sent = (
            answer.status,
            len(body),
        )  # the client may go on before this thread does
        self.send_response_only(answer.status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _forward(self, request: Request, concerned: bool) -> bool:
        """Have the server answer. False: the connection to the client or the server is of no further use."""
        faults = self._proxy.faults
        try:
            answer = self._ask(request, concerned)
        except (OSError, http.client.HTTPException):
            self._drop_upstream()
            return False
        if answer is None:
            return False
        if concerned and faults.lose_answer and self._proxy.may_fail(request, "answer lost"):
            answer.read()
            return False
        return self._answer(request, answer, concerned)

    def _ask(self, request: Request, concerned: bool) -> http.client.HTTPResponse | None:
        faults = self._proxy.faults
        cut_at = faults.cut_request_at if concerned and request.writes_object else None
        if cut_at is not None and not self._proxy.may_fail(request, "request cut"):
            cut_at = None
        if self._upstream is None:
            self._upstream = http.client.HTTPConnection(self._proxy.upstream, timeout=_PATIENCE_S)
            self._upstream.connect()
            self._upstream.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self._headers(request, concerned):
            self._upstream.putheader(name, value)
        chunked = self._is_chunked(request)
        if chunked:
            self._upstream.putheader("Transfer-Encoding", "chunked")
        self._upstream.endheaders()
        for piece in self._body(request, cut_at):
            self._upstream.send(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
        if cut_at is not None and request.received >= cut_at:
            self._drop_upstream()
            return None
        if chunked:
            self._upstream.send(b"0\r\n\r\n")
        return self._upstream.getresponse()

    def _headers(self, request: Request, concerned: bool) -> Iterator[tuple[str, str]]:
        """Those that the server gets. Without its condition a request is signed again."""
        kept = [(name, value) for name, value in self.headers.items() if name.lower() not in _HOP]
        strips = concerned and self._proxy.faults.conditional == "strip"
        if strips and request.is_conditional and self._proxy.may_fail(request, "condition stripped"):
            signed = (
                request.headers["authorization"].partition("SignedHeaders=")[2].partition(",")[0].split(";")
            )
            values = {name: request.headers[name] for name in signed if name not in CONDITIONS}
            kept = [one for one in kept if one[0].lower() not in (*CONDITIONS, "authorization")]
            kept.append(("Authorization", authorization(request.method, self.path, values)))
        yield from kept

    def _answer(self, request: Request, answer: http.client.HTTPResponse, concerned: bool) -> bool:
        faults = self._proxy.faults
        harmed = concerned and request.method == "GET" and answer.status in (200, 206) and faults.of_answer()
        harmed = harmed and self._proxy.may_fail(request, "answer harmed")
        length = answer.length if request.method != "HEAD" else 0
        limit = faults.truncate_to if harmed else None
        chunked = length is None
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() in _HOP:
                continue
            if limit is not None and length is not None and name.lower() == "content-length":
                value = str(min(limit, length))
            self.send_header(name, value)
        if chunked:
            self.send_header("Transfer-Encoding", "chunked")
        request.status = answer.status
        self.end_headers()
        return self._answer_body(request, answer, chunked, harmed)

    def _answer_body(self, request: Request, answer: Any, chunked: bool, harmed: bool) -> bool:
        faults = self._proxy.faults
        cut_at = faults.cut_answer_at if harmed else None
        stop_at = faults.truncate_to if harmed else None
        while piece := answer.read(self._piece()):
            if harmed and faults.corrupt_at is not None:
                piece = _flipped(piece, faults.corrupt_at - request.sent)
            for limit in (cut_at, stop_at):
                piece = piece if limit is None else piece[: max(0, limit - request.sent)]
            if piece:
                # before the bytes, so that a client that has them all has waited for all of them
                self._wait_for(len(piece))
                request.sent += len(piece)
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
            if cut_at is not None and request.sent >= cut_at:
                return False
        if chunked:
            self.wfile.write(b"0\r\n\r\n")
        return True

    def _body(self, request: Request, cut_at: int | None = None) -> Iterator[bytes]:
        """The pieces of the client's body; they end at `cut_at`."""
        chunks = self._chunks() if self._is_chunked(request) else iter([self._length(request)])
        for left in chunks:
            while left:
                most = left if cut_at is None else min(left, cut_at - request.received)
                if most == 0:
                    return
                piece = self.rfile.read(min(most, self._piece()))
                if not piece:
                    raise ConnectionError("the client has gone")
                left -= len(piece)
                request.received += len(piece)
                self._wait_for(len(piece))
                yield piece

    def _chunks(self) -> Iterator[int]:
        while nbytes := int(self.rfile.readline(PIECE_NBYTES).split(b";")[0], 16):
            yield nbytes
            self.rfile.readline(PIECE_NBYTES)
        while self.rfile.readline(PIECE_NBYTES).strip():
            pass  # trailers

    def _is_chunked(self, request: Request) -> bool:
        return "chunked" in request.headers.get("transfer-encoding", "").lower()

    def _length(self, request: Request) -> int:
        return int(request.headers.get("content-length", "0"))

    def _piece(self) -> int:
        rate = self._proxy.faults.bytes_per_s
        return max(1, min(PIECE_NBYTES, int(rate * _SLOW_PIECE_S))) if rate else PIECE_NBYTES

    def _wait_for(self, nbytes: int) -> None:
        rate = self._proxy.faults.bytes_per_s
        if rate:
            self._proxy.stopping.wait(nbytes / rate)

    def _drop_upstream(self) -> None:
        if self._upstream is not None:
            self._upstream.close()
        self._upstream = None


def _flipped(piece: bytes, place: int) -> bytes:
    if not 0 <= place < len(piece):
        return piece
    return piece[:place] + bytes([piece[place] ^ 0xFF]) + piece[place + 1 :]
