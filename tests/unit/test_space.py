"""What has no room left, in words: the file system, how full it is, and what of it is used up."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

from capd.errors import StoreFull
from capd.space import if_full, mount_of, shown_size, what_is_full
from tests.fault.kit.file_systems import mounted_tmpfs


def error(number: int, *paths: str) -> OSError:
    return OSError(number, os.strerror(number), *paths)


def test_sizes_are_in_the_units_in_which_limits_are_set() -> None:
    sizes = (0, 4_096, 25_200_000, 1_500_000_000)
    assert [shown_size(size) for size in sizes] == ["0 B", "4,096 B", "25.2 MB", "1.50 GB"]


def test_bytes_and_inodes_are_told_apart(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "disk", "size=8m,nr_inodes=20") as disk:
        assert mount_of(disk / "not" / "there") == disk
        assert (
            f"the file system {disk} has no room left for {disk / 'store'} (8.4 MB of 8.4 MB are free)"
            in (what_is_full(error(errno.ENOSPC), disk / "store"))
        )
        for number in range(10):
            (disk / str(number)).touch()
        text = what_is_full(error(errno.ENOSPC), disk / "store")
        assert f"the file system {disk} has no inodes left" in text
        assert "(9 of 20 are free, and 8.4 MB of 8.4 MB); delete files there" in text


def test_the_file_that_an_error_names_goes_before_the_place(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "disk", "size=1m") as disk:
        assert f"file system {disk} " in what_is_full(error(errno.ENOSPC, str(disk / "x")), Path("/"))
        assert "file system / " in what_is_full(error(errno.ENOSPC, "failpoint x"), Path("/"))


def test_quotas_and_limits_on_files_are_named_as_such(tmp_path: Path) -> None:
    text = what_is_full(error(errno.EDQUOT), tmp_path)
    assert text.startswith(
        f"the quota of user {os.geteuid()} on the file system {mount_of(tmp_path)} is used up"
    )
    assert "have the quota raised" in text
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, before[1]))
    try:
        assert "(`ulimit -f`: 1.07 GB); raise the limit" in what_is_full(error(errno.EFBIG), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_is_not_about_room_stays_as_it_is(tmp_path: Path) -> None:
    other = error(errno.EIO)
    assert if_full(other, tmp_path) is other
    full = if_full(error(errno.ENOSPC), tmp_path)
    assert isinstance(full, StoreFull)
    assert isinstance(full.__cause__, OSError)
