"""The catalog without a database: a manifest and immutable Parquet segments, as they lie in an object store."""
