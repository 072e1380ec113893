"""Reading files of torch.save: those it writes come back bit for bit, anything else is refused before it costs much."""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from capd.pt_files.load import load_tensor_file, opened
from capd.pt_files.pickle_scan import BadTensorFile
from capd_client.protocol.dtypes import SUPPORTED_DTYPES
from tests.kit.store.pt_files import seed_dictionary

Save = Callable[..., Path]


class Code:
    """A pickle of this would create a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def load(path: Path) -> Any:
    with opened(path) as file:
        return load_tensor_file(file)


def refusal(path: Path) -> str:
    with pytest.raises(BadTensorFile) as refused:
        load(path)
    return str(refused.value)


def rezipped(path: Path, change: Callable[[str, bytes], bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in entries.items():
            archive.writestr(name, change(name, data))
    return path


# torch.load(weights_only=True) cannot read these back from the format before zip, in which torch still writes them.
ZIP_ONLY = {name for name in SUPPORTED_DTYPES if name.startswith(("float8", "float4", "uint"))} - {"uint8"}
READABLE = [(name, True) for name in sorted(SUPPORTED_DTYPES)]
READABLE += [(name, False) for name in sorted(SUPPORTED_DTYPES - ZIP_ONLY)]


@pytest.mark.parametrize(("dtype", "zipped"), READABLE)
def test_both_formats_give_every_dtype_bit_for_bit(save: Save, dtype: str, zipped: bool) -> None:
    kind = getattr(torch, dtype, None)
    if kind is None:
        pytest.skip(f"this torch has no {dtype}")
    bits = torch.randint(0, 2 if dtype == "bool" else 256, (3, 4, 8), dtype=torch.uint8)
    tensor = bits.view(kind)

    found = load(save(seed_dictionary(tensor), _use_new_zipfile_serialization=zipped))

    assert found["tensor"].dtype == kind
    assert torch.equal(found["tensor"].view(torch.uint8), bits)
    assert found["metadata"]["experiment"] == "test_run"


@pytest.mark.parametrize("zipped", [True, False])
def test_views_and_what_callers_put_into_metadata_are_read(save: Save, zipped: bool) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    content = seed_dictionary(
        base.t()[1:], shape=base.shape, dtype=base.dtype, where=torch.device("cpu"), n=(1, None)
    )

    found = load(save(content, _use_new_zipfile_serialization=zipped))

    assert torch.equal(found["tensor"], base.t()[1:])
    assert found["metadata"]["shape"] == base.shape


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_pickle_is_named_and_not_run(save: Save, tmp_path: Path, zipped: bool) -> None:
    trap = tmp_path / "trap"
    path = save(seed_dictionary(torch.ones(2), payload=Code(trap)), _use_new_zipfile_serialization=zipped)

    assert "mkdir" in refusal(path)
    assert not trap.exists()


@pytest.mark.parametrize("protocol", range(6))
def test_a_plain_pickle_is_refused_unread(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "20250908_091143_0001_linear_forward_bf16_input.pt"
    path.write_bytes(pickle.dumps({"tensor": Code(tmp_path / "trap")}, protocol))

    assert "it is" in refusal(path)
    assert not (tmp_path / "trap").exists()


def test_a_compressed_archive_is_refused_before_it_unfolds(save: Save) -> None:
    path = rezipped(save(seed_dictionary(torch.zeros(16 << 20))), lambda _, data: data, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1 << 20

    assert "compressed" in refusal(path)


def test_a_storage_declared_larger_than_its_bytes_is_refused(save: Save) -> None:
    def grown(name: str, data: bytes) -> bytes:
        return (
            data.replace(b"K\x07", b"J" + struct.pack("<i", 2**31 - 1)) if name.endswith("data.pkl") else data
        )

    path = rezipped(save(seed_dictionary(torch.arange(7.0))), grown)

    assert "declared with 8589934588 bytes and has 28 bytes" in refusal(path)


def test_the_same_before_zip_is_refused_without_the_memory(save: Save) -> None:
    path = save(seed_dictionary(torch.arange(7.0)), _use_new_zipfile_serialization=False)
    path.write_bytes(path.read_bytes().replace(b"K\x07", b"\x8a\x07\xff\xff\xff\xff\xff\xff\x0f"))

    assert "declared to end at byte" in refusal(path)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_cut_off_anywhere_is_refused(save: Save, zipped: bool) -> None:
    path = save(seed_dictionary(torch.randn(3, 3)), _use_new_zipfile_serialization=zipped)
    whole = path.read_bytes()

    for kept in range(len(whole)):
        path.write_bytes(whole[:kept])
        assert refusal(path)


@pytest.mark.parametrize("zipped", [True, False])
def test_no_flipped_byte_raises_anything_else(save: Save, zipped: bool) -> None:
    path = save(seed_dictionary(torch.randn(3, 3)), _use_new_zipfile_serialization=zipped)
    whole = path.read_bytes()

    for at in range(0, len(whole), 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        with contextlib.suppress(BadTensorFile):
            load(path)


def test_bytes_behind_an_archive_or_two_entries_of_a_name_are_refused(save: Save) -> None:
    path = save(seed_dictionary(torch.ones(3)))
    whole = path.read_bytes()
    path.write_bytes(whole + b"more")
    assert "is followed by other bytes" in refusal(path)

    path.write_bytes(whole)
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr(archive.namelist()[0], b"other")
    assert "two entries" in refusal(path)


def test_an_archive_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", b"hello")

    assert "none of torch.save" in refusal(path)


def test_a_dictionary_beyond_the_limit_is_refused(save: Save) -> None:
    assert "1048576" in refusal(save(seed_dictionary(torch.ones(1), notes="x" * (2 << 20))))
    assert refusal(
        save(seed_dictionary(torch.ones(1), notes="x" * (2 << 20)), _use_new_zipfile_serialization=False)
    )


def test_what_is_no_regular_file_is_not_opened(save: Save, tmp_path: Path) -> None:
    target = save(seed_dictionary(torch.ones(1)))
    (tmp_path / "link.pt").symlink_to(target)
    os.mkfifo(tmp_path / "pipe.pt")

    assert "symbolic link" in refusal(tmp_path / "link.pt")
    assert "no regular file" in refusal(tmp_path / "pipe.pt")
    assert "cannot be opened" in refusal(tmp_path / "missing.pt")


def test_random_bytes_and_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(b"")
    assert "empty" in refusal(tmp_path / "x.pt")
    (tmp_path / "x.pt").write_bytes(bytes(range(256)))
    assert "no file of torch.save" in refusal(tmp_path / "x.pt")


def test_pickles_that_nest_doubles_cost_no_more_than_their_bytes(save: Save) -> None:
    laughing: list[Any] = []
    for _ in range(60):
        laughing = [laughing, laughing]

    assert load(save(seed_dictionary(torch.ones(1), lol=laughing)))["tensor"].numel() == 1


def test_an_entry_that_differs_in_case_alone_cannot_replace_the_pickle_that_was_checked(save: Save) -> None:
    path = save({"tensor": torch.zeros(4), "metadata": bytearray(b"not scanned")})
    with zipfile.ZipFile(path) as archive:
        unchecked = archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))
    path = save(seed_dictionary(torch.zeros(4)))
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
            if name.endswith("/data.pkl"):
                archive.writestr(name.replace("data.pkl", "DATA.PKL"), unchecked)
    assert "two entries of one name" in refusal(path)
