"""Several runs below a prefix, several nodes in a run, and the number of requests of each command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from capd.store.objects.address import Address
from capd.store.objects.bucket import Bucket as Objects
from tests.kit.objects.proxy import FaultProxy
from tests.kit.objects.said import SERIES, Capd, same, written
from tests.kit.objects.service import Bucket
from tests.kit.objects.uploaded import filled, publish
from tests.kit.store.cli import StoreWriter, run_capd, session_row


def two_runs(tmp_path: Path, prefix: Address) -> Path:
    """The directory of two runs that are uploaded below a prefix. The one that sorts last is the older one."""
    for run_id, started in (("exp9", 10**18), ("exp10", 2 * 10**18)):
        publish(written(tmp_path / "runs", run_id, scale=started / 10**18, started_ns=started), prefix)
    return tmp_path / "runs"


def test_runs_lists_a_prefix(capd: Capd, tmp_path: Path, prefix: Address) -> None:
    root = two_runs(tmp_path, prefix)
    Objects(prefix).put("beside/zarr.json", b"{}")
    Objects(prefix).put("begun.zarr/zarr.json", b"{}")  # its first upload is not complete
    local, remote = (json.loads(capd("runs", str(where), "--json").out) for where in (root, prefix))
    assert [one["run"] for one in remote] == ["exp9", "exp10"]
    assert [one["path"] for one in remote] == [f"{prefix}/exp9.zarr", f"{prefix}/exp10.zarr"]
    # The times and sizes of catalog and segments differ.
    for one in (*local, *remote):
        del one["path"], one["ended"], one["size"]
    assert remote == sorted(local, key=lambda one: one["started"])
    assert "exp10" in capd("runs", str(prefix)).out
    said = capd("runs", f"{prefix}/exp9.zarr")
    assert (said.code, f"is a run; name the prefix of its runs: {prefix}" in said.err) == (2, True)


def test_the_newest_run_of_a_prefix_is_read(capd: Capd, tmp_path: Path, prefix: Address) -> None:
    two_runs(tmp_path, prefix)
    said = capd("stats", str(prefix), "--json")
    assert said.json["run_id"] == "exp10"
    assert f"reading {prefix}/exp10.zarr, the newest of 2 runs" in said.err
    assert capd("stats", str(prefix), "--run", "exp9", "--json").json["run_id"] == "exp9"


def test_all_runs_of_a_prefix(capd: Capd, tmp_path: Path, prefix: Address) -> None:
    root = two_runs(tmp_path, prefix)
    texts = []
    for where in (root, prefix):
        out = tmp_path / "out" / where.name
        said = capd("report", str(where), "--all-runs", "--quick", "-o", out, "--json")
        assert said.code == 0, said.err
        texts.append((out / "global_statistics.json").read_text().replace(str(where), "ROOT"))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("quick", [pytest.param((), marks=pytest.mark.slow), ("--quick",)])
def test_a_report_is_the_same(capd: Capd, tmp_path: Path, prefix: Address, quick: tuple[str, ...]) -> None:
    run = written(tmp_path)
    place = publish(run, prefix)
    documents = []
    for name, where in (("local", str(run)), ("remote", str(place))):
        assert capd("report", where, "-o", tmp_path / name, "--formats", "mxfp8", *quick).code == 0
        documents.append((tmp_path / name / "global_statistics.json").read_text().replace(where, "RUN"))
    assert documents[0] == documents[1]


def test_two_runs_are_compared_and_shown_beside_each_other(
    capd: Capd, tmp_path: Path, prefix: Address
) -> None:
    runs = [written(tmp_path, name, scale) for name, scale in (("a", 1.0), ("b", 1.5))]
    places = [str(publish(run, prefix)) for run in runs]
    local = capd("compare", *runs, "--json").out.replace(f"{tmp_path}/", "")
    assert capd("compare", *places, "--json").out.replace(f"{prefix}/", "") == local
    # One side here, the other side there.
    assert (
        capd("compare", runs[0], places[1], "--json")
        .out.replace(f"{prefix}/", "")
        .replace(f"{tmp_path}/", "")
        == local
    )
    assert capd("report", *places, "--quick", "-o", tmp_path / "both.html").code == 0
    assert capd("report", places[0], places[0], "--quick", "-o", tmp_path / "twice.html").code == 2


def test_a_figure_and_files_of_a_run(capd: Capd, tmp_path: Path, prefix: Address) -> None:
    run = written(tmp_path)
    place = str(publish(run, prefix))
    for name, where in (("local", run), ("remote", place)):
        assert capd("plot", where, "distribution", "-o", tmp_path / f"{name}.png", "--title", "x").code == 0
        assert capd("export", where, "--to", "npz", "-o", tmp_path / name).code == 0
    assert (tmp_path / "local.png").read_bytes() == (tmp_path / "remote.png").read_bytes()
    files = [
        sorted(p.relative_to(tmp_path / name) for p in (tmp_path / name).rglob("*.npz"))
        for name in ("local", "remote")
    ]
    assert files[0] == files[1] != []


def test_two_nodes_are_added_up(capd: Capd, tmp_path: Path, prefix: Address) -> None:
    for number, node in enumerate(("n0", "n1")):
        filled(tmp_path, node=node, seed=number, count=3)
        writer = StoreWriter(tmp_path, node=node)
        writer.open("run")
        row = session_row(client=bytes([number]) * 16, rank=number, offered=18, committed=18, dropped={})
        writer.save_session("run", row)
        writer.close()
    run = tmp_path / "run.zarr"
    place = publish(run, prefix)
    counted = same(capd, place, run, "stats", "RUN")
    assert (counted["committed"], counted["offered"], len(counted["sessions"])) == (36, 36, 2)
    assert same(capd, place, run, "verify", "RUN")["series"] == 12
    Objects(place).delete([".capd/node=n1/manifest.json"])
    said = run_capd("stats", str(place), "--json")
    assert said.json["committed"] == 18
    [line] = said.err.splitlines()
    assert f"{place}: node n1 has no manifest, so its records are not shown" in line
    checked = run_capd("verify", str(place))
    assert checked.code == 4
    assert ".capd/node=n1/manifest.json: the node has segments, but no manifest names them" in checked.out


MOST = (("stats", 3), ("stats --drops", 5), ("ls", 3), (f"show {SERIES}", 5), (f"show {SERIES}#2", 6))


@pytest.mark.parametrize(("words", "most"), MOST)
def test_a_command_makes_few_requests(
    capd: Capd, tmp_path: Path, bucket: Bucket, prefix: Address, fault_proxy: FaultProxy,
    monkeypatch: pytest.MonkeyPatch, words: str, most: int,
) -> None:  # fmt: skip
    place = publish(written(tmp_path), prefix)
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.through(fault_proxy).service.endpoint)
    verb, *rest = words.split()
    assert capd(verb, str(place), *rest).code == 0
    asked = fault_proxy.clear()
    assert 0 < len(asked) <= most, [str(one) for one in asked]


def test_the_shell_offers_nothing_for_an_address(tmp_path: Path) -> None:
    for words in (
        "capd ls s3://bucket/",
        "capd show s3://bucket/run.zarr ",
        "capd ls s3://bucket/runs --run ",
    ):
        said = run_capd(
            COMP_WORDS=words,
            COMP_CWORD=str(len(words.split(" ")) - 1),
            _CAPD_COMPLETE="complete_bash",
            cwd=tmp_path,
        )
        assert (said.out.strip(), said.err) == ("", "")
