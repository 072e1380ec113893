"""Everything that reads a run, in a process of its own for each, with bounded memory and time.

Started as a program: runs on the lines of stdin, how the process ended on those of stdout. Modules are imported
once, the work is done by a fork.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import resource
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import zarr  # noqa: F401 - before the forks

import capd
from capd.cli.app import main
from capd.errors import CapdError
from capd.store.verify import run as verify

__all__ = ["LIMIT_S"]

LIMIT_S = 60
MEMORY_NBYTES = (
    3 << 30
)  # of addresses, beside what is mapped already: threads reserve much that they never touch
_CODES = {0, 1, 4, 5}


def _command(*args: str) -> dict[str, Any]:
    out, err = io.StringIO(), io.StringIO()
    code: Any = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(["--debug", *args])
        except SystemExit as end:
            code = end.code or 0
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


def _read(run: str, *, through_zarr: bool) -> dict[str, Any]:
    """A digest of all elements, and the error where there is one."""
    digest = hashlib.sha256()
    try:
        for series in capd.open(run).series:
            if len(series) > 1000:
                raise CapdError("that many records were never made")
            digest.update(repr((series.path, series.dtype, series.shape)).encode())
            for index in range(len(series)):
                stats = series.records[index].stats
                digest.update(repr(stats).encode())
                if series.kept == "tensor":
                    digest.update(series.numpy(index).tobytes())
            if through_zarr:
                digest.update(series.zarr()[:].tobytes())
    except (CapdError, OSError) as error:
        return {"code": 1, "out": "", "err": f"{type(error).__name__}: {error}"}
    return {"code": 0, "out": digest.hexdigest(), "err": ""}


def _answers(run: str, paths: list[str], *, through_zarr: bool = True) -> dict[str, Any]:
    answers = {"verify": _command("verify", run), "ls": _command("ls", run, "--json")}
    for path in paths:
        answers[f"show {path}"] = _command("show", run, path, "--json")
        answers[f"show {path}#0"] = _command("show", run, f"{path}#0")
    answers["stats"] = _command("stats", run, "--json")
    answers["stats of drops"] = _command("stats", run)
    answers["compare"] = _command("compare", run, "--json", "--workers", "1")
    answers["open"] = _read(run, through_zarr=through_zarr)
    return answers


def _wrong(answers: dict[str, Any]) -> list[str]:
    return [
        f"{name}: exit code {answer['code']}\n{answer['err']}"
        for name, answer in answers.items()
        if answer["code"] not in _CODES or "internal error" in answer["err"]
    ]


def _work(run: str, paths: list[str], result: Path) -> None:
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_NBYTES,) * 2)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LIMIT_S)
    try:
        answers = _answers(run, paths)
        found = {"answers": answers, "wrong": _wrong(answers)}
    except BaseException:
        found = {"answers": {}, "wrong": [traceback.format_exc()]}
    result.write_text(json.dumps(found))


def _serve() -> None:
    for line in sys.stdin:
        run, paths, result = json.loads(line)
        if not result:  # zarr starts a thread, which a fork would lose
            _answers(run, paths, through_zarr=False)
            continue
        child = os.fork()
        if not child:
            try:
                _work(run, paths, Path(result))
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        print(json.dumps(os.waitstatus_to_exitcode(status)), flush=True)


if __name__ == "__main__":
    verify._SECOND_LOOK_S = 0.0  # no daemon is at work on these stores
    _serve()
