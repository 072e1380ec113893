"""A training job that tells everything about its process that could depend on how it was started.

    python forked_job.py RESULT

It trains a small model, captures it, and writes its losses and the facts to RESULT.
"""

from __future__ import annotations

import os
import sys

LOADED = sorted(name for name in sys.modules if name.partition(".")[0] in ("capd", "capd_client", "tests"))
# Of the start itself: what a fork server has imported is there already, what the job imports is not.

import json  # noqa: E402
import resource  # noqa: E402
import signal  # noqa: E402
import threading  # noqa: E402
import warnings  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from torch import nn  # noqa: E402

import capd_client  # noqa: E402

SELF = Path("/proc/self")


def descriptors() -> dict[str, str]:
    """What each open descriptor is; files by their names, pipes and sockets without their numbers."""
    found = {}
    for name in os.listdir(SELF / "fd"):
        try:
            found[name] = os.readlink(SELF / "fd" / name).partition(":")[0]
        except FileNotFoundError:  # the listing's own
            continue
    return found


def status(*names: str) -> dict[str, str]:
    """Lines of /proc/self/status."""
    lines = (line.split(":", 1) for line in (SELF / "status").read_text().splitlines())
    return {name: value.strip() for name, value in lines if name in names}


def facts() -> dict[str, Any]:
    """The process as it is before it has done anything."""
    streams = (sys.stdin, sys.stdout, sys.stderr)
    kept = ("SigBlk", "SigIgn", "SigCgt", "NoNewPrivs", "Seccomp", "Cpus_allowed")
    return {
        "loaded": LOADED,
        "main": [
            __name__,
            __file__,
            str(__spec__),
            type(__loader__).__name__,
            sys.modules["__main__"].__file__,
        ],
        "arguments": [
            sys.argv,
            sys.orig_argv,
            sys.path,
            sys.executable,
            sys.flags.__repr__(),
            sys.warnoptions,
        ],
        "environment": dict(os.environ),
        "command line": (SELF / "cmdline").read_bytes().rstrip(b"\0").decode().split("\0"),
        "place": [os.getcwd(), os.umask(0o022), os.getpgrp(), os.getsid(0), os.getppid()],
        "descriptors": descriptors(),
        "signals": {number.name: str(signal.getsignal(number)) for number in signal.Signals},
        "status": status(*kept),
        "limits": [resource.getrlimit(number) for number in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
        "streams": [
            [
                s.name,
                s.mode,
                s.encoding,
                s.errors,
                s.line_buffering,
                s.write_through,
                s.newlines,
                s.seekable(),
            ]
            for s in streams
        ],
        "hooks": [str(sys.excepthook), str(sys.displayhook), len(sys.meta_path), sys.gettrace()],
        "threads": [thread.name for thread in threading.enumerate()],
        "torch": [torch.get_num_threads(), str(torch.get_default_dtype())],
        "cpu": sorted(os.sched_getaffinity(0)),
    }


def train() -> list[str]:
    """Losses of three steps, exact."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    capd_client.watch(model, steps="all")
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(3):
        loss = model(torch.randn(5, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses


def main() -> None:
    result = {"facts": facts(), "heard": sys.stdin.read(), "losses": train()}
    assert capd_client.flush(60)
    result["counters"] = capd_client.counters()
    result["warnings"] = sorted(str(one) for one in warnings.filters)
    Path(sys.argv[1]).write_text(json.dumps(result))
    print("trained")


if __name__ == "__main__":
    main()
