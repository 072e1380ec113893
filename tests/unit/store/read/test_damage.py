"""Damaged stores: a read returns the captured bits or raises a CapdError, and what is sound stays readable."""

from __future__ import annotations

import logging
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

import capd
from capd.errors import CapdError, DamagedRecord
from capd.store.catalog.rows import CATALOG_NAME
from capd.store.format.codecs import chain_for, crc32c
from capd.store.format.decode import decode_into
from capd.store.read.shard_file import ShardFile
from tests.kit.store.damaging import edit_catalog
from tests.kit.store.writing import Writer, key
from tests.kit.tiers import rows

Truth = dict[tuple[str, int], tuple[int, np.ndarray]]


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Truth]:
    """A small sealed run, and by path and record what stands there: (iteration, bits)."""
    values = np.random.default_rng(3)
    writer = Writer(tmp_path_factory.mktemp("sealed"), shard_nbytes=3 << 20)
    for iteration in range(7):
        writer.put(
            key("large"), "float32", values.standard_normal((2, 600, 300)).astype("f4"), iteration=iteration
        )
        bits = values.integers(0, 1 << 16, (3 + iteration % 3, 9), dtype=np.uint16)
        writer.put(key("ragged"), "bfloat16", bits, iteration=iteration)
        writer.put(key("experts"), "int64", values.integers(0, 9, (iteration % 3, 4)), iteration=iteration)
        writer.put(
            key("twin", layer=None), "uint8", np.full((1 << 9, 1 << 10), 3, np.uint8), iteration=iteration
        )
        if iteration == 4:
            writer.pipeline.seal("run").result(timeout=30)  # what follows continues these shards
    writer.close()
    assert not writer.outcomes.refusals
    return writer.run, contents(writer.run)


def contents(run: Path) -> Truth:
    """Every record of a sound run."""
    return {
        (series.path, number): (record.iteration, series.numpy(number))
        for series in capd.open(run).series
        for number, record in enumerate(series.records)
    }


def reads(run: Path) -> Iterator[tuple[tuple[str, int], Callable[[], np.ndarray]]]:
    """The reads that a run offers; opening it may fail with a CapdError, as may each of them."""
    try:
        found = capd.open(run).find()
        everything = [(series, min(len(series), 20)) for series in found]
    except CapdError:
        return
    for series, count in everything:
        for number in range(count):
            yield (series.path, number), lambda s=series, n=number: s.numpy(n)
            yield (series.path, number), lambda s=series, n=number: s.stack(slice(n, n + 1), bits=True)[0]


def check(run: Path, truth: Truth) -> int:
    """Read all there is; returns how many reads gave what they should, fails where one gave anything else."""
    good, messages = 0, []
    for place, read in reads(run):
        try:
            bits = read()
        except CapdError as error:
            messages.append(str(error))
            continue
        assert place in truth
        expected = truth[place][1]
        assert bits.shape == expected.shape
        assert bits.tobytes() == expected.tobytes()
        good += 1
    assert not any("\n" in message for message in messages)
    return good


@pytest.mark.parametrize(("flips", "cuts"), rows([(40, 10), (120, 20)], [(40, 10)]))
def test_after_one_flipped_bit_or_a_cut_every_read_is_right_or_an_error(
    sealed: tuple[Path, Truth], tmp_path: Path, flips: int, cuts: int, caplog: pytest.LogCaptureFixture
) -> None:
    run, truth = sealed
    caplog.set_level(logging.ERROR)
    image = tmp_path / run.name
    shutil.copytree(run, image)
    # One bit of an empty file cannot flip.
    files = sorted(path for path in image.rglob("*") if path.is_file() and path.stat().st_size)
    assert check(image, truth) == 2 * len(truth)
    chosen = np.random.default_rng(17)
    weights = np.array([min(path.stat().st_size, 60_000) + 2000 for path in files], "f8")
    unharmed = 0
    for number in range(flips + cuts):
        path = files[chosen.choice(len(files), p=weights / weights.sum())]
        whole = path.read_bytes()
        broken = bytearray(whole)
        if number < flips:
            at = int(chosen.integers(len(whole)))
            broken[at] ^= 1 << int(chosen.integers(8))
        else:
            del broken[int(chosen.integers(len(whole))) :]
        path.write_bytes(broken)
        unharmed += check(image, truth) > 0
        path.write_bytes(whole)
        for suffix in ("-wal", "-shm", "-journal"):
            for extra in image.rglob(f"*{suffix}"):
                extra.unlink()

    assert unharmed > (flips + cuts) * 0.9  # hardly any of them costs everything


