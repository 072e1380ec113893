"""`capd replay`: the products of captured linear layers, computed again under named recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from capd.cli.completion import lists_of, recipe_lists
from capd.cli.figure_files import check_name, refuse_existing
from capd.cli.options import Json, Wide, flag, grouped, option
from capd.cli.output import print_json
from capd.cli.sources import SourceOptions, found_in
from capd.cli.stores import StoreArgument, default_store
from capd.replay.groups import FIELDS, checked_fields

__all__ = ["replay"]


@grouped
def replay(
    store: StoreArgument = None,
    *,
    recipe: Annotated[
        str,
        option(
            "--recipe",
            "LIST",
            "Recipes, as nvfp4-te,mxfp8-nvidia,hifp8,FILE.toml; none is the product itself.",
            show_default=False,
            autocompletion=recipe_lists,
        ),
    ],
    product: Annotated[
        str,
        option("--product", "LIST", "Products, of y, dx and dw.", autocompletion=lists_of("y", "dx", "dw")),
    ] = "y,dx,dw",
    by: Annotated[
        str,
        option(
            "--by",
            "FIELDS",
            "Group by these, as layer,module; none: all calls together.",
            autocompletion=lists_of(*FIELDS),
        ),
    ] = "none",
    draws: Annotated[
        int, option("--draws", "N", "Draws of products that are rounded at random.", min=1, max=4096)
    ] = 1,
    seed: Annotated[int, option("--seed", "N", "Seed of the first draw.", min=0, max=2**31 - 1)] = 0,
    rows: Annotated[
        int, option("--rows", "N", "Most tokens of a call, evenly taken in whole blocks of 128.", min=128)
    ] = 4096,
    blame: Annotated[bool, flag("--blame", "Also attribute each error to the operands.")] = False,
    per_rank: Annotated[
        bool, flag("--per-rank", "Replay each rank's own operands, not those that all ranks have together.")
    ] = False,
    source: SourceOptions,
    out: Annotated[
        Path | None,
        option("--out", "FILE", "Write a figure, x.png, x.svg or x.pdf, or the JSON, x.json.", "-o"),
    ] = None,
    force: Annotated[bool, flag("--force", "Replace FILE.")] = False,
    wide: Wide = False,
    as_json: Json = False,
) -> None:
    """Compute the products of captured linear layers again, as recipes of quantised training would.

    From the captured X, W and dY of each call come Y = X Wᵀ, dX = dY W and dW = dYᵀ X: once from the captured operands
    in float64 (float32 above 2³¹ multiplications), and once in each recipe. The table has the error of each
    product: SQNR, ζ = ‖Ĝ - G‖ / ‖G‖, cosine, the alignment ⟨Ĝ, G⟩ / ‖G‖², and the worst row. No training run is
    needed. --blame says how much of the error each operand alone makes. --draws averages products that are rounded at
    random: noise falls by 10 log10(N) dB, a bias stays.

    A recipe is a preset, a format of docs/formats.md, none, or a TOML file (docs/recipes.md). Where the job itself was
    emulated by one of the recipes, or by none, its captured products are compared bit by bit.

    In a run of several ranks, the operands are put together from the parts of all (docs/logical.md). --per-rank, or
    --rank, takes each rank's own: under tensor parallelism, a rank sums over a part, and its blocks end there. Calls
    whose operands are missing, fused, sliced or not of high precision are counted by reason on stderr. One call is in
    memory at a time. One of 4096 x 4096 x 4096 takes 384 MiB besides. The guide is docs/replay.md.

    \b
    Examples:
      capd replay captures --recipe nvfp4-te,mxfp8-nvidia
      capd replay captures --recipe mxfp4-rht-sr --draws 16 --product dx,dw
      capd replay captures --recipe nvfp4-te --blame --by layer,module
      capd replay captures --recipe mxfp8,hifp8 --sample 10% -o replay.png

    \b
    Exit codes:
      1  bad .pt files were skipped, the rest was replayed; or FILE exists
      2  an unknown recipe, product or field
      4  damaged records were skipped, the rest was replayed
      5  nothing matches, or no call can be replayed
    """
    from capd.cli.products.calls import is_logical, say_left_out
    from capd.cli.products.replayed import recipes_of, replayed_of
    from capd.cli.replay.table import print_replay
    from capd.replay.document import replay_document
    from capd.replay.request import ReplayRequest, checked_products, checked_rows
    from capd.strict_json import strict_json

    fields = checked_fields(by)
    recipes, products, most_rows = recipes_of(recipe), checked_products(product), checked_rows(rows)
    if out is not None:
        check_name(out, "json")
        if not force:
            refuse_existing([out])
    found = found_in(default_store() if store is None else store, source)
    whole = not per_rank and is_logical(found, source)
    request = ReplayRequest(recipes, products, draws, seed, most_rows, blame=blame, is_logical=whole)
    replayed = replayed_of(found, request, fields, source.keys.tests())
    document: dict[str, Any] = replay_document(found.names, request, replayed, fields)
    if out is not None:
        _write(out, document, force=force)
    if as_json:
        print_json(strict_json(document))
    else:
        print_replay(document, wide=wide)
    say_left_out(replayed.left_out, "not replayed")
    raise typer.Exit((1 if found.files else 4) if replayed.skipped else 0)


def _write(out: Path, document: dict[str, Any], *, force: bool) -> None:
    from capd.report.document import json_text
    from capd.report.figures.style import Look
    from capd.report.image_files import write_single
    from capd.report.replay.figure import replay_page

    kind = out.suffix[1:].lower()
    payload = json_text(document).encode() if kind == "json" else replay_page(document).image(kind, Look())
    write_single(out, payload, replace=force)
