"""The language that the page begins with."""

from __future__ import annotations

import pytest

from capd.web.application import language_of


@pytest.mark.parametrize(
    ("wanted", "accepted", "language"),
    [
        (None, "", "en"),
        (None, "zh-CN,zh;q=0.9,en;q=0.8", "zh"),
        (None, "de-DE,en;q=0.5,zh;q=0.4", "en"),
        (None, "en;q=0.1, zh", "zh"),
        (None, "zh;q=0, fr", "en"),
        (None, "zh;q=..,;;,=q", "en"),
        ("zh", "en", "zh"),
        ("en", "zh", "en"),
        ("fr", "zh", "zh"),
    ],
)
def test_an_address_says_the_language_or_the_browser_does(
    wanted: str | None, accepted: str, language: str
) -> None:
    assert language_of(wanted, accepted) == language
