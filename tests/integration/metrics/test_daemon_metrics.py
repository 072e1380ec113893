"""The metrics of a real daemon: they equal `capd stats`, are safe to serve, and survive bad settings and bad peers."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import stat
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from capd.server.runs.registry import MAX_QUIET_RUNS
from capd_client.protocol.counter_page import PAGE_NBYTES
from capd_client.protocol.key import Moment
from capd_client.protocol.messages import Descriptor, Put
from tests.kit import processes as real
from tests.kit.daemon import DaemonProcess, Rank, daemons, wait_for
from tests.kit.metrics.scrape import OPENMETRICS, Samples, address_of, get

Start = Callable[..., DaemonProcess]
Where = tuple[str, int]


@pytest.fixture
def start(runtime_dir: Path) -> Iterator[Start]:
    """Starts daemons that serve metrics on a port of the kernel's choice; a run is sealed soon after its last rank."""
    config = runtime_dir / "capd.toml"
    config.write_text("[daemon]\nidle_seal_s = 0.2\n")
    with daemons() as made:

        def start(*options: str, metrics: str = "127.0.0.1:0", **more: Any) -> DaemonProcess:
            made.append(
                DaemonProcess(
                    runtime_dir / "store", runtime_dir / "s.sock",
                    "--config", str(config), "--metrics", metrics, *options, **more,
                )
            )  # fmt: skip
            return made[-1]

        yield start


@pytest.fixture
def rank(runtime_dir: Path) -> Iterator[Rank]:
    made = Rank(runtime_dir / "s.sock")
    yield made
    made.close()


def of_stats(stats: dict[str, Any]) -> Samples:
    """The samples that a STATS reply demands; of reasons those that count."""
    found: Samples = {}
    for run in stats["runs"]:
        labels = frozenset({("run_id", run["run_id"])})
        for name, field in (
            ("capd_records_offered_total", "offered"), ("capd_records_committed_total", "committed"),
            ("capd_records_in_flight", "in_flight"), ("capd_raw_bytes_total", "raw_bytes"),
            ("capd_stored_bytes_total", "stored_bytes"),
        ):  # fmt: skip
            found[name, labels] = run[field]
        for reason, count in run["dropped"].items():
            found["capd_records_dropped_total", labels | {("reason", reason)}] = count
        for state in ("live", "ended", "died"):
            sessions = [one for one in run["sessions"] if one["state"] == state]
            found["capd_sessions", labels | {("state", state)}] = len(sessions)
    return found


def of_page(found: Samples) -> Samples:
    """The same samples of a page."""
    names = {
        "capd_records_offered_total", "capd_records_committed_total", "capd_records_in_flight",
        "capd_raw_bytes_total", "capd_stored_bytes_total", "capd_records_dropped_total", "capd_sessions",
    }  # fmt: skip
    return {
        (name, labels): value
        for (name, labels), value in found.items()
        if name in names and (value or name != "capd_records_dropped_total")
    }


