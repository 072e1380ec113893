"""`capd prune`: removes the runs that a policy does not keep, into the trash."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capd.cli.completion import tag_words
from capd.cli.lifecycle.places import RootArgument, Yes, ask_for, released, root_of, say_failed
from capd.cli.lifecycle.runs import plain_run, size_column, when_text
from capd.cli.options import Config, Json, Wide, flag, option
from capd.cli.output import human_count, human_nbytes, note, print_json
from capd.cli.table import Column, print_columns
from capd.errors import CapdError, ConfigError, StoreError, exit_code_of

if TYPE_CHECKING:
    from capd.lifecycle.policy import Policy
    from capd.lifecycle.prune import Planned

__all__ = ["prune"]


def prune(
    store: RootArgument = None,
    keep_last: Annotated[
        int | None, option("--keep-last", "N", "Keep the newest N runs, whatever their size.", min=1)
    ] = None,
    keep_within: Annotated[
        str | None, option("--keep-within", "AGE", "Keep runs that changed within this time: 30d, 12h, 2w.")
    ] = None,
    max_size: Annotated[
        str | None,
        option("--max-size", "SIZE", "Remove the oldest of the other runs until the rest fits: 2TB."),
    ] = None,
    keep_tag: Annotated[
        list[str] | None,
        option("--keep-tag", "TAG", "Keep runs with this tag. May be repeated.", autocompletion=tag_words),
    ] = None,
    only_uploaded: Annotated[
        bool, flag("--only-uploaded", "Keep every run that is not wholly in an object store.")
    ] = False,
    config: Config = None,
    yes: Yes = False,
    wide: Wide = False,
    as_json: Json = False,
) -> None:
    """Remove the runs that no rule keeps. Without --yes, print each run with the reason why it stays or goes.

    A run stays if any rule keeps it. --max-size comes last: it also removes runs that only --keep-within keeps, the
    oldest first. With --max-size alone, all runs stay that fit. Live and pinned runs always stay. Rules that would
    remove every run are refused.

    Without rules, those of [retention] in capd.toml hold. The newest run then stays, and so do runs that changed less
    than an hour ago. What has been in the trash for seven days is freed, too.

    With --only-uploaded, or only_uploaded in [retention], each run stays that is not wholly in the object store of its
    upload. With [upload] in capd.toml, the rules of [retention] include this.

    \b
    Examples:
      capd prune --keep-last 5 --keep-tag paper
      capd prune captures --keep-within 30d --max-size 2TB --yes
      capd prune captures --max-size 500GB --only-uploaded --yes

    \b
    Exit codes:
      2  no rule is given, or the rules would remove every run
      6  the runs that stay are larger than --max-size
    """
    from capd.config import load_daemon_settings, load_retention
    from capd.lifecycle.prune import plan_for

    root = root_of(store).absolute()
    policy = _policy(keep_last, keep_within, max_size, keep_tag, only_uploaded=only_uploaded)
    is_from_file = not policy
    if is_from_file:
        policy = load_retention(path=config).policy(load_daemon_settings({}, path=config))
        policy = replace(policy, only_uploaded=policy.only_uploaded or only_uploaded)
    planned = plan_for(root, policy, is_unattended=is_from_file)
    going = [one for one in planned if not one.verdict.keep]
    if not as_json:
        if planned:
            print_columns(_columns(planned), wide=wide)
        if going and not yes:
            yes = ask_for([one.facts.run_id for one in going], "run")
    failed: list[tuple[Path, Exception]] = []
    removed, freed = 0, 0
    if yes:
        again = partial(plan_for, root, policy, is_unattended=is_from_file)
        removed, freed = _carry_out(root, planned, again, lambda place, error: failed.append((place, error)))
    if as_json:
        print_json(_plain(planned, yes, failed, freed))
    for place, error in failed:
        say_failed(place, error)
    _say(root, planned, removed if yes else None, freed)
    raise typer.Exit(_code(policy, planned, failed))


def _policy(
    keep_last: int | None,
    keep_within: str | None,
    max_size: str | None,
    keep_tag: list[str] | None,
    *,
    only_uploaded: bool,
) -> Policy:
    from capd.lifecycle.policy import Policy, parse_age
    from capd_client.config.sizes import parse_size

    def parsed(option_: str, parse: Callable[[object], Any], text: str | None) -> Any:
        try:
            return None if text is None else parse(text)
        except ValueError as error:
            raise ConfigError(f"{option_}: {error}") from None

    within, size = parsed("--keep-within", parse_age, keep_within), parsed("--max-size", parse_size, max_size)
    return Policy(keep_last, within, size, tuple(keep_tag or ()), only_uploaded)


def _carry_out(
    root: Path,
    planned: list[Planned],
    again: Callable[[], list[Planned]],
    failed: Callable[[Path, Exception], None],
) -> tuple[int, int]:
    """Remove what the plan does not keep. Return the number of removed runs and the bytes that the trash freed.

    `again` makes the plan again: another command may have tagged or removed a run in the meantime.
    """
    from capd.lifecycle.checks import current_user
    from capd.lifecycle.house_lock import housekeeping
    from capd.lifecycle.prune import free_due, prune_now, still_going

    with housekeeping(root):
        # The trash first, because a removal needs some space itself.
        freed = sum(nbytes for _, nbytes in free_due(root, failed))
        going = still_going(planned, again())
        for one in planned:
            # One that is gone was removed by another command, as this plan wanted.
            if not one.verdict.keep and one not in going and one.facts.path.exists():
                failed(
                    one.facts.path, StoreError("it changed after the plan was made, and a rule keeps it now")
                )
        return sum(1 for _ in prune_now(root, going, current_user(), released, failed)), freed


def _columns(planned: list[Planned]) -> list[Column]:
    facts = [one.facts for one in planned]
    return [
        Column("", ["keep" if one.verdict.keep else "remove" for one in planned]),
        Column("run", [one.run_id for one in facts], is_name=True),
        Column("changed", [when_text(one.ended_s) for one in facts], spare=2),
        size_column(facts),
        Column("tags", [",".join(one.tags) or "-" for one in facts], spare=1),
        Column("reason", [one.verdict.reason for one in planned]),
    ]


def _say(root: Path, planned: list[Planned], removed: int | None, freed: int) -> None:
    going = [one.facts for one in planned if not one.verdict.keep]
    total = human_nbytes(sum(one.nbytes for one in going))
    if not going:
        note(f"every run in {root} stays")
    elif removed is None:
        note(f"nothing removed; --yes removes {human_count(len(going), 'run')}, {total}")
    else:
        note(f"{human_count(removed, 'run')} moved to the trash; `capd gc` frees it")
    if freed:
        note(f"{human_nbytes(freed)} freed that had been in the trash for seven days")


def _code(policy: Policy, planned: list[Planned], failed: list[tuple[Path, Exception]]) -> int:
    if failed:
        error = failed[0][1]
        return exit_code_of(error) if isinstance(error, CapdError) else 1
    staying = sum(one.facts.nbytes for one in planned if one.verdict.keep)
    if policy.max_nbytes is not None and staying > policy.max_nbytes:
        note(
            f"the runs that stay take {human_nbytes(staying)}, more than --max-size; unpin or untag some, or lower "
            "--keep-last"
        )
        return 6
    return 0


def _plain(
    planned: list[Planned], yes: bool, failed: list[tuple[Path, Exception]], freed: int
) -> dict[str, Any]:
    runs = [
        {**plain_run(one.facts), "keep": one.verdict.keep, "reason": one.verdict.reason} for one in planned
    ]
    return {"done": yes, "runs": runs, "failed": [str(place) for place, _ in failed], "freed_bytes": freed}
