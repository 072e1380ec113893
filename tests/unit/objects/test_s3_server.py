"""The S3 server of the tests keeps what obstore puts, refuses what a store must refuse, and leaves nothing running."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.objects.keeper import shared_server
from tests.kit.objects.server import S3Server
from tests.kit.objects.service import Bucket, S3Service
from tests.kit.paths import REPOSITORY
from tests.kit.processes import command_lines, is_running

obstore = pytest.importorskip("obstore")
from obstore import exceptions  # noqa: E402
from obstore.store import S3Store  # noqa: E402

MIB = 1 << 20
MULTIPART: dict[str, Any] = {"use_multipart": True, "chunk_size": 5 * MIB, "max_concurrency": 2}


def test_objects_come_and_go(bucket: Bucket) -> None:
    store = bucket.store()
    data = os.urandom(100_000)
    store.put("a/b", data, attributes={"x": "1", "Content-Type": "text/plain"})
    assert bytes(store.get("a/b").bytes()) == data
    assert bytes(store.get_range("a/b", start=10, length=5)) == data[10:15]
    assert bytes(store.get("a/b", options={"range": {"suffix": 7}}).bytes()) == data[-7:]
    assert store.head("a/b")["size"] == len(data)
    assert store.get("a/b", options={"head": True}).attributes == {"x": "1", "Content-Type": "text/plain"}
    assert bucket.keys() == ["a/b"]
    store.delete("a/b")
    assert bucket.keys() == []
    with pytest.raises(FileNotFoundError):
        store.head("a/b")


def test_a_large_object_goes_in_parts(bucket: Bucket) -> None:
    data = os.urandom(12 * MIB)
    bucket.store().put("large", data, **MULTIPART)
    assert bytes(bucket.store().get("large").bytes()) == data
    assert bucket.uploads() == []


def test_the_environment_names_the_bucket(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in bucket.environment().items():
        monkeypatch.setenv(name, value)
    S3Store(bucket.name).put("a", b"1")
    assert bucket.keys() == ["a"]


def test_a_condition_holds(bucket: Bucket) -> None:
    store = bucket.store()
    tag = store.put("a", b"1", mode="create")["e_tag"]
    with pytest.raises(exceptions.AlreadyExistsError):
        store.put("a", b"2", mode="create")
    store.put("a", b"3", mode={"e_tag": tag})
    with pytest.raises(exceptions.PreconditionError):
        store.put("a", b"4", mode={"e_tag": tag})
    assert bytes(store.get("a").bytes()) == b"3"


@pytest.mark.parametrize("wrong", ["access_key_id", "secret_access_key"])
def test_a_wrong_key_is_refused(bucket: Bucket, wrong: str) -> None:
    with pytest.raises((exceptions.PermissionDeniedError, exceptions.UnauthenticatedError), match="403"):
        bucket.store(options={wrong: "other"}).put("a", b"1")
    assert bucket.keys() == []


def test_there_is_no_bucket_that_nobody_made(s3_server: S3Service) -> None:
    with pytest.raises(FileNotFoundError, match="NoSuchBucket"):
        Bucket(s3_server, "nobody-made-it").store().put("a", b"1")


def test_the_parts_of_a_killed_process_are_found_and_aborted(bucket: Bucket, tmp_path: Path) -> None:
    job = textwrap.dedent("""
        import os, signal, sys, obstore
        from obstore.store import S3Store

        writer = obstore.open_writer(S3Store(sys.argv[1]), "half", buffer_size=5 << 20)
        writer.write(bytes(12 << 20))
        writer.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    command = [sys.executable, "-c", job, bucket.name]
    subprocess.run(command, env=os.environ | bucket.environment(), timeout=60, check=False)
    (left,) = bucket.uploads()
    assert left.key == "half"
    bucket.abort(left)
    assert (bucket.uploads(), bucket.keys()) == ([], [])


def test_a_stopped_server_goes_on_with_its_data(own_s3_server: S3Server) -> None:
    bucket = own_s3_server.make_bucket()
    data = os.urandom(3 * MIB)
    bucket.store().put("a", data)
    own_s3_server.stop()
    options = {"retry_config": {"max_retries": 0}}
    with pytest.raises(exceptions.GenericError, match="error sending request"):
        bucket.store(options=options).head("a")
    own_s3_server.start()
    assert bytes(bucket.store().get("a").bytes()) == data


def test_the_shared_server_ends_with_its_users(tmp_path: Path, wait_until: Callable[..., None]) -> None:
    """The last one ends it, be it by a kill."""
    with shared_server(tmp_path / "s3") as one:
        user = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent("""
                import pathlib, sys, time
                from tests.kit.objects.keeper import shared_server

                with shared_server(pathlib.Path(sys.argv[1])) as service:
                    print(service.endpoint, flush=True)
                    time.sleep(600)
             """), str(tmp_path / "s3")],
            stdout=subprocess.PIPE, cwd=REPOSITORY, text=True,
        )  # fmt: skip
        try:
            assert user.stdout is not None
            assert user.stdout.readline().strip() == one.endpoint
            processes = _server_processes(tmp_path, one)
            assert len(processes) == 2
        except BaseException:
            user.kill()
            raise
    assert all(map(is_running, processes))  # the other one still uses it
    user.kill()
    user.communicate()
    wait_until(lambda: not any(map(is_running, processes)))


def _server_processes(tmp_path: Path, service: S3Service) -> list[int]:
    """The keeper of the directory and its server."""
    marks = (str(tmp_path / "s3").encode(), f"-s3.port={service.endpoint.rpartition(':')[2]}".encode())
    return [
        pid
        for pid, words in command_lines().items()
        if any(mark in words for mark in marks) and b"-c" not in words
    ]
