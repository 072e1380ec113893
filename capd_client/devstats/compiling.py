"""Compiles the kernels of a GPU in a separate process, so that the job's Python loses no time.

The process fills Triton's cache on disk. It captures nothing, sees no GPU and runs at the lowest priority. It is killed
when its result is no longer wanted.
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
    """Return Triton's name of a GPU's architecture: backend, name, threads of a warp."""
    if torch.version.hip:
        facts = torch.cuda.get_device_properties(device)
        return f"hip:{facts.gcnArchName.split(':')[0]}:{facts.warp_size}"
    major, minor = torch.cuda.get_device_capability(device)
    return f"cuda:{10 * major + minor}:32"


def compile_ahead(target: str, dtypes: Sequence[str], cancelled: Callable[[], bool]) -> bool:
    """Compile the kernels that Triton's cache lacks in another process, and wait for it.

    Args:
        target: The result of `target_of`.
        dtypes: Torch's names of dtypes.
        cancelled: Called now and then; True means that the result is no longer wanted.

    Returns:
        False if it was cancelled.

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
        # This has no effect on a process that has ended.
        process.kill()
        process.wait()
    # The exit code is not reliable: a job that waits for all of its children may have collected it.
    if missing(target, dtypes):
        raise RuntimeError(f"its compilation ended with code {code}")
    return True


def missing(target: str, dtypes: Sequence[str]) -> list[str]:
    """Return the dtypes whose kernels Triton's cache lacks."""
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
        # -m searches the working directory first, so it must not be the job's.
        cwd="/",
        env=_environment(),
    )  # fmt: skip


def _environment() -> dict[str, str]:
    """Return the job's environment without capd's settings, so that the process captures nothing.

    Its imports find the same modules as the job's.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CAPD_")}
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    return {**kept, **_NO_GPU, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(cache_directory())}
