"""Tables in a real terminal of 80 columns: nothing wraps, colours where they are wanted, everything with --wide."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import numpy as np
import pytest

from capd_client.protocol.key import Moment
from tests.kit import forking
from tests.kit.store.cli import StoreWriter, linear_key, session_row

COLUMNS = 80
LONG = "transformer.decoder.layers.{}.self_attention.query_key_value_projection"
COMMANDS = [
    ("ls",),
    ("ls", "--by", "module"),
    ("show", "*layers.0.*input"),
    ("stats",),
    ("compare", "--by", "layer,module,tensor_name"),
    ("compare", "--per-block", "--formats", "mxfp8,nvfp4"),
    ("compare", "--sweep-scale", "--formats", "e4m3"),
    ("compare", "--between", "layer=0,1", "--by", "module", "--ignore", "module"),
    ("compare", "--between", "layer=0,1", "--records", "--ignore", "module"),
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with long names, large and small numbers, and two ranks."""
    root, rng = tmp_path_factory.mktemp("terminal"), np.random.default_rng(80)
    writer = StoreWriter(root)
    for layer in range(2):
        for name, scale in (("input", 1e3), ("weight", 0.02), ("grad_output", 1e-7)):
            values = rng.normal(scale=scale, size=(64, 64)).astype("f4")
            key = linear_key(module=LONG.format(layer), layer=layer, tensor_name=name)
            writer.put("run", key, values, "float32", Moment(iteration=1000, time_ns=1))
    writer.save_session("run", session_row())
    writer.close()
    return root / "run.zarr"


def in_terminal(*args: str | Path, **environ: str) -> str:
    """What `capd ARGS` draws on a terminal of 80 columns, where that is its standard output."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    clean = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    with forking.popen(
        [sys.executable, "-m", "capd", *map(str, args)],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        env={**clean, "TERM": "xterm", **environ},
    ) as process:
        os.close(theirs)
        shown = b""
        try:
            while piece := os.read(ours, 1 << 16):
                shown += piece
        except OSError:  # the other end was closed
            pass
        finally:
            os.close(ours)
        assert process.wait(60) == 0
    return shown.decode().replace("\r\n", "\n")


def plain(text: str) -> list[str]:
    return re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_fits_80_columns(command: tuple[str, ...], store: Path) -> None:
    verb, *rest = command
    shown = in_terminal(verb, store, *rest)

    # A table follows its header, which is bold. Sentences may wrap.
    _, *tables = shown.split("\x1b[1m")
    assert tables
    lines = [line for table in tables for line in plain(table.partition("\n\n")[0])]
    assert [line for line in lines if len(line) > COLUMNS] == []


def test_colours_are_for_terminals_that_want_them(store: Path) -> None:
    command = ("compare", store, "--formats", "mxfp8,hifp8")

    assert "\x1b[32m" in in_terminal(*command)
    assert "\x1b" not in in_terminal(*command, NO_COLOR="1")
    assert "\x1b" not in in_terminal(*command, TERM="dumb")


def test_wide_leaves_nothing_out(store: Path) -> None:
    narrow, wide = in_terminal("ls", store), in_terminal("ls", store, "--wide")

    assert "…" in narrow
    assert LONG.format(0) not in narrow
    assert LONG.format(0) in wide
    assert "raw KiB" in wide