@pytest.mark.parametrize(
    "codec", ["none", "zstd:1", "zstd:3", "blosc:zstd:1:shuffle:1048576", "blosc:lz4:5:bitshuffle"]
)
@pytest.mark.parametrize("elements", [1, 40, 300, 70_000])
def test_a_chunk_of_another_size_is_no_chunk(codec: str, elements: int) -> None:
    chain = chain_for(codec, "float32")
    bits = np.random.default_rng(elements).standard_normal(elements).astype("f4")
    payload = b"".join(chain.encode(bits).parts)

    out = np.empty((elements, 1), "f4")
    decode_into(chain, payload, out)
    assert out.tobytes() == bits.tobytes()
    for wrong in (elements + 1, elements * 2 + 7, elements // 2 - 1):
        if wrong >= 0:
            target = np.full(wrong, 5, "f4")
            with pytest.raises(DamagedRecord, match="decodes to"):
                decode_into(chain, payload, target)
            assert (target == 5).all()
    for cut in (b"", payload[:3], payload[:-1], payload + b"\0"):
        with pytest.raises(DamagedRecord, match="checksum"):
            decode_into(chain, cut, out)
    for body in (b"", b"\x28\xb5\x2f\xfd", payload[:10], bytes(20)):  # sound checksums around no chunk at all
        with pytest.raises(DamagedRecord):
            decode_into(chain, body + crc32c(body).to_bytes(4, "little"), np.empty(99, "f4"))


@pytest.mark.parametrize("how", rows(["missing", "cut", "zeros", "text", "page"], ["missing", "page"]))
def test_the_journals_stand_in_for_a_damaged_catalog(
    sealed: tuple[Path, Truth], tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    run, truth = sealed
    image = tmp_path / run.name
    shutil.copytree(run, image)
    [catalog] = image.rglob(CATALOG_NAME)
    whole = catalog.read_bytes()
    if how == "missing":
        catalog.unlink()
    else:
        middle = len(whole) // 2 // 4096 * 4096
        catalog.write_bytes(
            {
                "cut": whole[:middle],
                "zeros": bytes(len(whole)),
                "text": b"this is no database at all\n" * 200,
                "page": whole[:4096] + b"\xff" * (len(whole) - 4096),
            }[how]
        )

    found = contents(image)

    assert {place: iteration for place, (iteration, _) in found.items()} == {
        place: iteration for place, (iteration, _) in truth.items()
    }
    assert all(bits.tobytes() == truth[place][1].tobytes() for place, (_, bits) in found.items())
    assert any("read from the shards instead" in record.message for record in caplog.records)
    sound, salvaged = capd.open(run), capd.open(image)
    assert [repr(series) for series in salvaged.series] == [repr(series) for series in sound.series]
    assert [s.raw_bytes for s in salvaged.series] == [s.raw_bytes for s in sound.series]
    for ours, theirs in zip(salvaged.series, sound.series, strict=True):
        assert [(r.stats, r.shape, r.sealed) for r in ours.records] == [
            (r.stats, r.shape, r.sealed) for r in theirs.records
        ]


def edited(sealed: tuple[Path, Truth], tmp_path: Path, statement: str) -> Path:
    """A copy of the run whose catalog was changed by an SQL statement."""
    image = tmp_path / sealed[0].name
    shutil.copytree(sealed[0], image)
    [catalog] = image.rglob(CATALOG_NAME)
    edit_catalog(catalog, statement)
    return image


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        (
            "UPDATE records SET body=changed(body, 'shape', '[3, 8]') WHERE field(body, 'shape')='[3,9]'",
            "does not fit",
        ),
        (
            "UPDATE records SET body=changed(body, 'shape', '[9, 3]') WHERE field(body, 'shape')='[3,9]'",
            "does not fit",
        ),
        (
            "UPDATE records SET body=changed(body, 'shape', '[0, 2]') WHERE field(body, 'shape')='[0,4]'",
            "different captures",
        ),
        (
            "UPDATE records SET body=changed(body, 'shape', '[2, 300, 600]') WHERE field(body, 'shape')='[2,600,300]'",
            "does not fit",
        ),
        (
            "UPDATE records SET body=changed(changed(body, 'shape', '[1, 600, 300]'), 'nbytes', '720000') "
            "WHERE field(body, 'shape')='[2,600,300]'",
            "different captures",
        ),
        (
            "UPDATE records SET body=changed(body, 'sequence', field(body, 'sequence')+1) WHERE record=2",
            "different captures",
        ),
        ("UPDATE records SET body=changed(body, 'client', '\"0\"') WHERE record=2", "different captures"),
    ],
)
def test_a_catalog_that_names_another_capture_is_an_error_not_a_value(
    sealed: tuple[Path, Truth], tmp_path: Path, statement: str, message: str
) -> None:
    image = edited(sealed, tmp_path, statement)
    errors = []
    for (path, number), read in reads(image):
        try:
            bits = read()
        except DamagedRecord as error:
            errors.append((f"{path}#{number}", str(error)))
        else:
            assert bits.tobytes() == sealed[1][path, number][1].tobytes()

    assert errors
    assert all(place in error and message in error for place, error in errors)


