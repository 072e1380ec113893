"""The daemon: owns the store root, listens, runs the clock, and stops in order.

Start: limits → root lock → socket (its own, or one of a service manager) → pipeline → "listening on unix:…" → recover
the runs that an earlier daemon left unsealed.

Stop (SIGTERM, SIGHUP, Ctrl-C, or a tool's CONTROL): stop accepting → let ranks finish sending → persist counters →
drain and seal → report the rest → release the root. Runs in recovery are sealed, too.

A second Ctrl-C ends the daemon at once. Acknowledged records are kept either way, and the next start recovers the
rest.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from capd._version import __version__
from capd.config import DaemonSettings
from capd.lifecycle.policy import Policy
from capd.metrics import NO_RANK, DaemonStats
from capd.server.connections.listener import Listener
from capd.server.connections.rank import ConnectionContext
from capd.server.connections.tool import ToolContext
from capd.server.heap import settle_heap
from capd.server.lab.lab import Lab
from capd.server.limits import (
    DiskBudget,
    encode_threads,
    raise_open_files,
    staging_within,
)
from capd.server.metrics.access import adopt
from capd.server.metrics.service import Metrics
from capd.server.metrics.snapshot import Collector
from capd.server.net import endpoint
from capd.server.net.sender import SendLoop
from capd.server.net.users import AllowedUsers
from capd.server.pipeline.gather_thread import MAX_SCRATCH_FILES
from capd.server.pipeline.pipeline import Pipeline
from capd.server.priority import PromptThread, yield_to_training
from capd.server.process import OtherProcess
from capd.server.recorder.recorder import Recorder
from capd.server.retention import Retention
from capd.server.runs.control import Controller
from capd.server.runs.names import RunNames
from capd.server.runs.recovery import RunRecovery
from capd.server.runs.registry import Registry
from capd.server.runs.root_lock import RootLock
from capd.server.runs.unsealed import EXIT_UNSEALED, describe_unsealed, find_unsealed
from capd.server.service.kill_time import shutdown_time
from capd.server.service.notifications import Notifications
from capd.server.service.sockets import METRICS, RANKS, inherited_sockets, ranks_socket
from capd.server.stopping import StopReport, StopRequests
from capd.server.uploads.uploads import Uploads
from capd.store.keeps.held_files import left_spans
from capd.store.run.options import StoreOptions, open_files_within
from capd.store.run.usage import Quota
from capd.window.keeper import Keeper, NoRecorder
from capd.window.place import check_place
from capd.window.settings import settings_for_left
from capd_client.config.sizes import amount_nbytes, default_max_disk

if TYPE_CHECKING:
    from capd.rules.schema import TriggerSettings
    from capd.server.rules.watch import RuleWatch

__all__ = ["Daemon", "node_name"]

logger = logging.getLogger(__name__)

_TICK_S = 0.25
_LINGER_S = 2.0
# Without a rank for so long, the log says why that may be.
_ALONE_S = 30.0
_RESERVED_FILES = 64
# The end of the removal of one run. It is completed later if it takes longer.
_RETENTION_S = 5.0
# The records that rules have not judged yet, and the commands of their alerts.
_RULES_S = 3.0
# Measuring of what waits when the daemon stops.
_LAB_S = 10.0
# Its socket, the process handle, two descriptors of the arena, and one more during its check.
_FILES_PER_CONNECTION = 5
_MAX_CONNECTIONS = 1024


def node_name(configured: str | None) -> str:
    """Return the node's name in the store: as configured, else the host name with unusual characters replaced."""
    name = configured or socket.gethostname()
    safe = "".join(char if char.isascii() and (char.isalnum() or char in "._-") else "-" for char in name)
    return safe.strip("._-")[:128] or "node"


