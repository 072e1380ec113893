"""Who may see the page: the link, the cookie, Host, Origin and the headers of each answer."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from capd_client.protocol.key import Moment
from tests.kit.daemon import wait_for
from tests.kit.store.cli import StoreWriter, bf16_bits, linear_key, run_capd
from tests.kit.web.page import WebPage, web_page

CSP = "default-src 'self'; img-src 'self' data:;"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    writer = StoreWriter(root)
    writer.put("run", linear_key(), bf16_bits(np.ones((4, 4))), "bfloat16", Moment(iteration=3))
    return writer.close()


@pytest.fixture(scope="module")
def page(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebPage]:
    with web_page(store, tmp_path_factory.mktemp("page")) as found:
        yield found


def test_the_link_opens_the_page_once_and_the_next_one_is_printed(store: Path, tmp_path: Path) -> None:
    with web_page(store, tmp_path, enter=False) as page:
        token = page.link.partition("token=")[2]
        assert len(token) >= 43
        assert page.get("/").status == 403
        assert page.get("/?token=wrong").status == 403
        assert page.get(f"/?token={token}", "HEAD").status == 403
        answer = page.enter(token)
        assert (answer.status, answer.headers["location"]) == (303, "./")
        cookie = answer.headers["set-cookie"]
        assert re.fullmatch(rf"capd-{page.port}=[\w-]+; HttpOnly; Path=/; SameSite=strict", cookie), cookie
        assert token not in cookie
        assert page.get("/").status == 200
        first = page.cookie
        assert page.enter(token).status == 403
        wait_for(lambda: "the next one" in page.err(), "next link")
        assert page.enter().status == 303
        assert page.cookie == first


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (403, {"Cookie": "other=1"}),
        (400, {"Host": "evil.example"}),
        (400, {"Host": "127.0.0.1.evil.example:80"}),
        (403, {"Origin": "http://evil.example"}),
        (403, {"Origin": "null"}),
        (403, {"Origin": "http://127.0.0.1:1"}),
        (403, {"Sec_Fetch_Site": "cross-site"}),
        (403, {"Sec_Fetch_Site": "same-site"}),
        (200, {"Sec_Fetch_Site": "same-origin"}),
        (200, {"Host": "LOCALHOST:9"}),
        (200, {}),
    ],
)
def test_a_request_must_name_the_page_and_come_from_it(
    page: WebPage, status: int, headers: dict[str, str]
) -> None:
    for path in ("/", "/api/runs", "/static/web/main.js"):
        answer = page.get(path, **headers)
        assert answer.status == status, path
        assert answer.headers["content-security-policy"].startswith(CSP)
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-store"
        assert not [name for name in answer.headers if name.startswith("access-control")]
        assert b"capd" not in answer.headers.get("server", "").encode()


def test_an_own_origin_may_ask(page: WebPage) -> None:
    assert page.get("/api/runs", Origin=page.address.rstrip("/")).status == 200


def test_two_hosts_are_none(page: WebPage) -> None:
    with socket.create_connection(("127.0.0.1", page.port)) as sock:
        sock.sendall(
            f"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\nCookie: {page.cookie}\r\n\r\n".encode()
        )
        assert sock.recv(100).split()[1] == b"400"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE"])
def test_the_page_only_reads(page: WebPage, method: str) -> None:
    answer = page.get("/api/runs", method)
    assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("nbytes", [40 << 10, pytest.param(1 << 20, marks=pytest.mark.slow)])
def test_large_headers_are_refused(page: WebPage, nbytes: int) -> None:
    # The server may stop reading before the client has sent it all.
    with contextlib.suppress(ConnectionError):
        assert page.get("/", X_Large="x" * nbytes).status in (400, 431)
    assert page.get("/").status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/static/../answers.py", "/static/web/%2e%2e/answers.py", "/static/web/page.html", "/static/", "/nothing",
        "/api/run?run=..%2Fruns%2Frun", "/api/run?run=%00", "/api/run?run=.capd", "/api/run?run=none",
        "/api/tensor?run=run&path=no/such",
    ],
)  # fmt: skip
def test_nothing_outside_is_found(page: WebPage, path: str) -> None:
    assert page.get(path).status == 404


@pytest.mark.parametrize(
    "path",
    [
        "/api/run",
        "/api/series?run=run&first=-1",
        "/api/series?run=run&rank=x",
        "/api/layers?run=run&statistic=y",
    ],
)
def test_a_wrong_question_says_what_is_wrong(page: WebPage, path: str) -> None:
    answer = page.get(path)
    assert answer.status == 400
    assert answer.json["problem"]


def test_the_next_free_port_is_taken(page: WebPage, store: Path, tmp_path: Path) -> None:
    with web_page(store, tmp_path, "--port", str(page.port)) as other:
        assert page.port < other.port <= page.port + 64
        # Cookies ignore ports, so their names have them.
        assert other.cookie.partition("=")[0] != page.cookie.partition("=")[0]
        assert other.get("/", Cookie=f"{page.cookie}; {other.cookie}").status == 200
        assert other.get("/", Cookie=page.cookie).status == 403
        assert f"ssh -L {other.port}:127.0.0.1:{other.port} " in other.out()


def test_a_unix_socket_is_the_users_alone(store: Path, tmp_path: Path, runtime_dir: Path) -> None:
    path = runtime_dir / "web.sock"
    with web_page(store, tmp_path, uds=path) as page:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert f":{path} " in page.out()
        assert page.ask("runs")["total"] == 1
        # As through ssh -L.
        assert page.get("/", Host="localhost:8787").status == 200
        done = run_capd("web", store, "--uds", path, "--no-browser")
        assert done.code == 7, done.err
        page.stop()
        assert not path.exists()


def test_a_token_file_opens_the_page_again_and_again(store: Path, tmp_path: Path) -> None:
    file = tmp_path / "token"
    with web_page(store, tmp_path, "--token-file", file, enter=False) as page:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        token = file.read_text().strip()
        assert token not in page.out() + page.err()
        assert [page.enter(token).status for _ in range(3)] == [303] * 3
        cookie = page.cookie
        port = page.port
    # A browser stays in when the page starts again.
    with web_page(store, tmp_path, "--token-file", file, "--port", str(port), enter=False) as page:
        page.cookie = cookie
        assert page.get("/").status == (200 if page.port == port else 403)
    file.chmod(0o644)
    done = run_capd("web", store, "--token-file", file, "--port", "0", "--no-browser")
    assert done.code == 2
    assert "chmod 600" in done.err


EVERYWHERE = "0.0.0.0"  # noqa: S104 - what the test is about


def test_other_machines_need_a_token_file_and_a_warning_says_plain_http(store: Path, tmp_path: Path) -> None:
    done = run_capd("web", store, "--host", EVERYWHERE, "--port", "0", "--no-browser")
    assert done.code == 2
    assert "--token-file" in done.err
    with web_page(store, tmp_path, "--host", EVERYWHERE, "--token-file", tmp_path / "t", enter=False) as page:
        wait_for(lambda: "plain HTTP" in page.err(), "the warning")
        token = (tmp_path / "t").read_text().strip()
        port = int(re.search(r":(\d+)/", page.link)[1])  # type: ignore[index]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", f"/?token={token}")
        assert connection.getresponse().status == 303
        connection.close()


def test_a_proxy_may_have_a_name_and_a_path(store: Path, tmp_path: Path) -> None:
    options = ("--root-path", "/user/me/proxy/1", "--allow-host", "hub.example")
    with web_page(store, tmp_path, *options, enter=False) as page:
        answer = page.enter()
        assert answer.headers["location"] == "./"
        assert "Path=/user/me/proxy/1;" in answer.headers["set-cookie"]
        assert page.get("/api/runs", Host="hub.example", Origin="https://hub.example").status == 200


def test_sigterm_ends_it_in_order_and_its_priority_is_low(store: Path, tmp_path: Path) -> None:
    with web_page(store, tmp_path) as page:
        assert os.getpriority(os.PRIO_PROCESS, page.process.pid) == 10
        assert page.stop() == 0
        assert page.err().count("\n") == 1
    with web_page(store, tmp_path) as page:
        assert page.stop(signal.SIGINT) == 130


def test_curl_gets_in_as_a_browser_does(page: WebPage, tmp_path: Path) -> None:
    jar = tmp_path / "jar"
    token = page.err().rpartition("token=")[2].strip()
    follow = ["curl", "-sL", "-c", jar, "-b", jar, "-o", "/dev/null", "-w", "%{http_code} %{url_effective}"]
    done = subprocess.run(
        [*follow, f"{page.address}?token={token}"], capture_output=True, text=True, check=True
    )
    # The address bar keeps no token.
    assert done.stdout == f"200 {page.address}"