@pytest.mark.parametrize(
    ("wrong", "is_possible"),
    [
        ({"extents": (2, 600, 600)}, True),
        ({"extents": (2, 600, 150), "chunk": (2, 600, 150)}, False),  # smaller than its records
        ({"shard_records": 4}, True),
        ({"shard_records": 1}, True),
        ({"batch": 2}, True),
    ],
    ids=repr,
)
def test_a_catalog_with_another_grid_than_the_shards_is_an_error(
    sealed: tuple[Path, Truth], tmp_path: Path, wrong: dict[str, object], is_possible: bool
) -> None:
    """One that cannot be is not used at all: the shards stand in."""
    image = edited(sealed, tmp_path, "SELECT 1")
    [catalog] = image.rglob(CATALOG_NAME)
    database = sqlite3.connect(catalog)
    [large] = [series for series in capd.open(image).series if series.key.tensor_name == "large"]
    header = large._row.header
    changed = msgspec.structs.replace(header, geometry=msgspec.structs.replace(header.geometry, **wrong))
    with database:
        database.execute(
            "UPDATE series SET header=? WHERE path=?", (msgspec.msgpack.encode(changed), large.path)
        )
    database.close()

    [large] = [series for series in capd.open(image).series if series.key.tensor_name == "large"]
    for number in range(len(large)):
        if not is_possible:
            assert large.numpy(number).tobytes() == sealed[1][large.path, number][1].tobytes()
            continue
        with pytest.raises(
            DamagedRecord, match=rf"large#{number} .*(different shards|does not fit|no COMMIT)"
        ):
            large.numpy(number)


def test_swapped_shards_are_errors(sealed: tuple[Path, Truth], tmp_path: Path) -> None:
    image = tmp_path / sealed[0].name
    shutil.copytree(sealed[0], image)
    [large] = [series for series in capd.open(image).series if series.key.tensor_name == "large"]
    shards = [image / large.path / "data" / "c" / n / "0" / "0" / "0" for n in ("0", "1")]
    first, second = (shard.read_bytes() for shard in shards)
    shards[0].write_bytes(second)
    shards[1].write_bytes(first)

    for number in range(4):
        with pytest.raises(DamagedRecord, match="different shards"):
            large.numpy(number)


@pytest.mark.parametrize("lost", ["index", "header"])
def test_a_lost_index_or_header_costs_no_record(
    sealed: tuple[Path, Truth], tmp_path: Path, lost: str
) -> None:
    image = tmp_path / sealed[0].name
    shutil.copytree(sealed[0], image)
    for shard in image.glob("*/rank*/layer*/*/*/data/c/**/0"):
        if shard.is_file():
            content = bytearray(shard.read_bytes())
            content[-1 if lost == "index" else 50] ^= 1
            shard.write_bytes(content)

    for place, (_, bits) in sealed[1].items():
        series = next(series for series in capd.open(image).series if series.path == place[0])
        assert series.numpy(place[1]).tobytes() == bits.tobytes()


def test_shards_that_another_program_rewrote_stay_readable(
    sealed: tuple[Path, Truth], tmp_path: Path
) -> None:
    import zarr

    image = tmp_path / sealed[0].name
    shutil.copytree(sealed[0], image)
    for series in capd.open(image).series:
        array = zarr.open_array(image / series.path / "data", mode="r+")
        array[...] = array[...]
        [shard, *_] = (image / series.path / "data" / "c" / "0").rglob("0")
        while shard.is_dir():
            shard /= "0"
        assert ShardFile(str(shard)).belongs_to(series._row.header, 0) is None  # no frames any more

    found = {
        (series.path, number): series.numpy(number).tobytes()
        for series in capd.open(image).series
        for number in range(len(series))
    }
    assert found == {place: bits.tobytes() for place, (_, bits) in sealed[1].items()}


def test_a_shard_that_is_gone_costs_its_own_records(sealed: tuple[Path, Truth], tmp_path: Path) -> None:
    image = tmp_path / sealed[0].name
    shutil.copytree(sealed[0], image)
    [large] = [series for series in capd.open(image).series if series.key.tensor_name == "large"]
    (image / large.path / "data" / "c" / "1" / "0" / "0" / "0").unlink()

    for number in range(len(large)):
        if number // 2 == 1:
            with pytest.raises(DamagedRecord, match=rf"large#{number} in .*c/1/0/0/0: no COMMIT frame"):
                large.numpy(number)
        else:
            assert large.numpy(number).tobytes() == sealed[1][large.path, number][1].tobytes()
