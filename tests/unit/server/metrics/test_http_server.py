"""The HTTP server answers scrapes beside silent, slow and hostile peers, and keeps none of them."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import pytest

from capd.server.metrics import http_server
from capd.server.metrics.http_server import MAX_CONNECTIONS, MAX_REQUEST_NBYTES, HttpServer, Request, Response
from tests.kit.daemon import PATIENCE_S, wait_for
from tests.kit.metrics.scrape import get

BODY = b"x" * (4 << 20)


def answer(request: Request) -> Response:
    if request.path == "/fail":
        raise ValueError("no answer")
    if request.path == "/large":
        return Response(HTTPStatus.OK, BODY)
    return Response.of(HTTPStatus.OK, f"{request.method} {request.path} {sorted(request.headers.items())}")


@contextlib.contextmanager
def serving(sock: socket.socket) -> Iterator[HttpServer]:
    server = HttpServer(sock, answer)
    server.start()
    try:
        yield server
    finally:
        server.stop()
        sock.close()
    assert not server.is_alive()


@pytest.fixture
def where() -> Iterator[tuple[str, int]]:
    sock = socket.create_server(("127.0.0.1", 0))
    with serving(sock):
        yield sock.getsockname()


def send(where: tuple[str, int], data: bytes) -> socket.socket:
    sock = socket.create_connection(where, PATIENCE_S)
    sock.sendall(data)
    return sock


def said(sock: socket.socket) -> bytes:
    """Everything up to the end of the connection."""
    with sock:
        return b"".join(iter(lambda: sock.recv(1 << 16), b""))


def status(where: tuple[str, int], data: bytes) -> int:
    return int(said(send(where, data)).split()[1])


def test_it_serves_a_socket_of_any_family(tmp_path: Path, where: tuple[str, int]) -> None:
    sock = socket.socket(socket.AF_UNIX)
    path = Path(os.path.relpath(tmp_path / "s"))
    sock.bind(str(path))
    sock.listen()
    with serving(sock):
        over_unix = get(path, "/x?y=1", Accept="z")
    over_tcp = get(where, "/x", method="HEAD")

    assert over_unix.status == 200
    assert over_unix.body.startswith("GET /x [('accept', 'z'), ")
    assert (over_tcp.status, over_tcp.body) == (200, "")
    assert int(over_tcp.headers["Content-Length"]) > 0
    assert path.exists()  # it is the caller's


@pytest.mark.parametrize(
    "request_line",
    [b"", b"GET", b"GET /", b"GET / HTTP/2.0", b"get / HTTP/1.1", b"GET x HTTP/1.1", b"GET /\x00 HTTP/1.1",
     b"\x16\x03\x01\x02\x00\x01", b"GET  / HTTP/1.1", b"GET http://h/metrics HTTP/1.1"],
)  # fmt: skip
def test_what_is_no_request_is_answered_with_400(where: tuple[str, int], request_line: bytes) -> None:
    assert status(where, request_line + b"\r\n\r\n") == 400


@pytest.mark.parametrize("header", [b"no colon", b" folded: x", b"bad name: x", b": x", b"a: b\rc"])
def test_a_wrong_header_is_answered_with_400(where: tuple[str, int], header: bytes) -> None:
    assert status(where, b"GET / HTTP/1.1\r\n" + header + b"\r\n\r\n") == 400


def test_a_long_request_is_refused_with_431_while_it_still_comes(where: tuple[str, int]) -> None:
    at_limit = b"GET / HTTP/1.1\r\nA: " + b"x" * (MAX_REQUEST_NBYTES - 19)
    assert len(at_limit) == MAX_REQUEST_NBYTES

    assert status(where, at_limit + b"\r\n\r\n") == 200
    assert status(where, at_limit + b"x\r\n\r\n") == 431
    assert status(where, b"x" * (MAX_REQUEST_NBYTES * 8)) == 431


def test_a_request_may_come_byte_by_byte(where: tuple[str, int]) -> None:
    sock = send(where, b"")
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for byte in b"GET /slow HTTP/1.0\r\n\r\n":
        sock.sendall(bytes([byte]))

    assert said(sock).endswith(b"GET /slow []\n")


def test_a_failed_answer_is_500_and_the_next_one_is_served(
    where: tuple[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    codes = [get(where, "/fail").status, get(where, "/fail").status, get(where, "/").status]

    assert codes == [500, 500, 200]
    assert len(caplog.records) == 1  # said once


def test_silent_peers_do_not_shut_out_a_scrape_and_are_sent_away(where: tuple[str, int]) -> None:
    silent = [send(where, b"GET /") for _ in range(20)]
    before = threading.active_count()

    assert get(where, "/").status == 200
    assert threading.active_count() == before
    ended = [said_or_reset(sock) for sock in silent]
    assert ended == [b""] * 20


def test_slow_readers_cost_no_place(where: tuple[str, int]) -> None:
    slow = [send(where, b"GET /large HTTP/1.1\r\n\r\n") for _ in range(50)]

    assert get(where, "/").status == 200
    for sock in slow:
        sock.close()


def test_a_large_answer_arrives_whole(where: tuple[str, int]) -> None:
    head, _, body = said(send(where, b"GET /large HTTP/1.1\r\n\r\n")).partition(b"\r\n\r\n")

    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert body == BODY


def test_a_peer_that_never_stops_sending_is_sent_away(where: tuple[str, int]) -> None:
    def flood() -> None:
        while True:
            sock.sendall(b"x" * 4096)

    with send(where, b"GET / HTTP/1.1\r\n\r\n") as sock, pytest.raises(ConnectionError):
        flood()


def test_the_thread_ends_with_open_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "TIMEOUT_S", 3600.0)
    sock = socket.create_server(("127.0.0.1", 0))
    with serving(sock) as server:
        waiting = [send(sock.getsockname(), b"GET") for _ in range(MAX_CONNECTIONS)]
        wait_for(lambda: len(server._open) == MAX_CONNECTIONS, "all are accepted")

    assert [said_or_reset(one) for one in waiting] == [b""] * MAX_CONNECTIONS


def test_the_end_does_not_wait_for_an_answer_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_STOP_S", 0.01)
    asked, go_on = threading.Event(), threading.Event()

    def hang(request: Request) -> Response:
        asked.set()
        assert go_on.wait(PATIENCE_S)
        return answer(request)

    sock = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(sock, hang)
    server.start()
    waiting = send(sock.getsockname(), b"GET / HTTP/1.1\r\n\r\n")
    assert asked.wait(PATIENCE_S)
    server.stop()
    assert server.is_alive()
    go_on.set()
    server.join(PATIENCE_S)
    waiting.close()
    sock.close()

    assert not server.is_alive()


def said_or_reset(sock: socket.socket) -> bytes:
    try:
        return said(sock)
    except ConnectionResetError:
        return b""
