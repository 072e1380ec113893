"""Chooses a record's series and its encoding before anything of that series is on disk."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from math import prod

from capd.store.documents import names
from capd.store.format.codec_choice import codec_name
from capd.store.format.dtypes import is_statistics, stored_shape, stored_type
from capd.store.format.frames import SeriesHeader
from capd.store.format.geometry import grown, plan_geometry
from capd.store.run.options import StoreOptions
from capd.store.shards.series import Plan, SeriesState
from capd_client.protocol.key import Key

__all__ = ["Planner"]

_MAX_GROWN_NBYTES = 64 << 30
"""Above this size, a record of another shape gets its own series. Shapes that are long along different axes would grow
into a series whose index (one entry per chunk) is larger than memory."""


class Planner:
    """The planner of one run. It knows all series and its own plans. `plan` may be called from any thread."""

    def __init__(self, options: StoreOptions, known: Iterable[SeriesState]) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._plans: dict[tuple[Key, str, int], list[Plan]] = {}
        for series in known:
            header = series.header
            axes = series.row.max_shape if is_statistics(header.dtype) else header.geometry.extents
            self._plans.setdefault((header.key, header.dtype, len(axes)), []).append(Plan(header, series))

    def plan_for(self, header: SeriesHeader) -> Plan:
        """Return the plan of records that are already encoded for a series of another run.

        It is the plan of a series with the same key, dtype, codec and geometry. If there is none, it is a new one.
        """
        geometry = header.geometry
        with self._lock:
            plans = self._plans.setdefault((header.key, header.dtype, len(geometry.extents)), [])
            for plan in plans:
                if (plan.header.codec, plan.geometry) == (header.codec, geometry):
                    return plan
            plan = Plan(header)
            plans.append(plan)
            return plan

    def plan(
        self,
        key: Key,
        dtype: str,
        attributes: dict[str, object],
        shape: tuple[int, ...],
        data: memoryview | bytes,
    ) -> Plan:
        """Return the plan of a series that the record fits. If it fits none, it is the plan of a new series.

        The same key, dtype and shape always get the same plan. `shape` is the true shape of the tensor. The raw bytes
        `data` decide the codec of a new series.
        """
        stored = stored_shape(dtype, shape)
        with self._lock:
            plans = self._plans.setdefault((key, dtype, len(shape)), [])
            for plan in plans:
                if plan.geometry.fits(stored):
                    return plan
            extents = stored
            for plan in plans:
                extents = tuple(map(max, extents, grown(plan.geometry.extents, stored)))
            itemsize, shard_nbytes = stored_type(dtype).stored.itemsize, self._options.shard_nbytes
            if prod(extents) * itemsize > _MAX_GROWN_NBYTES:
                extents = stored
            geometry = plan_geometry(extents, itemsize, shard_nbytes)
            codec = codec_name(self._options.codec, dtype, data, is_small=geometry.is_small)
            if codec == "none":
                geometry = plan_geometry(extents, itemsize, shard_nbytes, compressed=False)
            plan = Plan(SeriesHeader(names.series_path(key), key, dtype, codec, geometry, attributes))
            plans.append(plan)
            return plan
