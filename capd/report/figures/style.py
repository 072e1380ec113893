"""The style of all pages: size, colours that colour-blind people can distinguish, labels, ticks that do not overlap.

matplotlib is imported when a page is drawn. Figures are made without pyplot, which keeps global state.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from capd.analyze.groups import Value
from capd.report.document import MARK
from capd.store.read.series import import_extra
from capd_client.process.text import human_value

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "MAPS", "MOST_DRAWN", "Look", "Page", "bars", "bars_by_type", "drawable", "label", "legend", "log_ranks",
    "log_shares", "log_values", "must_have_matplotlib", "new_figure", "numbers_on", "paged", "panels_of",
    "say", "share_exponents", "style", "ticks_at", "value_axis",
]  # fmt: skip

MAPS = "viridis"
_DPI = 120
# Narrower figures, such as a column of a paper, have smaller titles and legends.
_NARROW_INCHES = 5.5
# The width of a narrow figure's title.
_CHARACTERS_PER_INCH = 13
# Okabe and Ito, "Color Universal Design" (2008). The yellow is missing, because it is invisible on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
_MARKERS = "osD^vPX"
_DASHES = ("-", "--", ":", "-.")
_MOST_TICKS = 16
# If the largest number over the smallest is at most this, ticks are evenly spaced, or at 1, 2 and 5 of each decade.
_EVEN, _FEW_DECADES = 5, 30
MOST_DRAWN = 1e280
"""The largest drawn number. float64 has larger numbers, with which matplotlib's axes overflow."""
_LABEL_CHARACTERS = 28
_SETTINGS: dict[str, Any] = {
    "text.parse_math": False, "font.size": 9, "axes.titlesize": 9, "figure.titlesize": 12, "axes.grid": True,
    "grid.alpha": 0.3, "axes.axisbelow": True, "axes.unicode_minus": False, "figure.dpi": _DPI,
    "figure.constrained_layout.w_pad": 0.08, "figure.constrained_layout.h_pad": 0.08,
    "svg.fonttype": "none", "pdf.fonttype": 42, "svg.hashsalt": MARK,
}  # fmt: skip
# There is no date, so that the same figure gives the same file.
_METADATA: dict[str, dict[str, str | None]] = {
    "png": {"Software": MARK},
    "svg": {"Creator": MARK, "Date": None},
    "pdf": {"Creator": MARK, "CreationDate": None},
}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Look:
    """The look of a figure.

    Attributes:
        size: Width and height in inches, None for the size that fits the figure.
        dpi: The dots per inch of PNG files.
        title: The title, None for the figure's own, "" for none.
    """

    size: tuple[float, float] | None = None
    dpi: int = _DPI
    title: str | None = None


# The look of the figure that is being drawn.
_look: ContextVar[Look | None] = ContextVar("capd_look", default=None)


@dataclass(frozen=True, slots=True)
class Page:
    """A page that is not drawn yet. `name` is the name of its PNG file, and `figure` draws it."""

    name: str
    figure: Callable[[], Figure]

    def png(self) -> bytes:
        """Draw the page as a PNG file and return the content."""
        return self.image("png", Look())

    def image(self, kind: str, look: Look) -> bytes:
        """Draw the page and return the file's content. The same figure gives the same bytes.

        Args:
            kind: png, svg or pdf. In svg and pdf, text stays text.
            look: The look.
        """
        import matplotlib

        out = io.BytesIO()
        # The user's matplotlibrc must not change the figure.
        settings: Any = {**matplotlib.rcParamsDefault, **_SETTINGS}
        with matplotlib.rc_context(settings), warnings.catch_warnings():
            # Names may have characters of any script.
            warnings.filterwarnings("ignore", message="Glyph .* missing")
            token = _look.set(look)
            try:
                figure = self.figure()
            finally:
                _look.reset(token)
            figure.set_dpi(look.dpi)
            canvas: Any = figure.canvas
            if kind == "png":
                # savefig would compute the layout twice.
                canvas.print_png(out, metadata=_METADATA[kind])
            else:
                _settle(figure)
                figure.savefig(out, format=kind, metadata=_METADATA[kind])
        return out.getvalue()


