"""A rank's session: arena, books, stager and client thread put together, behind a boundary that never raises.

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
from typing import Any, Optional

import torch

from capd_client.admission import Admission
from capd_client.allocator import SlotAllocator
from capd_client.arena import Arena
from capd_client.config import ClientConfig
from capd_client.context import Context
from capd_client.counter_page import COUNTER_STEPS, DropReason
from capd_client.counting import Counters, Snapshot
from capd_client.definitions import short_name
from capd_client.devices import Devices
from capd_client.errors import Counted
from capd_client.growth import FIRST_NBYTES, Growth
from capd_client.interrupting import Interrupting
from capd_client.key import Key, Moment
from capd_client.link import Link
from capd_client.locality import patience_s
from capd_client.memory import arena_nbytes
from capd_client.notices import Notices
from capd_client.placements import with_placements
from capd_client.policies import make_books
from capd_client.protocol import HANDSHAKE_TIMEOUT_S, PROTOCOL_VERSION, Hello
from capd_client.signal_errors import is_interruption
from capd_client.slicing import Slice
from capd_client.staging import Stager
from capd_client.steering import Steering
from capd_client.tensors import PLAIN_TYPES
from capd_client.transport import State, Transport
from capd_client.untraced import untraced

__all__ = ["Session"]

_STOP_TIMEOUT_S = 5.0
_POLL_S = 0.001
_COUNTED = "_capd_counted"  # an attribute of errors that are raised into the job


class Session:
    """Everything that one rank needs to capture. `config.endpoint` must be set.

    Raises ArenaError when there is no memory for the arena. `offer` and what follows it never raise, except
    under `config.strict`.
    """

    def __init__(self, config: ClientConfig, environ: Optional[Mapping[str, str]] = None) -> None:
        assert config.endpoint is not None  # noqa: S101 - the caller asked `enabled`
        self.config = config
        self.notices = Notices()
        self.context = Context(
            iteration=config.iteration,
            sample_idx=config.sample_idx,
            environ=environ,
            on_rank_change=self._change_rank,
            on_iteration=self._begin_iteration,
        )
        self.client = uuid.UUID(bytes=os.urandom(16))  # not uuid4: some versions of it seed from `random`
        self.enabled = True
        self._endpoint = config.endpoint
        info = self.context.rank_info
        nbytes = arena_nbytes(config.arena_bytes, info.local_world_size, self.notices)
        self.arena = Arena(nbytes, patience_s=patience_s())
        self.counters = Counters()
        self.counters.attach(self.arena.words)
        slots = SlotAllocator(self.arena.start, self.arena.nbytes - self.arena.start)
        self.books = make_books(config, slots, self.counters)
        self.books.journal.attach(self.arena.buffer, self.arena.layout)
        self._closed = threading.Event()
        self.steering = Steering(self.books.take_offers, self.notices)
        self.transport = Transport(
            self._connect,
            self.books,
            self.notices,
            self.steering,
            ping_s=config.ping_s,
            name=f"capd-client-{info.rank}",
        )
        self.devices = Devices(
            self.books,
            self.arena,
            self.notices,
            config,
            self.transport.add_device,
        )
        self.transport.growth = Growth(self.arena, self.books, self.devices, self._endpoint, self._hello)
        payload = config.mode != "stats"
        self._stage = Stager(self.books, self.arena, self.notices, self.devices.stager, payload=payload).stage
        self._interrupting = Interrupting(self.books, self.notices)
        self._admission: Optional[Admission] = None
        if config.sample_every > 1 or self.books.thinning is not None:
            self._admission = Admission(self.books, self._stage, config.sample_every)
            self._stage = self._admission.stage
        try:
            self.arena.grow(FIRST_NBYTES)
            self.transport.start()
        except RuntimeError:  # no further thread is allowed
            self.arena.close()
            raise

    # -- captures ---------------------------------------------------------------------------------------

    @untraced
    def offer(
        self,
        tensor: torch.Tensor,
        key: Key,
        moment: Moment,
        *,
        cast_to: Optional[torch.dtype] = None,
        attributes: Optional[dict[str, Any]] = None,
        metadata: str = "",
        take: Optional[Slice] = None,
        immutable: bool = False,
        store: Optional[str] = None,
    ) -> None:
        """Take one tensor as it is now. Counted exactly once, whatever happens.

        cast_to: record the tensor in this dtype (the snapshot copy casts). attributes: what is constant for the key,
        the same small dict every time; those of a distributed tensor are added. metadata: a JSON object, or empty.
        take: the rows to record, None for all. immutable: nothing writes to the tensor's memory before the capture is
        done, so that on a device no snapshot of it is needed. store: what is kept
        (`capd_client.rule_settings.STORES`), None: what the mode says.
        """
        if not self.enabled:
            return
        if self.books.inside():
            self._interrupting.refuse(tensor, key, moment, cast_to, attributes, take)
            return
        try:
            if type(tensor) not in PLAIN_TYPES:
                attributes = with_placements(tensor, attributes)
            self._stage(tensor, key, moment, cast_to, attributes, metadata, take, immutable, store)
        except Counted as error:
            self._hand_on("a capture", error.__cause__ or error)
        except BaseException as error:
            self._refuse(DropReason.INTERNAL)
            self._hand_on("a capture", error)

    def keeps(self, moment: Moment) -> bool:
        """Whether mode and policy keep the captures of this call; those of others are counted drops."""
        return self._admission is None or self._admission.refusal(moment) is None

    @untraced
    def prepare(self, devices: Iterable[torch.device]) -> None:
        """Set up the CUDA devices among these for captures, so that no training step has to."""
        if self.enabled:
            self.devices.prepare(device for device in devices if device.type == "cuda")

    def drop_internal(self, where: str, error: BaseException) -> None:
        """Count a capture that an error inside capd prevented, and log it.

        Raises it under CAPD_STRICT=1, and always what a signal handler of the job raised while capd ran.
        """
        if self.enabled and not getattr(error, _COUNTED, False):
            self._refuse(DropReason.INTERNAL)
        self._hand_on(where, error)

    def drop_invalid(self, problem: str, reason: DropReason = DropReason.INVALID_KEY) -> None:
        """Count a capture whose arguments cannot be used, and log why."""
        if self.enabled:
            self._refuse(reason)
            self.notices.warn(reason.value, "a capture was not taken: %s", problem)

    def quant_type(self, dtype: torch.dtype) -> str:
        """The label of a capture that was given none: the configured one, else the dtype's short name."""
        return self.config.quant_type or short_name(dtype)

    def snapshot(self) -> Snapshot:
        """The counters now."""
        return self.books.snapshot()

    def _refuse(self, reason: DropReason) -> None:
        """Count a capture that did not come as far as the books, once also where a signal handler raises meanwhile."""
        try:
            self.books.refuse(None, reason)
        except Counted as error:
            raise error.__cause__ or error from None

    def _hand_on(self, where: str, error: BaseException) -> None:
        """Log an error of a capture that is counted, or raise it; taps that it passes must not count it again."""
        if self.config.strict or is_interruption(error):
            setattr(error, _COUNTED, True)
            raise error from None
        if self.enabled:
            name = type(error).__name__
            self.notices.warn(DropReason.INTERNAL.value, "%s failed inside capd: %s: %s", where, name, error)

    def _change_rank(self) -> None:
        """HELLO names the rank, so the daemon hears of another one by a new connection."""
        if hasattr(self, "transport"):  # before the first connection there is nothing to correct
            self.transport.reconnect()

    def _begin_iteration(self, iteration: int) -> None:
        """Once per iteration, on the thread that trains: tell where it is, and follow `capd ctl`."""
        if not self.enabled:  # in a forked child the locks may be held by threads that are not there
            return
        self.devices.begin_step()
        with self.books.lock:
            self.counters.words[COUNTER_STEPS] = iteration + 1
        self.steering.begin(iteration)

    # -- leaving ----------------------------------------------------------------------------------------

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything offered before is committed or dropped; False when the time is up before.

        False at once, too, where no daemon was ever reached: what waits in the arena stays there.
        """
        if not self.enabled:
            return True
        if self._inside():  # a signal handler: nothing can be settled before it returns
            return False
        deadline = time.monotonic() + max(0.0, timeout_s)
        upto, amid = self.books.last_sequence, self.books.amid()
        if amid is not None:  # nor the capture that it interrupted, and what came behind that
            upto = amid.descriptor.sequence - 1
        settled = self.books.settled(upto)
        if not settled and self._ever_connected(deadline):
            settled = self.transport.flush(upto, max(0.0, deadline - time.monotonic()))
        return settled and amid is None

    def close(self, timeout_s: Optional[float] = None) -> bool:
        """Drain, say goodbye, and give back thread, socket and memory. Idempotent.

        timeout_s: longest time to drain, default `config.exit_timeout_s`; without a daemon it does not wait at
        all. Returns whether everything was settled in time; what was not is dropped as `not_connected`. In a signal
        handler that interrupted a capture nothing can be drained: then it goes on in a thread of its own.
        """
        if self._closed.is_set():
            return True
        if self._inside():
            threading.Thread(target=self.close, args=(timeout_s,), name="capd-close").start()
            return False
        self._closed.set()
        if not self.enabled:
            return True
        self.enabled = False
        self.books.give_up(DropReason.NOT_CONNECTED)  # what a signal handler that closes has interrupted
        deadline = time.monotonic() + (
            self.config.exit_timeout_s if timeout_s is None else max(0.0, timeout_s)
        )
        transport = self.transport
        self.devices.hurry()
        if self._ever_connected(deadline):
            transport.flush(self.books.last_sequence, max(0.0, deadline - time.monotonic()))
            transport.leave()
            self._wait_for_bye(deadline)
        lost = self.books.close(DropReason.NOT_CONNECTED)
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

    def _inside(self) -> bool:
        """Whether a signal handler runs here that keeps the client thread out of the books or a ring."""
        return self.books.inside() or self.devices.inside()

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
            gone = transport.refused.is_set() and not self.books.busy
            if gone or time.monotonic() >= deadline:
                return

    def _free(self, thread_ended: bool) -> None:
        """Unmap only what nobody writes any more; the rest goes with the process."""
        with self.books.lock:
            self.counters.detach()
            self.books.journal.close()
        self.arena.words.release()
        self.devices.stop()
        if thread_ended and not self.transport.device_busy and not self.books.copying:
            self.devices.close(self.arena.close)
        else:
            self.arena.close(unmap=False)

    def forked(self) -> None:
        """In a forked child: hold nothing, capture nothing. Takes no lock, its owner may not exist here."""
        self.enabled = False
        self._closed.set()
        self.counters.reset()
        self.books.journal.close()
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
