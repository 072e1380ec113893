"""Reports over HTTP: who may begin one, the sandbox that shows it, a live run, and the end of the page."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capd_client.protocol.counter_page import PAGE_NBYTES
from capd_client.protocol.key import Moment
from capd_client.protocol.messages import Define, Descriptor, Put
from tests.kit.daemon import DaemonProcess, Rank, daemons, wait_for
from tests.kit.store.cli import StoreWriter, bf16_bits, linear_key
from tests.kit.web.page import WebPage, web_page

LIMIT_S = 120.0
QUICK = "run=run&kind=quick"


def store_at(root: Path) -> Path:
    writer = StoreWriter(root)
    bits = bf16_bits(np.random.default_rng(3).normal(size=(32, 64)))
    writer.put("run", linear_key(), bits, "bfloat16", Moment(iteration=3))
    return writer.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebPage]:
    root = store_at(tmp_path_factory.mktemp("runs"))
    with web_page(root, tmp_path_factory.mktemp("page")) as found:
        yield found


def origin(page: WebPage) -> str:
    return page.address.rstrip("/")


def state(page: WebPage, kind: str = "quick") -> dict[str, Any]:
    return dict(page.ask("report", run="run")["kinds"][kind])


def make(page: WebPage) -> None:
    assert page.get(f"/api/report?{QUICK}", "POST", Origin=origin(page)).status == 200
    wait_for(lambda: state(page)["state"] != "making", "the report", LIMIT_S)
    assert state(page)["state"] == "ready", state(page)


@pytest.mark.parametrize("path", [f"/api/report?{QUICK}", "/api/report/stop?run=run"])
def test_only_the_page_itself_begins_or_ends_a_report(page: WebPage, path: str) -> None:
    own = origin(page)
    for status, headers in (
        (403, {}),
        (403, {"Origin": "http://evil.example"}),
        (403, {"Origin": "null"}),
        (403, {"Origin": f"{own}0"}),
        (403, {"Origin": own, "Cookie": "other=1"}),
        (403, {"Origin": own, "Sec_Fetch_Site": "cross-site"}),
        (400, {"Origin": "http://evil.example", "Host": "evil.example"}),
    ):
        answer = page.get(path, "POST", **headers)
        assert answer.status == status, headers
        assert not [name for name in answer.headers if name.startswith("access-control")]
    assert page.get(f"{path}&token=x", "POST", Origin=own).status == 403
    assert page.get(path, "PUT", Origin=own).status == 405
    assert state(page)["state"] in ("none", "ready")


def test_a_wrong_question_says_what_is_wrong(page: WebPage) -> None:
    own = origin(page)
    for status, path in (
        (400, "/api/report?run=run&kind=other"),
        (400, "/api/report?kind=quick"),
        (404, "/api/report?run=none&kind=quick"),
        (404, "/api/report?run=..%2Frun&kind=quick"),
    ):
        answer = page.get(path, "POST", Origin=own)
        assert (answer.status, bool(answer.json["problem"])) == (status, True), path
    assert page.get("/api/report/stop?run=run", Origin=own).status == 405
    for status, path in (
        (404, "/report?run=run&kind=full"),
        (404, "/report?run=none&kind=full"),
        (400, "/report"),
    ):
        answer = page.get(path)
        assert answer.status == status, path
        assert answer.headers["content-type"].startswith("text/plain")
        assert "unsafe" not in answer.headers["content-security-policy"]


def test_a_report_has_a_sandbox_of_its_own(page: WebPage) -> None:
    make(page)
    answer = page.get(f"/report?{QUICK}")
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert b"<title>" in answer.body
    assert int(answer.headers["content-length"]) == len(answer.body)
    policy = [part.strip() for part in answer.headers["content-security-policy"].split(";")]
    # Not `allow-same-origin`: with it, the report would have the cookie of the page.
    assert policy[:2] == ["sandbox allow-scripts", "default-src 'none'"]
    assert {part.split()[0] for part in policy[2:]} == {
        "script-src", "style-src", "img-src", "base-uri", "form-action", "frame-ancestors",
    }  # fmt: skip
    assert not [part for part in policy if "self" in part or "http" in part or "*" in part]
    for name, value in (
        ("x-content-type-options", "nosniff"), ("cache-control", "no-store"), ("x-frame-options", "DENY"),
        ("referrer-policy", "no-referrer"), ("cross-origin-resource-policy", "same-origin"),
    ):  # fmt: skip
        assert answer.headers[name] == value
    for status, headers in (
        (403, {"Cookie": "other=1"}),
        (403, {"Origin": "null"}),
        (403, {"Sec_Fetch_Site": "cross-site"}),
        (400, {"Host": "evil.example"}),
    ):
        assert page.get(f"/report?{QUICK}", **headers).status == status, headers
    # So a browser reloads a report after a link within it. It asks again by the page's own script.
    sent = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"}
    again = page.get(f"/report?{QUICK}", **sent)
    assert again.status == 403
    assert b"static/web/again.js" in again.body
    assert b"run.zarr" not in again.body
    assert again.headers["content-security-policy"].startswith("default-src 'self'")
    for odd in ({"Sec_Fetch_Dest": "iframe"}, {"Sec_Fetch_Mode": "no-cors", "Sec_Fetch_Dest": "image"}):
        assert b"another site" in page.get(f"/report?{QUICK}", **{**sent, **odd}).body


def test_a_live_run_has_no_report_and_one_that_has_ended_does(runtime_dir: Path, tmp_path: Path) -> None:
    endpoint, store, config = runtime_dir / "s.sock", tmp_path / "store", tmp_path / "capd.toml"
    config.write_text("[daemon]\nidle_seal_s = 0.2\n")
    with daemons() as running:
        running.append(DaemonProcess(store, endpoint, "--config", str(config)))
        rank = Rank(endpoint, rank=0)
        rank.connect()
        rank.send(Define(id=1, key=linear_key(), dtype="bfloat16"))
        offset = PAGE_NBYTES
        rank.memory[offset : offset + 8] = bytes(8)
        rank.send(Put([Descriptor(0, offset, 8, 1, (4,), Moment(iteration=0, time_ns=1))]))
        rank.expect_acks(0)
        with web_page(store, tmp_path, endpoint=endpoint) as page:
            wait_for(lambda: page.ask("report", run="run")["is_finished"] is False, "a live run")
            answer = page.get(f"/api/report?{QUICK}", "POST", Origin=origin(page))
            assert answer.status == 409
            assert "when the run has finished" in answer.json["problem"]
            rank.bye()
            rank.close()
            wait_for(lambda: page.ask("report", run="run")["is_finished"], "the end of the run")
            make(page)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_process_of_a_report_ends_with_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with web_page(store_at(tmp_path / "runs"), tmp_path) as page:
        path = "/api/report?run=run&kind=full"
        assert page.get(path, "POST", Origin=origin(page)).status == 200
        wait_for(lambda: children(page.process.pid), "the process")
        [child] = children(page.process.pid)
        # It has become `capd report`, and asks for less than the page does.
        wait_for(lambda: nice(child) == 19, "its priority")
        page.stop(number)
        wait_for(lambda: not Path(f"/proc/{child}").exists() or is_zombie(child), "its end", 10)
    if number == signal.SIGTERM:
        assert list(temporary.glob("capd-web-*")) == []


def test_a_run_that_is_removed_takes_its_report_along(tmp_path: Path) -> None:
    root = store_at(tmp_path / "runs")
    with web_page(root, tmp_path) as page:
        make(page)
        shutil.rmtree(root / "run.zarr")
        for path in (f"/report?{QUICK}", "/api/report?run=run"):
            answer = page.get(path)
            assert answer.status == 404
            assert b"run.zarr" in answer.body


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return sorted({int(one) for file in found for one in file.read_text().split()})


def fields(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def nice(pid: int) -> int:
    return int(fields(pid)[16])


def is_zombie(pid: int) -> bool:
    return fields(pid)[0] == "Z"
