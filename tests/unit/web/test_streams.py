"""The streams of a page: the newest state and never a queue, a heartbeat, an end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from capd.web import stream
from capd.web.stream import MAX_CLIENTS, Hub

Test = Callable[[Hub], Awaitable[None]]
SCOPE: dict[str, Any] = {"type": "http", "asgi": {"spec_version": "2.3"}}


class Client:
    """One client of a hub, which takes a part only when the test lets it."""

    def __init__(self, hub: Hub) -> None:
        self.parts: list[str] = []
        self.may_take = asyncio.Semaphore(0)
        self.task = asyncio.create_task(hub.answer()(SCOPE, self._receive, self._send))

    async def _receive(self) -> Any:
        await asyncio.Event().wait()

    async def _send(self, message: Any) -> None:
        if body := message.get("body"):
            await self.may_take.acquire()
            self.parts.append(body.decode())

    async def take(self, number: int) -> list[str]:
        for _ in range(number):
            self.may_take.release()
        for _ in range(20):
            await asyncio.sleep(0)
        taken, self.parts = self.parts, []
        return taken


def test_a_client_that_paused_gets_the_newest_state_alone() -> None:
    async def run() -> None:
        hub = Hub()
        hub.publish("one")
        client = Client(hub)
        assert await client.take(2) == ["retry: 2000\n\n", "id: 1\ndata: one\n\n"]
        for text in ("two", "three", "four"):
            hub.publish(text)
            await asyncio.sleep(0)
        # It holds the part that was offered first. What came after that is one state.
        assert (await client.take(3))[-1] == "id: 4\ndata: four\n\n"
        hub.end()
        await asyncio.wait_for(client.task, 5)
        assert hub.clients == 0
        assert hub.answer().status_code == 503

    asyncio.run(run())


def test_a_quiet_stream_has_a_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "HEARTBEAT_S", 0.01)

    async def run() -> None:
        hub = Hub()
        client = Client(hub)
        client.may_take = asyncio.Semaphore(100)
        while ": still here\n\n" not in client.parts:
            await asyncio.sleep(0.005)
        client.task.cancel()
        await asyncio.gather(client.task, return_exceptions=True)
        assert hub.clients == 0

    asyncio.run(asyncio.wait_for(run(), 30))


def test_there_is_an_end_of_places() -> None:
    async def run() -> None:
        hub = Hub()
        clients = [Client(hub) for _ in range(MAX_CLIENTS)]
        await asyncio.sleep(0)
        assert hub.clients == MAX_CLIENTS
        assert hub.answer().status_code == 503
        # One that leaves before its stream has begun gives its place back, too.
        clients[0].task.cancel()
        await asyncio.gather(clients[0].task, return_exceptions=True)
        assert hub.answer().status_code == 200
        hub.end()
        for client in clients[1:]:
            client.may_take = asyncio.Semaphore(100)
            client.task.cancel()
        await asyncio.gather(*(client.task for client in clients), return_exceptions=True)

    asyncio.run(run())
