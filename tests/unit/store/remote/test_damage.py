"""Damage in an object store: no value is ever wrong, and one line says what is damaged."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import capd
from capd.errors import CapdError, DamagedRecord, NotAStore, ObjectStoreError
from capd.store.format.codecs import crc32c
from capd.store.objects.address import Address, parse_address
from capd.store.read.series import Series
from tests.kit.objects.uploaded import filled, publish

MANIFEST = ".capd/node=n0/manifest.json"
SERIES = ".capd/node=n0/series-00000001.parquet"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sealed run."""
    return filled(tmp_path_factory.mktemp("here"), count=5)


@pytest.fixture
def place(run: Path, tmp_path: Path) -> Address:
    """Its upload into a directory."""
    return publish(run, parse_address(f"file://{tmp_path}/there"))


def named(store: capd.Store, name: str) -> Series:
    """The series of a tensor."""
    return next(one for one in store.everything() if one.key.tensor_name == name)


def shard_of(place: Address, name: str) -> Path:
    """The file of the only shard of a series."""
    [found] = [path for path in Path("/", place.key).glob(f"*/*/*/*/*{name}/data/c/**/*") if path.is_file()]
    return found


def flip(file: Path, at: int) -> None:
    """Change one byte."""
    payload = bytearray(file.read_bytes())
    payload[at] ^= 0x20
    file.write_bytes(payload)


def test_a_damaged_chunk_costs_its_record_alone(run: Path, place: Address) -> None:
    local, shard = named(capd.open(run), "large"), shard_of(place, "large")
    flip(shard, shard.stat().st_size // 2)
    remote = named(capd.open(place), "large")
    for number in (0, 1, 3, 4):
        np.testing.assert_array_equal(remote.numpy(number), local.numpy(number))
    with pytest.raises(DamagedRecord) as raised:
        remote.numpy(2)
    assert f"{remote.path}#2 in {place}/{remote.path}/data/c/0" in str(raised.value)


@pytest.mark.parametrize("name", ["large", "small", "bf", "stats"])
def test_without_its_index_a_shard_is_read_by_its_journal(run: Path, place: Address, name: str) -> None:
    flip(shard_of(place, name), -2)
    local, remote = named(capd.open(run), name), named(capd.open(place), name)
    assert [remote.read(i).tobytes() for i in range(5)] == [local.read(i).tobytes() for i in range(5)]


def test_of_a_truncated_shard_the_whole_records_are_read(run: Path, place: Address) -> None:
    local, shard = named(capd.open(run), "large"), shard_of(place, "large")
    shard.write_bytes(shard.read_bytes()[:-200_000])
    remote = named(capd.open(place), "large")
    for number in range(4):
        np.testing.assert_array_equal(remote.numpy(number), local.numpy(number))
    with pytest.raises(DamagedRecord, match=r"large#4 in"):
        remote.numpy(4)


def test_a_missing_shard_is_damage(place: Address) -> None:
    shard_of(place, "large").unlink()
    with pytest.raises(DamagedRecord, match="the manifest names it, but there is no such object"):
        named(capd.open(place), "large").numpy(0)


def test_a_shard_of_another_series_is_never_read_as_this_one(place: Address) -> None:
    shard_of(place, "small").write_bytes(shard_of(place, "number").read_bytes())
    with pytest.raises(DamagedRecord):
        named(capd.open(place), "small").numpy(0)


def test_a_segment_that_fails_its_checksum_is_refused(place: Address) -> None:
    flip(Path("/", place.key, SERIES), 500)
    with pytest.raises(ObjectStoreError, match="does not match the size and checksum in the manifest"):
        _ = capd.open(place).series


def test_a_damaged_row_is_never_believed(run: Path, place: Address) -> None:
    segment = Path("/", place.key, ".capd/node=n0/records-00000001.parquet")
    payload, wanted = segment.read_bytes(), str([one.records[0].stats for one in capd.open(run).series])
    values = random.Random(1)
    refused = []
    for _ in range(120):
        harmed = bytearray(payload)
        harmed[values.randrange(len(harmed))] ^= 1 << values.randrange(8)
        segment.write_bytes(harmed)
        try:
            assert str([one.records[0].stats for one in capd.open(place).series]) == wanted
        except CapdError as error:
            refused.append(str(error))
    assert refused
    assert not any("\n" in said for said in refused)


def _manifest(place: Address, **changes: object) -> None:
    file = Path("/", place.key, MANIFEST)
    plain = {**msgspec.json.decode(file.read_bytes()), **changes}
    del plain["crc32c"]
    head = msgspec.json.format(msgspec.json.encode(plain), indent=1).removesuffix(b"\n}")
    file.write_bytes(head + b',\n "crc32c": %d\n}' % crc32c(head))


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"format": 99}, NotAStore, "has manifest format 99, but this capd reads up to 1; upgrade capd"),
        ({"attributes": {"format": 99}}, NotAStore, "the run has format 99"),
        ({"node": "n1"}, ObjectStoreError, "is the manifest of node 'n1'"),
        ({"series": None}, ObjectStoreError, "is no manifest of capd"),
        (
            {"series": {"name": "../../x", "nbytes": 1, "crc32c": 1, "rows": 1}},
            ObjectStoreError,
            "is no name of a segment",
        ),
        (
            {"series": {"name": "series-00000001.parquet", "nbytes": 1 << 60, "crc32c": 1, "rows": 1}},
            ObjectStoreError,
            "this is no segment of series",
        ),
        (
            {"series": {"name": "series-00000001.parquet", "nbytes": 9, "crc32c": 1, "rows": 1}},
            ObjectStoreError,
            "more than 9",
        ),
    ],
)  # fmt: skip
def test_a_manifest_that_lies_is_refused_in_one_line(
    place: Address, changes: dict[str, object], error: type[CapdError], said: str
) -> None:
    _manifest(place, **changes)
    with pytest.raises(error, match=said) as raised:
        _ = capd.open(place).series
    assert "\n" not in str(raised.value)
    assert str(place) in str(raised.value)


