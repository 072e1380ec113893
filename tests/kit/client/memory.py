"""The memory of a rank as its daemon gets it: a sealed memfd with a counter page."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct

from capd_client.protocol.counter_page import COUNTER_MAGIC, PAGE_NBYTES

NBYTES = 64 << 10
FUTURE_WRITE = 0x10
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | FUTURE_WRITE

_memories: dict[int, mmap.mmap] = {}  # by inode: once it is sealed, this is the only way to write


def memfd(
    nbytes: int = NBYTES, seals: int = SEALS, magic: int = COUNTER_MAGIC, *, holes: bool = False
) -> int:
    """The memory of a rank. holes: nothing is written behind the counter page."""
    fd = os.memfd_create("arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    _memories[os.fstat(fd).st_ino] = mmap.mmap(fd, nbytes)
    write(fd, bytes(PAGE_NBYTES if holes else nbytes), 0)
    write(fd, struct.pack("Q", magic), 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def write(fd: int, data: bytes, offset: int) -> None:
    """As a rank writes: through the mapping that it had before it sealed the memory."""
    _memories[os.fstat(fd).st_ino][offset : offset + len(data)] = data
