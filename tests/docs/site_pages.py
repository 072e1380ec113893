"""The pages of the documentation site that lie outside docs/, and the links between all of them: a hook of mkdocs.

A page's links lead where they lead on GitHub: from its file to other files of the repository. The site has the Markdown
files of docs/, and those of OUTSIDE under other names. A link to any other file becomes its text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

__all__ = ["OUTSIDE", "followed"]

OUTSIDE = {
    "README.md": "index.md",
    "README.zh.md": "index.zh.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "examples/megatron/README.md": "megatron.md",
    "tests/track-record.md": "track-record.md",
}
"""Files of the repository, and the names of their pages."""

_REPOSITORY = Path(__file__).parents[2]
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?![a-z]+:|#)([^)#\s]+)(#[^)]*)?\)")
_ATTRIBUTE = re.compile(r'\b(src|srcset|href)="(?![a-z]+:|#)([^"]+)"')
_IMAGE = re.compile(r"!\[([^\]]*)\]\((?![a-z]+:)([^)\s]+)\)")


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages of OUTSIDE."""
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(_REPOSITORY / source)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Return the text of a page with the links of the site."""
    return followed(markdown, page.file.src_uri)


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    """Return the HTML of a page with its language, by which browsers choose Chinese glyphs."""
    return output.replace('<html lang="en"', '<html lang="zh"', 1) if ".zh." in page.file.src_uri else output


def followed(markdown: str, page: str) -> str:
    """Return Markdown whose links lead to pages of the site.

    Args:
        markdown: The text of a file of the repository.
        page: Its name in the site, such as "design/README.md".
    """
    source = next((source for source, name in OUTSIDE.items() if name == page), f"docs/{page}")

    def place(target: str) -> str | None:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        found = path.removeprefix("docs/") if path.startswith("docs/") else OUTSIDE.get(path)
        return found and posixpath.relpath(found, posixpath.dirname(page) or ".")

    def link(match: re.Match[str]) -> str:
        found = place(match[2])
        return f"[{match[1]}]({found}{match[3] or ''})" if found else match[1]

    markdown = _LINK.sub(link, markdown)
    markdown = _IMAGE.sub(lambda match: f"![{match[1]}]({place(match[2]) or match[2]})", markdown)
    return _ATTRIBUTE.sub(lambda match: f'{match[1]}="{place(match[2]) or match[2]}"', markdown)
