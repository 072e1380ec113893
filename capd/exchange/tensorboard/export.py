"""Writes statistics, errors of formats and scalars as TensorBoard's events: a run directory for each rank.

Scalars are `STATISTIC/MODULE.TENSOR`, `sqnr_db/FORMAT/MODULE.TENSOR` where the lab measured errors, and the run's own
scalars. The histogram `log2_abs/MODULE.TENSOR` has capd's exponent bins: the bucket that ends at e + 1 holds the values
with 2^e ≤ |x| < 2^(e+1), and its count is exact. Zeros and float32 subnormals are the bucket up to -126. NaN and Inf
are left out, and their number is a scalar. The step is the iteration. Series of one name also say in what they differ.
It needs the extra `tensorboard`.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from capd.errors import CapdError
from capd.exchange.peers import ExportRequest
from capd.output_directory import ExportedFile, locked_directory, write_new
from capd.store.documents.names import component
from capd.store.format.statistics import Stats
from capd.store.read.scalars import Scalar
from capd.store.read.series import Record, Series, import_extra

__all__ = ["export_files", "histogram_buckets", "series_names", "statistic_values"]

_STATISTICS = ("absmax", "mean", "std", "kurtosis", "crest")
_BIAS, _NON_FINITE = 127, 255
# Fields of a key that tell namesakes apart.
_FURTHER = ("quant_type", "layer", "phase", "layer_type", "component")


def export_files(request: ExportRequest) -> Iterator[ExportedFile]:
    """Write the events of series and scalars below `out`/RUN/rank<R>.

    Elements are read only for records that were committed without statistics.

    Yields:
        The file of events of each rank, when it is whole.

    Raises:
        CapdError: The extra is missing, or the directory of a rank holds files already.
        StoreBusy: Another export writes to `out`.
        OSError: A file cannot be written.
    """
    import_extra("tensorboard", "tensorboard")
    run_id, chosen, scalars, out = request.run_id, request.chosen, request.scalars(), request.out
    ranks = sorted({series.key.rank for series in chosen} | {scalar.rank for scalar in scalars})
    names = series_names(chosen)
    with locked_directory(out):
        for rank in ranks:
            directory = out / component(run_id) / f"rank{rank}"
            if directory.is_dir() and any(directory.iterdir()):
                raise CapdError(f"{directory} holds files already; export into another directory")
            directory.mkdir(parents=True, exist_ok=True)
            own = [(name, one) for name, one in zip(names, chosen, strict=True) if one.key.rank == rank]
            events = _RankEvents(own, [scalar for scalar in scalars if scalar.rank == rank])
            # TensorBoard finds files by "tfevents" in their names.
            path = directory / "events.out.tfevents.0.capd"
            nbytes = write_new(path, events.write)
            yield ExportedFile(path, nbytes, events.records, 0)


def series_names(chosen: Sequence[Series]) -> list[str]:
    """Return the name of each series in tags: module, operation and tensor, and the fields in which namesakes differ.

    A name is the same on all ranks. Series that differ only in what they keep have one name.
    """
    names, told = [], []
    fields: dict[str, dict[str, set[Any]]] = defaultdict(lambda: defaultdict(set))
    for series in chosen:
        key = series.key
        name = ".".join(filter(None, (key.stack, key.module, key.operation, key.tensor_name)))
        own = {**{field: getattr(key, field) for field in _FURTHER}, "dtype": series.dtype}
        for field, value in own.items():
            fields[name][field].add(value)
        names.append(name)
        told.append(own)
    found = []
    for name, own in zip(names, told, strict=True):
        differing = [f"{field}={own[field]}" for field, values in fields[name].items() if len(values) > 1]
        found.append(f"{name}[{','.join(differing)}]" if differing else name)
    return found


class _RankEvents:
    """The events of one rank. records: how many were written."""

    def __init__(self, chosen: Sequence[tuple[str, Series]], scalars: Sequence[Scalar]) -> None:
        self._chosen, self._scalars = chosen, scalars
        self.records = 0

    def write(self, file: BinaryIO) -> None:
        """Write the events to a file."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        # TensorBoard's own writer of files has a thread, which loses errors of the disk when it is closed.
        writer = RecordWriter(file)
        writer.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        for event in self._events():
            writer.write(event.SerializeToString())
            self.records += 1

    def _events(self) -> Iterator[Any]:
        for name, series in self._chosen:
            yield from (_event(record, name) for record in series.fresh().records)
        for scalar in self._scalars:
            for iteration, value, time_ns in zip(
                scalar.iterations.tolist(),
                scalar.values.tolist(),
                scalar.times.view("int64").tolist(),
                strict=True,
            ):
                yield _scalar_event(scalar.name, iteration, value, time_ns)


def statistic_values(stats: Stats) -> dict[str, float]:
    """Return the finite statistics of a record by their names, and its share of zeros and number of NaN and Inf."""
    found = {name: getattr(stats, name) for name in _STATISTICS}
    known = {
        name: float(value) for name, value in found.items() if value is not None and math.isfinite(value)
    }
    return {
        **known,
        "zeros": stats.zero / stats.count if stats.count else 0.0,
        "nonfinite": stats.nan + stats.inf,
    }


def histogram_buckets(stats: Stats) -> tuple[list[float], list[float]]:
    """Return the upper ends and the counts of the buckets of log2|x|, without gaps between the first and the last."""
    bins = {
        exponent: count for exponent, count in stats.exponent_histogram.items() if exponent != _NON_FINITE
    }
    if not bins:
        return [], []
    first, last = min(bins), max(bins)
    ends = [float(exponent - _BIAS + 1) for exponent in range(first, last + 1)]
    # An empty bucket begins the histogram: TensorBoard takes the first bucket's lower end to be -inf otherwise.
    return [ends[0] - 1, *ends], [0.0, *(float(bins.get(exponent, 0)) for exponent in range(first, last + 1))]


def _event(record: Record, name: str) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary

    stats = record.stats
    values = [
        Summary.Value(tag=f"{statistic}/{name}", simple_value=value)
        for statistic, value in statistic_values(stats).items()
    ]
    for label, errors in record.errors.items():
        if errors.sqnr_db is not None and math.isfinite(errors.sqnr_db):
            values.append(Summary.Value(tag=f"sqnr_db/{label}/{name}", simple_value=errors.sqnr_db))
    ends, counts = histogram_buckets(stats)
    if ends:
        centres = [end - 0.5 for end in ends]
        histogram = HistogramProto(
            min=ends[0], max=ends[-1], num=sum(counts),
            sum=sum(at * count for at, count in zip(centres, counts, strict=True)),
            sum_squares=sum(at * at * count for at, count in zip(centres, counts, strict=True)),
            bucket_limit=ends, bucket=counts,
        )  # fmt: skip
        values.append(Summary.Value(tag=f"log2_abs/{name}", histo=histogram))
    return Event(wall_time=record.time_ns / 1e9, step=record.iteration, summary=Summary(value=values))


def _scalar_event(name: str, iteration: int, value: float, time_ns: int) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
    return Event(wall_time=time_ns / 1e9, step=iteration, summary=summary)
