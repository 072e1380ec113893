"""The rest of the client thread, and those that end it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from capd_client.process.wakeup import Wakeup
from tests.kit.client.peer import wait_until

LONG_S = 30.0


def resting(doze: Wakeup, called: Callable[[], bool] = lambda: False) -> threading.Thread:
    thread = threading.Thread(target=doze.rest, args=(LONG_S, called))
    thread.start()
    return thread


def test_a_long_rest_is_ended_and_the_next_one_is_whole() -> None:
    doze = Wakeup(0.005)
    for _ in range(3):
        thread = resting(doze)
        wait_until(lambda: doze.dozing)
        doze.wake()
        thread.join(LONG_S / 2)
        assert not thread.is_alive()
    began = time.monotonic()
    doze.rest(0.2, lambda: False)
    assert time.monotonic() - began >= 0.19


def test_short_rests_are_not_ended() -> None:
    doze = Wakeup(0.5)
    threading.Timer(0.1, doze.wake).start()
    began = time.monotonic()
    doze.rest(0.3, lambda: False)
    assert time.monotonic() - began >= 0.29


def test_who_called_before_the_rest_began_is_not_missed() -> None:
    doze = Wakeup(0.005)
    thread = resting(doze, called=lambda: True)
    thread.join(LONG_S / 2)
    assert not thread.is_alive()


def test_threads_that_wake_it_at_the_same_time_do_no_harm() -> None:
    doze = Wakeup(0.005)
    stop = threading.Event()
    errors: list[BaseException] = []

    def wake() -> None:
        try:
            while not stop.is_set():
                doze.wake()
                doze.dozing = True  # as a thread sees it that looked before another one woke it
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=wake) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        doze.rest(LONG_S, lambda: False)
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors


def test_what_woke_it_while_it_did_not_rest_yet_ends_no_further_rest() -> None:
    doze = Wakeup(0.005)

    def called() -> bool:
        doze.wake()
        return True

    doze.rest(LONG_S, called)
    began = time.monotonic()
    doze.rest(0.2, lambda: False)
    assert time.monotonic() - began >= 0.19
