"""Who may connect, by uid and by the mappings of user namespaces."""

from __future__ import annotations

from pathlib import Path

import pytest

from capd.errors import ConfigError
from capd.server.net.users import AllowedUsers

FULL = "0 0 4294967295"
ROOTLESS = "0 1000 1"


def proc(directory: Path, own: str, **others: str) -> Path:
    """A /proc with the uid maps of some processes."""
    (directory / "sys" / "kernel").mkdir(parents=True)
    (directory / "sys" / "kernel" / "overflowuid").write_text("65534\n")
    for name, uid_map in {"self": own, **others}.items():
        (directory / name).mkdir()
        (directory / name / "uid_map").write_text(uid_map.replace(", ", "\n") + "\n")
    return directory


def test_the_own_user_and_the_allowed_ones_may_connect(tmp_path: Path) -> None:
    users = AllowedUsers(1000, (1001,), proc(tmp_path, FULL))

    assert users.refusal(1000, 5) is None
    assert users.refusal(1001, 0) is None


def test_another_user_hears_both_uids_and_the_option(tmp_path: Path) -> None:
    refusal = AllowedUsers(1000, (), proc(tmp_path, FULL, **{"5": FULL})).refusal(1002, 5)

    assert refusal == (
        "uid 1002 may not connect to this daemon, which allows uid 1000; start it as uid 1002 or with --allow-uid 1002"
    )


def test_a_user_of_another_namespace_hears_of_its_mapping(tmp_path: Path) -> None:
    refusal = AllowedUsers(1000, (), proc(tmp_path, FULL, **{"5": "0 100000 65536"})).refusal(100_000, 5)

    assert refusal is not None
    assert "another user namespace (uid_map: 0 100000 65536)" in refusal


def test_the_uid_of_nobody_is_never_allowed_where_uids_can_be_unmapped(tmp_path: Path) -> None:
    """The daemon may even run as that uid itself."""
    users = AllowedUsers(65534, (), proc(tmp_path, "65534 1000 1"))
    refusal = users.refusal(65534, 5)

    assert refusal is not None
    assert "has no mapping in the daemon's user namespace" in refusal
    assert "--allow-uid" not in refusal
    with pytest.raises(ConfigError, match="would admit every user without a mapping"):
        AllowedUsers(0, (65534,), tmp_path)


def test_outside_of_user_namespaces_nobody_is_a_user(tmp_path: Path) -> None:
    users = AllowedUsers(1000, (65534,), proc(tmp_path, FULL))

    assert users.refusal(65534, 5) is None


def test_a_namespace_without_a_map_has_nobody(tmp_path: Path) -> None:
    assert AllowedUsers(65534, (), proc(tmp_path, "")).refusal(65534, 5) is not None
