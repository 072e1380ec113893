"""`capd export` and `capd import` as users run them: out of one store, into another, nothing lost on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from capd.store.read.store import open_store
from capd_client.protocol.dtypes import ITEM_NBYTES
from capd_client.protocol.key import Moment
from tests.kit.store.cli import BF16_VALUES, Result, StoreWriter, bf16_bits, linear_key
from tests.kit.store.content import content_of
from tests.kit.store.pt_files import SEED_NAME, seed_dictionary

Capd = Callable[..., Result]
SECOND_NS = 1_000_000_000
START_NS = 1_757_297_540 * SECOND_NS
RNG = np.random.default_rng(7)
NAN_PAYLOADS = {  # signalling and quiet NaNs of both signs, -0, a subnormal
    "float64": np.array([0x7FF0_0000_0000_0001, 0xFFF8_0000_0012_3456, 1 << 63, 1], np.uint64),
    "float32": np.array([0x7FA0_0001, 0xFFC1_2345, 1 << 31, 1], np.uint32),
    "float16": np.array([0x7C01, 0xFE55, 1 << 15, 1], np.uint16),
    "bfloat16": np.array([0x7F81, 0xFFC5, 1 << 15, 1], np.uint16),
}

# A process that has no capd: reads files as tensor_saver's users do.
READ_ALONE = """
import json, sys, torch
for path in sys.argv[1:]:
    found = torch.load(path, map_location="cpu", weights_only=True)
    tensor, info, metadata = found["tensor"], found["tensor_info"], found["metadata"]
    assert tuple(found) == ("tensor", "tensor_info", "metadata")
    assert list(tensor.shape) == info["shape"] and str(tensor.dtype) == info["dtype"]
    print(json.dumps([info, metadata]))
assert "capd" not in sys.modules
"""


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything that a record can have: dtypes, NaN payloads, growing shapes, ranks, layers, quant types,
    restarts, attributes, odd names."""
    root = tmp_path_factory.mktemp("rich")
    writer = StoreWriter(root)

    def put(key: Any, bits: Any, dtype: str, second: int, **more: Any) -> None:
        moment = more.pop("moment", {})
        when = Moment(**{"iteration": second, "time_ns": START_NS + second * SECOND_NS, **moment})
        writer.put("run", key, bits, dtype, when, **more)

    for second in range(3):
        for name in ("input", "weight"):
            put(
                linear_key(tensor_name=name), bf16_bits(BF16_VALUES), "bfloat16", second, device="cuda:0",
                requires_grad=True, is_leaf=name == "weight", metadata=b'{"note": "\xe4\xbd\xa0", "rank": 77}',
                moment={"micro_batch": 1, "call": second, "sample_idx": 9, "attempt": second % 2, "recompute": True},
            )  # fmt: skip
        gradient = bf16_bits(RNG.normal(size=(32 + 400 * second, 512)))
        put(linear_key(operation="backward", tensor_name="grad_output"), gradient, "bfloat16", second)
    for dtype, item_nbytes in ITEM_NBYTES.items():
        bits = RNG.integers(0, 2 if dtype == "bool" else 256, (5, item_nbytes), dtype=np.uint8)
        stored = bits.view(f"u{item_nbytes}")
        put(linear_key(quant_type="Any Type/..", tensor_name=dtype, layer=None), stored, dtype, 5)
    for dtype, bits in NAN_PAYLOADS.items():
        put(linear_key(tensor_name="nan"), bits, dtype, 6)
    for rank, (quant_type, layer) in enumerate([("mxfp8", 0), ("mxfp4", 11), ("hifp8", None)]):
        for stack in ("encoder", "decoder"):
            key = linear_key(rank=rank, layer=layer, quant_type=quant_type, stack=stack, phase="post")
            put(key, bf16_bits(RNG.normal(size=(3, 5))), "bfloat16", 6)
    put(linear_key(tensor_name="empty"), np.zeros((3, 0, 2), np.float32), "float32", 6)
    put(linear_key(tensor_name="scalar"), np.float64(np.nan).reshape(()), "float64", 6)
    put(linear_key(tensor_name="large"), RNG.normal(size=(1500, 1024)), "float64", 7)
    put(linear_key(tensor_name="late"), bf16_bits(BF16_VALUES), "bfloat16", 9)
    put(linear_key(tensor_name="late"), bf16_bits(BF16_VALUES), "bfloat16", 8)  # the clock was set back
    put(linear_key(tensor_name="only"), bf16_bits(BF16_VALUES), "bfloat16", 8, payload=False)
    return writer.close() / "run.zarr"


