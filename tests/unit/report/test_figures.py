"""What the figures draw, read back from their axes, against numpy on the values that went in; and how they can look."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from capd.analyze.format_choice import choices
from capd.analyze.grids import grids
from capd.formats import qdq
from capd.io.items import Item, Loaded
from capd.report.figures.kinds import KINDS, Wanted, grids_of
from capd.report.figures.style import Look, Page
from capd.report.gather import GatheredRecords, gather
from capd.store.format.statistics import public, summarise
from capd_client.protocol.key import Key, Moment
from tests.kit.tiers import rows

FORMATS = choices("mxfp8,hifp8")
TYPES, LAYERS, ITERATIONS, TENSORS = ("bf16", "hifp8"), (0, 1, 2), (0, 7), ("input", "weight")
Values = dict[tuple[str, int, int, str], np.ndarray]


def values_of() -> Values:
    rng, found = np.random.default_rng(8), {}
    for one, layer, iteration, tensor in product(TYPES, LAYERS, ITERATIONS, TENSORS):
        scale = (1 + layer) * (1 if tensor == "input" else 2.0**-9)
        values = rng.normal(scale=scale, size=(16, 64)).astype(np.float32)
        values[:, 5] *= 30
        bits = values.view(np.uint32) >> 16 << 16
        found[one, layer, iteration, tensor] = bits.view(np.float32)
    return found


VALUES = values_of()


def item(key: Key, values: np.ndarray, iteration: int) -> Item:
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    stats = public(summarise(bits, "bfloat16"))
    moment = Moment(iteration=iteration, sample_idx=iteration)
    loaded = Loaded(key, moment, "bfloat16", bits.nbytes, stats, lambda: bits)
    return Item("name", bits.nbytes, lambda: loaded)


def items() -> Iterator[Item]:
    for (one, layer, iteration, tensor), values in VALUES.items():
        yield item(Key(quant_type=one, rank=0, layer=layer, tensor_name=tensor), values, iteration)


@pytest.fixture(scope="module")
def gathered() -> GatheredRecords:
    found = GatheredRecords()
    assert all(
        isinstance(one, int) for one in gather(items(), found, threads=1, choices=FORMATS, channels=True)
    )
    return found


def pages_of(gathered: GatheredRecords, kind: str, **wanted: Any) -> list[Page]:
    return list(KINDS[kind].pages(gathered.groups, Wanted(**wanted)))


def drawn(page: Page, kind: str = "png", look: Look | None = None) -> tuple[Figure, bytes]:
    """The figure as it was when the file was made, and the file."""
    kept: list[Figure] = []

    def keep() -> Figure:
        kept.append(page.figure())
        return kept[0]

    payload = Page(page.name, keep).image(kind, look or Look())
    return kept[0], payload


def panel(figure: Figure, title: str) -> Axes:
    [found] = [axes for axes in figure.axes if axes.get_title() == title]
    return found


def line(axes: Axes, text: str) -> dict[float, float]:
    [found] = [one for one in axes.lines if one.get_label() == text]
    return dict(zip(*map(np.ndarray.tolist, found.get_data()), strict=True))  # type: ignore[arg-type]


def together(**fields: Any) -> np.ndarray:
    names = ("quant_type", "layer", "iteration", "tensor_name")
    places = {names.index(name): value for name, value in fields.items()}
    chosen = [v for key, v in VALUES.items() if all(key[place] == value for place, value in places.items())]
    return np.concatenate([one.ravel() for one in chosen]).astype(np.float64)


def test_layers_and_iterations_draw_the_statistics_of_the_values(gathered: GatheredRecords) -> None:
    [by_layer], [by_iteration] = pages_of(gathered, "layers"), pages_of(gathered, "iterations")
    layers, iterations = drawn(by_layer)[0], drawn(by_iteration)[0]

    for one, tensor in product(TYPES, TENSORS):
        stds = [together(quant_type=one, tensor_name=tensor, layer=layer).std() for layer in LAYERS]
        assert list(line(panel(layers, f"{tensor}: std"), one).values()) == pytest.approx(stds)
        found = line(panel(iterations, f"{tensor}: absmax"), one)
        largest = [
            np.abs(together(quant_type=one, tensor_name=tensor, iteration=iteration)).max()
            for iteration in ITERATIONS
        ]
        assert (list(found), list(found.values())) == (list(ITERATIONS), pytest.approx(largest))


def test_distribution_draws_the_share_of_the_values_in_each_bin(gathered: GatheredRecords) -> None:
    [page] = pages_of(gathered, "distribution")
    axes = panel(drawn(page)[0], "weight")

    for steps, one in zip(axes.patches, TYPES, strict=True):
        shares, edges, _ = steps.get_data()  # type: ignore[attr-defined]
        values = together(quant_type=one, tensor_name="weight")
        expected = 100 * np.histogram(values, edges)[0] / values.size
        np.testing.assert_allclose(shares, expected)
        low, high = np.quantile(together(tensor_name="weight"), (0.001, 0.999))
        assert (edges[0], edges[-1]) == (pytest.approx(low), pytest.approx(high))


def test_exponents_draw_shares_above_and_the_steps_of_the_formats_below(gathered: GatheredRecords) -> None:
    [page] = pages_of(gathered, "exponents", choices=choices("hifp8,mxfp8:e5m2,nvfp4,mxfp4"))
    figure = drawn(page)[0]

    found = line(panel(figure, "input"), "bf16")
    exponents = np.floor(np.log2(np.abs(together(quant_type="bf16", tensor_name="input"))))
    for exponent, share in found.items():
        expected = 100 * (exponents == exponent).mean()
        assert share == pytest.approx(expected) or (np.isnan(share) and not expected)
    strip = next(axes for axes in figure.axes if axes.get_ylabel() == "mantissa bits")
    assert [steps.get_label() for steps in strip.patches] == ["hifp8 steps", "e5m2 steps", "e2m1 steps"]
    for steps, name in zip(strip.patches, ("hifp8", "e5m2", "e2m1"), strict=True):
        bits, edges, _ = steps.get_data()  # type: ignore[attr-defined]
        drawn_bits = dict(zip((edges[:-1] + 0.5).tolist(), list(bits), strict=True))
        assert drawn_bits == dict(grids()[name].mantissa_bits)


def expected_sqnr(fmt: str, **fields: Any) -> float:
    import torch

    signal = noise = 0.0
    names = ("quant_type", "layer", "iteration", "tensor_name")
    for key, values in VALUES.items():
        if all(key[names.index(name)] == value for name, value in fields.items()):
            d = (qdq(torch.from_numpy(values.copy()), fmt) - torch.from_numpy(values)).double()
            signal += float((values.astype(np.float64) ** 2).sum())
            noise += float((d**2).sum())
    return float(10 * np.log10(signal / noise))


def test_a_heat_map_has_the_sqnr_of_each_layer_and_tensor(gathered: GatheredRecords) -> None:
    pages = pages_of(gathered, "heatmap")
    assert [page.name for page in pages] == ["sqnr_bf16.png", "sqnr_hifp8.png"]

    for page, one in zip(pages, TYPES, strict=True):
        figure = drawn(page)[0]
        for fmt in ("mxfp8", "hifp8"):
            axes = panel(figure, fmt)
            [image] = axes.images
            cells = np.asarray(image.get_array())
            assert [text.get_text() for text in axes.get_xticklabels()] == list(TENSORS)
            for (row, layer), (column, tensor) in product(enumerate(LAYERS), enumerate(TENSORS)):
                expected = expected_sqnr(fmt, quant_type=one, layer=layer, tensor_name=tensor)
                assert cells[row, column] == pytest.approx(expected, rel=1e-9)
            assert f"{cells[0, 0]:.3g}" in [text.get_text() for text in axes.texts]


def test_a_heat_map_of_another_metric_has_that(gathered: GatheredRecords) -> None:
    page = pages_of(gathered, "heatmap", metric="underflow", log=True)[0]

    [image] = panel(drawn(page)[0], "mxfp8").images

    cells = np.ma.masked_invalid(image.get_array())
    found = gathered.groups.by("quant_type", "tensor_name", "layer")
    for (row, layer), (column, tensor) in product(enumerate(LAYERS), enumerate(TENSORS)):
        percent = found["bf16", tensor, layer].errors["mxfp8"].underflow_percent
        assert (cells[row, column] == percent) if percent else np.ma.is_masked(cells[row, column])


def test_boxes_have_the_quartiles_of_the_layers(gathered: GatheredRecords) -> None:
    [statistics] = pages_of(gathered, "boxes")
    axes = panel(drawn(statistics)[0], "input: std")
    medians = [
        one.get_ydata()[0] for one in axes.lines if one.get_color() == "black" and len(one.get_xdata()) == 2
    ]

    for one in TYPES:
        stds = [together(quant_type=one, tensor_name="input", layer=layer).std() for layer in LAYERS]
        assert any(value == pytest.approx(np.median(stds)) for value in medians)
    [errors] = pages_of(gathered, "boxes", choices=FORMATS)
    axes = panel(drawn(errors)[0], "weight")
    points = [one.get_ydata() for one in axes.lines if one.get_linestyle() == "None"]
    wanted = [
        [expected_sqnr(fmt, quant_type=one, layer=layer, tensor_name="weight") for layer in LAYERS]
        for one, fmt in product(TYPES, ("mxfp8", "hifp8"))
    ]
    assert [list(each) for each in points] == [pytest.approx(each, rel=1e-9) for each in wanted]


def test_channels_have_the_largest_magnitude_of_each_and_name_the_outlier(gathered: GatheredRecords) -> None:
    [page] = pages_of(gathered, "channels")
    figure = drawn(page)[0]
    [axes] = [one for one in figure.axes if one.get_title().startswith("input, 64 channels")]

    for one in TYPES:
        several = [np.abs(v) for key, v in VALUES.items() if (key[0], key[3]) == (one, "input")]
        assert list(line(axes, one).values()) == pytest.approx(np.max(several, axis=(0, 1)).tolist())
    assert "5" in [text.get_text() for text in axes.texts]


def test_the_page_of_hifp8_has_the_shares_of_its_regimes(gathered: GatheredRecords) -> None:
    [page] = pages_of(gathered, "hifp8")
    axes = panel(drawn(page)[0], "values by exponent regime (D)")

    names = [text.get_text().replace("-\n", "") for text in axes.get_xticklabels()]
    heights = [bar.get_height() for bar in axes.patches]
    magnitudes = np.abs(together(quant_type="bf16"))
    in_regime = ((magnitudes >= 0.53125 - 2**-5) & (magnitudes < 0.96875)) | (
        (magnitudes >= 1.9375) & (magnitudes < 3.875)
    )
    assert names == ["zero", "underflow", "DML", "0", "1", "2", "3", "4", "overflow"]
    # [0.5, 1) and [2, 4) by the code that a value gets: the ends are where it rounds into them.
    assert heights[4] == pytest.approx(100 * in_regime.mean(), abs=0.5)
    assert sum(heights[: len(names)]) == pytest.approx(100)


def test_the_page_of_overflow_says_what_lies_outside(gathered: GatheredRecords) -> None:
    [page] = pages_of(gathered, "overflow")
    axes = panel(drawn(page)[0], "below the smallest value (%)")

    magnitudes = np.abs(together(quant_type="bf16"))
    shown = axes.texts[[text.get_text() for text in axes.get_xticklabels()].index("e4m3")].get_text()
    assert shown == f"{100 * ((magnitudes > 0) & (magnitudes < 2**-9)).mean():.3g}"


def test_the_page_of_a_tensor_has_all_of_it(gathered: GatheredRecords) -> None:
    pages = pages_of(gathered, "tensor")
    assert [page.name for page in pages] == ["tensor_input.png", "tensor_weight.png"]

    figure = drawn(pages[0])[0]

    assert figure.get_suptitle() == "input: 3 layers, rank 0, forward, pre"
    bars = [bar.get_height() for bar in panel(figure, "SQNR by format").patches]
    wanted = [
        expected_sqnr(fmt, quant_type=one, tensor_name="input") for one in TYPES for fmt in ("mxfp8", "hifp8")
    ]
    assert bars == pytest.approx(wanted, rel=1e-9)
    [table] = [axes.texts[0].get_text() for axes in figure.axes if not axes.axison]
    assert f"{together(quant_type='hifp8', tensor_name='input').std():.4g}" in table


def test_formats_are_drawn_by_the_grids_of_their_elements() -> None:
    assert grids_of(choices("mxfp8,fp8:e5m2,mxfp6,nvfp4,mxfp4,bf16")) == (
        "e4m3",
        "e5m2",
        "e2m3",
        "e2m1",
        "bf16",
    )
    assert grids_of(()) == ("hifp8", "e4m3", "e5m2", "e2m1")


QUICK = ("heatmap",)


@pytest.mark.parametrize("kind", rows(KINDS, QUICK))
def test_every_kind_is_a_png_an_svg_and_a_pdf_of_its_size_with_text_as_text_and_no_date(
    gathered: GatheredRecords, kind: str
) -> None:
    page, look = pages_of(gathered, kind)[0], Look((6.0, 5.0), 50, "What <this> shows & why")

    figure, png = drawn(page, "png", look)
    svg, pdf = (drawn(page, each, look)[1] for each in ("svg", "pdf"))

    assert matplotlib.image.imread(io.BytesIO(png)).shape == (250, 300, 4)
    assert figure.get_suptitle() == "What <this> shows & why"
    assert svg.startswith(b"<?xml")
    assert b"What &lt;this&gt; shows &amp; why" in svg
    assert b'width="432pt" height="360pt"' in svg
    assert pdf.startswith(b"%PDF-")
    assert b"/MediaBox [ 0 0 432 360 ]" in pdf
    assert b"/Type /Font" in pdf
    assert not re.search(rb"/FontType 3|/Subtype /Type3", pdf)
    assert b"CreationDate" not in pdf
    assert b"dc:date" not in svg
    for each, first in (("png", png), ("svg", svg), ("pdf", pdf)):
        assert drawn(page, each, look)[1] == first, each


def test_a_title_can_be_left_out_and_a_long_one_is_broken_to_fit(gathered: GatheredRecords) -> None:
    [page] = pages_of(gathered, "distribution")

    without = drawn(page, "png", Look(title=""))[0]
    narrow = drawn(page, "png", Look((3.3, 2.6)))[0]

    assert without.get_suptitle() == ""
    title = narrow._suptitle  # type: ignore[attr-defined]
    assert "\n" in title.get_text()
    box = title.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= narrow.bbox.x1


def test_logarithmic_axes_have_plain_numbers(gathered: GatheredRecords) -> None:
    [page] = pages_of(gathered, "layers", log=True)
    figure = drawn(page)[0]

    assert {axes.get_yscale() for axes in figure.axes} == {"log", "symlog"}
    texts = [text.get_text() for axes in figure.axes for text in axes.get_yticklabels()]
    assert any(texts)
    assert not [text for text in texts if "$" in text]


def _same(loaded: Loaded) -> Loaded:
    return loaded


@pytest.mark.parametrize("kind", ["layers", "iterations", "channels", "tensor"])
@pytest.mark.parametrize("log", rows([False, True], [True]))
@pytest.mark.parametrize("value", rows([1e300, np.nan, float(np.finfo(np.float64).max)], [1e300]))
def test_values_beyond_what_an_axis_can_show_are_left_out(kind: str, log: bool, value: float) -> None:
    found = GatheredRecords()
    values = np.full((4, 32), value)
    stats = public(summarise(values, "float64"))
    several = []
    for iteration in (0, 1):
        key = Key(quant_type="fp64", rank=0, layer=iteration, tensor_name="mask")
        loaded = Loaded(key, Moment(iteration=iteration), "float64", values.nbytes, stats, lambda: values)
        several.append(Item("name", values.nbytes, partial(_same, loaded)))
    assert all(
        isinstance(one, int) for one in gather(several, found, threads=1, choices=FORMATS, channels=True)
    )

    pages = pages_of(found, kind, log=log)

    assert pages
    assert all(page.image("png", Look()) for page in pages)


def of_gradients(iterations: tuple[int, ...]) -> GatheredRecords:
    found, rng = GatheredRecords(), np.random.default_rng(2)
    several = [
        item(
            Key(quant_type=one, rank=0, layer=0, tensor_name=tensor),
            rng.normal(scale=10.0**-iteration, size=(4, 32)).astype(np.float32),
            iteration,
        )
        for one, tensor, iteration in product(TYPES, ("grad_output", "input"), iterations)
    ]
    assert all(isinstance(one, int) for one in gather(several, found, threads=1, quick=True))
    return found


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (None, {"grad_output": {"log", "symlog"}, "input": {"linear"}}),
        (False, {"grad_output": {"linear"}, "input": {"linear"}}),
        (True, {"grad_output": {"log", "symlog"}, "input": {"log", "symlog"}}),
    ],
)
def test_axes_of_gradients_are_logarithmic_unless_they_are_to_be_linear(
    log: bool | None, expected: dict[str, set[str]]
) -> None:
    [page] = pages_of(of_gradients((0, 1, 2)), "iterations", log=log)

    scales: dict[str, set[str]] = {}
    for axes in drawn(page)[0].axes:
        scales.setdefault(axes.get_title().partition(":")[0], set()).add(axes.get_yscale())
    assert scales == expected


def test_a_single_iteration_is_bars_with_their_numbers() -> None:
    found = of_gradients((7,))
    [page] = pages_of(found, "iterations")

    for axes in drawn(page)[0].axes:
        tensor, _, statistic = axes.get_title().partition(": ")
        tallies = found.groups.by("quant_type", "tensor_name", tensor_name=tensor)
        expected = [getattr(tallies[one,].stats, statistic) for one in TYPES]
        assert [bar.get_height() for bar in axes.patches] == pytest.approx(expected)
        assert {f"{one:.4g}" for one in expected} <= {text.get_text() for text in axes.texts}
        assert axes.get_xlabel() == "iteration 7, the only one"
        assert [text.get_text() for text in axes.get_xticklabels()] == list(TYPES)
