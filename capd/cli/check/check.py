"""`capd check`: each captured product against its own captured operands."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Annotated

import typer

from capd.cli.check.table import print_check
from capd.cli.completion import lists_of
from capd.cli.options import Json, Wide, grouped, option
from capd.cli.output import print_json
from capd.cli.products.calls import calls_in, is_logical, say_left_out
from capd.cli.progress import Progress
from capd.cli.sources import SourceOptions, Sources, found_in, one_thread_each
from capd.cli.stores import StoreArgument, default_store
from capd.errors import ConfigError, DamagedRecord, NothingMatched
from capd.replay.groups import FIELDS, checked_fields

if TYPE_CHECKING:
    from capd.check.checking import Checked

__all__ = ["check"]

_LIMIT = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*(?:eps)?")


@grouped
def check(
    store: StoreArgument = None,
    *,
    by: Annotated[
        str,
        option(
            "--by",
            "FIELDS",
            "Group by these, as layer,module; none: all calls together.",
            autocompletion=lists_of(*FIELDS),
        ),
    ] = "none",
    limit: Annotated[str, option("--limit", "N", "Largest error of a whole product.")] = "2eps",
    row_limit: Annotated[
        str, option("--row-limit", "N", "Largest error of a single row or column.")
    ] = "6eps",
    source: SourceOptions,
    wide: Wide = False,
    as_json: Json = False,
) -> None:
    """Check each captured product against its own captured operands.

    Y = X Wᵀ, dX = dY W, dW = dYᵀ X over the calls of a micro-batch, and attention O = softmax(Q Kᵀ · scale) V. No
    second run is needed, and the layout of the run does not matter: in a run of several ranks, operands and products
    are put together from the parts of all (docs/logical.md). --rank checks what one rank has alone.

    An error is given in eps, the unit roundoff of the dtype of the product: 2⁻⁸ in bfloat16. For a sum over ranks it
    grows as √ranks, and in float32 as √K. A product beyond a limit is named with its module, rank and iteration, its
    rows and columns, and the factor α that fits best: a gradient that is tp_size times too large is said to be that.
    Where terms cancel, they are the scale, not the small result. A bias, which is not captured, is fitted.

    Products without their operands, of fused layers, of slices, or of unknown masks are counted by reason. 128 MiB of
    tensors and copies are in memory at once, or one call if it is larger.
    The guide is docs/check.md.

    \b
    Examples:
      capd check captures
      capd check captures --by module --sample 10%
      capd check captures --layer 0 --json
      capd check captures --rank 1 --limit 4eps --row-limit 12eps

    \b
    Exit codes:
      1  a product is beyond a limit
      2  an unknown field or limit
      4  damaged records were skipped, the rest holds
      5  nothing matches, or no product can be compared
    """
    from capd.check.checking import Checked, check_calls
    from capd.check.document import check_document
    from capd.check.judging import ProductLimits
    from capd.check.units import units_of
    from capd.server.heap import settled_heap
    from capd.strict_json import strict_json

    fields = checked_fields(by)
    limits = ProductLimits(_limit_of("--limit", limit), _limit_of("--row-limit", row_limit))
    found = found_in(default_store() if store is None else store, source)
    checked, is_whole = Checked(), is_logical(found, source)
    calls = calls_in(found, source.keys.tests(), checked.skipped, is_whole=is_whole)
    units = units_of(calls, found.share)
    one_thread_each()
    with settled_heap(), Progress(len(units), "calls") as progress:
        for unit, outcome in check_calls(units, limits, found.threads):
            checked.add(unit, outcome)
            for one in outcome.skipped:
                progress.say(f"skipped {one.name}: {one.reason}")
            progress.add(unit.nbytes)
    _must_have_checked(found, checked)
    document = check_document(found.names[0], checked, limits, fields, is_whole=is_whole)
    if as_json:
        print_json(strict_json(document))
    else:
        print_check(document, wide=wide)
    say_left_out(checked.left_out, "not comparable")
    raise typer.Exit(1 if checked.beyond else (1 if found.files else 4) if checked.skipped else 0)


def _must_have_checked(found: Sources, checked: Checked) -> None:
    if checked.findings:
        return
    if checked.skipped and not checked.left_out:
        raise DamagedRecord(f"no product of {found.names[0]} could be read")
    reasons = "; ".join(checked.left_out) or "no product of a linear layer or of attention was captured"
    raise NothingMatched(f"nothing to check in {found.names[0]}: {reasons}")


def _limit_of(name: str, text: str) -> float:
    match = _LIMIT.fullmatch(text.strip())
    value = float(match[1]) if match else math.nan
    if not value > 0:
        raise ConfigError(f"{name} {text!r:.40} is no number of eps; write 2eps or 6")
    return value
