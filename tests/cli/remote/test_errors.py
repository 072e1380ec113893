"""What goes wrong with an address is said in one line that names the address and the remedy."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from capd.store.objects.address import Address
from tests.kit.objects.faults import CLOCK_SKEW, Faults
from tests.kit.objects.proxy import FaultProxy
from tests.kit.objects.said import Capd, written
from tests.kit.objects.service import Bucket
from tests.kit.objects.uploaded import publish

READING = (("ls",), ("stats",), ("show", "loss"), ("verify",), ("compare",), ("runs",))


def one_line(said: object, *words: str, code: int = 1) -> None:
    """Check that a command failed with one line that has these words."""
    assert said.code == code, said  # type: ignore[attr-defined]
    [line] = said.err.splitlines()  # type: ignore[attr-defined]
    assert line.startswith("capd: ")
    assert all(word in line for word in words), line


def test_no_such_run_names_what_is_there(capd: Capd, tmp_path: Path, prefix: Address) -> None:
    publish(written(tmp_path, "exp7"), prefix)
    one_line(
        capd("ls", f"{prefix}/exp8.zarr"),
        f"{prefix}/exp8.zarr is no run",
        f"{prefix} holds the runs exp7.zarr",
    )
    one_line(capd("ls", str(prefix), "--run", "exp8"), f"{prefix}/exp8.zarr is no run", "exp7.zarr")
    one_line(capd("stats", f"{prefix}/nothing"), "no run in")
    one_line(capd("verify", f"{prefix}/nothing"), "no run below")


@pytest.mark.parametrize("command", READING, ids=" ".join)
def test_wrong_credentials(
    capd: Capd, tmp_path: Path, prefix: Address, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = publish(written(tmp_path), prefix)
    verb, *rest = command
    where = str(prefix) if verb == "runs" else str(place)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    said = capd(verb, where, *rest)
    one_line(said, str(prefix), "AWS_ACCESS_KEY_ID")
    assert "somebody" not in said.err


def test_no_credentials(capd: Capd, prefix: Address, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    # Nothing is asked of the network: there is no metadata service.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    one_line(
        capd("ls", f"{prefix}/run.zarr"), f"{prefix}/run.zarr", "no credentials found; set AWS_ACCESS_KEY_ID"
    )


def test_no_such_bucket(capd: Capd, prefix: Address) -> None:
    one_line(capd("ls", "s3://no-such-bucket-here/run.zarr"), "s3://no-such-bucket-here/run.zarr")


def test_a_clock_that_is_off(
    capd: Capd, bucket: Bucket, prefix: Address, fault_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.through(fault_proxy).service.endpoint)
    fault_proxy.faults = Faults(every=1, answer=CLOCK_SKEW)
    one_line(capd("stats", f"{prefix}/run.zarr"), "the clock of this machine is off")


def test_without_the_extra(capd: Capd, prefix: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "obstore"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "obstore", None)
    one_line(capd("ls", f"{prefix}/run.zarr"), 'needs obstore: pip install "capd[store]"')


def test_one_node_of_a_newer_capd(capd: Capd, tmp_path: Path, prefix: Address) -> None:
    from capd.store.objects.bucket import Bucket as Objects

    objects = Objects(publish(written(tmp_path), prefix))
    objects.put(".capd/node=other/manifest.json", b'{"format": 7}')
    one_line(
        capd("stats", str(objects.address)), "node=other/manifest.json has manifest format 7", "upgrade capd"
    )


@pytest.mark.parametrize("text", ["s3://", "s3:///run", "ftp://bucket/run", "s3://b/run", "s3://bucket/../x"])
def test_a_bad_address(capd: Capd, text: str) -> None:
    one_line(capd("ls", text), code=2)


CHANGING = (
    ("rm", "ADDRESS", "--yes"),
    ("tag", "ADDRESS", "word"),
    ("pin", "ADDRESS"),
    ("unpin", "ADDRESS"),
    ("prune", "ADDRESS", "--keep-last", "1"),
    ("gc", "ADDRESS"),
    ("du", "ADDRESS"),
    ("merge", "ADDRESS", "-o", "new.zarr"),
    ("merge", "x.zarr", "-o", "ADDRESS"),
    ("import", "ADDRESS"),
    ("import", ".", "--store", "ADDRESS"),
    ("verify", "ADDRESS", "--rebuild-catalog"),
    ("verify", "ADDRESS", "--adopt", "n0"),
    ("verify", "ADDRESS", "--repair", "-o", "new.zarr"),
)


@pytest.mark.parametrize("words", CHANGING, ids=" ".join)
def test_commands_that_change_runs_refuse_an_address(
    capd: Capd, tmp_path: Path, words: tuple[str, ...]
) -> None:
    address = "s3://bucket/runs/run.zarr"
    said = capd(*(address if word == "ADDRESS" else word for word in words), cwd=tmp_path)
    one_line(said, f"{address} is in an object store", code=2)
    assert list(tmp_path.iterdir()) == []


def test_cp_to_an_address_names_the_command_for_it(capd: Capd, tmp_path: Path) -> None:
    said = capd("cp", written(tmp_path), "s3://bucket/runs/run.zarr")
    one_line(said, "`capd upload RUN s3://bucket/runs/run.zarr` brings a run there", code=2)
