"""The tables of the GPU's figures in Markdown, and a verdict on each figure that has a bound."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["DROP", "SHOWN", "Check", "judged", "markdown", "size_text"]

KIB, MIB = 1 << 10, 1 << 20
Row = dict[str, Any]

# The variant of a step that drops captures without room.
DROP = "drop"
# Each bound: must, stretch.
CALL_US, OF_LINK, STEP, REMAINS = (40.0, 28.0), (0.85, 0.95), (1.02, 1.01), (0.85, 0.95)


@dataclass
class Check:
    """A figure and its bounds. `at_most`: the bounds are the most that it may be, not the least."""

    what: str
    value: float
    must: float
    stretch: float | None = None
    at_most: bool = True

    def meets(self, bound: float) -> bool:
        """Whether the figure meets a bound."""
        return self.value <= bound if self.at_most else self.value >= bound

    @property
    def verdict(self) -> str:
        """The verdict: MISSED, met, or stretch met."""
        if not self.meets(self.must):
            return "MISSED"
        return "stretch met" if self.stretch is not None and self.meets(self.stretch) else "met"


def judged(checks: Sequence[Check]) -> list[Row]:
    """Print every verdict as a table. Returns the same as rows for a report."""
    sign = {True: "≤", False: "≥"}
    markdown(
        ["figure", "value", "must", "stretch", "verdict"],
        [
            [
                check.what,
                check.value,
                f"{sign[check.at_most]} {check.must:g}",
                "" if check.stretch is None else f"{sign[check.at_most]} {check.stretch:g}",
                check.verdict,
            ]
            for check in checks
        ],
    )
    return [{**asdict(check), "verdict": check.verdict} for check in checks]


def markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table in Markdown. Numbers have three significant digits."""
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        print(
            "| " + " | ".join(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row) + " |"
        )
    print()


def size_text(nbytes: int) -> str:
    """Return a size as text, such as 4 KiB or 64 MiB."""
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


def _calls(found: dict[str, Row]) -> Iterator[Check]:
    print('**Host time of `capture()`**, p50 in µs, under `set_sync_debug_mode("error")`:\n')
    fields = ("plain us", "alone us", "in a row us", "in a row p99 us")
    markdown(
        ["mode", "size", "plain copy on the device", "alone", "in a row", "in a row, p99"],
        [
            [mode, size_text(row["size"]), *(row[field] for field in fields)]
            for mode, calls in found.items()
            for row in calls["rows"]
        ],
    )
    parts = sorted({part for calls in found.values() for part in calls["parts"]})
    print("**Of these, by part**, µs a call under cProfile, which makes Python itself about twice as slow:\n")
    markdown(
        ["mode", *parts],
        [[mode, *(calls["parts"].get(part, 0.0) for part in parts)] for mode, calls in found.items()],
    )
    for row in found["tensor"]["rows"]:
        for kind in ("alone", "in a row"):
            yield Check(f"capture() of {size_text(row['size'])} {kind}, µs", row[f"{kind} us"], *CALL_US)


def _transfer(found: dict[str, dict[str, list[Row]]]) -> Iterator[Check]:
    print("**Device to host**, GB/s, medians:\n")
    rows = []
    for beside, by_size in found.items():
        for size, each in by_size.items():
            plain, capd = (
                statistics.median(row[f"{kind} GB/s"] for row in each) for kind in ("plain", "capd")
            )
            ratio = statistics.median(row["capd GB/s"] / row["plain GB/s"] for row in each)
            rows.append((size_text(int(size)), beside, plain, capd, ratio))
    markdown(["captures of", "beside", "plain pinned copy", "capd", "ratio"], rows)
    for size, beside, _, _, ratio in rows:
        yield Check(f"captures of {size} beside {beside}, of the link", ratio, *OF_LINK, at_most=False)


