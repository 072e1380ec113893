"""mindstudio-probe itself opens exports and writes dumps. `make test-exchange` installs it; else these are skipped."""

from __future__ import annotations

import csv
import json
import os
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.exchange.conftest import JOB
from tests.kit.store.cli import run_capd

Dumped = Callable[..., Path]
ROOT = Path(__file__).parents[3]
TOOLS = ROOT / ".venv-exchange"
PYTHON = TOOLS / "bin" / "python"

READ_SHEET = """
import json, sys, openpyxl
print(json.dumps(list(openpyxl.load_workbook(sys.argv[1]).active.iter_rows(values_only=True))))
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (TOOLS / ".installed").exists(), reason="make test-exchange installs mindstudio-probe"
    ),
]


def _python(*arguments: str | Path, path: Path = ROOT) -> str:
    environ = {**os.environ, "PYTHONPATH": str(path), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [str(PYTHON), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=180,
        env=environ,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def _msprobe(*arguments: str | Path, path: Path = ROOT) -> None:
    _python("-m", "msprobe.msprobe", *arguments, path=path)


def _rank(dump: Path) -> Path:
    return dump / "step0" / "rank0"


def _only(directory: Path, pattern: str) -> Path:
    [found] = directory.glob(pattern)
    return found


def test_compare_finds_every_row_equal_to_itself(exported: Dumped, tmp_path: Path) -> None:
    dump = _rank(exported())

    _msprobe("compare", "-tp", dump / "dump.json", "-gp", dump / "dump.json", "-o", tmp_path / "out")

    rows = list(csv.DictReader(_only(tmp_path / "out", "*.csv").read_text().splitlines()))
    assert len(rows) == len(list((dump / "dump_tensor_data").iterdir()))
    assert {row["Cosine"] for row in rows} == {"1.0"}
    assert {row["MaxAbsErr"] for row in rows} == {"0.0"}


def test_diff_analysis_names_the_module_of_an_altered_weight(exported: Dumped, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()

    _msprobe(
        "compare",
        "-tp",
        exported("scaled") / "step0",
        "-gp",
        exported() / "step0",
        "-da",
        "-o",
        tmp_path / "out",
    )

    found = json.loads(_only(tmp_path / "out", "diff_analyze_*.json").read_text())
    assert [one["op_name"] for one in found["rank_0"]] == ["Module.layers.1.fc1.Linear.forward.0"]


def test_the_graph_has_all_nodes(exported: Dumped, tmp_path: Path) -> None:
    dump = _rank(exported())

    _msprobe("graph_visualize", "-tp", dump, "-gp", dump, "-o", tmp_path / "out")

    assert (
        _nodes(_only(tmp_path / "out", "*.vis.db"))
        >= json.loads((dump / "construct.json").read_text()).keys()
    )


def _nodes(database: Path) -> set[str]:
    with sqlite3.connect(database) as opened:
        return {name for (name,) in opened.execute("SELECT node_name FROM tb_nodes")}


def test_the_older_tool_opens_it_too(exported: Dumped, tmp_path: Path) -> None:
    dump, older = _rank(exported()), TOOLS / "mindstudio-probe-8"
    asked: dict[str, Any] = {"is_print_compare_log": True}
    documents = {"npu_path": "dump.json", "bench_path": "dump.json", "stack_path": "stack.json"}
    (tmp_path / "compare.json").write_text(
        json.dumps({**asked, **{name: str(dump / file) for name, file in documents.items()}})
    )
    (tmp_path / "graph.json").write_text(
        json.dumps({**asked, "npu_path": str(dump), "bench_path": str(dump)})
    )

    _msprobe(
        "-f", "pytorch", "compare", "-i", tmp_path / "compare.json", "-o", tmp_path / "table", path=older
    )
    _msprobe("-f", "pytorch", "graph", "-i", tmp_path / "graph.json", "-o", tmp_path / "graph", path=older)

    head, *rows = json.loads(_python("-c", READ_SHEET, _only(tmp_path / "table", "*.xlsx")))
    assert len(rows) == len(list((dump / "dump_tensor_data").iterdir()))
    assert {float(row[head.index("Cosine")]) for row in rows} == {1.0}
    assert (_only(tmp_path / "graph", "*.vis.db")).stat().st_size


@pytest.mark.parametrize("level", ["L0", "mix"])
def test_a_real_dump_survives_import_and_export_byte_for_byte(level: str, tmp_path: Path) -> None:
    _python(JOB, "msprobe", "tensor", level, tmp_path / "real")
    real = _only(tmp_path / "real" / "step0", "proc*")

    imported = run_capd("import", tmp_path / "real", "--store", tmp_path / "store", "--json")
    done = run_capd("export", tmp_path / "store", "--to", "msprobe", "-o", tmp_path / "again")

    assert (imported.code, done.code) == (0, 0), imported.err + done.err
    again, files = _rank(tmp_path / "again"), sorted((real / "dump_tensor_data").iterdir())
    assert len(files) == imported.json["imported"] >= 76
    assert {file.name for file in (again / "dump_tensor_data").iterdir()} == {file.name for file in files}
    for file in files:
        assert (again / "dump_tensor_data" / file.name).read_bytes() == file.read_bytes(), file.name
    told, written = (json.loads((place / "dump.json").read_text()) for place in (real, again))
    assert written["level"] == told["level"]
    assert list(written["data"]) == list(told["data"])
    if level == "L0":
        theirs, ours = (json.loads((place / "construct.json").read_text()) for place in (real, again))
        # torch ends the backward of a module before those inside it if its input needs no gradient. The tool then names
        # no parent; the export names the module.
        ended = {node for node, entry in told["data"].items() if not entry.get("output", True)}
        differing = {node for node in theirs if theirs[node] != ours[node]}
        assert theirs.keys() == ours.keys()
        assert {theirs[node] for node in differing} <= {None}
        assert {ours[node] for node in differing} <= ended


def test_a_real_dump_of_statistics_keeps_its_numbers(tmp_path: Path) -> None:
    _python(JOB, "msprobe", "statistics", "L1", tmp_path / "real")
    real = _only(tmp_path / "real" / "step0", "proc*")

    run_capd("import", tmp_path / "real", "--store", tmp_path / "store")
    done = run_capd("export", tmp_path / "store", "--to", "msprobe", "-o", tmp_path / "again")

    assert done.code == 0, done.err
    told, written = (
        json.loads((place / "dump.json").read_text()) for place in (real, _rank(tmp_path / "again"))
    )
    assert written["task"] == "statistics"
    for name, entry in told["data"].items():
        if name.endswith("forward"):
            assert written["data"][name]["output"] == entry["output"], name
