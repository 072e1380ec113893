"""The session of a rank: connects arena, queue, stager and client thread, with a border that never raises.

A process has one session, made at the first `watch` or `capture` (`capd_client.api`). After a fork, the child's copy
is inactive: it holds neither socket nor arena, and costs one check. `close` drains within its time and frees
everything.
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
from capd_client.device.devices import Devices
from capd_client.inflight.counters import Counters
from capd_client.inflight.policies import policy_of
from capd_client.inflight.queue import Queue
from capd_client.process.dynamo import untraced
from capd_client.process.log import RateLimitedLog
from capd_client.process.memory import arena_nbytes
from capd_client.process.wakeup import Wakeup
from capd_client.protocol.counter_page import COUNTER_STEPS, DropReason
from capd_client.protocol.messages import HANDSHAKE_TIMEOUT_S, PROTOCOL_VERSION, Hello
from capd_client.staging.border import Border
from capd_client.staging.sampling import Sampling
from capd_client.staging.stager import Stager
from capd_client.steps.context import Context
from capd_client.steps.keeps import Keeps
from capd_client.steps.steering import Steering
from capd_client.transport.client_thread import State, Transport
from capd_client.transport.growth import FIRST_NBYTES, Growth
from capd_client.transport.link import Link
from capd_client.transport.rests import EASY_TICK_S

__all__ = ["Session"]

_STOP_TIMEOUT_S = 5.0
_POLL_S = 0.001


class Session(Border):
    """The session of one rank. `offer` and all code that it calls never raise, except under `config.strict`.

    Args:
        config: The settings. `config.endpoint` must be set.
        environ: The variables with the rank; None: os.environ.

    Raises:
        ArenaError: There is no memory for the arena.
        RuntimeError: The system allows no further thread.
    """

    def __init__(self, config: ClientConfig, environ: Optional[Mapping[str, str]] = None) -> None:
        assert config.endpoint is not None  # noqa: S101 - the caller asked `enabled`
        renew = threading.Event()
        context = Context(
            iteration=config.iteration,
            sample_idx=config.sample_idx,
            environ=environ,
            # HELLO names the rank, so a new rank needs a new connection.
            on_rank_change=renew.set,
            on_iteration=self._begin_iteration,
        )
        notices, info = RateLimitedLog(), context.rank_info
        # Not uuid4, because some versions of it use `random`.
        self.client = uuid.UUID(bytes=os.urandom(16))
        self._endpoint = config.endpoint
        nbytes = arena_nbytes(config.arena_bytes, info.local_world_size, notices)
        self.arena = Arena(nbytes)
        self.counters = Counters()
        self.counters.attach(self.arena.words)
        wakeup, policy = Wakeup(EASY_TICK_S), policy_of(config)
        leaves_out = config.sample_every > 1 or policy.thinning is not None
        slots = SlotAllocator(self.arena.start, self.arena.nbytes - self.arena.start)
        self.queue = Queue(slots, self.counters, policy, step_nbytes=config.max_step_nbytes, wake=wakeup.wake)
        self.queue.journal.attach(self.arena.buffer, self.arena.layout)
        self._closed = threading.Event()
        self.steering = Steering(self.queue.take_offers, notices)
        self.devices = Devices(self.queue, self.arena, notices, config)
        self.transport = Transport(
            self._connect,
            self.queue,
            notices,
            self.steering,
            Keeps(notices),
            wakeup,
            renew,
            stagers=self.devices.stagers,
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
        except RuntimeError:
            self.arena.close()
            raise

    # -- captures ---------------------------------------------------------------------------------------

    @untraced
    def prepare(self, devices: Iterable[torch.device]) -> None:
        """Set up the CUDA devices among `devices` for captures. Training steps then do not wait for this."""
        if self.enabled:
            self.devices.prepare(device for device in devices if device.type == "cuda")

    def _begin_iteration(self, iteration: int) -> None:
        """Report an iteration that begins, and follow `capd ctl`. Runs once per iteration on the training thread."""
        # In a forked child, threads that do not exist there may hold the locks.
        if not self.enabled:
            return
        self.devices.begin_step()
        with self.queue.lock:
            self.counters.words[COUNTER_STEPS] = iteration + 1
        self.steering.begin(iteration)

    def keep(self, reason: str) -> None:
        """Ask the daemon's flight recorder to keep the last iterations, and some that follow. Never waits."""
        if self.enabled:
            self.transport.keep(reason, self.context.reached)

    # -- leaving ----------------------------------------------------------------------------------------

    def flush(self, timeout_s: float) -> bool:
        """Wait until all offers until now are committed or dropped.

        Returns:
            False if the time is up before. Also False, without a wait, if no daemon was ever reached. The captures then
            stay in the arena.
        """
        if not self.enabled:
            return True
        # The capture that a signal handler interrupted cannot be settled before the handler returns.
        if self._interrupted_here():
            return False
        deadline = time.monotonic() + max(0.0, timeout_s)
        upto = self.queue.last_sequence
        settled = self.queue.settled(upto)
        if not settled and self._ever_connected(deadline):
            settled = self.transport.flush(upto, max(0.0, deadline - time.monotonic()))
        return settled

    def close(self, timeout_s: Optional[float] = None) -> bool:
        """Drain, take leave of the daemon, and free thread, socket and memory. Idempotent.

        A signal handler that interrupted a capture cannot drain. In such a handler, a separate thread closes the
        session, and the result is False.

        Args:
            timeout_s: The longest time to drain, default `config.exit_timeout_s`. Without a daemon there is no wait.

        Returns:
            Whether everything was settled in time. Unsettled captures are dropped as `not_connected`.
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
        if lost:
            known = transport.welcome is not None
            fate = "; a running daemon takes them from the arena" if known else " and are lost"
            self.notices.warn("closed", "%d captures were still unacknowledged at exit%s", lost, fate)
        stopped = transport.stop(_STOP_TIMEOUT_S)
        self._free(stopped)
        return lost == 0

    def _interrupted_here(self) -> bool:
        """Return whether a signal handler runs here that has interrupted a capture of this very thread."""
        return self.queue.interrupted_here() or self.devices.inside()

    def _ever_connected(self, deadline: float) -> bool:
        """Return whether a daemon accepted this rank. Waits for a handshake under way, but not for an absent daemon."""
        transport = self.transport
        deadline = min(deadline, time.monotonic() + HANDSHAKE_TIMEOUT_S)
        while transport.welcome is None and transport.state is not State.ENDED:
            if transport.refused.is_set() or time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return transport.welcome is not None

    def _wait_for_bye(self, deadline: float) -> None:
        """Wait for the answer to BYE, unless the daemon is gone and nothing is in flight."""
        transport = self.transport
        while not transport.bye_ok.wait(0.01) and transport.state is not State.ENDED:
            gone = transport.refused.is_set() and not self.queue.busy
            if gone or time.monotonic() >= deadline:
                return

    def _free(self, thread_ended: bool) -> None:
        """Free the arena. Memory that somebody may still write stays mapped until the process ends."""
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
        """Turn the session off in a forked child. Takes no lock, because its owner may not exist here."""
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
            # A run that the daemon named stays this rank's run, also with the next daemon, which may have no name.
            run_id=self.config.run_id or (welcome.run_id if welcome is not None else None),
            rank=info.rank,
            world_size=info.world_size,
            local_rank=info.local_rank,
            host=socket.gethostname()[:256],
            pid=os.getpid(),
            arena_nbytes=self.arena.nbytes,
            attempt=info.attempt,
        )
