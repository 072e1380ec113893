"""`capd show`: shows one series with its records, or one record with statistics, histograms and first values."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from capd.cli.completion import series_paths, store_paths
from capd.cli.options import Json, Wide, flag, option
from capd.cli.output import (
    human_count,
    human_nbytes,
    human_number,
    json_number,
    note,
    print_json,
    print_lines,
)
from capd.cli.store.histogram import value_bars, value_counts
from capd.cli.stores import AttemptOption, Given, RunOption, attempt_of, resolve_run
from capd.cli.table import Column, aligned, print_columns, prose
from capd.errors import ConfigError, NothingMatched
from capd.live.bars import exponent_bars
from capd.store.objects.address import place_of
from capd.strict_json import strict_json
from capd_client.process.text import printable
from capd_client.protocol.key import Moment

if TYPE_CHECKING:
    from capd.analyze.error_sums import Errors
    from capd.store.read.store import Record, Series, Store

__all__ = ["find_one", "show"]

_STATISTICS = (
    "count", "nan", "inf", "zero", "min", "max", "absmax", "mean", "std", "kurtosis", "crest", "sum",
    "sum_sq",
)  # fmt: skip
_LABEL = len("sum_sq      ")
# The time and the recomputation have lines of their own.
_MOMENT = Moment.__struct_fields__[:-2]


def show(
    store: Annotated[
        Given,
        typer.Argument(
            metavar="STORE",
            help="A run (NAME.zarr), or a directory of runs: the newest is read. Both may be addresses, as "
            "s3://BUCKET/KEY.",
            show_default=False,
            parser=place_of,
            autocompletion=store_paths,
        ),
    ],
    series: Annotated[
        str,
        typer.Argument(
            metavar="SERIES[#i]",
            help="A series, with #i its record i, or the name of a scalar.",
            show_default=False,
            autocompletion=series_paths,
        ),
    ],
    run: RunOption = None,
    limit: Annotated[int, option("--limit", "N", "Records to list of a series or scalar.", min=1)] = 20,
    attempt: AttemptOption = "latest",
    values: Annotated[int, option("--values", "N", "First values to print of a record.", min=0)] = 8,
    logical: Annotated[
        bool, flag("--logical", "Show the whole tensor, put together from the parts of all ranks.")
    ] = False,
    wide: Wide = False,
    as_json: Json = False,
) -> None:
    """Show a series with its records, or one record: moment, shape, statistics, histograms, first values.

    SERIES is a path as `capd ls` prints it, the end of such a path, or a glob. It must match one series. #i picks
    record i, and counts from the end if i is negative. A record that keeps only statistics has no values and no
    histogram of values. The name of a scalar, such as loss, shows its last values on all ranks. #i counts the
    records of all attempts.

    With --logical, SERIES is a path, or the name of a whole tensor, such as layers.3.mlp.fc1.forward.weight.
    docs/logical.md describes how its parts are put together.

    \b
    Examples:
      capd show captures "*layer3*.backward.grad_output"
      capd show captures loss
      capd show captures linear.forward.weight#-1 --values 32
      capd show captures linear_fc1.forward.weight#0 --logical

    \b
    Exit codes:
      2  several series match; --logical: a part is missing or does not fit
      4  a scalar cannot be read on some rank
      5  no series matches, or it has no such record
    """
    from capd.store.read.store import open_store

    opened = open_store(resolve_run(store, run))
    if series in opened.scalars():
        from capd.cli.store.scalar_tables import show_scalar

        raise typer.Exit(show_scalar(opened, series, limit, attempt_of(attempt), wide=wide, as_json=as_json))
    name, number = _split(series)
    if logical:
        from capd.cli.store.whole_tensors import find_tensor, show_tensor

        tensor = find_tensor(opened, name, attempt_of(attempt))
        show_tensor(tensor, number, limit, values, wide=wide, as_json=as_json)
        return
    found = find_one(opened, name)
    if number is None:
        found = found.of_attempt(attempt_of(attempt))
        if not len(found):
            raise NothingMatched(f"{found.path} has no record of attempt {attempt}")
        if as_json:
            print_json({**_head(found), "records": [_record(r) for r in found.records]})
        else:
            _print_series(found, limit, wide=wide)
        return
    if not -len(found) <= number < len(found):
        raise NothingMatched(f"{found.path} has no record #{number}: it has {len(found)}")
    if as_json:
        print_json(_record_document(found, number, values))
    else:
        _print_record(found, number, values, wide=wide)


def _split(series: str) -> tuple[str, int | None]:
    name, mark, index = series.rpartition("#")
    if not mark:
        return series, None
    try:
        return name, int(index)
    except ValueError:
        raise ConfigError(f"{series!r}: after # give a record number, such as #0 or #-1") from None


def find_one(store: Store, name: str) -> Series:
    """Return the series with this path, or the only one whose path ends in the name or matches it as a glob.

    Raises:
        NothingMatched: If no series matches.
        ConfigError: If several series match. The message names some.
    """
    everything = store.series
    for series in everything:
        if series.path == name.strip("/"):
            return series
    tails = "/" + name.strip("/"), "." + name
    found = [series for series in everything if series.path.endswith(tails)]
    found = found or [series for series in everything if fnmatchcase(series.path, name)]
    if not found:
        if (mark := store.removal_of(name)) is not None:
            raise NothingMatched(f"series {name!r} of {store.path} was {mark}")
        raise NothingMatched(
            f"no series {name!r} in {store.path}; `capd ls {store.path}` lists them, and --scalars the scalars"
        )
    if len(found) > 1:
        some = ", ".join(series.path for series in found[:4])
        raise ConfigError(f"{name!r} matches {len(found)} series ({some}, …); give more of the path")
    return found[0]


def _head(series: Series) -> dict[str, Any]:
    return {
        "path": series.path,
        **msgspec.structs.asdict(series.key),
        "dtype": series.dtype,
        "kept": series.kept,
        "shape": list(series.shape),
        "raw_bytes": series.raw_bytes,
        "stored_bytes": series.stored_bytes,
        "attributes": series.attributes,
    }


def _statistics(record: Record) -> dict[str, Any]:
    numbers = asdict(record.stats)
    histogram = {str(exponent): count for exponent, count in numbers["exponent_histogram"].items()}
    return {**{name: json_number(numbers[name]) for name in _STATISTICS}, "exponent_histogram": histogram}


def _record(record: Record) -> dict[str, Any]:
    return {
        "index": record.index,
        **{name: getattr(record, name) for name in _MOMENT},
        "time_ns": record.time_ns,
        "recompute": record.recompute,
        "shape": list(record.shape),
        "device": record.device,
        "requires_grad": record.requires_grad,
        "is_leaf": record.is_leaf,
        "sealed": record.sealed,
        "metadata": record.metadata,
        "attributes": record.attributes,
        "stats": _statistics(record),
    }


def _errors(record: Record) -> dict[str, Any]:
    """Return the errors that were measured while capturing, by format. Loads their numbers only if there are any."""
    found = record.errors
    if not found:
        return {}
    from capd.report.format_errors import error_numbers

    return {label: strict_json(error_numbers(errors)) for label, errors in found.items()}


def _error_lines(record: Record) -> list[str]:
    """Return a line for each format that was measured while capturing."""
    found = record.errors
    return [
        f"{'' if at else 'errors':<11} {label}: {_numbers(one)}"
        for at, (label, one) in enumerate(found.items())
    ]


def _numbers(errors: Errors) -> str:
    spread = None if errors.blocks is None else errors.blocks.scale_log2_std
    return (
        f"SQNR {human_number(errors.sqnr_db)} dB, relative {human_number(errors.relative)}, "
        f"underflow {human_number(errors.underflow_percent)} %, saturated {human_number(errors.saturation_percent)} %, "
        f"flushed {human_number(errors.flush_percent)} %, scale std {human_number(spread)}"
    )


def _record_document(series: Series, number: int, first: int) -> dict[str, Any]:
    document = {**_head(series), **_record(series.records[number]), "values": None, "value_histogram": None}
    document["errors"] = _errors(series.records[number])
    document["dequantises_to"] = _whole(series, document["attributes"])
    if series.kept == "tensor":
        flat = series.values(number).reshape(-1)
        edges, counts = value_counts(flat)
        document["values"] = [json_number(value) for value in flat[:first].tolist()]
        document["value_histogram"] = {"edges": edges, "counts": counts}
    return document


def _print_series(series: Series, limit: int, *, wide: bool) -> None:
    records = series.records[:limit]
    stats = [record.stats for record in records]

    def whole(name: str, values: Iterable[int], spare: int = 0) -> Column:
        return Column(name, [str(value) for value in values], right=True, spare=spare)

    columns = [
        whole("#", range(len(records))),
        whole("iteration", (record.iteration for record in records)),
        whole("micro", (record.micro_batch for record in records)),
        whole("call", (record.call for record in records), 2),
        whole("attempt", (record.attempt for record in records), 3),
        Column("shape", [_shape(record.shape) for record in records], right=True, spare=1),
        *(
            Column(name, aligned([getattr(one, name) for one in stats]), right=True)
            for name in ("mean", "std", "absmax")
        ),
        whole("nan", (one.nan for one in stats)),
        whole("inf", (one.inf for one in stats)),
    ]
    print_lines([*_lines(_head_lines(series), wide=wide), ""])
    print_columns(columns, wide=wide)
    if len(series) > limit:
        note(f"showing {limit} of {len(series):,} records; raise --limit for more")


def _print_record(series: Series, number: int, first: int, *, wide: bool) -> None:
    record = series.records[number]
    stats = record.stats
    first_values, bars = _elements(series, number, first)
    marks = [name for name in ("requires_grad", "is_leaf", "recompute", "sealed") if getattr(record, name)]
    seconds, fraction = divmod(record.time_ns, 10**9)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    text = [
        *_head_lines(series),
        f"record      #{record.index}, shape {_shape(record.shape)}, on {record.device}",
        "moment      " + ", ".join(f"{n} {v}" for n in _MOMENT if (v := getattr(record, n)) is not None),
        f"time        {when}.{fraction // 10**6:03d}",
        f"marks       {', '.join(marks) or '-'}",
        *([f"metadata    {record.metadata}"] if record.metadata else []),
        *_part_lines(_whole(series, record.attributes)),
        *(f"{name:<11} {human_number(getattr(stats, name))}" for name in _STATISTICS),
        f"values      {first_values}",
        *_error_lines(record),
    ]
    bars = ["", "exponents", *exponent_bars(stats.exponent_histogram), *bars]
    print_lines([*_lines(text, wide=wide), *bars])


def _lines(text: Iterable[str], *, wide: bool) -> list[str]:
    """Return lines that fit the terminal. A store may come from anybody, and so may its names."""
    return prose(map(printable, text), _LABEL, wide=wide)


def _whole(series: Series, attributes: dict[str, Any]) -> dict[str, Any] | None:
    # The import is here because it loads numpy and the tables of all formats.
    from capd.store.quantised.dequantise import whole_of

    return whole_of(series.key.tensor_name, attributes)


def _part_lines(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return []
    whole = f"{found['class']} that dequantises to {found['dtype']} {found['shape']}"
    return [f"part        a part of {found['tensor_name']}, of class {whole}"]


def _elements(series: Series, number: int, first: int) -> tuple[str, list[str]]:
    """Return the first values of a record, and the lines of a histogram of its values."""
    if series.kept == "statistics":
        return "not kept, only the statistics (mode or policy stats)", []
    flat = series.values(number).reshape(-1)
    shown = ", ".join(human_number(value) for value in flat[:first].tolist())
    return f"{shown}{', …' if flat.size > first else ''}", ["", "values", *value_bars(flat)]


def _head_lines(series: Series) -> list[str]:
    known = msgspec.structs.asdict(series.key)
    ratio = f", ratio {series.raw_bytes / series.stored_bytes:.2f}" if series.stored_bytes else ""
    return [
        f"series      {series.path}",
        "key         "
        + ", ".join(f"{name} {value}" for name, value in known.items() if value not in ("", None)),
        f"dtype       {series.dtype}{', statistics only' if series.kept == 'statistics' else ''}",
        f"records     {human_count(len(series))}, largest shape {_shape(series.shape[1:])}",
        f"stored      {human_nbytes(series.stored_bytes)} of {human_nbytes(series.raw_bytes)} raw{ratio}",
        *([f"attributes  {series.attributes}"] if series.attributes else []),
    ]


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "scalar"
