"""Codec names, what `auto` chooses, and that other readers decode what is chosen."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from capd.errors import ConfigError
from capd.store.format.codec_choice import codec_name
from capd.store.format.codecs import chain_for, parse_codec
from tests.kit.store.reading import assert_capd_reads, assert_zarr_readers_read
from tests.kit.store.writing import Writer, key

PLANES = "blosc:zstd:1:shuffle:1048576"
RNG = np.random.default_rng(3)


def bf16(elements: int = 1 << 19) -> NDArray[np.uint16]:
    return (RNG.standard_normal(elements).astype("f4").view("u4") >> 16).astype("u2")


@pytest.mark.parametrize(
    "codec",
    [
        "none", "zstd:1", "zstd:-3", "blosc:lz4:5:bitshuffle", "blosc:zstd:1:noshuffle", PLANES, "auto", "default",
        "fast",
    ],
)  # fmt: skip
def test_every_codec_is_read_by_every_reader(tmp_path: Path, codec: str) -> None:
    writer = Writer(tmp_path, codec=codec)
    for _ in range(2):
        writer.put(key("large"), "bfloat16", bf16().reshape(64, -1))
        writer.put(key("small"), "float8_e4m3fn", RNG.integers(0, 256, (7, 9)).astype("u1"))
    writer.close()

    assert_capd_reads(writer.run, writer.held)
    assert_zarr_readers_read(writer.run, writer.held)


@pytest.mark.parametrize(
    "codec",
    ["gzip", "zstd", "zstd:23", "zstd:one", "zstd:1:2", "none:1", "blosc:snappy:1:shuffle", "blosc:lz4:10:shuffle",
     "blosc:lz4:1:twist", "blosc:lz4:1:shuffle:-1", "blosc:lz4:1:shuffle:99999999999", ""],
)  # fmt: skip
def test_a_wrong_codec_name_is_an_error_that_lists_the_forms(codec: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown codec .* blosc:lz4\|zstd:LEVEL"):
        parse_codec(codec)


def test_the_explicit_block_keeps_the_byte_planes_apart() -> None:
    chunk = bf16(1 << 20)

    explicit, automatic = (chain_for(name, "bfloat16").encode(chunk).nbytes for name in (PLANES, PLANES[:-8]))

    assert chunk.nbytes / explicit > 1.44
    assert automatic / explicit > 1.12


def raw(bits: NDArray[np.generic]) -> bytes:
    return bits.tobytes()


def test_auto_takes_the_cheapest_that_shrinks_as_well_as_the_best() -> None:
    scales = (127 + RNG.normal(0, 2, 1 << 18)).astype("u1")
    mxfp4_grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], "f4")[RNG.integers(0, 8, 1 << 18)]

    assert codec_name("auto", "bfloat16", raw(bf16())) == PLANES
    assert codec_name("auto", "float32", raw(RNG.standard_normal(1 << 18).astype("f4"))) == PLANES
    assert codec_name("auto", "uint8", RNG.bytes(1 << 18)) == "none"
    assert codec_name("auto", "float8_e8m0fnu", raw(scales)) in ("zstd:1", "zstd:3")
    on_grid = codec_name("auto", "bfloat16", raw((mxfp4_grid.view("u4") >> 16).astype("u2")))
    bits = (mxfp4_grid.view("u4") >> 16).astype("u2")
    assert chain_for(on_grid, "bfloat16").encode(bits).nbytes < 2**19 / 2.4


@pytest.mark.parametrize("sample", [b"", bytes(1 << 16)])
def test_auto_learns_nothing_from_an_empty_or_constant_first_record(sample: bytes) -> None:
    assert codec_name("auto", "bfloat16", sample) == PLANES
    assert codec_name("auto", "float8_e4m3fn", sample) == "zstd:1"


def test_auto_is_decided_by_the_first_record_of_a_series_and_stays(tmp_path: Path) -> None:
    writer = Writer(tmp_path, codec="auto")
    writer.put(key("x"), "uint8", RNG.integers(0, 256, (64, 8192)).astype("u1"))
    writer.flush()
    writer.close()
    again = Writer(tmp_path, codec="default")
    again.held, again.sequence = writer.held, writer.sequence
    again.put(key("x"), "uint8", np.zeros((64, 8192), "u1"))
    again.close()

    [document] = again.run.glob("bf16/*/*/*/*/data/zarr.json")
    [sharding] = json.loads(document.read_text())["codecs"]
    assert [codec["name"] for codec in sharding["configuration"]["codecs"]] == ["bytes", "crc32c"]
    assert_capd_reads(again.run, again.held)
    assert_zarr_readers_read(again.run, again.held)
