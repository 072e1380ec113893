"""The store's named failpoints: a kill and an error at each, and each is reached by these tests."""

from __future__ import annotations

import shutil
import signal

import pytest

from capd.store.disk import failpoints
from tests.fault.kit import figures
from tests.fault.kit.rounds import failpoint_spec, prepare_for
from tests.fault.kit.site import Site, exercise
from tests.fault.kit.spoil import SPOIL

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

KILL_ONLY = ("settle.after_append", "sync.after")  # nothing that follows there asks the system
SPACE = (
    "create.before_header", "claim.before_rename", "commit.before_write", "log.before_write", "settle.before_append",
    "catalog.before_write", "seal.before_index", "seal.after_rename",
)  # fmt: skip

REWRITTEN = [("recover.before_rename", "partial"), ("recover.before_rename", "log")]  # by a start
REBUILT = "recover.after_logs"  # by `capd verify --rebuild-catalog`
ON_DAMAGE = {name for name, _ in REWRITTEN}
# tests/integration/lifecycle/test_interrupted_removals.py kills at those.
ON_REMOVAL = {
    name for name in failpoints.NAMES if name.startswith(("remove.", "trash.", "empty.", "restore."))
}
# tests/cli/copying kills the commands there.
ON_COPIES = {name for name in failpoints.NAMES if name.startswith("copy.")}
# tests/integration/uploads kills a daemon at those, and tests/unit/store/upload/test_moving.py at each of the second.
ON_UPLOADS = {name for name in failpoints.NAMES if name.startswith(("upload.", "move."))}
ELSEWHERE = ON_DAMAGE | ON_REMOVAL | ON_COPIES | ON_UPLOADS
ON_THE_WAY = [name for name in failpoints.NAMES if name not in ELSEWHERE]
ACTIONS = ("kill", "error", "enospc")


@pytest.mark.parametrize("name", ON_THE_WAY)
def test_a_kill_at_a_failpoint_loses_nothing(name: str, site: Site) -> None:
    prepare_for(site, name)
    rank = site.rank(0)
    if site.start(CAPD_FAILPOINTS=failpoint_spec(name, "kill")):
        assert not exercise(site, rank, captures=10), f"{name} was not reached"
    assert site.ended() == -signal.SIGKILL, f"{name} was not reached\n{site.says()}"
    site.report()
    acked = site.finish()["acked"]
    figures.note("failpoints killed", **{name: acked}, existing=len(failpoints.NAMES))


@pytest.mark.parametrize(
    ("name", "action"),
    [(name, "error") for name in ON_THE_WAY if name not in KILL_ONLY] + [(name, "enospc") for name in SPACE],
)
def test_an_error_at_a_failpoint_loses_nothing_and_passes(name: str, action: str, site: Site) -> None:
    """The error comes once: what it hits is refused or tried again, and the next start finds all of the rest."""
    prepare_for(site, name)
    rank = site.rank(0)
    assert site.start(CAPD_FAILPOINTS=failpoint_spec(name, action)), site.says()
    if not exercise(site, rank, captures=10):
        site.kill()
    site.report()
    site.finish()


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize(("name", "kind"), REWRITTEN)
def test_a_start_that_ends_while_it_rewrites_a_file_is_done_again(
    name: str, kind: str, action: str, site: Site
) -> None:
    """Damage costs the record it touched, whatever becomes of the first attempt to rewrite the file."""
    rank = site.loaded(30)
    site.kill()
    lost = SPOIL[kind](site.run, rank.rank)
    goes_on = site.start(CAPD_FAILPOINTS=f"{name}={action}") and exercise(site, rank, captures=10)
    if action == "kill":
        assert site.ended() == -signal.SIGKILL, f"{name} was not reached\n{site.says()}"
    else:
        reached = "has no room left" if action == "enospc" else f"failpoint {name}"
        assert reached in site.says(), f"{name} was not reached\n{site.says()}"
        assert goes_on or exercise(site, rank, captures=10), site.says()  # the first one may be sent away
    site.finish(lost)
    figures.note("rewritten after an interruption", **{f"{kind} {action}": "lost 1"})


@pytest.mark.parametrize("action", ACTIONS)
def test_a_catalog_whose_rebuilding_ends_half_way_is_rebuilt_again(action: str, site: Site) -> None:
    """In between a daemon may take the run and go on."""
    rank = site.loaded(30)
    site.kill()
    lost = SPOIL["catalog"](site.run, rank.rank)
    code = site.verify("--rebuild-catalog", CAPD_FAILPOINTS=f"{REBUILT}={action}")
    assert code in ((-signal.SIGKILL,) if action == "kill" else (1, 6)), f"{REBUILT} was not reached"
    assert site.start(), site.says()
    assert exercise(site, rank, captures=10), site.says()
    assert site.verify("--rebuild-catalog") == 0
    site.finish(lost)
    figures.note("catalog rebuilt after an interruption", **{action: f"lost {len(lost)}"})


def test_a_repair_saves_what_is_sound_and_leaves_the_damaged_run_as_it_is(site: Site) -> None:
    """The checker, which knows nothing of capd's readers, finds everything but the damaged record in the new run."""
    rank = site.loaded(30)
    assert site.stop() == 0
    lost = SPOIL["shard"](site.run, rank.rank)
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in site.run.rglob("*")}
    damaged, new = site.run, site.run.with_name("repaired.zarr")
    assert site.verify("--repair", "-o", str(new)) == 4
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in damaged.rglob("*")} == before
    shutil.rmtree(damaged)
    new.rename(damaged)
    site.finish(lost)
