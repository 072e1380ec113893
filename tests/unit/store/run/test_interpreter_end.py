"""A store that outlives the modules it was read with: the interpreter ends without a word."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from capd.store.read.shard_file import ShardFile
from tests.kit.store.writing import Writer, key

READ = """
import sys, capd
store = capd.open(sys.argv[1])
arrays = [series.numpy(0) for series in store.series]
{keep}
"""
KEPT = {
    "in the script": "",
    "by a package that holds on to the script": "sys.kept = sys.modules['__main__']",  # as dill does
}


@pytest.mark.parametrize("kept", KEPT)
def test_a_script_that_keeps_its_store_ends_silently(kept: str, tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    for name in ("a", "b", "c"):
        writer.put(key(name), "float32", np.ones((64, 64), np.float32))
    writer.close()

    done = subprocess.run(
        [sys.executable, "-c", READ.format(keep=KEPT[kept]), str(writer.run)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip

    assert (done.returncode, done.stderr) == (0, "")


def test_a_file_that_nobody_refers_to_is_closed(tmp_path: Path) -> None:
    (tmp_path / "shard").write_bytes(b"bytes")
    file = ShardFile(str(tmp_path / "shard"))
    link = Path(f"/proc/self/fd/{file.fd}")
    assert link.readlink() == tmp_path / "shard"

    del file

    assert not link.exists()
