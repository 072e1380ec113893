"""Has the kernels of a GPU compiled in a process of its own, so that the job's Python loses no time to it.

The process fills Triton's cache on the disk. It captures nothing, sees no GPU, runs at the lowest priority, and is
killed once it is not wanted any more.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import torch

from capd_client.rowkernel.artifacts import cache_directory, mark_of
from capd_client.rowkernel.compile import LIMIT_S

__all__ = ["compile_ahead", "missing", "target_of"]

_LOOK_S = 0.05
_NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}


def target_of(device: torch.device) -> str:
    """What Triton calls the architecture of a GPU: backend, name, threads of a warp."""
    if torch.version.hip:
        facts = torch.cuda.get_device_properties(device)
        return f"hip:{facts.gcnArchName.split(':')[0]}:{facts.warp_size}"
    major, minor = torch.cuda.get_device_capability(device)
    return f"cuda:{10 * major + minor}:32"


def compile_ahead(target: str, dtypes: Sequence[str], cancelled: Callable[[], bool]) -> bool:
    """Have what is not in Triton's cache yet compiled, and wait for that.

    Args:
        target: see `target_of`.
        dtypes: names of torch's.
        cancelled: asked now and then whether the result is still wanted.

    Returns:
        False where it is not.

    Raises:
        RuntimeError, TimeoutError, OSError: The kernels could not be compiled.
    """
    wanting = missing(target, dtypes)
    if not wanting:
        return True
    process = _start(target, wanting)
    deadline = time.monotonic() + LIMIT_S
    try:
        while (code := process.poll()) is None:
            if cancelled():
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(f"its compilation took longer than {LIMIT_S} s")
            time.sleep(_LOOK_S)
    finally:
        process.kill()  # does nothing to one that has ended
        process.wait()
    if missing(target, dtypes):  # the code says less: a job that collects all of its children took it away
        raise RuntimeError(f"its compilation ended with code {code}")
    return True


def missing(target: str, dtypes: Sequence[str]) -> list[str]:
    """Which of these dtypes Triton's cache does not hold."""
    return [dtype for dtype in dtypes if not mark_of(target, dtype).exists()]


def _start(target: str, dtypes: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            sys.executable, "-m", "capd_client.rowkernel.compile",
            "--target", target, "--dtypes", ",".join(dtypes),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",  # -m searches the working directory first
        env=_environment(),
    )  # fmt: skip


def _environment() -> dict[str, str]:
    """That of the job, without capd's settings: the process must not capture. It imports what the job would."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CAPD_")}
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    return {**kept, **_NO_GPU, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(cache_directory())}
