"""All rows of the matrix, by their names."""

from __future__ import annotations

from tests.integration.three_ways import (
    three_ways_extras,
    three_ways_frameworks,
    three_ways_megatron,
    three_ways_pipelines,
    three_ways_rows,
    three_ways_sharded,
    three_ways_trials,
)
from tests.integration.three_ways.three_ways_rows import Row

ROWS: dict[str, Row] = {
    **three_ways_rows.ROWS,
    **three_ways_trials.ROWS,
    **three_ways_sharded.ROWS,
    **three_ways_pipelines.ROWS,
    **three_ways_frameworks.ROWS,
    **three_ways_megatron.ROWS,
    **three_ways_extras.ROWS,
}
