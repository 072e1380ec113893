"""`capd serve`: run this node's daemon in the foreground until SIGTERM, SIGHUP or Ctrl-C."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from capd.cli.options import Config, StoreRoot

__all__ = ["serve"]


def serve(
    store: StoreRoot = None,
    endpoint: Annotated[
        str | None, typer.Option("--endpoint", help="unix:PATH of the socket to listen on.")
    ] = None,
    config: Config = None,
    run_id: Annotated[
        str | None, typer.Option("--run-id", help="Run of ranks that bring no name [default: the time].")
    ] = None,
    node: Annotated[
        str | None, typer.Option("--node", help="This node's name in the store [default: host name].")
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", help="Encode threads [default: a quarter of the CPUs].")
    ] = None,
    max_disk: Annotated[
        str | None,
        typer.Option("--max-disk", help="Most bytes to add [default: min(200GB, half of the free space)]."),
    ] = None,
    keep_free: Annotated[
        str | None, typer.Option("--keep-free", help="Disk space to leave free [default: 10%].")
    ] = None,
    allow_uid: Annotated[
        list[int] | None, typer.Option("--allow-uid", help="A further user whose ranks may connect.")
    ] = None,
    durability: Annotated[
        str | None, typer.Option("--durability", help="buffered or durable [default: buffered].")
    ] = None,
    codec: Annotated[
        str | None,
        typer.Option("--codec", help="auto, default, fast, none, or explicit like zstd:3 [default: auto]."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Log warnings and errors only.")] = False,
    parent: Annotated[int | None, typer.Option("--parent", hidden=True)] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Come back once it listens; it goes on in the background.")
    ] = False,
) -> None:
    """Run the daemon of this node.

    Ranks find it through CAPD_ENDPOINT, which the log line "listening on …" gives. SIGTERM, SIGHUP or Ctrl-C drains,
    seals and exits with 0, or with 8 if records are left unsealed, which the last message names. A second Ctrl-C
    leaves at once, keeping everything that was acknowledged. With --detach this command ends with 0 when the daemon
    listens, or with the daemon's exit code if it does not start.
    """
    from capd.cli.output import note
    from capd.config import load_daemon_settings, misspelt_variables

    flags = {
        "store": store, "endpoint": endpoint, "run_id": run_id, "node": node, "threads": threads,
        "max_disk": max_disk, "keep_free": keep_free, "allow_uid": allow_uid, "durability": durability,
        "codec": codec,
    }  # fmt: skip
    settings = load_daemon_settings(flags, path=config)
    for line in misspelt_variables() if parent is None else ():  # `capd run` has said it already
        note(line)
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.WARNING if quiet else logging.INFO,
        format="%(asctime)s capd %(levelname)s %(message)s",
    )
    if detach:
        from capd.cli.detached import go_on_detached

        go_on_detached(settings)
    from capd.server.daemon import Daemon

    raise typer.Exit(Daemon(settings, parent).run())
