"""The process that compiles the kernels of rows into Triton's cache: no GPU, no torch, no capture.

    python -m capd_client.rowkernel.compile --target cuda:90:32 --dtypes bfloat16,float32

target: Triton's names of the backend, the architecture, and the threads of a warp. The process ends with 0 once the
marks of all dtypes exist (`capd_client.rowkernel.artifacts`), otherwise with an error.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from capd_client.rowkernel.artifacts import cache_directory, mark_of

__all__ = ["LIMIT_S", "compile_kernels", "main"]

LIMIT_S = 120
"""The process ends itself after so many seconds, whatever it is doing."""


class _Pointer:
    """A substitute for an aligned tensor, with the facts by which Triton chooses a kernel."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def data_ptr(self) -> int:
        return 0

    def ptr_range(self) -> int:
        return 0


class _Driver:
    """A substitute for a GPU's driver: answers Triton's questions before a compilation, and launches nothing."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_kernels(target: str, dtypes: list[str]) -> dict[str, Any]:
    """Compile the kernels of these dtypes for a target with Triton, and set the marks.

    The function follows the steps of a launch, up to loading the module. Triton's cache key is then that of a real
    launch.

    Returns:
        Triton's compiled kernels by dtype, and "merge".
    """
    import triton
    from triton.backends.compiler import GPUTarget

    from capd_client.rowkernel import kernels

    backend, architecture, warp = target.split(":")
    arch = int(architecture) if architecture.isdecimal() else architecture
    triton.runtime.driver.set_active(_Driver(GPUTarget(backend, arch, int(warp))))
    table, parts = _Pointer("int64"), _Pointer("float64")
    merge = {**kernels.merge_constants(), **kernels.OPTIONS}
    made = {"merge": kernels.merged_rows.warmup(table, parts, 1, grid=(1, 1), **merge)}
    for dtype in dtypes:
        constants = {**kernels.partial_constants(dtype), **kernels.OPTIONS}
        values = _Pointer("float32")
        made[dtype] = kernels.partial_rows.warmup(table, values, parts, 1, grid=(1,), **constants)
    _build_launchers(backend, list(made.values()))
    for dtype in dtypes:
        mark_of(target, dtype).touch()
    return made


def _build_launchers(backend: str, made: list[Any]) -> None:
    """Build the launchers of the kernels with the C compiler. Otherwise the job would run it in its own process.

    A failure is ignored, because the kernels are useful without their launchers.
    """
    from triton.backends import backends

    with contextlib.suppress(Exception):
        driver = backends["nvidia" if backend == "cuda" else "amd"].driver()
        for kernel in made:
            driver.launcher_cls(kernel.src, kernel.metadata)


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Let one process of a node compile, so that the others find its work. Without file locks all of them compile."""
    import fcntl

    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "capd-rows.lock", "w") as lock:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main(arguments: list[str]) -> None:
    """Compile the kernels that the command line names."""
    # Ends this process even if the job that started it was killed.
    signal.alarm(LIMIT_S)
    os.nice(19)
    parser = argparse.ArgumentParser(prog="capd_client.rowkernel.compile")
    parser.add_argument("--target", required=True)
    parser.add_argument("--dtypes", required=True)
    chosen = parser.parse_args(arguments)
    with _alone(cache_directory()):
        compile_kernels(chosen.target, chosen.dtypes.split(","))


if __name__ == "__main__":
    main(sys.argv[1:])
