"""What all pages share: size, colours that colour-blind people tell apart, names as labels, ticks that do not overlap.

matplotlib is imported when a page is drawn; figures are made without pyplot, which keeps global state.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from capd.analyze.groups import Value
from capd.report.document import MARK
from capd.report.text import value_text
from capd.store.series_view import import_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "MAPS", "Page", "label", "legend", "must_have_matplotlib", "new_figure", "numbers_on", "paged", "place_layers",
    "say", "style", "ticks_at",
]  # fmt: skip

MAPS = "viridis"
_DPI = 120
# Okabe and Ito, "Color Universal Design" (2008), without the yellow, which white swallows.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
_MARKERS = "osD^vPX"
_DASHES = ("-", "--", ":", "-.")
_MOST_TICKS = 16
_LABEL_CHARACTERS = 28
_SETTINGS: dict[str, Any] = {
    "text.parse_math": False, "font.size": 9, "axes.titlesize": 9, "figure.titlesize": 12, "axes.grid": True,
    "grid.alpha": 0.3, "axes.axisbelow": True, "axes.unicode_minus": False, "figure.dpi": _DPI,
    "figure.constrained_layout.w_pad": 0.08, "figure.constrained_layout.h_pad": 0.08,
}  # fmt: skip
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Page:
    """A PNG file to be. name: of the file; figure: draws it."""

    name: str
    figure: Callable[[], Figure]

    def png(self) -> bytes:
        """The file's content."""
        import matplotlib

        out = io.BytesIO()
        settings: Any = {**matplotlib.rcParamsDefault, **_SETTINGS}  # whatever the user's matplotlibrc says
        with matplotlib.rc_context(settings), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing")  # names may be of any script
            canvas: Any = self.figure().canvas
            canvas.print_png(out, metadata={"Software": MARK})  # savefig would lay everything out twice
        return out.getvalue()


def must_have_matplotlib() -> None:
    """Raises CapdError that says how to install it where it is missing."""
    import_extra("matplotlib.backends.backend_agg", "plot")


def new_figure(
    title: str, rows: int, columns: int, cell: tuple[float, float]
) -> tuple[Figure, list[list[Axes]]]:
    """A figure of rows × columns axes. cell: width and height of each in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width, height = cell
    figure = Figure(figsize=(max(6.4, columns * width), rows * height + 1.2), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, [list(row) for row in axes]


def style(number: int) -> dict[str, Any]:
    """Colour, dashes and marker of the number-th line: the first 28 all differ."""
    return {
        "color": _COLOURS[number % len(_COLOURS)],
        "linestyle": _DASHES[number // len(_COLOURS) % len(_DASHES)],
        "marker": _MARKERS[number % len(_MARKERS)],
    }


def label(value: Value) -> str:
    """A field's value as it can be shown: of any length and content in, one short line out."""
    text = value_text(value)
    if len(text) > _LABEL_CHARACTERS:
        text = f"{text[: _LABEL_CHARACTERS - 1]}…"
    return f" {text}" if text.startswith("_") else text  # matplotlib leaves such names out of legends


def legend(figure: Figure, axes: Sequence[Axes], title: str = "quant type") -> None:
    """One legend for all axes, below them."""
    handles: dict[str, Any] = {}
    for each in axes:
        for handle, text in zip(*each.get_legend_handles_labels(), strict=True):
            handles.setdefault(text, handle)
    if handles:
        columns = min(8, len(handles))
        figure.legend(
            handles.values(), handles.keys(), title=title, loc="outside lower center", ncols=columns
        )


def say(panel: Axes, text: str) -> None:
    """Words in the place of what there is nothing of."""
    panel.text(0.5, 0.5, text, ha="center", va="center", transform=panel.transAxes)


def ticks_at(values: Sequence[Value]) -> tuple[list[int], list[str]]:
    """Places and labels for an axis on which the i-th value stands at i: all of a few, some of many."""
    step = -(-len(values) // _MOST_TICKS)
    places = list(range(0, len(values), max(1, step)))
    return places, [label(values[place]) for place in places]


def place_layers(axes: Axes, layers: Sequence[Value]) -> None:
    """The x-axis of a panel that has a place for each layer."""
    axes.set_xticks(*ticks_at(layers))
    axes.set_xlim(-0.5, len(layers) - 0.5)
    axes.set_xlabel("layer")


def numbers_on(axis: Any, *, whole: bool = False) -> None:
    """Tick labels as plain numbers of few digits: no offset in a corner, where it meets the title.

    whole: no fractions.
    """
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=4 if whole else 5, integer=whole))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.6g}"))


def paged(items: Sequence[T], most: int, name: str) -> Iterator[tuple[str, Sequence[T]]]:
    """File name and items of each page: `name.png`, or `name_1.png` and so on where there are more than `most`."""
    for at in range(0, len(items), most):
        number = f"_{at // most + 1}" if len(items) > most else ""
        yield f"{name}{number}.png", items[at : at + most]
