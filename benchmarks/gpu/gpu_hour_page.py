"""The page of the first hour with a GPU: verdicts of all steps, then the output of each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.gpu_hour_steps import Step

__all__ = ["page"]

Row = dict[str, Any]
_TITLES = {
    "fact-machine": "The machine", "fact-lock": "Page-locking", "fact-border": "Copies over a border of page locks",
    "fact-link": "The link", "fact-loading": "First launches", "fact-rows": "Rows of statistics",
    "constants": "Constants of the model", "correctness": "Bits", "compile": "Compiled, graphed and wrapped",
}  # fmt: skip


def page(steps: Sequence[Step], results: dict[str, Row], stopped: str | None) -> str:
    """Return Markdown for docs/measurements.md. `stopped` is the reason why the hour ended early, if it did."""
    lines = ["# First hour with a GPU", "", _sentence(steps, results), ""]
    if stopped:
        lines += [f"**Stopped**: {stopped}.", ""]
    lines += [
        "## Verdicts",
        "",
        "| step | figure | value | must | stretch | verdict |",
        "|---|---|---|---|---|---|",
    ]
    for step in steps:
        lines += _verdicts(step.name, results.get(step.name))
    for step in steps:
        result = results.get(step.name)
        if result is not None and result["shown"].strip():
            title = _TITLES.get(step.name, step.name.replace("numbers-", "Numbers: "))
            lines += ["", f"## {title}", "", result["shown"].strip()]
    return "\n".join(lines) + "\n"


def _sentence(steps: Sequence[Step], results: dict[str, Row]) -> str:
    facts = results.get("fact-machine", {}).get("found", {}).get("machine", {})
    where = ", ".join(
        f"{name} {facts[name]}" if name != "GPU" else str(facts[name])
        for name in ("GPU", "Driver Version", "torch", "Triton", "kernel", "Python")
        if name in facts
    )
    seconds = sum(result["seconds"] for result in results.values())
    done = sum(step.name in results for step in steps)
    return f"{where or 'Machine unknown'}. {done} of {len(steps)} steps, {seconds / 60:.1f} minutes."


def _verdicts(name: str, result: Row | None) -> list[str]:
    if result is None:
        return [f"| {name} | | | | | not run |"]
    if result["problem"]:
        reason = result["problem"].strip().splitlines()[-1].replace("|", "\\|")
        return [f"| {name} | | | | | FAILED: {reason[:200]} |"]
    lines = []
    for check in result["found"].get("checks", []):
        sign = "≤" if check["at_most"] else "≥"
        stretch = "" if check["stretch"] is None else f"{sign} {check['stretch']:g}"
        lines.append(
            f"| {name} | {check['what']} | {check['value']:.3g} | {sign} {check['must']:g} | {stretch} "
            f"| {check['verdict']} |"
        )
    return lines or [f"| {name} | | | | | done |"]
