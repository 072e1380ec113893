"""Names that users, frameworks and enemies choose, through the real daemon: none leaves the run, no two meet."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import capd
from tests.fault.kit import figures
from tests.fault.kit.load import Capture, capture
from tests.fault.kit.site import Site

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]

NAMES = [
    "..", ".", "../x", "../../../../tmp/escaped", "/etc/passwd", "a/b", "a\\b", "", " ", "\n", "a\nb", "\0", "a\0b",
    "c", "data", "moments", "zarr.json", ".zarray", ".capd", ".hidden", "__init__", "~v1", "x~v1", "x~k0123456789ab",
    "Case", "case", "CASE", "é", "e\u0301", "ﬁ", "fi", "K", "\u212a", "%2e%2e", "%2F", "x" * 255, "x" * 256, "x" * 4096,
    "\u202egnp.exe", "💥", "\ufeff", "con", "nul.", "a:b", "a*b?", "$HOME", "`id`", "-rf", "node=n", "spool",
    "'; DROP TABLE records;--",
]  # fmt: skip


def named(rank: int, n: int) -> Capture:
    """One record of every name, twice: the second time it joins the first."""
    return capture(rank, 0)._replace(name=NAMES[n % len(NAMES)])


def snapshot(directory: Path) -> set[str]:
    """All entries below a directory."""
    return {str(path) for path in directory.rglob("*")}


def test_no_name_escapes_and_no_two_collide(site: Site, tmp_path: Path) -> None:
    outside = [Path("/tmp/escaped"), tmp_path.parent / "x"]
    before = [path.exists() for path in outside]
    rank = site.rank(captures=named)
    assert site.start()
    rank.connect()
    rank.offer(2 * len(NAMES))
    rank.drain()
    assert not rank.refusals, rank.refusals
    site.kill()
    site.report()
    site.finish()

    assert [path.exists() for path in outside] == before
    assert {entry.name for entry in site.store.iterdir()} == {"run.zarr", ".capd-n.lock"}
    found = [series.key.tensor_name for series in capd.open(site.run).series]
    assert sorted(found) == sorted(NAMES)
    assert all(len(series) == 2 for series in capd.open(site.run).series)
    for path in snapshot(site.run):
        assert len(os.fsencode(os.path.basename(path))) <= 255
        assert os.path.basename(path).isascii()
    figures.note("hostile names", names=len(NAMES), escapes=0, collisions=0)
