"""The thread that uploads the runs of a store root. It takes little of a core and no lock of the pipeline.

Every few seconds it looks at each run that matches: those that ranks write now, and those of earlier daemons. A failure
is one line of the log, and is tried again for ever, at most five minutes later. Captures never wait for it. What is not
uploaded stays on the disk, so `max_disk` bounds it. What is uploaded leaves it by `delete_local`, after a verification.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from capd.config import DaemonSettings
from capd.errors import CapdError, NotAStore, ObjectStoreError, RemovedRun, StoreBusy
from capd.metrics import UploadStats
from capd.server.limits import usable_cpus
from capd.server.uploads.backoff import Backoff
from capd.server.uploads.followed_run import FollowedRun
from capd.store.catalog.rows import CATALOG_NAME
from capd.store.disk.layout import node_directory
from capd.store.objects.address import parse_address
from capd.store.objects.bucket import Bucket
from capd.store.read.store import runs
from capd.store.upload.moving import ShardMover
from capd.store.upload.node_upload import NodeUpload
from capd.store.upload.published_node import AnotherWriter
from capd.store.upload.sending.conditions import Conditions, probe
from capd.store.upload.sending.halt import UploadStopped
from capd.store.upload.sending.transfer import UploadTools

__all__ = ["Uploads", "live_rate", "pause_after"]

logger = logging.getLogger(__name__)

INTERVAL_S = 3.0
# A look at thousands of series takes a second of the interpreter. It then pauses for so many times as long.
_PAUSE_FACTOR = 20
_MOST_PAUSE_S = 60.0
_LOOK_S = 0.5
_DRAIN_LOOK_S = 0.5
# The object in hand may end within this time.
_GRACE_S = 1.0
# An upload of so many bytes takes a sixteenth of a CPU for a second: reading, checksums, SHA-256 and the socket.
_NBYTES_OF_A_SIXTEENTH = 25_000_000
# Failures that concern every run of the root alike.
_OF_THE_STORE = ("unreachable", "refused", "missing", "full")


class Uploads(threading.Thread):
    """The uploads of a daemon. Any thread may ask for the figures, and ask it to stop."""

    def __init__(self, root: Path, node: str, settings: DaemonSettings) -> None:
        """Check the address and the credentials' settings. Nothing is asked before `begin`.

        Raises:
            CapdError: The extra `store` is not installed.
            ConfigError: The address or the settings of its credentials are not valid.
        """
        super().__init__(name="capd-uploads", daemon=True)
        assert settings.upload_to is not None  # noqa: S101 - the daemon asks before
        self._root, self._node = root, node
        self._recovery: threading.Thread | None = None
        self.mover = ShardMover(settings.move_policy, is_stopping=lambda: self.tools.halt.is_asked)
        self._moved_at = -math.inf
        self._to = parse_address(settings.upload_to)
        self._glob = settings.upload_runs
        self._rate, self._live_rate = settings.upload_bandwidth, live_rate(settings)
        self._has_ranks: Callable[[], bool] = lambda: False
        self.tools = UploadTools.make(settings.upload_threads, self._allowed)
        self._above = Bucket(self._to)
        self._conditions: Conditions | None = None
        self._followed: dict[Path, FollowedRun] = {}
        self._backoff = Backoff()
        self._said = ""
        self._blocked: Path | None = None
        # The failure that lasts, and of which run it is; "" of all.
        self._problems: dict[str, str] = {}
        self._is_draining = self._has_failed = False

    # For other threads

    def begin(self, recovery: threading.Thread, has_ranks: Callable[[], bool]) -> None:
        """Start the thread.

        Args:
            recovery: The thread waits for its end: an unsealed run must be read first.
            has_ranks: Returns whether a rank is there. The uploads then give way to it.
        """
        self._recovery, self._has_ranks = recovery, has_ranks
        self.start()

    def stats(self) -> UploadStats:
        """Return the figures of this moment."""
        found = self.tools.figures.read()
        problems = list(self._problems.values())
        state: Literal["ok", "retrying", "failed"] = "ok"
        if problems:
            state = "failed" if self._is_hopeless else "retrying"
        return UploadStats(
            to=str(self._to),
            state=state,
            problem=problems[0] if problems else "",
            note="" if self._conditions is None else self._conditions.problem,
            objects=found.objects,
            bytes=found.nbytes,
            failures=found.failures,
            backlog_bytes=found.backlog_nbytes,
            oldest_s=found.oldest_s,
            moved_shards=self.mover.shards,
            moved_bytes=self.mover.nbytes,
            kept_shards=self.mover.refused,
        )

    def drain(self, timeout_s: float) -> None:
        """Go on until everything is uploaded, at most `timeout_s`. Call it when all runs are sealed."""
        self._is_draining = True
        if self.is_alive():
            self.join(timeout_s)
        self.stop()

    def stop(self) -> None:
        """End the object in hand, begin no further one, and wait a moment for the end of the thread."""
        self.tools.halt.ask(_GRACE_S)
        if self.is_alive():
            self.join(2 * _GRACE_S)

    def _allowed(self) -> float | None:
        return self._live_rate if self._has_ranks() else self._rate

    # The thread

    def run(self) -> None:
        """Upload until the daemon stops."""
        # It keeps the priority of the daemon. On a busy node a thread of a lower one gets no turn while it holds the
        # interpreter's lock, and the pipeline waits for it.
        while self._recovery is not None and self._recovery.is_alive():
            if self.tools.halt.wait(_LOOK_S):
                return
        logger.info("[upload] runs of this node that match %r go to %s", self._glob, self._to)
        try:
            while not self.tools.halt.is_asked:
                began, began_cpu = time.monotonic(), time.thread_time()
                was_draining = self._is_draining
                more = self._look_once()
                if was_draining and not more and not self._problems:
                    return
                self._pause(began, 0.0 if more else pause_after(time.thread_time() - began_cpu))
        except UploadStopped:
            pass
        finally:
            for one in self._followed.values():
                one.close()

    def _pause(self, began: float, least_s: float) -> None:
        while not self.tools.halt.is_asked:
            passed = time.monotonic() - began
            if passed >= (min(least_s, _DRAIN_LOOK_S) if self._is_draining else least_s):
                return
            self.tools.halt.wait(_DRAIN_LOOK_S)

    def _look_once(self) -> bool:
        try:
            return self._look_at_all()
        except UploadStopped:
            raise
        except (CapdError, OSError) as error:
            # A run may vanish while the root is listed.
            logger.debug("[upload] %s cannot be listed now: %s", self._root, error)
        except Exception:
            # This is the outermost loop of the thread, and nothing that goes wrong here may reach the pipeline.
            if not self._has_failed:
                logger.exception("[upload] failed; further failures of this kind are not logged")
            self._has_failed = True
        return False

    def _look_at_all(self) -> bool:
        """Do a round of every run that is due. Return whether one has more to do at once."""
        if not self._backoff.is_due and not self._is_draining:
            return False
        more = False
        moves = time.monotonic() - self._moved_at >= self.mover.policy.look_s and not self._is_draining
        if moves:
            self._moved_at = time.monotonic()
        for followed in self._in_turn(self._matching()):
            self.tools.halt.check()
            if not followed.backoff.is_due and not self._is_draining:
                continue
            try:
                result = followed.round()
                if moves:
                    followed.move(self.mover)
            except UploadStopped:
                raise
            except NotAStore as error:
                if not isinstance(error, RemovedRun) and (followed.run / "zarr.json").exists():
                    self._failed(followed, "other", error)
                    continue
                # The run is being removed, or is gone.
                followed.close()
                self._problems.pop(followed.run.name, None)
            except StoreBusy as error:
                followed.backoff.failed()
                self._say(followed, "busy", error)
            except ObjectStoreError as error:
                if not self._goes_on(followed, error):
                    self._blocked = followed.run
                    return False
            except (CapdError, OSError) as error:
                self._failed(followed, "other", error)
            except Exception as error:
                if followed.said != "bug":
                    logger.exception("[upload] %s failed", followed.run)
                followed.said = "bug"
                self._failed(followed, "other", error, is_said=True)
            else:
                more |= result.more
                self._succeeded(followed, is_answered=result.published)
        # A run without changes asks the store nothing, so only a look without any failure says that it answers.
        self._answered()
        return more

    def _in_turn(self, found: list[FollowedRun]) -> list[FollowedRun]:
        """Return the runs, first those after the one at which the store failed last: it may fail for that one alone."""
        at = next((at for at, one in enumerate(found, 1) if one.run == self._blocked), 0)
        return found[at:] + found[:at]

    def _matching(self) -> list[FollowedRun]:
        found = []
        for run in runs(self._root):
            has_part = (node_directory(run, self._node) / CATALOG_NAME).exists()
            if has_part and fnmatchcase(run.stem, self._glob):
                if run not in self._followed:
                    self._followed[run] = FollowedRun(run, self._node, self._begin)
                found.append(self._followed[run])
        for run in self._followed.keys() - {one.run for one in found}:
            self._followed.pop(run).close()
            self.tools.figures.settled(f"{run.name}/{self._node}")
            self._problems.pop(run.name, None)
        return found

    def _begin(self, run: Path) -> NodeUpload:
        if self._conditions is None:
            self._conditions = probe(self._above)
            if self._conditions.problem:
                logger.warning("[upload] %s: %s", self._to, self._conditions.problem)
        return NodeUpload(run, self._node, self._to, self.tools, self._conditions)

    # Failures

    def _goes_on(self, followed: FollowedRun, error: ObjectStoreError) -> bool:
        """Note a failure of the object store. Return whether other runs may fare better."""
        is_of_run = isinstance(error, (AnotherWriter, FileNotFoundError)) or error.reason not in _OF_THE_STORE
        if is_of_run:
            self._failed(followed, error.reason, error, slowly=isinstance(error, AnotherWriter))
            return True
        self.tools.figures.failed(error.reason)
        self._backoff.failed(slowly=error.reason in ("refused", "missing"))
        self._problems[""] = str(error)
        if error.reason not in (self._said, followed.said):
            self._said = followed.said = error.reason
            logger.warning("[upload] %s; capture goes on, and uploads are tried again", error)
        return False

    def _failed(
        self,
        followed: FollowedRun,
        reason: str,
        error: Exception,
        *,
        slowly: bool = False,
        is_said: bool = False,
    ) -> None:
        self.tools.figures.failed(reason)
        followed.backoff.failed(slowly=slowly)
        self._problems[followed.run.name] = str(error)
        if not is_said:
            self._say(followed, f"{reason} {type(error).__name__}", error)

    @staticmethod
    def _say(followed: FollowedRun, what: str, error: Exception) -> None:
        if followed.said != what:
            followed.said = what
            logger.warning("[upload] %s is not uploaded now: %s; capture goes on", followed.run, error)

    def _succeeded(self, followed: FollowedRun, *, is_answered: bool) -> None:
        if followed.said and not self._said:
            logger.info("[upload] %s is uploaded again", followed.run)
        followed.said = ""
        followed.backoff.succeeded()
        self._problems.pop(followed.run.name, None)
        if is_answered:
            self._answered()

    def _answered(self) -> None:
        if self._said:
            logger.info("[upload] uploads to %s go on", self._to)
        self._said = ""
        self._backoff.succeeded()
        self._problems.pop("", None)

    @property
    def _is_hopeless(self) -> bool:
        """Whether a person has to do something, such as setting credentials."""
        return self._said in ("refused", "missing") or any(
            one.said.endswith(AnotherWriter.__name__) for one in list(self._followed.values())
        )


def live_rate(settings: DaemonSettings) -> float:
    """Return the bytes per second while ranks are there: as set, or what takes a sixteenth of the CPUs."""
    live = settings.upload_live_bandwidth
    rate = _NBYTES_OF_A_SIXTEENTH * usable_cpus() if live is None else float(live)
    return min(rate, settings.upload_bandwidth or math.inf)


def pause_after(cpu_s: float) -> float:
    """Return the seconds from the begin of a look to the next one. cpu_s: what it took of a processor."""
    return max(INTERVAL_S, min(_MOST_PAUSE_S, _PAUSE_FACTOR * cpu_s))
