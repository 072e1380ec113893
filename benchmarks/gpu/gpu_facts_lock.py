"""The effects of page-locking host memory on a process: the delays of other threads, and the limits of copies."""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from typing import Any

import torch

from benchmarks.gpu.gpu_runtime import runtime
from benchmarks.gpu.gpu_tables import Check, markdown

__all__ = ["STOP_MS", "border", "lock"]

MIB = 1 << 20
# The most that capd locks at once.
CHUNK_MIB = 256
# Above this delay nothing else is worth measuring before it is fixed.
STOP_MS = 100.0
HUGE_MS = 1e6
Found = tuple[dict[str, Any], list[Check]]


class Shared:
    """Anonymous shared memory with all of its pages populated, as in an arena."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._file = os.memfd_create("capd-gpu-facts")
        os.ftruncate(self._file, nbytes)
        self._map = mmap.mmap(self._file, nbytes)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.bytes.zero_()
        self.address = self.bytes.data_ptr()

    def close(self) -> None:
        """Free the memory."""
        del self.bytes
        self._map.close()
        os.close(self._file)


class Beats:
    """Threads that call the device all the time, and their longest gaps in ms. One launches, one queries an event."""

    def __init__(self, cuda: Any) -> None:
        self.gaps = {"query": 0.0, "launch": 0.0}
        self._on = True
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._x = torch.zeros(1, device=device)
        self._event = cuda.Event()
        self._event.record(cuda.current_stream())
        calls = {"query": self._event.query, "launch": lambda: self._x.add_(1)}
        self._threads = [threading.Thread(target=self._beat, args=item) for item in calls.items()]
        for thread in self._threads:
            thread.start()

    def _beat(self, name: str, call: Any) -> None:
        last = time.perf_counter()
        while self._on:
            call()
            now = time.perf_counter()
            self.gaps[name] = max(self.gaps[name], (now - last) * 1e3)
            last = now

    def stop(self) -> None:
        """End the threads."""
        self._on = False
        for thread in self._threads:
            thread.join()


def lock(quick: bool) -> Found:
    """Measure, by size, the ms of one page lock, and the longest gap of each thread before it and during it."""
    cuda = runtime()
    # Otherwise the interpreter's lock alone causes gaps of 5 ms.
    sys.setswitchinterval(1e-4)
    found: dict[str, Any] = {}
    for mib in (1, 4) if quick else (64, 128, CHUNK_MIB, 1024, 2048, 4096):
        if os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 2 * mib * MIB:
            found[str(mib)] = {"problem": "not enough free memory"}
            continue
        shared = Shared(mib * MIB)
        beats = Beats(cuda)
        time.sleep(0.05 if quick else 0.5)
        quiet = dict(beats.gaps)
        beats.gaps.update(query=0.0, launch=0.0)
        started = time.perf_counter()
        code = int(cuda.cudart().cudaHostRegister(shared.address, shared.nbytes, 1))
        took_ms = (time.perf_counter() - started) * 1e3
        # A delayed thread reports its gap only when it continues.
        time.sleep(0.05)
        gaps = dict(beats.gaps)
        beats.stop()
        if code == 0:
            cuda.cudart().cudaHostUnregister(shared.address)
        shared.close()
        found[str(mib)] = {
            "ms": took_ms, "code": code, "query": gaps["query"], "launch": gaps["launch"],
            "quiet query": quiet["query"], "quiet launch": quiet["launch"],
        }  # fmt: skip
    names = ("ms", "code", "query", "launch", "quiet query", "quiet launch")
    markdown(
        ["MiB at once", *names],
        [[mib, *(each.get(name, "") for name in names)] for mib, each in found.items()],
    )
    chunk = found[max((mib for mib in found if int(mib) <= CHUNK_MIB and "ms" in found[mib]), key=int)]
    gap = max(chunk["query"], chunk["launch"]) if chunk["code"] == 0 else HUGE_MS
    return found, [
        Check(f"longest gap while {CHUNK_MIB} MiB are page-locked, ms", gap, STOP_MS, 5.0),
        Check("error of that lock", chunk["code"], 0),
    ]


def border(quick: bool) -> Found:
    """Copy once from the device across the border of two adjacent page locks. Does the runtime accept it?"""
    cuda = runtime()
    half = (1 if quick else 64) * MIB
    shared = Shared(2 * half)
    codes = [int(cuda.cudart().cudaHostRegister(shared.address + at, half, 1)) for at in (0, half)]
    source = torch.ones(2 * half, dtype=torch.uint8, device="cuda" if torch.cuda.is_available() else "cpu")
    answers = {}
    for name, begin, end in (("inside one", 0, half), ("over the border", half // 2, half + half // 2)):
        try:
            shared.bytes[begin:end].copy_(source[begin:end], non_blocking=True)
            cuda.synchronize()
            answers[name] = "copied" if bool(shared.bytes[begin:end].all()) else "wrong bytes"
        except RuntimeError as error:
            answers[name] = str(error).splitlines()[0]
    for at in (0, half):
        cuda.cudart().cudaHostUnregister(shared.address + at)
    shared.close()
    markdown(["copy", "answer"], [[name, answer] for name, answer in answers.items()])
    return {"codes": codes, **answers}, [
        Check("copies that fail inside of one page lock", float(answers["inside one"] != "copied"), 0)
    ]
