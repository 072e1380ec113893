"""What a rank asks the flight recorder to keep: it goes at once, again after a kill, and before BYE."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from capd_client.process.log import RateLimitedLog
from capd_client.protocol.control import KeepReply
from capd_client.protocol.key import Key
from capd_client.session.session import Session
from capd_client.steps.keeps import Keeps
from tests.kit.client.peer import Peer, wait_until
from tests.kit.paths import REPOSITORY

KEY = Key(quant_type="q", rank=0, tensor_name="x")


def test_a_keep_names_the_iteration_of_the_call(peer: Peer, make_session: Callable[..., Session]) -> None:
    session = make_session()
    session.keep("before the first")
    session.context.set_moment(iteration=41)
    session.keep("loss\x1b[2J spike")

    wait_until(lambda: len(peer.keeps) == 2)
    assert [(keep.id, keep.iteration) for keep in peer.keeps] == [(1, None), (2, 41)]
    assert peer.keeps[1].reason == "loss\N{REPLACEMENT CHARACTER}[2J spike"


def test_a_keep_that_a_killed_daemon_did_not_answer_is_sent_to_the_next_one_alone(
    socket_path: str, make_session: Callable[..., Session]
) -> None:
    first = Peer(socket_path, kept=False)
    session = make_session()
    session.keep("lost")
    wait_until(lambda: len(first.keeps) == 1)
    first.close()
    session.keep("asked while nobody listens")

    second = Peer(socket_path)
    try:
        wait_until(lambda: len(second.keeps) == 2)
        assert [keep.reason for keep in second.keeps] == ["lost", "asked while nobody listens"]
        session.keep("third")
        wait_until(lambda: len(second.keeps) == 3)
    finally:
        second.close()


def test_bye_waits_for_the_answer_to_a_keep(peer: Peer, make_session: Callable[..., Session]) -> None:
    peer.kept = False
    session = make_session()
    session.offer(torch.ones(4), KEY, session.context.moment())
    session.keep("the end")
    wait_until(lambda: peer.keeps)

    assert session.close(0.5)
    assert peer.byes == 0


def test_why_nothing_is_kept_is_said_in_the_job(
    peer: Peer, make_session: Callable[..., Session], caplog: pytest.LogCaptureFixture
) -> None:
    peer.kept_problem = "no recorder here"
    caplog.set_level(logging.WARNING)
    make_session().keep("spike")

    wait_until(lambda: "keep('spike'): no recorder here" in caplog.text)


def test_of_too_many_keeps_the_oldest_is_forgotten_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    keeps = Keeps(RateLimitedLog())
    for number in range(20):
        keeps.ask(f"keep {number}", number)

    assert [keep.iteration for keep in keeps.after(0)] == list(range(4, 20))
    assert "16 keeps wait for the daemon" in caplog.text
    keeps.answered(KeepReply(1))
    keeps.answered(KeepReply(20))
    assert [keep.id for keep in keeps.after(17)] == [18, 19]


@pytest.mark.parametrize(
    ("body", "reasons"),
    [
        ("raise FloatingPointError('loss is nan')", ["FloatingPointError"]),
        ("try:\n    raise ValueError\nfinally:\n    capd_client.close()", ["ValueError"]),
        ("sys.exit(3)", []),
        ("try:\n    sys.exit(3)\nfinally:\n    capd_client.close()", ["SystemExit"]),
        ("try:\n    raise ValueError\nexcept ValueError:\n    pass", []),
        ("thread = threading.Thread(target=lambda: 1 / 0); thread.start(); thread.join()", []),
        ("sys.ps1 = 'In: '; raise ValueError", []),
        ("capd_client.keep('by hand')", ["by hand"]),
        ("sys.exit()", []),
    ],
)
def test_an_exception_that_ends_the_job_is_a_keep(
    peer: Peer, socket_path: str, body: str, reasons: list[str]
) -> None:
    script = (
        "import sys, threading, torch, capd_client\n"
        "capd_client.capture(torch.ones(4), tensor_name='x', iteration=5)\n" + body
    )
    environ = {"PYTHONPATH": str(REPOSITORY), "CAPD_ENDPOINT": f"unix:{socket_path}"}
    subprocess.run([sys.executable, "-c", script], cwd="/", env=environ, capture_output=True, timeout=100)

    assert [keep.reason for keep in peer.keeps] == reasons
    assert [keep.iteration for keep in peer.keeps] == [5] * len(reasons)
    assert peer.byes == 1


def test_a_keep_does_nothing_where_capture_is_off() -> None:
    script = (
        "import capd_client, sys; print(capd_client.keep('x'), 'capd_client.session.session' in sys.modules)"
    )
    environ = {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd="/", env=environ, capture_output=True, text=True, timeout=100
    )
    assert done.stdout.startswith("None")
    assert done.returncode == 0
