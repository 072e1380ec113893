"""The cost of a replay: the three products of a recipe, against the same products in plain float32.

    python benchmarks/products/replay.py [--rounds N] [--quick] [--memory] [--json FILE]

The operands are bfloat16. The figures are the process's CPU time, medians over interleaved rounds, and its ratio to the
three float32 products X Wᵀ, dY W and dYᵀ X of the same round. `reference` is the product of the captured operands, once
for all recipes. --memory measures the peak of a replay of 4096 x 4096 x 4096, in a process of its own: what it takes
besides one of the captured operands.

must: 2.5 x at 1024³ and 1.5 x at 4096³ for each recipe; 384 MiB besides one captured operand.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.store.store_runner import MIB, Row, child, options, report, table, verdict

RECIPES = (
    "nvfp4-te", "mxfp4-rht-sr", "quartet", "quartet2", "tetrajet2", "deepseek-v3", "fp8-block-te", "fp4-all-the-way",
    "mxfp8-nvidia", "hifp8", "hif4",
)  # fmt: skip
MOST_AT_1024, MOST_AT_4096 = 2.5, 1.5
MOST_MIB = 384
STOCHASTIC = '{"linear": {"format": "mxfp4", "rounding": "stochastic"}}'
# The recipe, the draws, and whether errors are attributed to operands.
MEMORY = (
    *((recipe, 1, False) for recipe in ("nvfp4", *RECIPES)), (STOCHASTIC, 4, False), ("mxfp4-rht-sr", 3, False),
    ("nvfp4", 1, True), ("nvfp4-te", 1, True), ("nvfp4-te", 3, True), ("quartet", 3, True), ("quartet2", 3, True),
)  # fmt: skip


def operands_of(size: int) -> Any:
    from capd.replay.operands import Taken

    generator = torch.Generator().manual_seed(1)
    scales = {"x": 1.0, "w": 0.02, "g": 1e-4}
    # One hot channel, and rows of gradients of very different sizes, as in training.
    found = {
        name: torch.randn(size, size, generator=generator).mul_(scale).to(torch.bfloat16)
        for name, scale in scales.items()
    }
    found["x"][:, size // 3] *= 30
    found["g"] *= torch.randn(size, 1, generator=generator).exp().to(torch.bfloat16)
    return Taken(found, None, (size,))


def ways_of(size: int, recipes: Sequence[str]) -> dict[str, Callable[[], Any]]:
    """Return what is measured, by name."""
    from capd.replay.exact_product import exact_product
    from capd.replay.recipes import ReplayRecipe
    from capd.replay.replaying import replay_recipe
    from capd.replay.request import ReplayRequest

    taken = operands_of(size)
    operands = taken.operands
    x, w, g = (operands[name].float() for name in "xwg")
    products = ("y", "dx", "dw")
    exact = {product: exact_product(*ReplayRecipe.plain(product, operands)) for product in products}

    def plain() -> None:
        for a, b in ((x, w.t()), (g, w), (g.t(), x)):
            torch.mm(a, b)

    def reference() -> None:
        for product in products:
            exact_product(*ReplayRecipe.plain(product, operands))

    def replayed(name: str) -> Callable[[], None]:
        request = ReplayRequest([ReplayRecipe.of(name)])

        def run() -> None:
            for product in products:
                replay_recipe(request.recipes[0], taken, product, exact[product], request)

        return run

    return {"plain": plain, "reference": reference, **{name: replayed(name) for name in recipes}}


def measure(size: int, recipes: Sequence[str], rounds: int) -> tuple[list[Row], list[Row]]:
    """Return the rows and the checks of a size."""
    from capd.server.heap import settled_heap

    ways = ways_of(size, recipes)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    # The command sets up its heap in this way.
    with settled_heap():
        for turn in range(rounds + 1):
            for name, way in ways.items():
                started = time.process_time()
                way()
                if turn or rounds == 0:
                    seconds[name].append(time.process_time() - started)
    rows, checks = [], []
    for name, found in seconds.items():
        ratio = statistics.median(one / plain for one, plain in zip(found, seconds["plain"], strict=True))
        rows.append({"size": size, "what": name, "cpu s": statistics.median(found), "of plain": ratio})
        if name in recipes:
            most = MOST_AT_1024 if size <= 1024 else MOST_AT_4096
            checks.append(verdict(f"{name} at {size}³, of plain", ratio, most, at_most=True))
    return rows, checks


def peak(size: int, recipes: Sequence[str], draws: int, blame: bool) -> Row:
    """Return the MiB that a replay takes besides the captured operands. Runs in a process of its own."""
    import resource

    from capd.replay.recipes import ReplayRecipe
    from capd.replay.replaying import replay_product
    from capd.replay.request import ReplayRequest
    from capd.server.heap import settle_heap

    torch.set_num_threads(1)
    settle_heap()
    # What the first products and formats load is not of the call.
    for product in ("y", "dx", "dw"):
        warm = ReplayRequest([ReplayRecipe.of(name) for name in recipes], draws=2, blame=True)
        replay_product(operands_of(128), product, warm.recipes, warm)
    taken = operands_of(size)
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    Path("/proc/self/clear_refs").write_text("5")
    request = ReplayRequest([ReplayRecipe.of(name) for name in recipes], draws=draws, blame=blame)
    for product in ("y", "dx", "dw"):
        replay_product(taken, product, request.recipes, request)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    largest = int(status["VmHWM"].split()[0]) * 1024
    # All operands are loaded; one of them is the record that the limit does not count.
    operand = taken.operands["x"].nbytes
    return {"mib": (largest - before + 2 * operand) / MIB}


def main() -> None:
    parser = options(__doc__, rounds=7)
    parser.add_argument("--memory", action="store_true", help="measure the memory alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    checks: list[Row] = []
    if not args.memory:
        sizes = {64: RECIPES} if args.quick else {1024: RECIPES, 4096: RECIPES}
        for size, recipes in sizes.items():
            more, verdicts = measure(size, recipes, args.rounds if size < 4096 else max(1, args.rounds // 3))
            rows += more
            checks += verdicts
        table(list(rows[0]), [list(row.values()) for row in rows])
    if args.memory or not args.quick:
        size = 256 if args.quick else 4096
        for recipe, draws, blame in MEMORY:
            found = child(
                "benchmarks.products.replay:peak", size=size, recipes=[recipe], draws=draws, blame=blame
            )
            what = f"{recipe}{f', {draws} draws' if draws > 1 else ''}{', blame' if blame else ''}"
            rows.append({"size": size, "what": what, "MiB": found["mib"]})
            checks.append(verdict(f"MiB beside an operand, {what}", found["mib"], MOST_MIB, at_most=True))
    report({"rounds": args.rounds, "rows": rows, "checks": checks}, args.json)


if __name__ == "__main__":
    main()
