"""Threads, processes and a Dask cluster give the same result, to the byte."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit import forking
from tests.kit.cluster.dask_cluster import DaskCluster, said
from tests.kit.cluster.sources import varied_run
from tests.kit.store.cli import Result, damaged, run_capd
from tests.kit.store.removing import files_below

# Several tasks for each worker.
SMALL, LARGER = ("--task-bytes", "12KiB"), ("--task-bytes", "40KiB")
VERBS = {
    "verdict": ("compare", "{a}", "--json"),
    "groups": ("compare", "{root}", "--all-runs", "--by", "layer,tensor_name", "--per-block", "--json"),
    "sample": ("compare", "{a}", "--sample", "30%", "--json"),
    "sweep": ("compare", "{a}", "--sweep-scale", "--json"),
    "pairs": ("compare", "{a}", "{b}", "--records", "--json"),
    "first": ("compare", "{a}", "{b}", "--first-divergence", "--json"),
    "between": ("compare", "{a}", "--between", "layer=0,1", "--ignore", "module", "--json"),
    "verify": ("verify", "{root}", "--json"),
    "damaged": ("compare", "{damaged}", "--json"),
    "verify damaged": ("verify", "{damaged}", "--json"),
}
FAST = ("verdict", "pairs", "verify damaged")
ROWS = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in VERBS]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("captures")
    runs = {name: varied_run(root, name, seed=seed, long=12) for seed, name in enumerate(("a", "b"))}
    return {"root": root, **runs, "damaged": damaged(tmp_path_factory.mktemp("damaged"))}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaskCluster]:
    with DaskCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


def done(places: dict[str, Path], verb: str, *options: str) -> Result:
    return run_capd(*(word.format(**places) for word in VERBS[verb]), *options)


@pytest.mark.parametrize("verb", ROWS)
def test_a_cluster_prints_what_threads_print(
    places: dict[str, Path], cluster: DaskCluster, verb: str
) -> None:
    here, there = done(places, verb), done(places, verb, "--scheduler", cluster.address, *SMALL)

    assert (there.code, there.out, said(there.err)) == (here.code, here.out, said(here.err))
    assert here.code == (4 if "damaged" in verb else 0)


@pytest.mark.parametrize("verb", ["groups", pytest.param("first", marks=pytest.mark.slow)])
def test_processes_print_what_threads_print(places: dict[str, Path], verb: str) -> None:
    there = done(places, verb, "--scheduler", "processes", "--workers", "2", *LARGER)

    assert (there.code, there.out) == (0, done(places, verb).out)


def test_a_report_is_the_same_page(places: dict[str, Path], cluster: DaskCluster, tmp_path: Path) -> None:
    runs = (places["a"], places["b"])
    pages = []
    for number, options in enumerate([(), ("--scheduler", str(cluster.file), *LARGER)]):
        page = tmp_path / f"{number}.html"
        assert run_capd("report", *runs, "-o", page, *options).code == 0
        pages.append(page.read_bytes())
    assert pages[0] == pages[1]


@pytest.mark.parametrize(
    "form",
    ["pt", pytest.param("npz", marks=pytest.mark.slow), pytest.param("safetensors", marks=pytest.mark.slow)],
)
def test_an_export_has_the_same_files(
    places: dict[str, Path], cluster: DaskCluster, tmp_path: Path, form: str
) -> None:
    found = []
    for name, options in {"here": (), "there": ("--scheduler", cluster.address, *SMALL)}.items():
        out = tmp_path / name
        done = run_capd("export", places["a"], "--to", form, "-o", out, "--json", *options)
        assert done.code == 0
        numbers = {key: value for key, value in done.json.items() if key != "directory"}
        found.append((numbers, files_below(out)))
    assert found[0] == found[1]
    assert len(found[0][1]) > 5


def test_a_table_is_written_by_one_process(places: dict[str, Path], tmp_path: Path) -> None:
    result = run_capd(
        "export", places["a"], "--to", "parquet", "-o", tmp_path / "x", "--scheduler", "processes"
    )

    assert (result.code, "leave --scheduler out" in result.err) == (2, True)
    assert not (tmp_path / "x").exists()


IN_PYTHON = """
import json, sys
import capd
from distributed import Client
run = capd.open(sys.argv[1])
with Client(sys.argv[2], set_as_default=False) as client:
    there = run.compare(["mxfp8", "hifp8"], by=("layer",), client=client, task_bytes=20_000, quant_type="bf16")
here = run.compare(["mxfp8", "hifp8"], by=("layer",), quant_type="bf16")
print(json.dumps([there.equals(here), len(here)]))
"""


def test_a_client_gives_the_same_table(places: dict[str, Path], cluster: DaskCluster) -> None:
    done = forking.run(
        [sys.executable, "-c", IN_PYTHON, str(places["a"]), cluster.address],
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout.splitlines()[-1]) == [True, 4]


ANYWHERE = """
import json, multiprocessing, sys
import capd
if __name__ == "__main__":
    tasks = json.load(open(sys.argv[1]))["tasks"]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        # Each task runs twice, in any order.
        results = list(pool.imap_unordered(capd.run_task, [*tasks, *tasks[::-1]]))
    print(json.dumps(capd.partial_document(capd.merge_partials(results))["all"]))
"""


def test_tasks_run_in_an_engine_of_the_users_own(places: dict[str, Path], tmp_path: Path) -> None:
    tasks, script = tmp_path / "tasks.json", tmp_path / "engine.py"
    tasks.write_text(run_capd("plan-tasks", places["a"], "--task-bytes", "12KiB", "--json").out)
    script.write_text(ANYWHERE)
    assert len(json.loads(tasks.read_text())["tasks"]) > 3

    done = forking.run(
        [sys.executable, str(script), str(tasks)], capture_output=True, text=True, timeout=100, check=True
    )

    compared = run_capd("compare", places["a"], "--json").json["all"]
    assert json.loads(done.stdout) == compared