class Daemon:
    """One `capd serve`; `run` blocks until a stop is requested."""

    def __init__(
        self,
        settings: DaemonSettings,
        parent: int | None = None,
        retention: Policy | None = None,
        *,
        triggers: Sequence[TriggerSettings] = (),
        once: bool = False,
    ) -> None:
        """Remember the settings. Nothing is touched before `run`.

        Args:
            settings: The settings of `capd serve`.
            parent: The pid of a process that started this daemon for itself. The daemon stops when that process is
                gone and no rank has been here for _LINGER_S. It then removes the directory of its socket.
            retention: The runs that stay. None or empty: no run is ever removed.
            triggers: The rules that judge what is captured.
            once: The daemon also stops when there were ranks and the last one has been gone for `idle_seal_s`.
        """
        self._settings = settings
        self._policy = retention or Policy()
        self._retention: Retention | None = None
        self._uploads: Uploads | None = None
        self._triggers = triggers
        self._rules: RuleWatch | None = None
        self._lab: Lab | None = None
        self._recorder: Recorder | None = None
        self._keeper: Keeper = NoRecorder()
        self._once = once
        self._parent = None if parent is None else OtherProcess(parent)
        # Since when there has been neither a parent nor a rank.
        self._quiet_since: float | None = None
        # Since when no rank has been here, after the first.
        self._left_since: float | None = None
        # Whether no rank has been here, and the log has not said so.
        self._is_alone = True
        self._root = Path(settings.store).absolute()
        self._node = node_name(settings.node)
        self._threads = settings.threads or encode_threads()
        self._staging_nbytes = staging_within(settings.staging_bytes)
        self._bound: endpoint.BoundSocket | None = None
        self._metrics: Metrics | None = None
        self._stop = StopRequests(self._leave_at_once)
        self._report = StopReport()
        self._drained_by = 0.0

    def run(self) -> int:
        """Serve until SIGTERM, SIGHUP, Ctrl-C or a tool's shutdown. Call it from the main thread.

        Returns:
            The exit code. 0: everything is sealed. EXIT_UNSEALED: some records are not visible to plain Zarr readers.
                1: only captures that nobody had acknowledged are left.

        Raises:
            StoreBusy: Another daemon owns the store or the socket.
            StoreError: The store cannot be used.
            EndpointError: The socket cannot be used.
            ConfigError: The run id or an allowed uid is not valid.
        """
        # The service manager of a job hears nothing of a daemon that the job started for itself.
        manager = Notifications(os.environ if self._parent is None else {})
        with self._stop, manager as self._manager:
            with contextlib.ExitStack() as stack:
                self._start(stack)
                manager.ready()
                while not self._stop.wait(_TICK_S):
                    self._tick()
                manager.stopping(self._pipeline.writer, self._shutdown_s + self._settings.upload_drain_s)
                code = self._shut_down()
            # The tools hear it when the store is free for the next daemon.
            self._report.tell(ok=code == 0, text=self._ended)
            return code

    def stats(self, run_id: str | None = None) -> DaemonStats:
        """Return the answer to STATS: the counters of one run, or of all."""
        oldest = self._pipeline.oldest_since
        return DaemonStats(
            version=__version__,
            pid=os.getpid(),
            node=self._node,
            store=str(self._root),
            endpoint=self._endpoint,
            uptime_s=time.monotonic() - self._started,
            threads=self._threads,
            disk_free=self._budget.free_nbytes(),
            keep_free=self._budget.keep_free_nbytes(),
            max_disk=self._budget.max_disk,
            connections=self._listener.connections,
            oldest_s=0.0 if oldest is None else max(0.0, time.monotonic() - oldest),
            arriving=self._listener.arriving,
            refused_connections=dict(self._listener.refused),
            runs=self._registry.stats(run_id),
            upload=None if self._uploads is None else self._uploads.stats(),
            alerts=None if self._rules is None else self._rules.stats(),
            lab=None if self._lab is None else self._lab.stats(),
        )

    @property
    def is_held_up(self) -> bool:
        """Whether an upload waits for a server after `run` has ended. The process must not wait for it, too."""
        return self._uploads is not None and self._uploads.is_alive()

    # Start

    def _start(self, stack: contextlib.ExitStack) -> None:
        settings = self._settings
        self._started = time.monotonic()
        passed = inherited_sockets()
        for one in passed.values():
            stack.callback(one.close)
        allowed = AllowedUsers(os.getuid(), settings.allow_uid)
        accepting = PromptThread("capd-accept")
        stack.callback(accepting.dismiss)
        # Before any other thread starts, because threads inherit the priority.
        yield_to_training()
        settle_heap()
        open_files = raise_open_files()
        self._closing = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        stack.callback(os.close, self._closing)
        if (window := settings.window) is not None:
            # Before the store is touched: a recorder without room stops the start.
            check_place(window, self._root, settings.keep_free)
        if settings.upload_to is not None:
            # Before the store is touched: an address that cannot be used stops the start.
            self._uploads = Uploads(self._root, self._node, settings)
        if self._triggers:
            self._rules = self._rule_watch()
        lock = RootLock(self._root, self._node)
        stack.callback(lock.release)
        names = RunNames(self._root, settings.run_id, lock.previous)
        self._budget = self._disk_budget()
        listening = adopt(passed[METRICS], settings.metrics_token_file) if METRICS in passed else None
        # Before the ranks' socket: an address that is taken stops the start before anything is captured.
        metrics = self._metrics = Metrics(settings, listening)
        stack.callback(metrics.close)
        self._bound = self._bind(passed)
        stack.callback(self._close_socket)
        self._endpoint = lock.note.endpoint = self._bound.endpoint
        lock.write()
        options = self._store_options(open_files)
        staging_nbytes = self._staging_nbytes
        if settings.lab_formats:
            self._lab = Lab(settings, staging_nbytes)
            staging_nbytes = max(0, staging_nbytes - self._lab.memory.nbytes)
        self._pipeline = Pipeline(
            self._root,
            self._node,
            options,
            threads=self._threads,
            staging_nbytes=staging_nbytes,
            budget=self._budget,
            copier=None if self._lab is None else self._lab.take,
        )
        self._registry = Registry(self._root, self._node, lock, names, self._pipeline, settings.idle_seal_s)
        self._begin_recorder()
        self._controller = Controller(self._registry, lambda: self._stop.request("a tool"), self._keeper)
        self._budget.stored = lambda: (
            self._registry.stored_nbytes()
            + self._pipeline.scratch_nbytes
            + (0 if self._recorder is None else self._recorder.disk_nbytes)
        )
        self._budget.waiting, self._budget.unsealed = self._pipeline.waiting, self._pipeline.unsealed_series
        if self._rules is not None:
            self._begin_rules(self._rules)
        self._recovery = RunRecovery(self._root, self._node, self._registry)
        sending = SendLoop()
        stack.callback(sending.stop)
        self._listen(self._bound, allowed, open_files - options.open_files, accepting, sending)
        collector = Collector(
            self._registry, self._pipeline, self._budget, self._listener, each_rank=settings.metrics_ranks,
            uploads=None if self._uploads is None else self._uploads.tools.figures,
            alerts=None if self._rules is None else self._rules.counters,
            lab=None if self._lab is None else self._lab.figures,
        )  # fmt: skip
        metrics.start(collector.take, self._budget, self._node, self._threads)
        self._recovery.start()
        if self._lab is not None:
            rules = self._rules
            self._lab.begin(
                self._pipeline.post,
                self._budget,
                rules.errors.offer if rules is not None and rules.wants_errors else None,
                is_busy=lambda: self._pipeline.oldest_since is not None,
            )
        if self._uploads is not None:
            self._uploads.mover.on_moved = self._registry.moved
            self._uploads.begin(self._recovery, self._registry.has_ranks)
        if self._policy:
            self._retention = Retention(self._root, self._policy, self._registry, self._recovery)
            self._retention.start()

    def _rule_watch(self) -> RuleWatch:
        """Return the thread of the rules. Raises ConfigError for a rule that this daemon cannot follow."""
        # A daemon without rules does not need them.
        from capd.server.rules.watch import RuleWatch

        settings = self._settings
        return RuleWatch(
            self._triggers,
            self._root,
            self._node,
            durable=settings.durability == "durable",
            statistics=settings.statistics,
            keeps=settings.window is not None,
            lab_formats=settings.lab_formats,
        )

    def _begin_recorder(self) -> None:
        """Begin the flight recorder, or one that only takes up what earlier daemons held."""
        window = self._settings.window
        settings = window or settings_for_left(left_spans(self._root, self._node))
        if settings is None:
            return
        recorder = self._recorder = Recorder(
            settings,
            self._root,
            self._node,
            self._pipeline,
            self._budget.refusal,
            judges=None if self._rules is None else self._rules.feed,
            is_draining=window is None,
        )
        self._registry.recorder = recorder
        if window is not None:
            self._pipeline.holder = self._keeper = recorder
        recorder.start()

    def _begin_rules(self, rules: RuleWatch) -> None:
        from capd.server.rules.actions import AlertActions
        from capd.server.rules.rank_looks import RankLooks

        self._pipeline.writer.on_commit = rules.feed.offer
        actions = AlertActions(self._keeper, lambda order: self._controller.control(order, lambda _: True))
        rules.begin(RankLooks(self._registry), actions)

    def _bind(self, passed: Mapping[str, socket.socket]) -> endpoint.BoundSocket:
        settings = self._settings
        if RANKS in passed:
            configured = None if settings.endpoint is None else endpoint.parse(settings.endpoint)
            return ranks_socket(passed[RANKS], configured)
        return endpoint.bind(
            endpoint.endpoint_path(settings.endpoint),
            private=settings.endpoint is None,
            others_allowed=bool(settings.allow_uid),
        )

    def _disk_budget(self) -> DiskBudget:
        settings, found = self._settings, os.statvfs(self._root)
        max_disk = (
            default_max_disk(self._root)
            if settings.max_disk is None
            else amount_nbytes(settings.max_disk, found.f_blocks * found.f_frsize)
        )
        budget = DiskBudget(self._root, max_disk, settings.keep_free, is_default=settings.max_disk is None)
        refusal = budget.refusal(0)
        if refusal is not None:
            logger.warning("every record will be dropped: %s", refusal)
        return budget

    def _store_options(self, open_files: int) -> StoreOptions:
        settings = self._settings
        return StoreOptions(
            codec=settings.codec,
            statistics=settings.statistics,
            open_files=open_files_within(open_files),
            durability=settings.durability,
            quota=Quota(
                settings.run_max,
                settings.rank_max,
                settings.series_max,
                keeps_statistics=settings.quota_policy == "stats",
            ),
        )

    def _listen(
        self,
        bound: endpoint.BoundSocket,
        allowed: AllowedUsers,
        free_files: int,
        accepting: PromptThread,
        sending: SendLoop,
    ) -> None:
        ranks = ConnectionContext(
            registry=self._registry,
            root=self._root,
            epoch=uuid.uuid4().bytes,
            closing=self._closing,
            drained_by=lambda: self._drained_by,
            save=lambda rank: self._pipeline.save_session(rank.run_id, rank.row()),
            hurry=self._pipeline.hurry,
            sending=sending,
            keeper=self._keeper,
        )
        tools = ToolContext(self.stats, self._controller, self._closing, self._report)
        room = (free_files - _RESERVED_FILES - MAX_SCRATCH_FILES) // _FILES_PER_CONNECTION
        self._listener = Listener(
            bound.socket,
            ranks,
            tools,
            allowed=allowed,
            max_connections=max(8, min(_MAX_CONNECTIONS, room)),
        )
        self._listener.start(accepting)
        logger.info(
            "store %s, node %s, %d encode threads, %d MiB staging, at most %.1f GB, %.1f GB kept free, pid %d",
            self._root,
            self._node,
            self._threads,
            self._staging_nbytes >> 20,
            (self._budget.max_disk or 0) / 1e9,
            self._budget.keep_free_nbytes() / 1e9,
            os.getpid(),
        )
        self._shutdown_s, shortened = shutdown_time(self._settings)
        if shortened is not None:
            logger.info("%s", shortened)
        # `capd run` and the tests wait for this line.
        logger.info("listening on %s", bound.endpoint)
        here = f"CAPD_ENDPOINT={bound.endpoint}"
        logger.info("capture a job: `%s CAPD_WATCH=1 python train.py`, or `%s capd run -- CMD`", here, here)

    # Life and end

    def _tick(self) -> None:
        try:
            self._registry.tick()
            if self._metrics is not None:
                self._metrics.tick()
        except Exception:
            # This is the outermost loop: ranks must not suffer from one failed tick.
            logger.exception("the daemon's clock failed once")
        self._manager.tick(self._pipeline.writer, self._status)
        if self._once:
            self._leave_after_the_last()
        if self._is_alone and (self._registry.runs() or time.monotonic() - self._started > _ALONE_S):
            self._is_alone = False
            if not self._registry.runs():
                logger.info(NO_RANK)
        if self._parent is None or not self._parent.ended or not self._registry.is_quiet():
            self._quiet_since = None
        elif self._quiet_since is None:
            # A rank that found this daemon listening may be about to connect.
            self._quiet_since = time.monotonic()
        elif time.monotonic() - self._quiet_since > _LINGER_S:
            self._stop.request("the process that started this daemon is gone")

    def _status(self) -> str:
        """Return the line that `systemctl status` shows."""
        runs = self._registry.stats(None)
        live = [run for run in runs if not run.sealed or any(one.connected for one in run.sessions)]
        ranks = sum(one.connected for run in live for one in run.sessions)
        dropped = sum(count for run in live for count in run.dropped.values())
        return f"runs: {len(live)}, ranks: {ranks}, dropped: {dropped}"

    def _leave_after_the_last(self) -> None:
        idle_s, now = self._settings.idle_seal_s, time.monotonic()
        if not self._registry.admitted or self._registry.has_ranks() or self._listener.arriving:
            self._left_since = None
        elif self._left_since is None:
            self._left_since = now
        elif now - self._left_since >= idle_s:
            self._stop.request(f"the last rank has been gone for {idle_s:g} s")

    def _shut_down(self) -> int:
        timeout_s = self._shutdown_s
        began = time.monotonic()
        until = began + timeout_s
        logger.info("stopping (%s), %d connections", self._stop.reason, self._listener.connections)
        if self._retention is not None:
            self._retention.stop(_RETENTION_S)
        if self._uploads is not None and not self._settings.upload_drain_s:
            self._uploads.stop()
        live = [run.run_id for run in self._registry.runs() if run.alive()]
        self._registry.refuse_new()
        self._recovery.hurry(until)
        # The other half is for sealing.
        self._drained_by = began + timeout_s / 2
        os.eventfd_write(self._closing, 1)
        self._listener.join_accept()
        self._close_socket()
        self._listener.stop(timeout_s / 2 + 2.0)
        self._registry.recover_all(max(0.1, self._drained_by - time.monotonic()))
        try:
            self._pipeline.flush().result(max(0.1, self._drained_by - time.monotonic()))
        except TimeoutError:
            logger.warning("%.0f s were not enough to write everything that ranks had sent", timeout_s / 2)
        if self._recorder is not None:
            # Ranks may have died since the clock stopped.
            self._registry.look_at_windows()
            for run_id in live:
                self._recorder.keep(run_id, None, "the daemon was stopped", is_last=True)
            self._recorder.stop(self._drained_by)
        self._registry.save_all(timeout_s=2.0)
        if self._lab is not None:
            # Before the seals, and with little of their time.
            self._lab.stop(min(_LAB_S, max(0.1, (until - time.monotonic()) / 3)))
        if self._rules is not None:
            # After the last errors, and before the seal, so that an upload of the sealed run has all alerts.
            self._rules.stop(_RULES_S)
        self._show_last()
        # Open runs come first, because the recovery of runs may take all the time.
        self._pipeline.seal_all(until)
        self._recovery.join(max(0.0, until - time.monotonic()))
        complete = self._pipeline.close(max(0.1, until - time.monotonic()))
        if self._uploads is not None and self._settings.upload_drain_s:
            self._uploads.drain(self._settings.upload_drain_s)
        self._show_last()
        left = find_unsealed(self._root, self._node, self._pipeline.unsealed_records)
        self._ended = "the daemon stopped, everything is sealed"
        if left:
            self._ended = describe_unsealed(left, self._root, self._node)
            logger.error("%s", self._ended)
        elif not complete:
            self._ended = "the daemon stopped with captures that were never acknowledged; its log says why"
        logger.info("stopped after %.1f s", time.monotonic() - began)
        return EXIT_UNSEALED if left else 0 if complete else 1

    def _show_last(self) -> None:
        if self._metrics is not None:
            self._metrics.stop_clock()

    def _close_socket(self) -> None:
        if self._bound is not None:
            self._bound.close()
            if self._parent is not None and self._bound.removed_at_close:
                with contextlib.suppress(OSError):
                    self._bound.path.parent.rmdir()

    def _leave_at_once(self) -> None:
        self._close_socket()
        if self._metrics is not None:
            self._metrics.unlink()
        way_on = f"`capd serve --store {self._root}` seals the rest"
        os.write(2, os.fsencode(f"capd: interrupted again, leaving without sealing; {way_on}\n"))
        os._exit(130)