def exported(capd: Capd, run: Path, out: Path, *options: str) -> list[Path]:
    done = capd("export", run, "--out", out, "--to", "pt", "--json", *options)
    assert done.code == 0, done.err
    files = sorted(path for path in out.rglob("*") if path.is_file())
    assert done.json["files"] == len(files) == done.json["records"]
    return files


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--names", "A"),
        ("--names", "B", "--tensor-names", "capd"),
        ("--layer-base", "1"),
    ],
)
def test_export_and_import_give_the_same_content_bit_for_bit(
    capd: Capd, rich: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    files = exported(capd, rich, tmp_path / "files", *options)

    done = capd("import", tmp_path / "files", "--store", tmp_path / "store", "--run-id", "again", "--json")

    assert (done.code, done.json["imported"], done.json["skipped"]) == (0, len(files), [])
    expected = content_of(rich)
    found = content_of(tmp_path / "store" / "again.zarr")
    assert found.keys() == expected.keys()
    for path, records in expected.items():
        assert found[path] == records
    assert capd("verify", tmp_path / "store" / "again.zarr").code == 0


def test_a_process_without_capd_loads_every_file(capd: Capd, rich: Path, tmp_path: Path) -> None:
    files = exported(capd, rich, tmp_path / "files", "--quant-type", "bf16", "--tensor", "input")

    done = subprocess.run(
        [sys.executable, "-I", "-c", READ_ALONE, *map(str, files)],
        capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path,
    )  # fmt: skip

    info, metadata = json.loads(done.stdout.splitlines()[0])
    assert set(info) == {
        "shape", "dtype", "device", "requires_grad", "is_leaf", "min", "max", "mean", "std",
    }  # fmt: skip
    assert (info["device"], info["requires_grad"], info["is_leaf"]) == ("cuda:0", True, False)
    assert np.isnan([info["min"], info["max"], info["mean"], info["std"]]).all()  # one NaN is enough there
    assert metadata["rank"] == 0  # a caller's field of this name does not replace it
    assert metadata["note"] == "你"
    assert (metadata["layer_idx"], metadata["sample_idx"], metadata["iteration"]) == (0, 9, 0)
    assert metadata["capd"]["metadata"] == {"note": "你", "rank": 77}
    assert metadata["capd"]["moment"]["micro_batch"] == 1


@pytest.mark.parametrize(
    ("names", "fields"),
    [
        ("A", {"layer_type", "operation", "quant_type", "tensor_name", "layer_idx", "save_time"}),
        (
            "B",
            {
                "layer_type",
                "operation",
                "quant_type",
                "tensor_name",
                "layer_idx",
                "save_time",
                "phase",
                "component",
            },
        ),
    ],
)
def test_earlier_schemes_have_the_fields_of_their_time(
    capd: Capd, second: Path, tmp_path: Path, names: str, fields: set[str]
) -> None:
    files = exported(capd, second, tmp_path / "files", "--names", names, "--operation", "backward")

    metadata = torch.load(files[0], weights_only=True)["metadata"]

    assert metadata.keys() - {"capd"} == fields


def test_a_linears_gradients_are_called_as_in_the_seeds_unless_capds_names_are_wanted(
    capd: Capd, second: Path, tmp_path: Path
) -> None:
    seed = exported(capd, second, tmp_path / "seed", "--operation", "backward")
    own = exported(capd, second, tmp_path / "own", "--operation", "backward", "--tensor-names", "capd")

    assert [path.stem.rpartition("sample0_")[2] for path in (*seed, *own)] == ["input", "grad_output"]


def test_layers_are_counted_from_the_base(capd: Capd, second: Path, tmp_path: Path) -> None:
    files = exported(capd, second, tmp_path / "files", "--layer-base", "1", "--layer", "2")

    assert "_L3_" in files[0].name
    assert torch.load(files[0], weights_only=True)["metadata"]["layer_idx"] == 3


def test_a_second_export_counts_on_and_replaces_nothing(capd: Capd, second: Path, tmp_path: Path) -> None:
    first = {path: path.read_bytes() for path in exported(capd, second, tmp_path)}
    (tmp_path / "bf16" / "20250908_095220_0041_linear_forward_bf16_input.pt").write_bytes(b"somebody's")

    assert capd("export", second, "--out", tmp_path, "--quant-type", "bf16").code == 0

    counters = [int(path.name.split("_")[2]) for path in (tmp_path / "bf16").iterdir()]
    assert len(counters) == len(set(counters))
    assert max(counters) == 41 + len([path for path in first if path.parent.name == "bf16"])
    assert all(path.read_bytes() == content for path, content in first.items())


def test_the_umask_says_who_may_read_files_and_directories(
    capd: Capd, second: Path, tmp_path: Path, umask: int
) -> None:
    files = exported(capd, second, tmp_path / "files")

    assert {path.stat().st_mode & 0o777 for path in files} == {0o666 & ~umask}
    assert (tmp_path / "files").stat().st_mode & 0o777 == 0o777 & ~umask
    assert files[0].parent.stat().st_mode & 0o777 == 0o777 & ~umask


def test_two_exports_at_once_into_one_directory_are_refused(capd: Capd, second: Path, tmp_path: Path) -> None:
    import fcntl

    fd = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        done = capd("export", second, "--out", tmp_path)
    finally:
        os.close(fd)

    assert done.code == 7
    assert "another export" in done.err


@pytest.mark.parametrize(
    "options", [("--to", "pdf"), ("--names", "D"), ("--tensor-names", "mine"), ("--layer", "x")]
)
def test_a_wrong_option_is_a_usage_error(
    capd: Capd, second: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    assert capd("export", second, "--out", tmp_path, *options).code == 2


def test_an_empty_selection_exits_with_5(capd: Capd, second: Path, both_kinds: Path, tmp_path: Path) -> None:
    assert capd("export", second, "--out", tmp_path / "x", "--rank", "9").code == 5
    assert not (tmp_path / "x").exists()
    done = capd("export", both_kinds, "--out", tmp_path)
    assert "1 series keep only statistics" in done.err


# -- files that capd did not write


def seed_file(path: Path, tensor: torch.Tensor | None = None, **metadata: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(seed_dictionary(torch.ones(4) if tensor is None else tensor, **metadata), path)
    return path


def test_tensor_savers_files_come_in_the_order_in_which_they_were_written(capd: Capd, tmp_path: Path) -> None:
    logs = tmp_path / "enhanced_tensor_logs"
    for number in (2, 10, 1, 9999, 10001):
        name = (
            f"20250908_095220_{number:04d}_iter005_linear_L1_forward_pre_linear_mxfp8_rank3_sample4_input.pt"
        )
        seed_file(logs / "mxfp8" / name, torch.full((2, 2), float(number)))
    seed_file(
        logs / "mxfp8" / SEED_NAME.replace("20250908_095220_0001", "20250908_095221_0001"), torch.zeros(2, 2)
    )

    done = capd("import", logs, "--store", tmp_path / "store")

    assert done.code == 0
    series = open_store(tmp_path / "store" / "enhanced_tensor_logs.zarr").series
    assert [one.path for one in series] == ["mxfp8/rank3/layer1/pre/linear.linear.forward.input"]
    values = [float(series[0].numpy(place)[0, 0]) for place in range(6)]
    assert values == [1, 2, 10, 9999, 10001, 0]


def test_bad_files_are_named_skipped_and_counted(capd: Capd, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    good = seed_file(logs / "mxfp8" / SEED_NAME)
    (logs / "broken.pt").write_bytes(good.read_bytes()[:-100])
    (logs / "left.pkl").write_bytes(b"\x80\x04K\x01.")
    (logs / "link.pt").symlink_to(good)
    (logs / "elsewhere").symlink_to("/")
    torch.save(torch.ones(3), logs / "bare.pt")
    torch.save(seed_dictionary(torch.ones(1).expand(1 << 40)), logs / "expanded.pt")
    torch.save(seed_dictionary(torch.ones(2, dtype=torch.complex64)), logs / "complex.pt")
    torch.save(seed_dictionary(torch.ones(2, 2).to_sparse()), logs / "sparse.pt")
    torch.save(seed_dictionary(torch.empty(0, 1 << 50)), logs / "empty.pt")
    with open(os.path.join(os.fsencode(logs), b"bad \xff\x1b[31m.pt"), "wb") as file:
        torch.save(torch.ones(3), file)
    (logs / "notes.txt").write_text("not a tensor")

    done = capd("import", logs, "--store", tmp_path / "store", "--json")

    reasons = {Path(bad["file"]).name: bad["reason"] for bad in done.json["skipped"]}
    assert (done.code, done.json["imported"], done.json["files"]) == (1, 1, 11)
    assert reasons.keys() == {
        "broken.pt", "left.pkl", "link.pt", "elsewhere", "bare.pt", "expanded.pt", "complex.pt", "sparse.pt",
        "empty.pt", "bad \N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}[31m.pt",
    }  # fmt: skip
    assert "plain pickle" in reasons["left.pkl"]
    assert "not followed" in reasons["elsewhere"]
    assert "made of 4 bytes" in reasons["expanded.pt"]
    assert all(f"skipped {bad['file']}: " in done.err for bad in done.json["skipped"])


def test_views_of_a_smaller_storage_are_stored_whole(capd: Capd, tmp_path: Path) -> None:
    heads = torch.arange(6.0).reshape(2, 1, 3).expand(2, 8, 3)
    seed_file(tmp_path / "logs" / SEED_NAME, heads)

    assert capd("import", tmp_path / "logs", "--store", tmp_path).code == 0

    assert torch.equal(open_store(tmp_path / "logs.zarr").series[0].torch(0), heads)


def test_what_is_imported_once_is_not_imported_twice_and_what_is_new_is(capd: Capd, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    seed_file(logs / "mxfp8" / SEED_NAME)
    once = [capd("import", logs, "--store", tmp_path / "store", "--json").json for _ in range(2)]
    seed_file(logs / "mxfp8" / SEED_NAME.replace("0001", "0002"))

    then = capd("import", logs, "--store", tmp_path / "store", "--json").json

    assert [(done["imported"], done["already"]) for done in (*once, then)] == [(1, 0), (0, 1), (1, 1)]
    assert len(open_store(tmp_path / "store" / "logs.zarr").series[0]) == 2


@pytest.mark.fault
def test_an_import_that_was_killed_goes_on_where_it_was(tmp_path: Path, capd: Capd) -> None:
    logs, store = tmp_path / "logs", tmp_path / "store"
    tensors = [torch.randn(300, 1024) for _ in range(60)]
    for number, tensor in enumerate(tensors):
        seed_file(logs / SEED_NAME.replace("0001", f"{number:04d}"), tensor)
    command = [sys.executable, "-m", "capd", "import", str(logs), "--store", str(store), "--jobs", "1"]
    for lives in (1, 2, 3):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            while process.poll() is None and _spooled(store) < lives * 15 << 20:
                pass
            process.kill()
        assert process.returncode == -signal.SIGKILL

    done = capd("import", logs, "--store", store, "--json")

    assert (done.code, done.json["imported"] + done.json["already"]) == (0, 60)
    assert done.json["already"] >= 40
    [series] = open_store(store / "logs.zarr").series
    assert len(series) == 60
    assert all(torch.equal(series.torch(place), tensor) for place, tensor in enumerate(tensors))
    assert capd("verify", store / "logs.zarr").code == 0


def _spooled(store: Path) -> int:
    return sum(path.stat().st_size for path in store.glob("*/.capd/*/spool/*.partial"))


def test_an_import_into_a_store_that_a_daemon_owns_is_refused(capd: Capd, tmp_path: Path) -> None:
    from capd.server.daemon import node_name
    from capd.server.runs.root_lock import RootLock

    seed_file(tmp_path / "logs" / SEED_NAME)
    lock = RootLock(tmp_path / "store", node_name(None))
    try:
        done = capd("import", tmp_path / "logs", "--store", tmp_path / "store")
    finally:
        lock.release()

    assert done.code == 7


def test_a_full_disk_stops_an_import_and_says_so(capd: Capd, tmp_path: Path) -> None:
    seed_file(tmp_path / "logs" / SEED_NAME)

    done = capd("import", tmp_path / "logs", "--store", tmp_path / "store", "--keep-free", "100%")

    assert done.code == 6
    assert "give it again" in done.err


def test_a_directory_without_tensor_files_exits_with_5(capd: Capd, tmp_path: Path) -> None:
    assert capd("import", tmp_path, "--store", tmp_path / "store").code == 5
    assert capd("import", tmp_path / "missing", "--store", tmp_path / "store").code == 2
    assert not (tmp_path / "store").exists()


@pytest.mark.fault
def test_ten_thousand_files_are_imported(capd: Capd, tmp_path: Path) -> None:
    first = seed_file(tmp_path / "logs" / SEED_NAME, torch.ones(1))
    for number in range(2, 10_001):
        os.link(first, first.with_name(SEED_NAME.replace("0001", f"{number:04d}")))

    done = capd("import", tmp_path / "logs", "--store", tmp_path, "--json")

    assert (done.code, done.json["imported"]) == (0, 10_000)
    assert len(open_store(tmp_path / "logs.zarr").series[0]) == 10_000
    assert capd("import", tmp_path / "logs", "--store", tmp_path, "--json").json["already"] == 10_000
