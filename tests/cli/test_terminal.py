"""Tables in a real terminal of 80 columns: nothing wraps, colours where they are wanted, everything with --wide."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from capd_client.protocol.key import Moment
from tests.kit import forking
from tests.kit.daemon import DaemonProcess
from tests.kit.jobs.terminal import Terminal
from tests.kit.store.cli import StoreWriter, linear_key, session_row

COLUMNS = 80
LABEL = 12
TRAINER = """
import sys, torch, capd_client
model = torch.nn.Sequential(torch.nn.Linear(4, 4))
capd_client.watch(model, steps="all")
model(torch.ones(2, 4)).sum().backward()
print("ready", flush=True)
sys.stdin.read()
"""
PLANNED = """
import torch
model = torch.nn.ModuleDict(dict(self_attention_query_key_value=torch.nn.ModuleDict(dict(
    input_projection=torch.nn.Linear(4096, 64)))))
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = model
    def forward(self, x):
        return self.parts["self_attention_query_key_value"]["input_projection"](x)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(4):
    model(torch.ones(2, 4096)).sum().backward()
    optimizer.step()
"""
LONG = "transformer.decoder.layers.{}.self_attention.query_key_value_projection"
COMMANDS = [
    ("ls",),
    ("show", "*layers.0.*input"),
    ("stats",),
    ("verify",),
    ("cp", "NEW", "--dry-run"),
    ("merge", "OTHER", "-o", "NEW", "--dry-run"),
    ("export",),
    ("compare",),
    ("compare", "SELF"),
    ("doctor", "--quick"),
    ("config", "show"),
    ("runs",),
    ("du",),
    ("rm",),
    ("prune", "--keep-last", "1"),
    ("gc",),
]
FURTHER = [
    ("ls", "--by", "module"),
    ("show", "*layers.0.*input#0"),
    ("stats", "--drops"),
    ("compare", "--by", "layer,module,tensor_name"),
    ("compare", "--per-block", "--formats", "mxfp8,nvfp4"),
    ("compare", "--sweep-scale", "--formats", "e4m3"),
    ("compare", "--between", "layer=0,1", "--by", "module", "--ignore", "module"),
    ("compare", "--between", "layer=0,1", "--records", "--ignore", "module"),
    ("compare", "SELF", "--records"),
    ("du", "--by", "run,layer,tensor_name"),
]
WITHOUT_STORE = ("doctor", "config")
OF_A_DIRECTORY = ("runs", "prune", "gc")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with long names, large and small numbers, and two ranks."""
    root, rng = tmp_path_factory.mktemp("terminal"), np.random.default_rng(80)
    (root / ".capd" / "trash" / "20261126T190300Z-1" / f"{'long' * 20}.zarr").mkdir(parents=True)
    writer = StoreWriter(root)
    for layer in range(2):
        for name, scale in (("input", 1e3), ("weight", 0.02), ("grad_output", 1e-7)):
            values = rng.normal(scale=scale, size=(64, 64)).astype("f4")
            key = linear_key(module=LONG.format(layer), layer=layer, tensor_name=name)
            writer.put("run", key, values, "float32", Moment(iteration=1000, time_ns=1))
    writer.save_session("run", session_row(command="python train.py " + "--option value " * 20))
    writer.save_session("run", session_row())
    writer.put("other", linear_key(), np.ones((4, 4), "f4"), "float32", Moment(iteration=1))
    writer.close()
    return root / "run.zarr"


def in_terminal(*args: str | Path, code: int = 0, **environ: str) -> str:
    """What `capd ARGS` draws on a terminal of 80 columns, where that is its standard output."""
    with Terminal(*args, columns=COLUMNS, environ=environ, stderr=subprocess.DEVNULL) as terminal:
        shown = terminal.read_all()
        assert terminal.process.wait(60) == code
    return shown


def plain(text: str) -> list[str]:
    return re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()


def check(shown: str) -> None:
    """Nothing is wider than the terminal but single words, such as paths, which stay whole to be copied."""
    for line in plain(shown):
        assert len(line) <= COLUMNS or len(line[LABEL:].split()) == 1, line


@pytest.mark.parametrize(
    "command",
    [*COMMANDS, *(pytest.param(command, marks=pytest.mark.slow) for command in FURTHER)],
    ids=" ".join,
)
def test_every_command_fits_80_columns(command: tuple[str, ...], store: Path) -> None:
    words = {"SELF": str(store), "OTHER": str(store.with_name("other.zarr")), "NEW": "new.zarr"}
    verb, *rest = (words.get(word, word) for word in command)
    place = [] if verb in WITHOUT_STORE else [store.parent if verb in OF_A_DIRECTORY else store]
    shown = in_terminal(verb, *place, *rest)

    assert shown
    check(shown)
    # A table follows its header, which is bold.
    for table in shown.split("\x1b[1m")[1:]:
        assert max(map(len, plain(table.partition("\n\n")[0]))) <= COLUMNS


def test_the_ranks_of_a_live_job_fit(runtime_dir: Path, tmp_path: Path) -> None:
    daemon = DaemonProcess(tmp_path / "store", runtime_dir / "capd.sock")
    endpoint = f"unix:{daemon.path}"
    job = [sys.executable, "-c", TRAINER]
    with forking.popen(
        job, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "CAPD_ENDPOINT": endpoint}
    ) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"ready\n"
        in_terminal("ctl", "select", "--modules", f"*{LONG[-30:]}*", "--no-wait", CAPD_ENDPOINT=endpoint)
        narrow = in_terminal("ctl", "status", CAPD_ENDPOINT=endpoint)
        wide = in_terminal("ctl", "status", "--wide", CAPD_ENDPOINT=endpoint)
        rank.communicate(timeout=60)
    daemon.stop()

    check(narrow)
    assert "…" in narrow
    assert LONG[-30:] in wide
    assert max(map(len, plain(wide))) > COLUMNS


@pytest.mark.slow
def test_a_plan_fits(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(PLANNED)
    job = ("--", sys.executable, str(tmp_path / "job.py"))
    narrow, wide = in_terminal("plan", *job), in_terminal("plan", "--wide", *job)

    check(narrow)
    headers = [line.split() for line in plain(narrow) if line.startswith(("module ", "rank "))]
    assert [header[-1] for header in headers] == ["bytes", "holds"]
    assert "self_attention_query_key_value.input_projection" in wide
    assert "self_attention_query_key_value.input_projection" not in narrow
    assert "parts.…t_projection" in narrow


def test_colours_are_for_terminals_that_want_them(store: Path) -> None:
    assert "\x1b[32m" in in_terminal("compare", store, "--formats", "mxfp8,hifp8")
    assert "\x1b" in in_terminal("ls", store)
    assert "\x1b" not in in_terminal("ls", store, NO_COLOR="1")
    assert "\x1b" not in in_terminal("ls", store, TERM="dumb")


def test_wide_leaves_nothing_out(store: Path) -> None:
    narrow, wide = in_terminal("ls", store), in_terminal("ls", store, "--wide")

    assert "…" in narrow
    assert LONG.format(0) not in narrow
    assert LONG.format(0) in wide
    assert "raw KiB" in wide
