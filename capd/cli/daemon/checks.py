"""The checks of `capd doctor` on this machine. Each function checks one subject and yields its diagnoses."""

from __future__ import annotations

import fcntl
import os
import platform
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from capd.cli.output import human_nbytes, versions
from capd.config import DaemonSettings
from capd.errors import CapdError, EndpointError
from capd.server.net.daemon_client import connect
from capd.store.catalog.place import is_network
from capd_client.process.text import printable
from capd_client.protocol.control import Stats, StatsReply
from capd_client.protocol.messages import Ping

__all__ = ["CHECKS", "Diagnosis"]

# The values are from linux/fcntl.h. Python's fcntl module has all of them only from 3.12 on.
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEALS = {"SHRINK": 0x2, "GROW": 0x4, "SEAL": 0x1}
_SEAL_FUTURE_WRITE = 0x10
_MIN_OPEN_FILES = 1024
# From this share of a quota on, only statistics are kept.
_NEAR_QUOTA = 0.9


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of one check. `status` is ok, warn (works with limits) or fail; `fix` says what to do."""

    name: str
    status: str
    detail: str
    fix: str = ""


def check_versions(settings: DaemonSettings) -> Iterator[Diagnosis]:
    """Check Python, capd and the packages that capd needs."""
    found = versions()
    missing = [name for name, version in found.items() if version == "not installed"]
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    if missing:
        yield Diagnosis("versions", "fail", text, f"pip install {' '.join(missing)}")
    else:
        yield Diagnosis("versions", "ok", text)


def check_kernel(settings: DaemonSettings) -> Iterator[Diagnosis]:
    """Check memfd and its seals, which carry tensors from a rank to the daemon."""
    release = f"Linux {platform.release()}"
    try:
        fd = os.memfd_create("capd-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        yield Diagnosis(
            "kernel", "fail", f"{release}: memfd_create: {error}", "allow memfd_create in the sandbox"
        )
        return
    try:
        os.ftruncate(fd, 4096)
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS["SHRINK"] | _SEALS["GROW"])
        try:
            fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL_FUTURE_WRITE)
            known = "memfd with seals, FUTURE_WRITE too"
        except OSError:
            known = "memfd with seals; FUTURE_WRITE is unknown here and is not used"
        yield Diagnosis("kernel", "ok", f"{release}: {known}")
    except OSError as error:
        yield Diagnosis("kernel", "fail", f"{release}: memfd seals: {error}", "use a kernel from 4.14 on")
    finally:
        os.close(fd)


def check_endpoint(settings: DaemonSettings) -> Iterator[Diagnosis]:
    """Check the socket: its path, its listener, and whether the listener answers."""
    from capd.server.net.endpoint import MAX_PATH_NBYTES, endpoint_path

    try:
        path = endpoint_path(settings.endpoint)
    except CapdError as error:
        yield Diagnosis("endpoint", "fail", str(error), "choose a shorter CAPD_ENDPOINT")
        return
    length = f"unix:{path} ({len(os.fsencode(path))} of {MAX_PATH_NBYTES} bytes)"
    try:
        with connect(path) as tool:
            tool.request(Ping(), timeout_s=5.0)
            reply = tool.request(Stats())
    except EndpointError as error:
        if settings.endpoint is None:
            yield Diagnosis("endpoint", "ok", f"{length}: no daemon runs there now")
        else:
            yield Diagnosis("endpoint", "fail", str(error), "start `capd serve`, or unset CAPD_ENDPOINT")
        return
    facts = reply.stats if isinstance(reply, StatsReply) else {}
    owner = path.stat().st_uid
    detail = f"{length}: daemon {facts.get('pid')} of uid {owner} answers, capd {facts.get('version')}"
    if owner == os.getuid():
        yield Diagnosis("endpoint", "ok", detail)
    else:
        yield Diagnosis(
            "endpoint", "warn", detail, f"if it refuses ranks: capd serve --allow-uid {os.getuid()}"
        )


def check_memory(settings: DaemonSettings) -> Iterator[Diagnosis]:
    """Check the arena's size, its limits, and pinning."""
    from capd_client.config.settings import load_config
    from capd_client.process.memory import MIN_ARENA_NBYTES, available_nbytes, default_arena_nbytes
    from capd_client.process.ranks import find_rank

    local_ranks = find_rank().local_world_size
    available = available_nbytes()
    arena = load_config().arena_bytes or default_arena_nbytes(local_ranks, available)
    detail = (
        f"{human_nbytes(arena)} for each of {local_ranks} local rank(s), of {human_nbytes(available)} that memory "
        "and cgroup leave; a memfd, so the size of /dev/shm does not matter. It counts for the ranks: add "
        f"{human_nbytes(arena * local_ranks)} to the memory limit of their container"
    )
    small = arena <= MIN_ARENA_NBYTES
    yield Diagnosis(
        "arena", "warn" if small else "ok", detail, "free memory, or set CAPD_ARENA_BYTES" if small else ""
    )
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else human_nbytes(soft)
    yield Diagnosis("locked memory", "ok", f"RLIMIT_MEMLOCK {limit}; only matters for pinning with CUDA")