def value(found: Samples, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


def counters(found: Samples) -> Samples:
    """What may never go down."""
    return {
        key: count for key, count in found.items() if key[0].endswith(("_total", "_bucket", "_count", "_sum"))
    }


def test_counters_equal_those_of_stats_at_rest_and_never_go_down(start: Start, runtime_dir: Path) -> None:
    daemon = start()
    where = address_of(daemon)
    seen: list[Samples] = []

    def scrape() -> Samples:
        seen.append(get(where, Accept=OPENMETRICS).samples)
        return seen[-1]

    ranks = [
        real.Rank(f"unix:{daemon.path}", number, run_id=run, CAPD_WORLD_SIZE="3")
        for number, run in enumerate(("one", "one", "two"))
    ]
    try:
        for one in ranks:
            one.tell("capture 0 30")
        for one in ranks:
            scrape()
            one.hear()
            assert one.ask("flush") is True
        wait_for(lambda: of_page(scrape()) == of_stats(daemon.stats()), "the page equals STATS")
        assert value(seen[-1], "capd_records_committed_total", run_id="one") == 60
        assert value(seen[-1], "capd_sessions", run_id="one", state="live") == 2
        ranks[0].kill()
        ranks[1].leave()
        wait_for(lambda: daemon.run_stats("one")["sealed"], "run one is sealed")
        wait_for(
            lambda: of_page(scrape()) == of_stats(daemon.stats()), "the page equals STATS after the ranks"
        )
        assert value(seen[-1], "capd_sessions", run_id="one", state="died") == 1
        assert value(seen[-1], "capd_sessions", run_id="one", state="ended") == 1
        wait_for(lambda: value(scrape(), "capd_arena_bytes", run_id="one") == 0, "the arenas are given back")
        wait_for(lambda: value(scrape(), "capd_seal_duration_seconds_count") >= 1, "the seal is counted")
        ranks[2].leave()
    finally:
        for one in ranks:
            one.kill()
    wait_for(lambda: of_page(scrape()) == of_stats(daemon.stats()), "the page equals STATS at the end")
    # Three large records of each rank, and 27 in the log: each was committed once.
    assert value(seen[-1], "capd_commit_duration_seconds_count") == 90
    for before, after in itertools.pairwise(seen):
        lower = {
            key: (count, after[key])
            for key, count in counters(before).items()
            if after.get(key, count) < count
        }
        assert lower == {}
    assert daemon.stop() == 0


def test_drops_and_values_are_counted_by_reason_and_kind(start: Start, rank: Rank) -> None:
    daemon = start("--metrics-ranks")
    where = address_of(daemon)
    rank.connect()
    rank.count(offered=9, arena_full=2, sampled=3)
    rank.put(1, 2)
    # bfloat16: two NaN, one infinity, one 1.0
    rank.memory[PAGE_NBYTES + 1024 : PAGE_NBYTES + 1032] = struct.pack("<4H", 0x7FC0, 0xFFC1, 0xFF80, 0x3F80)
    rank.send(Put([Descriptor(3, PAGE_NBYTES + 1024, 8, 0, (4,), Moment(iteration=3))]))
    rank.expect_acks(1, 2, 3)
    found = wait_for(
        lambda: (page := get(where).samples) and of_page(page) == of_stats(daemon.stats()) and page, "equal"
    )

    assert value(found, "capd_records_dropped_total", run_id="run", reason="arena_full") == 2
    assert value(found, "capd_records_dropped_total", run_id="run", reason="sampled") == 3
    assert value(found, "capd_records_dropped_total", run_id="run", reason="interrupted") == 0
    assert value(found, "capd_values_nonfinite_total", run_id="run", kind="nan") == 2
    assert value(found, "capd_values_nonfinite_total", run_id="run", kind="inf") == 1
    assert value(found, "capd_rank_records_dropped_total", run_id="run", rank="0") == 5
    assert value(found, "capd_records_in_flight", run_id="run") == 1
    assert value(found, "capd_oldest_uncommitted_seconds") == 0


def test_what_a_rank_gives_up_at_its_exit_and_the_daemon_commits_is_never_a_drop(
    start: Start, rank: Rank
) -> None:
    where = address_of(start())
    seen: list[float] = []

    def dropped() -> float:
        labels = {"run_id": "run", "reason": "not_connected"}
        seen.append(value(get(where).samples, "capd_records_dropped_total", **labels))
        return seen[-1]

    def in_flight(count: int) -> None:
        wait_for(
            lambda: (
                get(where).samples.get(("capd_records_in_flight", frozenset({("run_id", "run")}))) == count
            ),
            f"{count} in flight",
        )
        dropped()

    rank.connect()
    rank.count(offered=5, not_connected=5)
    in_flight(5)
    rank.put(1, 2, 3)
    rank.expect_acks(1, 2, 3)
    in_flight(2)
    rank.bye()
    wait_for(lambda: dropped() == 2, "two are lost")

    assert set(seen) == {0, 2}


def test_counters_of_a_run_that_was_forgotten_go_on(start: Start, runtime_dir: Path) -> None:
    where = address_of(start())
    nan = "capd_values_nonfinite_total", frozenset({("run_id", "run"), ("kind", "nan")})

    def capture(run_id: str, sequence: int) -> None:
        here = Rank(runtime_dir / "s.sock", run_id=run_id, arena_nbytes=1 << 16)
        here.connect()
        here.count(offered=1)
        here.memory[PAGE_NBYTES : PAGE_NBYTES + 8] = struct.pack("<4H", 0x7FC0, 0x7FC0, 0, 0)
        here.send(Put([Descriptor(sequence, PAGE_NBYTES, 8, 0, (4,), Moment(iteration=sequence))]))
        here.expect_acks(sequence)
        here.bye()
        here.close()

    capture("run", 1)
    wait_for(lambda: get(where).samples.get(nan) == 2, "the first record")
    for number in range(MAX_QUIET_RUNS + 1):
        capture(f"other-{number}", 1)
    wait_for(lambda: nan not in get(where).samples, "the run is forgotten")
    capture("run", 2)

    assert wait_for(lambda: get(where).samples.get(nan), "the run is back") >= 2
    wait_for(lambda: get(where).samples[nan] == 4, "both records")


def test_accept_chooses_the_format(start: Start) -> None:
    where = address_of(start())
    plain, chosen = get(where), get(where, Accept=OPENMETRICS)

    assert plain.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert chosen.headers["Content-Type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert chosen.body.endswith("# EOF\n")
    assert "# EOF" not in plain.body
    assert get(where, Accept="text/plain, application/openmetrics-text;q=0.1").body.startswith(
        "# HELP capd_build_info"
    )


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_who_may_read_what(start: Start, tmp_path: Path, runtime_dir: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret-s3cret-s3cret\n")
    token.chmod(0o600)
    open_here = address_of(start())
    with daemons() as made:
        made.append(
            DaemonProcess(tmp_path / "store", runtime_dir / "t.sock", "--metrics", "0.0.0.0:0",
                          "--metrics-token-file", str(token))
        )  # fmt: skip
        guarded = address_of(made[0])

        def code(port: int, path: str, *options: str) -> int:
            command = ["curl", "-s", "-o", os.devnull, "-w", "%{http_code}", *options]
            return int(subprocess.check_output([*command, f"http://127.0.0.1:{port}{path}"], text=True))

        bearer = ("-H", "Authorization: Bearer s3cret-s3cret-s3cret")
        assert code(open_here[1], "/metrics") == 200
        assert code(open_here[1], "/healthz") == 200
        assert code(open_here[1], "/metrics?x=1") == 200
        assert code(open_here[1], "/") == 404
        assert code(open_here[1], "/metrics/") == 404
        assert code(open_here[1], "/metrics", "-H", "Host: evil.example") == 403
        assert code(open_here[1], "/metrics", "-X", "POST") == 405
        assert code(open_here[1], "/metrics", "-X", "DELETE") == 405
        assert code(open_here[1], "/metrics", "-H", "A: " + "x" * 9000) == 431
        assert code(guarded[1], "/metrics") == 401
        assert code(guarded[1], "/metrics", "-H", "Authorization: Bearer wrong-wrong-wrong") == 401
        assert code(guarded[1], "/metrics", *bearer, "-H", "Host: any.example") == 200
        assert code(guarded[1], "/healthz") == 200
        assert token.read_text().strip() not in made[0].text()


def test_a_unix_socket_is_the_users_own_and_leaves_with_the_daemon(start: Start, runtime_dir: Path) -> None:
    path = runtime_dir / "metrics" / "m.sock"
    daemon = start(metrics=f"unix:{path}")

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert get(path).status == 200
    assert get(path, "/healthz").body == "ok\n"
    assert daemon.stop() == 0
    assert not path.exists()


def test_off_is_the_default_and_needs_no_thread(runtime_dir: Path) -> None:
    with daemons() as made:
        made.append(DaemonProcess(runtime_dir / "store", runtime_dir / "s.sock"))
        names = [
            path.read_text().strip() for path in Path(f"/proc/{made[0].process.pid}/task").glob("*/comm")
        ]
        inodes = [link for link in made[0].open_links() if link.startswith("socket:")]

    assert "metrics" not in made[0].text()
    assert not [name for name in names if name.startswith("capd-metrics")]
    assert len(inodes) <= 2


def bad_settings(directory: Path, port: int) -> dict[str, tuple[tuple[str, ...], int, str]]:
    """Options, exit code, and what the one line must say."""
    readable = directory / "readable"
    readable.write_text("s3cret-s3cret-s3cret\n")
    readable.chmod(0o644)
    return {
        "port": (("--metrics", f"127.0.0.1:{port}"), 3, f"127.0.0.1:{port}: address already in use; stop the program"),
        "host": (("--metrics", "0.0.0.0:0"), 2, "open to other machines; add --metrics-token-file FILE"),
        "address": (("--metrics", "9464"), 2, "'9464' is no address for metrics; write unix:/path/to/metrics.sock"),
        "token": (
            ("--metrics", "0.0.0.0:0", "--metrics-token-file", str(readable)), 2,
            f"others can read or write the token file {readable} (mode 0644); run `chmod 600 {readable}`",
        ),
        "file": (("--metrics-file", str(readable)), 2, "must end in .prom"),
        "socket": (("--metrics", f"unix:{directory}/{'x' * 120}"), 3, "use a shorter one, such as --metrics"),
        "format": (("--log-format", "xml"), 2, "--log-format: Input should be 'text' or 'json', got 'xml'"),
    }  # fmt: skip


@pytest.mark.parametrize("case", ["port", "host", "address", "token", "file", "socket", "format"])
def test_a_bad_setting_is_one_line_and_touches_nothing(runtime_dir: Path, case: str) -> None:
    store = runtime_dir / "store"
    store.mkdir()
    (store / "kept").write_text("kept")
    with socket.create_server(("127.0.0.1", 0)) as taken, daemons() as made:
        options, code, text = bad_settings(runtime_dir, taken.getsockname()[1])[case]
        made.append(DaemonProcess(store, runtime_dir / "s.sock", *options, wait=False))
        ended = made[0].process.wait(60)

    [line] = made[0].text().splitlines()
    assert (ended, line.startswith("capd: ")) == (code, True), line
    assert text in line
    assert not (runtime_dir / "s.sock").exists()
    assert (store / "kept").read_text() == "kept"
    assert not list(store.glob("*.zarr"))


def test_a_running_daemon_is_not_disturbed_by_one_that_wants_its_port(
    start: Start, rank: Rank, tmp_path: Path
) -> None:
    daemon = start()
    where = address_of(daemon)
    rank.connect()
    with daemons() as made:
        made.append(
            DaemonProcess(tmp_path / "store", rank.path.with_name("other.sock"),
                          "--metrics", f"127.0.0.1:{where[1]}", wait=False)
        )  # fmt: skip
        assert made[0].process.wait(60) == 3
    rank.count(offered=1)
    rank.put(1)
    rank.expect_acks(1)

    assert get(where).status == 200


def test_scrapes_go_on_while_the_disk_takes_nothing_and_show_the_growing_lag(
    start: Start, rank: Rank
) -> None:
    where = address_of(start(env={**os.environ, "CAPD_FAILPOINTS": "log.before_write=hang"}))
    rank.connect()
    rank.count(offered=2)
    rank.put(1, 2)
    lags = [wait_for(lambda: value(get(where).samples, "capd_oldest_uncommitted_seconds"), "a lag")]
    wait_for(
        lambda: value(get(where).samples, "capd_oldest_uncommitted_seconds") > lags[0] + 1, "a longer lag"
    )

    assert value(get(where).samples, "capd_records_in_flight", run_id="run") == 2
    assert get(where, "/healthz").status == 200


def test_health_names_a_full_disk_and_recovers(start: Start, rank: Rank) -> None:
    daemon = start("--max-disk", "300KB")
    where = address_of(daemon)
    rank.connect()
    assert (get(where, "/healthz").status, get(where, "/healthz").body) == (200, "ok\n")
    nbytes = 400_000
    rank.memory[PAGE_NBYTES : PAGE_NBYTES + nbytes] = os.urandom(nbytes)
    rank.send(Put([Descriptor(1, PAGE_NBYTES, nbytes, 0, (nbytes // 2,), Moment())]))
    rank.listen_until(lambda: rank.nacked, "a refusal")
    answer = wait_for(lambda: (got := get(where, "/healthz")).status == 503 and got, "503")

    assert answer.body == "disk_full\n"
    rank.put(2)
    rank.expect_acks(2)
    wait_for(lambda: get(where, "/healthz").status == 200, "a record is admitted")


def test_health_names_a_store_that_is_gone(start: Start, runtime_dir: Path) -> None:
    where = address_of(start())
    (runtime_dir / "store").rename(runtime_dir / "elsewhere")

    assert (get(where, "/healthz").status, get(where, "/healthz").body) == (503, "store_failed\n")
    assert value(get(where).samples, "capd_store_failed") == 1


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is not installed")
def test_the_file_is_for_node_exporter_and_shows_by_its_age_that_a_daemon_was_killed(
    start: Start, tmp_path: Path
) -> None:
    path = tmp_path / "capd.prom"
    daemon = start("--metrics-file", str(path), metrics="off")
    wait_for(path.exists, "the file")
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=path.read_text(), capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, "")
    # node_exporter has these names for itself.
    assert "process_" not in path.read_text()
    daemon.stop(signal.SIGKILL)
    assert path.exists()

    daemon = start("--metrics-file", str(path), metrics="off")
    assert daemon.stop() == 0
    assert list(tmp_path.iterdir()) == []


def test_a_log_of_json_is_json_line_by_line(start: Start, rank: Rank, runtime_dir: Path) -> None:
    daemon = start("--log-format", "json", env={**os.environ, "CAPD_MAXDISK": "1"})
    rank.connect(host="a\nb")
    rank.disconnect()
    wait_for(lambda: "disconnected" in daemon.text(), "the rank is gone")
    with daemons() as made:
        made.append(
            DaemonProcess(runtime_dir / "store", runtime_dir / "o.sock", "--log-format", "json", wait=False)
        )
        assert made[0].process.wait(60) == 7
        refused = [json.loads(line) for line in made[0].text().splitlines()]
    assert daemon.stop() == 0
    entries = [json.loads(line) for line in daemon.text().splitlines()]

    assert {frozenset(entry) for entry in entries} == {
        frozenset({"time", "level", "logger", "thread", "pid", "message"})
    }
    assert {entry["pid"] for entry in entries} == {daemon.process.pid}
    assert any(entry["message"].startswith("listening on unix:") for entry in entries)
    assert [(entry["level"], "another daemon" in entry["message"]) for entry in refused] == [("error", True)]


def test_slow_readers_and_silent_peers_neither_stop_scrapes_nor_add_threads(start: Start) -> None:
    daemon = start()
    where = address_of(daemon)
    tasks = Path(f"/proc/{daemon.process.pid}/task")
    before = len(list(tasks.iterdir()))
    with contextlib.ExitStack() as stack:
        for number in range(50):
            sock = stack.enter_context(socket.create_connection(where))
            sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n" + b"\r\n" * (number % 2))
        pages = [get(where) for _ in range(20)]

        assert {page.status for page in pages} == {200}
        # The daemon's own threads may come and go at its start. A thread for each peer would be 50.
        assert len(list(tasks.iterdir())) < before + 5
