"""Jobs in processes of their own: imports, forks, exits, signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.kit import forking
from tests.kit.client.peer import Peer, wait_until
from tests.kit.tiers import rows


def run(script: str, env: dict[str, str], timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """Run a job to its end."""
    script = "import warnings\nwarnings.simplefilter('error')\n" + textwrap.dedent(script)
    return forking.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=timeout_s
    )


def test_protocol_key_and_select_import_no_torch() -> None:
    script = """
        import sys
        import capd_client, capd_client.protocol.messages, capd_client.protocol.key
        import capd_client.protocol.selection, capd_client.protocol.dtypes
        import capd_client.config.settings
        heavy = {"torch", "numpy"} & set(sys.modules)
        assert not heavy, heavy
        assert "capd" not in sys.modules
        """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_short_job_is_drained_at_exit_without_a_call(peer: Peer, job_env: dict[str, str]) -> None:
    done = run(
        """
        import torch, capd_client
        capd_client.capture(torch.arange(4.0), tensor_name="x")
        """,
        job_env,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(peer.records) == 1
    assert peer.byes == 1


@pytest.mark.parametrize("own", rows([False, True], [True]))
def test_the_log_reaches_stderr_once_whether_the_job_logs_or_not(
    own: bool, peer: Peer, job_env: dict[str, str]
) -> None:
    done = run(
        f"""
        import logging, torch, capd_client
        capd_client.watch(torch.nn.Linear(2, 2))
        if {own}:
            logging.basicConfig(format="own %(message)s", level="DEBUG")
        capd_client.watch(torch.nn.Linear(2, 2))
        """,
        job_env | {"CAPD_LOG": "INFO"},
    )
    lines = [line for line in done.stderr.splitlines() if "watching 1 of 1" in line]
    assert [line.startswith("own capd: ") for line in lines] == [False, own], done.stderr


def test_without_a_daemon_a_job_ends_at_once_with_one_warning(job_env: dict[str, str]) -> None:
    done = run(
        """
        import time, torch, capd_client
        for _ in range(5000):
            capd_client.capture(torch.ones(100), tensor_name="x")
        started = time.monotonic()
        capd_client.close()
        assert time.monotonic() - started < 10
        now = capd_client.counters()
        assert now["offered"] == 5000 == sum(now["dropped"].values()), now
        print(sorted(now["dropped"]))
        """,
        job_env | {"CAPD_ENDPOINT": "unix:/nowhere/capd.sock"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['arena_full', 'not_connected']"
    assert done.stderr.count("cannot reach the daemon") == 1
    assert done.stderr.count("the arena of") == 1


@pytest.mark.slow
def test_without_a_daemon_a_flush_is_false_at_once(job_env: dict[str, str]) -> None:
    """One that waited its whole time would outlast the test."""
    done = run(
        """
        import torch, capd_client
        assert capd_client.flush(3600)
        capd_client.capture(torch.ones(100), tensor_name="x")
        print(capd_client.flush(3600), capd_client.flush(3600), capd_client.counters()["in_flight"])
        capd_client.close()
        """,
        job_env | {"CAPD_ENDPOINT": "unix:/nowhere/capd.sock"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "False", "1"]


def test_a_forked_child_captures_nothing_and_holds_nothing(peer: Peer, job_env: dict[str, str]) -> None:
    done = run(
        """
        import os, sys, torch, capd_client
        from pathlib import Path
        capd_client.capture(torch.ones(3), tensor_name="x")
        assert capd_client.flush(10)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                capd_client.capture(torch.ones(3), tensor_name="x")
                assert capd_client.flush(10)
                capd_client.set_moment(iteration=1)
                assert capd_client.counters()["offered"] == 0
                held = [os.readlink(p) for p in Path("/proc/self/fd").iterdir() if p.exists() or p.is_symlink()]
                assert not any("memfd" in name for name in held), held
                assert not any("socket" in name for name in held), held
                assert "capd-arena" not in Path("/proc/self/maps").read_text()
                capd_client.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        capd_client.capture(torch.ones(3), tensor_name="x")
        assert capd_client.flush(10)
        assert capd_client.counters()["committed"] == 2
        """,
        job_env,
    )
    assert done.returncode == 0, done.stderr
    assert len(peer.records) == 2
    assert len(peer.hellos) == 1


def test_a_child_forked_while_the_session_starts_captures_nothing_and_does_not_hang(
    peer: Peer, job_env: dict[str, str]
) -> None:
    done = run(
        """
        import os, signal, threading, torch, capd_client
        from capd_client.session import starting
        begun, go_on, load = threading.Event(), threading.Event(), starting.load_config

        def slow():
            begun.set()
            go_on.wait()
            return load()

        starting.load_config = slow
        thread = threading.Thread(target=lambda: capd_client.capture(torch.ones(3), tensor_name="x"))
        thread.start()
        begun.wait()
        child = os.fork()
        if child == 0:
            signal.alarm(10)  # ends a child that hangs
            capd_client.capture(torch.ones(3), tensor_name="x")
            capd_client.close()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        go_on.set()
        thread.join()
        assert capd_client.flush(10)
        assert capd_client.counters()["committed"] == 1
        """,
        job_env,
    )
    assert done.returncode == 0, done.stderr
    assert len(peer.hellos) == 1


def test_a_killed_job_with_a_living_child_ends_its_connection_at_once(
    peer: Peer, job_env: dict[str, str], tmp_path: Path
) -> None:
    pid_file = tmp_path / "child"
    job = forking.popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(
                f"""
                import os, time, torch, capd_client
                capd_client.capture(torch.ones(3), tensor_name="x")
                capd_client.flush(10)
                child = os.fork()
                if child == 0:
                    open({str(pid_file)!r} + ".new", "w").write(str(os.getpid()))
                    os.rename({str(pid_file)!r} + ".new", {str(pid_file)!r})
                time.sleep(60)
                """
            ),
        ],
        env=job_env,
    )
    try:
        wait_until(pid_file.exists, 60)
        assert len(peer._connections) == 1
        assert not peer._connections[0].closed
        job.kill()
        job.wait()
        wait_until(lambda: peer._connections[0].closed)
    finally:
        job.kill()
        job.wait()
        if pid_file.exists():
            os.kill(int(pid_file.read_text()), signal.SIGKILL)


def test_a_data_loader_worker_captures_nothing(peer: Peer, job_env: dict[str, str]) -> None:
    done = run(
        """
        import torch, capd_client
        from torch.utils.data import DataLoader, Dataset

        class Items(Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, index):
                capd_client.capture(torch.ones(2), tensor_name="item")
                return torch.tensor(capd_client.counters()["offered"])

        assert [int(x) for x in DataLoader(Items(), num_workers=1)] == [0] * 4  # before the job's first capture
        capd_client.capture(torch.ones(3), tensor_name="x")
        assert [int(x) for x in DataLoader(Items(), num_workers=1)] == [0] * 4
        assert capd_client.flush(10)
        """,
        job_env,
    )
    assert done.returncode == 0, done.stderr
    assert [record.key.tensor_name for record in peer.records] == ["x"]


def test_an_exception_in_the_job_keeps_its_traceback_and_what_was_captured(
    peer: Peer, job_env: dict[str, str]
) -> None:
    done = run(
        """
        import torch, capd_client
        capd_client.capture(torch.ones(3), tensor_name="x")
        raise ValueError("the job's own")
        """,
        job_env,
    )
    assert done.returncode == 1
    assert done.stderr.strip().endswith("ValueError: the job's own")
    assert len(peer.records) == 1


def test_exit_is_delayed_by_the_stated_time_at_most(peer: Peer, job_env: dict[str, str]) -> None:
    peer.ack = False
    done = run(
        """
        import atexit, time, torch, capd_client
        began = []
        atexit.register(lambda: print(time.monotonic() - began[0]))  # runs after capd's own
        capd_client.capture(torch.ones(3), tensor_name="x")
        began.append(time.monotonic())
        """,
        job_env | {"CAPD_EXIT_TIMEOUT_S": "0.5"},
    )
    assert done.returncode == 0, done.stderr
    assert 0.5 <= float(done.stdout) < 4
    assert "still unacknowledged" in done.stderr


def test_a_signal_handler_may_flush_in_the_middle_of_a_capture(peer: Peer, job_env: dict[str, str]) -> None:
    done = run(
        """
        import signal, time, torch, capd_client
        capd_client.capture(torch.ones(3), tensor_name="x")
        handled = []
        def handler(*_):
            handled.append(capd_client.flush(0.05))
            if len(handled) < 100:  # none is left that could end the process when Python has taken the handler away
                signal.setitimer(signal.ITIMER_REAL, 0.002)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.002)
        while len(handled) < 100:
            capd_client.capture(torch.ones(3), tensor_name="x")
        assert capd_client.flush(20)
        now = capd_client.counters()
        assert now["offered"] == now["committed"] + sum(now["dropped"].values()), now
        """,
        job_env,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_compiled_function_may_call_capture(peer: Peer, job_env: dict[str, str]) -> None:
    done = run(
        """
        import warnings
        warnings.simplefilter("default")
        import torch, capd_client

        @torch.compile(backend="eager")
        def double(x):
            y = x * 2
            capd_client.capture(y, tensor_name="y")
            return y + 1

        for _ in range(3):
            assert torch.equal(double(torch.ones(3)), torch.full((3,), 3.0))
        assert capd_client.flush(10)
        assert capd_client.counters()["committed"] == 3
        """,
        job_env,
        timeout_s=110,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("number", rows([signal.SIGKILL, signal.SIGTERM], [signal.SIGKILL]))
def test_the_counter_page_outlives_a_killed_job(number: int, peer: Peer, job_env: dict[str, str]) -> None:
    peer.ack = False
    job = forking.popen(
        [
            sys.executable,
            "-c",
            "import time, torch, capd_client\n"
            "for _ in range(3): capd_client.capture(torch.ones(3), tensor_name='x')\n"
            "time.sleep(60)",
        ],
        env=job_env,
    )
    try:
        wait_until(lambda: len(peer.puts) == 3, 60)
        started = time.monotonic()
        job.send_signal(number)
        job.wait(20)
        assert time.monotonic() - started < 10
        wait_until(lambda: peer.last_words)
        assert peer.last_words[1:4] == [3, 0, 3]
    finally:
        job.kill()
        job.wait()