def check_limits(settings: DaemonSettings) -> Iterator[Diagnosis]:
    """Check the CPUs and the open files."""
    from capd.server.limits import encode_threads, usable_cpus

    threads = settings.threads or encode_threads()
    yield Diagnosis("cpus", "ok", f"{usable_cpus():g} usable, {threads} encode thread(s)")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = hard == resource.RLIM_INFINITY or hard >= _MIN_OPEN_FILES
    shown = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    fix = "" if enough else f"raise the hard limit: ulimit -Hn {_MIN_OPEN_FILES}"
    yield Diagnosis("open files", "ok" if enough else "warn", f"RLIMIT_NOFILE {soft}, up to {shown}", fix)


def check_rank(settings: DaemonSettings) -> Iterator[Diagnosis]:
    """Check which rank a job that is started here would take, and from which variable."""
    from capd_client.process.ranks import find_rank

    found = find_rank()
    yield Diagnosis("rank", "ok", f"rank {found.rank} of {found.world_size} (from {found.source})")


def check_store(settings: DaemonSettings) -> Iterator[Diagnosis]:
    """Check the store's directory, its file system and its free space."""
    place = settings.store.absolute()
    existing = next(path for path in (place, *place.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield Diagnosis(
            "store", "fail", f"{existing} cannot be written to", "choose another --store or CAPD_STORE"
        )
        return
    disk = os.statvfs(existing)
    free, total = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    kind = _file_system(existing)
    yield from _room(settings, free, total, f"{place} on {kind}, {human_nbytes(free)} free")
    if disk.f_files and disk.f_favail < 10_000:
        yield Diagnosis(
            "inodes", "warn", f"{disk.f_favail} left", "make room: every series takes several files"
        )
    if is_network(existing):
        yield Diagnosis(
            "file system", "warn", f"{kind} is a network file system", "prefer a local disk, copy later"
        )


def check_quota(settings: DaemonSettings) -> Iterator[Diagnosis]:
    """Check how much of its quota the newest run of the store uses on this node."""
    limits = {"run_max": settings.run_max, "rank_max": settings.rank_max, "series_max": settings.series_max}
    said = [f"{name} {human_nbytes(limit)}" for name, limit in limits.items() if limit is not None]
    if not said:
        return
    from capd.store.read.store import runs

    detail, share = ", ".join(said), 0.0
    found = runs(settings.store) if settings.store.is_dir() else ()
    if found and settings.run_max is not None:
        newest = f"the newest run, {printable(found[-1].stem)}"
        try:
            held = _held_here(found[-1], settings.node)
        except CapdError as error:
            detail += f"; {newest}, cannot be read: {error}"
        else:
            share = held / max(1, settings.run_max)
            detail += f"; {newest}, holds {human_nbytes(held)} on this node ({share:.0%})"
    near = share >= _NEAR_QUOTA
    fix = "raise CAPD_RUN_MAX before the run goes on, or begin another run" if near else ""
    yield Diagnosis("quota", "warn" if near else "ok", detail, fix)


def _held_here(run: Path, node: str | None) -> int:
    """Return the bytes of this node's part of a run. Raises CapdError."""
    from capd.server.daemon import node_name
    from capd.store.read.store import open_store

    rows = (
        row for one in open_store(run).nodes if one.name == node_name(node) for row in one.series.values()
    )
    return sum(row.stored_bytes for row in rows)


def _room(settings: DaemonSettings, free: int, total: int, where: str) -> Iterator[Diagnosis]:
    from capd_client.config.sizes import amount_nbytes

    kept = amount_nbytes(settings.keep_free, total)
    detail = f"{where}, {human_nbytes(kept)} of it are kept"
    if free > kept:
        yield Diagnosis("store", "ok", detail)
    else:
        yield Diagnosis("store", "fail", detail, "make room, or lower --keep-free")


def _file_system(path: Path) -> str:
    """Return the type of the file system that holds `path`, from the longest matching mount point."""
    best, kind = "", "unknown"
    target = str(path.resolve())
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, found, *_ = line.split(" ")
        mount = mount.replace("\\040", " ")
        inside = target == mount or target.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, found
    return kind


def check_upload(settings: DaemonSettings) -> Iterator[Diagnosis]:
    """Check the object store of [upload]: whether it takes objects, what it enforces, and its lifecycle rule."""
    if settings.upload_to is None:
        return
    from capd.store.objects.address import parse_address
    from capd.store.objects.bucket import Bucket
    from capd.store.upload.sending.conditions import probe
    from capd.store.upload.sending.unfinished import aborts_unfinished

    address = parse_address(settings.upload_to)
    try:
        conditions = probe(Bucket(address))
    except CapdError as error:
        # The error names the remedy: keys, the clock, the bucket, or the address of the server.
        yield Diagnosis("upload", "fail", str(error), "correct it; uploads wait, captures do not")
        return
    detail = f"{address} takes objects, the keys and the clock are right"
    if conditions.problem:
        yield Diagnosis(
            "upload", "warn", f"{detail}; {conditions.problem}", "use one node name for each daemon"
        )
    else:
        yield Diagnosis("upload", "ok", f"{detail}, and conditional writes are enforced")
    if aborts_unfinished(address) is False:
        yield Diagnosis(
            "upload rule",
            "warn",
            f"no lifecycle rule of {address.scheme}://{address.bucket} aborts unfinished uploads; a daemon aborts its "
            "own at its next start",
            "add a rule with AbortIncompleteMultipartUpload to the bucket, such as after 7 days",
        )


CHECKS: tuple[Callable[[DaemonSettings], Iterator[Diagnosis]], ...] = (
    check_versions,
    check_kernel,
    check_endpoint,
    check_memory,
    check_limits,
    check_rank,
    check_store,
    check_quota,
    check_upload,
)
