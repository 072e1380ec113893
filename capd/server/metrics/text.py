"""The text formats of Prometheus: 0.0.4, which every version reads, and OpenMetrics 1.0."""

from __future__ import annotations

from collections.abc import Iterable

from capd.server.metrics.families import Family, Labels

__all__ = ["OPENMETRICS", "TEXT", "render"]

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

# The longest label value, in characters.
_MAX_LABEL = 128


def render(families: Iterable[Family], *, openmetrics: bool) -> bytes:
    """Return a page. In OpenMetrics, the name of a counter's family lacks `_total`, and the page ends with `# EOF`."""
    lines: list[str] = []
    for family in families:
        if not family.samples:
            continue
        name = family.name.removesuffix("_total") if openmetrics else family.name
        lines.append(f"# HELP {name} {family.text}")
        lines.append(f"# TYPE {name} {family.kind}")
        lines += [
            f"{family.name}{suffix}{_labels(labels)} {_number(value)}"
            for value, labels, suffix in family.samples
        ]
    if openmetrics:
        lines.append("# EOF")
    return "".join(f"{line}\n" for line in lines).encode()


def _labels(labels: Labels) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}" if labels else ""


def _escaped(value: str) -> str:
    value = value[:_MAX_LABEL]
    if value.isascii() and value.isprintable() and '"' not in value and "\\" not in value:
        return value
    # Control characters could steer the terminal of a reader; lone surrogates are not UTF-8.
    shown = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in value)
    return shown.replace("\\", "\\\\").replace('"', '\\"')


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(float(value))