def _settle(figure: Figure) -> None:
    """Compute the layout and round it to the same places each time.

    The solver's last digits differ between runs, and an SVG uses all digits in the names of its clip paths.
    """
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes in figure.axes:
        left, bottom, width, height = (round(value, 6) for value in axes.get_position(original=True).bounds)
        axes.set_position((left, bottom, width, height))


def must_have_matplotlib() -> None:
    """Raise CapdError with installation instructions if matplotlib is missing."""
    import_extra("matplotlib.backends.backend_agg", "plot")


def new_figure(
    title: str,
    rows: int,
    columns: int,
    cell: tuple[float, float],
    *,
    height_ratios: Sequence[float] | None = None,
) -> tuple[Figure, list[list[Axes]]]:
    """Return a figure of rows × columns axes. The current look may replace its title and its size.

    `cell` is the width and height of each axes in inches, and `height_ratios` the relative heights of the rows.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    look = _look.get() or Look()
    width, height = look.size or (max(6.4, columns * cell[0]), rows * cell[1] + 1.2)
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    text = title if look.title is None else look.title
    if width < _NARROW_INCHES:
        figure.suptitle(fill(text, int(width * _CHARACTERS_PER_INCH)), fontsize=10)
    else:
        figure.suptitle(text)
    axes = figure.subplots(rows, columns, squeeze=False, height_ratios=height_ratios)
    return figure, [list(row) for row in axes]


def panels_of(
    title: str, count: int, most_columns: int, cell: tuple[float, float]
) -> tuple[Figure, list[Axes]]:
    """Return a figure of some panels, with at most `most_columns` next to each other (see `new_figure`)."""
    columns = min(most_columns, count)
    figure, axes = new_figure(title, -(-count // columns), columns, cell)
    panels = [panel for row in axes for panel in row]
    for panel in panels[count:]:
        panel.remove()
    return figure, panels[:count]


def style(number: int) -> dict[str, Any]:
    """Return colour, dashes and marker of the number-th line. The first 28 all differ."""
    return {
        "color": _COLOURS[number % len(_COLOURS)],
        "linestyle": _DASHES[number // len(_COLOURS) % len(_DASHES)],
        "marker": _MARKERS[number % len(_MARKERS)],
    }


def drawable(value: float | None) -> TypeGuard[float]:
    """Return whether a value is a number with which axes do not overflow."""
    return value is not None and abs(value) <= MOST_DRAWN


def label(value: Value) -> str:
    """Return a field's value as one short line, whatever its length and content."""
    text = human_value(value)
    if len(text) > _LABEL_CHARACTERS:
        text = f"{text[: _LABEL_CHARACTERS - 1]}…"
    # matplotlib leaves names with an underscore out of legends.
    return f" {text}" if text.startswith("_") else text


def legend(figure: Figure, axes: Sequence[Axes], title: str = "quant type") -> None:
    """Draw one legend for all axes, below them."""
    handles: dict[str, Any] = {}
    for each in axes:
        for handle, text in zip(*each.get_legend_handles_labels(), strict=True):
            handles.setdefault(text, handle)
    if handles:
        width = figure.get_size_inches()[0]
        # The width of an entry in inches, or a little more.
        entry = 0.6 + 0.09 * max(map(len, handles))
        columns = max(1, min(8, len(handles), int(width / entry)))
        size = {"fontsize": 7.5, "title_fontsize": 7.5} if width < _NARROW_INCHES else {}
        figure.legend(
            handles.values(), handles.keys(), title=title, loc="outside lower center", ncols=columns, **size
        )


def bars(panel: Axes, places: Sequence[str], series: Mapping[str, Sequence[float | None]]) -> None:
    """Draw groups of bars: at each place one bar of each series, by its label, in the order of `style`."""
    width = 0.8 / max(1, len(series))
    for number, (text, heights) in enumerate(series.items()):
        at = [place + (number - (len(series) - 1) / 2) * width for place in range(len(places))]
        drawn = [0.0 if height is None else height for height in heights]
        panel.bar(at, drawn, width, color=style(number)["color"], label=text)
    panel.set_xticks(range(len(places)), places)
    panel.grid(visible=False, axis="x")


