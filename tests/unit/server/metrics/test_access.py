"""Metrics are open to this machine, and to others by a token alone that nobody else can read."""

from __future__ import annotations

import os
import re
import socket
import stat
from pathlib import Path

import pytest

from capd.errors import ConfigError, EndpointError, StoreBusy
from capd.server.metrics.access import Access, adopt, listen, read_token

TOKEN = "0123456789abcdef" * 2


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", ":0"])
def test_other_machines_need_a_token(address: str, token_file: Path) -> None:
    with pytest.raises(ConfigError, match="open to other machines; add --metrics-token-file"):
        listen(address, None)

    listening = listen(address, token_file)
    assert listening.access == Access(TOKEN.encode())
    listening.close()


@pytest.mark.parametrize("address", ["127.0.0.1:0", "127.9.9.9:0", "localhost:0", "[::1]:0"])
def test_loopback_needs_none_and_answers_to_its_own_names(address: str) -> None:
    listening = listen(address, None)
    port = listening.socket.getsockname()[1]
    host = address.rpartition(":")[0]

    assert listening.access.knows_host({"host": f"{host}:{port}"})
    assert listening.access.knows_host({"host": "LOCALHOST"})
    assert not listening.access.knows_host({"host": f"evil.example:{port}"})
    assert not listening.access.knows_host({})
    assert f":{port}/metrics" in listening.address
    listening.close()


def test_a_port_that_is_taken_is_named_with_the_way_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            EndpointError, match=f"127.0.0.1:{port}: address already in use; stop .* --metrics"
        ):
            listen(f"127.0.0.1:{port}", None)


@pytest.mark.parametrize("address", ["192.0.2.1:9464", "host.invalid:9464", "..:9464"])
def test_what_is_no_address_of_this_machine_is_refused(address: str, token_file: Path) -> None:
    with pytest.raises(EndpointError, match=rf"cannot serve metrics on {re.escape(address)}: .*--metrics"):
        listen(address, token_file)


def test_a_unix_socket_is_closed_to_other_users_and_removed_at_the_end(runtime_dir: Path) -> None:
    path = runtime_dir / "m.sock"
    listening = listen(f"unix:{path}", None)

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert listening.access.knows_host({})
    with pytest.raises(StoreBusy, match="another --metrics"):
        listen(f"unix:{path}", None)
    listening.close()
    assert not path.exists()


def test_a_socket_that_is_handed_over_keeps_its_path_and_the_rule_of_tokens(
    runtime_dir: Path, token_file: Path
) -> None:
    given = socket.socket(socket.AF_UNIX)
    given.bind(str(runtime_dir / "m.sock"))
    given.listen()
    listening = adopt(given, None)
    listening.close()
    assert (runtime_dir / "m.sock").exists()

    with socket.create_server(("0.0.0.0", 0)) as given:  # noqa: S104 - that is the case
        with pytest.raises(ConfigError, match="open to other machines"):
            adopt(given, None)
        assert adopt(given, token_file).access.token == TOKEN.encode()


def test_a_socket_that_nobody_can_scrape_is_not_taken(runtime_dir: Path) -> None:
    datagrams, silent, abstract = (
        socket.socket(socket.AF_UNIX, kind)
        for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM, socket.SOCK_STREAM)
    )
    datagrams.bind(str(runtime_dir / "d"))
    silent.bind(str(runtime_dir / "s"))
    abstract.bind(f"\0capd-test-{os.getpid()}")
    abstract.listen()
    for given, problem in (
        (datagrams, "is no unix or TCP stream"),
        (silent, "does not listen"),
        (abstract, "no path"),
    ):
        with given, pytest.raises(EndpointError, match=f"{problem}; write ListenStream="):
            adopt(given, None)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o644])
def test_a_token_that_others_can_read_is_refused(token_file: Path, mode: int) -> None:
    token_file.chmod(mode)

    with pytest.raises(ConfigError, match=f"others can read or write the token file .*{mode:04o}.*chmod 600"):
        read_token(token_file)


@pytest.mark.parametrize(
    "content", ["", "short", "x" * 1025, "two words of a token", f"{TOKEN}\n{TOKEN}", "ä" * 20]
)
def test_what_is_no_token_is_refused(token_file: Path, content: str) -> None:
    token_file.write_text(content)

    with pytest.raises(ConfigError, match="one line of 16 to 1024 visible"):
        read_token(token_file)


def test_a_token_file_is_a_file_of_ones_own(tmp_path: Path, token_file: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_token(tmp_path / "absent")
    with pytest.raises(ConfigError, match="is no file"):
        read_token(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="is no file"):
        read_token(tmp_path / "pipe")
    assert read_token(token_file) == TOKEN.encode()


@pytest.mark.parametrize(
    ("header", "known"),
    [(f"Bearer {TOKEN}", True), (f"bearer  {TOKEN}", True), (f"Basic {TOKEN}", False), (TOKEN, False),
     (f"Bearer {TOKEN}x", False), ("Bearer ä", False), ("Bearer", False), ("", False)],
)  # fmt: skip
def test_the_token_is_a_bearer_token(header: str, known: bool) -> None:
    access = Access(TOKEN.encode())

    assert access.knows_token({"authorization": header}) is known
    assert not access.knows_token({})
    assert Access().knows_token({})
