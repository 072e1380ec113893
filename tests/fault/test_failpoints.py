"""The store's named failpoints: a kill and an error at each, and each is reached by these tests."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

import capd.store
from capd.store import failpoints
from tests.fault import figures
from tests.fault.rounds import failpoint_spec, prepare_for
from tests.fault.site import Site, exercise
from tests.fault.spoil import SPOIL

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

KILL_ONLY = ("settle.after_append", "sync.after")  # nothing that follows there asks the system
SPACE = (
    "create.before_header", "claim.before_rename", "commit.before_write", "log.before_write", "settle.before_append",
    "catalog.before_write", "seal.before_index", "seal.after_rename",
)  # fmt: skip

MENDED = [("mend.before_rename", "partial"), ("mend.before_rename", "log")]  # by a start
REPAIRED = [  # by `capd verify`
    ("rebuild.before_exchange", "shard", "--repair"),
    ("rebuild.after_exchange", "shard", "--repair"),
    ("catalog.before_swap", "catalog", "--rebuild-catalog"),
]
ON_DAMAGE = {name for name, *_ in (*MENDED, *REPAIRED)}
ON_THE_WAY = [name for name in failpoints.NAMES if name not in ON_DAMAGE]
ACTIONS = ("kill", "error", "enospc")


def test_every_failpoint_of_the_store_has_a_name_and_every_name_a_failpoint() -> None:
    """The tests below go by the names, and the kill at each proves that it was reached."""
    sources = [path.read_text() for path in Path(capd.store.__path__[0]).glob("*.py")]
    passed = {name for text in sources for name in re.findall(r'failpoint\("([^"]+)"\)', text)}
    assert passed == set(failpoints.NAMES)
    assert set(failpoints.NAMES) >= ON_DAMAGE


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
@pytest.mark.parametrize(("name", "kind"), MENDED)
def test_a_start_that_ends_while_it_mends_a_file_is_done_again(
    name: str, kind: str, action: str, site: Site
) -> None:
    """Damage costs the record it touched, whatever becomes of the first attempt to write the file anew."""
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
    figures.note("mended behind an interruption", **{f"{kind} {action}": "lost 1"})


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize(("name", "kind", "option"), REPAIRED)
def test_a_repair_that_ends_half_way_is_done_again(
    name: str, kind: str, option: str, action: str, site: Site
) -> None:
    """In between a daemon may take the run and go on with the very series."""
    rank = site.loaded(30)
    if kind == "shard":
        assert site.stop() == 0
    else:
        site.kill()
    lost = SPOIL[kind](site.run, rank.rank)
    code = site.verify(option, CAPD_FAILPOINTS=f"{name}={action}")
    assert code in ((-signal.SIGKILL,) if action == "kill" else (1, 6)), f"{name} was not reached"
    assert site.start(), site.says()
    assert exercise(site, rank, captures=10), site.says()
    assert site.verify(option) == 0
    site.finish(lost)
    figures.note("repaired behind an interruption", **{f"{name} {action}": f"lost {len(lost)}"})
