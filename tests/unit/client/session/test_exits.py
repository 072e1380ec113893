"""The ways a job ends, or becomes another program, with captures in flight: none hangs, and every count stays exact."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from capd_client.protocol.messages import Reject
from tests.kit import forking
from tests.kit.client.peer import Peer, wait_until
from tests.kit.tiers import rows

PENDING = 3


def job(script: str) -> list[str]:
    """A job that has captured three tensors, connected, before `script` goes on."""
    opening = f"""
        import os, signal, subprocess, sys, threading, time, warnings, torch, capd_client
        warnings.simplefilter("error")
        for _ in range({PENDING}):
            capd_client.capture(torch.ones(3), tensor_name="x")
        """
    return [sys.executable, "-c", textwrap.dedent(opening) + textwrap.dedent(script)]


def run(script: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a job to its end."""
    return forking.run(job(script), env=env, capture_output=True, text=True, timeout=60)


def wait_for_end(peer: Peer) -> None:
    """Until the peer has seen the end of every connection."""
    wait_until(lambda: peer._connections and all(c.closed for c in peer._connections))


def test_exec_ends_the_rank_and_leaves_neither_socket_nor_arena_behind(
    peer: Peer, job_env: dict[str, str]
) -> None:
    peer.ack = False
    done = run(
        """
        import capd_client.api
        while capd_client.api.session().transport.welcome is None:
            time.sleep(0.01)
        os.execvp("ls", ["ls", "-l", "/proc/self/fd"])
        """,
        job_env,
    )
    assert done.returncode == 0, done.stderr
    assert "memfd" not in done.stdout
    assert "socket" not in done.stdout
    wait_for_end(peer)
    assert peer.byes == 0
    assert peer.last_words[1:4] == [PENDING, 0, PENDING]


