"""A rank with a large arena that says, in JSON lines, how much of it is there.

quiet SECONDS: what counts as a long quiet. capture FIRST LAST NBYTES: one tensor for each number, of as many bytes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

import capd_client
import capd_client.api
from capd_client.transport import growth


def answer(value: Any) -> None:
    print(json.dumps(value), flush=True)


def tensor(number: int, nbytes: int) -> torch.Tensor:
    """What is captured under this number."""
    return torch.full((nbytes,), number % 251, dtype=torch.uint8)


def capture(first: int, last: int, nbytes: int) -> None:
    for number in range(first, last):
        capd_client.capture(tensor(number, nbytes), tensor_name="x", iteration=number)


def arena() -> dict[str, int]:
    """Which memory it is, its size, and bytes of the pages that there are."""
    session = capd_client.api.session()
    assert session is not None
    session.arena.prefaulted()
    found = os.fstat(session.arena.fd)
    return {"inode": found.st_ino, "nbytes": found.st_size, "there": found.st_blocks * 512}


def resident() -> int:
    """Bytes of shared memory that this process has in its page tables, the arena's among them."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssShmem:"))


def holds_an_arena() -> bool:
    """Whether this process has an arena mapped or open."""
    maps = Path("/proc/self/maps").read_text()
    links = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return "capd-arena" in maps or any("capd-arena" in link for link in links)


def main() -> None:
    for line in sys.stdin:
        verb, *words = line.split()
        if verb == "quiet":
            growth.QUIET_S = float(words[0])
            answer("set")
        elif verb == "capture":
            capture(*(int(word) for word in words))
            answer("captured")
        elif verb == "flush":
            answer(capd_client.flush(60))
        elif verb == "arena":
            answer(arena() | {"resident": resident()})
        elif verb == "counters":
            answer(capd_client.counters())
        elif verb == "fork":
            child = os.fork()
            if child == 0:
                os._exit(holds_an_arena())
            answer(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        elif verb == "leave":
            break
    capd_client.close()


if __name__ == "__main__":
    main()