def bars_by_type(
    panel: Axes, types: Sequence[Value], numbers: Sequence[float], texts: Sequence[str], space: float
) -> None:
    """Draw a horizontal bar with a text for each quant type. The axis is `space` times as long as the longest bar."""
    places = range(len(types))
    drawn = panel.barh(places, numbers, color=[style(place)["color"] for place in places])
    panel.bar_label(drawn, texts, padding=3)
    panel.set_xlim(0, space * max(numbers) or 1)
    panel.set_yticks(places, map(label, types))
    panel.invert_yaxis()


def say(panel: Axes, text: str) -> None:
    """Write a text in the place of a missing drawing."""
    panel.text(0.5, 0.5, text, ha="center", va="center", transform=panel.transAxes)


def ticks_at(values: Sequence[Value]) -> tuple[list[int], list[str]]:
    """Return places and labels for an axis with the i-th value at i: all of a few values, some of many."""
    step = -(-len(values) // _MOST_TICKS)
    places = list(range(0, len(values), max(1, step)))
    return places, [label(values[place]) for place in places]


def share_exponents(values: Axes, formats: Axes) -> None:
    """Give two panels of exponents one x-axis. It covers all values, and the formats' range near them."""
    (low, high), (first, last) = ((panel.dataLim.x0, panel.dataLim.x1) for panel in (values, formats))
    if math.isfinite(low):
        first, last = min(low, max(first, -40)) - 1, max(high, min(last, 40)) + 1
    for panel in (values, formats):
        panel.set_xlim(first, last)


def numbers_on(axis: Any, *, whole: bool = False) -> None:
    """Write tick labels as plain numbers of few digits, or only whole numbers. An offset would meet the title."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=4 if whole else 5, integer=whole))
    axis.set_major_formatter("{x:.6g}")


def value_axis(panel: Axes, *, log: bool) -> None:
    """Set up the y-axis of drawn values, logarithmic if requested. Say so if there is no finite value."""
    if not panel.has_data():
        say(panel, "no finite value")
    if log:
        log_values(panel)
    else:
        numbers_on(panel.yaxis)


def log_shares(axis: Any, series: Iterable[Sequence[float | None]]) -> None:
    """Make the y-axis logarithmic with plain numbers. Leave it unchanged if no number is above 0."""
    seen = [value for values in series for value in values if value]
    if seen:
        axis.axes.set_yscale("log")
        axis.axes.set_ylim(10 ** math.floor(math.log10(min(seen)) - 0.01), 1.5 * max(seen))
        _plain_powers(axis, max(seen) / min(seen))


def log_values(panel: Axes) -> None:
    """Make the y-axis logarithmic for lines and points, or linear about 0 if some are below 0.

    Leave it unchanged if all numbers are 0, or if there are none.
    """
    low, high = panel.dataLim.y0, panel.dataLim.y1
    largest = max(abs(low), abs(high))
    # Without numbers the limits are infinite.
    if not math.isfinite(largest):
        return
    if low > 0:
        panel.set_yscale("log")
        _plain_powers(panel.yaxis, high / low)
    elif largest > 0:
        panel.set_yscale("symlog", linthresh=10 ** math.floor(math.log10(largest) - 2))
        panel.yaxis.set_major_formatter("{x:g}")


def log_ranks(panel: Axes) -> None:
    """Make the x-axis logarithmic, beginning at 1."""
    panel.set_xscale("log")
    _plain_powers(panel.xaxis, panel.dataLim.x1)


def _plain_powers(axis: Any, ratio: float) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    powers = LogLocator(subs=(1, 2, 5) if ratio < _FEW_DECADES else (1,), numticks=6)
    axis.set_major_locator(MaxNLocator(nbins=4) if ratio < _EVEN else powers)
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


def paged(items: Sequence[T], most: int, name: str) -> Iterator[tuple[str, Sequence[T]]]:
    """Yield file name and items of each page: `name.png`, or `name_1.png` and so on for more than `most` items."""
    for at in range(0, len(items), most):
        number = f"_{at // most + 1}" if len(items) > most else ""
        yield f"{name}{number}.png", items[at : at + most]
