"""`capd web`: shows runs in a browser, live and finished, from a reader process of its own."""

from __future__ import annotations

import getpass
import os
import shlex
import signal
import socket
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from capd.cli.completion import store_paths
from capd.cli.options import Config, flag, local_path, option
from capd.cli.output import note, print_lines
from capd.cli.signals import signals_handled
from capd.cli.stores import default_store
from capd.errors import CapdError, ConfigError, NotAStore

if TYPE_CHECKING:
    from capd.web.listening import PageSocket

__all__ = ["web"]

_PORT = 8787


def web(
    store: Annotated[
        Path | None,
        typer.Argument(
            metavar="[STORE]",
            help="A directory of runs, or one run (NAME.zarr). Default: CAPD_STORE, or store in capd.toml, or "
            "captures.",
            show_default=False,
            parser=local_path,
            autocompletion=store_paths,
        ),
    ] = None,
    host: Annotated[
        str, option("--host", "ADDRESS", "The address to listen on. Any but loopback needs --token-file.")
    ] = "127.0.0.1",
    port: Annotated[
        int,
        option("--port", "PORT", "The port; if it is taken, the next free one. 0 is any.", min=0, max=65535),
    ] = _PORT,
    uds: Annotated[
        Path | None, option("--uds", "PATH", "Listen on a unix socket instead, for `ssh -L PORT:PATH`.")
    ] = None,
    token_file: Annotated[
        Path | None,
        option(
            "--token-file",
            "FILE",
            "A token that opens the page any number of times. FILE is made, with mode 0600, if there is none.",
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        option("--allow-host", "NAME", "A further name by which browsers reach the page. May be repeated."),
    ] = None,
    root_path: Annotated[
        str,
        option("--root-path", "PATH", "The path below which a proxy shows the page, as /user/me/proxy/8787."),
    ] = "",
    no_browser: Annotated[bool, flag("--no-browser", "Open no browser on this screen.")] = False,
    config: Config = None,
) -> None:
    """Show runs in a browser: counters of the ranks, tensors by step, layers by step, scalars of several runs.

    The page reads what the store has and asks the daemon for its counters. It changes no run and works without a
    daemon. It is a process of its own, with lowered priority and at most 256 MiB of memory; the capture does not
    notice it. No tensor is decoded, except for samples of SQNR that somebody looks at. The report of a finished run
    is made by `capd report`, with the lowest priority, when somebody asks for it.

    The link that is printed opens one browser. The browser gets a cookie, and the next link is printed.

    \b
    Examples:
      capd web
      capd web captures/exp7.zarr --port 0 --no-browser
      capd web captures --uds /tmp/capd-web.sock
      capd web captures --host 0.0.0.0 --token-file web.token

    \b
    Exit codes:
      7  a program listens at --uds
    """
    _check(root_path, uds, host)
    place = default_store() if store is None else store
    if not place.is_dir():
        raise NotAStore(f"{place} is no directory; name a directory of runs, or a run")
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise CapdError(f'capd web needs {error.name}: pip install "capd[web]"') from error
    _serve(
        place,
        _listening(uds, host, port, token_file),
        token_file,
        root_path,
        allow_host or [],
        no_browser,
        config,
    )


def _check(root_path: str, uds: Path | None, host: str) -> None:
    if root_path and not (
        root_path.startswith("/") and not root_path.endswith("/") and root_path.isprintable()
    ):
        raise ConfigError(
            f"--root-path {root_path!r} must begin with / and not end with it, as /user/me/proxy/8787"
        )
    if uds is not None and host != "127.0.0.1":
        raise ConfigError("give one of --uds and --host")


def _listening(uds: Path | None, host: str, port: int, token_file: Path | None) -> PageSocket:
    from capd.web.listening import listen_on_path, listen_on_port

    if uds is not None:
        return listen_on_path(uds)
    return listen_on_port(host, port, has_token=token_file is not None)


def _serve(
    place: Path, listening: PageSocket, token_file: Path | None, root_path: str, hosts: list[str], no_browser: bool,
    config: Path | None,
) -> None:  # fmt: skip
    from capd.config import load_daemon_settings
    from capd.server.net.endpoint import endpoint_path
    from capd.web.access import LOOPBACK_NAMES, Door
    from capd.web.answers import Answers
    from capd.web.application import Application
    from capd.web.keys import Keys, token_of
    from capd.web.live import LiveView
    from capd.web.reading.catalogs import Runs
    from capd.web.reports.shelf import ReportShelf
    from capd.web.sampling import Samples
    from capd.web.server import serve

    try:
        fixed = None if token_file is None else token_of(token_file)
        keys = Keys(fixed, lambda token: note(f"the link was used; the next one: {_link(listening, token)}"))
        runs = Runs(place)
        endpoint = endpoint_path(load_daemon_settings({}, path=config).endpoint)
        application = Application(Answers(runs, Samples()), LiveView(runs, endpoint), ReportShelf(runs))
        names = LOOPBACK_NAMES | listening.names | {name.lower() for name in hosts}
        door = Door(keys, names, _cookie_name(listening))

        def ready() -> None:
            print_lines(_lines(listening, keys.token, token_file))
            if not listening.is_loopback:
                note("warning: the page is plain HTTP; others on the network can read it and its token")
            if not no_browser and _has_screen(listening):
                _open_browser(_link(listening, keys.token))

        # The server handles SIGTERM, and raises it again at its end.
        with signals_handled({signal.SIGTERM: lambda *_: None}):
            serve(application, door, listening.socket, root_path, ready)
    finally:
        listening.close()


def _cookie_name(listening: PageSocket) -> str:
    """Cookies ignore ports. Two pages on one machine must not take each other's."""
    if listening.bound is None:
        return f"capd-{listening.port}"
    return f"capd-{zlib.crc32(os.fsencode(listening.bound.path)):08x}"


def _link(listening: PageSocket, token: str) -> str:
    address = f"localhost:{_PORT}" if listening.bound is not None else f"{listening.host}:{listening.port}"
    return f"http://{address}/?token={token}"


def _lines(listening: PageSocket, token: str, token_file: Path | None) -> list[str]:
    target = f"{getpass.getuser()}@{socket.gethostname()}"
    if listening.bound is not None:
        tunnel = f"ssh -L {_PORT}:{shlex.quote(str(listening.bound.path))} {target}"
    else:
        tunnel = f"ssh -L {listening.port}:{listening.host}:{listening.port} {target}"
    # A token that stays valid does not belong on a screen.
    link = _link(listening, token if token_file is None else f"TOKEN (the content of {token_file})")
    return [link, f"from another machine: {tunnel}"]


def _has_screen(listening: PageSocket) -> bool:
    has_display = bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    return listening.bound is None and has_display and sys.stdout.isatty()


def _open_browser(link: str) -> None:
    import threading
    import webbrowser

    # Some browsers return only when they are closed.
    threading.Thread(target=webbrowser.open, args=(link,), daemon=True).start()
