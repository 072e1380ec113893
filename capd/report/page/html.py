"""The report as one HTML file: it contains data, scripts and style, and a policy that forbids everything else."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import posixpath
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from capd.report.document import MARK

__all__ = ["page_html"]

_ASSETS = files("capd.report") / "assets"
_ENTRY = "main"
_IMPORT = re.compile(r'^import \{([^}]*)\} from "([./\w]+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:const|function) (\w+))", re.MULTILINE)

_PAGE = """<!doctype html>
<html lang="en" data-theme="auto">
<head>
<meta charset="utf-8">
<meta name="generator" content="{mark}">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<a class="skip" href="#">Skip to the content</a>
<header></header>
<main tabindex="-1"></main>
<noscript>This report draws itself: allow scripts for this file. It loads nothing from anywhere.
这份报告由脚本绘制：请允许此文件运行脚本。它不从任何地方加载内容。</noscript>
<!-- {licence} -->
<script type="application/json" id="data">{data}</script>
<script>{chart}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def page_html(data: Mapping[str, Any]) -> bytes:
    """Return the file of the result of `page_data`. Its first 512 bytes contain the report's mark.

    Names in the data are only ever text: they are JSON without a `<`, and scripts put them into text nodes. The policy
    allows exactly these scripts and this style, and no request.
    """
    style = _asset("charts/uPlot.min.css") + _asset("page.css")
    chart, script = _asset("charts/uPlot.iife.min.js"), _linked()
    return _PAGE.format(
        mark=MARK,
        policy=_policy([chart, script], style),
        title=html.escape(f"{data['title']} · {MARK}"),
        style=style,
        licence=f"uPlot 1.6.32:\n{_asset('charts/uPlot.LICENSE')}",
        data=_embedded(data),
        chart=chart,
        script=script,
    ).encode(errors="replace")


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _policy(scripts: list[str], style: str) -> str:
    allowed = " ".join(_hash(script) for script in scripts)
    return (
        f"default-src 'none'; script-src {allowed}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _embedded(data: Mapping[str, Any]) -> str:
    """Return strict JSON in which no HTML parser sees an end, a comment or a script."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _linked() -> str:
    """Join the entry's module and all its imports to one script, because a single file cannot import modules.

    Each module becomes a function that runs once and returns the module's exports. A module has the name of its file
    within the assets, without the suffix.
    """
    parts: dict[str, str] = {}

    def link(name: str) -> None:
        source = _asset(f"{name}.js")
        for _, address in _IMPORT.findall(source):
            other = _imported(name, address)
            if other not in parts:
                link(other)
        body = _IMPORT.sub(
            lambda found: f"const {{{found[1]}}} = {_called(_imported(name, found[2]))};\n", source
        )
        exported = ", ".join(_EXPORT.findall(body))
        parts[name] = (
            f"const {_called(name)} = (() => {{\n{_EXPORT.sub('', body)}return {{ {exported} }};\n}})();\n"
        )

    link(_ENTRY)
    return "".join(parts.values())


def _imported(by: str, address: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(by), address))


def _called(name: str) -> str:
    return "module_" + name.replace("/", "_")
