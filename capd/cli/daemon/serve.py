"""`capd serve`: run this node's daemon in the foreground until SIGTERM, SIGHUP or Ctrl-C."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from capd.cli.options import Config, StoreRoot, flag, option

__all__ = ["serve"]


def serve(
    store: StoreRoot = None,
    endpoint: Annotated[
        str | None, option("--endpoint", "unix:PATH", "Socket to listen on [default: in XDG_RUNTIME_DIR].")
    ] = None,
    config: Config = None,
    run_id: Annotated[
        str | None, option("--run-id", "NAME", "Run of the ranks that name none [default: the time].")
    ] = None,
    node: Annotated[
        str | None, option("--node", "NAME", "This node's name in the store [default: host name].")
    ] = None,
    threads: Annotated[
        int | None, option("--threads", "N", "Encode threads [default: a quarter of the CPUs].")
    ] = None,
    max_disk: Annotated[
        str | None,
        option(
            "--max-disk",
            "SIZE",
            "Bytes to add to the store, at most [default: min(200GB, half of the free space)].",
        ),
    ] = None,
    keep_free: Annotated[
        str | None, option("--keep-free", "SIZE", "Disk space to leave free [default: 10%].")
    ] = None,
    allow_uid: Annotated[
        list[int] | None,
        option("--allow-uid", "UID", "Another user whose ranks may connect. May be given several times."),
    ] = None,
    durability: Annotated[
        str | None,
        option(
            "--durability",
            "WORD",
            "Failures that an acknowledged record survives. buffered: the kill of every process; durable: also power "
            "loss [default: buffered].",
        ),
    ] = None,
    codec: Annotated[
        str | None,
        option(
            "--codec",
            "CODEC",
            "auto (the best of a few for each series), default, fast, none, or a codec of docs/format.md, such as "
            "zstd:3 [default: auto].",
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        option(
            "--metrics",
            "ADDRESS",
            "unix:PATH or HOST:PORT that serves /metrics for Prometheus and /healthz [default: off].",
        ),
    ] = None,
    metrics_token_file: Annotated[
        Path | None,
        option(
            "--metrics-token-file",
            "FILE",
            "Token that /metrics demands. A HOST that is not loopback needs it.",
        ),
    ] = None,
    metrics_file: Annotated[
        Path | None,
        option(
            "--metrics-file", "FILE", "Metrics for the textfile collector of node_exporter, in FILE.prom."
        ),
    ] = None,
    metrics_ranks: Annotated[
        bool | None, flag("--metrics-ranks", "Metrics of each rank, too: more series.", show_default=False)
    ] = None,
    upload_to: Annotated[
        str | None,
        option(
            "--upload-to",
            "ADDRESS",
            "s3://BUCKET/PREFIX to which the runs are uploaded, also those of earlier daemons [default: nowhere].",
        ),
    ] = None,
    drain_uploads: Annotated[
        float | None,
        option("--drain-uploads", "SECONDS", "Go on uploading for so long after a stop [default: 0]."),
    ] = None,
    log_format: Annotated[
        str | None,
        option("--log-format", "WORD", "text, or json for one JSON object a line [default: text]."),
    ] = None,
    quiet: Annotated[bool, flag("--quiet", "Log warnings and errors only.", "-q")] = False,
    once: Annotated[
        bool,
        flag(
            "--once",
            "End when there were ranks and the last one has been gone for idle_seal_s (10 seconds by default).",
        ),
    ] = False,
    parent: Annotated[int | None, typer.Option("--parent", hidden=True)] = None,
    detach: Annotated[
        bool, flag("--detach", "Return once the daemon listens; it continues in the background.")
    ] = False,
) -> None:
    """Run the daemon of this node in the foreground.

    Ranks find the daemon through CAPD_ENDPOINT. The log gives its value, and the lines with which jobs join. A script
    that does not import capd_client needs CAPD_WATCH=1, too.

    SIGTERM, SIGHUP, Ctrl-C or `capd ctl shutdown` ends the daemon: it drains, seals and exits. During the start it
    first seals the records that a killed daemon left. A second Ctrl-C leaves at once (exit code 130) and keeps
    everything that was acknowledged; a second SIGTERM changes nothing. `nohup` keeps SIGHUP away.

    If records are left unsealed (exit code 8), the last message names the runs. It also says how many of their records
    plain Zarr readers cannot see yet. Nothing is lost: the next `capd serve` on this store seals them.

    A service manager may pass the socket (systemd's socket activation), and hears when ranks can connect. In a job of
    Slurm or a pod of Kubernetes, the daemon stops within 20 seconds unless shutdown_timeout_s is set.

    Uploads need credentials in the environment or a profile (AWS_ACCESS_KEY_ID, AWS_PROFILE and so on). They never
    delay a capture. What did not go up before the end, the next daemon uploads.

    With --detach the command ends with 0 when the daemon listens, or with the daemon's exit code if it does not
    start: 1 if it was stopped before. The log then goes to .capd-NODE.log in the store.

    \b
    Examples:
      capd serve --store captures
      capd serve --store /data/captures --max-disk 500GB --durability durable
      capd serve --detach
      capd serve --once
      capd serve --metrics 127.0.0.1:9464
      capd serve --upload-to s3://bucket/captures --drain-uploads 60

    \b
    Exit codes:
      0  stopped, everything is sealed
      1  failed to start, or captures were left that were never acknowledged
      2  a setting cannot be used
      3  a socket cannot be used, for example because its port is taken
      7  another daemon owns the store
      8  stopped, and records are left unsealed
    """
    from capd.cli.daemon.log import start_log
    from capd.cli.output import note
    from capd.config import load_daemon_settings, load_retention, load_triggers, misspelt_variables
    from capd.errors import CapdError, exit_code_of

    flags = {
        "store": store, "endpoint": endpoint, "run_id": run_id, "node": node, "threads": threads,
        "max_disk": max_disk, "keep_free": keep_free, "allow_uid": allow_uid, "durability": durability,
        "codec": codec, "metrics": metrics, "metrics_token_file": metrics_token_file, "metrics_file": metrics_file,
        "metrics_ranks": metrics_ranks, "upload_to": upload_to, "upload_drain_s": drain_uploads,
        "log_format": log_format,
    }  # fmt: skip
    settings, retention = load_daemon_settings(flags, path=config), load_retention(path=config)
    triggers = load_triggers(path=config)
    start_log(logging.WARNING if quiet else logging.INFO, settings.log_format)
    # `capd run` has printed these lines already.
    for line in misspelt_variables() if parent is None else ():
        logging.getLogger(__name__).warning(line) if settings.log_format == "json" else note(line)
    if detach:
        from capd.cli.daemon.detached import go_on_detached

        go_on_detached(settings)
    from capd.server.daemon import Daemon

    daemon = Daemon(settings, parent, retention.policy(settings), triggers=triggers, once=once)
    try:
        code = daemon.run()
    except CapdError as error:
        if settings.log_format == "text":
            raise
        logging.getLogger(__name__).error("%s", error)
        code = exit_code_of(error)
    if daemon.is_held_up:
        # A request that an object store does not answer would hold the interpreter for a minute.
        from capd.cli.output import leave_at_once

        leave_at_once(code)
    raise typer.Exit(code)
