"""The segments are plain Parquet: pandas, Polars and DuckDB read them as they are."""

from __future__ import annotations

import io
from pathlib import Path

import pandas as pd
import pytest

import capd
from capd.store.objects.address import Address
from tests.kit.objects.published import manifest_of
from tests.kit.objects.service import Bucket
from tests.kit.objects.signing import ACCESS_KEY, SECRET_KEY
from tests.kit.objects.uploaded import filled_in_rounds

duckdb = pytest.importorskip("duckdb")
pl = pytest.importorskip("polars")
ds = pytest.importorskip("pyarrow.dataset")
pyarrow = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.fs")

SQL = "SELECT path, count(*) AS records, max(absmax) AS largest FROM records GROUP BY path ORDER BY path"


@pytest.fixture
def wanted(tmp_path: Path, prefix: Address) -> list[tuple[str, int, float]]:
    """What the store says: path, records and the largest absolute value. The run is uploaded."""
    run = filled_in_rounds(tmp_path, prefix)
    return [
        (one.path, len(one), max((r.stats.absmax for r in one.records if r.stats.absmax is not None), default=None))
        for one in sorted(capd.open(run).everything(), key=lambda one: one.path)
    ]  # fmt: skip


def test_polars(wanted: list[tuple[str, int, float]], bucket: Bucket, prefix: Address) -> None:
    options = {
        "aws_access_key_id": ACCESS_KEY,
        "aws_secret_access_key": SECRET_KEY,
        "aws_region": "us-east-1",
        "aws_endpoint_url": bucket.service.endpoint,
        "aws_allow_http": "true",
    }
    records = pl.scan_parquet(f"{prefix}/run.zarr/.capd/node=*/records-*.parquet", storage_options=options)
    found = records.group_by("path").agg(pl.len(), pl.col("absmax").max()).sort("path")
    assert found.collect().rows() == wanted
    manifest = manifest_of(bucket, f"{prefix.key}/run.zarr")
    assert manifest is not None
    name = f"{prefix}/run.zarr/.capd/node=n0/{manifest.series.name}"
    series = pl.scan_parquet(name, storage_options=options)
    joined = (
        records.join(series, on="path").group_by("tensor_name").agg(pl.len()).sort("tensor_name").collect()
    )
    assert joined["tensor_name"].to_list() == sorted(path.rpartition(".")[2] for path, _, _ in wanted)
    assert joined["len"].sum() == sum(records for _, records, _ in wanted)


def test_duckdb_through_pyarrow(
    wanted: list[tuple[str, int, float]], bucket: Bucket, prefix: Address
) -> None:
    files = pyarrow.fs.S3FileSystem(
        access_key=ACCESS_KEY,
        secret_key=SECRET_KEY,
        region="us-east-1",
        endpoint_override=bucket.service.endpoint,
    )
    selector = pyarrow.fs.FileSelector(f"{bucket.name}/{prefix.key}/run.zarr/.capd", recursive=True)
    names = [one.path for one in files.get_file_info(selector) if "/records-" in one.path]
    records = ds.dataset(names, format="parquet", filesystem=files)  # noqa: F841 - DuckDB finds it by its name
    assert duckdb.sql(SQL).fetchall() == wanted


def test_pandas(wanted: list[tuple[str, int, float]], bucket: Bucket, prefix: Address) -> None:
    keys = [key for key in bucket.keys(f"{prefix.key}/run.zarr/.capd") if "/records-" in key]
    parts = [pd.read_parquet(io.BytesIO(bucket.store().get(key).bytes().to_bytes())) for key in keys]
    records = pd.concat(parts)
    found = records.groupby("path")["absmax"].agg(["size", "max"]).reset_index()
    rows = [
        (path, size, None if pd.isna(most) else most) for path, size, most in found.itertuples(index=False)
    ]
    assert rows == wanted
