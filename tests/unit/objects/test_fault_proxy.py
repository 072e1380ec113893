"""Every fault of the proxy reaches obstore as the failure that it stands for."""

from __future__ import annotations

import os
import threading
import tracemalloc
from datetime import timedelta
from typing import Any

import pytest

from tests.kit.objects import faults
from tests.kit.objects.faults import Answer, Faults, Request
from tests.kit.objects.proxy import FaultProxy
from tests.kit.objects.service import Bucket, S3Service

obstore = pytest.importorskip("obstore")
from obstore import exceptions  # noqa: E402

MIB = 1 << 20
ONE_TRY: dict[str, Any] = {"retry_config": {"max_retries": 0}}
FEW_TRIES: dict[str, Any] = {
    "retry_config": {
        "max_retries": 3,
        "backoff": {
            "init_backoff": timedelta(milliseconds=10),
            "max_backoff": timedelta(milliseconds=20),
            "base": 2,
        },
    }
}
PARTS: dict[str, Any] = {"use_multipart": True, "chunk_size": 5 * MIB, "max_concurrency": 2}


@pytest.fixture
def seen(bucket: Bucket, fault_proxy: FaultProxy) -> Bucket:
    """The bucket as the proxy shows it."""
    return bucket.through(fault_proxy)


class Clock(threading.Event):
    """Tells how long the proxy would have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.waited_s = 0.0

    def wait(self, timeout: float | None = None) -> bool:
        """Wait no moment."""
        self.waited_s += timeout or 0.0
        return False


def puts(request: Request) -> bool:
    """Whether it is a put of an object or a part."""
    return request.writes_object


def gets(request: Request) -> bool:
    """Whether it reads an object."""
    return request.method == "GET" and "list-type" not in request.query


def test_requests_pass_and_are_told(seen: Bucket, fault_proxy: FaultProxy) -> None:
    store = seen.store()
    data = os.urandom(12 * MIB)
    store.put("a b/é", data, use_multipart=False)
    assert bytes(store.get_range("a b/é", start=5, length=4)) == data[5:9]
    assert seen.keys() == ["a b/é"]
    with pytest.raises(FileNotFoundError):
        store.head("none")
    store.put("parts", data, **PARTS)
    assert bytes(store.get("parts").bytes()) == data
    store.delete("parts")
    put, part_of, listed, head, begin, *_, got, deleted = fault_proxy.clear()
    assert (put.method, put.path, put.status, put.received) == (
        "PUT",
        f"/{seen.name}/a%20b/%C3%A9",
        200,
        len(data),
    )
    assert (part_of.method, part_of.range, part_of.status, part_of.sent) == ("GET", "bytes=5-8", 206, 4)
    assert (listed.query.split("&")[0], listed.status) == ("list-type=2", 200)
    assert (head.method, head.status, head.sent) == ("HEAD", 404, 0)
    assert (begin.method, begin.query, begin.status) == ("POST", "uploads=", 200)
    assert (got.status, got.sent) == (200, len(data))
    assert deleted.status in (200, 204)
    assert not any(one.fault for one in (put, part_of, listed, head, begin, got, deleted))


def test_a_large_body_takes_little_memory(seen: Bucket, fault_proxy: FaultProxy) -> None:
    """The proxy runs in this process, and obstore allocates nothing by Python."""
    data = bytes(64 * MIB)
    store = seen.store()
    tracemalloc.start()
    try:
        store.put("large", data, use_multipart=False)
        assert sum(map(len, store.get("large").stream(min_chunk_size=MIB))) == len(data)
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    finally:
        tracemalloc.stop()
    assert [one.received + one.sent for one in fault_proxy.requests] == [len(data)] * 2


def test_every_second_request_is_told_to_slow_down(seen: Bucket, fault_proxy: FaultProxy) -> None:
    fault_proxy.faults = Faults(every=2)
    store = seen.store(options=FEW_TRIES)
    for number in range(4):
        store.put(f"{number}", b"1")
    assert [one.status for one in fault_proxy.requests] == [200, 503, 200, 503, 200, 503, 200]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (faults.SLOW_DOWN, exceptions.GenericError),
        (faults.INTERNAL_ERROR, exceptions.GenericError),
        (faults.CLOCK_SKEW, exceptions.PermissionDeniedError),
        (faults.INVALID_KEY, exceptions.PermissionDeniedError),
        (faults.ACCESS_DENIED, exceptions.PermissionDeniedError),
    ],
    ids=lambda one: one.code if isinstance(one, Answer) else "",
)  # fmt: skip
def test_an_error_comes_with_its_code(
    seen: Bucket, fault_proxy: FaultProxy, answer: Answer, error: type[Exception]
) -> None:
    fault_proxy.faults = Faults(every=1, answer=answer)
    with pytest.raises(error, match=answer.code):
        seen.store(options=FEW_TRIES).put("a", b"1")
    assert {one.status for one in fault_proxy.requests} == {answer.status}


def test_a_few_failures_and_then_none(seen: Bucket, fault_proxy: FaultProxy) -> None:
    fault_proxy.faults = Faults(concerns=puts, every=1, answer=faults.INTERNAL_ERROR, times=2)
    seen.store(options=FEW_TRIES).put("a", b"1")
    assert [one.status for one in fault_proxy.requests] == [500, 500, 200]


def test_a_server_without_conditions_overwrites(seen: Bucket, fault_proxy: FaultProxy) -> None:
    fault_proxy.faults = Faults(conditional="strip")
    store = seen.store()
    store.put("a", b"1", mode="create")
    store.put("a", b"2", mode="create")
    store.put("a", b"3", mode={"e_tag": '"0"'})
    assert bytes(store.get("a").bytes()) == b"3"


def test_a_server_may_refuse_conditions(seen: Bucket, fault_proxy: FaultProxy) -> None:
    fault_proxy.faults = Faults(conditional="refuse")
    with pytest.raises((exceptions.GenericError, NotImplementedError), match="NotImplemented"):
        seen.store(options=FEW_TRIES).put("a", b"1", mode="create")
    seen.store().put("a", b"2")


@pytest.mark.parametrize("answer", [faults.STORAGE_FULL, faults.QUOTA_EXCEEDED], ids=lambda one: one.code)
def test_a_bucket_fills(seen: Bucket, fault_proxy: FaultProxy, answer: Answer) -> None:
    fault_proxy.faults = Faults(capacity_nbytes=2500, full=answer)
    store = seen.store(options=ONE_TRY)
    store.put("0", bytes(1000))
    store.put("1", bytes(1000))
    with pytest.raises((exceptions.GenericError, exceptions.PermissionDeniedError), match=answer.code):
        store.put("2", bytes(1000))
    store.put("3", bytes(500))
    assert seen.keys() == ["0", "1", "3"]


def test_a_cut_put_leaves_no_object(seen: Bucket, fault_proxy: FaultProxy) -> None:
    fault_proxy.faults = Faults(concerns=puts, cut_request_at=MIB)
    with pytest.raises(exceptions.GenericError, match="error sending request"):
        seen.store(options=ONE_TRY).put("a", bytes(3 * MIB), use_multipart=False)
    assert seen.keys() == []
    fault_proxy.faults = Faults(concerns=puts, cut_request_at=MIB, times=1)
    seen.store(options=FEW_TRIES).put("a", bytes(3 * MIB), use_multipart=False)
    assert seen.keys() == ["a"]


def test_a_lost_answer_of_a_create_comes_as_a_conflict(seen: Bucket, fault_proxy: FaultProxy) -> None:
    fault_proxy.faults = Faults(concerns=puts, lose_answer=True, times=1)
    with pytest.raises(exceptions.AlreadyExistsError):
        seen.store(options=FEW_TRIES).put("a", b"mine", mode="create")
    assert bytes(seen.store().get("a").bytes()) == b"mine"


def test_a_get_is_cut_truncated_or_corrupt(seen: Bucket, fault_proxy: FaultProxy) -> None:
    data = os.urandom(MIB)
    seen.store().put("a", data)
    fault_proxy.faults = Faults(concerns=gets, corrupt_at=7)
    got = bytes(seen.store().get("a").bytes())
    assert (got[:7], got[7], got[8:]) == (data[:7], data[7] ^ 0xFF, data[8:])
    fault_proxy.faults = Faults(concerns=gets, truncate_to=1000)
    assert bytes(seen.store().get("a").bytes()) == data[:1000]
    fault_proxy.faults = Faults(concerns=gets, cut_answer_at=1000)
    with pytest.raises(exceptions.GenericError):
        seen.store(options=ONE_TRY).get("a").bytes()
    fault_proxy.faults = Faults(concerns=gets, cut_answer_at=1000, times=1)
    assert bytes(seen.store(options=FEW_TRIES).get("a").bytes()) == data


def test_a_hook_sees_a_request_before_the_server_does(seen: Bucket, fault_proxy: FaultProxy) -> None:
    before: list[list[str]] = []
    direct = Bucket(S3Service(f"http://{fault_proxy.upstream}"), seen.name)
    fault_proxy.on_request = lambda _: before.append(direct.keys())
    seen.store().put("a", b"1")
    seen.store().put("b", b"1")
    assert before == [[], ["a"]]


def test_a_stopped_proxy_refuses_until_it_starts(seen: Bucket, fault_proxy: FaultProxy) -> None:
    store = seen.store(options=ONE_TRY)
    store.put("a", b"1")
    fault_proxy.stop()
    with pytest.raises(exceptions.GenericError, match="error sending request"):
        store.put("a", b"2")
    fault_proxy.start()
    assert bytes(store.get("a").bytes()) == b"1"


def test_a_stop_cuts_what_is_under_way(seen: Bucket, fault_proxy: FaultProxy) -> None:
    fault_proxy.faults = Faults(concerns=puts, delay_s=60)
    failed: list[BaseException] = []
    under_way = threading.Event()
    fault_proxy.on_request = lambda _: under_way.set()

    def put() -> None:
        try:
            seen.store(options=ONE_TRY).put("a", b"1")
        except exceptions.GenericError as error:
            failed.append(error)

    thread = threading.Thread(target=put)
    thread.start()
    assert under_way.wait(20)
    fault_proxy.stop()
    thread.join(20)
    assert len(failed) == 1


def test_waiting_and_bandwidth_take_their_time(seen: Bucket, fault_proxy: FaultProxy) -> None:
    clock = fault_proxy.stopping = Clock()
    fault_proxy.faults = Faults(concerns=puts, delay_s=300)
    seen.store().put("a", bytes(MIB), use_multipart=False)
    assert clock.waited_s == 300
    fault_proxy.faults = Faults(bytes_per_s=MIB / 100)
    assert seen.store().get("a").bytes() == bytes(MIB)
    assert clock.waited_s == pytest.approx(400)
