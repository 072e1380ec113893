"""What every test gets: a clean capd environment, a short runtime directory, and a check for leaks."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.kit import forking, leaks
from tests.kit.objects.fixtures import bucket, fault_proxy, own_s3_server, s3_server

__all__ = ["bucket", "fault_proxy", "own_s3_server", "s3_server"]

LEAK_WAIT_S = 20.0  # a busy machine ends threads and children late; only a leak takes so long
# Process-wide pools of libraries and of the kit, made once and kept on purpose.
LIBRARY_THREADS = ("zarr_io", "asyncio_", "ThreadPoolExecutor-", "Dummy-", "tensorstore", "Dask-Offload")
LIBRARY_CHILDREN = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver", forking.MARK)
SEED_VARIABLES = (
    "CUSTOM_QUANT_TYPE", "TENSOR_SAVE_ENABLED", "TENSOR_SAVE_DIR", "TENSOR_SAVER_ITERATION",
    "CURRENT_SAMPLE_IDX", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", "SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST",
)  # fmt: skip

# Three processes of tests and their jobs share the cores. Threads of OpenMP that wait for each other would burn them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts the suite in the background leaves SIGINT ignored, and nohup SIGHUP: every process a test starts
# would inherit that and never see its Ctrl-C, or the end of its terminal.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collect no garbage meanwhile, and leave the tests alone later: they live as long as the run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


hypothesis.settings.register_profile(
    "capd",
    deadline=None,
    max_examples=50,
    derandomize=True,  # the same examples on every machine; `make test-random` takes others
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],  # a busy machine is no defect of the test
)
hypothesis.settings.register_profile(
    "random", hypothesis.settings.get_profile("capd"), derandomize=False, max_examples=500
)
hypothesis.settings.load_profile("capd")


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[Any, Any, Any]:
    """A report goes to the main process as UTF-8, which cannot carry the half characters that some tests log."""
    return _as_utf8((yield))


def _as_utf8(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {key: _as_utf8(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_as_utf8(item) for item in value)
    return value


@pytest.fixture(autouse=True)
def runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No settings of capd or of S3 from outside, and an own XDG_RUNTIME_DIR short enough for socket paths."""
    for variable in [
        name for name in os.environ if name.startswith(("CAPD_", "AWS_")) or name in SEED_VARIABLES
    ]:
        monkeypatch.delenv(variable)
    directory = Path(tempfile.mkdtemp(prefix="capd-t-", dir="/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(autouse=True)
def no_leaks(runtime_dir: Path) -> Iterator[None]:
    """Fail a test that leaves a thread, a child process or a memfd behind."""
    before = _threads(), _children(), _memfds()
    yield
    deadline = time.monotonic() + LEAK_WAIT_S
    while True:
        left = (_threads() - before[0], _children() - before[1], _memfds() - before[2])
        if not any(left):
            return
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: threads {left[0]}, children {left[1]}, memfds {left[2]}")
        threading.Event().wait(0.02)


@pytest.fixture(autouse=True)
def no_watch_left() -> Iterator[None]:
    """Fail the test that leaves a watched model behind, not a later one of the same worker."""
    yield
    left = leaks.watched_modules()
    if left:
        pytest.fail(f"still watched: {', '.join(type(module).__name__ for module in left)}")


@pytest.fixture
def wait_until() -> Callable[..., None]:
    """`wait_until(condition, timeout_s=20)`: return when it holds, fail the test at the deadline."""
    return _wait_until


def _wait_until(condition: Callable[[], object], timeout_s: float = 20.0, what: str = "") -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout_s} s: {what or condition}")
        threading.Event().wait(0.01)


def _threads() -> set[tuple[int, str]]:
    alive = ((thread.ident or 0, thread.name) for thread in threading.enumerate())
    return {(ident, name) for ident, name in alive if not name.startswith(LIBRARY_THREADS)}


def _children() -> set[tuple[int, str]]:
    found = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            pids = (task / "children").read_text().split()
        except (FileNotFoundError, ProcessLookupError):  # the thread ended meanwhile
            continue
        for pid in pids:
            command = _command(pid)
            if command is not None and not any(mark in command for mark in LIBRARY_CHILDREN):
                found.add((int(pid), command.decode(errors="replace")[:200]))
    return found


def _command(pid: str) -> bytes | None:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except (FileNotFoundError, ProcessLookupError):
        return None


def _memfds() -> set[str]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:
            continue
        if target.startswith("/memfd:capd"):
            found.add(f"{entry.name}:{target}")
    return found