@pytest.mark.slow
def test_a_program_after_exec_captures_as_a_rank_of_its_own(peer: Peer, job_env: dict[str, str]) -> None:
    done = run(
        """
        if len(sys.argv) < 2:
            assert capd_client.flush(20)
            again = "import torch, capd_client; capd_client.capture(torch.zeros(2), tensor_name='y')"
            os.execv(sys.executable, [sys.executable, "-c", again])
        """,
        job_env,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [record.key.tensor_name for record in peer.records] == ["x"] * PENDING + ["y"]
    assert len({hello.client for hello in peer.hellos}) == 2
    assert len({hello.pid for hello in peer.hellos}) == 1


def test_os_exit_with_captures_pending_ends_at_once_and_the_counters_tell(
    peer: Peer, job_env: dict[str, str]
) -> None:
    peer.ack = False
    done = run("os._exit(7)", job_env)
    assert (done.returncode, done.stderr) == (7, "")
    wait_until(lambda: peer.last_words or not peer._connections)
    if peer.last_words:  # it may be gone before it was connected
        assert peer.last_words[1:4] == [PENDING, 0, PENDING]


def test_an_exit_inside_a_thread_ends_that_thread_alone(peer: Peer, job_env: dict[str, str]) -> None:
    done = run(
        """
        def leave():
            capd_client.capture(torch.zeros(2), tensor_name="thread")
            sys.exit(3)
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
        capd_client.capture(torch.zeros(2), tensor_name="after")
        """,
        job_env,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [record.key.tensor_name for record in peer.records] == ["x"] * PENDING + ["thread", "after"]
    assert peer.byes == 1


def test_a_thread_that_captures_during_exit_hinders_nothing(peer: Peer, job_env: dict[str, str]) -> None:
    """Daemon threads run on while the interpreter takes itself apart."""
    done = run(
        """
        tensor = torch.ones(5)
        def capture_for_ever():
            while True:
                capd_client.capture(tensor, tensor_name="late")
        for _ in range(3):
            threading.Thread(target=capture_for_ever, daemon=True).start()
        time.sleep(0.2)
        """,
        job_env | {"CAPD_EXIT_TIMEOUT_S": "10"},
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert peer.byes == 1
    offered, acked, in_flight, *dropped = peer.words[1:40]
    assert (in_flight, offered) == (0, acked + sum(dropped))


@pytest.mark.parametrize(
    "number",
    rows([signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGABRT], [signal.SIGTERM, signal.SIGINT]),
)
def test_a_signal_ends_the_job_as_it_would_without_capture(
    number: int, peer: Peer, job_env: dict[str, str]
) -> None:
    """capd installs no handlers: the exit status is the signal's, and nothing is waited for but by Ctrl-C's way out."""
    process = forking.popen(
        job("print('ready', flush=True)\ntime.sleep(60)"),
        env=job_env | {"CAPD_EXIT_TIMEOUT_S": "2"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        wait_until(lambda: len(peer.puts) == PENDING)
        began = time.monotonic()
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
        assert process.returncode == -number
        assert time.monotonic() - began < 20
        assert ("KeyboardInterrupt" in said) == (number == signal.SIGINT)
    finally:
        process.kill()
        process.communicate()


def test_what_a_signal_handler_raises_amid_a_line_of_the_log_reaches_the_job(job_env: dict[str, str]) -> None:
    """Python's logging prints and forgets whatever is raised while it writes."""
    done = run(
        """
        def limit(number, frame):
            raise TimeoutError(number)

        class Stderr:
            def write(self, text):
                signal.raise_signal(signal.SIGALRM)

        signal.signal(signal.SIGALRM, limit)
        before, sys.stderr = sys.stderr, Stderr()
        try:
            capd_client.capture("no tensor", tensor_name="y")
        except TimeoutError:
            print("reached")
        sys.stderr = before
        """,
        {n: v for n, v in job_env.items() if n != "CAPD_STRICT"} | {"CAPD_EXIT_TIMEOUT_S": "0"},
    )
    assert (done.returncode, done.stdout) == (0, "reached\n"), done.stderr


@pytest.mark.slow
def test_what_a_signal_handler_raises_reaches_the_job(peer: Peer, job_env: dict[str, str]) -> None:
    """A time limit must end what it is set for, also where the signal comes in while capd's code runs."""
    done = run(
        """
        class Limit:
            def __call__(self, number, frame):
                raise TimeoutError(number)

        signal.signal(signal.SIGALRM, Limit())
        model = torch.nn.Linear(64, 64)
        capd_client.watch(model, steps="all", tensors=["input", "output", "grad_output", "grad_weight"])
        for limit in range(60):
            try:
                began = time.monotonic()
                signal.setitimer(signal.ITIMER_REAL, 0.005 + 0.0003 * (limit % 7))
                while time.monotonic() < began + 20:
                    if limit % 2:
                        capd_client.capture(torch.ones(2000), tensor_name="y")
                    else:
                        model(torch.ones(4, 64)).sum().backward()
                print("lost", limit)
                break
            except TimeoutError as error:
                assert error.args == (signal.SIGALRM,)
        """,
        {n: v for n, v in job_env.items() if n != "CAPD_STRICT"} | {"CAPD_EXIT_TIMEOUT_S": "0"},
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_ctrl_c_in_the_copy_of_a_capture_is_counted_as_interrupted(
    peer: Peer, job_env: dict[str, str]
) -> None:
    """Python's own handler of SIGINT raises, in an explicit capture and in the hook of a forward."""
    done = run(
        """
        import capd_client.api
        from capd_client.staging import stager

        model = torch.nn.Linear(4, 4)
        capd_client.watch(model, steps="all", tensors=["input"])
        session, move = capd_client.api.session(), stager.move_holding_gil

        def interrupted(*args):
            stager.move_holding_gil = move
            signal.raise_signal(signal.SIGINT)
            move(*args)

        for call in (lambda: capd_client.capture(torch.ones(3), tensor_name="y"), lambda: model(torch.ones(2, 4))):
            call()
            call()  # by the short way
            stager.move_holding_gil = interrupted
            try:
                call()
            except KeyboardInterrupt:
                print("reached")
            call()
        capd_client.flush(20)
        now = session.snapshot()
        print(now.offered, now.committed, now.in_flight, now.dropped)
        """,
        job_env,
    )
    assert (done.returncode, done.stdout) == (
        0, f"reached\nreached\n{PENDING + 8} {PENDING + 6} 0 {{'interrupted': 2}}\n"
    ), done.stderr  # fmt: skip


@pytest.mark.parametrize("connected", rows([True, False], [True]))
def test_time_limits_amid_captures_leave_the_accounts_exact(
    peer: Peer, job_env: dict[str, str], connected: bool
) -> None:
    where = {} if connected else {"CAPD_ENDPOINT": "unix:/nowhere/s"}
    done = run(
        f"""
        import logging
        logging.disable()  # it keeps what a handler raises while it writes a line
        import capd_client.api
        session = capd_client.api.session()

        def limit(number, frame):
            raise TimeoutError(number)

        def exact():
            now = session.snapshot()
            assert now.offered == now.committed + now.in_flight + sum(now.dropped.values()), now

        signal.signal(signal.SIGALRM, limit)
        for _ in range(60):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.005)
                while True:
                    capd_client.capture(torch.ones(2000), tensor_name="y")
            except TimeoutError:
                exact()
        if {connected}:
            assert capd_client.flush(20)
        else:  # as if it had been sent
            for capture in session.queue._live.offers.values():
                capture.sent = True
            session.queue.acknowledged([(1, session.queue.last_sequence)])
        exact()
        assert session.snapshot().in_flight == 0
        slots = session.queue.slots
        assert slots.take(slots.capacity) is not None
        """,
        {n: v for n, v in job_env.items() if n != "CAPD_STRICT"} | where,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_an_error_in_another_exit_handler_does_not_keep_captures_from_being_drained(
    peer: Peer, job_env: dict[str, str]
) -> None:
    done = run(
        """
        import atexit
        def broken():
            raise RuntimeError("the job's own")
        atexit.register(broken)
        """,
        job_env,
    )
    assert "the job's own" in done.stderr
    assert len(peer.records) == PENDING
    assert peer.byes == 1


def test_a_subprocess_holds_nothing_of_the_rank_and_is_none(peer: Peer, job_env: dict[str, str]) -> None:
    """Not even one that inherits every descriptor it can."""
    done = run(
        """
        assert capd_client.flush(20)
        for close_fds in (True, False):
            listed = subprocess.run(["ls", "-l", "/proc/self/fd"], close_fds=close_fds, capture_output=True, text=True)
            assert "memfd" not in listed.stdout and "socket" not in listed.stdout, listed.stdout
        """,
        job_env,
    )
    assert done.returncode == 0, done.stderr
    assert len(peer.hellos) == 1


@pytest.mark.parametrize("method", rows(["fork", "spawn", "forkserver"], ["fork"]))
def test_workers_of_every_start_method_are_no_ranks(
    method: str, peer: Peer, job_env: dict[str, str], tmp_path: object
) -> None:
    script = os.path.join(str(tmp_path), "job.py")
    with open(script, "w") as file:
        file.write(
            textwrap.dedent(
                f"""
                import torch, capd_client
                from torch.utils.data import DataLoader, Dataset

                class Items(Dataset):
                    def __len__(self):
                        return 4
                    def __getitem__(self, index):
                        capd_client.capture(torch.ones(2), tensor_name="item")
                        assert capd_client.flush(5)
                        return torch.tensor(capd_client.counters()["offered"])

                if __name__ == "__main__":
                    capd_client.capture(torch.ones(3), tensor_name="x")
                    loader = DataLoader(Items(), num_workers=2, multiprocessing_context={method!r})
                    assert [int(x) for x in loader] == [0] * 4
                    capd_client.capture(torch.ones(3), tensor_name="x")
                """
            )
        )
    # Python < 3.14 warns of forking beside threads only where it is about to happen
    done = forking.run([sys.executable, script], env=job_env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert [record.key.tensor_name for record in peer.records] == ["x", "x"]
    assert len(peer.hellos) == 1


def test_a_daemon_of_another_protocol_version_is_one_warning_and_counted_drops(
    peer: Peer, job_env: dict[str, str]
) -> None:
    peer.reject = Reject("version", "the rank speaks protocol 1, this daemon 9", retry=False)
    done = run(
        """
        while not capd_client.counters()["dropped"].get("rejected"):
            time.sleep(0.01)
        for _ in range(500):
            capd_client.capture(torch.ones(100), tensor_name="x")
        began = time.monotonic()
        capd_client.close()
        assert time.monotonic() - began < 10
        now = capd_client.counters()
        assert now == {"offered": 503, "committed": 0, "in_flight": 0, "dropped": {"rejected": 503}}, now
        """,
        job_env,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == 1
    assert "this daemon 9" in done.stderr
    assert len(peer.hellos) == 1, "it does not knock again"


ENDINGS = {
    "the script ends": (0, ""),
    "an error": (1, "raise RuntimeError('of the job')"),
    "sys.exit in the thread": (0, ""),
    "ctrl-c twice": (-signal.SIGINT, "interrupt_twice()"),
    "a forked child ends first": (
        0,
        "assert os.waitstatus_to_exitcode(os.waitpid(os.fork() or sys.exit(4), 0)[1]) == 4",
    ),
}


@pytest.mark.parametrize("ending", rows(ENDINGS, ["an error", "ctrl-c twice"]))
def test_a_thread_amid_the_parts_of_a_tensor_holds_up_no_exit(
    ending: str, peer: Peer, job_env: dict[str, str]
) -> None:
    """It waits for room, which a daemon that answers nothing does not make; the exit has its own limit."""
    peer.ack = False
    status, statement = ENDINGS[ending]
    leaves = "sys.exit(3)" if ending == "sys.exit in the thread" else "pass"
    done = run(
        f"""
        import capd_client.api
        while capd_client.api.session().transport.welcome is None:
            time.sleep(0.01)

        def interrupt_twice():
            def again():
                time.sleep(0.5)
                os.kill(os.getpid(), signal.SIGINT)
            threading.Thread(target=again, daemon=True).start()
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)

        def capture():
            try:
                capd_client.capture(torch.zeros(1 << 20), tensor_name="large")
            finally:
                {leaves}

        threading.Thread(target=capture, daemon=True).start()
        while not capd_client.api.session().queue.waiting.count:
            time.sleep(0.01)
        print(time.time(), flush=True)
        {statement}
        """,
        job_env
        | {
            "CAPD_ARENA_BYTES": str(1 << 20),
            "CAPD_EXIT_TIMEOUT_S": "1",
            "CAPD_MAX_BLOCK_MS": "600000",
            "CAPD_POLICY": "block",
        },
    )
    assert done.returncode == status, done.stderr
    assert time.time() - float(done.stdout) < 40  # and not ten minutes
    wait_for_end(peer)
    offered, acked, in_flight, *dropped = peer.last_words[1:40]
    assert (offered, acked) == (PENDING + 1, 0)
    assert in_flight + sum(dropped) == offered