def test_no_flipped_bit_of_a_manifest_is_believed(place: Address) -> None:
    file = Path("/", place.key, MANIFEST)
    payload = file.read_bytes()
    for at in range(len(payload)):
        harmed = bytearray(payload)
        harmed[at] ^= 1 << at % 7
        file.write_bytes(harmed)
        with pytest.raises(CapdError) as raised:
            capd.open(place)
        assert str(file) in str(raised.value)


def test_any_manifest_and_series_segment_is_refused_or_read(run: Path, place: Address) -> None:
    values = random.Random(2)
    files = [Path("/", place.key, MANIFEST), Path("/", place.key, SERIES)]
    payloads = [file.read_bytes() for file in files]
    wanted = [one.path for one in capd.open(run).series]
    for turn in range(120):
        file, payload = files[turn % 2], payloads[turn % 2]
        harmed = bytearray(payload)
        for _ in range(values.randrange(1, 4)):
            harmed[values.randrange(len(harmed))] = values.randrange(256)
        file.write_bytes(harmed)
        with contextlib.suppress(CapdError):
            assert [one.path for one in capd.open(place).series] == wanted
        file.write_bytes(payload)


def test_a_small_segment_never_becomes_much_memory(place: Address) -> None:
    file = Path("/", place.key, SERIES)
    table = pq.read_table(file)
    header = table.column("header")[0].as_py() + bytes(4 << 20)
    many = pa.table(
        {name: [table.column(name)[0].as_py()] * 5000 for name in table.column_names}, schema=table.schema
    )
    at = table.column_names.index("header")
    folded = pa.DictionaryArray.from_arrays(pa.array([0] * 5000, pa.int32()), pa.array([header], pa.binary()))
    pq.write_table(many.set_column(at, "header", folded), file, compression="zstd")
    payload = file.read_bytes()
    assert len(payload) < 1 << 20
    _manifest(
        place, series={"name": file.name, "nbytes": len(payload), "crc32c": crc32c(payload), "rows": 5000}
    )
    before = pa.default_memory_pool().max_memory()
    with pytest.raises(ObjectStoreError, match="its values have 2097"):
        _ = capd.open(place).series
    # Unfolded, the column has 20 GiB.
    assert pa.default_memory_pool().max_memory() < before + (256 << 20)
