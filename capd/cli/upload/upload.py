"""`capd upload`: uploads runs to an object store without a daemon, once or again and again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capd.cli.completion import store_paths
from capd.cli.options import Json, flag
from capd.cli.output import human_count, human_nbytes, print_either
from capd.cli.stores import is_run
from capd.errors import CapdError, ConfigError, EndpointError, RemovedRun, StoreBusy, StoreError

if TYPE_CHECKING:
    from capd.config import DaemonSettings
    from capd.store.objects.address import Address
    from capd.store.upload.node_upload import NodeUpload
    from capd.store.upload.sending.transfer import UploadTools

__all__ = ["upload"]

_WATCH_S = 3.0
_TRIES = 5


def upload(
    store: Annotated[
        Path,
        typer.Argument(
            metavar="STORE",
            help="A run (NAME.zarr), or a directory of runs.",
            show_default=False,
            autocompletion=store_paths,
        ),
    ],
    address: Annotated[
        str | None,
        typer.Argument(
            metavar="[ADDRESS]",
            help="s3://BUCKET/PREFIX, gs://…, az://… or file:///PATH. Default: `to` in [upload], or CAPD_UPLOAD_TO.",
            show_default=False,
        ),
    ] = None,
    watch: Annotated[
        bool, flag("--watch", "Go on until Ctrl-C: upload what another process writes meanwhile.")
    ] = False,
    dry_run: Annotated[bool, flag("--dry-run", "Upload nothing; say what would be uploaded.")] = False,
    as_json: Json = False,
) -> None:
    """Upload runs to an object store. Each gets the address ADDRESS/NAME.zarr, where capd and Zarr readers open it.

    Only what is not there goes up: an interrupted upload is continued by the same command. Sealed records alone are
    uploaded; start `capd serve` on a store that a kill left unsealed. Nothing local is deleted.

    Credentials come from the environment or a profile: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE,
    AWS_ENDPOINT_URL and their likes. A daemon uploads by itself with [upload] in capd.toml.

    \b
    Examples:
      capd upload captures/exp7.zarr s3://bucket/captures
      capd upload captures s3://bucket/captures --dry-run
      capd upload captures s3://bucket/captures --watch

    \b
    Exit codes:
      1  the object store cannot be used, or the upload failed
      5  there is no run
      7  a daemon uploads this store, or another one has the place
    """
    from capd.config import load_daemon_settings
    from capd.store.upload.sending.transfer import UploadTools

    settings = load_daemon_settings({"upload_to": address})
    if settings.upload_to is None:
        raise ConfigError("give an ADDRESS, such as s3://bucket/captures, or set CAPD_UPLOAD_TO")
    if watch and (dry_run or as_json):
        raise ConfigError("--watch goes with neither --dry-run nor --json")
    _refuse_beside_daemon(store, settings.upload_to)
    tools = UploadTools.make(settings.upload_threads, lambda: settings.upload_bandwidth)
    if watch:
        _watch(store, settings, tools)
        return
    found = [_once(run, node, settings, tools, dry_run=dry_run) for run, node in _parts(store)]
    print_either(found, [_line(one) for one in found], as_json=as_json)


def _parts(store: Path) -> list[tuple[Path, str]]:
    """Return every node's part of the runs that STORE names. Raises NothingMatched."""
    from capd.errors import NothingMatched
    from capd.store.catalog.rows import CATALOG_NAME
    from capd.store.disk.layout import node_directory, nodes_of
    from capd.store.read.store import runs

    chosen: Sequence[Path] = [store] if is_run(store) else runs(store)
    found = [
        (run.absolute(), node)
        for run in chosen
        for node in nodes_of(run)
        if (node_directory(run, node) / CATALOG_NAME).exists()
    ]
    if not found:
        raise NothingMatched(f"no run in {store}; name a run (NAME.zarr) or a directory of runs")
    return found


def _refuse_beside_daemon(store: Path, to: str) -> None:
    """Raise StoreBusy if a daemon uploads these runs to this place already."""
    from capd.cli.store.counters import ask_daemon

    try:
        stats = ask_daemon()
    except EndpointError:
        return
    root = store.absolute().parent if is_run(store) else store.absolute()
    if stats.upload is not None and stats.upload.to == to and Path(stats.store).resolve() == root.resolve():
        raise StoreBusy(
            f"the daemon with pid {stats.pid} uploads {stats.store} to {to} itself; `capd stats` shows how far it is"
        )


def _open(run: Path, node: str, to: Address, tools: UploadTools) -> NodeUpload:
    from capd.store.upload.node_upload import NodeUpload

    return NodeUpload(run, node, to, tools)


def _once(
    run: Path, node: str, settings: DaemonSettings, tools: UploadTools, *, dry_run: bool
) -> dict[str, Any]:
    """Upload one part, and return what was done. Failures of the store are tried again a few times."""
    from capd.cli.upload.upload_line import upload_line
    from capd.store.objects.address import parse_address

    to = parse_address(str(settings.upload_to))
    found: dict[str, Any] = {
        "run": str(run),
        "node": node,
        "address": str(to / run.name),
        "written": not dry_run,
    }
    with _open(run, node, to, tools) as upload:
        if dry_run:
            objects, nbytes = upload.pending()
            return {**found, "objects": objects, "bytes": nbytes, "complete": None}
        objects = nbytes = tries = 0
        with upload_line(run.name, tools.figures):
            while True:
                try:
                    result = upload.round()
                except StoreError as error:
                    tries += 1
                    if not error.retry or tries >= _TRIES:
                        raise
                    time.sleep(2.0**tries)
                    continue
                tries, objects, nbytes = 0, objects + result.objects, nbytes + result.nbytes
                if not result.more:
                    return {**found, "objects": objects, "bytes": nbytes, "complete": result.is_complete}


def _line(found: dict[str, Any]) -> str:
    what = f"{human_count(found['objects'], 'object')}, {human_nbytes(found['bytes'])}"
    if not found["written"]:
        waiting = f"{human_count(found['objects'], 'shard')}, {human_nbytes(found['bytes'])}"
        return f"{found['address']} (node {found['node']}): {waiting} would be uploaded (--dry-run)"
    end = "" if found["complete"] else "; records that are not sealed yet are not uploaded"
    return f"{found['address']} (node {found['node']}): {what} uploaded{end}"


def _watch(store: Path, settings: DaemonSettings, tools: UploadTools) -> None:
    """Do rounds until Ctrl-C. A failure is said once, and tried again for ever."""
    from capd.cli.upload.upload_line import upload_line
    from capd.server.uploads.followed_run import FollowedRun
    from capd.store.objects.address import parse_address

    to = parse_address(str(settings.upload_to))
    followed: dict[tuple[Path, str], FollowedRun] = {}
    _parts(store)
    with upload_line(store.name, tools.figures) as line:
        while True:
            for run, node in _parts(store):
                one = followed.get((run, node))
                if one is None:
                    begin = partial(_open, node=node, to=to, tools=tools)
                    one = followed[run, node] = FollowedRun(run, node, begin)
                if not one.backoff.is_due:
                    continue
                try:
                    result = one.round()
                except RemovedRun:
                    one.close()
                except (CapdError, OSError) as error:
                    one.backoff.failed()
                    if one.said != type(error).__name__:
                        one.said = type(error).__name__
                        line.say(f"{run}: {error}; it is tried again")
                else:
                    one.backoff.succeeded()
                    one.said = ""
                    if result.published:
                        what = f"{human_count(result.objects, 'object')}, {human_nbytes(result.nbytes)}"
                        line.say(f"{run.name}: {what} uploaded")
            time.sleep(_WATCH_S)
