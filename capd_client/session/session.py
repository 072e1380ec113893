"""A rank's session: arena, queue, stager and client thread put together, behind a border that never raises.

One per process, made at the first `watch` or `capture` (capd_client.api). After a fork the child's copy is inert: it
holds neither socket nor arena, and costs one check. `close` drains within its time and gives everything back.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Iterable, Mapping
from typing import Optional

import torch

from capd_client.arena.allocator import SlotAllocator
from capd_client.arena.arena import Arena
from capd_client.config.settings import ClientConfig
from capd_client.device.cuda.locality import patience_s
from capd_client.device.devices import Devices
from capd_client.device.snapshots import DeviceStager
from capd_client.inflight.counters import Counters
from capd_client.inflight.policies import policy_of
from capd_client.inflight.queue import Queue
from capd_client.process.dynamo import untraced
from capd_client.process.log import Notices
from capd_client.process.memory import arena_nbytes
from capd_client.process.wakeup import Wakeup
from capd_client.protocol.counter_page import COUNTER_STEPS, DropReason
from capd_client.protocol.messages import HANDSHAKE_TIMEOUT_S, PROTOCOL_VERSION, Hello
from capd_client.staging.border import Border
from capd_client.staging.sampling import Sampling
from capd_client.staging.stager import Stager
from capd_client.steps.context import Context
from capd_client.steps.steering import Steering
from capd_client.transport.client_thread import State, Transport
from capd_client.transport.growth import FIRST_NBYTES, Growth
from capd_client.transport.link import Link
from capd_client.transport.rests import EASY_TICK_S

__all__ = ["Session"]

_STOP_TIMEOUT_S = 5.0
_POLL_S = 0.001


class Session(Border):
    """Everything that one rank needs to capture. `config.endpoint` must be set.

    Raises ArenaError when there is no memory for the arena. `offer` and what follows it never raise, except
    under `config.strict`.
    """

    def __init__(self, config: ClientConfig, environ: Optional[Mapping[str, str]] = None) -> None:
        assert config.endpoint is not None  # noqa: S101 - the caller asked `enabled`
        context = Context(
            iteration=config.iteration,
            sample_idx=config.sample_idx,
            environ=environ,
            on_rank_change=self._change_rank,
            on_iteration=self._begin_iteration,
        )
        notices, info = Notices(), context.rank_info
        self.client = uuid.UUID(bytes=os.urandom(16))  # not uuid4: some versions of it seed from `random`
        self._endpoint = config.endpoint
        nbytes = arena_nbytes(config.arena_bytes, info.local_world_size, notices)
        self.arena = Arena(nbytes, patience_s=patience_s())
        self.counters = Counters()
        self.counters.attach(self.arena.words)
        wakeup, policy = Wakeup(EASY_TICK_S), policy_of(config)
        leaves_out = config.sample_every > 1 or policy.thinning is not None
        slots = SlotAllocator(self.arena.start, self.arena.nbytes - self.arena.start)
        self.queue = Queue(slots, self.counters, policy, step_nbytes=config.max_step_nbytes, wake=wakeup.wake)
        self.queue.journal.attach(self.arena.buffer, self.arena.layout)
        self._closed = threading.Event()
        self.steering = Steering(self.queue.take_offers, notices)
        self.stagers: list[DeviceStager] = []
        self.devices = Devices(self.queue, self.arena, notices, config, self.stagers.append)
        self.transport = Transport(
            self._connect,
            self.queue,
            notices,
            self.steering,
            wakeup,
            stagers=self.stagers,
            growth=Growth(self.arena, self.queue, self.devices, self._endpoint, self._hello),
            ping_s=config.ping_s,
            name=f"capd-client-{info.rank}",
        )
        super().__init__(
            config,
            context,
            notices,
            self.queue,
            Stager(self.queue, self.arena, notices, self.devices.stager, payload=config.mode != "stats"),
            policy,
            Sampling(self.queue, config.sample_every, policy.thinning) if leaves_out else None,
        )
        try:
            self.arena.grow(FIRST_NBYTES)
            self.transport.start()
        except RuntimeError:  # no further thread is allowed
            self.arena.close()
            raise

    # -- captures ---------------------------------------------------------------------------------------

    @untraced
    def prepare(self, devices: Iterable[torch.device]) -> None:
        """Set up the CUDA devices among these for captures, so that no training step has to."""
        if self.enabled:
            self.devices.prepare(device for device in devices if device.type == "cuda")

    def _change_rank(self) -> None:
        """HELLO names the rank, so the daemon hears of another one by a new connection."""
        if hasattr(self, "transport"):  # before the first connection there is nothing to correct
            self.transport.reconnect()

    def _begin_iteration(self, iteration: int) -> None:
        """Once per iteration, on the thread that trains: tell where it is, and follow `capd ctl`."""
        if not self.enabled:  # in a forked child the locks may be held by threads that are not there
            return
        self.devices.begin_step()
        with self.queue.lock:
            self.counters.words[COUNTER_STEPS] = iteration + 1
        self.steering.begin(iteration)

    # -- leaving ----------------------------------------------------------------------------------------

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything offered before is committed or dropped; False when the time is up before.

        False at once, too, where no daemon was ever reached: what waits in the arena stays there.
        """
        if not self.enabled:
            return True
        if (
            self._interrupted_here()
        ):  # the capture that the handler interrupted cannot be settled before it returns
            return False
        deadline = time.monotonic() + max(0.0, timeout_s)
        upto = self.queue.last_sequence
        settled = self.queue.settled(upto)
        if not settled and self._ever_connected(deadline):
            settled = self.transport.flush(upto, max(0.0, deadline - time.monotonic()))
        return settled

    def close(self, timeout_s: Optional[float] = None) -> bool:
        """Drain, say goodbye, and give back thread, socket and memory. Idempotent.

        timeout_s: longest time to drain, default `config.exit_timeout_s`; without a daemon it does not wait at
        all. Returns whether everything was settled in time; what was not is dropped as `not_connected`. In a signal
        handler that interrupted a capture nothing can be drained: then a thread of its own closes, and it is False.
        """
        if self._closed.is_set():
            return True
        if self._interrupted_here():
            threading.Thread(target=self.close, args=(timeout_s,), name="capd-close").start()
            return False
        self._closed.set()
        if not self.enabled:
            return True
        self.enabled = False
        deadline = time.monotonic() + (
            self.config.exit_timeout_s if timeout_s is None else max(0.0, timeout_s)
        )
        transport = self.transport
        self.devices.hurry()
        if self._ever_connected(deadline):
            transport.flush(self.queue.last_sequence, max(0.0, deadline - time.monotonic()))
            transport.leave()
            self._wait_for_bye(deadline)
        lost = self.queue.close(DropReason.NOT_CONNECTED)
        if lost and transport.welcome is None:
            self.notices.warn("closed", "%d captures were still unacknowledged at exit and are lost", lost)
        elif lost:
            self.notices.warn(
                "closed",
                "%d captures were still unacknowledged at exit; a daemon that is there takes them from the arena",
                lost,
            )
        stopped = transport.stop(_STOP_TIMEOUT_S)
        self._free(stopped)
        return lost == 0

    def _interrupted_here(self) -> bool:
        """Whether a signal handler runs here that has interrupted a capture of this very thread."""
        return self.queue.interrupted_here() or self.devices.inside()

    def _ever_connected(self, deadline: float) -> bool:
        """Whether a daemon took this rank; a handshake under way is waited for, an absent daemon is not."""
        transport = self.transport
        deadline = min(deadline, time.monotonic() + HANDSHAKE_TIMEOUT_S)
        while transport.welcome is None and transport.state is not State.ENDED:
            if transport.refused.is_set() or time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return transport.welcome is not None

    def _wait_for_bye(self, deadline: float) -> None:
        """Until BYE is answered; a daemon that is gone while nothing is in flight is not waited for."""
        transport = self.transport
        while not transport.bye_ok.wait(0.01) and transport.state is not State.ENDED:
            gone = transport.refused.is_set() and not self.queue.busy
            if gone or time.monotonic() >= deadline:
                return

    def _free(self, thread_ended: bool) -> None:
        """Unmap only what nobody writes any more; the rest goes with the process."""
        with self.queue.lock:
            self.counters.detach()
            self.queue.journal.close()
        self.arena.words.release()
        self.devices.stop()
        if thread_ended and not self.transport.device_busy and not self.queue.copying:
            self.devices.close(self.arena.close)
        else:
            self.arena.close(unmap=False)

    def forked(self) -> None:
        """In a forked child: hold nothing, capture nothing. Takes no lock, its owner may not exist here."""
        self.enabled = False
        self._closed.set()
        self.counters.reset()
        self.queue.journal.close()
        self.transport.close_in_child()
        self.arena.close_in_child()

    # -- parts ------------------------------------------------------------------------------------------

    def _connect(self, connection: int, connect_s: float) -> Link:
        link = Link(self._endpoint, connect_s=connect_s)
        link.greet(self.arena.fd, self._hello(connection))
        return link

    def _hello(self, connection: int) -> Hello:
        info, welcome = self.context.rank_info, self.transport.welcome
        return Hello(
            protocol=PROTOCOL_VERSION,
            client=self.client.bytes,
            connection=connection,
            # A run that the daemon named stays this rank's run, also with the next daemon, which may know no name.
            run_id=self.config.run_id or (welcome.run_id if welcome is not None else None),
            rank=info.rank,
            world_size=info.world_size,
            local_rank=info.local_rank,
            host=socket.gethostname()[:256],
            pid=os.getpid(),
            arena_nbytes=self.arena.nbytes,
            attempt=info.attempt,
        )
