"""A program that takes the place of `python` where another program starts it, and has a fork server run the job.

It passes its words, environment, directory, descriptors and signals on. It ends as the job ends, with its exit code or
by its signal, and the job never outlives it. tests/kit/forking.py writes it to a file with SOCKET at its top.
"""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import sys

SOCKET = ""
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def reached(path: str) -> socket.socket:
    """Connect to a fork server."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(path)
    return connection


def send(connection: socket.socket, descriptors: list[int], **fields: object) -> None:
    """Ask the fork server at the other end of `connection` for a job."""
    body = json.dumps(fields).encode()
    socket.send_fds(connection, [len(body).to_bytes(8, "big")], descriptors)
    connection.sendall(body)


def ignored() -> list[int]:
    """Signals that a program started from here ignores, too."""
    return [number for number in FORWARDED if signal.getsignal(number) is signal.SIG_IGN]


def umask() -> int:
    """The process's umask."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def asked(path: str) -> tuple[io.TextIOWrapper, dict]:
    """Ask a fork server for the job; return its lines and the first of them."""
    connection = reached(path)
    send(
        connection, [0, 1, 2], adopted=False, arguments=sys.argv[1:], directory=os.getcwd(), environ=dict(os.environ),
        executable=sys.executable, group=None, ignored=ignored(), new_session=True, pass_fds=[], umask=umask(),
    )  # fmt: skip
    lines = connection.makefile()
    return lines, json.loads(lines.readline())


def main() -> None:
    """Run the job and end as it does."""
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # until there is a job that can hear them
    with reached(SOCKET) as server:
        send(server, [], starter=os.getppid())
        path = json.loads(server.makefile().readline())["socket"]
    try:
        lines, answer = asked(path)
    except (OSError, ValueError):  # the starter was killed meanwhile, and its server ended
        lines, answer = asked(SOCKET)
    if "error" in answer:
        sys.exit(answer["error"])
    for number in FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda got, frame: os.kill(answer["pid"], got))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    code = json.loads(lines.readline() or '{"code": 70}')["code"]
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
