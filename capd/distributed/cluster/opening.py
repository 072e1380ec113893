"""Opens a cluster: processes of this machine, or what a scheduler has. Only what was started here is closed."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from capd.distributed.cluster.scratch import scratch_directory
from capd.distributed.cluster.settings import ClusterSettings
from capd.errors import CapdError
from capd.store.read.series import import_extra
from capd_client.process.memory import available_nbytes

if TYPE_CHECKING:
    from capd.distributed.cluster.engine import Engine

__all__ = ["engine_of", "memory_limit_of", "opened_engine"]

# distributed types only some of its calls.
_Client: TypeAlias = Any
_CONNECT_S = 10
_WORKER_S = 60
# A worker that dies makes all tasks suspect that it had.
_DEATHS = 10
_CONFIG = {
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.admin.system-monitor.gil.enabled": False,
}


@contextlib.contextmanager
def opened_engine(settings: ClusterSettings, places: Sequence[str]) -> Iterator[Engine]:
    """Open a cluster whose workers have our versions and see these runs.

    Raises:
        CapdError: Dask is not installed, no scheduler answers, there is no worker, or a worker does not fit.
    """
    import_extra("distributed", "distributed")
    with _quiet(), contextlib.ExitStack() as stack:
        client = stack.enter_context(_own(settings) if settings.is_own else _foreign(settings.scheduler))
        _check_workers(client, places)
        _set_up(client, is_own=settings.is_own, settles=settings.settles_heap)
        yield _engine(client, settings.retries, settings.memory_limit)


def engine_of(client: _Client, places: Sequence[str]) -> Engine:
    """Check the workers of a client, set them up, and return what feeds them. Raises CapdError as `opened_engine`."""
    _check_workers(client, places)
    _set_up(client, is_own=False, settles=True)
    return _engine(client, ClusterSettings.retries, None)


def _check_workers(client: _Client, places: Sequence[str]) -> None:
    from capd.distributed.cluster.checks import check_sight, check_versions

    try:
        client.wait_for_workers(1, timeout=_WORKER_S)
    except TimeoutError:
        raise CapdError(f"{client.scheduler.address} has no worker; start some with `dask worker`") from None
    check_versions(client)
    check_sight(client, places)


def _set_up(client: _Client, *, is_own: bool, settles: bool) -> None:
    from capd.distributed.cluster.workers import SettledWorker

    client.register_plugin(SettledWorker(is_own=is_own, settles=settles))


def _engine(client: _Client, retries: int, memory_limit: int | None) -> Engine:
    from capd.distributed.cluster.checks import least_limit
    from capd.distributed.cluster.engine import Engine

    return Engine(client, retries=retries, memory_limit=memory_limit or least_limit(client))


def memory_limit_of(settings: ClusterSettings) -> int | None:
    """Return the memory of each worker as far as it is known before there is a cluster."""
    if settings.memory_limit is None and settings.is_own:
        available = available_nbytes()
        return None if available is None else available // settings.workers
    return settings.memory_limit


@contextlib.contextmanager
def _own(settings: ClusterSettings) -> Iterator[_Client]:
    import dask

    distributed: Any = import_extra("distributed", "distributed")
    deaths = max(_DEATHS, dask.config.get("distributed.scheduler.allowed-failures", 0))
    config = {**_CONFIG, "distributed.scheduler.allowed-failures": deaths}
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(scratch_directory())
        # The scheduler has files, too.
        stack.enter_context(dask.config.set({**config, "temporary-directory": place}))
        cluster = distributed.LocalCluster(
            n_workers=settings.workers,
            threads_per_worker=1,
            processes=True,
            dashboard_address=None,
            local_directory=place,
            memory_limit=memory_limit_of(settings) or 0,
            silence_logs=logging.CRITICAL,
        )
        stack.callback(cluster.close)
        yield stack.enter_context(distributed.Client(cluster, set_as_default=False))


@contextlib.contextmanager
def _foreign(scheduler: str) -> Iterator[_Client]:
    distributed: Any = import_extra("distributed", "distributed")
    named: dict[str, Any] = (
        {"scheduler_file": scheduler} if scheduler.endswith(".json") else {"address": scheduler}
    )
    try:
        client = distributed.Client(**named, timeout=_CONNECT_S, set_as_default=False)
    except (OSError, ValueError, TimeoutError, KeyError) as error:
        raise CapdError(
            f"the scheduler {scheduler} does not answer: {error or type(error).__name__}"
        ) from error
    with client:
        yield client


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what Dask logs of dead workers and lost connections, which we tell in our own words."""
    loggers = [
        logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith("distributed")
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="distributed")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
