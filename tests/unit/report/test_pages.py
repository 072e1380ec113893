"""Every page, of few and of many layers, of odd names and odd values: titled, labelled, no text on another."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, combinations, product
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from capd.analyze.format_choice import DEFAULT_CHOICES
from capd.analyze.groups import Groups
from capd.io.items import Item, Loaded
from capd.report.figures.pages import all_pages
from capd.report.gather import GatheredRecords, gather
from capd.store.format.statistics import public, summarise
from capd_client.protocol.key import Key, Moment
from tests.kit.tiers import rows

RNG = np.random.default_rng(4)
ODD = ("$\\frac{1}{", "_hidden", "line\nbreak", "名字", "", "x" * 500)


def item(key: Key, values: np.ndarray, sample: int | None, iteration: int = 0) -> Item:
    dtype = values.dtype.name
    stats = public(summarise(values, dtype))
    loaded = Loaded(
        key, Moment(iteration=iteration, sample_idx=sample), dtype, values.nbytes, stats, lambda: values
    )
    return Item("name", values.nbytes, lambda: loaded)


def groups_of(items: Iterator[Item], *, quick: bool = False, formats: bool = False) -> Groups:
    gathered = GatheredRecords()
    asked = {"choices": DEFAULT_CHOICES, "channels": True} if formats else {}
    seen = list(gather(items, gathered, threads=1, quick=quick, **asked))  # type: ignore[arg-type]
    assert len(seen) == gathered.groups.whole().records
    return gathered.groups


def many(layers: int, types: tuple[str, ...], ranks: int, samples: int | None) -> Iterator[Item]:
    places = product(types, range(ranks), (None, *range(layers)), range(samples) if samples else (None,))
    for one, rank, layer, sample in places:
        for name in ("query", "grad_output"):
            values = (RNG.normal(size=16) * (1 + (layer or 0))).astype(np.float32)
            yield item(Key(quant_type=one, rank=rank, layer=layer, tensor_name=name), values, sample)


def odd() -> Iterator[Item]:
    values = (np.full(4, np.nan), np.empty(0), np.zeros(3), np.array([-3e38, 3e38]))
    for (i, one), (j, name) in product(enumerate(ODD[::2]), enumerate(ODD)):
        numbers = values[(i + j) % 4].astype(np.float32)
        yield item(Key(quant_type=one, rank=0, layer=None, tensor_name=name), numbers, None)


def huge() -> Iterator[Item]:
    """float64 beyond float32: no format reaches it."""
    for layer in range(3):
        key = Key(quant_type="fp64", rank=0, layer=layer, tensor_name="x")
        for iteration in range(2):
            yield item(key, RNG.normal(size=(4, 8)) * 1e300, None, iteration)


CASES = {
    "one layer": lambda: groups_of(many(1, ("bf16",), 1, None), formats=True),
    "64 layers": lambda: groups_of(many(64, ("bf16", "hifp8"), 2, 2), formats=True),
    "many samples and ranks": lambda: groups_of(
        chain(many(1, ("bf16",), 1, 60), many(1, ("bf16",), 40, None))
    ),
    "quick": lambda: groups_of(many(2, ("bf16",), 1, 2), quick=True),
    "odd": lambda: groups_of(odd()),
    "huge": lambda: groups_of(huge(), formats=True),
    "odd, with formats": lambda: groups_of(odd(), formats=True),
}


SLOW = {"one layer", "odd", "huge", "64 layers", "many samples and ranks", "odd, with formats"}


@pytest.mark.parametrize("case", rows(CASES, CASES.keys() - SLOW))
@pytest.mark.timeout(240)
def test_every_page_is_labelled_and_no_text_lies_on_another(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    for page in all_pages(CASES[case]()):
        inner = page.figure

        def keep(inner: Any = inner) -> Figure:
            drawn.append(inner())
            return drawn[-1]

        assert type(page)(page.name, keep).png().startswith(b"\x89PNG")
        assert_readable(page.name, drawn.pop())


def test_what_is_infinite_is_said_to_be_not_finite_and_a_narrow_range_has_more_than_one_tick() -> None:
    pages = {page.name: page.figure() for page in all_pages(groups_of(huge(), formats=True))}
    for name in ("statistics_by_layer.png", "statistics_by_iteration.png"):
        [std] = [axes for axes in pages[name].axes if axes.get_title() == "x: std"]
        assert [text.get_text() for text in std.texts] == ["no finite value"], name
    [ranks] = [axes for axes in pages["channels.png"].axes if axes.get_title() == "x: channels by rank"]
    low, high = ranks.get_ylim()
    assert ranks.get_yscale() == "log"
    assert sum(low <= tick <= high for tick in ranks.get_yticks()) >= 3


def assert_readable(name: str, figure: Figure) -> None:
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    assert figure.get_suptitle(), name
    titles = []
    for axes in figure.axes:
        colour_bar = axes.get_label() == "<colorbar>"
        assert colour_bar or (axes.get_xlabel() and (axes.get_ylabel() or "quant_types" in name)), name
        for boxes in (tick_boxes(axes, "x", renderer), tick_boxes(axes, "y", renderer)):
            for one, other in combinations(boxes, 2):
                assert not one.overlaps(other), (name, axes.get_title())
        if axes.get_title():
            titles.append(axes.title.get_window_extent(renderer))
    boxes = [*titles, figure._suptitle.get_window_extent(renderer)]  # type: ignore[attr-defined]
    boxes += [legend.get_window_extent(renderer) for legend in figure.legends]
    for one, other in combinations(boxes, 2):
        assert not one.overlaps(other), name
    for box in boxes:
        assert box.x0 >= 0, name
        assert box.x1 <= figure.bbox.x1, name


def tick_boxes(axes: Axes, which: str, renderer: Any) -> list[Any]:
    """Of the labels that are shown."""
    axis, (low, high) = (
        (axes.xaxis, sorted(axes.get_xlim())) if which == "x" else (axes.yaxis, sorted(axes.get_ylim()))
    )
    ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    labels = [
        label
        for tick in ticks
        for label in (tick.label1, tick.label2)
        if label.get_visible() and label.get_text()
    ]
    return [label.get_window_extent(renderer) for label in labels]