def _step(found: dict[str, Row]) -> Iterator[Check]:
    print("**A training step** (24 Linears 4096 wide, 8,192 rows, bf16; Y and dY captured):\n")
    names = ("of link", "none ms", "capd ms", "ratio", "dropped")
    markdown(
        ["variant", "captured per step", "of the link", "none, ms", "capd, ms", "ratio", "drops"],
        [
            [variant, f"{row['nbytes'] / 1e6:.0f} MB", *(row[name] for name in names)]
            for variant, row in found.items()
        ],
    )
    for variant, row in found.items():
        # Under policy drop the host's lead must fit into the ring, so the figure has no bound.
        if variant == DROP:
            continue
        yield Check(f"step time of {variant}, of no capture", row["ratio"], *STEP)
        yield Check(f"bytes of the step of {variant}, of the link's", row["of link"], 0.5)
        yield Check(f"drops of {variant}", row["dropped"], 0)
        yield Check(f"captures of {variant} committed", row["captured"], row["expected"], at_most=False)


def _host_bound(found: list[Row]) -> Iterator[Check]:
    print("**A step that its host bounds** (Y and dY of 500 small Linears captured, policy block):\n")
    names = ("captures", "none ms", "capd ms", "us a capture", "of link", "dropped")
    markdown(
        ["captures of", "captures", "none, ms", "capd, ms", "µs a capture", "of the link", "drops"],
        [[size_text(row["size"]), *(row[name] for name in names)] for row in found],
    )
    for row in found:
        yield Check(f"drops of {size_text(row['size'])}, host-bound", row["dropped"], 0)
        # Above this share the step waits for the link.
        if row["of link"] <= 0.5:
            yield Check(
                f"added by a capture of {size_text(row['size'])}, host-bound, µs",
                row["us a capture"],
                *CALL_US,
            )


def _memory(found: Row) -> Iterator[Check]:
    print(f"**Device memory**: the ring of {found['ring MiB']:.0f} MiB, then {found['captures']} captures.\n")
    yield Check("growth of device memory over the captures, bytes", found["growth"], 0)


def _small(found: Row) -> Iterator[Check]:
    print("**4 KiB captures**:\n")
    names = ("captures", "calls per s", "home per s", "copies")
    markdown(["captures", "calls per s", "in the arena per s", "copies"], [[found[name] for name in names]])
    yield Check("drops of 4 KiB captures", sum(found["dropped"].values()), 0)


def _rows(found: list[Row]) -> Iterator[Check]:
    print("**Statistics of one bf16 tensor on the device**, µs:\n")
    markdown(
        ["size", "by", "host, for the call", "until it is done"],
        [[size_text(row["size"]), row["way"], row["call us"], row["done us"]] for row in found],
    )
    for row in found:
        if row["way"] == "Triton kernel":
            size = size_text(row["size"])
            yield Check(f"host time of a statistics row of {size}, µs", row["call us"], 40, 20)
            if row["size"] >= 64 * MIB:
                yield Check(f"device time of a statistics row of {size}, µs", row["done us"], 300, 80)


def _interference(found: list[Row]) -> Iterator[Check]:
    print("**Another's copy of 4 bytes to the host**, µs, while captures keep the link busy:\n")
    names = ("piece", "ahead", "p50 us", "p90 us", "max us", "GB/s")
    markdown(
        ["beside", "piece, MiB", "under way, MiB", "p50", "p90", "max", "captures, GB/s"],
        [[row["beside"], *(row[name] for name in names)] for row in found],
    )
    link = max(row["GB/s"] for row in found) * 1e9
    for row in found:
        if row["beside"] == "captures":
            # The copies that may be queued before it.
            queued_us = (row["ahead"] + row["piece"]) * MIB / link * 1e6
            yield Check(
                "another's copy of 4 bytes beside captures, p50, µs", row["p50 us"], 1.3 * queued_us, 400
            )


def _constants(found: dict[str, float]) -> Iterator[Check]:
    print("**What the model of the device needs** (`benchmarks/model/device_model.py`):\n")
    markdown(["constant", "value"], [[name, value] for name, value in found.items()])
    yield from ()


SHOWN: dict[str, Callable[[Any], Iterator[Check]]] = {
    "constants": _constants, "calls": _calls, "transfer": _transfer, "step": _step, "host-bound": _host_bound,
    "memory": _memory, "small": _small, "rows": _rows, "interference": _interference,
}  # fmt: skip
